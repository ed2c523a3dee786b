"""Operands that lie in memory in every way an array can (S1.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Lengths

from ._case import BASE, Case, Recipe, Shape, square

__all__ = ["CASES", "VIEWS"]

VIEWS = ("transposed", "offset", "reversed", "inner", "expanded")
LONG = square(300, batch=(2,), Hq=2, Hk=2, D=16, Dv=16)


def _case(name: str, views: dict[str, str], shape: Shape = BASE, *, mask: Any = None,
          bias: Any = None, ids: tuple[str, ...] = (), **options: Any) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, bias=bias, views=views, causal=options.get("causal", False))
    return Case(f"strides-{name}", ("S1.4",), "system", inputs, options, ids=ids)


def _bias(ctx: Any) -> Any:
    return ctx.normal(*ctx.shape.grid.full)


_ALL = ("q", "k", "v", "d_out")

CASES = (
    *(_case(f"{view}-{name}", {name: view}, ids=("I2", "I3", "I7"))
      for view in VIEWS for name in _ALL),
    *(_case(f"{view}-all", dict.fromkeys(_ALL, view), ids=("I2", "I7")) for view in VIEWS),
    *(_case(f"{view}-all-long", dict.fromkeys(_ALL, view), LONG, causal=True, ids=("K4",))
      for view in VIEWS),
    *(_case(f"{view}-bias", {"bias": view}, bias=_bias, ids=("D21", "I8")) for view in VIEWS),
    *(_case(f"{view}-mask", {"mask": view}, ids=("D10", "I8"),
            mask=np.arange(99 * 12).reshape(2, 6, 9, 11) % 5 != 2) for view in VIEWS),
    _case("mixed", {"q": "transposed", "k": "inner", "v": "reversed", "d_out": "expanded"},
          ids=("I7",)),
    _case("decode", {"k": "offset", "v": "offset"}, BASE._replace(Lq=1, Lk=65),
          mask=Lengths(np.array([17, 65])), ids=("I3",)),
)  # fmt: skip
