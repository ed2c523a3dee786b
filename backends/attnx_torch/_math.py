"""Attention as a formula over public operations, for whatever transform looks at it.

`torch.func`, forward AD and second derivatives need every step to be PyTorch's own, so here
nothing is blocked, written in place or decided by the data: the scores stand in memory as a whole.
Keys that nobody sees are taken out before anything is multiplied (S4.1); what some rows see alone
is not kept apart (S4.2), since that would take a look at the data.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnx.tiling import Grid, alibi_tile, kept, position_offset, visible

if TYPE_CHECKING:
    from attnx.plugin import Call

__all__ = ["attend", "visible_pairs"]


def attend(
    xp: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Lq, Dv) and lse (B, Hq, Lq), differentiable to any order and in any mode."""
    acc = torch.float64 if q.dtype is torch.float64 else torch.float32
    shown = _shown(xp, q, call)
    k, v = _repeated(k, v, call)
    queries, keys, values = q.to(acc), k.to(acc), v.to(acc)
    if shown is not None:
        seen = shown.any(dim=-2).unsqueeze(-1)
        keys, values = keys.where(seen, 0.0), values.where(seen, 0.0)
        live = shown.any(dim=-1, keepdim=True)
        queries = queries.where(live, 0.0)
    s = torch.matmul(queries, keys.mT) * call.scale
    if call.softcap is not None:
        s = torch.tanh(s / call.softcap) * call.softcap
    if call.bias is not None:
        bias = call.bias.to(acc)
        s = s + bias.where(call.bias != -math.inf, 0.0)
    if call.alibi is not None:
        s = s + alibi_tile(call.alibi, _grid(xp, q, call), acc)
    if shown is not None:
        s = s.where(shown, -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(acc).view(1, call.Hq, 1, 1).expand(*s.shape[:-1], 1)
        s = torch.cat((s, sinks), dim=-1)
    if s.shape[-1] == 0:
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=acc)
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse
    # Where nothing is visible the row's logits are replaced, so that no derivative meets -inf.
    met = None if shown is None or call.sinks is not None else shown.any(dim=-1, keepdim=True)
    if met is not None:
        s = s.where(met, 0.0)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse.unsqueeze(-1))
    if call.sinks is not None:
        p = p[..., :-1]
    if met is not None:
        p = p.where(met, 0.0)
        lse = lse.where(met.squeeze(-1), -math.inf)
    if call.dropout is not None:
        ranges = (slice(0, call.B), slice(0, call.Hq), slice(0, call.Lq), slice(0, call.Lk))
        arange = partial(torch.arange, device=q.device)
        p = p * call.dropout.scale * kept(xp, arange, call.dropout, ranges)
    out = torch.matmul(p, values)
    if shown is not None:
        out = out.where(live, 0.0)  # so that a cotangent there is ignored, NaN included (S3.7)
    return out.to(q.dtype), lse


def visible_pairs(xp: Any, q: torch.Tensor, call: Call) -> torch.Tensor:
    """What the call's mask shows, over all pairs at once; broadcasts to (B, Hq, Lq, Lk)."""
    assert call.mask is not None
    shown: torch.Tensor = visible(call.mask, _grid(xp, q, call))
    return shown


def _grid(xp: Any, q: torch.Tensor, call: Call) -> Grid:
    """All indices of the call."""
    arange = partial(torch.arange, device=q.device)
    offset = position_offset(call.mask, call.Lq, call.Lk)
    i, j = arange(call.Lq), arange(call.Lk)
    return Grid(xp, arange, arange(call.B), arange(call.Hq), i, j, offset)


def _shown(xp: Any, q: torch.Tensor, call: Call) -> torch.Tensor | None:
    """The visible pairs by mask and bias, of shape (B, Hq, Lq, Lk), or None when all are."""
    shown = None if call.mask is None else visible_pairs(xp, q, call)
    if call.bias is not None:
        opened = call.bias != -math.inf
        shown = opened if shown is None else shown & opened
    return None if shown is None else shown.expand(call.B, call.Hq, call.Lq, call.Lk)


def _repeated(k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """A key head for each query head (S1.3)."""
    if not call.cls.grouped:
        return k, v
    g = call.Hq // call.Hk
    return k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
