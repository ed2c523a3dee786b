"""ONNX's `Attention` operator, opset 23 to 25, by `attnx.attention`; `RotaryEmbedding` beside it.

For code that runs or translates a graph: the operator's inputs, attributes and outputs by their own
names, on arrays of any framework that attnx knows. The package `onnx` is not needed. The meaning is
the operator's text, in its corrected form of onnx 1.23.

Y comes from the chosen backend, and so do the probabilities of mode 3. The scores of modes 0 to 2
exist in no backend, so they are products of the caller's own framework.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import attnx
from attnx.compat._onnx_masks import visibility
from attnx.compat._onnx_operands import Operands, dtype_name, namespace, operands
from attnx.compat._onnx_rotary import rotary_embedding
from attnx.errors import ArgumentError

__all__ = ["Outputs", "attention", "rotary_embedding"]

OPSETS = (23, 24, 25)


class Outputs(NamedTuple):
    """The operator's outputs.

    Attributes:
        Y: `(B, q_num_heads, Lq, v_head_size)`, or `(B, Lq, q_num_heads * v_head_size)`.
        present_key: `(B, kv_num_heads, Lk, head_size)`: the past and the new keys. Without a past
            they are K's own memory.
        present_value: `(B, kv_num_heads, Lk, v_head_size)`, alike.
        qk_matmul_output: `(B, q_num_heads, Lq, Lk)`, or None where it was not asked for.
    """

    Y: Any
    present_key: Any
    present_value: Any
    qk_matmul_output: Any


def attention(
    Q: Any,
    K: Any,
    V: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output: bool = False,
    opset: int = 25,
) -> Outputs:
    """ONNX's `Attention` on any attnx backend, with the frameworks' gradients (spec S1 to S8).

    Args:
        Q: `(B, q_num_heads, Lq, head_size)`, or `(B, Lq, q_num_heads * head_size)`.
        K: alike, with `kv_num_heads`; of Q's type.
        V: alike, with `v_head_size`. Where its type is another, the wider of both is computed in.
        attn_mask: bool, True = takes part, or floating, added to the scores; broadcasts to
            `(B, q_num_heads, Lq, Lk)`. From opset 24 on it may be shorter than Lk, which hides the
            rest; a last axis of 1 is shorter, too, as ONNX's own function reads it.
        past_key: `(B, kv_num_heads, past, head_size)`, in front of K.
        past_value: `(B, kv_num_heads, past, v_head_size)`, in front of V.
        nonpad_kv_seqlen: `(B,)`, integers: how many keys are real. From opset 24 on.
        is_causal: 1 shows query i the keys j <= i + n, with n keys before the queries: those of
            the past, or `nonpad_kv_seqlen - Lq`, else none.
        kv_num_heads: for inputs of 3 axes only.
        left_window_size: keys from i + n - left_window_size on; -1 for all. Opset 25.
        q_num_heads: for inputs of 3 axes only.
        qk_matmul_output_mode: 0 the scores, 1 after the softcap, 2 with mask and bias, 3 the
            probabilities, which have no gradient.
        right_window_size: keys to i + n + right_window_size; -1 for all. Opset 25.
        scale: by default 1/sqrt(head_size). Negative ones have their meaning, too.
        softcap: 0 for none.
        softmax_precision: 1, 10, 11 or 16. 11 (double) computes the whole in float64; the others
            ask for no more than attnx always keeps.
        qk_matmul_output: whether the fourth output is wanted. It costs Lq x Lk memory.
        opset: 23, 24 or 25: what its text does not have is refused.

    Returns:
        `Outputs(Y, present_key, present_value, qk_matmul_output)`, each in the type of its input
        (Y and the last in Q's). A row that sees nothing is 0 in Y, and in mode 3.

    Raises:
        ArgumentError: wrong shapes or values, or what the opset does not have.
        ArgumentTypeError: wrong types, or arrays of several frameworks.
        UnsupportedError: what the backend cannot do (S8.2).

    Example:
        >>> import numpy as np
        >>> from attnx.compat import onnx
        >>> Q, K = np.ones((2, 3, 32), np.float32), np.ones((2, 3, 16), np.float32)
        >>> past = np.ones((2, 2, 5, 8), np.float32)
        >>> made = onnx.attention(Q, K, K, None, past, past, q_num_heads=4, kv_num_heads=2)
        >>> made.Y.shape, made.present_key.shape
        ((2, 3, 32), (2, 2, 8, 8))
    """
    if opset not in OPSETS:
        raise ArgumentError(f"opset: expected 23, 24 or 25, got {opset!r}")
    if qk_matmul_output_mode not in (0, 1, 2, 3):
        raise ArgumentError(
            f"qk_matmul_output_mode: expected 0, 1, 2 or 3, got {qk_matmul_output_mode!r}"
        )
    inputs = {"Q": Q, "K": K, "V": V, "past_key": past_key, "past_value": past_value}
    namespace(inputs | {"attn_mask": attn_mask, "nonpad_kv_seqlen": nonpad_kv_seqlen})
    x = operands(inputs, q_num_heads, kv_num_heads, opset)
    mask, bias = visibility(
        x, attn_mask, nonpad_kv_seqlen, is_causal=_flag(is_causal), left=left_window_size,
        right=right_window_size, opset=opset,
    )  # fmt: skip
    q, k, v = x.computed(softmax_precision)
    if bias is not None and dtype_name(bias) not in (dtype_name(q), "float32"):
        bias = x.xp.astype(bias, q.dtype)
    options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap or None}
    weights = None
    if qk_matmul_output and qk_matmul_output_mode == 3:
        weights = attnx.attention_weights(q, k, **options)
    out = _in_type(x, attnx.attention(q, k, v, **options))
    if qk_matmul_output and weights is None:
        weights = _scores(x, q, k, options, qk_matmul_output_mode)
    if x.packed:
        out = x.xp.permute_dims(out, (0, 2, 1, 3))
        out = x.xp.reshape(out, (*out.shape[:2], -1))
    return Outputs(out, x.k, x.v, None if weights is None else _in_type(x, weights))


def _flag(is_causal: Any) -> bool:
    if is_causal not in (0, 1):
        raise ArgumentError(f"is_causal: expected 0 or 1, got {is_causal!r}")
    return bool(is_causal)


def _in_type(x: Operands, array: Any) -> Any:
    """In the type of Q."""
    return array if array.dtype == x.q.dtype else x.xp.astype(array, x.q.dtype)


def _scores(x: Operands, q: Any, k: Any, options: dict[str, Any], mode: int) -> Any:
    """The scores: 0 alone, 1 capped, 2 with the bias, and -inf where nothing is seen."""
    xp = x.xp
    if dtype_name(q) in ("float16", "bfloat16"):
        q, k = xp.astype(q, xp.float32), xp.astype(k, xp.float32)
    (B, Hq, Lq, D), (_, Hk, Lk, _) = q.shape, k.shape
    grouped = xp.reshape(q, (B, Hk, Hq // Hk, Lq, D))
    s = xp.matmul(grouped, xp.matrix_transpose(k)[:, :, None, ...])
    s = xp.reshape(s, (B, Hq, Lq, Lk))
    scale, softcap = options["scale"], options["softcap"]
    s = s * (1.0 / math.sqrt(D) if scale is None else scale)
    if mode >= 1 and softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    if mode < 2 or (options["mask"] is None and options["bias"] is None):
        return s
    if options["bias"] is not None:
        s = s + xp.astype(options["bias"], s.dtype)
    if options["mask"] is None:
        return s
    # Equal scores weigh more than 0 exactly where they are seen.
    even = xp.zeros_like(q[..., :1]), xp.zeros_like(k[..., :1])
    seen = attnx.attention_weights(*even, mask=options["mask"]) > 0
    return xp.where(seen, s, xp.full_like(s, -xp.inf))
