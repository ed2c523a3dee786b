"""What the planted faults found missing: each catches a fault that fewer than two others did.

A decoding step with bias or sinks, a call of one pair, masks whose period no tile width divides,
a sink above every score, NaN cotangents under more masks than one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Lengths, Predicate, Window

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import put, scaled, shifted

__all__ = ["CASES"]

NAN, INF = np.nan, np.inf
STEP = BASE._replace(Lq=1, Lk=65)
TALL = BASE._replace(batch=(1,), Hq=2, Hk=1, Lq=300, Lk=9, D=4, Dv=3)


def _bias(*axes: int) -> Any:
    """A normal bias with the axes of `(*B, Hq, Lq, Lk)` that are in `axes` cut to 1."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in axes else n for axis, n in enumerate(full)))

    return draw


def _hides(ctx: Context) -> Any:
    return np.where(ctx.rng.random(ctx.shape.grid.full) < 0.7, 0.0, -INF)


def _case(
    name: str, profile: str, shape: Shape, *edits: Any, mask: Any = None, bias: Any = None,
    sinks: bool = False, clauses: tuple[str, ...], ids: tuple[str, ...] = (),
    needs: tuple[str, ...] = (), **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, bias=bias, sinks=sinks, edits=edits,
                    causal=options.get("causal", False))  # fmt: skip
    return Case(name, clauses, profile, inputs, options, needs=needs, ids=ids)


# Where out has v's shape and v's values, a kernel may return v itself.
_ONE_PAIR = (
    _case("one-pair", "forward", BASE._replace(Lq=1, Lk=1, Hq=3, Hk=3), clauses=("S1.4", "S7")),
    _case("one-pair-2d", "forward", BASE._replace(batch=None, Hq=1, Hk=1, Lq=1, Lk=1),
          clauses=("S1.4", "S7")),
    _case("one-pair-causal", "forward", BASE._replace(Lq=1, Lk=1, Hq=2, Hk=2), causal=True,
          clauses=("S1.4", "S3.5")),
)  # fmt: skip

_STEPS = (
    _case("bias-one-query-keys", "masks", STEP, bias=_bias(1, 2), clauses=("S2", "S3.3"),
          ids=("G11",)),
    _case("bias-one-query-hides", "masks", STEP, bias=_hides, clauses=("S3.4",), ids=("G11",)),
    _case("bias-one-query-lengths", "masks", STEP, bias=_bias(0), mask=Lengths(np.array([17, 65])),
          clauses=("S3.1",), ids=("G11",)),
    _case("sinks-one-query-causal", "masks", STEP, sinks=True, causal="bottom_right",
          clauses=("S2.3",)),
    _case("sinks-one-query-bias", "masks", STEP, sinks=True, bias=_bias(0), clauses=("S2.3",)),
)  # fmt: skip

# A sink above every score must move the maximum: exp(200) overflows a float32.
_SINKS = (
    _case("sinks-above-all", "numerics", BASE, put("sinks", slice(0, 3), 200.0), sinks=True,
          clauses=("S2.3", "S5.3")),
    _case("sinks-above-all-causal", "numerics", square(33), put("sinks", slice(0, 3), 120.0),
          shifted(q=4.0, k=-4.0), sinks=True, causal=True, clauses=("S2.3", "S5.3")),
)  # fmt: skip

_TILES = (
    _case("predicate-period-7", "masks", square(70),
          mask=Predicate(lambda b, h, i, j: (3 * i + j + h) % 7 > 2), clauses=("S3.6",)),
    _case("predicate-period-5", "masks", BASE._replace(Lq=9, Lk=300),
          mask=Predicate(lambda b, h, i, j: (i + j + b) % 5 != 0), clauses=("S3.6",)),
    _case("bias-many-queries", "masks", TALL, bias=_bias(0), clauses=("S2", "S6.3")),
    _case("bias-many-queries-keys", "masks", TALL, bias=_bias(0, 1), causal="top_left",
          clauses=("S2", "S3.1")),
)  # fmt: skip

_COTANGENTS = (
    _case("live-cotangent-nan-window", "numerics", square(33),
          put("d_out", (1, 4, 20, 2), NAN), mask=Window(3, 2), clauses=("S6.4",),
          needs=("isolation",)),
    _case("live-cotangent-nan-mask", "numerics", BASE, put("d_out", (1, 4, 3, 2), NAN),
          mask=np.arange(99).reshape(9, 11) % 3 != 0, clauses=("S6.4",), needs=("isolation",)),
    _case("live-query-nan-window", "numerics", square(33), put("q", (0, 3, 12, 1), NAN),
          mask=Window(3, 2), clauses=("S4.3", "S6.4"), needs=("isolation",)),
)  # fmt: skip

# The greatest unscaled score is the least scaled one.
_NEGATIVE = (
    _case("numbers-scale-negative-causal", "numerics", square(65), scaled(q=20.0), scale=-1.5,
          causal=True, clauses=("S2", "S5.3")),
    _case("numbers-scale-negative-long", "numerics", BASE._replace(Lk=600), scaled(q=20.0),
          scale=-1.0, clauses=("S2", "S5.3")),
)  # fmt: skip

CASES = (*_ONE_PAIR, *_STEPS, *_SINKS, *_TILES, *_COTANGENTS, *_NEGATIVE)
