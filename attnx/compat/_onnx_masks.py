"""What a query of ONNX's Attention sees, in attnx's words.

ONNX calls its causal mask bottom-right, but means j <= i + n with n keys before the queries: the
length of the past, or `nonpad_kv_seqlen - Lq`, else none. That is attnx's bottom-right only where
the last query meets the last key, so the alignment is found from the case. Windows stand alike.
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from attnx.compat._onnx_operands import dtype_name
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.masks import Causal, Dense, Lengths, Mask, Window

if TYPE_CHECKING:
    from attnx.compat._onnx_operands import Operands

__all__ = ["visibility"]


def visibility(
    x: Operands,
    attn_mask: Any,
    nonpad_kv_seqlen: Any,
    *,
    is_causal: bool,
    left: int,
    right: int,
    opset: int,
) -> tuple[Mask | None, Any]:
    """`mask=` and `bias=` of attnx, each None where nothing asks for it.

    Args:
        x: the operands.
        attn_mask: the operator's input, or None.
        nonpad_kv_seqlen: alike.
        is_causal: whether the attribute is set.
        left: `left_window_size`, -1 for no limit.
        right: `right_window_size`, alike.
        opset: of the operator.
    """
    _check_versions(x, nonpad_kv_seqlen, left, right, opset)
    parts: list[Mask] = []
    bias = None
    if attn_mask is not None:
        given = _four_axes(x, attn_mask, opset)
        if dtype_name(given) == "bool":
            parts.append(Dense(given))
        else:
            bias = given
    if nonpad_kv_seqlen is not None:
        parts.append(Lengths(_counts(x, nonpad_kv_seqlen)))
    stands = _alignment(x, nonpad_kv_seqlen is not None)
    if max(left, right) >= 0:
        parts.append(Window(_limit(left), _limit(right), **stands))
    if is_causal:
        parts.append(Causal(**stands))
    return (reduce(and_, parts) if parts else None), bias


def _check_versions(x: Operands, lengths: Any, left: int, right: int, opset: int) -> None:
    if lengths is not None and opset < 24:
        raise ArgumentError(f"nonpad_kv_seqlen: expected opset 24 or 25 beside it, got {opset}")
    if lengths is not None and x.past:
        raise ArgumentError(
            "nonpad_kv_seqlen: expected no past_key and past_value beside it (K and V are then the "
            "whole cache), got both"
        )
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise ArgumentError(f"{name}: expected -1 (no limit) or more, got {size}")
        if size >= 0 and opset < 25:
            raise ArgumentError(f"{name}: expected opset 25 beside it, got {opset}")


def _alignment(x: Operands, lengths: bool) -> dict[str, Any]:
    _, _, Lq, Lk = x.grid
    if lengths:
        return {"align": "bottom_right"}
    if x.past == 0:
        return {"align": "top_left"}
    if x.past == Lk - Lq:
        return {"align": "bottom_right"}
    return {"q_pos": list(range(x.past, x.past + Lq))}


def _limit(size: int) -> int | None:
    return None if size < 0 else size


def _counts(x: Operands, lengths: Any) -> Any:
    if tuple(lengths.shape) != (x.grid[0],):
        raise ArgumentError(
            f"nonpad_kv_seqlen: expected shape (B,) = ({x.grid[0]},), got {tuple(lengths.shape)}"
        )
    return lengths


def _four_axes(x: Operands, mask: Any, opset: int) -> Any:
    """`attn_mask` with four axes, each 1 or full."""
    dtype = dtype_name(mask)
    allowed = dict.fromkeys(("bool", dtype_name(x.q), "float32"))
    if dtype not in allowed:
        raise ArgumentTypeError(
            f"attn_mask: expected bool (True = takes part), or values of the type of Q or float32 "
            f"that are added to the scores, got {dtype} beside {dtype_name(x.q)}; "
            "convert it first"
        )
    if mask.ndim and opset >= 24 and mask.shape[-1] < x.grid[3]:
        mask = _padded(x, mask)
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, x.grid, strict=True)):
        shorter = "; its last axis may be shorter from opset 24 on" if opset < 24 else ""
        raise ArgumentError(
            "attn_mask: expected a shape that broadcasts to (B, q_num_heads, Lq, Lk) = "
            f"{x.grid}, Lk with the past, got {tuple(mask.shape)}{shorter}"
        )
    return x.xp.reshape(mask, shape)


def _padded(x: Operands, mask: Any) -> Any:
    """Hidden keys behind a mask that is shorter than the keys; one of length 1 is shorter, too."""
    hidden = x.xp.zeros_like(mask[..., :1])
    if dtype_name(mask) != "bool":
        hidden = hidden - x.xp.inf
    missing = x.grid[3] - mask.shape[-1]
    hidden = x.xp.broadcast_to(hidden, (*mask.shape[:-1], missing))
    return x.xp.concat([mask, hidden], axis=-1)
