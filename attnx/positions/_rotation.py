"""The rotation itself, by array-API operations: that of `rope`, and of ONNX's operator."""

from __future__ import annotations

from typing import Any

__all__ = ["turned"]


def turned(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool, dtype: str) -> Any:
    """x (…, D) with its first R numbers turned; cos and sin (…, R // 2) broadcast.

    Args:
        xp: the array namespace.
        x: the array.
        cos: of any floating dtype, like sin.
        sin: alike.
        interleaved: whether neighbours are pairs.
        dtype: what is computed in.
    """
    wide, half = getattr(xp, dtype), cos.shape[-1]
    cos, sin = (y if y.dtype == wide else xp.astype(y, wide) for y in (cos, sin))
    part = x[..., : 2 * half]
    given = part if part.dtype == wide else xp.astype(part, wide)
    a, b = (
        (given[..., 0::2], given[..., 1::2])
        if interleaved
        else (given[..., :half], given[..., half:])
    )
    pair = [a * cos - b * sin, b * cos + a * sin]
    made = (
        xp.reshape(xp.stack(pair, axis=-1), part.shape) if interleaved else xp.concat(pair, axis=-1)
    )
    if made.dtype != x.dtype:
        made = xp.astype(made, x.dtype)
    if 2 * half == x.shape[-1]:
        return made
    return xp.concat([made, x[..., 2 * half :]], axis=-1)
