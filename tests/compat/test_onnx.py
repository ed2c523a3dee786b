"""ONNX's drop-in against ONNX's own cases, and what they leave out."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnx
from attnx.compat import onnx
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx_conformance import onnx_cases
from attnx_conformance.onnx_cases import OnnxCase

TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2}
B, HQ, HK, LQ, LK, D = 2, 4, 2, 3, 5, 8
SOME = [
    "test_attention_4d_gqa_softcap",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "test_attention_3d_with_past_and_present_qk_matmul_softcap",
    "test_attention_4d_with_qk_matmul_softmax",
    "test_attention_4d_causal_padded_kv_bf16",
    "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
    "test_attention_local_window_with_past",
    "test_attention_local_window_gqa_rank4_mask",
]
needs_onnx = pytest.mark.skipif(find_spec("onnx") is None, reason="onnx is not installed")


def check(case: OnnxCase, lane: Any) -> None:
    inputs = {name: lane.from_numpy(x) for name, x in case.inputs.items()}
    asked = "qk_matmul_output" in case.outputs
    made = onnx.attention(**inputs, **case.attributes, qk_matmul_output=asked, opset=case.opset)
    assert asked or made.qk_matmul_output is None
    for name, golden in case.outputs.items():
        assert lane.owns(getattr(made, name))
        got = lane.to_numpy(getattr(made, name))
        assert (got.shape, got.dtype) == (golden.shape, golden.dtype), (case.name, name)
        if name.startswith("present"):
            assert got.tobytes() == golden.tobytes()
        tolerance = TOLERANCE[golden.dtype.name]
        np.testing.assert_allclose(
            got.astype(np.float64), golden.astype(np.float64), tolerance, tolerance,
            err_msg=f"{case.name}: {name}",
        )  # fmt: skip


@needs_onnx
@pytest.mark.parametrize("name", SOME)
def test_a_case_of_each_kind(name: str) -> None:
    case = next(case for case in onnx_cases.cases() if case.name == name)
    check(case, attnx.get_backend("numpy").lane)


@needs_onnx
@pytest.mark.sweep
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_every_case(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    cases = onnx_cases.cases()
    if framework == "jax":  # float64 is off
        cases = tuple(c for c in cases if c.attributes.get("softmax_precision") != 11)
    for case in cases:
        check(case, attnx.get_backend(framework).lane)


def operands(rng: np.random.Generator) -> list[Any]:
    shapes = (B, HQ, LQ, D), (B, HK, LK, D), (B, HK, LK, D)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_a_negative_scale_and_a_hidden_nan(rng: np.random.Generator) -> None:
    """The square root of a negative scale would be NaN in the operator's own steps."""
    Q, K, V = operands(rng)
    expected = attnx.attention(Q, K[..., :-1, :], V[..., :-1, :], scale=-0.5)
    K[..., -1, :] = V[..., -1, :] = np.nan
    got = onnx.attention(Q, K, V, np.arange(LK) < LK - 1, scale=-0.5).Y
    np.testing.assert_allclose(got, expected, 1e-5, 1e-5)


def test_mode_0_is_raw_beside_a_softcap(rng: np.random.Generator) -> None:
    Q, K, V = operands(rng)
    raw = onnx.attention(Q, K, V, softcap=0.5, qk_matmul_output=True).qk_matmul_output
    expected = Q @ np.repeat(K, 2, 1).swapaxes(2, 3) / np.sqrt(D)
    np.testing.assert_allclose(raw, expected, 1e-5, 1e-5)


def test_a_short_mask_hides_the_rest_from_opset_24_on(rng: np.random.Generator) -> None:
    Q, K, V = operands(rng)
    mask = rng.standard_normal((LQ, LK - 2), np.float32)
    got = onnx.attention(Q, K, V, mask, opset=24).Y
    expected = attnx.attention(Q, K[..., :-2, :], V[..., :-2, :], bias=mask)
    np.testing.assert_allclose(got, expected, 1e-5, 1e-5)
    with pytest.raises(ArgumentError, match="its last axis may be shorter from opset 24 on"):
        onnx.attention(Q, K, V, mask, opset=23)


def test_a_past_beside_cross_attention_counts_the_past(rng: np.random.Generator) -> None:
    Q, K, V = operands(rng)
    past = rng.standard_normal((B, HK, 2, D), np.float32)
    made = onnx.attention(Q, K, V, None, past, past, is_causal=1)
    mask = np.arange(LK + 2) <= np.arange(LQ)[:, None] + 2
    keys, values = np.concatenate([past, K], 2), np.concatenate([past, V], 2)
    np.testing.assert_allclose(made.Y, attnx.attention(Q, keys, values, mask=mask), 1e-5, 1e-5)


def test_values_of_another_type_keep_theirs(rng: np.random.Generator) -> None:
    Q, K, V = operands(rng)
    made = onnx.attention(Q.astype(ml_dtypes.bfloat16), K.astype(ml_dtypes.bfloat16), V)
    assert (made.Y.dtype, made.present_value.dtype) == (ml_dtypes.bfloat16, np.float32)


def test_gradients_flow_through_heads_and_past(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def f(Q: Any, K: Any, past: Any, mask: Any) -> Any:
        heads = {"q_num_heads": 2, "kv_num_heads": 1}
        made = onnx.attention(
            Q, K, K, mask, past, past, is_causal=1, qk_matmul_output=True, **heads
        )
        return made.Y, made.present_key, made.qk_matmul_output

    shapes = (1, 2, 6), (1, 2, 3), (1, 1, 2, 3), (2, 4)
    inputs = [torch.tensor(rng.standard_normal(s), requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(f, inputs)


LENGTHS = np.array([2, 3])
REFUSED: dict[str, Any] = {
    "opset": ({"opset": 22}, ArgumentError, "opset: expected 23, 24 or 25"),
    "mode": ({"qk_matmul_output_mode": 4}, ArgumentError, "qk_matmul_output_mode"),
    "precision": ({"softmax_precision": 6}, ArgumentError, "softmax_precision: .* got 6"),
    "lengths in 23": (
        {"nonpad_kv_seqlen": LENGTHS, "opset": 23}, ArgumentError, "expected opset 24 or 25",
    ),
    "window in 24": ({"left_window_size": 2, "opset": 24}, ArgumentError, "expected opset 25"),
    "window": ({"right_window_size": -2}, ArgumentError, "right_window_size: expected -1"),
    "heads": ({"q_num_heads": HQ}, ArgumentError, "q_num_heads: expected None beside inputs of 4"),
    "one past": (
        {"past_key": np.ones((B, HK, 2, D), np.float32)}, ArgumentError, "expected both or neither",
    ),
    "past of another type": (
        {"past_key": np.ones((B, HK, 2, D)), "past_value": np.ones((B, HK, 2, D))},
        ArgumentTypeError, "past_key: expected the type of K, float32, got float64",
    ),
    "integer mask": (
        {"attn_mask": np.ones((LQ, LK), int)}, ArgumentTypeError, "attn_mask: .* got int64",
    ),
    "mask": ({"attn_mask": np.ones((B, LQ, LK), bool)}, ArgumentError, "attn_mask: .* broadcasts"),
    "keys": ({"K": np.ones((B, HK, LK, D))}, ArgumentTypeError, "K: expected the type of Q"),
    "list": ({"attn_mask": [[True]]}, ArgumentTypeError, "attn_mask is builtins.list"),
    "axes": ({"Q": np.ones((B, LQ, D), np.float32)}, ArgumentError, "Q, K, V: expected 4 axes"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(
    rng: np.random.Generator, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays = dict(zip("QKV", operands(rng), strict=True))
    with pytest.raises(error, match=message):
        onnx.attention(**(arrays | given))
