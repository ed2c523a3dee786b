"""A call as one or several calls of SDPA: blocks of queries against the range of keys they see.

SDPA knows no window, document or padding; it takes a mask of every pair, and computes all of them.
Where a mask has structure, neighbouring queries see neighbouring keys, and SDPA over their range
alone does what is needed and little else; with a mask where the range is not visible as a whole. A
mask that scatters what is visible is left to the tiles.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from attnx.tiling import EMPTY, FULL, Tile, stationary, tile_classes, visible
from attnx_torch._scores import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attnx.plugin import Call
    from attnx_torch._backend import TorchBackend

__all__ = ["Part", "Sdpa", "split", "whole"]

ROWS = 64
"""Queries of the smallest block."""

KEYS = 16
"""Keys of the smallest block, where the call is not so long that these would be too many."""

TABLE = 1 << 20
"""Most blocks that are classified."""

DOCUMENTS = 4
"""Most ends of documents in a smallest block for which it is taken apart."""

WASTE = 1.05
"""How much more than the ranges of some blocks their union may hold, for them to be one."""

SPARSE = 1.5
"""How much more than what is visible the ranges may hold."""

MASKED = 1 << 20
"""Most pairs of a block whose mask is spelled out."""

HELD = 8
"""Most spelled-out masks that are kept for blocks that stand alike to the diagonal."""


class Part(NamedTuple):
    """Queries i0 to i1 against keys j0 to j1.

    Attributes:
        masked: whether a mask or a bias is spelled out.
        causal: whether it is SDPA's own causal mask that hides pairs.
        rim: whether all may be visible but for some of the first and last keys, as in a document.
    """

    i0: int
    i1: int
    j0: int
    j1: int
    masked: bool = False
    causal: bool = False
    rim: bool = False

    @property
    def pairs(self) -> int:
        """Its queries times its keys."""
        return (self.i1 - self.i0) * (self.j1 - self.j0)

    def cut(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Its queries, keys and values."""
        i, j = slice(self.i0, self.i1), slice(self.j0, self.j1)
        return q[:, :, i], k[:, :, j], v[:, :, j]


def whole(call: Call, *, masked: bool = False, causal: bool = False) -> list[Part]:
    """A call in one part."""
    return [Part(0, call.Lq, 0, call.Lk, masked, causal)]


def split(backend: TorchBackend, call: Call, like: torch.Tensor) -> list[Part] | None:
    """The parts of a masked call, in order; None where their ranges would hold too much else."""
    if call.mask is None:
        return whole(call, masked=call.bias is not None)
    step = KEYS
    while call.B * -(-call.Lq // ROWS) * -(-call.Lk // step) > TABLE:
        step *= 2
    classes = tile_classes(
        call.mask, backend.xp, partial(backend.lane.arange, like=like),
        Lq=call.Lq, Lk=call.Lk, q_size=ROWS, k_size=step,
    )  # fmt: skip
    blocks = _blocks(call, step, classes)
    if blocks is None:
        return None
    most = MASKED // (classes.shape[0] * classes.shape[1])
    sdpa = Sdpa(backend, call)
    if sdpa.alike or call.bias is not None:  # then every block has its own range, or its bias
        return _joined(blocks, most)
    trimmed = [_trimmed(sdpa, part, step, like) for part in _joined(blocks, most)]
    return _joined([x for part in trimmed for x in _resolved(sdpa, part, like)], most)


def _blocks(call: Call, step: int, classes: torch.Tensor) -> list[Part] | None:
    """A part for each row of blocks; None where their ranges hold too much that is not visible."""
    some = (classes != EMPTY).any(1).any(0).numpy()
    every = (classes == FULL).all(1).all(0).numpy()
    row, (first, last) = np.arange(some.shape[0]), _ranges(some)
    if (last - first).sum() > SPARSE * some.sum():
        return None
    whole_range = every.sum(axis=1) == last - first
    inside = every.sum(axis=1) + ~every[row, first] + ~every[row, last - 1] >= last - first
    masked = ~whole_range | (call.bias is not None)
    rim = ~whole_range & inside & (call.bias is None)
    return [
        Part(
            i * ROWS, min((i + 1) * ROWS, call.Lq), int(first[i]) * step,
            min(int(last[i]) * step, call.Lk),
            masked=bool(masked[i]), rim=bool(rim[i]),
        )
        for i in row.tolist()
    ]  # fmt: skip


def _ranges(seen: NDArray[np.bool_]) -> tuple[Any, Any]:
    """Of each row the first column that is true, and the one after the last; 0 and 0 for none."""
    met = seen.any(axis=1)
    first = np.where(met, seen.argmax(axis=1), 0)
    return first, np.where(met, seen.shape[1] - seen[:, ::-1].argmax(axis=1), 0)


def _joined(blocks: list[Part], most: int) -> list[Part]:
    """Neighbours as one where that computes little more: SDPA likes many rows."""
    parts, needed = [blocks[0]], blocks[0].pairs
    for block in blocks[1:]:
        last = parts[-1]
        j0, j1 = min(last.j0, block.j0), max(last.j1, block.j1)
        union = last._replace(i1=block.i1, j0=j0, j1=j1)
        if (last.masked, last.rim) == (block.masked, block.rim) and (
            last[2:4] == block[2:4] if last.rim or not last.masked
            else union.pairs <= min(most, WASTE * (needed + block.pairs))
        ):  # fmt: skip
            parts[-1], needed = union, needed + block.pairs
        else:
            parts.append(block)
            needed = block.pairs
    return parts


def _trimmed(sdpa: Sdpa, part: Part, step: int, like: torch.Tensor) -> Part:
    """Without those of the first and last keys that nobody sees, if all see all of the others."""
    if not part.rim:
        return part
    rims = (part.j0, min(part.j0 + step, part.j1)), (max(part.j1 - step, part.j0), part.j1)
    seen: list[list[bool]] = []
    for j0, j1 in rims:
        pairs = sdpa.shown(part._replace(j0=j0, j1=j1), like).flatten(0, 2)
        some, every = pairs.any(0).expand(j1 - j0), pairs.all(0).expand(j1 - j0)
        if not (torch.equal(some, every) and some.any()):
            return part
        seen.append(some.tolist())
    j0, j1 = part.j0 + seen[0].index(True), part.j1 - seen[1][::-1].index(True)
    if seen[0].count(True) < min(rims[0][1], j1) - j0 or seen[1].count(True) < j1 - max(
        rims[1][0], j0
    ):
        return part
    return part._replace(j0=j0, j1=j1, masked=False, rim=False)


def _resolved(sdpa: Sdpa, part: Part, like: torch.Tensor) -> list[Part]:
    """A block where one document ends and the next begins, as one part of either."""
    if not part.masked or part.i1 - part.i0 > ROWS or part.j0 == part.j1:
        return [part]
    pairs = sdpa.shown(part, like).flatten(0, 1)
    same = pairs[0].expand(part.i1 - part.i0, part.j1 - part.j0)
    if not bool((pairs == pairs[:1]).all()):
        return [part]
    seen = same.numpy()
    first, last = _ranges(seen)
    edges = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
    if len(edges) > DOCUMENTS or (seen.sum(axis=1) < last - first).any():
        return [part]
    bounds = [0, *edges.tolist(), part.i1 - part.i0]
    return [
        Part(part.i0 + i, part.i0 + i1, part.j0 + int(first[i]), part.j0 + int(last[i]))
        for i, i1 in itertools.pairwise(bounds)
    ]


class Sdpa:
    """SDPA of the parts of one call."""

    def __init__(self, backend: TorchBackend, call: Call) -> None:
        self.backend, self.call = backend, call
        self.alike = call.mask is not None and call.bias is None and stationary(call.mask)
        self.held: dict[tuple[int, int, int], torch.Tensor] = {}

    def of(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A part's answer, from the whole call's arrays."""
        return self(part, *part.cut(q, k, v))

    def __call__(
        self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """A part's answer, from its own queries, keys and values; zeros without keys."""
        if part.j0 == part.j1:
            return q.new_zeros((*q.shape[:3], v.shape[-1]))
        mask = self._mask(part, q) if part.masked else None
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, part.causal, scale=self.call.scale,
            enable_gqa=self.call.cls.grouped,
        )  # fmt: skip

    def _mask(self, part: Part, q: torch.Tensor) -> torch.Tensor:
        """Mask and bias as one tensor that broadcasts over the part's (B, Hq, n, m)."""
        call = self.call
        if self.alike:
            key = (part.i1 - part.i0, part.j1 - part.j0, part.i0 - part.j0)
            found = self.held.get(key)
            if found is None:
                if len(self.held) >= HELD:
                    self.held.clear()
                zero = torch.zeros((), dtype=q.dtype)
                found = self.held[key] = torch.where(self.shown(part, q), zero, -math.inf)
            return found
        if call.bias is None:
            return self.shown(part, q)
        bias = cut(call.bias, Tile(*part[:4], masked=True))
        bias = bias if q.dtype in (torch.float16, torch.bfloat16) else bias.to(q.dtype)
        return bias if call.mask is None else torch.where(self.shown(part, q), bias, -math.inf)

    def shown(self, part: Part, like: torch.Tensor) -> torch.Tensor:
        """The visible pairs of a part, broadcasting to (B, Hq, n, m)."""
        assert self.call.mask is not None
        tile = Tile(*part[:4], masked=True)
        shown: torch.Tensor = visible(self.call.mask, self.backend.grid(self.call, tile, like))
        return shown
