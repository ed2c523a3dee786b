"""The scores of a tile (S2), and what a product owes to NaN and inf that are seen (S4).

The scale multiplies the finished product (S5.3). Hidden pairs are taken out by selection; a factor
that may hold NaN or inf under a zero is replaced by its finite part, and what a row does see of
them is put back by `leak_rows` and `leak_keys`, which run only where a look at the data found some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnx_jax._tiles import Tiles, cut, repeat

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Operands",
    "Scores",
    "accumulator",
    "all_finite",
    "dot",
    "finite",
    "leak_keys",
    "leak_rows",
    "scores",
    "unless_finite",
]


class Operands(NamedTuple):
    """The operands of a call beside q, k and v; a pytree."""

    bias: Any
    sinks: Any
    mask: Any
    scale: Any
    softcap: Any


class Scores(NamedTuple):
    """A tile's scores, (bc, hc·g, bq, bk), before hidden pairs are taken out.

    Attributes:
        s: softcapped and biased.
        shown: the visible pairs, to broadcast, or None when all are.
        slope: the softcap's derivative, or None.
    """

    s: Any
    shown: Any
    slope: Any


def accumulator(dtype: Any) -> Any:
    """Scores and sums are kept in float32 at least (S5.2)."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """Sum over one of the last two axes of each; the leading two are a batch.

    TF32 and its like come from JAX's own setting alone (S5.2), never by default.
    """
    config: Any = jax.config
    asked = config.jax_default_matmul_precision
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((0, 1), (0, 1))),
        precision=None if asked else lax.Precision.HIGHEST, preferred_element_type=a.dtype,
    )  # fmt: skip


def scores(
    t: Tiles, q: Any, k: Any, x: Operands, place: tuple[Any, Any, Any], masked: bool
) -> Scores:
    """The scores of S2 for tile (c, i, j); q and k are its rows and keys in the accumulator."""
    s = dot(q, k, (3, 3)) * x.scale
    slope = None
    if x.softcap is not None:
        tanh = jnp.tanh(s / x.softcap)
        s, slope = tanh * x.softcap, 1.0 - tanh * tanh
    s = s.reshape(t.s.bc, t.s.hc * t.s.g, t.s.bq, t.s.bk)
    shown = t.shown(*place) if masked else None
    if x.bias is not None:
        bias = cut(x.bias, *t.bias_place(*place))
        opened = bias != -jnp.inf
        shown = opened if shown is None else shown & opened
        s = s + bias.astype(s.dtype)
    return Scores(s, shown, None if slope is None else slope.reshape(s.shape))


def finite(x: Any) -> Any:
    """0 in place of NaN and inf."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def all_finite(*arrays: Any) -> Any:
    """Whether all values are finite: the look that isolation costs (S4.4)."""
    found = [jnp.all(jnp.isfinite(x)) for x in arrays]
    return found[0] if len(found) == 1 else jnp.stack(found).all()


def unless_finite(arrays: tuple[Any, ...], leak: Callable[[Any], Any], made: Any) -> Any:
    """`leak(made)` if any of the arrays holds NaN or inf."""
    return lax.cond(all_finite(*arrays), lambda made: made, leak, made)


def _indicators(x: Any, dtype: Any) -> Any:
    """Where x is NaN, inf and -inf, one after the other along the last axis, as numbers."""
    return jnp.concat([jnp.isnan(x), x == jnp.inf, x == -jnp.inf], axis=-1).astype(dtype)


def _leaked(hits: Any) -> Any:
    """0 where no visible pair met a NaN or inf; there the NaN or inf."""
    nan, above, below = jnp.split(hits > 0, 3, axis=-1)
    undefined = nan | (above & below)
    infinite = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, 0.0))
    return jnp.where(undefined, jnp.nan, infinite).astype(hits.dtype)


def _pairs(t: Tiles, bias: Any, place: tuple[Any, Any, Any], dtype: Any) -> Any:
    """The visible pairs of a tile as numbers, (bc, hc, g·bq, bk)."""
    s = t.s
    shown = t.shown(*place)
    if bias is not None:
        opened = cut(bias, *t.bias_place(*place)) != -jnp.inf
        shown = opened if shown is None else shown & opened
    pairs = jnp.broadcast_to(shown, (s.bc, s.hc * s.g, s.bq, s.bk)).astype(dtype)
    return pairs.reshape(s.bc, s.hc, s.g * s.bq, s.bk)


def leak_rows(t: Tiles, bias: Any, x: Any, dtype: Any) -> Any:
    """What rows see of the NaN and inf in x (B, Hk, Lk, d), as (B, Hq, Lq, d)."""
    s = t.s

    def chunk(_: Any, c: Any) -> Any:
        def block(_: Any, i: Any) -> Any:
            def tile(j: Any, hits: Any, _: bool) -> tuple[Any, None]:
                factor = _indicators(t.keys(x, c, j), dtype)
                return hits + dot(_pairs(t, bias, (c, i, j), dtype), factor, (3, 2)), None

            hits = jnp.zeros((s.bc, s.hc, s.g * s.bq, 3 * x.shape[3]), dtype)
            kinds = t.kinds(c)
            hits, _ = t.sweep(None if kinds is None else kinds[i], s.nk, tile, hits, alike=True)
            return None, _leaked(hits).reshape(s.bc, s.hc * s.g, s.bq, -1)

        return None, t.tiles_together(repeat(s.nq, block, None)[1], s.Lq)

    return t.heads_together(repeat(s.chunks[0] * s.chunks[1], chunk, None)[1])


def leak_keys(t: Tiles, bias: Any, x: Any, dtype: Any) -> Any:
    """What is seen of the NaN and inf in x (B, Hq, Lq, d) by keys, as (B, Hk, Lk, d)."""
    s = t.s

    def chunk(_: Any, c: Any) -> Any:
        def block(_: Any, j: Any) -> Any:
            def tile(i: Any, hits: Any, _: bool) -> tuple[Any, None]:
                factor = _indicators(t.rows(x, c, i), dtype)
                return hits + dot(_pairs(t, bias, (c, i, j), dtype), factor, (2, 2)), None

            hits = jnp.zeros((s.bc, s.hc, s.bk, 3 * x.shape[3]), dtype)
            kinds = t.kinds(c)
            hits, _ = t.sweep(None if kinds is None else kinds[:, j], s.nq, tile, hits, alike=True)
            return None, _leaked(hits)

        return None, t.tiles_together(repeat(s.nk, block, None)[1], s.Lk)

    return t.heads_together(repeat(s.chunks[0] * s.chunks[1], chunk, None)[1])
