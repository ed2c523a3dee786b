"""`jax.nn.dot_product_attention`, computed by `attnx.attention`.

The signature and the meaning are those that JAX documents: sequences before heads, masks and biases
that broadcast to BNTS, causal and windows counted from the first key whatever the lengths. Where
JAX's kernels leave their own documentation, this does not: a value that no query may see changes
nothing, and a row that sees nothing is 0, not the mean of what it may not see.

What attnx refuses in q, k and v, it says of q, k and v.
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import jax
import jax.numpy as jnp

import attnx
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx.masks import Causal, Dense, Lengths, Mask, Window
from attnx.plugin import Reason

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike

__all__ = ["dot_product_attention"]


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., *, scale: float | None = ..., is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ..., key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Literal["xla", "cudnn"] | None = ..., return_residual: Literal[False] = ...,
) -> Array: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., *, scale: float | None = ..., is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ..., key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Literal["xla", "cudnn"] | None = ..., return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """JAX's function of this name on any attnx backend, with gradients (spec S1 to S8).

    Args:
        query: `(B, T, N, H)` or `(T, N, H)`; what is no JAX array becomes one.
        key: `(B, S, K, H)` or `(S, K, H)`; N is a multiple of K.
        value: as key; its last axis may differ here, and is then that of the output.
        bias: added to the scores; broadcasts to `(B, N, T, S)`, axes that lack are put in front.
        mask: boolean, True = takes part; broadcasts alike.
        scale: a number, by default 1/sqrt(H).
        is_causal: query t sees the keys s <= t, also where T != S.
        query_seq_lengths: `(B,)`, integers; output rows from there on are 0.
        key_value_seq_lengths: `(B,)`, integers; keys from there on are not seen.
        local_window_size: (left, right), or one number for both: t - left <= s <= t + right.
        implementation: None leaves the choice to attnx. `"xla"` names the backend `"jax"`, as
            `backend=` of `attnx.attention` would. `"cudnn"` asks for a kernel that no backend
            promises, and raises.
        return_residual: also return the logsumexp of the scores, `(B, T, N)` or `(T, N)`, in
            query's dtype and without a gradient, as JAX has it; `attnx.attention(return_lse=True)`
            has it in float32 and with one. -inf where a row sees nothing.

    Returns:
        The output, of query's shape and dtype, or the pair (output, residual).

    Raises:
        ArgumentError: wrong shapes, lengths, windows or an unknown implementation.
        ArgumentTypeError: wrong dtypes.
        UnsupportedError: `implementation="cudnn"`, and what the backend cannot do (S8.2).

    Example:
        >>> import jax.numpy as jnp
        >>> from attnx.compat.jax import dot_product_attention
        >>> q = jnp.ones((2, 5, 4, 8))
        >>> dot_product_attention(q, q, q, is_causal=True, local_window_size=2).shape
        (2, 5, 4, 8)
    """
    backend = _backend(implementation)
    shape = jnp.shape(query)
    q, k, v = (_in_4d(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    full = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    parts = [
        *_structure(is_causal, local_window_size),
        *_lengths(query_seq_lengths, key_value_seq_lengths, full),
        *([] if mask is None else [Dense(_grid("mask", mask, full))]),
    ]
    answer = attnx.attention(
        q, k, v, mask=reduce(and_, parts) if parts else None, bias=_bias(bias, full, q.dtype),
        scale=scale, layout="bshd", return_lse=return_residual, backend=backend,
    )  # fmt: skip
    out, lse = answer if return_residual else (answer, None)
    out = out.reshape(*shape[:-1], out.shape[-1])
    if lse is None:
        return cast("Array", out)
    return out, jax.lax.stop_gradient(lse).astype(q.dtype).reshape(shape[:-1])


def _backend(implementation: str | None) -> str | None:
    if implementation is None:
        return None
    if implementation == "xla":
        return "jax"
    if implementation == "cudnn":
        reason = Reason(
            "implementation", "'cudnn'", "kernels of attnx's backends",
            "leave it out, and choose with attnx.use_backend",
        )  # fmt: skip
        raise UnsupportedError(
            f"jax.nn's kernels cannot be chosen here: {reason}", reasons=(reason,)
        )
    raise ArgumentError(f"implementation: expected None, 'xla' or 'cudnn', got {implementation!r}")


def _in_4d(name: str, given: ArrayLike) -> Array:
    array = jnp.asarray(given)
    if array.ndim not in (3, 4):
        axes = "(B, T, N, H) or (T, N, H)" if name == "query" else "(B, S, K, H) or (S, K, H)"
        raise ArgumentError(f"{name}: expected shape {axes}, got {array.shape}")
    return array if array.ndim == 4 else array[None]


def _grid(name: str, given: ArrayLike, full: tuple[int, ...]) -> Array:
    """A mask or a bias with four axes, each 1 or full."""
    array = jnp.asarray(given)
    if name == "mask" and array.dtype != bool:
        raise ArgumentTypeError(
            f"mask: expected booleans (True = takes part), got {array.dtype}; "
            "pass values that are added to the scores as bias="
        )
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ArgumentError(
            f"{name}: expected a shape that broadcasts to (B, N, T, S) = {full}, got {array.shape}"
        )
    return array.reshape(shape)


def _bias(given: ArrayLike | None, full: tuple[int, ...], dtype: Any) -> Array | None:
    """In query's dtype or that of the scores, to which JAX brings it when it adds it."""
    if given is None:
        return None
    bias = _grid("bias", given, full)
    if bias.dtype == bool:
        raise ArgumentTypeError(
            "bias: expected values that are added to the scores, got bool; pass booleans as mask="
        )
    scores = jnp.promote_types(dtype, jnp.float32)
    if bias.dtype in (dtype, jnp.float32) or jnp.issubdtype(bias.dtype, jnp.complexfloating):
        return bias
    return bias.astype(scores)


def _structure(is_causal: bool, window: int | tuple[int, int] | None) -> list[Mask]:
    parts: list[Mask] = [Causal("top_left")] if is_causal else []
    if window is None:
        return parts
    if not isinstance(window, (tuple, list)):
        window = (window, window)
    if len(window) != 2 or any(size is None for size in window):
        raise ArgumentError(
            f"local_window_size: expected an integer or (left, right), got {window!r}"
        )
    return [*parts, Window(*window, "top_left")]


def _lengths(q: ArrayLike | None, kv: ArrayLike | None, full: tuple[int, ...]) -> list[Mask]:
    if q is None and kv is None:
        return []
    B, _, _, S = full
    counts = []
    for name, given in (("query_seq_lengths", q), ("key_value_seq_lengths", kv)):
        array = None if given is None else jnp.asarray(given)
        if array is not None and array.shape != (B,):
            raise ArgumentError(f"{name}: expected shape (B,) = ({B},), got {array.shape}")
        counts.append(array)
    return [Lengths(S if counts[1] is None else counts[1], counts[0])]
