"""Blocked attention over public operations: what serves every option of the spec.

A tile takes all batch entries and heads at once, a group's query heads folded into rows, in two
batched products and a few passes in place over one scratch buffer.

It looks at its answer instead of its inputs. A pair is hidden by adding -inf to its score, which is
a selection as long as the score is no NaN and no +inf; whatever breaks that (poison in a hidden
key, value, query or cotangent) meets a factor of 0 on its way and comes out as NaN. So an answer
without NaN and inf is right, and any other is computed again by the careful kernel of the base
class, which knows which of them are owed (S4). Decoding thus never reads its cache twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnx.plugin import Gradients
from attnx.tiling import visible

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_torch._backend import TorchBackend

__all__ = ["backward", "finite", "forward"]

FLOOR = {torch.float32: -87.3, torch.float64: -708.3}
"""exp of less is below the smallest normal number; denormals cost a hundred times more (S5.3)."""

EXACT = {torch.float32: 2.0**10, torch.float64: 2.0**39}
"""Up to which |lse| a probability taken from it alone is good to 2**-13."""


def finite(*tensors: torch.Tensor | None) -> bool:
    """Whether all values are finite: NaN reaches both extremes, and a pass over them is cheap."""
    for x in tensors:
        if x is not None and x.numel():
            low, high = torch.aminmax(x)
            if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                return False
    return True


class _Operands(NamedTuple):
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
    def of(cls, k: torch.Tensor, v: torch.Tensor, call: Call) -> _Operands:
        acc = torch.float64 if call.dtype == "float64" else torch.float32
        N = call.B * call.Hk
        keys, values = (_dense(x.to(acc)).reshape(N, call.Lk, x.shape[-1]) for x in (k, v))
        return cls(acc, N, call.Hq // call.Hk, keys, values)

    def rows(self, x: torch.Tensor, i0: int, i1: int) -> torch.Tensor:
        """Queries i0 to i1 of (B, Hq, Lq, d), groups folded: (N, g n, d)."""
        return x[:, :, i0:i1].to(self.acc).reshape(self.N, self.g * (i1 - i0), x.shape[-1])


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Scores:
    """The scores of S2 a tile at a time, in one scratch buffer that the tiles share."""

    def __init__(self, backend: TorchBackend, call: Call, x: _Operands, q_size: int, k_size: int):
        self.backend, self.call, self.x = backend, call, x
        self.alpha = call.scale if call.softcap is None else call.scale / call.softcap
        self.shape = (x.N, x.g, min(q_size, call.Lq), min(k_size, call.Lk))
        self.scratch: dict[str, torch.Tensor] = {}
        self.hidden: dict[Any, torch.Tensor] = {}

    def buffer(self, name: str, n: int, m: int) -> torch.Tensor:
        """Scratch of shape (N, g n, m)."""
        held = self.scratch.get(name)
        if held is None:
            size = math.prod(self.shape)
            held = self.scratch[name] = self.x.k.new_empty(size)
        return held[: self.x.N * self.x.g * n * m].view(self.x.N, self.x.g * n, m)

    def tile(self, rows: torch.Tensor, tile: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(N, g n, m) scores, -inf where hidden; and tanh of the capped ones, for the backward."""
        call, n, m = self.call, tile.i1 - tile.i0, tile.j1 - tile.j0
        s = self.buffer("s", n, m)
        keys = self.x.k[:, tile.j0 : tile.j1].mT
        s.baddbmm_(rows, keys, beta=0, alpha=self.alpha)
        tanh = None
        if call.softcap is not None:
            tanh = s.tanh_()
            s = torch.mul(tanh, call.softcap, out=self.buffer("capped", n, m))
        grid = s.view(call.B, call.Hq, n, m)
        if call.bias is not None:
            grid += cut(call.bias, tile)
        if tile.masked and call.mask is not None:
            grid += self._hidden(tile)
        return s, tanh

    def _hidden(self, tile: Any) -> torch.Tensor:
        """0 where visible and -inf where not; broadcasts over (B, Hq, n, m)."""
        shown = visible(self.call.mask, self.backend.grid(self.call, tile, self.x.k))
        nothing = torch.zeros((), dtype=self.x.acc, device=shown.device)
        return torch.where(shown, nothing, -math.inf)


def cut(bias: torch.Tensor, tile: Any) -> torch.Tensor:
    """The part of a bias of four axes that a tile covers; axes of size 1 stay."""
    if bias.shape[2] != 1:
        bias = bias[:, :, tile.i0 : tile.i1]
    return bias if bias.shape[3] == 1 else bias[..., tile.j0 : tile.j1]


def _exp(s: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """exp(s - shift) in place; what lies below the smallest normal number is 0."""
    s.sub_(shift)
    torch.nn.functional.threshold_(s, FLOOR[s.dtype], -1e4)
    return s.exp_()


def _no_infinity(x: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf: the shift of a row that has seen nothing."""
    return x.masked_fill(x == -math.inf, 0.0)


def forward(
    backend: TorchBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse; None where the answer holds a NaN or an infinity, so that care is needed."""
    x = _Operands.of(k, v, call)
    scores = _Scores(backend, call, x, *backend.block_sizes(call))
    out = q.new_empty((call.B, call.Hq, call.Lq, call.Dv))
    lse = torch.empty((call.B, call.Hq, call.Lq), dtype=x.acc, device=q.device)
    for i0, i1, tiles in backend.plan_tiles(call, q):
        rows = x.rows(q, i0, i1)
        block, m, total = _query_block(rows, scores, tiles)
        n = i1 - i0
        shape = (call.B, call.Hq, n, call.Dv)
        out[:, :, i0:i1] = (block / total.masked_fill(total == 0, 1.0)).view(shape)
        lse[:, :, i0:i1] = (m + total.log()).view(call.B, call.Hq, n)
    return (out, lse) if _sound(q, k, call, out, lse) else None


def _query_block(
    rows: torch.Tensor, scores: _Scores, tiles: list[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unscaled output, running maximum and sum of one block, over its tiles (online softmax)."""
    x, call = scores.x, scores.call
    start = rows.new_full((x.N, rows.shape[1], 1), -math.inf)
    out = rows.new_zeros((x.N, rows.shape[1], call.Dv))
    m, total = start, torch.zeros_like(start)
    if call.sinks is not None:
        n = rows.shape[1] // x.g
        sinks = call.sinks.to(x.acc).view(1, call.Hq, 1, 1).expand(call.B, call.Hq, n, 1)
        m, total = sinks.reshape(start.shape), torch.ones_like(start)
    for first, tile in enumerate(tiles):
        s, _ = scores.tile(rows, tile)
        values = x.v[:, tile.j0 : tile.j1]
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = _no_infinity(new)
        p = _exp(s, shift)
        if first == 0 and call.sinks is None:
            total, out = p.sum(-1, keepdim=True), torch.bmm(p, values)
        else:
            factor = (m - shift).exp_()
            total = (total * factor).add_(p.sum(-1, keepdim=True))
            out.mul_(factor).baddbmm_(p, values)
        m = new
    return out, m, total


def _sound(
    q: torch.Tensor, k: torch.Tensor, call: Call, out: torch.Tensor, lse: torch.Tensor
) -> bool:
    """Whether the answer can be trusted; a row of -inf must be one that sees nothing (S5.3)."""
    if call.assume_finite:
        return True
    if not finite(out, call.sinks):
        return False
    if not lse.numel() or lse.amin().item() != -math.inf:
        return True
    return finite(q, k)


def backward(
    backend: TorchBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, d_out: torch.Tensor, d_lse: torch.Tensor | None, call: Call,
) -> Gradients | None:  # fmt: skip
    """Gradients from lse; None where they hold a NaN or an infinity, so that care is needed."""
    x = _Operands.of(k, v, call)
    if lse.numel() and _no_infinity(lse).abs().amax().item() > EXACT[x.acc]:
        return None
    scores = _Scores(backend, call, x, *backend.block_sizes(call))
    sums = _Sums(q, x, call)
    for i0, i1, tiles in backend.plan_tiles(call, q):
        rows, d_rows, out_rows = (x.rows(y, i0, i1) for y in (q, d_out, out))
        row_lse = x.rows(lse[..., None], i0, i1)
        flow = (d_rows * out_rows).sum(-1, keepdim=True).neg_()
        if d_lse is not None:
            flow += x.rows(d_lse[..., None], i0, i1)
        shift = _no_infinity(row_lse)
        dq = torch.zeros_like(rows)
        for tile in tiles:
            _backward_tile(scores, sums, tile, rows, d_rows, flow, shift, dq)
        sums.end_rows(i0, i1, dq, flow, row_lse)
    gradients = sums.gradients(q, k, v)
    return gradients if call.assume_finite or finite(*gradients) else None


def _backward_tile(
    scores: _Scores, sums: _Sums, tile: Any, rows: torch.Tensor, d_rows: torch.Tensor,
    flow: torch.Tensor, shift: torch.Tensor, dq: torch.Tensor,
) -> None:  # fmt: skip
    """dS = P (dP - delta + d_lse), and what it adds to each gradient."""
    x, at = scores.x, slice(tile.j0, tile.j1)
    s, tanh = scores.tile(rows, tile)
    p = _exp(s, shift)
    sums.dv[:, at].baddbmm_(p.mT, d_rows)
    ds = scores.buffer("ds", tile.i1 - tile.i0, tile.j1 - tile.j0)
    ds = torch.bmm(d_rows, x.v[:, at].mT, out=ds).add_(flow).mul_(p)
    sums.add_bias(tile, ds)
    if tanh is not None:
        ds.mul_(tanh.square_().neg_().add_(1.0))
    dq.baddbmm_(ds, x.k[:, at])
    sums.dk[:, at].baddbmm_(ds.mT, rows)


class _Sums:
    """The gradients as they add up."""

    def __init__(self, q: torch.Tensor, x: _Operands, call: Call) -> None:
        self.x, self.call = x, call
        self.dq = torch.empty((call.B, call.Hq, call.Lq, call.D), dtype=q.dtype, device=q.device)
        self.dk, self.dv = (torch.zeros(y.shape, dtype=x.acc, device=y.device) for y in (x.k, x.v))
        bias, sinks = call.bias, call.sinks
        self.dbias = None if bias is None else torch.zeros(bias.shape, dtype=x.acc, device=q.device)
        self.dsinks = None if sinks is None else q.new_zeros(call.Hq, dtype=x.acc)

    def add_bias(self, tile: Any, ds: torch.Tensor) -> None:
        if self.dbias is None:
            return
        call = self.call
        into = cut(self.dbias, tile)
        ds = ds.view(call.B, call.Hq, tile.i1 - tile.i0, tile.j1 - tile.j0)
        axes = tuple(a for a in range(4) if into.shape[a] == 1 and ds.shape[a] != 1)
        into += ds.sum(axes, keepdim=True) if axes else ds

    def end_rows(
        self, i0: int, i1: int, dq: torch.Tensor, flow: torch.Tensor, lse: torch.Tensor
    ) -> None:
        call, shape = self.call, (self.call.B, self.call.Hq, i1 - i0, 1)
        self.dq[:, :, i0:i1] = (dq * call.scale).view(*shape[:3], call.D)
        if self.dsinks is not None:
            sinks = call.sinks.to(self.x.acc).view(1, call.Hq, 1, 1)
            p_sink = (sinks - lse.view(shape)).exp_()
            self.dsinks += (p_sink * flow.view(shape)).sum((0, 2, 3))

    def gradients(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        call = self.call
        return Gradients(
            self.dq,
            (self.dk * call.scale).to(k.dtype).view(k.shape),
            self.dv.to(v.dtype).view(v.shape),
            None if self.dbias is None else self.dbias.to(call.bias.dtype),
            None if self.dsinks is None else self.dsinks.to(call.sinks.dtype),
        )
