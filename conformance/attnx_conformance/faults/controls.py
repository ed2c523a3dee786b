"""Correct kernels that differ in how they compute, not in what: an alarm on one is the suite's bug.

Real kernels order their sums, split their keys and round their weights in many ways, all of them
within the specification. The suite must tell these from faults.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, State, T
from ._sight import Call

__all__ = ["CONTROLS"]

control = of_kind("control")
LOG2E = 1.4426950408889634


def _reversed(self: Kernel, c: Call, rows: slice) -> Any:
    return list(reversed(list(Kernel.key_blocks(self, c, rows))))


def _exp2(self: Kernel, c: Call, x: Any) -> Any:
    return np.exp2(x * c.high(LOG2E))


def _prescaled(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    return self.dot(c, c.q[:, :, rows] * c.high(c.scale), c.k[:, :, cols])


def _evenly_scaled(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    root = c.high(np.sqrt(abs(c.scale)))
    sign = c.high(np.sign(c.scale))
    return self.dot(c, c.q[:, :, rows] * (root * sign), c.k[:, :, cols] * root)


def _sequential_sum(self: Kernel, c: Call, total: Any, P: Any) -> Any:
    for j in range(P.shape[-1]):
        total = total + P[..., j : j + 1]
    return total


def _sequential_values(self: Kernel, c: Call, acc: Any, P: Any, v: Any, seen: Any) -> Any:
    for j in range(P.shape[-1]):
        at = slice(j, j + 1)
        acc = acc + self.product(c, P[..., at], v[:, :, at], seen[..., at])
    return acc


def _pairwise(array: Any) -> Any:
    """The sum over the last axis, which it keeps, by halves."""
    while array.shape[-1] > 1:
        half = array.shape[-1] // 2
        array = np.concatenate(
            [array[..., :half] + array[..., half : 2 * half], array[..., 2 * half :]], axis=-1
        )
    return array


def _pairwise_sum(self: Kernel, c: Call, total: Any, P: Any) -> Any:
    return total + _pairwise(P)


def _split(self: Kernel, c: Call, rows: slice) -> tuple[Any, Any]:
    """Each split of the keys on its own, then their outputs weighed by lse (flash-decoding)."""
    parts = []
    blocks = list(Kernel.key_blocks(self, c, rows))
    for at in range(0, len(blocks), 2):
        state = self.start(c, rows)
        for cols in blocks[at : at + 2]:
            state = self.step(c, state, rows, cols)
        parts.append(state)
    merged = self.start(c, rows)
    m = np.max([part.m for part in [merged, *parts]], axis=0)
    for part in parts:
        total, acc = self.carry(c, part, m)
        merged = State(m, merged.total + total, merged.acc + acc)
    return self.finish(c, merged, rows)


def _split_forward(self: Kernel, c: Call) -> tuple[Any, Any]:
    N, Hq, Lq, _ = c.grid.flat
    out, lse = np.zeros((N, Hq, Lq, c.Dv), c.high), np.zeros((N, Hq, Lq), c.high)
    for rows in self.row_blocks(c):
        out[:, :, rows], lse[:, :, rows] = _split(self, c, rows)
    return out, lse


def _rounded(self: Kernel, c: Call, P: Any) -> Any:
    """Unnormalised, as fused kernels do: P relative to the maximum so far."""
    return P.astype(c.low).astype(c.high)


def _normalised_forward(self: Kernel, c: Call) -> tuple[Any, Any]:
    """Two passes: P is normalised, rounded once to the inputs' dtype, then multiplied."""
    rows, cols = slice(0, c.grid.Lq), slice(0, c.grid.Lk)
    state = self.start(c, rows)
    if c.grid.Lk:
        s = self.scores(c, rows, cols)
        m = self.running_max(c, state.m, s)
        state = State(m, self.add_sum(c, state.total, self.exp(c, s - self.safe(m))), state.acc)
    m, total, acc = self.add_sinks(c, state, rows)
    if c.grid.Lk:
        P = np.where(c.visible, self.exp(c, s - self.safe(m)) / total, c.high(0))
        acc = self.product(c, _rounded(self, c, self.drop(c, P, rows, cols)), c.v, c.visible)
    return self.fill(c, acc, self.log_sum(c, m, total), rows)


def _own_weights(self: Kernel, c: Call, s: Any, lse: Any, seen: Any) -> Any:
    P = c.arrays["by_lse"] = Kernel.weights(self, c, s, lse, seen)
    if c.sinks is not None or c.grid.Lk > self.block_k:
        return P
    total = P.sum(axis=-1, keepdims=True)
    return P / np.where(total > 0, total, c.high(1))


def _two_paths(self: Kernel, c: Call, P: Any, dP: Any, delta: Any, d_lse: Any) -> Any:
    """As a framework differentiates softmax and logsumexp, each for itself."""
    return P * (dP - delta) + c.arrays["by_lse"] * d_lse


def _delta_from_weights(self: Kernel, c: Call, d_out: Any, out: Any) -> Any:
    """The mean of dP under P, as a backward pass takes it that keeps no output.

    It divides by the sum of the P that it used: beside scores of -1e9, lse has lost their number.
    """
    delta, whole = np.zeros(c.grid.flat[:3], c.high), np.zeros(c.grid.flat[:3], c.high)
    lse = self.forward(c)[1]
    for rows in self.row_blocks(c):
        for cols in self.key_blocks(c, rows):
            seen = c.visible[:, :, rows, cols]
            P = self.weights(c, self.scores(c, rows, cols), lse[:, :, rows, None], seen)
            dP = self.dot(c, d_out[:, :, rows], c.v[:, :, cols])
            dP = self.drop_gradient(c, dP, rows, cols)
            delta[:, :, rows] += np.where(seen, P * dP, c.high(0)).sum(axis=-1)
            whole[:, :, rows] += P.sum(axis=-1)
    if c.sinks is not None:
        whole += np.exp(c.sinks[..., 0] - lse)
    return np.where(c.live, delta / whole, c.high(0))


def _float32_output(self: Kernel, c: Call, d_out: Any, out: Any) -> Any:
    """Of the output before it was rounded."""
    return Kernel.delta(self, c, d_out, self.forward(c)[0])


def _no_hidden_blocks(self: Kernel, c: Call, rows: slice) -> Any:
    blocks = Kernel.key_blocks(self, c, rows)
    return [cols for cols in blocks if c.visible[:, :, rows, cols].any()]


def _cleaned(self: Kernel, c: Call) -> None:
    """Unseen keys and values become zeros before the first tile."""
    N, _, Lq, Lk = c.grid.flat
    seen = c.visible.reshape(N, c.Hk, c.g, Lq, Lk).any(axis=(2, 3)).repeat(c.g, axis=1)
    c.k = np.where(seen[..., None], c.k, c.high(0))
    c.v = np.where(seen[..., None], c.v, c.high(0))
    c.q = np.where(c.live[..., None], c.q, c.high(0))


def _transposed_products(self: Kernel, c: Call, q: Any, k: Any) -> Any:
    return T(np.einsum("nhjd,nhid->nhji", k, q))


def _rounded_gradient(self: Kernel, c: Call, P: Any, dP: Any, delta: Any, d_lse: Any) -> Any:
    return Kernel.dS(self, c, P, dP, delta, d_lse).astype(c.low).astype(c.high)


CONTROLS: tuple[Fault, ...] = (
    control("as-it-is", "the kernel without a change"),
    control("as-it-is-bshd", "the same in the other layout", layout="bshd"),
    control("one-key-tiles", "tiles of one key", block_k=1),
    control("tiles-of-7", "tiles of 5 queries and 7 keys", block_q=5, block_k=7),
    control("tiles-of-16", "tiles of 16", block_q=16, block_k=16),
    control("tiles-of-64", "tiles of 64 keys", block_k=64),
    control("one-tile", "all keys and queries at once", block_q=10_000, block_k=10_000),
    control("thousand-keys", "tiles of 1000 keys", block_k=1000),
    control("base-two", "exp2 with log2(e) in its argument", exp=_exp2),
    control("prescaled-queries", "q is scaled first, in float32", scaled=_prescaled),
    control("evenly-scaled", "q and k share the root of the scale", scaled=_evenly_scaled),
    control("split-keys", "splits of the keys, merged at the end", forward=_split_forward),
    control("sequential", "sums over keys one after another",
            add_sum=_sequential_sum, add_values=_sequential_values),
    control("pairwise", "denominators summed by halves", add_sum=_pairwise_sum),
    control("reversed-keys", "key tiles from last to first", key_blocks=_reversed),
    control("rounded-weights", "unnormalised P rounded to the inputs' dtype", rounded=_rounded),
    control("normalised-weights", "P normalised, then rounded once", forward=_normalised_forward),
    control("delta-from-weights", "delta is the sum of P dP", delta=_delta_from_weights),
    control("lse-apart", "P is normalised by its own sum, and lse differentiated by itself",
            block_k=1000, weights=_own_weights, dS=_two_paths),
    control("delta-unrounded", "delta of the float32 output", delta=_float32_output),
    control("skips-hidden-tiles", "tiles that nobody sees are not visited",
            key_blocks=_no_hidden_blocks),
    control("cleans-first", "unseen keys become zeros first", clean=_cleaned),
    control("transposed-products", "scores as k · q", dot=_transposed_products),
    control("rounded-dS", "dS rounded to the inputs' dtype", dS=_rounded_gradient),
)  # fmt: skip
