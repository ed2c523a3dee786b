"""What dropout multiplies P with, read off clause S9 by nothing but NumPy.

Like the oracle's visibility it shares no line with attnx, and it knows a dropout by its public
fields. Every pair draws a whole Philox block of its own and keeps one lane of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._selection import Floats

__all__ = ["dropout_factor", "philox4x32"]

Words = NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def dropout_factor(dropout: Any, shape: tuple[int, int, int, int]) -> Floats:
    """0 where dropped, else what P is scaled by, `(N, Hq, Lq, Lk)`; of ones without a dropout.

    Args:
        dropout: has `p`, `seed` and `offset`; its arrays can be read by NumPy. Or None.
        shape: batch entries, query heads, queries, keys.
    """
    if dropout is None:
        return np.ones((1, 1, 1, 1))
    threshold = math.floor(float(dropout.p) * 65536)
    at = np.indices(shape).astype(np.uint64)
    b, h, i, j = (x + np.uint64(int(o)) for x, o in zip(at, dropout.offset, strict=True))
    if np.ndim(dropout.seed):
        key = [np.uint64(int(word)) for word in np.asarray(dropout.seed)]
    else:
        key = [np.uint64(int(dropout.seed) % (1 << 32)), np.uint64(int(dropout.seed) >> 32)]
    words = np.stack(philox4x32([j // np.uint64(8) & LOW, i & LOW, h & LOW, b & LOW], key))
    lane = (j % np.uint64(8)).astype(np.int64)
    word = np.take_along_axis(words, lane[None] // 2, axis=0)[0]
    drawn = np.where(lane % 2 == 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
    return np.where(drawn >= threshold, 65536.0 / (65536 - threshold), 0.0)


def philox4x32(counter: list[Words], key: list[Any]) -> list[Words]:
    """Ten rounds of Philox on four words, each held in 64 bits.

    Example:
        >>> zero = np.zeros(1, np.uint64)
        >>> [hex(int(word[0])) for word in philox4x32([zero] * 4, [zero] * 2)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (two >> HALF) ^ c1 ^ k0, two & LOW
        c2, c3 = (one >> HALF) ^ c3 ^ k1, one & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return [c0, c1, c2, c3]
