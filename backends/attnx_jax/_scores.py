"""The scores of a tile (S2), and products that keep apart what cannot be seen (S4).

The scale multiplies the finished product (S5.3). Hidden pairs are taken out by selection. Where a
factor holds NaN or inf, `mix` multiplies its finite part and puts back what a row does see of them;
kernels have a second path for that, taken when a look at the data finds some.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from attnx.plugin import Alibi
from attnx.tiling import alibi_tile
from attnx_jax._dropout import Kept
from attnx_jax._tiles import Tiles, cut

__all__ = ["Operands", "Scores", "accumulator", "all_finite", "dot", "mix", "scores", "some"]


class Operands(NamedTuple):
    """The operands of a call beside q, k and v; a pytree."""

    bias: Any
    sinks: Any
    mask: Any
    scale: Any
    softcap: Any
    dropout: Kept | None
    alibi: Alibi | None


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
    if x.alibi is not None:
        s = s + alibi_tile(x.alibi, t.grid(*place), s.dtype)
    return Scores(s, shown, None if slope is None else slope.reshape(s.shape))


def mix(rows: Any, x: Any, shown: Any, *, down: bool = False) -> Any:
    """The product of a tile's pairs with keys, or with rows laid down, where some may be hidden.

    Args:
        rows: a number for each pair, (bc, hc, g·bq, bk), 0 where hidden.
        x: (bc, hc, bk, d); with `down` (bc, hc, d, g·bq).
        shown: the visible pairs, of the shape of `rows`, to be exact where x holds NaN or inf
            (S4.2); None where x may meet any pair.
        down: `x @ rows` instead of `rows @ x`.
    """
    if shown is None:
        return _times(rows, x, down)
    axis = 2 if down else 3
    where = [jnp.isnan(x), x == jnp.inf, x == -jnp.inf]
    hits = _times(shown.astype(x.dtype), jnp.concat(where, axis=axis).astype(x.dtype), down)
    nan, above, below = jnp.split(hits > 0, 3, axis)
    leak = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, 0.0))
    leak = jnp.where(nan | (above & below), jnp.nan, leak).astype(x.dtype)
    return _times(rows, jnp.where(jnp.isfinite(x), x, 0.0), down) + leak


def _times(rows: Any, x: Any, down: bool) -> Any:
    return dot(x, rows, (3, 2)) if down else dot(rows, x, (3, 2))


def all_finite(*arrays: Any) -> Any:
    """Whether all values are finite: the look that isolation costs (S4.4).

    Every finite value times a tiny one is finite, and so is a sum of such; a product does it at the
    speed of memory, where a sum or a conjunction takes five times as long.
    """
    return ~some(jnp.stack([jnp.any(~jnp.isfinite(_weighed(x))) for x in arrays]))


def _weighed(x: Any) -> Any:
    """Sums over the last axis that are finite just where all their terms are."""
    if x.dtype.itemsize < 4:
        return jnp.sum(x * 0, axis=-1, dtype=jnp.float32)
    tiny = jnp.full((x.shape[-1],), 1e-30 if x.dtype == jnp.float32 else 1e-200, x.dtype)
    return jnp.matmul(x, tiny)


@custom_vmap
def some(found: Any) -> Any:
    """Whether any is true; under vmap one answer for all that is mapped, so a branch stays one."""
    return jnp.any(found)


@some.def_vmap
def _some_of_all(_: int, __: Any, found: Any) -> tuple[Any, bool]:
    return some(found), False
