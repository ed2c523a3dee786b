"""The forward: blocked online softmax, one job a block of queries of one strip.

With s the scores of a tile (S2), m and l the running maximum and sum, and a block's rows alike:

    m' = max(m, max_j s)      p = exp(s - m')      l = l exp(m - m') + sum_j p
    acc = acc exp(m - m') + p @ v                  out = acc / l      lse = m + log(l)

Where a bound on |s| shows that exp(s) can neither overflow nor lose a value, no maximum is taken:
m stays 0. The bound is Cauchy-Schwarz's, |scale| |q_i| |k_j|, or the softcap.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx.tiling import mask_blocks
from attnx_numpy import _hidden, _threads
from attnx_numpy._scores import Operands, Strip, leaked, strips
from attnx_numpy._tiles import TilePlan

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_numpy._threads import Scratch
    from attnx_numpy._tiles import Tile

__all__ = ["block_sizes", "forward"]

BOUND = 40.0
"""exp(40) is 2^57.7: sums over any Lk stay finite, and products with moderate v stay normal."""

LOOKED = 2048
"""Keys that are looked at at a time."""

SHORTEST = 128
"""Rows or keys of a tile where a mask's blocks are shorter: what they hide no longer pays."""

SMALL = 1 << 17
"""Multiplications of a call under which threads cost more than they give."""


def block_sizes(call: Call) -> tuple[int, int, int]:
    """Rows of a block, keys of a tile, and threads.

    Tiles of 512 x 512 scores stay in the second-level cache; a window that is narrower than that,
    or too few blocks to keep the threads busy, asks for shorter ones.
    """
    work = call.B * call.Hq * call.Lq * call.Lk * (call.D + call.Dv)
    count = 1 if work < SMALL else _threads.threads()
    q_size = 512 if call.mask is None or "window" not in call.mask.structure else 256
    while count > 1 and q_size > 64 and call.B * call.Hq * -(-call.Lq // q_size) < 2 * count:
        q_size //= 2
    blocks = mask_blocks(call.mask)
    if blocks is None:
        return q_size, 512, count
    rows, keys = (min(512, max(SHORTEST, 2 * n)) for n in blocks)  # a tile is classed by halves
    return min(q_size, rows), keys, count


class _Values(NamedTuple):
    """What is known of the keys and values of a strip."""

    k_norm: float
    moderate: bool


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """The answer: out (B, Hq, Lq, Dv) and lse (B, Hq, Lq)."""
    out = np.empty((call.B, call.Hq, call.Lq, call.Dv), q.dtype)
    lse = np.empty(
        (call.B, call.Hq, call.Lq), np.float64 if call.dtype == "float64" else np.float32
    )
    if out.size == 0:
        return out, lse
    if call.Lk == 0:
        out.fill(0)
        lse[...] = -np.inf if call.sinks is None else call.sinks.astype(lse.dtype)[None, :, None]
        return out, lse
    q_size, k_size, count = block_sizes(call)
    known: dict[tuple[int, int], _Values] = {}
    with np.errstate(all="ignore"):
        operands = Operands(call, q, k, v, TilePlan(call, q_size, k_size))
        if _hidden.hides(call) and not _is_tame(operands, known):
            k, v = _hidden.cleaned(k, v, call)
            operands = Operands(call, q, k, v, operands.plan)
            known.clear()
    jobs = [
        (strip, i0, min(i0 + q_size, call.Lq))
        for strip in strips(call, q_size)
        for i0 in reversed(range(0, call.Lq, q_size))
    ]

    def job(item: tuple[Strip, int, int], scratch: Scratch) -> None:
        strip, i0, i1 = item
        values = _known(operands, strip.b, strip.kh, known)
        _Block(operands, strip, i0, i1, values, scratch).compute(out, lse)

    _threads.run(job, jobs, min(count, len(jobs)))
    return out, lse


def _is_tame(operands: Operands, known: dict[tuple[int, int], _Values]) -> bool:
    """Whether the look at all keys ends well, so that the look at some of them would too."""
    call = operands.call
    if operands.careful or call.bias is not None or call.alibi is not None:
        return not operands.careful
    if call.softcap is not None and call.softcap <= BOUND:
        ceiling = 1e30
    else:
        ceiling = BOUND / max(abs(call.scale), 1e-30)
    q = operands.q.astype(operands.dtype, copy=False)
    q_norm = math.sqrt(float(np.einsum("bhid,bhid->bhi", q, q).max()))
    looks = (_known(operands, b, kh, known) for b in range(call.B) for kh in range(call.Hk))
    return all(x.moderate and q_norm * x.k_norm <= min(ceiling, 1e30) for x in looks)


def _known(operands: Operands, b: int, kh: int, known: dict[tuple[int, int], _Values]) -> _Values:
    """The look at a key/value head, taken once."""
    values = known.get((b, kh))
    if values is None:
        values = known[b, kh] = _look(operands, b, kh)
    return values


def _look(operands: Operands, b: int, kh: int) -> _Values:
    """The greatest norm of a key, and whether p v is safe for p from exp(-BOUND) to exp(BOUND)."""
    if operands.careful:
        return _Values(math.inf, False)
    square, moderate = 0.0, True
    for j in range(0, operands.call.Lk, LOOKED):  # what is made of a part stays in cache
        k, v = (
            x[b, kh, j : j + LOOKED].astype(operands.dtype, copy=False)
            for x in (operands.k, operands.v)
        )
        moderate = moderate and _moderate(v)
        square = float(np.maximum(square, np.einsum("jd,jd->j", k, k).max()))  # keeps a NaN
    return _Values(math.sqrt(square), moderate)


def _moderate(v: Any) -> bool:
    """Whether all values lie below 2^20 in size, and all but zeros above 2^-40; no NaN among them.

    The size of the least is found on the bits, doubled to lose the sign: one less makes a zero the
    greatest of all. A minimum where a condition holds takes ten times as long.
    """
    if not max(v.max(initial=0), -v.min(initial=0)) < 2.0**20:
        return False
    bits = v.view(f"u{v.itemsize}")
    least = v.dtype.type(2.0**-40).view(bits.dtype)
    doubled = bits + bits
    doubled -= bits.dtype.type(1)
    return bool(doubled.min(initial=np.iinfo(bits.dtype).max) >= least + least - 1)


class _Block:
    """One block of queries of one strip."""

    def __init__(
        self, operands: Operands, strip: Strip, i0: int, i1: int, values: _Values, scratch: Scratch
    ) -> None:
        self.o, self.strip, self.scratch = operands, strip, scratch
        self.call, self.dtype = operands.call, operands.dtype
        self.i0, self.i1 = i0, i1
        self.q = operands.rows(operands.q, strip, i0, i1)
        R = self.q.shape[0]
        self.acc = np.zeros((R, self.call.Dv), self.dtype)
        self.m = np.full(R, -np.inf, self.dtype)
        self.l = np.zeros(R, self.dtype)
        self.seen = np.zeros(R, bool)
        self.sinks = None
        if self.call.sinks is not None:
            heads = self.call.sinks[strip.heads].astype(self.dtype)
            self.sinks = np.repeat(heads, i1 - i0)
        self.bounded = self._is_bounded(values)

    def _is_bounded(self, values: _Values) -> bool:
        """Whether exp(s) needs no shift at all."""
        call = self.call
        if call.bias is not None or call.alibi is not None or not values.moderate:
            return False
        if self.sinks is not None and not np.abs(self.sinks).max() <= BOUND:
            return False
        q_norm = math.sqrt(float(np.einsum("id,id->i", self.q, self.q).max()))
        bound = abs(call.scale) * q_norm * values.k_norm
        if not q_norm * values.k_norm < 1e30:  # else q * scale might overflow, or NaN came
            return False
        return min(bound, call.softcap or math.inf) <= BOUND

    def compute(self, out: Any, lse: Any) -> None:
        """Visit the tiles and write the block's rows of out and lse."""
        tiles = self.o.plan.tiles(self.strip.b, self.strip.heads, self.i0, self.i1)
        if self.bounded:
            self.q = self.q * self.dtype.type(self.call.scale)
            self.m.fill(0)
        elif self.sinks is not None:
            self.m[:] = self.sinks
            self.l.fill(1)
        for tile in tiles:
            self._visit(tile)
        if self.bounded:
            np.greater(self.l, 0, out=self.seen)
            if self.sinks is not None:
                self.l += np.exp(self.sinks)
        self._finish(out, lse)

    def _visit(self, tile: Tile) -> None:
        k = self.o.keys(self.o.k, self.strip, tile)
        v = self.o.keys(self.o.v, self.strip, tile)
        whole = tile.i0 == self.i0 and tile.i1 == self.i1
        rows: Any = slice(None) if whole else self._rows(tile)
        tiled = self.o.scores(self.strip, tile, self.q[rows], k, self.scratch, self.bounded)
        step = self._bounded_step if self.bounded else self._online_step
        step(tiled, tile, rows, v)

    def _rows(self, tile: Tile) -> Any:
        """A part of the block's rows: a slice for one head, an index for several."""
        first, last = tile.i0 - self.i0, tile.i1 - self.i0
        heads = self.strip.h1 - self.strip.h0
        if heads == 1:
            return slice(first, last)
        n = self.i1 - self.i0
        return (np.arange(heads)[:, None] * n + np.arange(first, last)).reshape(-1)

    def _bounded_step(self, tiled: Any, tile: Tile, rows: Any, v: Any) -> None:
        p = np.exp(tiled.s, out=tiled.s)
        if tiled.shown is not None:
            view = p.reshape(self.strip.h1 - self.strip.h0, -1, p.shape[-1])
            np.multiply(view, self.o.plan.factor(tiled.shown, tile, self.dtype), out=view)
        self._add(p, tile, rows, v)

    def _add(self, p: Any, tile: Tile, rows: Any, v: Any) -> None:
        ones = self.scratch("ones", (p.shape[1],), self.dtype)
        ones.fill(1)
        product = self.scratch("pv", (p.shape[0], v.shape[1]), self.dtype)
        self.l[rows] += np.matmul(p, ones)
        if self.o.kept is not None:
            self.o.drop(self.strip, tile, self.scratch, (p, p))
        np.matmul(p, v, out=product)
        self.acc[rows] += product

    def _online_step(self, tiled: Any, tile: Tile, rows: Any, v: Any) -> None:
        self.o.hide(tiled, self.strip, tile)
        s, m = tiled.s, self.m[rows]
        new = np.maximum(m, s.max(axis=1))
        shift = np.where(np.isneginf(new), self.dtype.type(0), new)
        s -= shift[:, None]
        p = np.exp(s, out=s)
        factor = np.exp(m - shift)
        self.acc[rows] *= factor[:, None]
        self.l[rows] *= factor
        self.m[rows] = new
        if tiled.shown is None:
            self.seen[rows] = True
            self._add(p, tile, rows, v)
            return
        shown = np.broadcast_to(
            tiled.shown, (self.strip.h1 - self.strip.h0, *tiled.shown.shape[1:])
        ).reshape(p.shape)
        self.seen[rows] |= shown.any(axis=1)
        if not self.o.careful:
            self._add(p, tile, rows, v)
            return
        self._add(p, tile, rows, np.where(np.isfinite(v), v, 0))
        self.acc[rows] += leaked(shown, v)

    def _finish(self, out: Any, lse: Any) -> None:
        n = self.i1 - self.i0
        dead = ~self.seen
        any_dead = bool(dead.any())
        if any_dead:
            self.l[dead] = 1
        np.divide(self.acc, self.l[:, None], out=self.acc)
        if self.o.kept is not None:
            self.acc *= self.dtype.type(self.o.kept.scale)
        rows_lse = self.m + np.log(self.l)
        if any_dead:
            self.acc[dead] = 0
            rows_lse[dead] = -np.inf if self.sinks is None else self.sinks[dead]
        b, heads = self.strip.b, self.strip.heads
        out[b, heads, self.i0 : self.i1] = self.acc.reshape(-1, n, self.call.Dv)
        lse[b, heads, self.i0 : self.i1] = rows_lse.reshape(-1, n)
