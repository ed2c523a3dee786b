"""The formula in NumPy, as one writes it who has only NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnx_bench.implementation import Implementation, Ready
from attnx_bench.workload import Arrays, Workload

from ._shared import Array, dense, named, refuse, refuse_scores

__all__ = ["IMPLEMENTATIONS"]


class _Forward(NamedTuple):
    """What the gradients need of the forward pass, heads repeated."""

    q: Array
    k: Array
    v: Array
    bent: Array | None
    weights: Array
    out: Array
    lse: Array | None


def make(workload: Workload, arrays: Arrays) -> Ready:
    """The whole matrix of scores; 16-bit operands become float32 first, within the timed work."""
    refuse(workload, dropout="has no dropout")
    refuse_scores(workload)
    mask = dense(workload)

    def run() -> tuple[Array | None, ...]:
        done = _forward(workload, arrays, mask)
        found: list[Array | None] = [done.out, done.lse]
        if workload.gradient:
            found += _gradients(workload, done, _wide(arrays.d_out))
        low = arrays.q.dtype
        return tuple(a if a is None or a is done.lse else a.astype(low, copy=False) for a in found)

    return Ready(run, named, "matmul, softmax, matmul")


def _wide(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _forward(workload: Workload, arrays: Arrays, mask: Array | None) -> _Forward:
    q, k, v = _wide(arrays.q), _wide(arrays.k), _wide(arrays.v)
    group = workload.Hq // workload.Hk
    if group > 1:
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * workload.scale
    bent = None
    if workload.softcap is not None:
        bent = np.tanh(scores / workload.softcap)
        scores = workload.softcap * bent
    if arrays.bias is not None:
        scores = scores + _wide(arrays.bias)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    lse = (top + np.log(total))[..., 0] if workload.need_lse else None
    return _Forward(q, k, v, bent, weights, weights @ v, lse)


def _gradients(workload: Workload, done: _Forward, d_out: Array) -> list[Array]:
    """Of q, k and v, by the textbook's formulas."""
    weights = done.weights
    dv = weights.swapaxes(-1, -2) @ d_out
    d_weights = d_out @ done.v.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    if done.bent is not None:
        d_scores = d_scores * (1 - done.bent * done.bent)
    d_scores = d_scores * workload.scale
    dq, dk = d_scores @ done.k, d_scores.swapaxes(-1, -2) @ done.q
    return [dq, _summed(dk, workload.Hk), _summed(dv, workload.Hk)]


def _summed(array: Array, heads: int) -> Array:
    """The sum over the query heads that share a key head."""
    B, Hq, L, D = array.shape
    if Hq == heads:
        return array
    summed: Array = array.reshape(B, heads, Hq // heads, L, D).sum(2)
    return summed


IMPLEMENTATIONS = (Implementation("numpy naive", make),)
