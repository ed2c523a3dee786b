"""A tile's scores and probabilities, in scratch that the tiles share.

Batched products take all batch entries and heads at once, a group's query heads folded into rows.
Everything else is a pass in place over one buffer, because a fresh one costs as much as the pass.

Where the Cauchy-Schwarz bound on |scale| |q| |k| shows that no score can be large (`calm`), exp is
taken without a shift, which saves the search for the maximum and two passes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import threshold

from attnx.tiling import alibi_distances, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnx.masks import Mask
    from attnx.plugin import Alibi, Call
    from attnx_torch._backend import TorchBackend

__all__ = ["Operands", "Scores", "blocks", "cut", "finite", "no_infinity", "tame"]

CALM = 36.0
"""Scores within it need no shift: their exponentials lie within 5e15 of 1, and those of a score
less lse within the normal range."""

SMALL = 64
"""Queries below which looking for the bound costs more than it saves."""

FLOOR = {torch.float32: -87.3, torch.float64: -708.3}
"""exp of less is below the smallest normal number; denormals cost a hundred times more (S5.3)."""

WIDEST = 1024
"""Keys up to which neighbouring tiles that see everything are joined."""

LOG2E = 1.0 / math.log(2.0)


def finite(*tensors: torch.Tensor | None) -> bool:
    """Whether all values are finite: NaN reaches both extremes, and a pass over them is cheap."""
    return all(_within(x, math.inf) for x in tensors if x is not None)


def _within(x: torch.Tensor, limit: float) -> bool:
    if not x.numel():
        return True
    low, high = torch.aminmax(x)
    return -limit < low.item() and high.item() < limit


def tame(scale: float | None, *tensors: torch.Tensor) -> bool:
    """Whether all values are finite, and so are all products of rows, times the scale.

    A finite value that nobody sees may make an infinite score, and infinity less infinity is NaN.
    """
    if not (scale is None or abs(scale) <= 1e5):
        return False
    return all(_within(x, 1e100 if x.dtype is torch.float64 else 1e15) for x in tensors)


def no_infinity(x: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf: the shift of a row that has seen nothing."""
    return x.masked_fill(x == -math.inf, 0.0)


def cut(bias: torch.Tensor, tile: Any) -> torch.Tensor:
    """The part of a bias of four axes that a tile covers; axes of size 1 stay."""
    if bias.shape[2] != 1:
        bias = bias[:, :, tile.i0 : tile.i1]
    return bias if bias.shape[3] == 1 else bias[..., tile.j0 : tile.j1]


def blocks(backend: TorchBackend, call: Call, like: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Blocks of queries with their tiles, full neighbours joined."""
    for i0, i1, tiles in backend.plan_tiles(call, like):
        joined: list[Any] = []
        for tile in tiles:
            last = joined[-1] if joined else None
            if (
                last is not None
                and not (last.masked or tile.masked)
                and last.j1 == tile.j0
                and tile.j1 - last.j0 <= max(WIDEST, tile.j1 - tile.j0)
            ):
                joined[-1] = last._replace(j1=tile.j1)
            else:
                joined.append(tile)
        yield i0, i1, joined


class Operands(NamedTuple):
    """A call's arrays as the batched products take them: three axes, in the accumulator's dtype.

    Attributes:
        acc: the accumulator's dtype.
        N: B * Hk, the batch of the products.
        g: query heads a key head.
        k: (N, Lk, D).
        v: (N, Lk, Dv).
    """

    acc: torch.dtype
    N: int
    g: int
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, call: Call) -> Operands:
        """Half types are cast up once; nothing is copied where the strides allow it."""
        acc = torch.float64 if call.dtype == "float64" else torch.float32
        N = call.B * call.Hk
        keys, values = (
            (x if x.stride(-1) == 1 else x.contiguous()).to(acc).reshape(N, call.Lk, x.shape[-1])
            for x in (k, v)
        )
        return cls(acc, N, call.Hq // call.Hk, keys, values)

    def rows(self, x: torch.Tensor, i0: int, i1: int) -> torch.Tensor:
        """Queries i0 to i1 of (B, Hq, Lq, d), groups folded: (N, g n, d)."""
        return x[:, :, i0:i1].to(self.acc).reshape(self.N, self.g * (i1 - i0), x.shape[-1])


class Scores:
    """The scores of S2 for one call, a tile at a time, and their exponentials.

    Attributes:
        calm: whether no score needs a shift.
        unit: log2(e) where scores stand in base 2, for exp2 takes half the time of exp; else 1.
            A bias is never scaled: its lowest finite values would become -inf (S3.4).
    """

    def __init__(self, backend: TorchBackend, q: torch.Tensor, call: Call, x: Operands) -> None:
        self.backend, self.call, self.x = backend, call, x
        self.calm = _calm(q, x, call)
        self.unit = LOG2E if call.bias is None else 1.0
        self.alpha = call.scale * (self.unit if call.softcap is None else 1.0 / call.softcap)
        self.scratch: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, n: int, m: int) -> torch.Tensor:
        """Scratch of shape (N, g n, m)."""
        size = self.x.N * self.x.g * n * m
        held = self.scratch.get(name)
        if held is None or held.numel() < size:
            held = self.scratch[name] = self.x.k.new_empty(size)
        return held[:size].view(self.x.N, self.x.g * n, m)

    def tile(self, rows: torch.Tensor, tile: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(N, g n, m) scores, -inf where hidden; and tanh of the capped ones, for the backward.

        A sigmoid, 2 sigmoid(2 x) - 1, would take a quarter of tanh's time; but its error is that of
        a number near 1, which a cap far above the scores makes larger than theirs (S5.4).
        """
        call, n, m = self.call, tile.i1 - tile.i0, tile.j1 - tile.j0
        s = self.buffer("s", n, m)
        s.baddbmm_(rows, self.x.k[:, tile.j0 : tile.j1].mT, beta=0, alpha=self.alpha)
        tanh = None
        if call.softcap is not None:
            tanh = s.tanh_()
            s = torch.mul(tanh, call.softcap * self.unit, out=self.buffer("capped", n, m))
        grid = s.view(call.B, call.Hq, n, m)
        if call.bias is not None:
            grid += cut(call.bias, tile)
        if call.alibi is not None:
            self._add_alibi(grid, call.alibi, tile)
        if tile.masked and call.mask is not None:
            grid += self._hidden(call.mask, tile)
        return s, tanh

    def _add_alibi(self, grid: torch.Tensor, alibi: Alibi, tile: Any) -> None:
        """In one pass over (B, Hq, n, m), which makes no array of its size."""
        indices = partial(torch.arange, dtype=torch.int32, device=self.x.k.device)
        place = self.backend.grid(self.call, tile, self.x.k)._replace(arange=indices)
        away = alibi_distances(alibi, place)
        slopes = alibi.slopes.to(self.x.acc).view(1, -1, 1, 1)
        grid.addcmul_(away.to(self.x.acc), slopes, value=self.unit)

    def _hidden(self, mask: Mask, tile: Any) -> torch.Tensor:
        """0 where visible and -inf where not; broadcasts over (B, Hq, n, m)."""
        shown = visible(mask, self.backend.grid(self.call, tile, self.x.k))
        nothing = torch.zeros((), dtype=self.x.acc, device=shown.device)
        return torch.where(shown, nothing, -math.inf)

    def exp(self, s: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        """The exponential of s - shift, in place; 0 below the smallest normal number."""
        if shift is not None:
            s.sub_(shift)
        if not self.calm:
            threshold(s, FLOOR[s.dtype] * self.unit, -1e4, inplace=True)
        return self.power(s)

    def power(self, s: torch.Tensor) -> torch.Tensor:
        """exp in place, in the base that the scores stand in."""
        return s.exp_() if self.unit == 1.0 else s.exp2_()


def _calm(q: torch.Tensor, x: Operands, call: Call) -> bool:
    """Whether all scores lie within `CALM`, and no value comes near the ends of the range.

    It pays only where many scores are made of each key, and only where data can be looked at.
    """
    if call.bias is not None or call.alibi is not None or call.sinks is not None:
        return False
    if q.device.type != "cpu" or call.Lq < SMALL or not (call.B and call.Lk):
        return False
    norms = [torch.linalg.vector_norm(y, dim=-1, dtype=x.acc).amax().item() for y in (q, x.k)]
    bound = abs(call.scale) * norms[0] * norms[1]
    if call.softcap is not None and math.isfinite(bound):
        bound = min(bound, call.softcap)
    if not bound <= CALM:
        return False
    low, high = torch.aminmax(x.v, dim=-2)
    size = torch.maximum(low.neg(), high)
    return bool(((size == 0) | ((size > 1e-18) & (size < 1e18))).all())
