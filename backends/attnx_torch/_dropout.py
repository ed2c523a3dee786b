"""Which pairs of a tile are kept (S9), in scratch that the tiles share.

Philox takes ten rounds over two pairs of words for every eight keys. The first two rounds depend on
rows or keys alone and are done once a call. In the others both words of a pair go through a pass at
once and in place. PyTorch has hardly an operation on unsigned words, so they stand in int64, whose
products wrap alike; read as int32 from one place further, the high halves of the products lie over
the low halves of the other pair, so that one pass mixes them where a shift would take a second.

Booleans are avoided: making them of int16, or multiplying by them, takes ten times as long as the
same pass between numbers. The lanes are compared as int16, with the top bit of each turned, which
keeps their order.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from attnx.tiling import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS

if TYPE_CHECKING:
    from attnx.plugin import Call

__all__ = ["Kept"]

WORD = 0xFFFFFFFF
TOP_BITS = 0x80008000 - (1 << 32)
"""The top bit of both lanes of an int32."""

PIECE = 1 << 16
"""Counters at a time for each thread of a processor: four arrays of them take two megabytes."""

LOW = 0 if sys.byteorder == "little" else 1
"""Where the low half of an int64 stands among its two int32."""


class Kept:
    """The pairs that a call's dropout keeps.

    Attributes:
        scale: what the kept ones are multiplied by.
    """

    def __init__(self, call: Call, like: torch.Tensor) -> None:
        assert call.dropout is not None
        drop = call.dropout
        self.scale, self.threshold, self.like = drop.scale, drop.threshold, like
        low, high = (x if isinstance(x, int) else x.to(torch.int64) for x in drop.words)
        turns = torch.arange(ROUNDS, device=like.device).view(ROUNDS, 1, 1)
        keys = self._pair(low, high) + turns * self._pair(*KEY_STEPS) & WORD
        self.keys, self.multipliers = _both_ways(keys), _both_ways(self._pair(*MULTIPLIERS))
        self._begin(call, *(x if isinstance(x, int) else x.to(torch.int64) for x in drop.offset))
        self.work: _Work | None = None

    def drop(self, tile: Any, *arrays: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy from one array to another, or to itself, with 0 where dropped.

        Args:
            tile: the pairs that they hold.
            arrays: from and to, contiguous; (N, g n, m).
        """
        n, m = tile.i1 - tile.i0, tile.j1 - tile.j0
        if not self.heads[0]:  # a batch without entries
            return
        grids = [(x.view(*self.heads, n, m), y.view(*self.heads, n, m)) for x, y in arrays]
        step = n
        if self.like.device.type == "cpu":
            room = PIECE * max(2, torch.get_num_threads())
            step = max(1, room // max(1, self.heads[0] * self.heads[1] * -(-m // LANES)))
        for i0 in range(0, n, step):
            i1 = min(i0 + step, n)
            keep = self.keep(tile._replace(i0=tile.i0 + i0, i1=tile.i0 + i1))
            for source, target in grids:
                torch.mul(source[:, :, i0:i1], keep, out=target[:, :, i0:i1])

    def keep(self, tile: Any) -> torch.Tensor:
        """1 where kept and 0 where dropped, (B, Hq, n, m), in the accumulator's dtype."""
        first, last = tile.j0 // LANES, -(-tile.j1 // LANES)
        shape = (*self.heads, tile.i1 - tile.i0, last - first)
        work = self.work
        if work is None or work.shape != shape:
            work = self.work = _Work(self.like, shape, {} if work is None else work.memory)
        self._start(work, slice(tile.i0, tile.i1), slice(first, last))
        for word, x in zip(work.words, self._rounds(work), strict=True):
            word.copy_(x)
        work.bits.bitwise_xor_(TOP_BITS)
        work.lanes.ge_(self.threshold - (1 << 15))
        keep: torch.Tensor = work.keep.copy_(work.lanes)
        return keep[..., tile.j0 - LANES * first : tile.j1 - LANES * first]

    def _pair(self, a: Any, b: Any) -> torch.Tensor:
        """(2, 1) int64, made where the call's arrays are; a copy from the host would wait."""
        both: torch.Tensor = torch.arange(2, device=self.like.device).view(2, 1) * (b - a) + a
        return both

    def _counter(self, axis: int, count: int, shift: Any) -> torch.Tensor:
        numbers: torch.Tensor = torch.arange(count, device=self.like.device) + shift
        shape = [1, 1, 1, 1]
        shape[axis] = count
        return numbers.bitwise_and_(WORD).view(shape)

    def _begin(self, call: Call, b: Any, h: Any, i: Any, j: Any) -> None:
        """Two rounds, and what the third does to a word of rows or keys alone.

        It leaves word 2 as the mix of `row` and `column`, word 0's product, and the old odd words.
        """
        self.heads = call.B, call.Hq
        x0, x1 = self._counter(3, -(-call.Lk // LANES), j // LANES), self._counter(2, call.Lq, i)
        x2, x3 = self._counter(1, call.Hq, h), self._counter(0, call.B, b)
        (k0, k1), (k2, k3), (k4, k5) = self.keys[0][:3]
        p0, p1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x2 = _high(p1, k0) ^ x1, _high(p0, k1) ^ x3
        x1, x3 = p1 & WORD, p0 & WORD
        p0, p1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        self.row, self.column = _high(p0, k3).expand(call.B, -1, -1, -1), x3
        self.product = (_high(p1, k2) ^ x1) * MULTIPLIERS[0]
        self.mixed, self.x1, self.x3 = _high(self.product, k5), (p1 & WORD) ^ k4, p0 & WORD

    def _start(self, work: _Work, i: slice, j: slice) -> None:
        """The words after three rounds."""
        even, odd = work.even, work.odd
        torch.bitwise_xor(self.row[:, :, i], self.column[..., j], out=odd.grids[0])
        odd.words[0].mul_(MULTIPLIERS[1])
        even.grids[0].copy_(self.x1[..., j])
        even.lows[0].bitwise_xor_(odd.highs[0])
        even.words[0].bitwise_and_(WORD)
        torch.bitwise_xor(self.mixed[..., j], self.x3[:, :, i], out=even.grids[1])
        odd.grids[1].copy_(self.product[..., j])

    def _rounds(self, work: _Work) -> tuple[torch.Tensor, ...]:
        """The words 0 to 3 after the other rounds, each (B, Hq, n, blocks) int32.

        What was multiplied ends as the odd words, the other way round: so a pair may be turned.
        """
        even, odd, turned, odd_turned = work.even, work.odd, 0, 0
        for turn in range(3, ROUNDS):
            even.both.mul_(self.multipliers[turned])
            if turned == odd_turned:
                odd.lows[0].bitwise_xor_(even.highs[1])
                odd.lows[1].bitwise_xor_(even.highs[0])
            else:
                odd.low.bitwise_xor_(even.high)
            if turn < ROUNDS - 1:
                odd.both.bitwise_and_(WORD)
            odd.both.bitwise_xor_(self.keys[odd_turned][turn])
            even, odd, turned, odd_turned = odd, even, odd_turned, 1 - turned
        x, y = even.ends, odd.ends
        return x[turned], y[odd_turned], x[1 - turned], y[1 - odd_turned]


class _Pair:
    """Two words of every counter, int64, and the ways in which they are looked at.

    Attributes:
        both: (2, counters); words: each of the two; grids: each as (B, Hq, n, blocks).
        low, high: as int32 from where the first low half or the first high half stands, and with
            the halves between them; lows, highs: each of the two.
        ends: the low halves alone, each as (B, Hq, n, blocks).
    """

    def __init__(self, both: torch.Tensor, shape: tuple[int, ...]) -> None:
        halves = both.view(torch.int32)
        size = halves.shape[1] - 1
        self.both, self.words = both, both.unbind(0)
        self.grids = both.view(2, *shape).unbind(0)
        self.low, self.high = halves.narrow(1, LOW, size), halves.narrow(1, 1 - LOW, size)
        self.lows, self.highs = self.low.unbind(0), self.high.unbind(0)
        self.ends = halves[:, LOW::2].view(2, *shape).unbind(0)


class _Work:
    """Scratch for tiles of one shape, (B, Hq, n, blocks), in memory that other shapes used."""

    def __init__(
        self, like: torch.Tensor, shape: tuple[int, ...], memory: dict[str, torch.Tensor]
    ) -> None:
        self.like, self.shape, self.memory = like, shape, memory
        size = shape[0] * shape[1] * shape[2] * shape[3]
        self.even, self.odd = (
            _Pair(self._memory(name, 2 * size, torch.int64).view(2, size), shape)
            for name in ("even", "odd")
        )
        self.bits = self._memory("bits", 4 * size, torch.int32)
        self.words = self.bits.view(*shape, 4).unbind(-1)
        pairs = (*shape[:3], LANES * shape[3])
        self.lanes = self.bits.view(torch.int16).view(pairs)
        self.keep = self._memory("keep", LANES * size, like.dtype).view(pairs)

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        held = self.memory.get(name)
        if held is None or held.numel() < size:
            held = self.memory[name] = torch.empty(size, dtype=dtype, device=self.like.device)
        return held[:size]


def _both_ways(pairs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pairs as they are, and turned."""
    return pairs, pairs.flip(-2)


def _high(product: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return ((product >> 32) ^ key) & WORD
