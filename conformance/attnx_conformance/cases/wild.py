"""Faults of the wild that no other class of cases holds: what None means, lse's form, float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Lengths

from ._case import BASE, Case, Recipe, Shape, square
from ._edits import onehot, poison, set_to

__all__ = ["CASES"]


def _case(
    name: str, clauses: tuple[str, ...], profile: str, inputs: Recipe, *ids: str, **more: Any
) -> Case:
    return Case(f"wild-{name}", clauses, profile, inputs, ids=ids, **more)


def _one_number(ctx: Any) -> Any:
    """A bias that is one number."""
    return ctx.normal(1, 1, 1, 1)


def _late_keys(ctx: Any, arrays: dict[str, Any], seen: Any) -> None:
    """Nearly all weight lies on the last key: a row that does not see it is far off."""
    arrays["k"][..., -1, :] = 3.0 * arrays["q"][..., : ctx.shape.Hk, 0, :]


def _close(ctx: Any, arrays: dict[str, Any], seen: Any) -> None:
    """Scores near 20 that differ by less than float32 can hold, and values that tell."""
    arrays["q"][...] = 20.0 / np.sqrt(ctx.shape.D)
    arrays["k"][...] = 1.0 + 1e-9 * arrays["k"]
    arrays["v"][...] = 1e6 + arrays["v"]


WIDE = Shape(batch=(2,), Hq=6, Hk=2, Lq=4, Lk=9, D=8, Dv=5)

CASES = (
    # No mask is no mask, however many queries there are; and never means causal.
    _case("none-is-no-mask", ("S3.1",), "forward", Recipe(square(9), edits=(_late_keys,)), "C15"),
    _case("none-is-no-mask-one-query", ("S3.1",), "forward",
          Recipe(BASE._replace(Lq=1), edits=(onehot,)), "C15"),
    # lse is natural and (*B, Hq, Lq), whatever the other axes are: log Lk for scores of 0.
    _case("lse-is-natural", ("S2", "S2.2"), "forward",
          Recipe(BASE._replace(Lk=4096, D=4, Dv=3, batch=(1,), Hq=2, Hk=1),
                 edits=(set_to(q=0.0),)), "H1", "H2"),
    _case("lse-has-the-shape-of-rows", ("S2.2",), "forward", Recipe(WIDE), "H5"),
    _case("lse-of-one-head-2d", ("S2.2", "S1.1"), "forward",
          Recipe(BASE._replace(batch=None, Hq=1, Hk=1)), "H5"),
    # float64 throughout: no softmax, sum or result in float32.
    _case("double-stays-double", ("S5.2",), "numerics", Recipe(square(33), edits=(_close,)),
          "L1", "L2", "L11", dtypes=("float64",)),
    _case("double-stays-double-causal", ("S5.2",), "numerics",
          Recipe(square(65, D=16), causal=True), "L1", "L2", dtypes=("float64",),
          options={"causal": True}),
    # An operand that has no influence has a gradient of zeros, in its own shape and dtype.
    _case("gradient-of-one-number", ("S6.3", "S2.4"), "gradients",
          Recipe(BASE, bias=_one_number, bias_dtype="float32", edits=(set_to(d_lse=0.0),)), "N7",
          dtypes=("float16", "bfloat16", "float32")),
    _case("gradient-without-influence", ("S6.3", "S3.7"), "gradients",
          Recipe(BASE, mask=Lengths(0), bias=_one_number, sinks=True, edits=(poison(),)), "N7"),
    _case("gradient-of-unused-queries", ("S6.1",), "gradients", Recipe(BASE._replace(Lk=1)),
          "N7"),
)  # fmt: skip
