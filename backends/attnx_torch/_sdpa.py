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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from attnx.tiling import Grid, position_offset, visible
from attnx_torch._lane import LANE, any_autocast
from attnx_torch._scores import tame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass

__all__ = ["DENSE", "attend", "direct", "may_mask", "may_serve", "ready"]

CAUSAL = "causal[top_left]"
DENSE = 1 << 20
"""Scores (B Hq Lq Lk) up to which a mask is spelled out for SDPA; above it, tiles save work."""

FREE = 1 << 16
"""Scores up to which it does not matter whether a fused kernel takes the strides."""

FEW, LONG = 4, 1024
"""Queries and keys from which a call counts as decoding."""


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
    if cls.need_lse or cls.softcap or cls.sinks is not None or cls.Dv != cls.D:
        return False
    if cls.device != "cpu":
        return cls.dtype != "float64"
    return cls.gradient is None or cls.dtype in ("float32", "float64")


def ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
    """Whether this call of a class that SDPA may serve is one that it gets right."""
    if not (call.Lq and call.Lk and call.B):
        return False
    look = not call.assume_finite and q.is_cpu
    if q.is_cpu and _streams(call.Lq, call.Lk, look or call.cls.grouped):
        return False
    if not may_serve(call.cls):
        if call.B * call.Hq * call.Lq * call.Lk > DENSE:
            return False
        if call.cls.gradient is not None and call.bias is not None and call.bias.requires_grad:
            return False
    return not look or (tame(call.scale, q, k, v) and (call.bias is None or _no_nan(call.bias)))


def _streams(Lq: int, Lk: int, wasteful: bool) -> bool:
    """Whether a few queries meet a long cache that SDPA would read more than once.

    It would, for the look at the data or for each query head of a group (`wasteful`).
    """
    return wasteful and Lq <= FEW and Lk >= LONG


def direct(cls: CallClass) -> Callable[..., Any]:
    """SDPA for plain calls of a class that it serves as it stands: out, or None to look closer.

    Everything that the class decides is settled here, since each decision costs as much as an
    attribute of a tensor.
    """
    causal, grouped, host = cls.mask is not None, cls.grouped, cls.device == "cpu"
    look = host and not cls.assume_finite
    wasteful = host and (look or grouped)
    full = cls.dtype in ("float32", "float64")
    unseen = full and not wasteful
    plain = cls.scale_sign is None and not grouped
    sdpa, grad_enabled = F.scaled_dot_product_attention, torch.is_grad_enabled

    def direct(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, scores: int
    ) -> torch.Tensor | None:
        try:
            if not (unseen and 0 < scores <= FREE) and (
                not scores
                or (wasteful and _streams(q.shape[-2], k.shape[-2], wasteful))
                or (look and (any_autocast() or not tame(scale, q, k, v)))
                or not ((full and scores <= FREE) or _fits(q, k, v))
            ):
                return None
            if q.requires_grad and grad_enabled():
                return None
            # Each argument given costs PyTorch 0.1 µs to read, and a keyword more.
            if not plain:
                out = sdpa(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
            else:
                out = sdpa(q, k, v, None, 0.0, True) if causal else sdpa(q, k, v)
        except RuntimeError:
            LANE.admit(q, k, v)
            if not k.dtype is q.dtype is v.dtype:
                return None
            raise
        return None if out.requires_grad else out

    return direct


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a fused kernel takes the strides; without one, all scores stand in memory."""
    return (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or _rows(q, k, v)


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether each row lies together in memory, as the fused kernels want it."""
    return q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def _no_nan(bias: torch.Tensor) -> bool:
    """-inf hides, and is no poison; NaN reaches the maximum."""
    return not bias.numel() or torch.aminmax(bias).max.item() < math.inf


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """The answer of a call that is `ready`; differentiable by autograd."""
    causal, mask = call.mask is not None, None
    if not may_serve(call.cls):
        causal, mask = False, _spelled_out(q, call)
    if not _rows(q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=call.scale, enable_gqa=call.cls.grouped
    )


def _spelled_out(q: torch.Tensor, call: Call) -> Any:
    """Mask and bias as one tensor that broadcasts over (B, Hq, Lq, Lk)."""
    shown = None
    if call.mask is not None:
        b, h, i, j = (slice(0, n) for n in (call.B, call.Hq, call.Lq, call.Lk))
        offset = position_offset(call.mask, call.Lq, call.Lk)
        shown = visible(call.mask, Grid(torch, partial(LANE.arange, like=q), b, h, i, j, offset))
    if call.bias is None:
        return shown
    bias = call.bias.to(q.dtype) if q.dtype is torch.float64 else call.bias
    return bias if shown is None else torch.where(shown, bias, -math.inf)
