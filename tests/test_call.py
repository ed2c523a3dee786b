"""A call as a record: one shape for the backend, and a class that holds what a plan depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx._call import CallClass, Options, Prepared, prepare
from attnx.masks import And, leaves

Make = Callable[..., tuple[Any, Any, Any]]
SHAPES = {
    "4-D": {}, "2-D": {"rank": 2}, "3-D": {"B": ()}, "5-D": {"B": (2, 3)}, "6-D": {"B": (1, 2, 3)},
    "empty batch": {"B": (0,)}, "4-D bshd": {"layout": "bshd"},
    "3-D bshd": {"B": (), "layout": "bshd"}, "5-D bshd": {"B": (2, 3), "layout": "bshd"},
    "2-D bshd": {"rank": 2, "layout": "bshd"},
}  # fmt: skip


def prepared(q: Any, k: Any, v: Any, *, gradient: str | None = None, **options: Any) -> Prepared:
    lane = attnx.get_backend("numpy").lane
    return prepare(lane, q, k, v, Options(**options), gradient=gradient)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_backend_gets_four_axes_without_a_copy(make: Make, shape: dict[str, Any]) -> None:
    """S1.1: layouts and ranks are undone by views."""
    q, k, v = make(**shape)
    ready = prepared(q, k, v, layout=shape.get("layout", "bhsd"))
    call = ready.call
    assert ready.q.shape == (call.B, call.Hq, call.Lq, call.D)
    assert ready.k.shape == (call.B, call.Hk, call.Lk, call.D)
    assert ready.v.shape == (call.B, call.Hk, call.Lk, call.Dv)
    assert (call.B, call.Lq, call.Lk, call.D, call.Dv)[1:] == (6, 6, 8, 5)
    for inner, outer in ((ready.q, q), (ready.k, k), (ready.v, v)):
        assert np.shares_memory(inner, outer) or outer.size == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_go_back_the_way_the_inputs_came(make: Make, shape: dict[str, Any]) -> None:
    q, k, v = make(**shape)
    dims = prepared(q, k, v, layout=shape.get("layout", "bhsd")).dims
    for array in (q, k, v):
        assert np.array_equal(dims.outward(np, dims.inward(np, array)), array)
        rows = array[..., 0]
        assert np.array_equal(dims.outward(np, dims.inward_rows(np, rows)), rows)
    assert dims.outward(np, None) is None


def test_the_record_says_what_was_asked(make: Make) -> None:
    call = prepared(*make(), softcap=3, scale=np.float32(0.5), return_lse=True).call
    assert (call.scale, call.softcap, call.mask, call.bias, call.sinks) == (
        0.5,
        3.0,
        None,
        None,
        None,
    )
    assert type(call.scale) is type(call.softcap) is float
    assert (call.dtype, call.need_lse, call.assume_finite) == ("float32", True, False)


def test_the_default_scale_uses_the_true_head_size(make: Make) -> None:
    """S1.2."""
    assert prepared(*make(D=12)).call.scale == 1 / math.sqrt(12)


def test_causal_and_mask_intersect(make: Make) -> None:
    """S3.1."""
    q, k, v = make()
    assert prepared(q, k, v, causal=True).call.mask == Causal("top_left")
    both = prepared(q, k, v, causal="bottom_right", mask=Lengths(3)).call.mask
    assert both == And((Causal("bottom_right"), Lengths(3)))
    assert prepared(q, k, v, mask=Causal() & Window(1, 1)).call.mask.structure == (
        "(causal[top_left]&window[n,n,top_left])"
    )


def test_leaves_reach_a_backend_in_one_form(make: Make) -> None:
    """Integers of shape (B,), (L,) or (B, L), and a dense array of four axes."""
    q, k, v = make(B=(2, 3))
    wide = np.arange(6, dtype=np.uint8).reshape(2, 3)
    mask = (
        Lengths(wide, 4) & Starts([[0, 1, 2], [3, 4, 5]]) & Prefix(np.array(2))
        & Causal(q_pos=np.arange(6), kv_pos=np.ones((2, 3, 6), ">i4"))
        & Segments([0] * 6, np.zeros((2, 3, 6), np.int16)) & Dense(np.ones((1, 3, 1, 6, 1), bool))
    )  # fmt: skip
    found = {
        f"{type(n).__name__}.{f}": x for n, f, x in leaves(prepared(q, k, v, mask=mask).call.mask)
    }
    assert found["Lengths.kv"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (found["Lengths.q"], found["Prefix.n"]) == (4, 2)
    assert found["Starts.kv"].tolist() == [0, 1, 2, 3, 4, 5]
    shapes = {name: leaf.shape for name, leaf in found.items() if not isinstance(leaf, int)}
    assert shapes["Causal.q_pos"] == shapes["Segments.q_ids"] == (6,)
    assert shapes["Causal.kv_pos"] == shapes["Segments.kv_ids"] == (6, 6)
    assert shapes["Dense.array"] == (6, 1, 6, 1)
    kinds = {str(leaf.dtype) for leaf in found.values() if not isinstance(leaf, int)}
    assert kinds == {"int64", "bool"}


def test_a_call_taken_apart_is_put_together_again(make: Make) -> None:
    """Without its arrays it compares by value; other arrays may take their places."""
    q, k, v = make()
    lengths, bias = np.array([1, 2]), np.zeros((6, 6), np.float32)
    seed = np.array([1, 2], np.uint32)
    options = {
        "mask": Lengths(lengths, 4) & Segments([0] * 6, [1] * 6), "bias": bias,
        "dropout": attnx.Dropout(0.5, seed, (0, 1, 0, 0)),
    }  # fmt: skip
    call = prepared(q, k, v, **options).call
    bare, arrays = call.taken_apart()
    assert [None if x is None else x.shape for x in arrays] == [
        (1, 1, 6, 6), None, (2,), (6,), (6,), (2,),
    ]  # fmt: skip
    assert bare == prepared(q, k, v, **options).call.taken_apart()[0]
    back = bare.put_together(*arrays)
    assert (back.mask, back.bias is arrays[0], back.dropout) == (call.mask, True, call.dropout)
    others = tuple(None if x is None else x + 1 for x in arrays)
    again = bare.put_together(*others).taken_apart()[1]
    assert list(map(id, again)) == list(map(id, others))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 6), (1, 1, 6, 6)), ((1, 6), (1, 1, 1, 6)), ((1, 1, 1, 1, 1), (1, 1, 1, 1)),
        ((2, 3, 4, 6, 6), (6, 4, 6, 6)), ((1, 3, 1, 6, 1), (6, 1, 6, 1)),
        ((2, 1, 4, 1, 6), (6, 4, 1, 6)), ((1, 1, 4, 6, 6), (1, 4, 6, 6)),
    ],
    ids=str,
)  # fmt: skip
def test_a_bias_gets_four_axes_of_1_or_full(
    make: Make, rng: np.random.Generator, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """S3.3: only a partly broadcast *B is expanded."""
    q, k, v = make(B=(2, 3))
    bias = rng.standard_normal(shape).astype(np.float32)
    inner = prepared(q, k, v, bias=bias).call.bias
    assert inner.shape == expected
    whole = np.broadcast_to(bias, (2, 3, 4, 6, 6)).reshape(6, 4, 6, 6)
    assert np.array_equal(np.broadcast_to(inner, (6, 4, 6, 6)), whole)


def test_the_class_is_hashable_and_equal_for_equal_calls(make: Make) -> None:
    q, k, v = make()
    one = prepared(q, k, v, mask=Lengths([1, 2]), scale=0.5).call.cls
    assert one == prepared(q + 1, k, v, mask=Lengths([3, 3]), scale=0.25).call.cls
    assert len({one, prepared(q, k, v).call.cls}) == 2


def test_sizes_that_a_plan_may_not_depend_on_are_not_in_the_class(make: Make) -> None:
    """Decoding: another batch, other lengths, other numbers of heads, the same plan."""
    one = prepared(*make(B=(2,), Hq=4, Hk=2, Lq=1, Lk=6), mask=Window(3, 0, "bottom_right"))
    other = prepared(*make(B=(3,), Hq=9, Hk=3, Lq=2, Lk=7), mask=Window(5, 4, "bottom_right"))
    assert one.call.cls == other.call.cls
    assert {"B", "Hq", "Hk", "Lq", "Lk"}.isdisjoint(CallClass._fields)


f32, f64 = np.float32, np.float64
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({"dtype": "float64"}, {}), "float16": ({"dtype": "float16"}, {}),
    "D": ({"D": 9}, {}), "Dv": ({"Dv": 6}, {}), "not grouped": ({"Hq": 2}, {}),
    "not square": ({"Lk": 7}, {}), "layout": ({"layout": "bshd"}, {"layout": "bshd"}),
    "causal": ({}, {"causal": True}), "causal right": ({}, {"causal": "bottom_right"}),
    "mask": ({}, {"mask": np.ones((6, 6), bool)}), "lengths": ({}, {"mask": Lengths(3)}),
    "lengths of both": ({}, {"mask": Lengths(3, 3)}), "not": ({}, {"mask": ~Lengths(3)}),
    "predicate": ({}, {"mask": Predicate(lambda b, h, i, j: i == j)}),
    "scale 1": ({}, {"scale": 1.0}), "scale -1": ({}, {"scale": -1.0}),
    "scale 0": ({}, {"scale": 0}),
    "softcap": ({}, {"softcap": 5.0}), "bias": ({}, {"bias": np.zeros((6, 6), f32)}),
    "bias row": ({}, {"bias": np.zeros((1, 6), f32)}),
    "bias of heads": ({}, {"bias": np.zeros((1, 4, 6, 6), f32)}),
    "wide bias": ({"dtype": "float64"}, {"bias": np.zeros((6, 6), f64)}),
    "narrow bias": ({"dtype": "float64"}, {"bias": np.zeros((6, 6), f32)}),
    "sinks": ({}, {"sinks": np.zeros(4, f32)}),
    "wide sinks": ({"dtype": "float64"}, {"sinks": np.zeros(4, f64)}),
    "narrow sinks": ({"dtype": "float64"}, {"sinks": np.zeros(4, f32)}),
    "lse": ({}, {"return_lse": True}), "finite": ({}, {"assume_finite": True}),
    "dropout": ({}, {"dropout": attnx.Dropout(0.1, 0)}),
}  # fmt: skip


def test_whatever_a_plan_may_depend_on_is_in_the_class(make: Make) -> None:
    """Each of these calls differs from every other one in its class."""
    found = {"plain": prepared(*make()).call.cls}
    found["gradient"] = prepared(*make(), gradient="vjp").call.cls
    for name, (shape, options) in DIFFERENT.items():
        found[name] = prepared(*make(**shape), **options).call.cls
    same = {cls: [n for n, other in found.items() if other == cls] for cls in found.values()}
    assert [names for names in same.values() if len(names) > 1] == []


def test_causal_by_name_and_by_true_are_one_class(make: Make) -> None:
    q, k, v = make()
    classes = {
        prepared(q, k, v, **options).call.cls
        for options in ({"causal": True}, {"causal": "top_left"}, {"mask": Causal()})
    }
    assert len(classes) == 1
