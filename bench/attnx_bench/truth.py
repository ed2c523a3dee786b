"""Whether an implementation gives the right answer, before any of its times is believed.

One key head and the query heads that it serves are compared with float64: heads do not know each
other, and the whole would take longer than the timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import attnx

from .workload import Array, Arrays, Workload

__all__ = ["Truth", "error_of", "truth"]

TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
"""Of a result of size 1: a wrong mask or scale is off by far more, a rounding by far less."""


class Truth(NamedTuple):
    """The right results of the first key head and its query heads, in float64, by name."""

    results: dict[str, Array]
    g: int


def truth(workload: Workload, arrays: Arrays) -> Truth:
    """The right results, by attnx's NumPy kernel in float64, which the conformance suite proves."""
    g = workload.Hq // workload.Hk
    q, k, v, d_out = (
        np.ascontiguousarray(x[:1, :n], dtype=np.float64)
        for x, n in ((arrays.q, g), (arrays.k, 1), (arrays.v, 1), (arrays.d_out, g))
    )
    options: dict[str, Any] = dict(workload.one_head().structured)
    if arrays.bias is not None:
        options["bias"] = arrays.bias[:, :g].astype(np.float64)
    options |= {"softcap": workload.softcap, "dropout": workload.dropped, "backend": "numpy"}
    if not workload.gradient:
        out, lse = attnx.attention(q, k, v, return_lse=True, **options)
        return Truth({"out": out, "lse": lse} if workload.need_lse else {"out": out}, g)
    out, pullback = attnx.attention_vjp(q, k, v, **options)
    made = pullback(d_out)
    return Truth({"out": out, "dq": made.q, "dk": made.k, "dv": made.v}, g)


def error_of(results: dict[str, Array], right: Truth, workload: Workload) -> float:
    """The largest error over its tolerance: at most 1 is right.

    A result's tolerance is relative to its own typical size, since gradients of long sequences
    have other magnitudes than 1, and grows with the logits, whose rounding the softmax passes on.
    """
    worst = 0.0
    for name, wanted in right.results.items():
        if name not in results:
            return float("inf")
        heads = wanted.shape[1]
        got = np.asarray(results[name])[:1, :heads].astype(np.float64)
        if got.shape != wanted.shape:
            return float("inf")
        size = np.abs(wanted) + np.sqrt(np.mean(wanted**2))
        allowed = TOLERANCE[workload.dtype] * max(1.0, workload.logits) * size
        error = np.abs(got - wanted) / allowed
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)))
    return worst
