"""Every message of S8.1: the argument, what was expected with axis names, what came, what to do.

The messages are pinned: they are what a user meets first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Prefix, Starts
from attnx.errors import ArgumentError, ArgumentTypeError, AttnxError

rng = np.random.default_rng(0)
f32 = np.float32
q = rng.standard_normal((2, 4, 6, 8), dtype=f32)
k = rng.standard_normal((2, 2, 6, 8), dtype=f32)
v = rng.standard_normal((2, 2, 6, 5), dtype=f32)
six = np.arange(6)


def masked(array: Any) -> Any:
    return np.ma.array(array)


def frozen(options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    rest = {name: value for name, value in options.items() if name not in ("q", "k", "v")}
    return options.get("q", q), options.get("k", k), options.get("v", v), rest


def cases(kind: type[Exception], **named: tuple[dict[str, Any], str]) -> list[Any]:
    return [
        pytest.param(options, kind, message, id=name.replace("_", " "))
        for name, (options, message) in named.items()
    ]


LIKE_Q = "expected a numpy array like q, got "
FLOATS = "expected one of float16, bfloat16, float32, float64, got "
CONVERT = "; nothing is cast silently, so convert it first"
ONE_DTYPE = "; q, k and v have one dtype"
BESIDE = "expected float32 beside float32 q, k and v, got "
OWN_MEANING = (
    "has a meaning of its own that attention would drop; convert it to a plain numpy array first"
)

FRAMEWORKS = cases(
    ArgumentTypeError,
    k_list=({"k": k.tolist()}, f"k: {LIKE_Q}list"),
    v_None=({"v": None}, f"v: {LIKE_Q}NoneType"),
    k_scalar=({"k": f32(1)}, f"k: {LIKE_Q}float32"),
    k_masked=({"k": masked(k)}, f"k: MaskedArray {OWN_MEANING}"),
    q_masked=({"q": masked(q)}, f"q: MaskedArray {OWN_MEANING}"),
    bias_masked=({"bias": masked(np.ones((6, 6), f32))}, f"bias: MaskedArray {OWN_MEANING}"),
    bias_float=({"bias": 1.0}, f"bias: {LIKE_Q}float"),
    bias_numpy_scalar=({"bias": f32(1)}, f"bias: {LIKE_Q}float32"),
    bias_list=({"bias": [[1.0]]}, f"bias: {LIKE_Q}list"),
    bias_mask=({"bias": Causal()}, f"bias: {LIKE_Q}Causal"),
    sinks_list=({"sinks": [0.0] * 4}, f"sinks: {LIKE_Q}list"),
    sinks_float=({"sinks": 0.0}, f"sinks: {LIKE_Q}float"),
)  # fmt: skip

DTYPES = cases(
    ArgumentTypeError,
    integers=({"q": q.astype(int), "k": k.astype(int)}, f"q: {FLOATS}int64{CONVERT}"),
    booleans=({"q": q > 0}, f"q: {FLOATS}bool{CONVERT}"),
    complex=({"q": q + 0j}, f"q: {FLOATS}complex64{CONVERT}"),
    objects=({"q": q.astype(object)}, f"q: {FLOATS}object{CONVERT}"),
    integer_k=({"k": k.astype(np.int8)}, f"k: {FLOATS}int8{CONVERT}"),
    big_endian=({"q": q.astype(">f4")}, f"q: {FLOATS}float32 (swapped bytes){CONVERT}"),
    big_endian_k=({"k": k.astype(">f4")}, f"k: {FLOATS}float32 (swapped bytes){CONVERT}"),
    float8=(
        {"q": q.astype(ml_dtypes.float8_e5m2)}, f"q: {FLOATS}float8_e5m2{CONVERT}"
    ),
    mixed_k=(
        {"k": k.astype(np.float64)},
        f"k: expected the dtype of q, float32, got float64{ONE_DTYPE}",
    ),
    mixed_v=(
        {"v": v.astype(np.float16)},
        f"v: expected the dtype of q, float32, got float16{ONE_DTYPE}",
    ),
    mixed_halves=(
        {"q": q.astype(np.float16), "k": k.astype(ml_dtypes.bfloat16)},
        f"k: expected the dtype of q, float16, got bfloat16{ONE_DTYPE}",
    ),
    bias_bool=(
        {"bias": np.ones((6, 6), bool)},
        "bias: expected floating values that are added to the scores, got bool; pass a boolean "
        "array as mask=",
    ),
    bias_int=({"bias": np.ones((6, 6), int)}, f"bias: {BESIDE}int64{CONVERT}"),
    bias_wide=({"bias": np.ones((6, 6))}, f"bias: {BESIDE}float64{CONVERT}"),
    bias_half=({"bias": np.ones((6, 6), np.float16)}, f"bias: {BESIDE}float16{CONVERT}"),
    bias_big_endian=(
        {"bias": np.ones((6, 6), ">f4")}, f"bias: {BESIDE}float32 (swapped bytes){CONVERT}"
    ),
    bias_beside_half=(
        {x: a.astype(np.float16) for x, a in (("q", q), ("k", k), ("v", v))}
        | {"bias": np.ones((6, 6))},
        "bias: expected float16 or float32 beside float16 q, k and v, got float64" + CONVERT,
    ),
    sinks_wide=({"sinks": np.ones(4)}, f"sinks: {BESIDE}float64{CONVERT}"),
    sinks_bool=({"sinks": np.ones(4, bool)}, f"sinks: {BESIDE}bool{CONVERT}"),
)  # fmt: skip

SHAPES = cases(
    ArgumentError,
    q_0_axes=(
        {"q": np.array(1, f32)},
        "q: expected (*B, Hq, Lq, D) with as many axes as q, at least 2, got shape ()",
    ),
    q_1_axis=(
        {"q": q[0, 0, 0]},
        "q: expected (*B, Hq, Lq, D) with as many axes as q, at least 2, got shape (8,)",
    ),
    k_rank=(
        {"k": k[0]},
        "k: expected (*B, Hk, Lk, D) with as many axes as q, at least 2, got shape (2, 6, 8) "
        "beside q (2, 4, 6, 8)",
    ),
    batch=(
        {"k": k[:1]},
        "k: expected the batch axes of q, (2,), got (1,); batch axes are never broadcast, so "
        "expand them",
    ),
    batch_of_v=(
        {"v": v[:1]},
        "v: expected the batch axes of q, (2,), got (1,); batch axes are never broadcast, so "
        "expand them",
    ),
    head_size=(
        {"k": k[..., :7]},
        "k: expected (*B, Hk, Lk, D) with the head size D of q, 8, got 7 in (2, 2, 6, 7) "
        "(q is (2, 4, 6, 8), k is (2, 2, 6, 7), layout 'bhsd')",
    ),
    keys=(
        {"v": v[:, :, :5]},
        "v: expected (*B, Hk, Lk, Dv) with the number of keys Lk of k, 6, got 5 in (2, 2, 5, 5) "
        "(q is (2, 4, 6, 8), k is (2, 2, 6, 8), layout 'bhsd')",
    ),
    heads_of_v=(
        {"v": v[:, :1]},
        "v: expected (*B, Hk, Lk, Dv) with the number of heads Hk of k, 2, got 1 in (2, 1, 6, 5) "
        "(q is (2, 4, 6, 8), k is (2, 2, 6, 8), layout 'bhsd')",
    ),
    head_size_0=(
        {"q": q[..., :0], "k": k[..., :0]},
        "q: expected (*B, Hq, Lq, D) with a head size >= 1, got (2, 4, 6, 0)",
    ),
    value_size_0=(
        {"v": v[..., :0]},
        "v: expected (*B, Hk, Lk, Dv) with a head size >= 1, got (2, 2, 6, 0)",
    ),
    group=(
        {"q": q[:, :3]},
        "q: expected Hq to be a multiple of Hk, both >= 1, got Hq=3 and Hk=2 from q (2, 3, 6, 8) "
        "and k (2, 2, 6, 8) in layout 'bhsd'; is it the other layout?",
    ),
    no_query_head=(
        {"q": q[:, :0]},
        "q: expected Hq to be a multiple of Hk, both >= 1, got Hq=0 and Hk=2 from q (2, 0, 6, 8) "
        "and k (2, 2, 6, 8) in layout 'bhsd'; is it the other layout?",
    ),
    no_key_head=(
        {"k": k[:, :0], "v": v[:, :0]},
        "q: expected Hq to be a multiple of Hk, both >= 1, got Hq=4 and Hk=0 from q (2, 4, 6, 8) "
        "and k (2, 0, 6, 8) in layout 'bhsd'; is it the other layout?",
    ),
    other_layout=(
        {"layout": "bshd", "q": q, "k": k[:, :, :4], "v": v[:, :, :4]},
        "q: expected Hq to be a multiple of Hk, both >= 1, got Hq=6 and Hk=4 from q (2, 4, 6, 8) "
        "and k (2, 2, 4, 8) in layout 'bshd'; is it the other layout?",
    ),
    layout_D=(
        {"layout": "bshd", "k": k[..., :7]},
        "k: expected (*B, Lk, Hk, D) with the head size D of q, 8, got 7 in (2, 2, 6, 7) "
        "(q is (2, 4, 6, 8), k is (2, 2, 6, 7), layout 'bshd')",
    ),
    bias_3_axes=(
        {"bias": np.ones((4, 6, 6), f32)},
        "bias: expected shape (Lq, Lk) = (6, 6) or (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 "
        "or full, got 3 axes (4, 6, 6) (is it (B, Lq, Lk) or (Hq, Lq, Lk)?); bias[:, None] or "
        "bias[None] says which",
    ),
    bias_of_bshd=(
        {"layout": "bshd", "bias": np.ones((2, 4, 6, 2), f32)},
        "bias: expected shape (*B, Hq, Lq, Lk) = (2, 6, 4, 2), each axis 1 or full, got "
        "(2, 4, 6, 2); the axes of a mask or a bias are the same in either layout",
    ),
    sinks_of_key_heads=(
        {"sinks": np.ones(2, f32)},
        "sinks: expected shape (Hq,) = (4,), one logit a query head, got (2,)",
    ),
    sinks_2_axes=(
        {"sinks": np.ones((1, 4), f32)},
        "sinks: expected shape (Hq,) = (4,), one logit a query head, got (1, 4)",
    ),
)  # fmt: skip

VALUES = cases(
    ArgumentError,
    layout=({"layout": "BHSD"}, "layout: expected 'bhsd' or 'bshd', got 'BHSD'"),
    layout_None=({"layout": None}, "layout: expected 'bhsd' or 'bshd', got None"),
    layout_list=({"layout": ["bhsd"]}, "layout: expected 'bhsd' or 'bshd', got ['bhsd']"),
    scale_nan=({"scale": math.nan}, "scale: expected a finite number, got nan"),
    scale_beyond=(
        {"scale": 1e39},
        "scale: expected a number within float32's range, 3.4e+38, in which the scores of float32 "
        "arrays are held, got 1e+39; multiply q by part of it",
    ),
    scale_inf=({"scale": -math.inf}, "scale: expected a finite number, got -inf"),
    scale_huge=({"scale": 10**400}, "scale: expected a number that fits into a float"),
    softcap_0=(
        {"softcap": 0}, "softcap: expected a finite number > 0, got 0.0; None means no softcap"
    ),
    softcap_negative=(
        {"softcap": -5.0}, "softcap: expected a finite number > 0, got -5.0; None means no softcap"
    ),
    softcap_inf=(
        {"softcap": math.inf},
        "softcap: expected a finite number > 0, got inf; None means no softcap",
    ),
    no_backend=(
        {"backend": []}, "backend: expected at least one backend, got an empty sequence"
    ),
)  # fmt: skip

BACKEND = "backend: expected a name, a Backend or a sequence of them, got "
TYPES = cases(
    ArgumentTypeError,
    scale_bool=({"scale": True}, "scale: expected a real number, got the boolean True"),
    scale_numpy_bool=({"scale": np.True_}, "scale: expected a real number, got the boolean True"),
    scale_0_axes=(
        {"scale": np.array(0.5)},
        "scale: expected a Python or NumPy scalar, got numpy.ndarray; multiply q by it and pass "
        "scale=1.0",
    ),
    scale_complex=(
        {"scale": 1j},
        "scale: expected a Python or NumPy scalar, got builtins.complex; multiply q by it and "
        "pass scale=1.0",
    ),
    softcap_array=(
        {"softcap": np.ones(1)},
        "softcap: expected a Python or NumPy scalar, got numpy.ndarray; pass a float",
    ),
    softcap_text=(
        {"softcap": "5"},
        "softcap: expected a Python or NumPy scalar, got builtins.str; pass a float",
    ),
    return_lse_1=({"return_lse": 1}, "return_lse: expected True or False, got 1"),
    return_lse_numpy=(
        {"return_lse": np.True_}, "return_lse: expected True or False, got np.True_"
    ),
    assume_finite_None=(
        {"assume_finite": None}, "assume_finite: expected True or False, got None"
    ),
    backend_int=({"backend": 3}, f"{BACKEND}int"),
    backend_set=({"backend": {"numpy"}}, f"{BACKEND}set"),
    backend_bytes=({"backend": b"numpy"}, f"{BACKEND}bytes"),
    backend_inside=({"backend": ["numpy", None]}, f"{BACKEND}NoneType"),
    backend_class=({"backend": type(attnx.get_backend("numpy"))}, f"{BACKEND}type"),
)  # fmt: skip

EVERY = [*FRAMEWORKS, *DTYPES, *SHAPES, *VALUES, *TYPES]


@pytest.mark.parametrize(("options", "kind", "message"), EVERY)
def test_wrong_use_is_told_before_anything_is_computed(
    options: dict[str, Any], kind: type[Exception], message: str, marked: Callable[..., Any]
) -> None:
    """S8.1, at every entry, also after a right call of the same kind has been planned."""
    backend = marked("counting", 1.0)
    a, b, c, rest = frozen(options)
    attnx.attention(q, k, v, backend="counting")
    rest = {"backend": "counting"} | rest
    before = len(backend.calls)
    for call in (attnx.attention, attnx.attention_vjp, attnx.explain, attnx.plan):
        with pytest.raises(kind) as caught:
            call(a, b, c, **rest)
        assert str(caught.value) == message, call.__name__
        assert isinstance(caught.value, AttnxError)
    assert len(backend.calls) == before


@pytest.mark.parametrize(
    "wrong", [[1.0], None, 3, "q", f32(1), {"q": 1}], ids=lambda x: type(x).__name__
)
def test_a_q_that_is_no_array_names_the_frameworks(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        attnx.attention(wrong, k, v)
    text = str(caught.value)
    assert text.startswith("q: expected an array of a registered framework (")
    assert "numpy.ndarray" in text
    assert text.endswith(f"got {type(wrong).__module__}.{type(wrong).__qualname__}")


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_refused() -> None:
    """Its `*` is a product of its own."""
    with pytest.raises(ArgumentTypeError, match=f"^q: matrix {OWN_MEANING}$"):
        attnx.attention(np.matrix(q[0, 0]), k[0, 0], v[0, 0])


def test_arrays_of_two_frameworks_name_each_ones(loop: Callable[..., Any]) -> None:
    """Design section 3; a mask's leaf, a bias and a sink count too."""
    xp = loop().lane.xp
    there = xp.asarray(k.copy())
    with pytest.raises(ArgumentTypeError) as caught:
        attnx.attention(q, there, v)
    assert str(caught.value) == (
        "k: expected an array of q's framework, numpy; arrays of different frameworks came in one "
        "call: q is numpy.ndarray, k is array_api_strict.Array, v is numpy.ndarray. Convert k to "
        "numpy first"
    )
    for options in (
        {"mask": xp.ones((6, 6), dtype=xp.bool)}, {"bias": xp.zeros((6, 6), dtype=xp.float32)},
        {"sinks": xp.zeros(4, dtype=xp.float32)}, {"mask": Lengths(xp.asarray([1, 2]))},
        {"mask": Causal() & ~Dense(xp.ones((6, 6), dtype=xp.bool))},
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match="arrays of different frameworks came in one"):
            attnx.attention(q, k, v, **options)
    with pytest.raises(ArgumentTypeError, match=r"q's framework, loop; .* k is numpy\.ndarray"):
        attnx.attention(xp.asarray(q.copy()), k, v)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0}, {"scale": -2}, {"scale": np.float16(0.5)}, {"scale": np.int64(2)},
        {"scale": Fraction(1, 3)}, {"softcap": np.float32(3)}, {"softcap": 7},
        {"mask": Lengths(0)}, {"mask": Lengths(6, 6)},
        {"mask": Lengths(np.array([0, 6], np.uint8))},
        {"mask": Lengths(np.array([0, 6], np.uint64))}, {"mask": Lengths(np.array([1, 2], ">i2"))},
        {"mask": Starts(6)}, {"mask": Prefix((1, 2))}, {"mask": Causal(q_pos=six - 3)},
        {"mask": np.ones((1, 1), bool)}, {"mask": np.ones((2, 1, 1, 6), bool)},
        {"bias": np.zeros((1, 1, 1, 1), f32)}, {"backend": ("numpy",)},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_unusual_and_legal_is_taken(options: dict[str, Any]) -> None:
    assert attnx.attention(q, k, v, **options).shape == (2, 4, 6, 5)


def test_a_subclass_that_means_the_same_is_taken(tmp_path: Any) -> None:
    """A memory-mapped file is an array like any other."""
    mapped = np.memmap(tmp_path / "q", f32, "w+", shape=q.shape)
    mapped[:] = q
    out = attnx.attention(mapped, k, v)
    assert type(out) is np.ndarray
    assert np.array_equal(out, attnx.attention(q, k, v))


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    for call in (attnx.attention, attnx.explain, attnx.plan):
        with pytest.raises(TypeError, match="casual"):
            call(q, k, v, casual=True)
