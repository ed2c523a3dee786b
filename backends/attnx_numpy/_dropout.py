"""Which pairs of a tile are kept (S9), a few rows at a time so that the words stay in cache.

Philox takes ten rounds of ten passes over a number for every eight pairs. The passes run in place;
the first two rounds and half of the third depend on rows or keys alone and broadcast. The finished
words are laid side by side, so that their lanes are read as 16-bit numbers without a shift.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.tiling import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_numpy._scores import Strip
    from attnx_numpy._threads import Scratch
    from attnx_numpy._tiles import Tile

__all__ = ["Kept"]

PIECE = 1 << 13
"""Counters at a time: six arrays of them take 384 kB."""

M0, M1 = (np.uint64(m) for m in MULTIPLIERS)
WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


class Kept:
    """The pairs that a call's dropout keeps.

    Attributes:
        scale: what the kept ones are multiplied by.
    """

    def __init__(self, call: Call) -> None:
        assert call.dropout is not None
        drop = call.dropout
        self.scale, self.threshold = drop.scale, np.uint16(drop.threshold)
        self.offset = tuple(int(x) for x in drop.offset)
        low, high = (int(x) if isinstance(x, int) else int(x[0]) for x in drop.words)
        self.keys = [
            tuple(
                np.uint64((k + turn * step) & 0xFFFFFFFF)
                for k, step in zip((low, high), KEY_STEPS, strict=True)
            )
            for turn in range(ROUNDS)
        ]

    def drop(self, strip: Strip, tile: Tile, scratch: Scratch, *arrays: Any) -> None:
        """0 where dropped, in place, in arrays of a tile's pairs, (heads * rows, keys)."""
        n = tile.i1 - tile.i0
        size = max(1, PIECE // max(1, -(-(tile.j1 - tile.j0) // LANES)))
        for row, h in enumerate(range(strip.h0, strip.h1)):
            for i0 in range(tile.i0, tile.i1, size):
                i1 = min(i0 + size, tile.i1)
                keep = self._piece(strip.b, h, i0, i1, tile.j0, tile.j1, scratch)
                at = row * n + i0 - tile.i0
                for array in arrays:
                    part = array[at : at + i1 - i0]
                    np.multiply(part, keep, out=part)

    def _piece(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int, scratch: Scratch) -> Any:
        """True where kept, (rows, keys)."""
        first, last = j0 // LANES, -(-j1 // LANES)
        words = self._words(b, h, (i0, i1), (first, last), scratch)
        lanes = words.view(np.uint16).reshape(i1 - i0, LANES * (last - first))
        keep = scratch("keep", lanes.shape, bool)
        np.greater_equal(lanes, self.threshold, out=keep)
        return keep[:, j0 - LANES * first : j1 - LANES * first]

    def _words(
        self, b: int, h: int, rows: tuple[int, int], blocks: tuple[int, int], scratch: Scratch
    ) -> Any:
        """(rows, blocks, 4) uint32."""
        shift = self.offset
        x0 = _counter(*blocks, shift[3] // LANES)[None, :]
        x1 = _counter(*rows, shift[2])[:, None]
        x2, x3 = _counter(h, h + 1, shift[1])[None], _counter(b, b + 1, shift[0])[None]
        for k0, k1 in self.keys[:2]:  # of rows or keys alone
            p0, p1 = x0 * M0, x2 * M1
            x0, x1 = (p1 >> HALF) ^ (x1 & WORD) ^ k0, p1
            x2, x3 = (p0 >> HALF) ^ (x3 & WORD) ^ k1, p0
        shape = (rows[1] - rows[0], blocks[1] - blocks[0])
        new0, new2 = scratch("x0", shape, np.uint64), scratch("x2", shape, np.uint64)
        for turn, (k0, k1) in enumerate(self.keys[2:]):
            p0 = np.multiply(x0, M0, out=_product(x0, "p0", turn, shape, scratch))
            p1 = np.multiply(x2, M1, out=_product(x2, "p1", turn, shape, scratch))
            x0, x2 = _mix(p1, x1, k0, new0), _mix(p0, x3, k1, new2)
            x1, x3 = p1, p0
        words = scratch("words", (*shape, 4), np.uint32)
        for w, x in enumerate((x0, x1, x2, x3)):
            np.copyto(words[..., w], x, casting="unsafe")
        if sys.byteorder == "big":  # the low lane comes first
            words[...] = (words << np.uint32(16)) | (words >> np.uint32(16))
        return words


def _counter(start: int, stop: int, shift: int) -> Any:
    numbers = np.arange(start, stop, dtype=np.uint64)
    numbers += np.uint64(shift)
    return np.bitwise_and(numbers, WORD, out=numbers)


def _product(x: Any, name: str, turn: int, shape: tuple[int, int], scratch: Scratch) -> Any:
    """One of two buffers that take turns: the last product is still needed."""
    return scratch(f"{name}{turn % 2}", shape, np.uint64) if x.shape == shape else None


def _mix(product: Any, word: Any, key: Any, out: Any) -> Any:
    """The high word of a product, with a low word and a key mixed in."""
    np.right_shift(product, HALF, out=out)
    np.bitwise_xor(out, word, out=out)
    np.bitwise_xor(out, key, out=out)
    return np.bitwise_and(out, WORD, out=out)
