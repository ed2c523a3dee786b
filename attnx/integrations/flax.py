"""attnx as the attention function of `flax.nnx.MultiHeadAttention`.

The signature is that of `flax.nnx.dot_product_attention`, and so is the meaning of each argument,
but for two things that are not chosen here: a row without a visible key is 0 (S3.7), not an
average over hidden keys, and dropout draws by S9, another sequence of numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes

import attnx
from attnx.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["attention_fn", "attention_fn_for"]


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Attention with the signature of `flax.nnx.dot_product_attention`.

    Args:
        query: `(*B, Lq, Hq, D)`.
        key: `(*B, Lk, Hk, D)`; Hq is a multiple of Hk.
        value: `(*B, Lk, Hk, Dv)`.
        bias: added to the scores; broadcasts to `(*B, Hq, Lq, Lk)`.
        mask: True or not 0 = visible; broadcasts alike.
        broadcast_dropout: must be False where dropout is active: every element draws (S9).
        dropout_rng: a key of `jax.random`, from which the seed is drawn.
        dropout_rate: the probability of S9.
        deterministic: True for no dropout.
        dtype: what `promote_dtype` makes of query, key and value; None for their common dtype.
        precision: must be None: sums are kept in at least float32 (S5.2).
        module: must be None: the weights are not kept.
        promote_dtype: as in Flax.
        is_causal: query i sees the keys up to i.
        backend: the backend's name; None as in `attnx.attention`.

    Returns:
        out `(*B, Lq, Hq, Dv)`.

    Raises:
        UnsupportedError: an option that cannot be honoured.
        ArgumentError: as in `attnx.attention`; dropout without a key.
        ArgumentTypeError: as in `attnx.attention`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> from attnx.integrations.flax import attention_fn
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2,
        ...     in_features=8,
        ...     attention_fn=attention_fn,
        ...     decode=False,
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> layer(jnp.ones((1, 5, 8))).shape
        (1, 5, 8)
    """
    if precision is not None:
        raise UnsupportedError(
            f"precision: got {precision!r}; sums are kept in at least float32 (S5.2), so leave it "
            "out, or set jax_default_matmul_precision"
        )
    if module is not None:
        raise UnsupportedError(
            "module: attention weights are not kept; leave sow_weights out, or ask "
            "attnx.attention_weights for them"
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if mask is not None:
        mask = _spread(mask, query.ndim).astype(bool)
    if bias is not None:
        bias = _spread(bias, query.ndim)
    drop = None
    if dropout_rate and not deterministic:
        drop = _dropout(dropout_rate, dropout_rng, broadcast_dropout)
    out: jax.Array = attnx.attention(
        query, key, value, mask=mask, causal="top_left" if is_causal else False, bias=bias,
        dropout=drop, layout="bshd", backend=backend,
    )  # fmt: skip
    return out


def attention_fn_for(backend: str) -> Callable[..., jax.Array]:
    """`attention_fn` computed by one backend.

    Args:
        backend: its name.

    Example:
        >>> from attnx.integrations.flax import attention_fn_for
        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 5, 2, 4))
        >>> attention_fn_for("numpy")(q, q, q).shape
        (1, 5, 2, 4)
    """
    return partial(attention_fn, backend=backend)


def _spread(array: jax.Array, rank: int) -> jax.Array:
    """Leading axes of 1, as broadcasting adds them."""
    missing = rank - array.ndim
    return jnp.reshape(array, (*(1,) * missing, *array.shape)) if missing > 0 else array


def _dropout(rate: float, rng: jax.Array | None, broadcast: bool) -> Any:
    if broadcast:
        raise UnsupportedError(
            "broadcast_dropout: dropout draws for every batch entry and head (S9); "
            "write broadcast_dropout=False"
        )
    if rng is None:
        raise ArgumentError("dropout_rng: expected a key of jax.random for dropout, got None")
    return attnx.Dropout(rate, jax.random.bits(rng, (2,), jnp.uint32))
