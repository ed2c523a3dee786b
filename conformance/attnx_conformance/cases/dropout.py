"""Dropout: the very elements of S9 are dropped, in the output and in every gradient.

Which they are is arithmetic, so a case has one answer, as without dropout. Seeds and thresholds
were chosen where they matter: a lane that equals the threshold stands in the call, and so does a
lane of 0 where p drops nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Prefix, Segments, Window
from attnx.plugin import Dropout

from ._case import BASE, Case, Context, Recipe, square
from ._edits import onehot, poison, put, set_to
from .more import NARROW, TALL, WIDE

__all__ = ["CASES"]

HALF = Dropout(0.5, 5)
THIRD = Dropout(0.3, 0xDEADBEEF_87654321)
LANE = 1 / 65536


def _bias(*axes: int) -> Any:
    """A normal bias with the axes of `(*B, Hq, Lq, Lk)` that are in `axes` cut to 1."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in axes else n for axis, n in enumerate(full)))

    return draw


def _hides(ctx: Context) -> Any:
    return np.where(ctx.rng.random(ctx.shape.grid.full) < 0.7, 0.0, -np.inf)


def _case(
    name: str, dropout: Dropout, shape: Any = BASE, *edits: Any, profile: str = "forward",
    mask: Any = None, bias: Any = None, sinks: bool = False, d_lse: bool = True,
    clauses: tuple[str, ...] = ("S9",), ids: tuple[str, ...] = (), **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, bias=bias, sinks=sinks, d_lse=d_lse, edits=edits,
                    causal=options.get("causal", False))  # fmt: skip
    options["dropout"] = dropout
    return Case(f"dropout-{name}", clauses, profile, inputs, options, ids=ids)


_SHAPES = (
    _case("half", HALF, ids=("M3", "M4")),
    _case("third", THIRD, ids=("M4",)),
    _case("onehot", HALF, square(33), onehot),
    _case("square", THIRD, square(70)),
    _case("one-head-2d", HALF, BASE._replace(batch=None, Hq=1, Hk=1)),
    _case("batch-of-two-axes", HALF, BASE._replace(batch=(3, 2))),
    _case("batch-of-two-axes-causal", THIRD, square(33, batch=(2, 3), Hq=3, Hk=1), causal=True),
    _case("own-key-heads", HALF, BASE._replace(Hk=6)),
    _case("one-key-head", THIRD, BASE._replace(Hq=5, Hk=1)),
    _case("one-query", HALF, BASE._replace(Lq=1, Lk=65)),
    _case("one-query-causal", THIRD, BASE._replace(Lq=1, Lk=70), causal="bottom_right"),
    _case("one-pair", HALF, BASE._replace(Lq=1, Lk=1, Hq=5, Hk=5)),
    _case("eight-keys", HALF, BASE._replace(Lk=8)),
    _case("keys-past-a-counter", HALF, BASE._replace(Lq=5, Lk=17)),
    _case("wide", THIRD, WIDE),
    _case("tall", THIRD, TALL),
    _case("edge-129x130", HALF, square(129, **NARROW)._replace(Lk=130)),
    _case("scale-negative", HALF, scale=-0.7),
    _case("assume-finite", THIRD, square(33), causal=True, assume_finite=True,
          clauses=("S9", "S4.4")),
)  # fmt: skip

_MASKS = (
    _case("causal", HALF, square(33), causal=True, profile="masks"),
    _case("causal-lengths", THIRD, square(33), poison(), causal=True,
          mask=Lengths(np.array([33, 19])), profile="masks", clauses=("S9", "S4.1")),
    _case("bottom-right", HALF, BASE._replace(Lq=9, Lk=40), causal="bottom_right",
          profile="masks"),
    _case("lengths-poison", THIRD, BASE, poison(), mask=Lengths(np.array([4, 11])),
          profile="masks", clauses=("S9", "S4.1")),
    _case("window-lengths-poison", HALF, square(70), poison(np.inf), profile="masks",
          mask=Window(20, 3) & Lengths(60), clauses=("S9", "S4.1")),
    _case("prefix", HALF, square(33), mask=Causal() | Prefix(12), profile="masks"),
    _case("segments", THIRD, square(70), mask=Segments(np.arange(70) // 23, np.arange(70) // 23),
          profile="masks"),
    _case("dense", HALF, mask=np.arange(99).reshape(9, 11) % 3 != 1, profile="masks"),
    _case("bias", HALF, bias=_bias(0), profile="masks"),
    _case("bias-keys", THIRD, bias=_bias(0, 1, 2), profile="masks", clauses=("S9", "S6.3")),
    _case("bias-hides-poison", HALF, BASE, poison(), bias=_hides, profile="masks",
          clauses=("S9", "S3.4")),
    _case("sinks", HALF, sinks=True, profile="masks"),
    _case("sinks-empty-rows", THIRD, BASE, poison(), sinks=True, profile="masks",
          mask=Lengths(np.array([0, 11]), np.array([5, 8])), clauses=("S9", "S3.7")),
    _case("empty-rows", HALF, BASE, poison(), mask=Lengths(np.array([0, 7])), profile="masks",
          clauses=("S9", "S3.7")),
    _case("no-keys", HALF, BASE._replace(Lk=0), profile="masks", clauses=("S9", "S3.7")),
    _case("softcap", THIRD, square(33), softcap=1.5, profile="masks"),
)  # fmt: skip

_GRADIENTS = (
    _case("out-alone", HALF, d_lse=False, profile="gradients"),
    _case("lse-alone", HALF, BASE, set_to(d_out=0.0), profile="gradients"),
    _case("one-row", THIRD, square(33), set_to(d_out=0.0), put("d_out", (0, 3, 20), 1.0),
          d_lse=False, causal=True, profile="gradients"),
    _case("gradient-square", HALF, square(70), d_lse=False, profile="gradients"),
    _case("gradient-199", THIRD, square(199, **NARROW), causal=True, profile="gradients"),
    _case("everything", HALF, square(33), bias=_bias(0), sinks=True, softcap=2.0, causal=True,
          scale=-0.8, profile="gradients", ids=("M3",)),
    _case("everything-wide", Dropout(0.2, 11, (1, 2, 3, 8)), BASE._replace(Lk=70), poison(),
          bias=_bias(0, 1), sinks=True, softcap=1.5, mask=Lengths(np.array([70, 41])),
          profile="gradients"),
)  # fmt: skip

# Above 0.9 most rows of a few keys lose all of them: they are live, and 0.
_PROBABILITIES = (
    _case("p-tenth", Dropout(0.1, 2), square(33)),
    _case("p-nine-tenths", Dropout(0.9, 3), BASE._replace(Lk=70)),
    _case("p-nine-tenths-few-keys", Dropout(0.9, 4)),
    _case("p-near-one", Dropout(0.99, 6), WIDE),
    _case("p-zero", Dropout(0.0, 7)),
    _case("p-less-than-a-lane", Dropout(0.9 * LANE, 27)),
    _case("p-one-lane", Dropout(1.5 * LANE, 27)),  # drops (1, 2, 2, 4) alone
    _case("p-at-a-lane", Dropout(30382.75 * LANE, 4)),  # three lanes are 30382, and kept
    _case("p-at-a-low-lane", Dropout(708.5 * LANE, 25)),
    _case("p-at-a-high-lane", Dropout(64588.75 * LANE, 48)),
)

_SEEDS = (
    _case("seed-zero", Dropout(0.5, 0)),
    _case("seed-of-two-words", Dropout(0.5, 1 << 32 | 5)),
    _case("seed-high-word", Dropout(0.5, 5 << 32)),
    _case("seed-largest", Dropout(0.5, (1 << 64) - 1)),
    _case("seed-past-a-double", Dropout(0.5, (1 << 62) + 1)),
    _case("seed-in-words", Dropout(0.5, np.array([0xFFFFFFFE, 0x80000001], np.uint32))),
)

_OFFSETS = (
    _case("offset-batch", Dropout(0.5, 5, (2, 0, 0, 0))),
    _case("offset-heads", Dropout(0.5, 5, (0, 6, 0, 0))),
    _case("offset-queries", Dropout(0.5, 5, (0, 0, 9, 0))),
    _case("offset-keys", Dropout(0.5, 5, (0, 0, 0, 16))),
    _case("offset-all", Dropout(0.3, 1 << 40 | 8, (1, 3, 5, 8)), square(70), causal=True),
    _case("offset-far", Dropout(0.5, 5, ((1 << 31) + 5, 1 << 31, (1 << 32) - 64, (1 << 32) - 8)),
          BASE._replace(Lk=8)),
    _case("offset-in-arrays", Dropout(0.5, np.array([9, 1], np.uint32), (
        np.array(2), np.array(1, np.int32), np.array(7, np.uint8), np.array(24, np.int32)))),
)  # fmt: skip

# What a kernel cuts into parts keeps its indices.
_LONG = (
    _case("long", THIRD, square(390, **NARROW), mask=Lengths(np.array([300])), d_lse=False,
          clauses=("S9", "S5.4")),
)  # fmt: skip

CASES = (
    *_SHAPES, *_MASKS, *_GRADIENTS, *_PROBABILITIES, *_SEEDS, *_OFFSETS, *_LONG,
)  # fmt: skip
