"""ONNX's `RotaryEmbedding`, opset 23: `attnx.rope`'s rotation with the operator's own tables.

The operator is given cos and sin, computed by whoever made the graph, and looks them up by position
or takes a row for each token. It reads no past and knows no frequencies.
"""

from __future__ import annotations

from typing import Any

from attnx._registry import registry
from attnx.compat._onnx_operands import FLOATING, dtype_name, namespace
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions._rotation import turned

__all__ = ["rotary_embedding"]


def rotary_embedding(
    X: Any,
    cos_cache: Any,
    sin_cache: Any,
    position_ids: Any = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Any:
    """ONNX's `RotaryEmbedding` on arrays of any framework, with its gradients.

    It is computed in float32 (float64 for a float64 X, which the operator's text does not have) and
    rounded once to X's type. `attnx.positions.rope_table` makes such caches.

    Args:
        X: `(B, num_heads, L, head_size)`, or `(B, L, num_heads * head_size)`.
        cos_cache: `(positions, R / 2)` beside `position_ids`, else `(B, L, R / 2)`, with R the
            numbers that are turned; of X's type.
        sin_cache: alike.
        position_ids: `(B, L)`, integers: rows of the caches.
        interleaved: 1 turns neighbours 2i and 2i + 1, 0 turns i and i + R / 2.
        num_heads: for an X of 3 axes; beside 4 axes 0 or what X has.
        rotary_embedding_dim: R, the first numbers of a head; 0 for all.

    Returns:
        X turned, of its shape and type.

    Raises:
        ArgumentError: wrong shapes or values.
        ArgumentTypeError: wrong types, or arrays of several frameworks.

    Example:
        >>> import numpy as np
        >>> from attnx.compat import onnx
        >>> from attnx.positions import rope_table
        >>> X = np.ones((2, 3, 32), np.float32)
        >>> cos, sin = rope_table(np.arange(50), 8)
        >>> ids = np.array([[0, 1, 2], [7, 8, 9]])
        >>> onnx.rotary_embedding(X, cos, sin, ids, num_heads=4).shape
        (2, 3, 32)
    """
    inputs = {"X": X, "cos_cache": cos_cache, "sin_cache": sin_cache, "position_ids": position_ids}
    xp = namespace(inputs)
    _check_types(inputs)
    if interleaved not in (0, 1):
        raise ArgumentError(f"interleaved: expected 0 or 1, got {interleaved!r}")
    tokens = _tokens_first(xp, X, num_heads)
    turning = _turning(tokens.shape[-1], rotary_embedding_dim)
    tables = [
        _table(xp, name, inputs[name], position_ids, tuple(tokens.shape), turning)
        for name in ("cos_cache", "sin_cache")
    ]
    dtype = "float64" if dtype_name(X) == "float64" else "float32"
    made = turned(xp, tokens, *tables, interleaved=bool(interleaved), dtype=dtype)
    return xp.reshape(made, X.shape) if X.ndim == 3 else xp.permute_dims(made, (0, 2, 1, 3))


def _check_types(inputs: dict[str, Any]) -> None:
    X, ids = inputs["X"], inputs["position_ids"]
    if dtype_name(X) not in FLOATING:
        raise ArgumentTypeError(f"X: expected one of {', '.join(FLOATING)}, got {dtype_name(X)}")
    for name in ("cos_cache", "sin_cache"):
        if dtype_name(inputs[name]) != dtype_name(X):
            raise ArgumentTypeError(
                f"{name}: expected the type of X, {dtype_name(X)}, got {dtype_name(inputs[name])}"
            )
    if ids is not None and "int" not in dtype_name(ids):
        raise ArgumentTypeError(f"position_ids: expected integers, got {dtype_name(ids)}")


def _tokens_first(xp: Any, X: Any, heads: int) -> Any:
    """X as (B, L, H, D)."""
    if X.ndim == 4:
        if heads not in (0, X.shape[1]):
            raise ArgumentError(
                f"num_heads: expected 0 or {X.shape[1]}, the heads of X {tuple(X.shape)}, "
                f"got {heads}"
            )
        return xp.permute_dims(X, (0, 2, 1, 3))
    if X.ndim != 3:
        raise ArgumentError(
            "X: expected (B, num_heads, L, head_size) or (B, L, num_heads * head_size), "
            f"got {tuple(X.shape)}"
        )
    B, L, size = X.shape
    if heads < 1 or size % heads:
        raise ArgumentError(
            f"num_heads: expected a divisor of the last axis of X, {tuple(X.shape)}, got {heads}"
        )
    return xp.reshape(X, (B, L, heads, size // heads))


def _turning(D: int, rotary_embedding_dim: int) -> int:
    if rotary_embedding_dim < 0 or rotary_embedding_dim % 2 or rotary_embedding_dim > D:
        raise ArgumentError(
            f"rotary_embedding_dim: expected 0 or an even number up to the head size {D}, "
            f"got {rotary_embedding_dim}"
        )
    if not rotary_embedding_dim and D % 2:
        raise ArgumentError(
            f"X: expected an even head size, got {D}; rotary_embedding_dim turns a part of it"
        )
    return rotary_embedding_dim or D


def _table(xp: Any, name: str, cache: Any, ids: Any, shape: tuple[int, ...], turning: int) -> Any:
    """The rows of a cache for each token, (B, L, 1, R / 2)."""
    B, L = shape[:2]
    if ids is None:
        if tuple(cache.shape) != (B, L, turning // 2):
            raise ArgumentError(
                f"{name}: expected (B, L, R / 2) = {(B, L, turning // 2)} without position_ids, "
                f"got {tuple(cache.shape)}"
            )
        return xp.expand_dims(cache, axis=2)
    if cache.ndim != 2 or cache.shape[-1] != turning // 2:
        raise ArgumentError(
            f"{name}: expected (positions, R / 2) = (positions, {turning // 2}) beside "
            f"position_ids, got {tuple(cache.shape)}"
        )
    if tuple(ids.shape) != (B, L):
        raise ArgumentError(f"position_ids: expected (B, L) = {(B, L)}, got {tuple(ids.shape)}")
    _check_rows(name, cache.shape[0], ids)
    rows = xp.take(cache, xp.reshape(ids, (-1,)), axis=0)
    return xp.reshape(rows, (B, L, 1, turning // 2))


def _check_rows(name: str, rows: int, ids: Any) -> None:
    """Positions within the cache, wherever they can be read (S8.1)."""
    lane = registry.lane_of(ids)
    if lane is None or 0 in ids.shape or not lane.readable(ids):
        return
    least, greatest = lane.extremes(ids)
    if least < 0 or greatest >= rows:
        raise ArgumentError(
            f"position_ids: expected 0 to {rows - 1}, the rows of {name}, got {least} to {greatest}"
        )
