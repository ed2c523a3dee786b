"""A kernel as somebody would write it for any framework, and calls that try what wrapping does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import attnx
from attnx import plugin

EVERY = ("causal", "mask", "bias", "scale", "softcap", "sinks", "lse", "gqa")


def kernels(framework: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The formula of S2, and its gradient, as somebody would write them for a framework."""
    xp = plugin.lane(framework).xp

    def scores(q: Any, k: Any, scale: float, options: dict[str, Any]) -> tuple[Any, Any]:
        s = q @ xp.permute_dims(wide(k, q.shape[1]), (0, 1, 3, 2)) * scale
        slope = None
        if options.get("softcap") is not None:
            slope = xp.tanh(s / options["softcap"])
            s, slope = options["softcap"] * slope, 1 - slope * slope
        s = s if options.get("bias") is None else s + options["bias"]
        if options.get("causal", False) is not False:
            n, m = s.shape[2:]
            ends = m - n if options["causal"] == "bottom_right" else 0
            ones = xp.ones((n, m), dtype=xp.bool)
            s = xp.where(xp.tril(ones, k=ends), s, xp.full_like(s, -xp.inf))
        if options.get("mask") is not None:
            s = xp.where(options["mask"], s, xp.full_like(s, -xp.inf))
        return s, slope

    def wide(v: Any, heads: int) -> Any:
        return xp.concat([v[:, h // (heads // v.shape[1]), None] for h in range(heads)], axis=1)

    def kernel(
        q: Any, k: Any, v: Any, *, scale: float, return_lse: bool = False, **options: Any
    ) -> Any:
        s, _ = scores(q, k, scale, options)
        top = xp.max(s, axis=-1, keepdims=True)
        p = xp.exp(s - top)
        total = xp.sum(p, axis=-1, keepdims=True)
        if options.get("sinks") is not None:
            total = total + xp.exp(xp.reshape(options["sinks"], (1, -1, 1, 1)) - top)
        out = (p / total) @ wide(v, q.shape[1])
        return (out, (top + xp.log(total))[..., 0]) if return_lse else out

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, *, scale: float,
        **options: Any,
    ) -> Any:  # fmt: skip
        s, slope = scores(q, k, scale, options)
        p = xp.exp(s - lse[..., None])
        flow = xp.sum(d_out * out, axis=-1) - (0 if d_lse is None else d_lse)
        turned = (0, 1, 3, 2)
        ds = p * (d_out @ xp.permute_dims(wide(v, q.shape[1]), turned) - flow[..., None])
        raw = (ds if slope is None else ds * slope) * scale
        shape = (k.shape[0], k.shape[1], -1, k.shape[2])
        dk = xp.permute_dims(raw, turned) @ q
        dv = xp.permute_dims(p, turned) @ d_out
        dk, dv = (xp.sum(xp.reshape(x, (*shape, x.shape[3])), axis=2) for x in (dk, dv))
        found = [raw @ wide(k, q.shape[1]), dk, dv]
        if options.get("bias") is not None:
            found.append(ds)  # of all pairs, whatever the bias was broadcast from
        if options.get("sinks") is not None:
            p_sink = xp.exp(options["sinks"][:, None] - lse)
            found.append(-xp.sum(p_sink * flow, axis=(0, 2)))
        return tuple(found)

    kernel.__name__, backward.__name__ = "my_kernel", "my_backward"
    return kernel, backward


def made(framework: str = "numpy", *, own: bool = True, **more: Any) -> plugin.Backend:
    kernel, backward = kernels(framework)
    given: dict[str, Any] = {"supports": EVERY, "backward": backward if own else None} | more
    return plugin.from_function(kernel, name="mine", framework=framework, **given)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=2e-4, atol=2e-5)


SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
BIAS = np.linspace(-1, 1, 9, dtype=np.float32).reshape(1, 1, 1, 9)
HALF = np.arange(5 * 9).reshape(5, 9) % 3 > 0
EMPTY_ROW = HALF & (np.arange(5) != 2)[:, None]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, keys cut off": {"causal": "top_left"},
    "causal, with a mask": {"causal": "bottom_right", "mask": HALF},
    "lengths": {"causal": "bottom_right", "mask": attnx.Lengths(np.array([4, 0]))},
    "a row that sees nothing": {"mask": EMPTY_ROW},
    "the same, with sinks": {"mask": EMPTY_ROW, "sinks": SINKS},
    "the same, with a sink that is none": {
        "mask": EMPTY_ROW,
        "sinks": np.where(SINKS > 0, SINKS, -np.inf).astype(np.float32),
    },
    "bias": {"bias": BIAS, "softcap": 3.0, "scale": -0.5},
    "bias that hides": {"bias": np.where(EMPTY_ROW, 0, -np.inf).astype(np.float32)},
}
