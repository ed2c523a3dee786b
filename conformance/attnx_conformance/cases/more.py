"""What the planted faults found missing: each catches a fault that fewer than two others did.

A decoding step with bias or sinks, a call of one pair, masks whose period no tile width divides,
a sink above every score, NaN cotangents under more masks than one, masks over many scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Lengths, Predicate, Segments, Window

from ._case import BASE, DTYPES, Case, Context, Recipe, Shape, square
from ._edits import poison, put, scaled, set_to, shifted, spike

__all__ = ["CASES"]

NAN, INF = np.nan, np.inf
STEP = BASE._replace(Lq=1, Lk=65)
NARROW: dict[str, Any] = {"batch": (1,), "Hq": 2, "Hk": 1, "D": 4, "Dv": 3}
WIDE = BASE._replace(Lk=300, **NARROW)
TALL = BASE._replace(Lq=300, Lk=9, **NARROW)


def _bias(*axes: int) -> Any:
    """A normal bias with the axes of `(*B, Hq, Lq, Lk)` that are in `axes` cut to 1."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in axes else n for axis, n in enumerate(full)))

    return draw


def _random(ctx: Context) -> Any:
    return ctx.rng.random(ctx.shape.grid.full) < 0.6


def _late(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """Scores of -720000, and one of +720000 at the end."""
    arrays["q"][...] = 300.0
    arrays["k"][...] = -300.0
    arrays["k"][..., -1, :] = 300.0


def _hides(ctx: Context) -> Any:
    return np.where(ctx.rng.random(ctx.shape.grid.full) < 0.7, 0.0, -INF)


def _case(
    name: str, profile: str, shape: Shape, *edits: Any, mask: Any = None, bias: Any = None,
    sinks: bool = False, sinks_dtype: str | None = None, clauses: tuple[str, ...],
    ids: tuple[str, ...] = (), needs: tuple[str, ...] = (), **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(
        shape, mask=mask, bias=bias, sinks=sinks, sinks_dtype=sinks_dtype, edits=edits,
        causal=options.get("causal", False),
    )  # fmt: skip
    dtypes = DTYPES if sinks_dtype is None else ("float16", "bfloat16", "float32")
    return Case(name, clauses, profile, inputs, options, needs=needs, ids=ids, dtypes=dtypes)


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
    _case("sinks-float32-causal", "masks", square(33), sinks=True, sinks_dtype="float32",
          causal=True, clauses=("S2.3", "S2.4")),
    _case("sinks-float32-one-query", "masks", STEP, sinks=True, sinks_dtype="float32",
          clauses=("S2.3", "S2.4")),
    _case("sinks-above-all-causal", "numerics", square(33), put("sinks", slice(0, 3), 120.0),
          shifted(q=4.0, k=-4.0), sinks=True, causal=True, clauses=("S2.3", "S5.3")),
)  # fmt: skip

_TILES = (
    _case("predicate-period-7", "masks", square(70),
          mask=Predicate(lambda b, h, i, j: (3 * i + j + h) % 7 > 2), clauses=("S3.6",)),
    _case("predicate-period-5", "masks", BASE._replace(Lq=9, Lk=300),
          mask=Predicate(lambda b, h, i, j: (i + j + b) % 5 != 0), clauses=("S3.6",)),
    _case("predicate-period-9", "masks", WIDE,
          mask=Predicate(lambda b, h, i, j: (i + 2 * j + 3 * h) % 9 > 3), clauses=("S3.6",)),
    _case("bias-many-queries", "masks", TALL, bias=_bias(0), clauses=("S2", "S6.3")),
    _case("bias-many-queries-keys", "masks", TALL, bias=_bias(0, 1), causal="top_left",
          clauses=("S2", "S3.1")),
)  # fmt: skip

# Light, and past a tile of 128 and of 256 along one axis: a pointer that is not moved, a tile that
# is skipped, a sum that is taken once a tile.
_WIDE = (
    _case("wide-mask", "masks", WIDE, mask=_random, clauses=("S3.2",)),
    _case("wide-mask-nan", "masks", WIDE, spike(NAN), mask=_random, clauses=("S4.2",),
          needs=("isolation",)),
    _case("tall-mask", "masks", TALL, mask=_random, clauses=("S3.2",)),
    _case("wide-bias", "masks", WIDE, bias=_bias(0), clauses=("S2", "S6.3")),
    _case("wide-bias-hides", "masks", WIDE, bias=_hides, clauses=("S3.4",)),
    _case("wide-sinks", "masks", WIDE, sinks=True, clauses=("S2.3",)),
    _case("wide-sinks-causal", "masks", WIDE, sinks=True, causal="bottom_right",
          clauses=("S2.3", "S3.5")),
    _case("wide-causal", "masks", WIDE, causal="bottom_right", clauses=("S3.5",)),
    _case("wide-causal-spike", "masks", WIDE, spike(1e4), causal="bottom_right",
          clauses=("S3.5",)),
    _case("tall-causal", "masks", TALL, causal="bottom_right", clauses=("S3.5", "S3.7")),
    _case("causal-130", "masks", square(130, **NARROW), causal=True, clauses=("S3.5",)),
    _case("causal-130-spike", "masks", square(130, **NARROW), spike(1e4), causal=True,
          clauses=("S3.5",)),
    _case("causal-199", "masks", square(199, **NARROW), causal=True, clauses=("S3.5",)),
    _case("wide-lengths", "masks", WIDE._replace(batch=(4,)), poison(),
          mask=Lengths(np.array([0, 127, 129, 257])), clauses=("S3.6", "S3.7", "S4.1")),
    _case("wide-window", "masks", WIDE, mask=Window(130, 0, "bottom_right"), clauses=("S3.6",)),
    # All scores but the last are so low that the first tile's maximum overflows against it.
    _case("numbers-300-late", "numerics", WIDE._replace(D=64), _late, clauses=("S5.3",)),
    _case("numbers-300-late-sinks", "numerics", WIDE._replace(D=64), _late, sinks=True,
          clauses=("S2.3", "S5.3")),
)  # fmt: skip

_SUMS = (
    _case("gradient-many-queries", "gradients", TALL._replace(Lq=1500, Lk=5),
          set_to(q=0.0, d_out=1.0), clauses=("S5.2", "S6.1")),
    _case("gradient-many-queries-causal", "gradients", TALL._replace(Lq=1300, Lk=2),
          set_to(q=0.0, d_out=1.0), causal="top_left", clauses=("S5.2", "S6.1")),
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

# tanh by way of an exponential or a sigmoid is good to the digits of 1, not to those of the score.
_CAPS = (
    _case("softcap-far-above", "numerics", BASE, softcap=3e4, clauses=("S2", "S5.4")),
    _case("softcap-far-above-causal", "numerics", square(33), softcap=3e4, causal=True,
          clauses=("S2", "S5.4")),
)  # fmt: skip

# More than a million scores, without lse: what a kernel does not spell out as one mask, it cuts
# into parts, and here a range of keys, a document, a window's rim is taken for another one.
MANY = Shape(batch=(2,), Hq=4, Hk=2, Lq=390, Lk=390, D=8, Dv=8)


def _many(name: str, mask: Any, **options: Any) -> Case:
    return Case(
        f"many-{name}", ("S3.1", "S5.4"), "masks", Recipe(MANY, mask=mask, d_lse=False), options,
        compare=("out", "dq", "dk", "dv"), dtypes=("float16", "float32"),
    )  # fmt: skip


_IDS = np.repeat(np.arange(5), [100, 3, 130, 57, 100])
_MANY = (
    _many("padded", Lengths(np.array([170, 170]))),
    _many("padded-unevenly", Lengths(np.array([1, 330]), np.array([390, 40]))),
    _many("documents", Segments(_IDS, _IDS)),
    _many("window", Window(30, 5)),
    _many("dense", lambda ctx: ctx.rng.random((1, 1, 390, 390)) < 0.3),
    _many("dense-documents", np.equal.outer(_IDS, _IDS), causal=True),
)

CASES = (
    *_ONE_PAIR,
    *_STEPS,
    *_SINKS,
    *_TILES,
    *_WIDE,
    *_SUMS,
    *_COTANGENTS,
    *_NEGATIVE,
    *_CAPS,
    *_MANY,
)
