"""Gradients: each cotangent alone, sums over groups and batches, saturation, tile edges (S6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Dense, Lengths, Prefix, Segments, Window

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import poison, put, scaled, set_to

__all__ = ["CASES"]

EDGE = square(257, batch=(2,), Hq=2, Hk=1, D=4, Dv=3)
FAR = square(600, batch=(1,), Hq=2, Hk=1, D=4, Dv=3)


def _bias(*axes: int) -> Any:
    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in axes else n for axis, n in enumerate(full)))

    return draw


def _case(
    name: str, shape: Shape = BASE, *edits: Any, mask: Any = None, bias: Any = None,
    sinks: bool = False, d_lse: bool = True, ids: tuple[str, ...] = (),
    clauses: tuple[str, ...] = ("S6.1",), **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, bias=bias, sinks=sinks, d_lse=d_lse, edits=edits,
                  causal=options.get("causal", False))  # fmt: skip
    return Case(f"gradient-{name}", clauses, "gradients", inputs, options, ids=ids)


_COTANGENTS = (
    _case("out-alone", d_lse=False),
    _case("out-alone-causal", square(33), d_lse=False, causal=True),
    _case("out-alone-causal-65", square(65, D=64, Dv=64), d_lse=False, causal=True),
    _case("out-alone-mask", d_lse=False, mask=np.arange(99).reshape(9, 11) % 3 != 1),
    _case("out-alone-lengths", d_lse=False, mask=Lengths(np.array([4, 11]))),
    _case("out-alone-bias", d_lse=False, bias=_bias(0)),
    _case("out-alone-square", square(9, Hq=3, Hk=3, Dv=8), d_lse=False),
    _case("lse-alone", BASE, set_to(d_out=0.0)),
    _case("lse-alone-causal", square(33), set_to(d_out=0.0), causal=True),
    _case("lse-alone-softcap", BASE, set_to(d_out=0.0), softcap=1.5),
    _case("lse-alone-bias", BASE, set_to(d_out=0.0), bias=_bias(1, 2)),
    _case("lse-alone-sinks", BASE, set_to(d_out=0.0), sinks=True, clauses=("S6.1", "S6.3")),
    _case("lse-outweighs-out", BASE, scaled(d_lse=100.0)),
    _case("ones", square(33), set_to(d_out=1.0), d_lse=False),
    _case("zeros", BASE, set_to(d_out=0.0), d_lse=False),
    _case("one-row", square(33), set_to(d_out=0.0), put("d_out", (0, 3, 20), 1.0), d_lse=False,
          causal=True, ids=("A2",)),
)  # fmt: skip

_SUMS = (
    _case("group-of-three", square(33), clauses=("S6.3",), ids=("E6",)),
    _case("group-of-three-causal", square(33), causal=True, clauses=("S6.3",), ids=("E6",)),
    _case("group-of-five", BASE._replace(Hq=5, Hk=1), clauses=("S6.3",)),
    _case("group-decode", BASE._replace(Lq=1, Lk=65), clauses=("S6.3",)),
    _case("batch-of-three", square(70, batch=(3,), Hq=2, Hk=2), clauses=("S6.1",)),
    _case("batch-of-three-lengths", square(70, batch=(3,), Hq=2, Hk=1), poison(),
          mask=Lengths(np.array([64, 1, 65])), clauses=("S6.1", "S6.4")),
    *(
        _case(f"bias-sum-{label}", BASE, bias=_bias(*axes), clauses=("S6.3",), d_lse=d_lse)
        for label, axes, d_lse in (
            ("batch", (0,), True), ("heads", (1,), True), ("queries", (2,), True),
            ("keys", (3,), True), ("batch-heads", (0, 1), False), ("all", (0, 1, 2, 3), True),
            ("none", (), False), ("queries-keys", (2, 3), True),
        )
    ),
    _case("bias-sum-masked", bias=_bias(0, 1), mask=Lengths(np.array([4, 0])),
          clauses=("S6.3", "S3.7")),
    _case("bias-sum-causal", square(33), bias=_bias(0), causal=True, clauses=("S6.3", "S6.4")),
    _case("bias-sum-softcap", bias=_bias(0, 2), softcap=1.5, clauses=("S6.3",)),
    _case("sinks-sum", BASE._replace(batch=(3,)), sinks=True, clauses=("S6.3",)),
    _case("sinks-sum-out-alone", BASE, sinks=True, d_lse=False, clauses=("S6.3",), ids=("G7",)),
    _case("sinks-sum-long", FAR, sinks=True, causal=True, clauses=("S6.3",), ids=("G7",)),
)  # fmt: skip

_SLOPES = (
    _case("softcap", square(33), softcap=1.0),
    _case("softcap-saturated", square(33), scaled(q=20.0), softcap=2.0),
    _case(
        "softcap-everything",
        square(33),
        scaled(q=3.0),
        softcap=2.0,
        bias=_bias(0),
        sinks=True,
        causal=True,
        scale=-0.8,
    ),
    _case("scale-negative", square(33), scale=-0.6),
    _case("scale-zero", square(33), scale=0.0),
    _case("scale-large", square(33), scale=2.5),
    _case("peaked", square(33), scaled(q=10.0), d_lse=False),
)

# A block dropped, the wrong branch taken, a tail read past its end: at sizes past one tile.
_TILES = (
    _case("full-257", EDGE),
    _case("causal-257", EDGE, causal=True),
    _case("causal-out-alone-257", EDGE, causal=True, d_lse=False),
    _case("lengths-257", EDGE, poison(), mask=Lengths(np.array([256, 129])), clauses=("S6.4",)),
    _case("window-257", EDGE, mask=Window(100, 3)),
    _case("full-600", FAR),
    _case("causal-600", FAR, causal=True),
    _case("causal-negative-scale-600", FAR, causal=True, scale=-0.5),
    _case("segments-600", FAR, mask=Segments(np.arange(600) // 170, np.arange(600) // 170)),
    _case("prefix-600", FAR, mask=Causal() | Prefix(300)),
    _case("mask-600", FAR, mask=Dense(np.arange(360000).reshape(600, 600) % 7 != 3)),
    _case("mask-192", square(192, batch=(2,), Hq=2, Hk=1),
          mask=Dense(np.arange(192 * 192).reshape(192, 192) % 5 != 3), ids=("N6", "K2")),
    _case("bias-600", FAR, bias=_bias(0)),
    _case("wide-130x513", FAR._replace(Lq=130, Lk=513), causal="bottom_right"),
    _case("tall-513x130", FAR._replace(Lq=513, Lk=130), causal="bottom_right"),
    _case("softcap-600", FAR, softcap=1.0, causal=True),
    _case("head-tail", square(33, D=13, Dv=7), causal=True, ids=("N10",)),
    _case("odd-1025", BASE._replace(batch=(1,), Hq=1, Hk=1, Lq=33, Lk=1025, D=4, Dv=3),
          bias=_bias(), ids=("N6",)),
)  # fmt: skip

CASES = (*_COTANGENTS, *_SUMS, *_SLOPES, *_TILES)
