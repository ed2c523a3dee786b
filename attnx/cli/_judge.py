"""Judge what backends computed against the float64 reference, in pieces that fit in memory.

The reference holds every score in float64 a couple of dozen times over. Batch entries and groups
of heads do not depend on each other, so a large call is cut along them, and each piece is judged
for every backend before the next one is made. Where a gradient sums over such an axis (a bias
broadcast along it, sinks over the batch) the axis stays whole.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.cli._request import Request
from attnx.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

__all__ = ["RESULTS", "Verdict", "check_size", "judge_all"]

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
PIECE = 1 << 22  # scores judged at once, about a gigabyte of float64 intermediates
BYTES_PER_SCORE = 256


@dataclass
class Verdict:
    """The worst error of one result as a multiple of its bound, and where it stands."""

    ratio: float
    detail: str


def check_size(request: Request) -> None:
    """Raise ArgumentError when the reference would not fit in this machine's memory."""
    for _ in _pieces(request):
        break


def judge_all(
    request: Request, results: dict[str, Arrays], tiers: dict[str, str]
) -> dict[str, dict[str, Verdict]]:
    """Return, by backend and result name, how far each result lies from the reference.

    Args:
        request: the call.
        results: what each backend computed.
        tiers: `Capabilities.scores` of each backend; "float32" where it is not given.
    """
    from attnx_conformance.oracle import reference
    from attnx_conformance.tolerance import bounds, judge

    verdicts: dict[str, dict[str, Verdict]] = {name: {} for name in results}
    for name, arrays in results.items():
        _check_form(request, arrays, verdicts[name])
    if not results:
        return verdicts
    d_out = request.d_out()
    for at in _pieces(request):
        part = Request(at.cut_inputs(request.arrays), request.options)
        (q, k, v), options = part.call()
        exact = reference(q, k, v, d_out=at.cut(d_out, "out"), **options)
        limits = {
            tier: bounds(
                exact,
                q.dtype.name,
                scores=tier,
                bias_dtype=_dtype(part.arrays, "bias"),
                sinks_dtype=_dtype(part.arrays, "sinks"),
            )
            for tier in {tiers.get(backend, "float32") for backend in results}
        }
        for backend, arrays in results.items():
            limit = limits[tiers.get(backend, "float32")]
            for name in RESULTS:
                worst = verdicts[backend].get(name, Verdict(-1.0, ""))
                # What is infinitely wrong stays so; a wrong form could not even be cut.
                if name not in arrays or math.isinf(worst.ratio):
                    continue
                expected = getattr(exact, name)
                found = judge(at.cut(arrays[name], name), expected, getattr(limit, name))
                if found.ratio >= worst.ratio:
                    verdicts[backend][name] = Verdict(found.ratio, at.label + found.detail)
    return verdicts


def _dtype(arrays: Arrays, name: str) -> str | None:
    return arrays[name].dtype.name if name in arrays else None


def _check_form(request: Request, arrays: Arrays, verdict: dict[str, Verdict]) -> None:
    """A result of another shape or dtype than the call promises is wrong without a bound."""
    given = request.arrays
    q, v = given["q"], given["v"]
    wide = "float64" if q.dtype.name == "float64" else "float32"
    promised = {
        "out": ((*q.shape[:-1], v.shape[-1]), q.dtype.name),
        "lse": (q.shape[:-1], wide),
        **{f"d{name}": (array.shape, array.dtype.name) for name, array in given.items()},
    }
    for name, array in arrays.items():
        shape, dtype = promised[name]
        if array.shape != shape or array.dtype.name != dtype:
            got = f"{array.dtype.name} {array.shape}"
            verdict[name] = Verdict(math.inf, f"got {got}, expected {dtype} {shape}")


@dataclass(frozen=True)
class _Piece:
    """One batch entry (or all), and one group of heads (or all), of a call."""

    rank: int
    layout: str
    batch: tuple[int, ...] | None
    group: int | None
    g: int

    @property
    def label(self) -> str:
        """Where a piece's own indices start."""
        named = [f"batch {self.batch}"] if self.batch else []
        named += [f"key head {self.group}"] if self.group is not None else []
        return ", ".join(named) + ": " if named else ""

    def cut_inputs(self, arrays: Arrays) -> Arrays:
        """The piece of each input."""
        return {name: self.cut(array, name) for name, array in arrays.items()}

    def cut(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        """The piece of one array, by its role in the call."""
        if name == "lengths":
            return array if self.batch is None or array.ndim == 0 else np.asarray(array[self.batch])
        if name in ("sinks", "dsinks"):
            return array if self.group is None else array[self._heads(query=True)]
        on_grid = name in ("mask", "bias", "dbias")
        if on_grid and array.ndim == 2 and self.rank > 2:
            return array
        if self.batch is not None:
            sizes = array.shape[: len(self.batch)]
            array = array[tuple(b if n > 1 else 0 for b, n in zip(self.batch, sizes, strict=True))]
        if self.group is None:
            return array
        lead = 0 if self.batch is not None else self.rank - 3
        axis = lead + (1 if self.layout == "bshd" and not on_grid else 0)
        if on_grid and array.shape[axis] == 1:
            return array
        heads = self._heads(query=name not in ("k", "v", "dk", "dv"))
        return array[(slice(None),) * axis + (heads,)]

    def _heads(self, *, query: bool) -> slice:
        assert self.group is not None
        size = self.g if query else 1
        return slice(self.group * size, (self.group + 1) * size)


def _pieces(request: Request) -> Iterator[_Piece]:
    arrays, layout = request.arrays, request.options.layout
    q, k = arrays["q"], arrays["k"]
    rank = q.ndim
    head, row = (-2, -3) if layout == "bshd" else (-3, -2)
    Lq, Lk = (q.shape[row], k.shape[row]) if rank > 2 else (q.shape[0], k.shape[0])
    Hq, Hk = (q.shape[head], k.shape[head]) if rank > 2 else (1, 1)
    batch, g = q.shape[:-3], Hq // max(1, Hk)
    size = math.prod(batch) * Hq * Lq * Lk
    by_batch = bool(batch) and size > PIECE and _separable(arrays, batch, slice(0, len(batch)))
    by_batch = by_batch and "sinks" not in arrays
    size = size // math.prod(batch) if by_batch else size
    by_group = rank > 2 and Hk > 1 and size > PIECE and _separable(arrays, (Hq,), rank - 3)
    size = size // Hk if by_group else size
    _check_memory(size)
    for entry in np.ndindex(batch) if by_batch else (None,):
        for group in range(Hk) if by_group else (None,):
            yield _Piece(rank, layout, entry, group, g)


def _separable(arrays: Arrays, full: tuple[int, ...], axes: int | slice) -> bool:
    """Whether the gradient of bias is not summed over these axes."""
    bias = arrays.get("bias")
    if bias is None:
        return True
    if bias.ndim == 2:
        return False
    found = bias.shape[axes]
    return (found if isinstance(found, tuple) else (found,)) == full


def _check_memory(scores: int) -> None:
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        limit = 8 << 30
    need = scores * BYTES_PER_SCORE
    if need > limit:
        raise ArgumentError(
            f"the float64 reference of {scores:,} scores needs about {need / 2**30:.0f} GiB, more "
            f"than half of this machine's memory; compare fewer tokens or heads"
        )
