"""Merging (S2.6) and pullbacks (S6.1) on NumPy, against the oracle and the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Lengths
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx_conformance.oracle import Reference

Make = Callable[..., tuple[Any, Any, Any]]
Agree = Callable[..., Reference]
f32 = np.float32
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def same(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one, other)


# S2.6 merge -------------------------------------------------------------------------------------


def parts_of(q: Any, k: Any, v: Any, cuts: list[int], **options: Any) -> list[Any]:
    edges = [0, *cuts, k.shape[-2]]
    sinks = options.pop("sinks", None)
    return [
        attnx.attention(
            q, k[..., a:b, :], v[..., a:b, :], return_lse=True, sinks=sinks if n == 0 else None,
            **{name: x[..., a:b] for name, x in options.items()},
        )
        for n, (a, b) in enumerate(itertools.pairwise(edges))
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[], [3], [0, 0, 4, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]], ids=str)
def test_merging_parts_of_the_keys_gives_the_whole(dtype: str, cuts: list[int], make: Make) -> None:
    """S2.6, S7: empty parts included, sinks in one part."""
    q, k, v = make(dtype=dtype, Lk=9)
    rng = np.random.default_rng(2)
    sinks = np.linspace(-1, 1, 4).astype(f32)
    for options in (
        {}, {"sinks": sinks}, {"mask": rng.random((2, 4, 6, 9)) < 0.3},
        {"bias": (rng.standard_normal((2, 4, 6, 9)) * 20).astype(f32), "sinks": sinks},
    ):  # fmt: skip
        out, lse = attnx.merge(parts_of(q, k, v, cuts, **options))
        whole, whole_lse = attnx.attention(q, k, v, return_lse=True, **options)
        assert (out.dtype, lse.dtype) == (whole.dtype, whole_lse.dtype)
        loose = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-5)
        np.testing.assert_allclose(out.astype(f32), whole.astype(f32), rtol=loose, atol=loose)
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_parts_that_saw_nothing_weigh_nothing(make: Make) -> None:
    """S2.6: whatever stands in them; all empty gives 0 and -inf."""
    q, k, v = make()
    part = attnx.attention(q, k, v, return_lse=True)
    for junk in (0, np.nan, np.inf, -np.inf):
        empty = (np.full_like(part[0], junk), np.full_like(part[1], -np.inf))
        for parts in ([empty, part], [part, empty], [empty, part, empty]):
            out, lse = attnx.merge(parts)
            np.testing.assert_allclose(out, part[0], rtol=1e-6)
            np.testing.assert_allclose(lse, part[1], rtol=1e-6)
        out, lse = attnx.merge([empty, empty])
        same(out, 0)
        same(lse, -np.inf)
        same(attnx.merge([empty])[0], 0)


def test_a_part_that_is_drowned_keeps_its_nan() -> None:
    """A NaN that a row sees makes it NaN, in parts as in the whole (S4.2)."""
    q, k = np.ones((1, 1), f32), np.array([[0], [1000]], f32)
    v = np.array([[np.nan], [1]], f32)
    assert np.isnan(attnx.attention(q, k, v)).all()
    assert np.isnan(attnx.merge(parts_of(q, k, v, [1]))[0]).all()


def test_merging_does_not_overflow() -> None:
    """S5.3: parts whose lse are at either end of the range."""
    out = np.ones((2, 3), f32)
    for low, high in ((-1e30, 1e30), (-3e38, -3e38), (3e38, 3e38), (-1e30, -1e30)):
        parts = [(out * n, np.full(2, lse, f32)) for n, lse in ((1, low), (3, high))]
        joined, lse = attnx.merge(parts)
        same(joined, 2 if low == high else 3)
        same(lse, f32(high))


def test_merging_takes_either_layout_and_any_rank(make: Make) -> None:
    for shape in ({"layout": "bshd"}, {"B": ()}, {"rank": 2}, {"B": (2, 3)}, {"B": (0,)}):
        q, k, v = make(**shape)
        layout = shape.get("layout", "bhsd")
        axis = -3 if layout == "bshd" else -2
        halves = [np.split(array, [2], axis=axis) for array in (k, v)]
        parts = [
            attnx.attention(q, *half, return_lse=True, layout=layout)
            for half in zip(*halves, strict=True)
        ]
        out, lse = attnx.merge(iter(parts))
        whole, whole_lse = attnx.attention(q, k, v, return_lse=True, layout=layout)
        np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-6)


OUT, LSE = np.ones((2, 3, 5), f32), np.ones((2, 3), f32)


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([], ArgumentError, "parts: expected at least one pair (out, lse), got none"),
        ([OUT], ArgumentTypeError, "parts[0]: expected a pair (out, lse)"),
        ((OUT, LSE), ArgumentTypeError, "parts[0]: expected a pair (out, lse)"),
        ([(OUT, LSE), (OUT,)], ArgumentTypeError, "parts[1]: expected a pair (out, lse)"),
        (
            [(OUT, LSE), (OUT, [1])], ArgumentTypeError,
            "parts[1].lse: expected a numpy array, got list",
        ),
        (
            [(OUT, LSE), (OUT[:1], LSE)], ArgumentError,
            "parts[1].out: expected the shape of parts[0].out, (2, 3, 5), got (1, 3, 5)",
        ),
        (
            [(OUT, LSE), (OUT, LSE[:1])], ArgumentError,
            "parts[1].lse: expected the shape of parts[0].lse, (2, 3), got (1, 3)",
        ),
        (
            [(OUT, LSE), (OUT.astype("f8"), LSE)], ArgumentTypeError,
            "parts[1].out: expected the dtype of parts[0].out, float32, got float64",
        ),
        (
            [(OUT.astype("f8"), LSE)], ArgumentTypeError,
            "parts[0].lse: expected float64 beside out in float64, got float32",
        ),
        (
            [(OUT.astype("f2"), LSE.astype("f2"))], ArgumentTypeError,
            "parts[0].lse: expected float32 beside out in float16, got float16",
        ),
        (
            [(OUT.astype(int), LSE)], ArgumentTypeError,
            "parts[0].out: expected one of float16, bfloat16, float32, float64, got int64",
        ),
        (
            [(LSE, OUT)], ArgumentError,
            "parts[0].lse: expected out's shape without its last axis, (2,), got (2, 3, 5)",
        ),
    ],
    ids=[
        "none", "flat list", "flat pair", "short pair", "list", "shape", "shape of lse", "dtype",
        "narrow lse", "half lse", "integers", "swapped",
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_told(parts: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        attnx.merge(parts)
    assert str(caught.value) == message


def test_parts_that_are_no_arrays_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^parts\[0\]\.out: expected an array of a reg"):
        attnx.merge([([1.0], [1.0])])


# S6.1 attention_vjp -----------------------------------------------------------------------------


def test_the_answer_has_lse_when_it_was_asked_for(make: Make) -> None:
    q, k, v = make()
    out, _ = attnx.attention_vjp(q, k, v)
    (same_out, lse), _ = attnx.attention_vjp(q, k, v, return_lse=True)
    same(out, same_out)
    same(out, attnx.attention(q, k, v))
    assert lse.shape == out.shape[:-1]


def test_either_cotangent_may_be_left_out(make: Make, agree: Agree) -> None:
    """S6.1: None counts as 0; d_lse alone works, with sinks and without."""
    q, k, v = make()
    for options in ({}, {"sinks": np.ones(4, f32)}, {"mask": Lengths([0, 4])}):
        (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, **options)
        d_out, d_lse = np.ones_like(out), np.linspace(-1, 1, lse.size, dtype=f32).reshape(lse.shape)
        zero_out, zero_lse = np.zeros_like(out), np.zeros_like(lse)
        agree(q, k, v, d_out=zero_out, d_lse=d_lse, **options)
        agree(q, k, v, d_out=d_out, d_lse=zero_lse, **options)
        for given, full in (
            ((None, d_lse), (zero_out, d_lse)), ((d_out,), (d_out, zero_lse)),
            ((), (zero_out, zero_lse)), ((None, None), (zero_out, zero_lse)),
        ):  # fmt: skip
            for one, other in zip(pullback(*given), pullback(*full), strict=True):
                assert (one is None) == (other is None)
                assert one is None or np.allclose(one, other, rtol=1e-6, atol=1e-7)
        assert pullback(d_lse=d_lse).v.any() == False  # noqa: E712 - v does not reach lse


def test_a_pullback_may_be_called_again(make: Make) -> None:
    q, k, v = make()
    out, pullback = attnx.attention_vjp(q, k, v, causal=True)
    for one, other in zip(pullback(out), pullback(out), strict=True):
        assert one is other is None or np.array_equal(one, other)


def test_a_pullback_is_linear(make: Make) -> None:
    q, k, v = make(dtype="float64")
    (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, softcap=2.0)
    one, other = pullback(out, lse), pullback(out * 0 + 1, lse * 0 - 2)
    both = pullback(3 * out + 1, 3 * lse - 2)
    for a, b, ab in zip(one[:3], other[:3], both[:3], strict=True):
        np.testing.assert_allclose(3 * a + b, ab, rtol=1e-9, atol=1e-11)


BIASES = [
    (6, 7), (1, 7), (6, 1), (1, 1), (1, 1, 1, 1, 1), (2, 3, 4, 6, 7), (1, 3, 4, 6, 7),
    (2, 1, 4, 6, 7), (2, 1, 1, 1, 7), (1, 3, 1, 6, 1), (1, 1, 4, 1, 1), (2, 3, 1, 6, 7),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_a_bias_gets_its_gradient_in_its_own_shape(
    shape: tuple[int, ...], layout: str, make: Make, agree: Agree
) -> None:
    """S6.3: summed over every broadcast axis, partly broadcast batches included."""
    q, k, v = make(B=(2, 3), Lk=7, layout=layout)
    bias = np.random.default_rng(1).standard_normal(shape).astype(f32)
    bias[(0,) * len(shape)] = -np.inf
    agree(q, k, v, bias=bias, layout=layout, causal="bottom_right")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gradient_of_a_half_bias_is_summed_in_float32(
    dtype: str, make: Make, agree: Agree
) -> None:
    """S5.2: 128 entries share each element, along batch axes of every kind."""
    q, k, v = make(B=(64, 2), Hq=2, Hk=2, dtype=dtype)
    for shape in ((1, 2, 2, 6, 6), (64, 1, 2, 6, 6), (6, 6), (1, 1, 1, 1, 6)):
        agree(q, k, v, bias=np.zeros(shape, q.dtype))


def test_the_gradient_of_a_half_bias_may_pass_beyond_its_range_on_the_way() -> None:
    """S5.2, S5.3: 120000 in the sum over entries, then 0 again."""
    for B, shape in (((16, 2), (1, 2, 1, 1, 2)), ((2, 16), (2, 1, 1, 1, 2))):
        q, k = np.zeros((*B, 1, 1, 1), np.float16), np.zeros((*B, 1, 2, 1), np.float16)
        v = np.broadcast_to(np.array([[1], [-1]], np.float16), k.shape)
        _, pullback = attnx.attention_vjp(q, k, v, bias=np.zeros(shape, np.float16))
        signs = np.where(np.arange(16) < 8, 1, -1).reshape([n if n == 16 else 1 for n in B])
        d_out = np.broadcast_to(60000 * signs, B).astype(np.float16).reshape(q.shape)
        same(pullback(d_out).bias, 0)


@pytest.mark.parametrize("shape", [(6, 7), (4, 6, 7), (1, 1, 7), (4, 1, 1)], ids=str)
def test_a_bias_beside_three_axes(shape: tuple[int, ...], make: Make, agree: Agree) -> None:
    q, k, v = make(B=(), Lk=7)
    agree(q, k, v, bias=np.random.default_rng(1).standard_normal(shape).astype(f32))


def test_gradients_that_do_not_exist_are_none(make: Make) -> None:
    q, k, v = make()
    out, pullback = attnx.attention_vjp(q, k, v)
    grads = pullback(out)
    assert (grads.bias, grads.sinks) == (None, None)
    assert isinstance(grads, attnx.Gradients)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (([1.0],), ArgumentTypeError, "d_out: expected a numpy array like q, got list"),
        ((3.0,), ArgumentTypeError, "d_out: expected a numpy array like q, got float"),
        (
            (np.ma.ones((2, 4, 6, 5)),), ArgumentTypeError,
            "d_out: expected a numpy array like q, got MaskedArray",
        ),
        (
            (np.ones((2, 4, 6, 8), f32),), ArgumentError,
            "d_out: expected the shape of out, (2, 4, 6, 5), got (2, 4, 6, 8)",
        ),
        (
            (np.ones((5,), f32),), ArgumentError,
            "d_out: expected the shape of out, (2, 4, 6, 5), got (5,)",
        ),
        (
            (np.ones((2, 4, 6, 5)),), ArgumentTypeError,
            "d_out: expected the dtype of out, float32, got float64",
        ),
        (
            (None, np.ones((2, 4, 6, 1), f32)), ArgumentError,
            "d_lse: expected the shape of lse, (2, 4, 6), got (2, 4, 6, 1)",
        ),
        (
            (None, np.ones((2, 4, 6), np.float16)), ArgumentTypeError,
            "d_lse: expected the dtype of lse, float32, got float16",
        ),
    ],
    ids=["list", "float", "masked", "shape", "axes", "dtype", "shape of lse", "dtype of lse"],
)  # fmt: skip
def test_a_cotangent_that_does_not_fit_is_told(
    given: tuple[Any, ...], kind: type[Exception], message: str, make: Make
) -> None:
    _, pullback = attnx.attention_vjp(*make(), return_lse=True)
    with pytest.raises(kind) as caught:
        pullback(*given)
    assert str(caught.value) == message


def test_a_cotangent_of_an_lse_that_was_not_returned_is_told(make: Make) -> None:
    out, pullback = attnx.attention_vjp(*make())
    with pytest.raises(ArgumentError) as caught:
        pullback(out, out[..., 0])
    assert str(caught.value) == "d_lse: lse was not returned; pass return_lse=True to use it"
