"""ALiBi: a bias that is said by slopes, the same as the array that it stands for (S2.7).

No slope is like another, and sequences are longer than a tile, so that nothing agrees by accident:
a distance that starts anew in each tile, say, or slopes that stand in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Segments, Window
from attnx.plugin import Alibi, Dropout

from ._case import BASE, Case, Recipe, square
from ._edits import poison
from .more import NARROW

__all__ = ["CASES"]

SLOPES = 2.0 ** -np.array([1.0, 2.0, 3.0, 5.0, 1.5, 4.0])
NOT_DOUBLE = ("float16", "bfloat16", "float32")
PACKED = np.concatenate([np.arange(40), np.arange(30)])
CACHE = BASE._replace(Lq=9, Lk=70)


def _case(
    name: str, shape: Any, align: str | None, *edits: Any, slopes: Any = SLOPES, q_pos: Any = None,
    kv_pos: Any = None, mask: Any = None, sinks: bool = False, bias_dtype: str | None = None,
    clauses: tuple[str, ...] = (), ids: tuple[str, ...] = (), dtypes: Any = None, **options: Any,
) -> Case:  # fmt: skip
    alibi = Alibi(slopes, align, q_pos=q_pos, kv_pos=kv_pos)
    inputs = Recipe(shape, mask=mask, bias=alibi, bias_dtype=bias_dtype, sinks=sinks, edits=edits,
                    causal=options.get("causal", False))  # fmt: skip
    only = {} if dtypes is None else {"dtypes": dtypes}
    return Case(f"alibi-{name}", ("S2.7", *clauses), "masks", inputs, options, ids=ids, **only)


_PLACES = (
    _case("square", square(70), None, ids=("G8", "G9", "G10", "G11")),
    _case("causal", square(70), None, causal=True, ids=("G8", "G9", "G10")),
    _case("top-left", CACHE, "top_left"),
    _case("bottom-right", CACHE, "bottom_right"),
    _case("decode", BASE._replace(Lq=1, Lk=70), "bottom_right", causal="bottom_right",
          ids=("G11",)),
    _case("more-queries", BASE._replace(Lq=40, Lk=9), "bottom_right"),
    _case("lengths", CACHE, "bottom_right", poison(), clauses=("S3.5", "S4.1"),
          mask=Lengths(np.array([70, 41]), np.array([9, 4]))),
    _case("lengths-causal", CACHE, "bottom_right", poison(), clauses=("S3.5", "S4.1"),
          mask=Lengths(np.array([66, 23])) & Causal("bottom_right")),
    _case("lengths-top-left", square(33), None, poison(), mask=Lengths(np.array([33, 19])),
          clauses=("S3.5", "S4.1")),
    _case("positions", square(70), None, q_pos=PACKED, kv_pos=PACKED, clauses=("S3.5",),
          mask=Segments(np.arange(70) // 40, np.arange(70) // 40)),
    _case("positions-of-entries", CACHE, None, clauses=("S3.5",),
          q_pos=np.array([[30], [61]]) + np.arange(9), kv_pos=np.stack([np.arange(70)] * 2)),
    _case("positions-of-queries", CACHE, None, q_pos=np.arange(9) * 7 + 3, clauses=("S3.5",)),
    _case("positions-of-keys", square(33), None, kv_pos=np.arange(33)[::-1].copy(),
          clauses=("S3.5",)),
)  # fmt: skip

_SHAPES = (
    _case("own-key-heads", square(33, Hk=6), None),
    _case("one-key-head", CACHE._replace(Hq=5, Hk=1), "bottom_right", slopes=SLOPES[:5]),
    _case("one-head-2d", CACHE._replace(batch=None, Hq=1, Hk=1), "bottom_right",
          slopes=SLOPES[1:2]),
    _case("batch-of-two-axes", square(33, batch=(2, 3)), None),
    _case("slopes-as-numbers", square(33), None, slopes=[0.5, 0.25, 0.1, 0.0, -0.05, 0.3]),
    _case("slopes-float32", square(33), None, bias_dtype="float32", clauses=("S2.4",),
          dtypes=NOT_DOUBLE),
)  # fmt: skip

_COMBINED = (
    _case("softcap", square(33), None, softcap=1.5, clauses=("S2",)),
    _case("softcap-sinks", CACHE, "bottom_right", sinks=True, softcap=2.0, clauses=("S2", "S2.3"),
          causal="bottom_right"),
    _case("window", square(70), None, mask=Window(20, 3)),
    _case("empty-rows", BASE._replace(Lq=13, Lk=5), "bottom_right", poison(), sinks=True,
          causal="bottom_right", clauses=("S3.7", "S4.1")),
    _case("no-keys", BASE._replace(Lk=0), "bottom_right", clauses=("S3.7",)),
    _case("dropout", square(33), None, dropout=Dropout(0.3, 11), causal=True, clauses=("S9",)),
    _case("scale-negative", CACHE, "bottom_right", scale=-0.7),
    _case("assume-finite", square(33), None, causal=True, assume_finite=True, clauses=("S4.4",)),
)  # fmt: skip

# What a kernel cuts into parts keeps its distances; scores far below 0 leave a live row (S3.4).
_FAR = (
    _case("far", square(600, **NARROW), None, slopes=SLOPES[:2], causal=True),
    _case("far-queries", CACHE, None, q_pos=np.arange(9) + 5000, kv_pos=np.arange(70),
          clauses=("S3.4", "S3.5")),
)  # fmt: skip

CASES = (*_PLACES, *_SHAPES, *_COMBINED, *_FAR)
