"""How a call is cut: heads into chunks, queries and keys into tiles, and the loops over them.

Large calls walk one head at a time over tiles of 512 or 1024 a side, which stay in cache; small
ones take many heads at once, down to a single tile without any loop, which also compiles faster.
The query heads of a group are stacked as rows of one product, so keys are never repeated.

A last tile that would be short is slid back over the one before: its slice then has the common
size, nothing is padded or copied, and what it repeats is hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from attnx.masks import And, Causal, Mask, Segments, Window, leaves, map_leaves
from attnx.tiling import FULL, PARTIAL, Grid, mask_blocks, position_offset, tile_classes, visible

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Sizes", "Tiles", "add_at", "arange", "cut", "repeat", "sizes"]

SIDE = 1024
SCORES = 1 << 20
"""Scores of a tile over all its heads; 4 MB in float32."""
FEW = 64
"""Query rows of a key head up to which keys are taken whole, or in long tiles: each tile of them is
a copy."""

arange = partial(jnp.arange, dtype=jnp.int32)


class Sizes(NamedTuple):
    """The sizes of a call and of its tiles.

    Attributes:
        bc: batch entries of a chunk; more than one only where a chunk holds all heads.
        hc: key/value heads of a chunk.
        bq: queries of a tile.
        bk: keys of a tile.
    """

    B: int
    Hq: int
    Hk: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    bc: int
    hc: int
    bq: int
    bk: int

    @property
    def g(self) -> int:
        """Query heads of a group."""
        return self.Hq // self.Hk

    @property
    def nq(self) -> int:
        """Tiles along the queries."""
        return -(-self.Lq // self.bq)

    @property
    def nk(self) -> int:
        """Tiles along the keys."""
        return -(-self.Lk // self.bk)

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks of batch entries, and of heads."""
        return self.B // self.bc, self.Hk // self.hc


def sizes(q: Any, k: Any, v: Any, mask: Mask | None, *, whole_rows: bool = False) -> Sizes:
    """Choose the tiles of a call; `whole_rows` wants every key in one tile."""
    B, Hq, Lq, D = q.shape
    Hk, Lk, Dv = k.shape[1], k.shape[2], v.shape[3]
    g = Hq // Hk
    side, few = _side(mask), g * Lq <= FEW
    keys = side if not few else 4 * side if mask is not None else SCORES // max(g * Lq, 1)
    bk = max(Lk, 1) if whole_rows else _block(Lk, keys)
    rows = max(1, SCORES // bk) if whole_rows else side
    bq = _block(Lq, max(1, rows // g))
    made = g * bq * bk
    if few and bk < Lk:  # then the slices of keys, which are copied, outweigh the scores
        made = max(g * bq, D) * bk
    hc = _divisor(Hk, SCORES // made)
    bc = _divisor(B, SCORES // (Hq * bq * bk)) if hc == Hk else 1
    return Sizes(B, Hq, Hk, Lq, Lk, D, Dv, bc, hc, bq, bk)


def _side(mask: Mask | None) -> int:
    """Half of `SIDE` where a mask's edge runs across the grid: less of its tiles is in vain."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    crossed = any(isinstance(part, (Causal, Window, Segments)) for part in parts)
    side = SIDE // 2 if crossed else SIDE
    return min([side, *(max(64, n) for n in mask_blocks(mask) or ())])


def _block(length: int, limit: int) -> int:
    """Equal blocks of at most `limit`, in whole cache lines; none is ragged where that is cheap."""
    if length <= limit:
        return max(length, 1)
    count = -(-length // limit)
    for more in range(count, count + 1 + count // 4):
        if length % more == 0:
            return length // more
    return min(limit, -(-length // count // 16) * 16)


def _divisor(n: int, limit: int) -> int:
    """The greatest divisor of n that is at most `limit`, at least 1."""
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


def repeat(n: int, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    """`lax.scan` over 0 … n-1; a single turn is no loop."""
    if n == 1:
        carry, made = step(carry, 0)
        return carry, jax.tree_util.tree_map(lambda x: x[None], made)
    return lax.scan(step, carry, arange(n))


class _Runs:
    """jax.numpy, but for `take`: the indices of a tile are runs, so a slice does what it asks."""

    @staticmethod
    def take(array: Any, index: Any, axis: int) -> Any:
        if index.shape[0] == array.shape[axis]:
            return array
        starts = [0] * array.ndim
        starts[axis] = index[0]
        shape = (*array.shape[:axis], index.shape[0], *array.shape[axis + 1 :])
        return cut(array, tuple(starts), shape)

    take_any = staticmethod(jnp.take)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


RUNS = _Runs()


class Tiles:
    """One call's tiles: slices of its arrays, kinds of its tiles, and what is visible in each.

    A chunk is named by its number c, a tile by (c, i, j); all may be traced. Arrays of rows come as
    (bc, hc, g·bq, d), arrays of keys as (bc, hc, bk, d).

    Args:
        s: the sizes.
        mask: the call's mask.
        bias: the call's bias.
        whole: whether rows that a slid tile repeats are hidden too (they count in sums over rows).
    """

    def __init__(self, s: Sizes, mask: Mask | None, bias: Any, *, whole: bool = False) -> None:
        self.s = s
        self.mask = None if mask is None else map_leaves(mask, partial(_count, s.B))
        self.bias = bias
        self.hides = mask is not None or bias is not None
        self.ragged_q = whole and s.nq * s.bq != s.Lq
        self.ragged_k = s.nk * s.bk != s.Lk
        fixed = mask is None or next(leaves(mask), None) is None
        self.table = self._kinds(fixed)

    # Slices ------------------------------------------------------------------------------------

    def origin(self, c: Any) -> tuple[Any, Any]:
        """The first batch entry and the first key/value head of a chunk."""
        s = self.s
        heads = s.chunks[1]
        return c // heads * s.bc, c % heads * s.hc

    def start(self, name: str, index: Any) -> Any:
        """The first query (`"i"`) or key (`"j"`) of a tile, slid back at the end."""
        length, size = (self.s.Lq, self.s.bq) if name == "i" else (self.s.Lk, self.s.bk)
        at = index * size
        return at if length % size == 0 else jnp.minimum(at, length - size)

    def rows(self, x: Any, c: Any, i: Any) -> Any:
        """(B, Hq, Lq, d) at a tile's rows: (bc, hc, g·bq, d)."""
        s = self.s
        b, h = self.origin(c)
        shape = (s.bc, s.hc * s.g, s.bq, x.shape[3])
        tile = cut(x, (b, h * s.g, self.start("i", i), 0), shape)
        return tile.reshape(s.bc, s.hc, s.g * s.bq, x.shape[3])

    def columns(self, x: Any, c: Any, i: Any) -> Any:
        """(B, Hk, d, g, Lq), rows laid down beforehand, at a tile's rows: (bc, hc, d, g·bq)."""
        s = self.s
        b, h = self.origin(c)
        shape = (s.bc, s.hc, x.shape[2], s.g, s.bq)
        tile = cut(x, (b, h, 0, 0, self.start("i", i)), shape)
        return tile.reshape(s.bc, s.hc, x.shape[2], s.g * s.bq)

    def keys(self, x: Any, c: Any, j: Any) -> Any:
        """(B, Hk, Lk, d) at a tile's keys: (bc, hc, bk, d)."""
        s = self.s
        b, h = self.origin(c)
        return cut(x, (b, h, self.start("j", j), 0), (s.bc, s.hc, s.bk, x.shape[3]))

    def bias_place(self, c: Any, i: Any, j: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Where a tile lies in the bias, and the shape it has there; broadcast axes stay 1."""
        s = self.s
        b, h = self.origin(c)
        full = (
            (b, s.bc), (h * s.g, s.hc * s.g), (self.start("i", i), s.bq), (self.start("j", j), s.bk)
        )  # fmt: skip
        pairs = [(0, 1) if n == 1 else p for n, p in zip(self.bias.shape, full, strict=True)]
        return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)

    # Visibility --------------------------------------------------------------------------------

    def _kinds(self, fixed: bool) -> Any:
        """Kinds of tiles, (chunks of batch or 1, chunks of heads or 1, nq, nk), or None: all full.

        A tile whose heads differ is partial. A mask without leaves (`fixed`) is looked at by
        NumPy while the program is traced: the table is then a constant of it.
        """
        s = self.s
        if s.nk == 0 or (self.mask is None and not (self.ragged_q or self.ragged_k)):
            return None
        if self.mask is None:
            table = np.full((1, 1, s.nq, s.nk), FULL, np.int8)
        else:
            xp, run = (np, np.arange) if fixed else (jnp, arange)
            table = tile_classes(self.mask, xp, run, Lq=s.Lq, Lk=s.Lk, q_size=s.bq, k_size=s.bk)
            table = _combine(_combine(table, 0, s.bc), 1, s.hc * s.g)
        slid = np.zeros((s.nq, s.nk), bool)
        slid[-1, :] |= self.ragged_q
        slid[:, -1] |= self.ragged_k
        xp = np if isinstance(table, np.ndarray) else jnp
        return _common(jnp.asarray(xp.where(slid, xp.minimum(table, PARTIAL), table)))

    def kinds(self, c: Any) -> Any:
        """The kinds of a chunk's tiles, (nq, nk), or None when all are full."""
        if self.table is None:
            return None
        nB, nH, nq, nk = self.table.shape
        heads = self.s.chunks[1]
        place = (c // heads if nB > 1 else 0, c % heads if nH > 1 else 0, 0, 0)
        return cut(self.table, place, (1, 1, nq, nk))[0, 0]

    def grid(self, c: Any, i: Any, j: Any) -> Grid:
        """The indices of a tile."""
        s = self.s
        b, h = self.origin(c)
        rows, keys = self.start("i", i) + arange(s.bq), self.start("j", j) + arange(s.bk)
        heads = h * s.g + arange(s.hc * s.g)
        offset = position_offset(self.mask, s.Lq, s.Lk)
        return Grid(RUNS, arange, b + arange(s.bc), heads, rows, keys, offset)

    def shown(self, c: Any, i: Any, j: Any) -> Any:
        """What the mask and the slid edges show in a tile, to broadcast over its four axes."""
        s, grid = self.s, self.grid(c, i, j)
        found = [] if self.mask is None else [visible(self.mask, grid)]
        if self.ragged_k:
            found.append((grid.j >= j * s.bk)[None, None, None, :])
        if self.ragged_q:
            found.append((grid.i >= i * s.bq)[None, None, :, None])
        shown = None
        for condition in found:
            shown = condition if shown is None else shown & condition
        return shown

    def sweep(
        self,
        kinds: Any,
        n: int,
        body: Callable[[Any, Any, bool], tuple[Any, Any]],
        carry: Any,
        held: Any = None,
        put: Callable[[Any, Any, Any], Any] = lambda index, held, part: held,
        *,
        alike: bool = False,
    ) -> tuple[Any, Any]:
        """Visit the tiles of a row or column that are not empty.

        Args:
            kinds: their kinds, (n,), or None when all are full.
            n: how many there are.
            body: `carry, part = body(index, carry, masked)`.
            carry: what goes from tile to tile.
            held: a large carry; it stands outside the branch over kinds, which would copy it.
            put: `held = put(index, held, part)`.
            alike: whether full tiles are treated as partial ones, which saves a program.

        Returns:
            The carry and what is held.
        """
        if n == 1:
            carry, part = body(0, carry, self.table is not None)
            return carry, put(0, held, part)
        shapes = jax.eval_shape(lambda carry: body(0, carry, alike)[1], carry)
        idle = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        branches = [
            lambda index, carry: (carry, idle),
            lambda index, carry: body(index, carry, True),
            lambda index, carry: body(index, carry, False),
        ][: 2 if alike else 3]

        def turn(index: Any, state: Any) -> Any:
            carry, held = state
            if kinds is None:
                carry, part = body(index, carry, False)
            else:
                # An index beyond the last branch counts as the last.
                carry, part = lax.switch(kinds[index].astype(jnp.int32), branches, index, carry)
            return carry, put(index, held, part)

        if kinds is None:
            first, stop = jnp.int32(0), jnp.int32(n)
        else:
            met, at = kinds > 0, arange(n)
            first, stop = jnp.min(jnp.where(met, at, n)), jnp.max(jnp.where(met, at + 1, 0))
        made: tuple[Any, Any] = lax.fori_loop(first, stop, turn, (carry, held))
        return made

    # Putting together --------------------------------------------------------------------------

    def heads_together(self, stack: Any) -> Any:
        """(chunks, bc, heads of a chunk, …) as (B, heads, …)."""
        s = self.s
        nB, nH = s.chunks
        rest = stack.shape[3:]
        stack = stack.reshape(nB, nH, *stack.shape[1:]).swapaxes(1, 2)
        return stack.reshape(s.B, nH * stack.shape[3], *rest)

    def tiles_together(self, stack: Any, length: int) -> Any:
        """(tiles, b, h, size, d) as (b, h, length, d); a slid last tile gives its end alone."""
        n, b, h, size, d = stack.shape
        short = n * size - length
        head = jnp.moveaxis(stack[: n - 1] if short else stack, 0, 2)
        head = head.reshape(b, h, -1, d) if head.size else stack[0, :, :, :0]
        return jnp.concat([head, stack[-1, :, :, short:]], axis=2) if short else head


def cut(x: Any, starts: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """`lax.dynamic_slice`, and nothing where the slice is everything."""
    if x.shape == shape:
        return x
    return lax.dynamic_slice(x, _indices(starts), shape, allow_negative_indices=False)


def add_at(total: Any, part: Any, starts: tuple[Any, ...]) -> Any:
    """`total` with `part` added at a place."""
    if total.shape == part.shape:
        return total + part
    part = cut(total, starts, part.shape) + part
    return lax.dynamic_update_slice(total, part, _indices(starts), allow_negative_indices=False)


def _indices(starts: tuple[Any, ...]) -> list[Any]:
    return [jnp.asarray(at, jnp.int32) for at in starts]


def _count(B: int, _: Mask, __: str, leaf: Any) -> Any:
    """Integers given alone become one for each batch entry, so that their value is not compiled."""
    return jnp.broadcast_to(leaf, (B,)) if jnp.ndim(leaf) == 0 else leaf


@custom_vmap
def _common(table: Any) -> Any:
    """The table; under vmap one for all that is mapped, so that loops and branches stay so."""
    return table


@_common.def_vmap
def _common_of_all(size: int, _: Any, table: Any) -> tuple[Any, bool]:
    return _common(_combine(table, 0, size)[0]), False


def _combine(table: Any, axis: int, size: int) -> Any:
    """The kinds of tiles over `size` entries: full when all are, empty when all are."""
    if table.shape[axis] == 1 or size == 1:
        return table
    shape = (*table.shape[:axis], -1, size, *table.shape[axis + 1 :])
    low, high = jnp.min(table.reshape(shape), axis + 1), jnp.max(table.reshape(shape), axis + 1)
    return jnp.where(low == high, low, PARTIAL)
