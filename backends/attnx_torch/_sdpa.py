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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from attnx_torch._lane import LANE, any_autocast
from attnx_torch._parts import Part, Sdpa, split, whole
from attnx_torch._scores import tame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass
    from attnx_torch._backend import TorchBackend

__all__ = ["DENSE", "attend", "attend_lse", "direct", "may_mask", "may_serve", "operands", "parts"]

CAUSAL = "causal[top_left]"
flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
DENSE = 1 << 20
"""Scores (B Hq Lq Lk) up to which a mask is spelled out as a whole; above it, in parts."""

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
    """Whether a call of the class can be served with its mask and bias spelled out."""
    return (cls.bias is not None or cls.mask is not None) and cls.device == "cpu" and _fused(cls)


def _fused(cls: CallClass) -> bool:
    """Whether a fused kernel takes the class."""
    if cls.dropout or cls.need_lse or cls.softcap or cls.sinks is not None or cls.Dv != cls.D:
        return False
    if cls.alibi:  # as a mask of floats it would hold one for each pair
        return False
    return cls.device == "cpu" or cls.dtype != "float64"


def parts(
    backend: TorchBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> list[Part] | None:
    """How SDPA does this call of a class that it may serve; None where it would not be right."""
    if not (call.Lq and call.Lk and call.B):
        return None
    look = not call.assume_finite and q.is_cpu
    if q.is_cpu and _streams(call.Lq, call.Lk, look or call.cls.grouped):
        return None
    plain = may_serve(call.cls)
    if call.cls.gradient is not None and call.bias is not None and call.bias.requires_grad:
        return None
    if look and not (tame(call.scale, q, k, v) and (call.bias is None or _no_nan(call.bias))):
        return None
    if plain:
        return whole(call, causal=call.mask is not None)
    if call.B * call.Hq * call.Lq * call.Lk <= DENSE:
        return whole(call, masked=True)
    return split(backend, call, q)


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
    half = torch.float16

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
        # On the host only autocast makes a float16 here, and it is not computed in float16 (S5.2).
        return None if out.requires_grad or (host and out.dtype is half) else out

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


def attend(
    backend: TorchBackend, parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    call: Call,
) -> torch.Tensor:  # fmt: skip
    """The answer of a call of which these are the parts."""
    sdpa, dtype = Sdpa(backend, call), q.dtype
    q, k, v = operands(q, k, v, call)
    if len(parts) == 1:
        return sdpa.of(parts[0], q, k, v).to(dtype)
    out = q.new_empty((*q.shape[:3], call.Dv), dtype=dtype)
    for part in parts:
        out[:, :, part.i0 : part.i1] = sdpa.of(part, q, k, v)
    return out


def operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[Any, Any, Any]:
    """What SDPA is given: rows that lie together, and half types cast up where that is better.

    On the host it takes five times as long for float16, and its gradients of both half types are
    slow and inexact.
    """
    if q.is_cpu and (q.dtype is torch.float16 or (q.itemsize == 2 and call.cls.gradient)):
        q, k, v = q.float(), k.float(), v.float()
    if not _rows(q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v


def attend_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse by the operation that SDPA itself calls on the host; None where it cannot.

    It has no public name, so it is used only where this PyTorch has it.
    """
    cls = call.cls
    if flash is None or not q.is_cpu or cls.grouped or not (call.Lq and call.Lk and call.B):
        return None
    if not may_serve(cls._replace(need_lse=False)) or _streams(call.Lq, call.Lk, wasteful=True):
        return None
    if not call.assume_finite and not tame(call.scale, q, k, v):
        return None
    causal, dtype = call.mask is not None, q.dtype
    if causal and call.Lq != call.Lk:
        return None
    q, k, v = operands(q, k, v, call)
    if q.dtype not in (torch.float32, torch.float64):
        q, k, v = q.float(), k.float(), v.float()
    out, lse = flash(q, k, v, 0.0, causal, scale=call.scale)
    return out.to(dtype), lse
