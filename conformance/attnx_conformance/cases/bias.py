"""Bias at every rank, with -inf and with large finite values that are not; sinks (S2, S3.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Dense, Lengths, Window
from attnx_conformance._precision import limits

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import poison, put, shifted, spike

__all__ = ["CASES"]

NAN, INF = np.nan, np.inf
LONG = square(600, batch=(1,), Hq=2, Hk=1, D=4, Dv=3)


def _normal(*axes: int) -> Any:
    """A normal bias with the axes of `(*B, Hq, Lq, Lk)` that are in `axes` cut to 1."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in axes else n for axis, n in enumerate(full)))

    return draw


def _plain(ctx: Context) -> Any:
    return ctx.normal(ctx.shape.Lq, ctx.shape.Lk)


def _filled(value: float | None, where: Any, *axes: int) -> Any:
    """A normal bias with one value at an index; None stands for the dtype's lowest finite one."""

    def draw(ctx: Context) -> Any:
        bias = _normal(*axes)(ctx)
        bias[where] = -limits(ctx.dtype).largest if value is None else value
        return bias

    return draw


def _hides(keep: float, *axes: int) -> Any:
    """A bias that is 0 or -inf at random: a mask in the old spelling."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(full))
        return np.where(ctx.rng.random(shape) < keep, 0.0, -INF)

    return draw


def _upper(ctx: Context) -> Any:
    return np.where(np.tri(ctx.shape.Lq, ctx.shape.Lk, dtype=bool), 0.0, -INF)


def _alibi(ctx: Context) -> Any:
    slopes = 2.0 ** (-8.0 * np.arange(1, ctx.shape.Hq + 1) / ctx.shape.Hq)
    distance = np.arange(ctx.shape.Lk) - np.arange(ctx.shape.Lq)[:, None]
    return slopes[:, None, None] * distance[None, None]


def _case(
    name: str, shape: Shape, bias: Any, *clauses: str, mask: Any = None, sinks: bool = False,
    edits: tuple[Any, ...] = (), ids: tuple[str, ...] = (), needs: tuple[str, ...] = (),
    bias_dtype: str | None = None, sinks_dtype: str | None = None, dtypes: Any = None,
    **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(
        shape, mask=mask, bias=bias, bias_dtype=bias_dtype, sinks=sinks, sinks_dtype=sinks_dtype,
        causal=options.get("causal", False), edits=edits,
    )  # fmt: skip
    only = {} if dtypes is None else {"dtypes": dtypes}
    return Case(name, clauses, "masks", inputs, options, needs=needs, ids=ids, **only)


NOT_DOUBLE = ("float16", "bfloat16", "float32")

_RANKS = (
    _case("bias-2d", BASE, _plain, "S2", "S3.3", ids=("D3", "D5", "D6")),
    _case("bias-full", BASE, _normal(), "S2", "S6.3"),
    _case("bias-keys", BASE, _normal(1, 2), "S3.3", "S6.3", ids=("D4", "D5")),
    _case("bias-heads", BASE, _normal(0), "S3.3", "S6.3"),
    _case("bias-heads-only", BASE, _normal(0, 2, 3), "S3.3", "S6.3", ids=("D11", "I8")),
    _case("bias-queries", BASE, _normal(0, 1, 3), "S3.3", "S6.3", ids=("D17", "I8")),
    _case("bias-batch", BASE, _normal(1), "S3.3", "S6.3", ids=("D10", "D21")),
    _case("bias-of-one", BASE, _normal(0, 1, 2, 3), "S3.3", "S6.3", ids=("I8",)),
    _case("bias-heads-and-keys", BASE, _normal(0, 2), "S3.3", "S6.3"),
    _case("bias-two-batch-axes", BASE._replace(batch=(2, 3)), _normal(1, 2), "S3.3", "S6.3"),
    _case("bias-no-batch", BASE._replace(batch=()), _normal(), "S3.3", "S6.3"),
    _case("bias-one-head", BASE._replace(batch=None, Hq=1, Hk=1), _normal(), "S3.3"),
    _case("bias-batch-as-heads", BASE._replace(Hq=2, Hk=1), _normal(1), "S3.3", ids=("D13",)),
    _case("bias-one-query", BASE._replace(Lq=1, Lk=33), _normal(0), "S3.3", ids=("G11",)),
    _case("bias-long", LONG, _normal(0), "S2", "S6.3"),
    _case("bias-float32", BASE, _normal(0), "S2.4", bias_dtype="float32", dtypes=NOT_DOUBLE,
          ids=("D19", "L7")),
    _case("bias-float32-keys", BASE, _normal(1, 2), "S2.4", "S6.3", bias_dtype="float32",
          dtypes=NOT_DOUBLE, ids=("D19", "L7")),
    _case("bias-alibi", BASE, _alibi, "S2", ids=("G8", "G9", "G10", "G11")),
)  # fmt: skip

_HIDING = (
    _case("bias-hides", BASE, _hides(0.6), "S3.4", ids=("A9", "A10")),
    _case("bias-hides-keys", BASE, _hides(0.7, 1, 2), "S3.4", ids=("D5",)),
    _case("bias-hides-poison", BASE, _hides(0.5, 1, 2), "S3.4", "S4.1", edits=(poison(),)),
    _case("bias-hides-spike", BASE, _hides(0.5), "S3.4", edits=(spike(1e4),)),
    _case("bias-hides-nan", BASE, _hides(0.5), "S3.4", "S4.2", edits=(spike(NAN),),
          needs=("isolation",), ids=("B10",)),
    _case("bias-hides-causal", square(9), _upper, "S3.4", ids=("B4",)),
    _case("bias-hides-row", BASE, _filled(-INF, (..., 3, slice(None))), "S3.4", "S3.7",
          ids=("A9", "A10")),
    _case("bias-hides-all", BASE, _filled(-INF, ...), "S3.4", "S3.7", edits=(poison(),)),
    _case("bias-hides-softcap", BASE, _hides(0.6), "S3.4", softcap=2.0),
    _case("bias-hides-float32", BASE, _hides(0.6), "S3.4", "S2.4", bias_dtype="float32",
          dtypes=NOT_DOUBLE),
    _case("bias-hides-long", LONG, _hides(0.5, 0, 1), "S3.4"),
    _case("bias-lowest-columns", BASE._replace(Lk=21), _filled(None, (..., slice(0, 8))), "S3.4",
          ids=("A5", "A14")),
    _case("bias-lowest-row", BASE, _filled(None, (..., 3, slice(None))), "S3.4",
          edits=(shifted(v=100.0),), ids=("A14",)),
    _case("bias-lowest-float32", BASE, _filled(-3.4028235e38, (..., 3, slice(None))), "S3.4",
          edits=(shifted(v=100.0),), bias_dtype="float32", dtypes=NOT_DOUBLE, ids=("A14",)),
    _case("bias-lowest-causal", square(9), _filled(None, (..., slice(0, 4))), "S3.4", causal=True,
          edits=(shifted(v=100.0),), ids=("A14", "A5")),
    _case("bias-minus-3e4", BASE, _filled(-3e4, (..., slice(0, 5))), "S3.4", "S5.3"),
    _case("bias-minus-3e4-row", BASE, _filled(-3e4, (..., 2, slice(None))), "S3.4", "S5.3"),
    _case("bias-minus-1e9", BASE, _filled(-1e9, (..., slice(0, 5)), 1, 2), "S3.4",
          bias_dtype="float32", dtypes=NOT_DOUBLE, ids=("A12",)),
    _case("bias-minus-1e9-row", BASE, _filled(-1e9, (..., 4, slice(None))), "S3.4",
          edits=(shifted(v=100.0),),
          bias_dtype="float32", dtypes=NOT_DOUBLE, ids=("A12", "A16")),
    _case("bias-plus-1e4", BASE, _filled(1e4, (..., 7)), "S2", "S5.3"),
)  # fmt: skip

_COMBINED = (
    _case("bias-causal", square(9), _normal(0), "S2", "S3.1", causal=True, ids=("D3",)),
    _case("bias-lengths", BASE, _normal(1, 2), "S3.1", mask=Lengths(np.array([4, 0])),
          edits=(poison(),)),
    _case("bias-window", square(33), _normal(0), "S3.1", mask=Window(3, 1)),
    _case("bias-mask", BASE, _normal(), "S3.1", mask=np.arange(99).reshape(9, 11) % 3 != 0),
    _case("bias-and-mask-leave-nothing", BASE, _filled(-INF, (..., slice(0, 6))), "S3.1", "S3.7",
          mask=Lengths(6), edits=(poison(),), ids=("A15", "A20")),
    _case("bias-softcap", BASE, _normal(0), "S2", softcap=1.5),
    _case("bias-negative-scale", BASE, _normal(0), "S2", scale=-1.0),
    _case("bias-zero-scale", BASE, _normal(), "S2", scale=0.0),
    _case("bias-nan-in-one-row", BASE, _filled(NAN, (0, 1, 3, 2)), "S3.4", ids=("B10",)),
    _case("bias-infinite-in-one-row", BASE, _filled(INF, (0, 1, 3, 2)), "S3.4"),
    _case("bias-nan-hidden", BASE, _filled(NAN, (..., 10)), "S3.4", "S2.1", mask=Lengths(10),
          ids=("B10",)),
    _case("bias-infinite-hidden", BASE, _filled(INF, (..., 10)), "S3.4", "S2.1",
          mask=Lengths(10)),
    _case("bias-nan-hidden-causal", square(9), _filled(NAN, (..., 2, 5)), "S3.4", "S2.1",
          causal=True, ids=("B10",)),
    _case("bias-cross-causal", BASE, _normal(0), "S3.1", mask=Causal("bottom_right")),
    _case("bias-everything", square(33), _normal(0), "S2", "S3.1", sinks=True, softcap=2.0,
          scale=0.7, mask=Dense(np.arange(33 * 33).reshape(33, 33) % 7 != 0)
          & Lengths(np.array([31, 17])), causal=True),
)  # fmt: skip

_SINKS = (
    _case("sinks", BASE, None, "S2.3", "S6.3", sinks=True, ids=("G7",)),
    _case("sinks-causal", square(33), None, "S2.3", sinks=True, causal=True),
    _case("sinks-bias", BASE, _normal(0), "S2.3", sinks=True),
    _case("sinks-softcap", BASE, None, "S2.3", sinks=True, softcap=1.5),
    _case("sinks-float32", BASE, None, "S2.4", sinks=True, sinks_dtype="float32",
          dtypes=NOT_DOUBLE),
    _case("sinks-window", square(65), None, "S2.3", sinks=True, mask=Window(7, 0)),
    _case("sinks-long", LONG, None, "S2.3", sinks=True, causal=True),
    _case("sinks-large", BASE, None, "S2.3", "S5.3", sinks=True,
          edits=(put("sinks", slice(0, 3), 40.0),)),
    _case("sinks-small", BASE, None, "S2.3", sinks=True,
          edits=(put("sinks", slice(0, 3), -60.0),)),
    _case("sinks-one-query", BASE._replace(Lq=1, Lk=33), None, "S2.3", sinks=True),
    _case("sinks-empty-rows", BASE, None, "S2.3", "S3.7", "S6.3", sinks=True,
          mask=Lengths(np.array([0, 7]), np.array([9, 4])), edits=(poison(),)),
    _case("sinks-empty-causal", BASE._replace(Lq=13, Lk=5), None, "S3.7", sinks=True,
          causal="bottom_right", edits=(poison(),)),
    _case("sinks-no-keys", BASE._replace(Lk=0), None, "S3.7", "S6.3", sinks=True),
    _case("sinks-no-batch", BASE._replace(batch=()), None, "S2.3", sinks=True),
    _case("sinks-one-head", BASE._replace(batch=None, Hq=1, Hk=1), None, "S2.3", sinks=True),
)  # fmt: skip

CASES = (*_RANKS, *_HIDING, *_COMBINED, *_SINKS)
