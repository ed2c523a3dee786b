"""The backward: scores again from q, k and lse, a tile at a time (S6).

    p = exp(s - lse)    dp = dO v'    ds = p (dp - delta + d_lse)    delta = sum_d dO out
    dv = p' dO          dbias = ds    dk = scale ds'q                dq = scale ds k

with ds times 1 - tanh² under a softcap. A job owns some strips and every `splits`-th tile of keys,
so that dk, dv and (by key) dbias are its own; dq is kept once a split and summed in a fixed order,
which makes the gradients the same bits whatever the threads do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.plugin import Gradients
from attnx_numpy import _hidden, _threads
from attnx_numpy._forward import block_sizes
from attnx_numpy._scores import Operands, Strip, bias_of, leaked, strips, tame
from attnx_numpy._tiles import Tile, TilePlan

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_numpy._threads import Scratch

__all__ = ["backward"]


def backward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
) -> Gradients:
    """Gradients in each input's shape and dtype."""
    if call.B == 0 or call.Lq == 0 or call.Lk == 0:
        return _of_nothing(q, k, v, d_lse, call)
    q_size, k_size, count = block_sizes(call)
    q_size = min(q_size * 2, 512)
    with np.errstate(all="ignore"):
        operands = Operands(call, q, k, v, TilePlan(call, q_size, k_size))
        if operands.careful and _hidden.hides(call):
            k, v = _hidden.cleaned(k, v, call)
            operands = Operands(call, q, k, v, operands.plan)
        careful = not call.assume_finite and not tame(1.0, d_out)
        operands.careful |= careful or not lse.max() < np.inf
        sums = _Sums(operands, out, lse, d_out, d_lse, count)
    _threads.run(sums.job, sums.jobs, min(count, len(sums.jobs)))
    with np.errstate(all="ignore"):
        return sums.gradients()


def _of_nothing(q: Any, k: Any, v: Any, d_lse: Any, call: Call) -> Gradients:
    """No pair is visible: all is 0, but a sink's row gives it its whole d_lse (S6.3)."""
    sinks = None
    if call.sinks is not None:
        flow = 0 if d_lse is None else d_lse.sum(axis=(0, 2))
        sinks = np.zeros_like(call.sinks) + np.asarray(flow).astype(call.sinks.dtype)
    bias = None if call.bias is None else np.zeros_like(call.bias)
    return Gradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), bias, sinks)


class _Sums:
    """The gradients as they add up, and the jobs that add."""

    def __init__(
        self, operands: Operands, out: Any, lse: Any, d_out: Any, d_lse: Any, count: int
    ) -> None:
        call, dtype = operands.call, operands.dtype
        self.o, self.call, self.dtype = operands, call, dtype
        self.lse, self.d_out, self.d_lse = lse, d_out, d_lse
        self.delta = np.einsum(
            "bhid,bhid->bhi", out.astype(dtype, copy=False), d_out.astype(dtype, copy=False)
        )
        self.strips = strips(call, 0)
        tiles = -(-call.Lk // operands.plan.k_size)
        groups = call.B * call.Hk
        self.splits = 1 if groups >= 2 * count and call.bias is None else min(tiles, 2 * count)
        self.dq = np.zeros((self.splits, call.B, call.Hq, call.Lq, call.D), dtype)
        self.dk = np.zeros((call.B, call.Hk, call.Lk, call.D), dtype)
        self.dv = np.zeros((call.B, call.Hk, call.Lk, call.Dv), dtype)
        self.dbias = None
        if call.bias is not None:
            self.dbias = np.zeros((self.splits, *call.bias.shape), dtype)
        self.jobs = self._jobs()

    def _jobs(self) -> list[tuple[list[Strip], int]]:
        """(strips, split): one key/value head's strips, or all of them where a bias is shared."""
        if self.call.bias is not None:
            return [(self.strips, split) for split in range(self.splits)]
        groups: dict[tuple[int, int], list[Strip]] = {}
        for strip in self.strips:
            groups.setdefault((strip.b, strip.kh), []).append(strip)
        return [(group, split) for group in groups.values() for split in range(self.splits)]

    def job(self, item: tuple[list[Strip], int], scratch: Scratch) -> None:
        """Every tile of a job: blocks of queries against its own tiles of keys."""
        members, split = item
        size, k_size = self.o.plan.q_size, self.o.plan.k_size
        for strip in members:
            for i0 in range(0, self.call.Lq, size):
                i1 = min(i0 + size, self.call.Lq)
                mine = [
                    tile
                    for tile in self.o.plan.tiles(strip.b, strip.heads, i0, i1)
                    if tile.j0 // k_size % self.splits == split
                ]
                if mine:
                    _Block(self, strip, split, i0, i1, scratch).visit(mine)

    def gradients(self) -> Gradients:
        """Sum the splits, scale and cast."""
        call, o = self.call, self.o
        scale = self.dtype.type(call.scale)
        dq = self.dq[0] if self.splits == 1 else self.dq.sum(axis=0)
        dq *= scale
        self.dk *= scale
        bias = sinks = None
        if self.dbias is not None:
            bias = self.dbias.sum(axis=0).astype(call.bias.dtype)
        if call.sinks is not None:
            sinks = self._sinks().astype(call.sinks.dtype)
        return Gradients(
            dq.astype(o.q.dtype, copy=False),
            self.dk.astype(o.k.dtype, copy=False),
            self.dv.astype(o.v.dtype, copy=False),
            bias,
            sinks,
        )

    def _sinks(self) -> Any:
        """The sum over rows of p_sink (d_lse - delta); a row that sees nothing has no delta."""
        sinks = self.call.sinks.astype(self.dtype)[None, :, None]
        delta = self.delta
        if self.o.careful:
            delta = np.where(self._seen(), delta, 0)
        flow = -delta if self.d_lse is None else self.d_lse.astype(self.dtype) - delta
        return (np.exp(sinks - self.lse) * flow).sum(axis=(0, 2))

    def _seen(self) -> Any:
        """Which rows see something: only asked where d_out holds NaN or inf."""
        plan, call = self.o.plan, self.call
        seen = np.zeros((call.B, call.Hq, call.Lq), bool)
        for strip in self.strips:
            for i0 in range(0, call.Lq, plan.q_size):
                for tile in plan.tiles(strip.b, strip.heads, i0, min(i0 + plan.q_size, call.Lq)):
                    shown: Any = plan.shown(strip.b, strip.heads, tile) if tile.masked else True
                    if self.o.hiding_bias:
                        shown = shown & (
                            bias_of(self.call.bias, strip.b, strip.heads, tile) != -np.inf
                        )
                    shape = (1, tile.i1 - tile.i0, tile.j1 - tile.j0)
                    rows = np.broadcast_to(shown, shape).any(axis=-1)
                    seen[strip.b, strip.heads, tile.i0 : tile.i1] |= rows
        return seen


class _Block:
    """One block of queries of one head, against some tiles of keys."""

    def __init__(
        self, sums: _Sums, strip: Strip, split: int, i0: int, i1: int, scratch: Scratch
    ) -> None:
        o = sums.o
        self.sums, self.o, self.strip, self.split, self.scratch = sums, o, strip, split, scratch
        self.i0, self.dtype = i0, sums.dtype
        self.q = o.rows(o.q, strip, i0, i1)
        self.d_out = o.rows(sums.d_out, strip, i0, i1)
        if o.kept is not None:  # both of its products are with dropped pairs
            self.d_out = self.d_out * self.dtype.type(o.kept.scale)
        at = (strip.b, strip.h0, slice(i0, i1))
        self.shift = np.where(np.isneginf(sums.lse[at]), 0, sums.lse[at]).astype(self.dtype)
        self.delta = sums.delta[at]
        if sums.d_lse is not None:
            self.delta = self.delta - sums.d_lse[at].astype(self.dtype)
        self.dq = sums.dq[split, strip.b, strip.h0]

    def visit(self, tiles: list[Tile]) -> None:
        """Add the block's share of every gradient."""
        for tile in tiles:
            self._visit(tile)

    def _visit(self, tile: Tile) -> None:
        o, strip, dtype, scratch = self.o, self.strip, self.dtype, self.scratch
        rows = slice(tile.i0 - self.i0, tile.i1 - self.i0)
        q, d_out = self.q[rows], self.d_out[rows]
        k, v = o.keys(o.k, strip, tile), o.keys(o.v, strip, tile)
        tiled = o.scores(strip, tile, q, k, scratch, False)
        o.hide(tiled, strip, tile)
        p = tiled.s
        p -= self.shift[rows, None]
        np.exp(p, out=p)
        ds = scratch("ds", p.shape, dtype)
        np.matmul(d_out, v.T, out=ds)
        dropped = p
        if o.kept is not None:
            dropped = scratch("dropped", p.shape, dtype)
            o.drop(strip, tile, scratch, (p, dropped), (ds, ds))
        ds -= self.delta[rows, None]
        ds *= p
        shown = None
        if o.careful and tiled.shown is not None:
            shown = np.broadcast_to(tiled.shown, (1, *tiled.shown.shape[1:]))[0]
            np.copyto(dropped, 0, where=~shown)
            np.copyto(ds, 0, where=~shown)
        self._add_bias(tile, ds)
        if tiled.tanh is not None:
            slope = np.square(tiled.tanh, out=tiled.tanh)
            np.subtract(dtype.type(1), slope, out=slope)
            ds *= slope
            if shown is not None:
                np.copyto(ds, 0, where=~shown)
        keys = (strip.b, strip.kh, slice(tile.j0, tile.j1))
        self.sums.dv[keys] += self._product(dropped, d_out, shown, transposed=True)
        self.sums.dk[keys] += self._product(ds, q, shown, transposed=True)
        self.dq[tile.i0 : tile.i1] += self._product(ds, k, shown, transposed=False)

    def _product(self, rows: Any, x: Any, shown: Any, transposed: bool) -> Any:
        """`rows @ x` or `rows.T @ x`; a NaN or inf of x reaches only what sees it."""
        left = rows.T if transposed else rows
        out = self.scratch("product", (left.shape[0], x.shape[1]), self.dtype)
        if shown is None:
            return np.matmul(left, x, out=out)
        np.matmul(left, np.where(np.isfinite(x), x, 0), out=out)
        out += leaked(shown, x, transposed)
        return out

    def _add_bias(self, tile: Tile, ds: Any) -> None:
        total = self.sums.dbias
        if total is None:
            return
        b, h, i, j = total.shape[1:]
        part = ds if i != 1 else ds.sum(axis=0, keepdims=True)
        part = part if j != 1 else part.sum(axis=1, keepdims=True)
        total[
            self.split,
            self.strip.b if b != 1 else 0,
            self.strip.h0 if h != 1 else 0,
            slice(tile.i0, tile.i1) if i != 1 else slice(None),
            slice(tile.j0, tile.j1) if j != 1 else slice(None),
        ] += part
