"""Blocked attention over public operations: what serves every option of the spec.

It looks at its answer instead of its inputs. A pair is hidden by adding -inf to its score, which is
a selection as long as the score is no NaN and no +inf; whatever breaks that (poison in a hidden
key, value, query or cotangent) meets a factor of 0 on its way and comes out as NaN. So an answer
without NaN and inf is right, and any other is computed again by the careful kernel of the base
class, which knows which of them are owed (S4). Decoding thus never reads its cache twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attnx.plugin import Gradients
from attnx_torch._dropout import Kept
from attnx_torch._scores import Operands, Scores, blocks, cut, finite, no_infinity

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_torch._backend import TorchBackend

__all__ = ["backward", "forward"]

EXACT = {torch.float32: 2.0**10, torch.float64: 2.0**39}
"""Up to which |lse| a probability taken from it alone is good to 2**-13."""


def forward(
    backend: TorchBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse; None where the answer holds a NaN or an infinity, so that care is needed."""
    x = Operands.of(k, v, call)
    scores = Scores(backend, q, call, x)
    out = q.new_empty((call.B, call.Hq, call.Lq, call.Dv))
    lse = q.new_empty((call.B, call.Hq, call.Lq), dtype=x.acc)
    kept = None if call.dropout is None else Kept(call, x.k)
    for i0, i1, tiles in blocks(backend, call, q):
        block, m, total = _query_block(x.rows(q, i0, i1), scores, tiles, kept)
        shape = (call.B, call.Hq, i1 - i0)
        block /= total.masked_fill(total == 0, 1.0)
        block *= 1.0 if kept is None else kept.scale
        out[:, :, i0:i1] = block.view(*shape, call.Dv)
        log = total.log_() if m is None else m.div(scores.unit) + total.log_()
        lse[:, :, i0:i1] = log.view(shape)
    return (out, lse) if _sound(q, k, call, out, lse) else None


def _query_block(
    rows: torch.Tensor, scores: Scores, tiles: list[Any], kept: Kept | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Output times sum, greatest score (None where no shift is needed) and sum, over the tiles."""
    x, call = scores.x, scores.call
    out = rows.new_zeros((x.N, rows.shape[1], call.Dv))
    total = rows.new_zeros((x.N, rows.shape[1], 1))
    if scores.calm:
        for tile in tiles:
            p = scores.exp(scores.tile(rows, tile)[0], None)
            total += p.sum(-1, keepdim=True)
            _drop(p, kept, tile)
            out.baddbmm_(p, x.v[:, tile.j0 : tile.j1])
        return out, None, total
    m = torch.full_like(total, -math.inf)
    if call.sinks is not None:
        n = rows.shape[1] // x.g
        sinks = (call.sinks.to(x.acc) * scores.unit).view(1, call.Hq, 1, 1)
        sinks = sinks.expand(call.B, call.Hq, n, 1)
        m, total = sinks.reshape(total.shape), torch.ones_like(total)
    for tile in tiles:
        s, _ = scores.tile(rows, tile)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = no_infinity(new)
        factor = scores.power(m - shift)
        p = scores.exp(s, shift)
        total = total.mul_(factor).add_(p.sum(-1, keepdim=True))
        _drop(p, kept, tile)
        out.mul_(factor).baddbmm_(p, x.v[:, tile.j0 : tile.j1])
        m = new
    return out, m, total


def _drop(p: torch.Tensor, kept: Kept | None, tile: Any) -> None:
    """0 where dropped, in place; the scale comes last (S9)."""
    if kept is not None:
        kept.drop(tile, (p, p))


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
    x = Operands.of(k, v, call)
    if lse.numel() and not no_infinity(lse).abs().amax().item() <= EXACT[x.acc]:
        return None
    scores = Scores(backend, q, call, x)
    sums = _Sums(q, x, call)
    kept = None if call.dropout is None else Kept(call, x.k)
    for i0, i1, tiles in blocks(backend, call, q):
        rows, d_rows, out_rows = (x.rows(y, i0, i1) for y in (q, d_out, out))
        row_lse = x.rows(lse[..., None], i0, i1)
        flow = (d_rows * out_rows).sum(-1, keepdim=True).neg_()
        if d_lse is not None:
            flow += x.rows(d_lse[..., None], i0, i1)
        shift = no_infinity(row_lse) * scores.unit
        if kept is not None:
            d_rows = d_rows * kept.scale
        dq = torch.zeros_like(rows)
        for tile in tiles:
            _backward_tile(scores, sums, tile, rows, d_rows, flow, shift, dq, kept)
        sums.end_rows(i0, i1, dq, flow, row_lse)
    gradients = sums.gradients(k, v)
    return gradients if call.assume_finite or finite(*gradients) else None


def _backward_tile(
    scores: Scores, sums: _Sums, tile: Any, rows: torch.Tensor, d_rows: torch.Tensor,
    flow: torch.Tensor, shift: torch.Tensor, dq: torch.Tensor,
    kept: Kept | None,
) -> None:  # fmt: skip
    """dS = P (dP - delta + d_lse), and what it adds to each gradient."""
    x, at = scores.x, slice(tile.j0, tile.j1)
    s, tanh = scores.tile(rows, tile)
    p = scores.exp(s, shift)
    size = tile.i1 - tile.i0, tile.j1 - tile.j0
    ds = torch.bmm(d_rows, x.v[:, at].mT, out=scores.buffer("ds", *size))
    dropped = p
    if kept is not None:
        dropped = scores.buffer("dropped", *size)
        kept.drop(tile, (p, dropped), (ds, ds))
    sums.dv[:, at].baddbmm_(dropped.mT, d_rows)
    ds.add_(flow).mul_(p)
    sums.add_bias(tile, ds)
    if tanh is not None:
        ds.mul_(tanh.square_().neg_().add_(1.0))
    dq.baddbmm_(ds, x.k[:, at])
    sums.dk[:, at].baddbmm_(ds.mT, rows)


class _Sums:
    """The gradients as they add up."""

    def __init__(self, q: torch.Tensor, x: Operands, call: Call) -> None:
        self.x, self.call = x, call
        bias, sinks = call.bias, call.sinks
        self.dq = q.new_empty((call.B, call.Hq, call.Lq, call.D))
        self.dk, self.dv = (x.k.new_zeros(y.shape) for y in (x.k, x.v))
        self.dbias = None if bias is None else x.k.new_zeros(bias.shape)
        self.dsinks = None if sinks is None else x.k.new_zeros(call.Hq)

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
        self.dq[:, :, i0:i1] = dq.mul_(call.scale).view(*shape[:3], call.D)
        if self.dsinks is not None:
            sinks = call.sinks.to(self.x.acc).view(1, call.Hq, 1, 1)
            p_sink = (sinks - lse.view(shape)).exp_()
            self.dsinks += (p_sink * flow.view(shape)).sum((0, 2, 3))

    def gradients(self, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        call = self.call
        return Gradients(
            self.dq,
            self.dk.mul_(call.scale).to(k.dtype).view(k.shape),
            self.dv.to(v.dtype).view(v.shape),
            None if self.dbias is None else self.dbias.to(call.bias.dtype),
            None if self.dsinks is None else self.dsinks.to(call.sinks.dtype),
        )
