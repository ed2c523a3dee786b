"""Which pairs are kept (S9), a tile at a time.

Philox takes ten rounds over two pairs of words for every eight keys. The first two rounds depend on
rows or keys alone and are done once a call. In the others both words of a pair go through a pass at
once and in place. A tile in smaller pieces would stay nearer to the processor, but its passes would
be so short that threads wait for one another between them. The words stand in 64 bits;
read as 32 from one place further, the high halves of the products lie over the low halves of the
other pair, so that one pass mixes them where a shift would take a second. The finished words are
laid side by side, so that their lanes are read as 16-bit numbers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.tiling import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_numpy._threads import Scratch

__all__ = ["Kept"]

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
M0, M1 = (np.uint64(m) for m in MULTIPLIERS)
BOTH = np.array([[M0], [M1]])

LITTLE = sys.byteorder == "little"
ENDS = slice(0 if LITTLE else 1, None, 2)
"""The low halves of 64-bit words among 32-bit ones."""
LOWS, HIGHS = (slice(None, -1), slice(1, None))[:: 1 if LITTLE else -1]
"""From the first low half on, and from the first high half on, with what lies between."""


class Kept:
    """The pairs that a call's dropout keeps.

    Attributes:
        scale: what the kept ones are multiplied by.
    """

    def __init__(self, call: Call) -> None:
        assert call.dropout is not None
        drop = call.dropout
        self.scale, self.threshold = drop.scale, np.uint16(drop.threshold)
        key = [int(x) if isinstance(x, int) else int(x[0]) for x in drop.words]
        turns = np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
        words, steps = (np.array(x, np.uint64)[:, None] for x in (key, KEY_STEPS))
        self.keys = (words + turns * steps) & WORD
        self._begin(call, *(int(x) for x in drop.offset))

    def _begin(self, call: Call, b: int, h: int, i: int, j: int) -> None:
        """Two rounds, and what the third does to a word of rows or keys alone.

        It leaves word 2 as the mix of `row` and `column`, word 0's product, and the old odd words.
        """
        x0 = _counter(-(-call.Lk // LANES), j // LANES)[None, None, None]
        x1 = _counter(call.Lq, i)[None, None, :, None]
        x2 = _counter(call.Hq, h)[None, :, None, None]
        x3 = _counter(call.B, b)[:, None, None, None]
        (k0, k1), (k2, k3), (k4, k5) = self.keys[:3]
        p0, p1 = x0 * M0, x2 * M1
        x0, x2 = (p1 >> HALF) ^ x1 ^ k0, (p0 >> HALF) ^ x3 ^ k1
        x1, x3 = p1 & WORD, p0 & WORD
        p0, p1 = x0 * M0, x2 * M1
        self.row, self.column = (p0 >> HALF) ^ k3, x3
        self.product = ((p1 >> HALF) ^ x1 ^ k2) * M0
        self.mixed = (self.product >> HALF) ^ k5
        self.x1, self.x3 = (p1 & WORD) ^ k4, p0 & WORD

    def drop(
        self, b: slice, heads: slice, i: slice, j: slice, scratch: Scratch, *arrays: tuple[Any, Any]
    ) -> None:
        """Copy from one array to another, or to itself, with 0 where dropped.

        Args:
            b: the range of the pairs' batch entries.
            heads: that of their query heads.
            i: that of their rows.
            j: that of their keys.
            scratch: the worker's.
            arrays: from and to; (b, heads, i, j).
        """
        blocks = slice(j.start // LANES, -(-j.stop // LANES))
        ahead = j.start - LANES * blocks.start
        keep = self._keep(b, heads, i, blocks, arrays[0][0].dtype, scratch)
        keep = keep[..., ahead : ahead + j.stop - j.start]
        for source, target in arrays:
            np.multiply(source, keep, out=target)

    def _keep(
        self, b: slice, heads: slice, i: slice, blocks: slice, dtype: Any, scratch: Scratch
    ) -> Any:
        """1 where kept and 0 where dropped, (b, heads, rows, keys)."""
        b_size, h_size, rows, columns = (x.stop - x.start for x in (b, heads, i, blocks))
        shape = (b_size, h_size, rows, columns)
        words = scratch("words", (*shape, 4), np.uint32)
        for w, x in enumerate(self._words(b, heads, i, blocks, shape, scratch)):
            np.copyto(words[..., w], x.view(np.uint32)[ENDS].reshape(shape))
        if not LITTLE:  # the low lane comes first
            words[...] = (words << np.uint32(16)) | (words >> np.uint32(16))
        lanes = words.view(np.uint16).reshape(b_size, h_size, rows, LANES * columns)
        above = scratch("above", lanes.shape, bool)
        np.greater_equal(lanes, self.threshold, out=above)
        keep = scratch("keep", lanes.shape, dtype)
        np.copyto(keep, above)
        return keep

    def _words(
        self, b: slice, h: slice, i: slice, blocks: slice, shape: tuple[int, ...], scratch: Scratch
    ) -> tuple[Any, ...]:
        """The four words, each in the low halves of (counters,) uint64."""
        even, odd = (scratch(name, (2, *shape), np.uint64) for name in ("even", "odd"))
        np.bitwise_xor(self.row[:, h, i], self.column[..., blocks], out=odd[0])
        np.multiply(odd[0], M1, out=odd[0])
        np.right_shift(odd[0], HALF, out=even[0])
        np.bitwise_xor(even[0], self.x1[b, :, :, blocks], out=even[0])
        np.bitwise_xor(self.mixed[b, h, :, blocks], self.x3[:, h, i], out=even[1])
        np.copyto(odd[1], self.product[b, h, :, blocks])
        x, y = even.reshape(2, -1), odd.reshape(2, -1)
        for turn in range(3, ROUNDS):
            np.multiply(x, BOTH, out=x)
            low = y.view(np.uint32)[:, LOWS]
            np.bitwise_xor(low, x[::-1].view(np.uint32)[:, HIGHS], out=low)
            if turn < ROUNDS - 1:
                np.bitwise_and(y, WORD, out=y)
            np.bitwise_xor(y, self.keys[turn], out=y)
            x, y = y, x[::-1]
        return x[0], y[0], x[1], y[1]


def _counter(count: int, shift: int) -> Any:
    numbers = np.arange(count, dtype=np.uint64)
    numbers += np.uint64(shift)
    return np.bitwise_and(numbers, WORD, out=numbers)
