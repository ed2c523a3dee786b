"""Shapes, groups, head sizes, tile edges, scales and ranks, without a mask (S1, S2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._case import BASE, Case, Recipe, Shape, square
from ._edits import ascending, correlated, onehot, scaled

__all__ = ["CASES"]

SMALL = BASE._replace(batch=(1,), Hq=2, Hk=1)


def _case(name: str, shape: Shape, *clauses: str, ids: tuple[str, ...] = (), edits: Any = (),
          **options: Any) -> Case:  # fmt: skip
    return Case(name, clauses, "forward", Recipe(shape, edits=edits), options, ids=ids)


_SHAPES = (
    _case("self", square(9, Hq=3, Hk=3, Dv=8), "S1.1", "S2"),
    _case("cross", BASE._replace(Hq=3, Hk=3), "S1.1", "S1.2", ids=("C18",)),
    _case("grouped", BASE, "S1.3", "S6.3", ids=("E1", "E2", "E6")),
    _case("grouped-square", square(9), "S1.3", "S6.3", ids=("E1",)),
    _case("grouped-of-two", BASE._replace(Hq=4, Hk=2), "S1.3", ids=("E1", "E2", "E5")),
    _case("one-key-head", BASE._replace(Hq=5, Hk=1), "S1.3"),
    _case("one-hot-values", BASE._replace(Dv=11), "S1.3", "S2", edits=(onehot,)),
    _case("values-narrower", BASE._replace(D=16, Dv=3), "S1.2", ids=("J4",)),
    _case("values-wider", BASE._replace(D=8, Dv=24), "S1.2", ids=("J4",)),
    _case("values-of-one", BASE._replace(D=8, Dv=1), "S1.2"),
    _case("one-query", BASE._replace(Lq=1, Lk=65), "S1.2"),
    _case("one-query-grouped", BASE._replace(Lq=1, Lk=130, Hq=8, Hk=2, D=32), "S1.3"),
    _case("one-key", BASE._replace(Lk=1), "S1.2", "S7"),
    _case("one-of-each", BASE._replace(Lq=1, Lk=1), "S1.2", "S7"),
    _case("batch-of-three", square(7, batch=(3,)), "S1.1"),
    _case("two-batch-axes", BASE._replace(batch=(2, 3)), "S1.1"),
    _case("no-batch-axis", BASE._replace(batch=()), "S1.1"),
    _case("one-head-2d", BASE._replace(batch=None, Hq=1, Hk=1), "S1.1"),
    _case("many-heads", square(5, Hq=12, Hk=4), "S1.3"),
    _case("heads-as-many-as-tokens", square(6, Hk=6), "S1.1"),
)

# Scale is 1/sqrt(D) of the true D, whatever a kernel pads to.
_HEAD_SIZES = tuple(
    _case(f"head-size-{D}", square(17, D=D, Dv=Dv), "S1.2", ids=("J6", "L12"))
    for D, Dv in ((1, 3), (3, 1), (5, 7), (7, 5), (13, 13), (80, 80), (128, 64), (256, 13))
)

# Around the sizes that tiles have, or that vectors fill.
_EDGES = tuple(
    _case(f"edge-{Lq}x{Lk}", SMALL._replace(Lq=Lq, Lk=Lk), "S1.2", "S5.4")
    for Lq, Lk in (
        (2, 31), (31, 2), (32, 33), (64, 64), (65, 63), (127, 129), (256, 257), (257, 256),
        (513, 70), (70, 513), (3, 2049), (600, 600),
    )
)  # fmt: skip

_SCALES = tuple(
    _case(f"scale-{label}", square(9), "S2", "S1.6", scale=scale)
    for label, scale in (
        ("one", 1), ("zero", 0.0), ("negative", -0.4), ("small", 1e-3), ("large", 3.0),
        ("numpy", np.float32(0.3)),
    )
)  # fmt: skip

_KINDS = (
    _case("correlated", square(65, D=16), "S5.4", edits=(correlated,), ids=("L8", "L9")),
    _case("ascending", SMALL._replace(Lq=33, Lk=600), "S5.4", edits=(ascending,)),
    _case("uniform-rows", square(65), "S7", edits=(scaled(q=0.0),)),
    _case("softcap", square(17), "S2", edits=(scaled(q=4.0),), softcap=2.5, ids=("G2", "G5")),
    _case("softcap-large", BASE, "S2", softcap=50.0, ids=("G5",)),
    _case("softcap-saturated", square(17), "S2", "S6.1", edits=(scaled(q=40.0),), softcap=3.0),
    _case("softcap-negative-scale", BASE, "S2", softcap=1.5, scale=-1.0),
    _case("softcap-edge", SMALL._replace(Lq=257, Lk=300), "S2", softcap=1.0),
    _case("assume-finite", square(65), "S4.4", assume_finite=True),
)

CASES = (*_SHAPES, *_HEAD_SIZES, *_EDGES, *_SCALES, *_KINDS)
