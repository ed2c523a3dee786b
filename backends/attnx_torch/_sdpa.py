"""Where `F.scaled_dot_product_attention` gives the spec's answer, and how it is asked.

It is the fastest kernel there is for what it can do, and it falls short of the spec in ways that
were each seen (torch 2.13, CPU): a NaN in one hidden value of a causal call poisons every row, a
NaN in a query can come out as 0, `is_causal` with a scale <= 0 is NaN everywhere, and where no
fused kernel takes the call (D != Dv, a bias that requires a gradient) it holds all scores at once,
float16 ones in float16. So it is asked only for what the fused kernel takes, and on the host only
when a look at the inputs shows them finite.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from attnx.tiling import Grid, position_offset, visible
from attnx_torch._lane import LANE
from attnx_torch._tiles import finite

if TYPE_CHECKING:
    from attnx.plugin import Call, CallClass

__all__ = ["DENSE", "attend", "may_mask", "may_serve", "ready"]

CAUSAL = "causal[top_left]"
DENSE = 1 << 20
"""Scores (B Hq Lq Lk) up to which a mask is spelled out for SDPA; above it, tiles save work."""


def may_serve(cls: CallClass) -> bool:
    """Whether SDPA can serve a class of calls without a mask beyond its own causal one."""
    return (
        cls.bias is None
        and (cls.mask is None or (cls.mask == CAUSAL and cls.scale_sign in (None, 1)))
        and _fused(cls)
    )


def may_mask(cls: CallClass) -> bool:
    """Whether a small call of the class can be served with its mask and bias spelled out."""
    return (cls.bias is not None or cls.mask is not None) and cls.device == "cpu" and _fused(cls)


def _fused(cls: CallClass) -> bool:
    """Whether a fused kernel takes the class; on the host, half gradients are slow and inexact."""
    if cls.need_lse or cls.softcap or cls.sinks is not None or cls.D != cls.Dv:
        return False
    if cls.device != "cpu":
        return cls.dtype != "float64"
    return cls.gradient is None or cls.dtype in ("float32", "float64")


def ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
    """Whether this call of a class that SDPA may serve is one that it gets right."""
    if not (call.Lq and call.Lk and call.B):
        return False
    if call.bias is not None or (call.mask is not None and call.cls.mask != CAUSAL):
        if call.B * call.Hq * call.Lq * call.Lk > DENSE:
            return False
        if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
            return False
    if call.assume_finite or q.device.type != "cpu":
        return True
    return finite(q, k, v) and (call.bias is None or _no_nan(call.bias))


def _no_nan(bias: torch.Tensor) -> bool:
    """-inf hides, and is no poison; NaN reaches the maximum."""
    return not bias.numel() or torch.aminmax(bias).max.item() < math.inf


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """The answer of a call that is `ready`; differentiable by autograd."""
    cls = call.cls
    causal, mask = False, None
    if cls.mask is not None or cls.bias is not None:
        causal = cls.bias is None and cls.mask == CAUSAL and cls.scale_sign in (None, 1)
        mask = None if causal else _spelled_out(q, call)
    if k.stride(-1) != 1 or v.stride(-1) != 1 or q.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=cls.grouped
    )


def _spelled_out(q: torch.Tensor, call: Call) -> torch.Tensor:
    """Mask and bias as one tensor that broadcasts over (B, Hq, Lq, Lk)."""
    shown = None
    if call.mask is not None:
        ranges = (slice(0, n) for n in (call.B, call.Hq, call.Lq, call.Lk))
        offset = position_offset(call.mask, call.Lq, call.Lk)
        shown = visible(call.mask, Grid(torch, partial(LANE.arange, like=q), *ranges, offset))
    if call.bias is None:
        return shown
    bias = call.bias.to(q.dtype) if q.dtype is torch.float64 else call.bias
    return bias if shown is None else torch.where(shown, bias, -math.inf)
