"""The backward kernel: scores again from lse, a tile at a time (S6), so memory grows with L.

Tiles of keys outside, tiles of queries inside: dk and dv of a tile stay in cache, dq is added up in
place. XLA contracts a large transposed left operand slowly, so q and d_out are transposed once
beforehand, and dk and dv come out transposed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from attnx.plugin import Gradients
from attnx_jax._dropout import kept
from attnx_jax._forward import walk
from attnx_jax._scores import Operands, accumulator, all_finite, dot, mix, scores, some
from attnx_jax._tiles import Tiles, add_at, repeat, sizes

__all__ = ["backward"]

STEEP = {"float32": 2.0**10, "float64": 2.0**39}
"""Beyond which |lse| a probability taken from it alone is not good to 2**-13."""


def backward(
    careful: bool, q: Any, k: Any, v: Any, x: Operands, out: Any, lse: Any, d_out: Any, d_lse: Any
) -> Gradients:
    """The gradients of q, k, v, bias and sinks for cotangents of out and lse (d_lse or None).

    Args:
        careful: as in `forward`.
        q: (B, Hq, Lq, D).
        k: (B, Hk, Lk, D).
        v: (B, Hk, Lk, Dv).
        x: the other operands.
        out: (B, Hq, Lq, Dv), of `forward`.
        lse: (B, Hq, Lq), of `forward`.
        d_out: of out's shape.
        d_lse: of lse's shape, or None.
    """
    s, acc = sizes(q, k, v, x.mask), accumulator(q.dtype)
    if s.B == 0 or s.Lq == 0:
        return Gradients(*(None if a is None else jnp.zeros_like(a) for a in (q, k, v, *x[:2])))
    t = Tiles(s, x.mask, x.bias, whole=True)
    delta = jnp.sum(d_out.astype(acc) * out.astype(acc), axis=-1, keepdims=True)
    d_lse = None if d_lse is None else d_lse.astype(acc)[..., None]
    shift, rest = _norm(t, q, k, x, lse[..., None])
    rows = _Rows(t, q, d_out, shift, rest, delta if d_lse is None else delta - d_lse)
    if careful and t.hides and s.Lk > 0:
        exact, plain = (partial(_sums, t, rows, k, v, x, exact=exact) for exact in (True, False))
        dq, dk, dv, dbias, seen = lax.cond(all_finite(q, k, d_out), plain, exact)
    else:
        dq, dk, dv, dbias, seen = _sums(t, rows, k, v, x, exact=False)
    dsinks = None
    if x.sinks is not None:
        flow = -jnp.where(seen, delta, 0.0)
        flow = flow if d_lse is None else flow + d_lse
        below = x.sinks.astype(acc)[:, None, None] - shift
        share = jnp.exp(below if rest is None else below - rest)
        dsinks = jnp.sum(share * flow, axis=(0, 2, 3)).astype(x.sinks.dtype)
    return Gradients(
        (dq * x.scale).astype(q.dtype),
        (dk * x.scale).astype(k.dtype),
        dv.astype(v.dtype),
        None if x.bias is None else dbias.astype(x.bias.dtype),
        dsinks,
    )


def _norm(t: Tiles, q: Any, k: Any, x: Operands, lse: Any) -> tuple[Any, Any]:
    """(shift, rest) with lse = shift + rest; rest is None where lse alone is good enough.

    A bias of -1e9 over a whole row, as far positions under ALiBi have it, drowns the rest in lse's
    own rounding (S3.4): both are then found again. Scores that are large by themselves are as
    uncertain as their lse.
    """
    if (x.bias is None and x.alibi is None) or t.s.Lk == 0:
        return lse, None
    steep = (jnp.abs(lse) > STEEP[lse.dtype.name]) & jnp.isfinite(lse)
    nothing = jnp.zeros((t.s.B, t.s.Hk, t.s.Lk, 1), q.dtype)
    found: tuple[Any, Any] = lax.cond(
        some(steep),
        lambda: walk(t, q, k, nothing, x, exact=False)[1:],
        lambda: (lse, jnp.zeros_like(lse)),
    )
    return found


class _Rows:
    """The arrays of rows, and their slices at a tile in the accumulator's dtype."""

    def __init__(self, t: Tiles, q: Any, d_out: Any, shift: Any, rest: Any, flow: Any) -> None:
        self.t, self.acc = t, accumulator(q.dtype)
        self.q, self.d_out, self.shift, self.rest, self.flow = q, d_out, shift, rest, flow
        self.q_t, self.d_out_t = self._laid_down(q), self._laid_down(d_out)

    def _laid_down(self, x: Any) -> Any:
        """(B, Hq, Lq, d) as (B, Hk, d, g, Lq)."""
        s = self.t.s
        return jnp.moveaxis(x.reshape(s.B, s.Hk, s.g, s.Lq, x.shape[3]), 4, 2)

    def at(self, c: Any, i: Any) -> tuple[Any, Any]:
        """q and d_out, (bc, hc, g·bq, d)."""
        t = self.t
        return t.rows(self.q, c, i).astype(self.acc), t.rows(self.d_out, c, i).astype(self.acc)

    def column(self, x: Any, c: Any, i: Any) -> Any:
        """`shift`, `rest` or `flow`, (bc, hc·g, bq, 1)."""
        s = self.t.s
        return self.t.rows(x, c, i).reshape(s.bc, s.hc * s.g, s.bq, 1)

    def down(self, c: Any, i: Any) -> tuple[Any, Any]:
        """q and d_out (bc, hc, d, g·bq)."""
        t = self.t
        return (
            t.columns(self.q_t, c, i).astype(self.acc),
            t.columns(self.d_out_t, c, i).astype(self.acc),
        )


def _sums(
    t: Tiles, rows: _Rows, k: Any, v: Any, x: Operands, *, exact: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """dq, dk (both without the scale), dv, dbias, and which rows see something.

    `exact` where q, k or d_out holds NaN or inf.
    """
    s, acc = t.s, rows.acc
    heads = s.hc * s.g
    track = x.sinks is not None and t.hides
    dbias = None if x.bias is None else jnp.zeros(x.bias.shape, acc)
    if s.Lk == 0:
        shapes = (rows.q.shape, k.shape, v.shape)
        dq, dk, dv = (jnp.zeros(shape, acc) for shape in shapes)
        return dq, dk, dv, dbias, False

    def chunk(dbias: Any, c: Any) -> tuple[Any, Any]:
        kinds = t.kinds(c)

        def key_block(held: Any, j: Any) -> tuple[Any, Any]:
            keys, values = t.keys(k, c, j).astype(acc), t.keys(v, c, j).astype(acc)

            def tile(i: Any, carry: Any, masked: bool) -> tuple[Any, Any]:
                return _tile(t, rows, keys, values, x, (c, i, j), carry, masked, exact, track)

            def put(i: Any, held: Any, part: Any) -> Any:
                dq, dbias, seen = held
                at = t.start("i", i)
                dq = add_at(dq, part[0], (0, 0, at, 0))
                if dbias is not None:
                    dbias = add_at(dbias, part[1], t.bias_place(c, i, j)[0])
                if track:
                    seen = add_at(seen, part[2], (0, 0, at, 0))
                return dq, dbias, seen

            nothing = (
                jnp.zeros((s.bc, s.hc, s.D, s.bk), acc),
                jnp.zeros((s.bc, s.hc, s.Dv, s.bk), acc),
            )
            (dk, dv), held = t.sweep(
                None if kinds is None else kinds[:, j], s.nq, tile, nothing, held, put, alike=exact
            )
            return held, (dk.swapaxes(2, 3), dv.swapaxes(2, 3))

        seen = jnp.zeros((s.bc, heads, s.Lq, 1), acc) if track else None
        held = (jnp.zeros((s.bc, heads, s.Lq, s.D), acc), dbias, seen)
        (dq, dbias, seen), (dk, dv) = repeat(s.nk, key_block, held)
        return dbias, (dq, t.tiles_together(dk, s.Lk), t.tiles_together(dv, s.Lk), seen)

    dbias, (dq, dk, dv, seen) = repeat(s.chunks[0] * s.chunks[1], chunk, dbias)
    seen = t.heads_together(seen) > 0 if track else True
    dq, dk, dv = (t.heads_together(y) for y in (dq, dk, dv))
    return dq, dk, dv, dbias, seen


def _tile(
    t: Tiles, rows: _Rows, k: Any, v: Any, x: Operands, place: tuple[Any, Any, Any], sums: Any,
    masked: bool, exact: bool, track: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """One tile's share: (dk, dv) added up, and its own dq, dbias and seen rows."""
    s = t.s
    at = place[:2]
    (q, d_out), (q_t, d_out_t) = rows.at(*at), rows.down(*at)
    made = scores(t, q, k, x, place, masked)
    below = made.s - rows.column(rows.shift, *at)
    p = jnp.exp(below if rows.rest is None else below - rows.column(rows.rest, *at))
    dp, dropped = dot(d_out, v, (3, 3)).reshape(p.shape), p
    if x.dropout is not None:
        keep = kept(x.dropout, t, place)
        dp = jnp.where(keep, dp * x.dropout.scale, 0.0)
        dropped = jnp.where(keep, p * x.dropout.scale, 0.0)
    ds = p * (dp - rows.column(rows.flow, *at))
    if made.shown is not None:
        dropped, ds = jnp.where(made.shown, dropped, 0.0), jnp.where(made.shown, ds, 0.0)
    raw = ds if made.slope is None else ds * made.slope
    if made.slope is not None and made.shown is not None:
        raw = jnp.where(made.shown, raw, 0.0)
    folded = (s.bc, s.hc, s.g * s.bq, s.bk)
    shown = jnp.broadcast_to(made.shown, p.shape).reshape(folded) if exact else None
    dropped, raw = dropped.reshape(folded), raw.reshape(folded)
    dk, dv = sums
    sums = (dk + mix(raw, q_t, shown, down=True), dv + mix(dropped, d_out_t, shown, down=True))
    dq = mix(raw, k, shown).reshape(s.bc, s.hc * s.g, s.bq, s.D)
    dbias = None
    if x.bias is not None:
        axes = tuple(a for a, n in enumerate(x.bias.shape) if n == 1)
        dbias = jnp.sum(ds, axis=axes, keepdims=True)
    seen = None
    if track:
        shown = jnp.ones(dq.shape[:3], bool) if made.shown is None else jnp.any(made.shown, -1)
        seen = jnp.broadcast_to(shown, dq.shape[:3])[..., None].astype(dq.dtype)
    return sums, (dq, dbias, seen)
