"""NaN and infinity where they are live: they reach what sees them, and nothing else (S4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Segments, Window

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import poison, put, set_to

__all__ = ["CASES"]

NAN, INF = np.nan, np.inf
ISSUE = square(64, batch=(1,), Hq=2, Hk=2, D=16, Dv=16)
PAST = square(600, batch=(1,), Hq=2, Hk=1, D=4, Dv=3)
WIDE = ("bfloat16", "float32", "float64")

# Of the heads 3, 4 and 5, which share keys, only head 4 sees key 4.
_ONE_HEAD = ~((np.arange(11) == 4) & np.isin(np.arange(6), (3, 5))[None, :, None, None])


def _case(
    name: str, shape: Shape, *edits: Any, mask: Any = None, bias: Any = None,
    clauses: tuple[str, ...] = ("S4.2",), ids: tuple[str, ...] = (),
    needs: tuple[str, ...] = ("isolation",), dtypes: Any = None, **options: Any,
) -> Case:  # fmt: skip
    inputs = Recipe(shape, mask=mask, bias=bias, edits=edits, causal=options.get("causal", False))
    only = {} if dtypes is None else {"dtypes": dtypes}
    return Case(f"live-{name}", clauses, "numerics", inputs, options, needs=needs, ids=ids, **only)


def _huge(ctx: Context, arrays: dict[str, Any], seen: Any) -> None:
    """Hidden keys with far larger scores than live ones, and values to match."""
    hidden = ~seen.any(axis=(0, 1, 2))
    arrays["k"][..., hidden, :] = 400.0 * np.sign(arrays["q"].mean(axis=(-2, -3, -4))[..., None, :])
    arrays["v"][..., hidden, :] = 1e4


_VALUES = (
    _case("value-nan-causal-64", ISSUE, put("v", (0, 0, 40, 3), NAN), causal=True, ids=("B6",)),
    _case("value-nan-first", ISSUE, put("v", (0, 1, 0, 3), NAN), causal=True),
    _case("value-nan-last", ISSUE, put("v", (0, 1, 63, 3), NAN), causal=True, ids=("B4", "B6")),
    _case("value-infinite", ISSUE, put("v", (0, 0, 40, 3), INF), causal=True, ids=("B1",)),
    _case("value-infinite-both-ways", ISSUE, put("v", (0, 0, 40, 3), INF),
          put("v", (0, 0, 41, 3), -INF), causal=True),
    _case("value-nan-unmasked", BASE, put("v", (1, 0, 4, 2), NAN)),
    _case("value-nan-one-head-sees", BASE, put("v", (0, 1, 4, slice(None)), NAN),
          mask=_ONE_HEAD),
    _case("value-nan-past-512", PAST, put("v", (0, 0, 560, 1), NAN), causal=True, ids=("B7",)),
    _case("value-nan-at-256", PAST, put("v", (0, 0, 256, 1), NAN), causal=True),
    _case("value-nan-window", PAST, put("v", (0, 0, 300, 1), NAN), mask=Window(20, 10)),
    _case("value-nan-segments", square(33), put("v", (0, 0, 12, 1), NAN),
          mask=Segments(np.arange(33) // 11, np.arange(33) // 11)),
    _case("value-nan-bias", BASE, put("v", (..., 5, slice(None)), NAN),
          bias=lambda ctx: np.where(np.arange(99).reshape(9, 11) % 2 == 0, -INF, 0.0),
          ids=("B10", "A9")),
    _case("value-nan-softcap", ISSUE, put("v", (0, 0, 40, 3), NAN), causal=True, softcap=2.0),
    _case("value-nan-negative-scale", ISSUE, put("v", (0, 0, 40, 3), NAN), causal=True,
          scale=-0.3),
    _case("value-nan-zero-scale", ISSUE, put("v", (0, 0, 40, 3), NAN), causal=True, scale=0.0),
    _case("value-nan-every-future", square(9), put("v", (..., slice(6, None), slice(None)), NAN),
          causal=True, ids=("B6",)),
    _case("value-nan-one-query", BASE._replace(Lq=1, Lk=33), put("v", (0, 0, 7, 2), NAN)),
)  # fmt: skip

_KEYS = (
    _case("key-nan-causal-64", ISSUE, put("k", (0, 0, 40, 3), NAN), causal=True, ids=("B4",)),
    _case("key-nan-unmasked", BASE, put("k", (1, 0, 4, 2), NAN)),
    _case("key-nan-past-512", PAST, put("k", (0, 0, 560, 1), NAN), causal=True),
    _case("key-nan-window", square(65), put("k", (0, 0, 30, 1), NAN), mask=Window(3, 2)),
    _case("key-nan-softcap", ISSUE, put("k", (0, 0, 40, 3), NAN), causal=True, softcap=2.0),
    _case("key-infinite-causal", ISSUE, put("k", (0, 0, 40, 3), INF), causal=True),
    _case("key-nan-bias", BASE, put("k", (0, 0, 5, 1), NAN), ids=("B10",),
          bias=lambda ctx: np.where(np.arange(99).reshape(9, 11) % 2 == 0, -INF, 0.0)),
)  # fmt: skip

_QUERIES = (
    _case("query-nan", BASE, put("q", (1, 4, 3, 2), NAN), clauses=("S4.3",), needs=()),
    _case("query-nan-causal-64", ISSUE, put("q", (0, 1, 20, 2), NAN), clauses=("S4.3",), needs=(),
          causal=True),
    _case("query-nan-softcap", BASE, put("q", (1, 4, 3, 2), NAN), clauses=("S4.3",), needs=(),
          softcap=2.0),
    _case("query-nan-lengths", BASE, put("q", (1, 4, 3, 2), NAN), clauses=("S4.3",), needs=(),
          mask=Lengths(np.array([4, 9]))),
    _case("query-infinite", BASE, put("q", (1, 4, 3, 2), INF), clauses=("S4.3",), needs=()),
    _case("cotangent-nan", BASE, put("d_out", (1, 4, 3, 2), NAN), clauses=("S6.1",), needs=()),
    _case("cotangent-nan-causal", square(33), put("d_out", (1, 4, 20, 2), NAN), causal=True,
          clauses=("S6.4",)),
    _case("lse-cotangent-nan", BASE, put("d_lse", (1, 4, 3), NAN), clauses=("S6.1",), needs=()),
)  # fmt: skip

# What nothing sees holds anything (S4.1); this every backend must promise.
_UNSEEN = tuple(
    _case(f"unseen-{label}", shape, poison(keys, values), mask=mask, clauses=("S4.1", "S6.4"),
          needs=(), ids=ids, dtypes=dtypes, **options)
    for label, shape, keys, values, mask, ids, dtypes, options in (
        ("nan-keys", BASE, NAN, 1.0, Lengths(np.array([4, 9])), ("B1", "B4"), None, {}),
        ("nan-values", BASE, 1.0, NAN, Lengths(np.array([4, 9])), ("B1", "B3"), None, {}),
        ("infinite", BASE, INF, INF, Lengths(np.array([4, 9])), ("B1", "B5"), None, {}),
        ("infinite-below", BASE, -INF, -INF, Lengths(np.array([4, 9])), ("B5",), None, {}),
        ("1e30", BASE, 1e30, 1e30, Lengths(np.array([4, 9])), ("B1",), WIDE, {}),
        ("3e38", BASE, 3e38, 3e38, Lengths(np.array([4, 9])), ("B1",), WIDE, {}),
        ("3e38-below", BASE, -3e38, 1.0, Lengths(np.array([4, 9])), ("B1",), WIDE, {}),
        ("3e38-values", BASE, 1.0, 3e38, Lengths(np.array([4, 9])), ("B1",), WIDE, {}),
        ("3e38-bias", BASE, 3e38, 3e38, Lengths(np.array([4, 9])), ("B1",), WIDE,
         {"bias": lambda ctx: ctx.normal(1, 6, 9, 11)}),
        ("3e38-600", PAST, 3e38, 3e38, Lengths(np.array([300])) & Causal(), ("B1",), WIDE, {}),
        ("6e4", BASE, 6e4, 6e4, Lengths(np.array([4, 9])), ("B14",), None, {}),
        ("causal", BASE._replace(Lq=5), NAN, NAN, Causal("top_left"), ("B4",), None, {}),
        ("decode", BASE._replace(Lq=1, Lk=33), NAN, NAN, Lengths(np.array([1, 20])),
         ("B7", "B8"), None, {}),
        ("softcap", BASE, NAN, NAN, Lengths(np.array([4, 9])), (), None, {"softcap": 2.0}),
        ("negative-scale", BASE, NAN, NAN, Lengths(np.array([4, 9])), (), None, {"scale": -1.0}),
        ("past-512", BASE._replace(batch=(1,), Hq=2, Hk=1, Lq=4, Lk=700, D=4), NAN, NAN,
         Lengths(np.array([531])), ("B7", "B8"), None, {}),
        ("backward-600", PAST, NAN, NAN, Lengths(np.array([300])) & Causal(), ("B12",), None, {}),
    )
)  # fmt: skip

_LOUD = (
    _case("hidden-beats-live", BASE, _huge, mask=Lengths(7), clauses=("S2.1", "S4.1"), needs=(),
          ids=("B14",)),
    _case("hidden-beats-all-equal", BASE, set_to(q=1.0), _huge, mask=Lengths(7),
          clauses=("S2.1", "S4.1"), needs=(), ids=("B14",)),
)  # fmt: skip

CASES = (*_VALUES, *_KEYS, *_QUERIES, *_UNSEEN, *_LOUD)
