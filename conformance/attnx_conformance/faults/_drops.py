"""What is dropped, one method a decision, so that a fault can change a single one of them.

Like `Sight` it is a third reading, here of S9, beside attnx's own and the oracle's. It draws one
block for eight keys, as kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._sight import Call

__all__ = ["LANES", "Drops", "philox"]

LANES = 8
WORD = 0xFFFFFFFF
FACTORS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85


def philox(counter: Sequence[Any], key: Sequence[int], rounds: int = 10) -> Any:
    """The block of each counter; words are held in 64 bits and stand along the first axis."""
    x = list(np.broadcast_arrays(*counter))
    for n in range(rounds):
        first, third = x[0] * FACTORS[0], x[2] * FACTORS[1]
        k = [(word + n * step) & WORD for word, step in zip(key, STEPS, strict=True)]
        x = [(third >> 32) ^ x[1] ^ k[0], third & WORD, (first >> 32) ^ x[3] ^ k[1], first & WORD]
    return np.stack(x)


class Drops:
    """Clause S9."""

    def drop(self, c: Call, P: Any, rows: slice, cols: slice) -> Any:
        """The weights that meet the values."""
        return P if c.dropout is None else P * self.gains(c, rows, cols)

    def drop_gradient(self, c: Call, dP: Any, rows: slice, cols: slice) -> Any:
        """The gradient of the weights from that of those which met the values."""
        return dP if c.dropout is None else dP * self.gains(c, rows, cols)

    def gains(self, c: Call, rows: slice, cols: slice) -> Any:
        """0 where dropped, and what the others are scaled by."""
        return np.where(self.keeps(c, rows, cols), c.high(self.gain(c)), c.high(0))

    def keeps(self, c: Call, rows: slice, cols: slice) -> Any:
        """Whether the drawn lane is not below the threshold."""
        return self.drawn(c, rows, cols) >= self.threshold(c)

    def threshold(self, c: Call) -> int:
        """Of 65536 lanes, how many are dropped."""
        return math.floor(float(c.dropout.p) * 65536)

    def gain(self, c: Call) -> float:
        """Of the threshold, not of p."""
        return 65536 / (65536 - self.threshold(c))

    def drawn(self, c: Call, rows: slice, cols: slice) -> Any:
        """A lane for each pair, `(N, Hq, r, n)`."""
        b, h, i, j = self.indices(c, rows, cols)
        groups, place = np.unique(j // LANES, return_inverse=True)
        spread = b[:, None, None, None], h[:, None, None], i[:, None]
        lanes = self.lanes(philox(self.counter(c, *spread, groups), self.key(c), self.rounds))
        return np.moveaxis(lanes, 0, -1)[..., place, j % LANES]

    rounds = 10

    def indices(self, c: Call, rows: slice, cols: slice) -> list[Any]:
        """b, h, i and j of a tile in the whole that the call may be a part of."""
        ranges = self.ranges(c, rows, cols)
        return [
            np.arange(at.start, at.stop).astype(np.uint64) + np.uint64(shift)
            for at, shift in zip(ranges, self.shifts(c), strict=True)
        ]

    def ranges(self, c: Call, rows: slice, cols: slice) -> tuple[slice, slice, slice, slice]:
        """Where a tile stands in the call."""
        N, Hq = c.grid.flat[:2]
        return slice(0, N), slice(0, Hq), rows, cols

    def shifts(self, c: Call) -> tuple[int, ...]:
        """Where the call stands in the whole."""
        return tuple(int(shift) for shift in c.dropout.offset)

    def counter(self, c: Call, b: Any, h: Any, i: Any, group: Any) -> list[Any]:
        """The words of a counter."""
        return [word & WORD for word in (group, i, h, b)]

    def key(self, c: Call) -> tuple[int, int]:
        """The low word of the seed, and the high one."""
        seed = int(c.dropout.seed)
        return seed & WORD, seed >> 32

    def lanes(self, words: Any) -> Any:
        """The halves of each word, the low one first."""
        return np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
