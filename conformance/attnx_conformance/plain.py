"""The plain computation: what anybody's careful one-screen kernel gives in the same dtype.

Scores and softmax in float32, P rounded once to the inputs' dtype, float32 products, results
rounded. It is the yardstick of condition (c): in 16-bit types the error bound alone is loose, and
a kernel worse than twice this one has a fault that its dtype does not excuse.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .oracle import Terms

__all__ = ["numpy_dtype", "plain"]

Array = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, with bfloat16 from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def plain(t: Terms, dtype: str) -> dict[str, Array]:
    """Outputs and gradients of a call in `dtype`, by name and in the caller's shapes."""
    low = numpy_dtype(dtype)
    high = np.dtype(np.float64 if dtype == "float64" else np.float32)
    with np.errstate(all="ignore"):
        made = _forward(t, low, high)
        made |= _backward(t, low, high, made)
    results = {name: t.restore(made[name].astype(low)) for name in ("out", "dq", "dk", "dv")}
    results["lse"] = t.restore(made["lse"])
    if t.bias_shape is not None:
        results["dbias"] = t.grid.fold(made["dS"], t.bias_shape).astype(low)
    if t.sinks is not None:
        results["dsinks"] = made["dsinks"].astype(low)
    return results


def _forward(t: Terms, low: np.dtype[Any], high: np.dtype[Any]) -> dict[str, Array]:
    q, k, v = (x.astype(high) for x in (t.q, t.k, t.v))
    s = high.type(t.scale) * (q @ np.swapaxes(k, -1, -2))
    slope = np.ones_like(s)
    if t.softcap is not None:
        tanh = np.tanh(s / high.type(t.softcap))
        s, slope = high.type(t.softcap) * tanh, 1 - tanh**2
    if t.bias is not None:
        s = s + t.bias.astype(high)
    s = np.where(t.visible, s, -np.inf)
    top = s.max(axis=-1, initial=-np.inf, keepdims=True)
    sinks = None if t.sinks is None else t.sinks.astype(high)[:, None, None]
    if sinks is not None:
        top = np.maximum(top, sinks)
    top = np.where(np.isfinite(top), top, high.type(0))
    weights = np.exp(s - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    lse = (np.log(total) + top)[..., 0]
    P = np.where(t.visible, weights / np.where(total > 0, total, 1), 0)
    F = t.F.astype(high)
    out = (F * P).astype(low).astype(high) @ v
    return {"q": q, "k": k, "v": v, "slope": slope, "P": P, "F": F, "out": out, "lse": lse}


def _backward(
    t: Terms, low: np.dtype[Any], high: np.dtype[Any], made: dict[str, Array]
) -> dict[str, Array]:
    d_out, d_lse = t.d_out.astype(high), t.d_lse.astype(high)
    P, F, scale = made["P"], made["F"], high.type(t.scale)
    # From the stored out, as kernels do that keep no more than the caller has.
    delta = (d_out * made["out"].astype(low).astype(high)).sum(axis=-1)
    dP = F * (d_out @ np.swapaxes(made["v"], -1, -2))
    dS = np.where(t.visible, P * (dP - delta[..., None] + d_lse[..., None]), 0)
    dS_low = (dS * made["slope"]).astype(low).astype(high)
    back = {
        "dS": dS,
        "dq": scale * (dS_low @ made["k"]),
        "dk": t.fold_heads(scale * (np.swapaxes(dS_low, -1, -2) @ made["q"])),
        "dv": t.fold_heads(np.swapaxes((F * P).astype(low).astype(high), -1, -2) @ d_out),
    }
    if t.sinks is not None:
        p_sink = np.where(t.live, np.exp(t.sinks.astype(high)[:, None] - made["lse"]), 1)
        back["dsinks"] = (p_sink * (d_lse - delta)).sum(axis=(0, 2))
    return back
