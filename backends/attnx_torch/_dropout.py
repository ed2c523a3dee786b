"""Which pairs of a tile are kept (S9), in scratch that the tiles share.

Philox takes ten rounds of ten passes over a number for every eight pairs, so the passes run in
place; the first two rounds and half of the third depend on rows or keys alone and broadcast.
PyTorch has hardly an operation on unsigned words, so they stand in int64, whose products wrap
alike. The lanes are then read as int16 with the top bit of each turned, which keeps their order.
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


class Kept:
    """The pairs that a call's dropout keeps.

    Attributes:
        scale: what the kept ones are multiplied by.
    """

    def __init__(self, call: Call, like: torch.Tensor) -> None:
        assert call.dropout is not None
        self.call, self.drop, self.device = call, call.dropout, like.device
        self.scale = call.dropout.scale
        self.key = tuple(x if isinstance(x, int) else x.to(torch.int64) for x in call.dropout.words)
        self.scratch: dict[str, torch.Tensor] = {}

    def tile(self, tile: Any) -> torch.Tensor:
        """True where kept, (B, Hq, n, m)."""
        first, last = tile.j0 // LANES, -(-tile.j1 // LANES)
        words = self._words(tile.i0, tile.i1, first, last)
        lanes = words.view(*words.shape[:3], 4 * (last - first)).view(torch.int16)
        keep = torch.ge(lanes, self.drop.threshold - (1 << 15), out=self._keep(lanes.shape))
        return keep[..., tile.j0 - LANES * first : tile.j1 - LANES * first]

    def _keep(self, shape: Any) -> torch.Tensor:
        return self._buffer("keep", shape, torch.bool)

    def _buffer(self, name: str, shape: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        size = torch.Size(shape).numel()
        held = self.scratch.get(name)
        if held is None or held.numel() < size:
            held = self.scratch[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)

    def _counter(self, axis: int, start: int, stop: int, shift: Any) -> torch.Tensor:
        numbers: torch.Tensor = torch.arange(start, stop, device=self.device) + shift
        shape = [1, 1, 1, 1]
        shape[axis] = stop - start
        return numbers.bitwise_and_(WORD).view(shape)

    def _words(self, i0: int, i1: int, first: int, last: int) -> torch.Tensor:
        """(B, Hq, n, blocks, 4) int32, the top bit of each lane turned."""
        call, (b, h, i, j) = self.call, self.drop.offset
        x0, x1 = self._counter(3, first, last, j // LANES), self._counter(2, i0, i1, i)
        x2, x3 = self._counter(1, 0, call.Hq, h), self._counter(0, 0, call.B, b)
        k0, k1 = self.key
        for _ in range(2):  # of rows or keys alone
            p0, p1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
            x0, x1 = ((p1 >> 32) ^ x1 ^ k0) & WORD, p1
            x2, x3 = ((p0 >> 32) ^ x3 ^ k1) & WORD, p0
            k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
        shape = (call.B, call.Hq, i1 - i0, last - first)
        new0, new2 = self._buffer("x0", shape), self._buffer("x2", shape)
        for turn in range(2, ROUNDS):
            p0, p1 = self._product(x0, 0, turn, shape), self._product(x2, 1, turn, shape)
            x0 = torch.bitwise_xor(_high(p1, new0), x1, out=new0)
            x0.bitwise_xor_(k0).bitwise_and_(WORD)
            x2 = torch.bitwise_xor(_high(p0, new2), x3, out=new2)
            x2.bitwise_xor_(k1).bitwise_and_(WORD)
            x1, x3 = p1, p0
            k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
        words = self._buffer("words", (*shape, 4), torch.int32)
        for w, x in enumerate((x0, x1, x2, x3)):
            words[..., w] = _low(x)
        return words.bitwise_xor_(TOP_BITS)

    def _product(self, x: torch.Tensor, which: int, turn: int, shape: Any) -> torch.Tensor:
        """In one of two buffers that take turns: the last product is still needed."""
        if tuple(x.shape) != shape:
            return x * MULTIPLIERS[which]
        out = self._buffer(f"p{which}{turn % 2}", shape)
        return torch.mul(x, MULTIPLIERS[which], out=out)


def _high(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if x.shape != out.shape:
        return out.copy_(x >> 32)
    return torch.bitwise_right_shift(x, 32, out=out)


def _low(x: torch.Tensor) -> torch.Tensor:
    """The low word, as int32 with the same bits."""
    return x.contiguous().view(torch.int32)[..., 0 if sys.byteorder == "little" else 1 :: 2]
