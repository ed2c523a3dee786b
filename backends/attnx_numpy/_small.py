"""Small calls in one piece: all heads at once, no tiles, no threads.

Under some hundred thousand scores the blocked kernel costs more in Python than in arithmetic. The
whole score array then fits the second-level cache, and a dozen NumPy calls do the work. Values that
are not finite take the blocked kernel, which knows how to keep them apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.tiling import Grid, position_offset, visible
from attnx_numpy._scores import tame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass

__all__ = ["direct", "fits", "forward", "suits"]

SCORES = 1 << 16
"""Most scores of a small call: 256 KB of float32."""

FULL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}


def fits(call: Call) -> bool:
    """Whether a call is small, and not empty."""
    return 0 < call.B * call.Hq * call.Lq * call.Lk <= SCORES


def suits(q: Any, k: Any, v: Any, call: Call) -> bool:
    """Whether a call fits, and holds nothing that must be isolated."""
    if not fits(call):
        return False
    return call.assume_finite or (
        tame(call.scale, q, k, v) and (call.bias is None or bool(call.bias.max() < np.inf))
    )


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """The answer (out, lse) of a call that `suits`."""
    dtype = np.float64 if call.dtype == "float64" else np.float32
    B, Hq, Lq, Lk = call.B, call.Hq, call.Lq, call.Lk
    rows = (B, call.Hk, Hq // call.Hk * Lq, Lk)
    q32 = q if q.dtype == dtype else q.astype(dtype)
    k32 = k if k.dtype == dtype else k.astype(dtype)
    v32 = v if v.dtype == dtype else v.astype(dtype)
    s = np.matmul(q32.reshape(*rows[:3], call.D), k32.swapaxes(-1, -2))
    s *= dtype(call.scale)
    if call.softcap is not None:
        s /= dtype(call.softcap)
        np.tanh(s, out=s)
        s *= dtype(call.softcap)
    s = s.reshape(B, Hq, Lq, Lk)
    shown = _shown(call)
    if call.bias is not None:
        s += call.bias.astype(dtype, copy=False)
    if shown is not None:
        s[np.broadcast_to(~shown, s.shape)] = -np.inf
    m = s.max(axis=-1, keepdims=True)
    if call.sinks is not None:
        m = np.maximum(m, call.sinks.astype(dtype)[:, None, None])
    s -= m if shown is None else np.where(np.isneginf(m), dtype(0), m)
    p = np.exp(s, out=s)
    total = p.sum(axis=-1, keepdims=True)
    if call.sinks is not None:
        total += np.exp(call.sinks.astype(dtype)[:, None, None] - m)
    out = np.matmul(p.reshape(rows), v32).reshape(B, Hq, Lq, call.Dv)
    return _finish(out, m, total, shown, call, q.dtype)


def direct(cls: CallClass) -> Callable[..., Any] | None:
    """Small calls of a class without mask, group or upcast: out, or None to look closer."""
    if cls.mask is not None or cls.grouped or cls.need_lse or cls.dtype not in FULL:
        return None
    dtype, look = FULL[cls.dtype], not cls.assume_finite
    default = dtype(1 / math.sqrt(cls.D))

    def direct(q: Any, k: Any, v: Any, scale: float | None, scores: int) -> Any:
        if not 0 < scores <= SCORES:
            return None
        with np.errstate(all="ignore"):
            if look and not tame(1.0 if scale is None else scale, q, k, v):
                return None
            s = np.matmul(q, k.swapaxes(-1, -2))
            s *= default if scale is None else dtype(scale)
            s -= s.max(axis=-1, keepdims=True)
            np.exp(s, out=s)
            out = np.matmul(s, v)
            out /= s.sum(axis=-1, keepdims=True)
            return out

    return direct


def _shown(call: Call) -> Any:
    """The visible pairs, (…, Lq, Lk), or None when nothing hides any."""
    shown = None
    if call.mask is not None:
        b, h, i, j = (slice(0, n) for n in (call.B, call.Hq, call.Lq, call.Lk))
        offset = position_offset(call.mask, call.Lq, call.Lk)
        shown = visible(call.mask, Grid(np, np.arange, b, h, i, j, offset))
    if call.bias is not None:
        unhidden = call.bias != -np.inf
        if not unhidden.all():
            shown = unhidden if shown is None else shown & unhidden
    return shown


def _finish(out: Any, m: Any, total: Any, shown: Any, call: Call, dtype: Any) -> tuple[Any, Any]:
    if shown is None:
        out /= total
        lse = (m + np.log(total))[..., 0] if call.need_lse else None
        return out.astype(dtype, copy=False), lse
    shape = (*shown.shape[:2], call.Lq, call.Lk)
    seen = np.broadcast_to(np.broadcast_to(shown, shape).any(axis=-1, keepdims=True), m.shape)
    out = np.where(seen, out / np.where(seen, total, 1), 0)
    sinks = -np.inf if call.sinks is None else call.sinks.astype(m.dtype)[:, None, None]
    lse = np.where(seen, m + np.log(total), sinks)[..., 0]
    return out.astype(dtype, copy=False), lse
