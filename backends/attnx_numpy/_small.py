"""Small calls in one piece: all heads at once, no tiles, no threads.

Under some hundred thousand scores the blocked kernel costs more in Python than in arithmetic. The
whole score array then fits the second-level cache, and a dozen NumPy calls do the work. So it is
with a few queries before a long cache, whose scores are few beside the keys that give them. Values
that are not finite take the blocked kernel, which knows how to keep them apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.plugin import Gradients
from attnx.tiling import Grid, position_offset, visible
from attnx_numpy._scores import tame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass

__all__ = ["backward", "direct", "fits", "forward", "suits", "suits_backward"]

SCORES = 1 << 16
"""Most scores of a small call: 256 KB of float32."""

FEW = 16
"""Query rows of a key head up to which a call is small at any length: its scores then take a tenth
of the memory of its keys and values. In 16 bits these would be upcast whole."""

FULL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}


def fits(call: Call) -> bool:
    """Whether a call is small, and not empty."""
    scores = call.B * call.Hq * call.Lq * call.Lk
    if scores <= SCORES or scores == 0:
        return scores > 0
    return call.Lq * (call.Hq // call.Hk) <= FEW and call.dtype in FULL


def suits(q: Any, k: Any, v: Any, call: Call) -> bool:
    """Whether a call fits, and holds nothing that must be isolated."""
    if not fits(call):
        return False
    return call.assume_finite or (
        tame(call.scale, q, k, v) and (call.bias is None or bool(call.bias.max() < np.inf))
    )


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """The answer (out, lse) of a call that `suits`."""
    p, m, total, shown, _ = _softmax(q, k, call)
    rows = (call.B, call.Hk, call.Hq // call.Hk * call.Lq, call.Lk)
    out = np.matmul(p.reshape(rows), v.astype(p.dtype, copy=False))
    out = out.reshape(call.B, call.Hq, call.Lq, call.Dv)
    return _finish(out, m, total, shown, call, q.dtype)


def suits_backward(d_out: Any, d_lse: Any, call: Call) -> bool:
    """Whether the cotangents hold nothing that must be isolated, if the call itself `suits`."""
    return call.assume_finite or (
        tame(1.0, d_out) and (d_lse is None or bool(np.isfinite(d_lse).all()))
    )


def backward(q: Any, k: Any, v: Any, out: Any, d_out: Any, d_lse: Any, call: Call) -> Gradients:
    """The gradients of a call that `suits`; P is made again from the scores, not from lse."""
    p, m, total, shown, slope = _softmax(q, k, call, sloped=call.softcap is not None)
    dtype, g = p.dtype, call.Hq // call.Hk
    stacked = (call.B, call.Hk, g * call.Lq, -1)  # the query heads of a group as rows of one
    flat = (call.B, call.Hk, g * call.Lq, call.Lk)
    seen = total if shown is None else np.where(total > 0, total, 1)
    p /= seen
    q32, d32 = (x.astype(dtype, copy=False).reshape(stacked) for x in (q, d_out))
    k32, v32 = (x.astype(dtype, copy=False) for x in (k, v))
    dv = np.matmul(p.reshape(flat).swapaxes(-1, -2), d32)
    flow = np.einsum(
        "bhid,bhid->bhi", out.astype(dtype, copy=False), d_out.astype(dtype, copy=False)
    )
    if d_lse is not None:
        flow -= d_lse
    ds = np.matmul(d32, v32.swapaxes(-1, -2)).reshape(p.shape)
    ds -= flow[..., None]
    ds *= p
    bias = sinks = None
    if call.bias is not None:
        bias = _summed_to(ds, call.bias.shape).astype(call.bias.dtype, copy=False)
    if call.sinks is not None:
        below = call.sinks.astype(dtype)[:, None, None] - np.where(np.isneginf(m), dtype.type(0), m)
        share = np.exp(below) / seen
        sinks = -(share[..., 0] * flow).sum(axis=(0, 2))
        sinks = sinks.astype(call.sinks.dtype, copy=False)
    if slope is not None:
        ds *= slope.reshape(ds.shape)
    ds *= dtype.type(call.scale)
    raw = ds.reshape(flat)
    dq = np.matmul(raw, k32).reshape(q.shape)
    dk = np.matmul(raw.swapaxes(-1, -2), q32)
    return Gradients(
        dq.astype(q.dtype, copy=False), dk.astype(k.dtype, copy=False),
        dv.astype(v.dtype, copy=False), bias, sinks,
    )  # fmt: skip


def _softmax(q: Any, k: Any, call: Call, *, sloped: bool = False) -> tuple[Any, Any, Any, Any, Any]:
    """exp(s - m) (B, Hq, Lq, Lk), m, its sums with the sinks', what is shown, the cap's slope."""
    dtype = np.float64 if call.dtype == "float64" else np.float32
    B, Hq, Lq, Lk = call.B, call.Hq, call.Lq, call.Lk
    q32 = q.astype(dtype, copy=False).reshape(B, call.Hk, Hq // call.Hk * Lq, call.D)
    s = np.matmul(q32, k.astype(dtype, copy=False).swapaxes(-1, -2))
    s *= dtype(call.scale)
    slope = None
    if call.softcap is not None:
        s /= dtype(call.softcap)
        np.tanh(s, out=s)
        slope = 1 - s * s if sloped else None
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
    shift = m if shown is None else np.where(np.isneginf(m), dtype(0), m)
    s -= shift
    p = np.exp(s, out=s)
    total = p.sum(axis=-1, keepdims=True)
    if call.sinks is not None:
        total += np.exp(call.sinks.astype(dtype)[:, None, None] - shift)
    return p, m, total, shown, slope


def _summed_to(ds: Any, shape: tuple[int, ...]) -> Any:
    """Summed over the axes along which the bias was broadcast."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and ds.shape[axis] != 1)
    return ds.sum(axis=axes, keepdims=True) if axes else ds.copy()


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
