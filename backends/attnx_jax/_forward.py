"""The forward kernel: an online softmax over tiles of keys, a block of queries at a time (S2).

Pure JAX; `lax.scan` over heads and blocks of queries, a loop with bounds from the mask over tiles
of keys. It must not be differentiated as it stands (that would keep every tile): `_backend` gives
it a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from attnx_jax._dropout import kept
from attnx_jax._scores import Operands, accumulator, all_finite, mix, scores
from attnx_jax._tiles import Tiles, repeat, sizes

__all__ = ["forward", "walk", "weights"]


def forward(careful: bool, q: Any, k: Any, v: Any, x: Operands) -> tuple[Any, Any]:
    """out (B, Hq, Lq, Dv) in q's dtype and lse (B, Hq, Lq) in the accumulator's.

    Args:
        careful: whether unseen NaN and inf must be kept out (S4), where anything can be unseen.
        q: (B, Hq, Lq, D).
        k: (B, Hk, Lk, D).
        v: (B, Hk, Lk, Dv).
        x: the other operands.
    """
    s, acc = sizes(q, k, v, x.mask), accumulator(q.dtype)
    if s.B == 0 or s.Lq == 0:
        return jnp.zeros((*q.shape[:3], s.Dv), q.dtype), jnp.zeros(q.shape[:3], acc)
    t = Tiles(s, x.mask, x.bias)
    if careful and t.hides and s.Lk > 0:
        exact, plain = (partial(walk, t, q, k, v, x, exact=exact) for exact in (True, False))
        out, m, rest = lax.cond(all_finite(v), plain, exact)
    else:
        out, m, rest = walk(t, q, k, v, x, exact=False)
    return out, (m + rest)[..., 0]


def walk(t: Tiles, q: Any, k: Any, v: Any, x: Operands, *, exact: bool) -> tuple[Any, Any, Any]:
    """Every block of queries: out, and the two parts of lse, each (B, Hq, Lq, 1).

    `exact` where v holds NaN or inf.
    """
    s = t.s

    def chunk(_: Any, c: Any) -> Any:
        def block(_: Any, i: Any) -> Any:
            return None, _query_block(t, q, k, v, x, c, i, exact)

        return None, tuple(t.tiles_together(y, s.Lq) for y in repeat(s.nq, block, None)[1])

    out, m, rest = (t.heads_together(y) for y in repeat(s.chunks[0] * s.chunks[1], chunk, None)[1])
    return out, m, rest


def _query_block(
    t: Tiles, q: Any, k: Any, v: Any, x: Operands, c: Any, i: Any, exact: bool
) -> tuple[Any, Any, Any]:
    """out and the two parts of lse, its maximum and the rest, of one block, (bc, hc·g, bq, …)."""
    s, acc = t.s, accumulator(q.dtype)
    rows = t.rows(q, c, i).astype(acc)
    folded = (s.bc, s.hc, s.g * s.bq)

    def tile(j: Any, carry: Any, masked: bool) -> tuple[Any, None]:
        m, total, seen, out = carry
        values = t.keys(v, c, j).astype(acc)
        made = scores(t, rows, t.keys(k, c, j).astype(acc), x, (c, i, j), masked)
        score = made.s if made.shown is None else jnp.where(made.shown, made.s, -jnp.inf)
        top = jnp.max(score, axis=-1, keepdims=True)
        new = top if m is None else jnp.maximum(m, top)
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        p = jnp.exp(score - shift)
        met = jnp.ones(shape, bool) if made.shown is None else _any(made.shown, shape)
        share = jnp.sum(p, axis=-1, keepdims=True)
        shown = jnp.broadcast_to(made.shown, p.shape).reshape(*folded, s.bk) if exact else None
        if x.dropout is not None:
            p = jnp.where(kept(x.dropout, t, (c, i, j)), p, 0.0)
        product = mix(p.reshape(*folded, s.bk), values, shown)
        if m is None:
            return (new, share, met, product), None
        factor = jnp.exp(m - shift)
        product = product if out is None else out * factor.reshape(*folded, 1) + product
        return (new, total * factor + share, met if seen is None else seen | met, product), None

    shape = (s.bc, s.hc * s.g, s.bq, 1)
    start: Any = (*_start(t, x.sinks, c, shape, acc), None, None)
    if s.nk != 1:
        start = (*start[:2], jnp.zeros(shape, bool), jnp.zeros((*folded, v.shape[3]), acc))
    elif x.sinks is None:
        start = (None, None, None, None)
    kinds = t.kinds(c)
    if s.nk:
        start, _ = t.sweep(None if kinds is None else kinds[i], s.nk, tile, start, alike=exact)
    m, total, seen, out = start
    answered = seen if x.sinks is None else jnp.ones_like(seen)
    total = jnp.where(answered, total, 1.0)
    out = out if x.dropout is None else out * x.dropout.scale
    out = jnp.where(seen, out.reshape(*shape[:3], v.shape[3]) / total, 0.0)
    return out.astype(q.dtype), m, jnp.log(total)


def _any(shown: Any, shape: tuple[int, ...]) -> Any:
    return jnp.broadcast_to(jnp.any(shown, axis=-1, keepdims=True), shape)


def _start(t: Tiles, sinks: Any, c: Any, shape: tuple[int, ...], acc: Any) -> tuple[Any, Any]:
    """Nothing seen yet; a sink is a logit that every row has seen (S2.3)."""
    if sinks is None:
        return jnp.full(shape, -jnp.inf, acc), jnp.zeros(shape, acc)
    at = t.origin(c)[1] * t.s.g + jnp.arange(shape[1], dtype=jnp.int32)
    m = jnp.broadcast_to(sinks[at].astype(acc)[None, :, None, None], shape)
    return m, jnp.ones(shape, acc)


def weights(q: Any, k: Any, x: Operands) -> Any:
    """P of S2.5, (B, Hq, Lq, Lk) in q's dtype, some whole rows at a time."""
    s, acc = sizes(q, k, k, x.mask, whole_rows=True), accumulator(q.dtype)
    if 0 in (s.B, s.Lq, s.Lk):
        return jnp.zeros((s.B, s.Hq, s.Lq, s.Lk), q.dtype)
    t = Tiles(s, x.mask, x.bias)

    def chunk(_: Any, c: Any) -> Any:
        def block(_: Any, i: Any) -> Any:
            rows, keys = t.rows(q, c, i).astype(acc), t.keys(k, c, 0).astype(acc)
            made = scores(t, rows, keys, x, (c, i, 0), t.table is not None)
            score = made.s if made.shown is None else jnp.where(made.shown, made.s, -jnp.inf)
            m, total = _start(t, x.sinks, c, (*score.shape[:3], 1), acc)
            m = jnp.maximum(m, jnp.max(score, axis=-1, keepdims=True))
            shift = jnp.where(m == -jnp.inf, 0.0, m)
            p = jnp.exp(score - shift)
            if x.sinks is not None:
                total = jnp.exp(_start(t, x.sinks, c, m.shape, acc)[0] - shift)
            p = p / (total + jnp.sum(p, axis=-1, keepdims=True))
            p = p if made.shown is None else jnp.where(made.shown, p, 0.0)
            return None, p.astype(q.dtype)

        return None, t.tiles_together(repeat(s.nq, block, None)[1], s.Lq)

    return t.heads_together(repeat(s.chunks[0] * s.chunks[1], chunk, None)[1])
