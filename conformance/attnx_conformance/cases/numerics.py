"""Scores and values that break a careless softmax: peaked, huge, tiny, flat (S5.3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Dense, Lengths, Window
from attnx_conformance._precision import limits

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import ascending, correlated, put, scaled, set_to, shifted

__all__ = ["CASES"]

LONG = BASE._replace(batch=(1,), Hq=2, Hk=1, D=4, Dv=3)
HEAD = BASE._replace(D=64, Dv=8)
RANDOM = Dense(np.arange(192 * 192).reshape(192, 192) % 5 != 1)


def _case(name: str, shape: Shape, *edits: Any, mask: Any = None, sinks: bool = False,
          ids: tuple[str, ...] = (), **options: Any) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, sinks=sinks, edits=edits, causal=options.get("causal", False))
    return Case(f"numbers-{name}", ("S5.2", "S5.3"), "numerics", inputs, options, ids=ids)


def _both_signs(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """One row holds scores of +720000 and -720000 (S5.3), in float16 too."""
    arrays["q"][...] = 300.0
    arrays["k"][...] = np.where(np.arange(ctx.shape.Lk) % 3 == 0, 300.0, -300.0)[:, None]


def _late_peak(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """The last key outweighs all others by far: earlier tiles must be rescaled to nothing."""
    arrays["k"][..., -1, :] = 6.0 * np.sign(arrays["q"].mean(axis=(-2, -3))[..., None, :])


def _subnormal(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """Values are small multiples of the smallest subnormal; they may flush to 0."""
    smallest = limits(ctx.dtype).subnormal
    arrays["v"][...] = smallest * ctx.rng.integers(-9, 9, arrays["v"].shape)


def _cancelling(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """Products of 1e4 that cancel to scores near 0."""
    half = ctx.shape.D // 2
    arrays["q"][...] = 1.0 + 0.1 * arrays["q"]
    arrays["k"][..., :half] = 1e4
    arrays["k"][..., half:] = -1e4


CASES = (
    _case("peaked", square(33, D=16), scaled(q=30.0)),
    _case("peaked-causal", square(65, D=16), scaled(q=30.0), causal=True),
    _case("peaked-long", LONG._replace(Lq=70, Lk=600), scaled(q=20.0)),
    _case("peaked-backward", square(257, batch=(1,), Hq=2, Hk=1, D=16), scaled(q=15.0, k=2.0)),
    _case("peaked-softcap", square(33), scaled(q=30.0), softcap=5.0),
    _case("300-each", HEAD, set_to(q=300.0, k=300.0), ids=("L3",)),
    _case("300-opposed", HEAD, set_to(q=300.0, k=-300.0), ids=("L3",)),
    _case("300-both-ways", HEAD, _both_signs, ids=("L3",)),
    _case("300-random-signs", HEAD, scaled(q=100.0, k=100.0), ids=("L3",)),
    _case("300-causal", HEAD._replace(Lq=11), set_to(q=300.0, k=-300.0), causal=True, ids=("L3",)),
    _case("300-long", LONG._replace(D=64, Lk=600), _both_signs, ids=("L3",)),
    _case("raw-beyond-float16", HEAD, set_to(q=60.0, k=60.0), scale=0.01, ids=("L3",)),
    _case("all-very-negative", BASE, shifted(q=40.0, k=-40.0)),
    _case("all-very-negative-long", LONG._replace(Lq=70, Lk=600), shifted(q=40.0, k=-40.0)),
    _case("masked-beats-live", BASE, put("k", (..., 10, slice(None)), 200.0),
          shifted(q=12.0), mask=Lengths(10), ids=("B14",)),
    _case("live-beats-masked", BASE, put("k", (..., 0, slice(None)), 200.0), shifted(q=12.0),
          mask=Lengths(5)),
    _case("late-peak", LONG._replace(Lq=9, Lk=600), _late_peak),
    _case("ascending", LONG._replace(Lq=9, Lk=1100), ascending),
    _case("ascending-softcap", LONG._replace(Lq=9, Lk=600), ascending, softcap=3.0),
    _case("descending", LONG._replace(Lq=9, Lk=600), ascending, scaled(q=-1.0)),
    _case("large-mean-values", square(65), shifted(v=1000.0)),
    _case("large-mean-values-long", LONG._replace(Lq=9, Lk=2049), shifted(v=300.0)),
    _case("large-values", BASE, scaled(v=1e4)),
    _case("large-cotangent", BASE, scaled(d_out=3e3)),
    _case("tiny-values", BASE, scaled(v=1e-6)),
    _case("subnormal-values", BASE, _subnormal),
    _case("tiny-queries", BASE, scaled(q=1e-6)),
    _case("constant-values", square(65), set_to(v=0.7)),
    _case("uniform-long", LONG._replace(Lq=3, Lk=4097), set_to(q=0.0)),
    _case("uniform-long-equal", LONG._replace(Lq=3, Lk=4097), set_to(q=0.0, v=1.0)),
    _case("uniform-many-queries", LONG._replace(Lq=2049, Lk=3), set_to(q=0.0, d_out=1.0)),
    _case("one-key-takes-all", BASE, put("k", (..., 4, slice(None)), 50.0), shifted(q=3.0)),
    _case("cancelling", BASE._replace(D=16), _cancelling),
    _case("correlated", square(130, D=32), correlated, ids=("L8", "L9")),
    _case("correlated-causal", square(130, D=32), correlated, causal=True, ids=("L8",)),
    _case("scale-100", square(33), scale=100.0),
    _case("scale-tiny", BASE, scale=1e-8),
    _case("scale-negative-peaked", square(33), scaled(q=10.0), scale=-1.0),
    _case("head-of-256", BASE._replace(D=256), scaled(q=2.0)),
    # L mod 128 is 64, with a mask and very negative lse (a fault of blocked backward passes).
    _case("negative-lse-192", square(192, batch=(1,), Hq=2, Hk=1), shifted(q=8.0, k=-8.0),
          mask=RANDOM, ids=("N6",)),
    _case("positive-lse-192", square(192, batch=(1,), Hq=2, Hk=1), shifted(q=8.0, k=8.0),
          mask=RANDOM, ids=("N6",)),
    _case("negative-lse-window", square(192, batch=(1,), Hq=2, Hk=1), shifted(q=8.0, k=-8.0),
          mask=Window(50, 3)),
    _case("peaked-sinks", square(33), scaled(q=30.0), sinks=True),
    _case("negative-scores-sinks", BASE, shifted(q=8.0, k=-8.0), sinks=True),
)  # fmt: skip
