"""A synthetic call is exactly of the class that it was made for, or is not made."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnx
from attnx import Causal, Dense, Lengths, Prefix, Segments, Starts, Window
from attnx._registry import registry
from attnx.masks import BlockMask, Predicate
from attnx.policies._inputs import CannotBeMade, make

ids = list(range(6))
MASKS = {
    "causal": Causal("bottom_right"),
    "positions": Causal(q_pos=ids),
    "both positions": Window(2, 0, q_pos=ids, kv_pos=ids),
    "window": Window(None, 3, "top_left"),
    "lengths": Causal("bottom_right") & Lengths(4),
    "query lengths": Lengths(4, 5),
    "padding": Starts(1) & Lengths([5, 6]),
    "prefix": Causal("top_left") | Prefix(2),
    "documents": Segments(ids, ids) & Causal("top_left"),
    "dense": ~Dense(np.eye(6, dtype=bool)),
    "blocks": BlockMask(np.tri(2, dtype=bool), 4),
    "predicate": Predicate(lambda b, h, i, j: j <= i),
    "tree": ~((Causal("top_left") | Prefix(2)) & (Lengths(3) | ~Starts(1))),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -1.0},
    "scale of 0": {"scale": 0.0},
    "softcap and lse": {"softcap": 3.0, "return_lse": True},
    "bias of a head": {"bias": np.zeros((1, 2, 1, 6), np.float32)},
    "bias of rows": {"bias": np.zeros((2, 2, 6, 6), np.float32)},
    "alibi": {"bias": attnx.Alibi([0.5, 0.25], "top_left")},
    "sinks": {"sinks": np.zeros(2, np.float32), "assume_finite": True},
    "dropout": {"dropout": attnx.Dropout(0.5, 1)},
    "bshd": {"layout": "bshd", "causal": "top_left"},
    "gradient": {"gradient": True},
} | {name: {"mask": mask} for name, mask in MASKS.items()}


SQUARE = {"positions", "both positions", "documents", "dense", "bias of a head", "bias of rows"}
"""Options that have the shape of the square call."""

CASES = [(name, True) for name in OPTIONS] + [(name, False) for name in OPTIONS.keys() - SQUARE]


@pytest.mark.parametrize(
    ("name", "square"),
    sorted(CASES),
    ids=[f"{n}, {'square' if s else 'rows'}" for n, s in sorted(CASES)],
)
def test_the_call_is_of_the_class(name: str, square: bool) -> None:
    options = OPTIONS[name]
    q, k = np.ones((2, 2, 6, 4), np.float32), np.ones((2, 2, 6 if square else 7, 4), np.float32)
    if options.get("layout"):
        q, k = np.swapaxes(q, 1, 2), np.swapaxes(k, 1, 2)
    cls = attnx.explain(q, k, k, **options).call
    ready = make(registry.lane("numpy"), cls, 32)
    assert ready.call.cls == cls
    assert (ready.call.Lk, ready.call.Lq == 32) == (32, square)
    bound = attnx.get_backend("numpy")
    assert np.isfinite(bound.forward(ready.q, ready.k, ready.v, ready.call)[0]).all()


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["float16", "bfloat16", "float64"]
)
def test_dtypes_and_grouped_heads(dtype: Any) -> None:
    q, k, v = (np.ones((1, H, 6, D), dtype) for H, D in ((4, 8), (2, 8), (2, 5)))
    cls = attnx.explain(q, k, v).call
    call = make(registry.lane("numpy"), cls, 16).call
    assert (call.cls, call.Hq > call.Hk, call.D, call.Dv) == (cls, True, 8, 5)


def test_a_recorded_gradient() -> None:
    q = torch.ones((1, 2, 3, 4), requires_grad=True)
    cls = attnx.explain(q, q, q).call
    assert cls.gradient == "framework"
    assert make(registry.lane("torch"), cls, 16).call.cls == cls


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "cuda:7"}, "Error: "),
        ({"mask": "spiral[n]"}, "'spiral' is not known here"),
        ({"mask": "causal[top_left])"}, "is not understood"),
        ({"traced": True}, "differs in traced"),
    ],
    ids=["device", "kind", "grammar", "traced"],
)
def test_what_cannot_be_made_is_said(change: dict[str, Any], said: str) -> None:
    x = torch.ones((1, 2, 3, 4))
    cls = attnx.explain(x, x, x).call._replace(**change)
    with pytest.raises(CannotBeMade, match=said):
        make(registry.lane("torch"), cls, 16)
