"""What forward and backward share: a call's operands by head, and the scores of one tile.

A *strip* is what a job works on: some query heads of one batch entry that read one key/value head,
with their rows stacked. Without grouped heads, or with many queries, it is one head; for short
queries it is a whole group, so that a decode step is one product a group (S1.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx_numpy._dropout import Kept
from attnx_numpy._tiles import Tile, TilePlan

if TYPE_CHECKING:
    from attnx.plugin import Alibi, Call
    from attnx_numpy._threads import Scratch

__all__ = ["Operands", "Strip", "Tiled", "bias_of", "leaked", "strips", "tame"]


class Strip(NamedTuple):
    """Query heads h0 to h1 of batch entry b, which read key/value head kh."""

    b: int
    kh: int
    h0: int
    h1: int

    @property
    def heads(self) -> slice:
        """The query heads."""
        return slice(self.h0, self.h1)


def strips(call: Call, stacked_rows: int) -> list[Strip]:
    """All strips; a group is stacked where its rows stay few."""
    g = call.Hq // call.Hk
    step = g if g * call.Lq <= stacked_rows else 1
    return [Strip(b, h // g, h, h + step) for b in range(call.B) for h in range(0, call.Hq, step)]


class Tiled(NamedTuple):
    """A tile's scores, (heads * rows, keys), and what is visible.

    Attributes:
        s: scores of S2 before selection.
        tanh: tanh(s / softcap), or None.
        shown: visible pairs (heads, rows, keys), or None when all are.
    """

    s: Any
    tanh: Any
    shown: Any


class Operands:
    """A call's arrays and what is known of their values.

    Attributes:
        dtype: of scores and sums: float32, or float64 for float64 inputs (S5.2).
        careful: some value that is not finite, or makes a product that is not, may have to be kept
            from rows that do not see it.
        hiding_bias: the bias holds -inf somewhere.
        kept: the pairs that dropout keeps, or None.
    """

    def __init__(self, call: Call, q: Any, k: Any, v: Any, plan: TilePlan) -> None:
        self.call, self.plan = call, plan
        self.q, self.k, self.v = q, k, v
        self.dtype = np.dtype(np.float64 if call.dtype == "float64" else np.float32)
        self.careful = not call.assume_finite and not tame(call.scale, q, k, v)
        self.kept = None if call.dropout is None else Kept(call)
        self.hiding_bias = False
        if call.bias is not None and call.bias.size:
            self.hiding_bias = bool(np.isneginf(call.bias.min()))
            self.careful |= not call.bias.max() < np.inf
        if call.alibi is not None:
            self.careful |= not np.isfinite(call.alibi.slopes).all()

    def rows(self, x: Any, strip: Strip, i0: int, i1: int) -> Any:
        """Rows i0 to i1 of a strip, (heads * rows, D), in the accumulator's dtype."""
        part = x[strip.b, strip.heads, i0:i1]
        part = np.ascontiguousarray(part, dtype=self.dtype)
        return part.reshape(-1, x.shape[-1])

    def keys(self, x: Any, strip: Strip, tile: Tile) -> Any:
        """A tile of k or v, (keys, D), in the accumulator's dtype; upcast a tile at a time."""
        return x[strip.b, strip.kh, tile.j0 : tile.j1].astype(self.dtype, copy=False)

    def scores(
        self, strip: Strip, tile: Tile, q: Any, k: Any, scratch: Scratch, scaled: bool
    ) -> Tiled:
        """The scores of a tile in scratch memory; `scaled` when q holds the scale already."""
        call = self.call
        s = scratch("s", (q.shape[0], k.shape[0]), self.dtype)
        np.matmul(q, k.T, out=s)
        if not scaled:
            s *= self.dtype.type(call.scale)
        tanh = None
        if call.softcap is not None:
            tanh = scratch("tanh", s.shape, self.dtype)
            np.divide(s, self.dtype.type(call.softcap), out=tanh)
            np.tanh(tanh, out=tanh)
            np.multiply(tanh, self.dtype.type(call.softcap), out=s)
        shown = self.plan.shown(strip.b, strip.heads, tile) if tile.masked else None
        if call.bias is not None:
            part = bias_of(call.bias, strip.b, strip.heads, tile)
            view = s.reshape(strip.h1 - strip.h0, tile.i1 - tile.i0, -1)
            view += part.astype(self.dtype, copy=False)
            if self.hiding_bias:
                unhidden = np.broadcast_to(part, (part.shape[0], *view.shape[1:])) != -np.inf
                shown = unhidden if shown is None else shown & unhidden
        if call.alibi is not None:
            self._add_alibi(s, call.alibi, strip, tile, scratch)
        return Tiled(s, tanh, shown)

    def _add_alibi(self, s: Any, alibi: Alibi, strip: Strip, tile: Tile, scratch: Scratch) -> None:
        away = self.plan.away(alibi, strip.b, tile, self.dtype)
        slopes = alibi.slopes[strip.heads].astype(self.dtype)
        n = tile.i1 - tile.i0
        part = scratch("alibi", (n, tile.j1 - tile.j0), self.dtype)
        for head, slope in enumerate(slopes):
            np.multiply(away, slope, out=part)
            s[head * n : (head + 1) * n] += part

    def hide(self, tiled: Tiled, strip: Strip, tile: Tile) -> None:
        """Put -inf where a pair is hidden: by selection, whatever stands there."""
        s, shown = tiled.s, tiled.shown
        if shown is None:
            return
        view = s.reshape(strip.h1 - strip.h0, -1, s.shape[-1])
        if self.careful:
            np.copyto(view, -np.inf, where=~shown)
        else:  # the same selection for finite scores, many times faster than a mask of booleans
            np.add(view, self.plan.penalty(shown, tile, self.dtype), out=view)

    def drop(self, strip: Strip, tile: Tile, scratch: Scratch, *arrays: tuple[Any, Any]) -> None:
        """See `Kept.drop`, over a tile's pairs, (heads * rows, keys)."""
        assert self.kept is not None
        i, j = slice(tile.i0, tile.i1), slice(tile.j0, tile.j1)
        shape = (1, strip.h1 - strip.h0, tile.i1 - tile.i0, tile.j1 - tile.j0)
        pairs = [(source.reshape(shape), target.reshape(shape)) for source, target in arrays]
        self.kept.drop(slice(strip.b, strip.b + 1), strip.heads, i, j, scratch, *pairs)


def bias_of(bias: Any, b: int, heads: slice, tile: Tile) -> Any:
    """The bias of a tile, in its own dtype; axes of size 1 stay."""
    part = bias[b if bias.shape[0] != 1 else 0]
    part = part[heads] if part.shape[0] != 1 else part
    part = part[:, tile.i0 : tile.i1] if part.shape[1] != 1 else part
    return part[:, :, tile.j0 : tile.j1] if part.shape[2] != 1 else part


def tame(scale: float, *arrays: Any) -> bool:
    """Whether all values are finite, and so are all products of rows, times the scale.

    A finite value that nobody sees may make an infinite score, and infinity times 0 is NaN. By
    Cauchy-Schwarz the norm of a whole array bounds every product, and a BLAS gives it in one pass.
    """
    return abs(scale) <= 1e5 and all(_tame(x) for x in arrays if x is not None and x.size)


def _tame(x: Any) -> bool:
    if x.dtype == np.float16:  # no product of these is too large for float32
        return bool(np.isfinite(x.sum(dtype=np.float32))) or bool(np.isfinite(x).all())
    wide = x if x.itemsize > 2 else x.astype(np.float32)
    flat = wide.ravel(order="K")
    return bool(np.dot(flat, flat) < (1e32 if wide.itemsize == 4 else 1e250))


def leaked(shown: Any, x: Any, transposed: bool = False) -> Any:
    """What visible pairs (rows, keys) owe to the NaN and inf of x; 0 where there is none (S4.2)."""
    pairs = shown.astype(np.float32)
    pairs = pairs.T if transposed else pairs
    total = np.zeros((pairs.shape[0], x.shape[1]), np.float32)
    for value, where in ((np.nan, np.isnan(x)), (np.inf, x == np.inf), (-np.inf, x == -np.inf)):
        if where.any():
            total[(pairs @ where.astype(np.float32)) > 0] += value
    return total
