"""What the implementations share: how a workload's mask is spelled, and what would not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnx_bench.implementation import NotApplicable
from attnx_bench.workload import Arrays, Workload

__all__ = [
    "Array", "Spelled", "dense", "named", "refuse", "refuse_float64", "refuse_scores", "spelled",
    "square_frame", "to_bshd",
]  # fmt: skip

Array = NDArray[Any]

LIMIT = 2 << 30
"""Bytes that an implementation may hold in one array of Lq x Lk before it is left out."""

GIB = float(1 << 30)


class Spelled(NamedTuple):
    """A workload's mask for a function that knows `is_causal` and dense arrays.

    Attributes:
        causal: whether the flag says it all.
        mask: boolean, True = visible, with four axes; or None.
        bias: added to the scores, or None.
    """

    causal: bool
    mask: Array | None
    bias: Array | None


def refuse(workload: Workload, **lacks: str) -> None:
    """Raise `NotApplicable` where a workload asks for what an implementation lacks.

    Args:
        workload: what is asked for.
        lacks: by an attribute of the workload, why it cannot be had.
    """
    for name, why in lacks.items():
        if getattr(workload, name):
            raise NotApplicable(why)


def refuse_float64(workload: Workload) -> None:
    """Raise `NotApplicable` for float64, of a function that computes in float32 all the same."""
    if workload.dtype == "float64":
        raise NotApplicable("computes float64 in float32")


def refuse_scores(workload: Workload) -> None:
    """Raise `NotApplicable` where all scores at once, in float32, are too many."""
    size = 4 * workload.B * workload.Hq * workload.Lq * workload.Lk
    if size > LIMIT:
        raise NotApplicable(f"holds all scores: {size / GIB:.1f} GiB")


def square_frame(workload: Workload) -> bool:
    """Whether query i stands at position i, as `is_causal` and local windows have it."""
    return workload.causal != "bottom_right" or workload.Lq == workload.Lk


def spelled(workload: Workload, arrays: Arrays, *, apart: bool) -> Spelled:
    """The mask as a user without mask objects spells it, made once and outside what is timed.

    Args:
        workload: what is asked for.
        arrays: its operands.
        apart: whether the function takes a mask and a bias at a time; if not, the mask goes into
            the bias as -inf.
    """
    flag = workload.causal is not False and square_frame(workload) and not workload.masked
    bias = arrays.bias
    if bias is None or apart:
        return Spelled(flag, None if flag else dense(workload), bias)
    shown = dense(workload)
    if shown is not None:
        bias = np.where(shown, bias, bias.dtype.type(-np.inf))
    return Spelled(False, None, bias)


def dense(workload: Workload) -> Array | None:
    """`workload.dense`, or `NotApplicable` where it would be too large."""
    batch = workload.B if workload.lengths is not None else 1
    size = batch * workload.Lq * workload.Lk
    if size > LIMIT:
        raise NotApplicable(f"needs a dense mask: {size / GIB:.1f} GiB")
    return workload.dense


def to_bshd(array: Array) -> Array:
    """The same operand with the sequence before the heads, laid out so in memory."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2))


def named(made: Iterable[Array | None], *, bshd: bool = False) -> dict[str, Array]:
    """What a run gave in the order out, lse, dq, dk, dv, by name and in the layout bhsd."""
    names = ("out", "lse", "dq", "dk", "dv")
    found = {name: array for name, array in zip(names, made, strict=False) if array is not None}
    return {name: np.swapaxes(a, 1, 2) for name, a in found.items()} if bshd else found
