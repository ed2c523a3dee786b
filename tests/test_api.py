"""The public calls on NumPy: S1, S2 and S2.5 clause by clause, against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnx
from attnx import Causal, Lengths
from attnx_conformance.oracle import Reference, reference
from attnx_conformance.tolerance import bounds, judge

Make = Callable[..., tuple[Any, Any, Any]]
Agree = Callable[..., Reference]
f32 = np.float32
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def same(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one, other)


# S1 The call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("B", [(), (2,), (2, 3), (1, 2, 3)], ids=str)
def test_any_number_of_batch_axes_in_either_layout(
    B: tuple[int, ...], layout: str, make: Make, agree: Agree
) -> None:
    """S1.1, with every kind of option whose shape follows the batch."""
    q, k, v = make(B=B, Lk=7, layout=layout)
    agree(q, k, v, layout=layout)
    counts = np.arange(np.prod(B, dtype=int)).reshape(B) % 7
    options = {"mask": Lengths(counts), "causal": "bottom_right", "sinks": np.ones(4, f32)}
    agree(q, k, v, layout=layout, **options)
    full = np.random.default_rng(1).standard_normal((*B, 4, 6, 7)).astype(f32)
    agree(q, k, v, layout=layout, bias=full, mask=full > -1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_two_axes_are_one_head_without_a_batch(layout: str, make: Make, agree: Agree) -> None:
    """S1.1: in either layout."""
    q, k, v = make(rank=2, Lk=7)
    bias = np.random.default_rng(1).standard_normal((6, 7)).astype(f32)
    agree(q, k, v, layout=layout, bias=bias, mask=Lengths(5), sinks=np.ones(1, f32))
    assert attnx.attention_weights(q, k).shape == (6, 7)


def test_the_two_layouts_are_one_answer(make: Make) -> None:
    """S1.1: the same bits, and the axes of bias, mask and weights stay (*B, Hq, Lq, Lk)."""
    q, k, v = make(B=(2, 3), Lk=7)
    options = {"bias": np.ones((1, 3, 4, 6, 7), f32), "causal": "top_left", "return_lse": True}
    out, lse = attnx.attention(q, k, v, **options)
    swapped = [array.swapaxes(-3, -2) for array in (q, k, v)]
    other, other_lse = attnx.attention(*swapped, layout="bshd", **options)
    assert other.shape == (2, 3, 6, 4, 5)
    same(other.swapaxes(-3, -2), out)
    same(other_lse.swapaxes(-2, -1), lse)
    weights = attnx.attention_weights(q, k)
    same(attnx.attention_weights(*swapped[:2], layout="bshd"), weights)


SIZES = {
    "B = 0": {"B": (0,)}, "B = 2, 0": {"B": (2, 0)}, "Lq = 0": {"Lq": 0}, "Lk = 0": {"Lk": 0},
    "both 0": {"Lq": 0, "Lk": 0}, "2-D Lk = 0": {"rank": 2, "Lk": 0},
    "3-D Lq = 0": {"B": (), "Lq": 0},
    "D = 1": {"D": 1, "Dv": 1}, "Lq = Lk = 1": {"Lq": 1, "Lk": 1}, "D < Dv": {"D": 2, "Dv": 33},
    "D > Dv": {"D": 33, "Dv": 1}, "one group": {"Hq": 6, "Hk": 1}, "no groups": {"Hq": 3, "Hk": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_0_and_1_are_legal(name: str, make: Make, agree: Agree) -> None:
    """S1.2, S3.7: an empty batch gives an empty result, no keys give 0 and -inf."""
    shape = {"Lk": 3, "Lq": 2} | SIZES[name]
    q, k, v = make(**shape)
    rank, Hq, Lq, Lk = q.ndim, shape.get("Hq", 4) if q.ndim > 2 else 1, shape["Lq"], shape["Lk"]
    agree(q, k, v)
    agree(q, k, v, causal="bottom_right", scale=-0.5, softcap=2.0)
    agree(q, k, v, sinks=np.linspace(-1, 1, Hq, dtype=f32), causal="top_left")
    full = (*q.shape[:-3], *((Hq,) if rank > 2 else ()), Lq, Lk)
    agree(q, k, v, bias=np.ones(full, f32), mask=np.ones(full, bool))
    agree(q, k, v, bias=np.ones((1, Lk), f32), mask=np.ones((Lq, 1), bool))
    assert attnx.attention_weights(q, k).shape == full
    layout = {"layout": "bshd"} if rank > 2 else {}
    agree(*make(**(shape | layout)), **layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_as_it_came(dtype: str, make: Make, agree: Agree) -> None:
    """S5.1, S2.2: out in q's dtype, lse in float32 or float64; checked by `agree`."""
    q, k, v = make(dtype=dtype, Lk=9)
    wide = f32 if dtype != "float64" else np.float64
    bias = np.random.default_rng(1).standard_normal((1, 4, 1, 9))
    agree(q, k, v, bias=bias.astype(q.dtype), sinks=np.ones(4).astype(q.dtype))
    agree(q, k, v, bias=bias.astype(wide), sinks=np.ones(4, f32), causal="bottom_right")
    assert attnx.attention_weights(q, k).dtype == q.dtype


def test_query_heads_of_a_group_are_consecutive(make: Make) -> None:
    """S1.3: head h reads h // (Hq // Hk)."""
    q, k, v = make(Hq=6, Hk=2)
    out = attnx.attention(q, k, v)
    repeated = attnx.attention(q, np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1))
    np.testing.assert_allclose(out, repeated, rtol=1e-5, atol=1e-6)
    for h in range(6):
        alone = attnx.attention(q[:, [h]], k[:, [h // 3]], v[:, [h // 3]])
        np.testing.assert_allclose(out[:, [h]], alone, rtol=1e-5, atol=1e-6)


def strided(array: Any) -> dict[str, Any]:
    """The same values with other strides."""
    twice = np.repeat(array, 2, axis=-1)
    padded = np.zeros(tuple(n + 3 for n in array.shape), array.dtype)
    padded[tuple(slice(2, 2 + n) for n in array.shape)] = array
    return {
        "reversed": array[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
        "transposed": array.swapaxes(-1, -2).copy().swapaxes(-1, -2),
        "heads last": np.moveaxis(np.moveaxis(array, 1, -1).copy(), -1, 1),
        "fortran": np.asfortranarray(array),
        "every second": twice[..., ::2],
        "offset": padded[tuple(slice(2, 2 + n) for n in array.shape)],
        "unaligned": unaligned(array),
    }


def unaligned(array: Any) -> Any:
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


NAMES = ["reversed", "transposed", "heads last", "fortran", "every second", "offset", "unaligned"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_strides_give_the_contiguous_answer(name: str, dtype: str, make: Make) -> None:
    """S1.4: q, k, v, bias, mask and the cotangents, alone and together."""
    q, k, v = make(dtype=dtype, Lk=7)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((2, 4, 6, 7)).astype(dtype)
    given = [q, k, v, bias, bias > -1, rng.standard_normal((2, 4, 6, 5)).astype(dtype)]
    moved = [strided(array)[name] for array in given]
    for array, other in zip(given, moved, strict=True):
        same(array, other)

    def answers(q: Any, k: Any, v: Any, bias: Any, mask: Any, d_out: Any) -> list[Any]:
        (out, lse), pullback = attnx.attention_vjp(q, k, v, bias=bias, mask=mask, return_lse=True)
        return [out, lse, *pullback(d_out, lse)[:4], attnx.attention_weights(q, k, bias=bias)]

    tight = 2e-3 if dtype == "float16" else 1e-5
    expected = answers(*given)
    for one, other in zip(answers(*moved), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tight, atol=tight)


def test_strides_of_0_give_the_answer_of_a_copy(make: Make, agree: Agree) -> None:
    """S1.4: broadcast q, k, v, bias and d_out; a gradient has a value for each element."""
    q, k, v = make(Lk=7)
    wide = [np.broadcast_to(a[:1, :1, :1], a.shape) for a in (q, k, v)]
    d_out = np.broadcast_to(f32(0.5), (2, 4, 6, 5))
    d_lse = np.broadcast_to(f32(2), (2, 4, 6))
    bias = np.broadcast_to(np.ones((1, 4, 1, 7), f32), (2, 4, 6, 7))
    agree(*wide, bias=bias, d_out=d_out, d_lse=d_lse)
    agree(q, wide[1], v, d_out=d_out, d_lse=d_lse)


def test_inputs_are_never_modified(make: Make) -> None:
    """S1.4: read-only inputs are enough, and cotangents too."""
    q, k, v = make()
    bias, sinks = np.ones((1, 4, 6, 6), f32), np.ones(4, f32)
    mask = Lengths(np.array([3, 6])) & attnx.Dense(np.tri(6, dtype=bool))
    inputs = [q, k, v, bias, sinks, *[leaf for *_, leaf in attnx.masks.leaves(mask)]]
    for array in inputs:
        array.flags.writeable = False
    for softcap, layout in itertools.product((None, 2.0), ("bhsd", "bshd")):
        given = [a.swapaxes(1, 2) if layout == "bshd" else a for a in (q, k, v)]
        options = {"mask": mask, "bias": bias, "sinks": sinks, "softcap": softcap}
        (out, lse), pullback = attnx.attention_vjp(
            *given, return_lse=True, layout=layout, **options
        )
        d_out, d_lse = np.ones_like(out), np.ones_like(lse)
        d_out.flags.writeable = d_lse.flags.writeable = False
        pullback(d_out, d_lse)
        attnx.attention_weights(*given[:2], layout=layout, **options)


def test_results_alias_neither_inputs_nor_each_other(make: Make) -> None:
    """S1.4: also where a result happens to equal an input."""
    for shape in ({}, {"rank": 2}, {"B": ()}, {"Lk": 1}, {"Lq": 1, "Lk": 1, "Hk": 4}):
        q, k, v = make(**shape)
        q4 = np.ones(4 if q.ndim > 2 else 1, f32)
        bias = np.zeros((1, k.shape[-2]), f32)
        (out, lse), pullback = attnx.attention_vjp(q, k, v, bias=bias, sinks=q4, return_lse=True)
        d_out, d_lse = np.ones_like(out), np.ones_like(lse)
        grads = pullback(d_out, d_lse)
        again = pullback(d_out, d_lse)
        inputs, results = [q, k, v, bias, q4, d_out, d_lse], [out, lse, *grads, *again]
        for one, other in itertools.product(results, inputs):
            assert not np.shares_memory(one, other)
        for one, other in itertools.combinations(results, 2):
            assert not np.shares_memory(one, other)
        for result in results:
            assert result.flags.writeable


def test_the_answer_may_be_written_into_before_the_pullback(make: Make) -> None:
    """S1.5: it belongs to the caller, who adds a residual to it in place."""
    q, k, v = make()
    for layout in ("bhsd", "bshd"):
        shape = {"Hq": 6, "Hk": 6} if layout == "bshd" else {}
        q, k, v = make(**shape)
        (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, layout=layout)
        d_out = np.ones_like(out)
        expected = pullback(d_out, d_out[..., 0])
        out += 7
        lse *= 0
        for one, other in zip(pullback(d_out, d_out[..., 0]), expected, strict=True):
            assert one is other is None or np.array_equal(one, other)


# S2 The formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0, 0.0, 1, -1, -0.3, 2.5, np.float64(1e-3)], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.5, 30])
def test_scale_then_softcap_then_bias_then_mask(
    scale: Any, softcap: Any, make: Make, agree: Agree
) -> None:
    """S2.1: the order is fixed; any finite scale is legal."""
    q, k, v = make(Lk=7)
    bias = np.random.default_rng(1).standard_normal((2, 1, 6, 7)).astype(f32) * 3
    agree(q, k, v, scale=scale, softcap=softcap)
    agree(q, k, v, scale=scale, softcap=softcap, bias=bias, causal="bottom_right")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [1e-300, 1e-50, 1e-30, 1e30, 1e39, 1e300])
def test_any_positive_softcap_is_legal(softcap: float, dtype: str, make: Make) -> None:
    """S2: a huge one changes nothing, a tiny one makes every score 0; never NaN (S5.3)."""
    q, k, v = make(dtype=dtype)
    q[0, 0, 0] = 0
    out, pullback = attnx.attention_vjp(q, k, v, softcap=softcap)
    expected = attnx.attention(q, k, v, scale=0.0 if softcap < 1 else None)
    loose = 1e-2 if "16" in dtype else 1e-5
    np.testing.assert_allclose(out.astype(f32), expected.astype(f32), rtol=loose, atol=loose)
    assert all(np.isfinite(gradient).all() for gradient in pullback(out)[:3])


def test_a_sink_takes_its_share_of_every_row(make: Make, agree: Agree) -> None:
    """S2.3, S3.7: an empty row has out 0 and lse its sink."""
    q, k, v = make()
    sinks = np.array([-50, -1, 3, 60], f32)
    agree(q, k, v, sinks=sinks, mask=Lengths([0, 3], 4))
    out, lse = attnx.attention(q, k, v, sinks=sinks, mask=Lengths(0), return_lse=True)
    same(out, 0)
    same(lse, np.broadcast_to(sinks[:, None], lse.shape))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.zeros((5, 6), bool)}, {"mask": Lengths(0)}, {"mask": Lengths(6, 0)},
        {"mask": attnx.Starts(6)}, {"bias": np.full((5, 6), -np.inf, f32)},
        {"mask": attnx.Prefix(0)}, {"mask": ~attnx.Prefix(6)},
        {"mask": attnx.Segments([-1] * 5, [-1] * 6)},
        {"causal": "bottom_right", "mask": Lengths(0)},
        {"mask": Causal(q_pos=np.full(5, -1))}, {"mask": attnx.Predicate(lambda b, h, i, j: i < 0)},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_sees_nothing_is_the_same_in_every_spelling(
    options: dict[str, Any], make: Make
) -> None:
    """S3.7: out 0, lse -inf, gradients 0; q and the cotangents may hold NaN there."""
    q, k, v = make(Lq=5)
    q[:] = np.nan
    (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, **options)
    same(out, 0)
    same(lse, -np.inf)
    for gradient in pullback(out * np.nan, lse * np.nan)[:4]:
        assert gradient is None or not gradient.any()
    weights = {name: value for name, value in options.items() if name != "v"}
    same(attnx.attention_weights(q, k, **weights), 0)


# S2.5 attention_weights -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_are_those_that_the_answer_is_made_with(dtype: str, make: Make) -> None:
    """S2.5, within the bound; a row sums to 1 without sinks (S7)."""
    q, k, _ = make(dtype=dtype, Lk=9)
    for options in (
        {}, {"causal": "bottom_right"}, {"mask": Lengths([0, 4]), "softcap": 3.0},
        {"bias": np.linspace(-2, 2, 54).reshape(6, 9).astype(dtype), "scale": -1.0},
        {"sinks": np.ones(4).astype(dtype)},
    ):  # fmt: skip
        if dtype == "bfloat16":
            options = {
                name: np.asarray(x, ml_dtypes.bfloat16) if name in ("bias", "sinks") else x
                for name, x in options.items()
            }
        got = attnx.attention_weights(q, k, **options)
        expected = reference(q, k, **options)
        verdict = judge(got, expected.weights, bounds(expected, dtype).weights)
        assert verdict.ok, verdict.detail
        if "sinks" not in options:
            sums = got.astype(np.float64).sum(axis=-1)
            live = expected.visible.any(axis=-1)
            np.testing.assert_allclose(sums, live, atol=2e-2 if "16" in dtype else 1e-5)
