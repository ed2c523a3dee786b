"""A correct blocked attention kernel in which every step is a method, so that a fault is one line.

It works as fused kernels do: tiles of queries against tiles of keys, a running maximum and sum,
and a backward pass that recomputes the weights from lse. Nothing here is fast. What matters is
that each decision a kernel takes (which head, which scale, when to rescale, what an empty row
gives) stands in a method of its own that a `Fault` can replace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from attnx.plugin import Gradients
from attnx_conformance._visibility import Grid

from ._drops import Drops
from ._sight import Call
from ._slants import Slants

__all__ = ["Kernel", "State", "T"]


class State(NamedTuple):
    """What a row carries from tile to tile: maximum `(N, H, r, 1)`, sum alike, and `P @ v`."""

    m: Any
    total: Any
    acc: Any


def T(array: Any) -> Any:
    """The last two axes swapped."""
    return np.swapaxes(array, -1, -2)


class Kernel(Slants, Drops):
    """Attention by tiles; `attention` and `attention_vjp` are called as attnx's own."""

    block_q, block_k = 64, 32

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """The output, and lse where it is asked for."""
        with np.errstate(all="ignore"):
            c = self.prepare(q, k, v, options)
            out, lse = self.forward(c)
            made = self.give(c, "out", self.pack(c, out)), self.give_lse(c, lse)
        return made if options.get("return_lse") else made[0]

    def attention_vjp(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """The same, and its pullback."""
        with np.errstate(all="ignore"):
            c = self.prepare(q, k, v, options)
            out, lse = self.forward(c)
            kept = self.give(c, "out", self.pack(c, out))
            made = (kept, self.give_lse(c, lse)) if options.get("return_lse") else kept

        def pullback(d_out: Any, d_lse: Any = None) -> Gradients:
            with np.errstate(all="ignore"):
                stored = self.unpack(c, "out", kept).astype(c.high)
                return self.backward(c, stored, lse, d_out, d_lse)

        return made, pullback

    # From the caller's arrays to canonical ones, and back

    def prepare(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Call:
        """Everything that is settled before the first tile."""
        given = self.options(dict(options))
        arrays = {"q": q, "k": k, "v": v, "bias": self.added(given), "sinks": given.get("sinks")}
        layout, rank = given.get("layout", "bhsd"), q.ndim
        moved = layout == "bshd" and rank > 2
        head, length = (-2, -3) if moved else (-3, -2)
        Hq, Hk = (q.shape[head], k.shape[head]) if rank > 2 else (1, 1)
        grid = Grid(q.shape[:-3], Hq, q.shape[length], k.shape[length], rank)
        c = Call(given, arrays, grid, Hk, q.shape[-1], v.shape[-1], q.dtype,
                 self.precision(q.dtype), layout)  # fmt: skip
        c.scale = self.scale_of(c, given.get("scale"))
        c.softcap = self.softcap_of(c, given.get("softcap"))
        c.visible = self.visible(c)
        heads = self.heads(c)
        c.q = self.load(c, "q", self.unpack(c, "q", q))
        c.k = self.load(c, "k", self.unpack(c, "k", k))[:, heads]
        c.v = self.load(c, "v", self.unpack(c, "v", v))[:, heads]
        if arrays["bias"] is not None:
            c.bias = self.bias_of(c, arrays["bias"])
        if arrays["sinks"] is not None:
            c.sinks = self.sinks_of(c, arrays["sinks"])
        self.clean(c)
        return c

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options that the kernel heeds: all."""
        return given

    def clean(self, c: Call) -> None:
        """Nothing: every product below selects."""

    def precision(self, low: Any) -> Any:
        """The dtype of the accumulator."""
        return np.float64 if low == np.float64 else np.float32

    def load(self, c: Call, name: str, array: Any) -> Any:
        """An operand in the accumulator's dtype."""
        return array.astype(c.high)

    def unpack(self, c: Call, name: str, array: Any) -> Any:
        """To `(N, H, L, ...)`."""
        if c.grid.rank == 2:
            return array.reshape(1, 1, *array.shape)
        at = len(c.grid.batch)
        if c.layout == "bshd":
            array = np.swapaxes(array, at, at + 1)
        return array.reshape(c.grid.N, *array.shape[at:])

    def pack(self, c: Call, array: Any) -> Any:
        """From `(N, H, L, ...)` to the caller's rank and layout."""
        if c.grid.rank == 2:
            return array[0, 0]
        array = array.reshape(*c.grid.batch, *array.shape[1:])
        at = len(c.grid.batch)
        return np.swapaxes(array, at, at + 1) if c.layout == "bshd" else array

    def give(self, c: Call, name: str, array: Any) -> Any:
        """A result in its dtype."""
        like = c.arrays.get(name[1:]) if name in ("dbias", "dsinks") else None
        return array.astype(c.low if like is None else like.dtype)

    def give_lse(self, c: Call, lse: Any) -> Any:
        """The logsumexp in the accumulator's dtype."""
        return self.pack(c, lse)

    def scale_of(self, c: Call, given: Any) -> float:
        """The scale, by default of the true D."""
        return 1.0 / math.sqrt(c.D) if given is None else float(given)

    def softcap_of(self, c: Call, given: Any) -> float | None:
        """The cap."""
        return None if given is None else float(given)

    def heads(self, c: Call) -> Any:
        """Which key head each query head reads."""
        return np.arange(c.grid.Hq) // c.g

    def bias_of(self, c: Call, bias: Any) -> Any:
        """The bias over the whole grid."""
        return self.spread(c, bias.astype(c.high))

    def sinks_of(self, c: Call, sinks: Any) -> Any:
        """The sinks as `(Hq, 1, 1)`."""
        return sinks.astype(c.high)[:, None, None]

    # Forward

    def row_blocks(self, c: Call) -> Iterable[slice]:
        """Tiles of queries."""
        return [
            slice(a, min(a + self.block_q, c.grid.Lq)) for a in range(0, c.grid.Lq, self.block_q)
        ]

    def key_blocks(self, c: Call, rows: slice) -> Iterable[slice]:
        """Tiles of keys."""
        return [
            slice(a, min(a + self.block_k, c.grid.Lk)) for a in range(0, c.grid.Lk, self.block_k)
        ]

    def forward(self, c: Call) -> tuple[Any, Any]:
        """Output and lse, `(N, Hq, Lq, Dv)` and `(N, Hq, Lq)`."""
        N, Hq, Lq, _ = c.grid.flat
        out, lse = np.zeros((N, Hq, Lq, c.Dv), c.high), np.zeros((N, Hq, Lq), c.high)
        for rows in self.row_blocks(c):
            state = self.start(c, rows)
            for cols in self.key_blocks(c, rows):
                state = self.step(c, state, rows, cols)
            out[:, :, rows], lse[:, :, rows] = self.finish(c, state, rows)
        return out, lse

    def start(self, c: Call, rows: slice) -> State:
        """Nothing seen yet."""
        shape = (*c.grid.flat[:2], rows.stop - rows.start, 1)
        m = np.full(shape, -np.inf, c.high)
        return State(m, np.zeros(shape, c.high), np.zeros((*shape[:-1], c.Dv), c.high))

    def step(self, c: Call, state: State, rows: slice, cols: slice) -> State:
        """One tile of keys more."""
        s = self.scores(c, rows, cols)
        m = self.running_max(c, state.m, s)
        P = self.exp(c, s - self.safe(m))
        total, acc = self.carry(c, state, m)
        seen, dropped = c.visible[:, :, rows, cols], self.drop(c, P, rows, cols)
        acc = self.add_values(c, acc, dropped, c.v[:, :, cols], seen)
        return State(m, self.add_sum(c, total, P), acc)

    def scores(self, c: Call, rows: slice, cols: slice) -> Any:
        """Scale, cap, bias and mask, in this order (S2)."""
        s = self.cap(c, self.scaled(c, rows, cols))
        if c.bias is not None:
            s = self.add_bias(c, s, rows, cols)
        return self.hide(c, self.slant(c, s, rows, cols), rows, cols)

    def scaled(self, c: Call, rows: slice, cols: slice) -> Any:
        """Scaled products."""
        return c.high(c.scale) * self.dot(c, c.q[:, :, rows], c.k[:, :, cols])

    def dot(self, c: Call, q: Any, k: Any) -> Any:
        """q · k."""
        return q @ T(k)

    def cap(self, c: Call, s: Any) -> Any:
        """The softcap."""
        return s if c.softcap is None else c.high(c.softcap) * np.tanh(s / c.high(c.softcap))

    def add_bias(self, c: Call, s: Any, rows: slice, cols: slice) -> Any:
        """The bias."""
        return s + c.bias[:, :, rows, cols]

    def hide(self, c: Call, s: Any, rows: slice, cols: slice) -> Any:
        """By selection."""
        return np.where(c.visible[:, :, rows, cols], s, c.high(-np.inf))

    def running_max(self, c: Call, m: Any, s: Any) -> Any:
        """The greatest score so far."""
        return np.maximum(m, s.max(axis=-1, keepdims=True))

    def safe(self, m: Any) -> Any:
        """A shift that makes no NaN of rows whose scores are all -inf so far."""
        return np.where(np.isneginf(m), m.dtype.type(0), m)

    def exp(self, c: Call, x: Any) -> Any:
        """The exponential."""
        return np.exp(x)

    def factor(self, c: Call, old: Any, new: Any) -> Any:
        """What earlier sums are worth under a new maximum."""
        return np.where(np.isneginf(old), c.high(0), np.exp(self.safe(old) - self.safe(new)))

    def carry(self, c: Call, state: State, m: Any) -> tuple[Any, Any]:
        """Earlier sums under a new maximum."""
        factor = self.factor(c, state.m, m)
        return state.total * factor, state.acc * factor

    def add_sum(self, c: Call, total: Any, P: Any) -> Any:
        """The denominator."""
        return total + P.sum(axis=-1, keepdims=True)

    def add_values(self, c: Call, acc: Any, P: Any, v: Any, seen: Any) -> Any:
        """The numerator."""
        return acc + self.product(c, self.rounded(c, P), v, seen)

    def rounded(self, c: Call, P: Any) -> Any:
        """Weights as the product with values takes them."""
        return P

    def product(self, c: Call, weights: Any, operand: Any, seen: Any) -> Any:
        """`weights @ operand` over visible pairs, so that 0 * NaN never happens (S4.2)."""
        bad = ~np.isfinite(operand)
        if not bad.any():
            return weights @ operand
        total = weights @ np.where(bad, c.high(0), operand)
        touched = seen.astype(np.float32) @ bad.astype(np.float32) > 0
        return np.where(touched, c.high(np.nan), total)

    def add_sinks(self, c: Call, state: State, rows: slice) -> State:
        """One more logit in the denominator, once a row."""
        if c.sinks is None:
            return state
        m = np.maximum(state.m, c.sinks)
        total, acc = self.carry(c, state, m)
        return State(m, total + np.exp(c.sinks - m), acc)

    def finish(self, c: Call, state: State, rows: slice) -> tuple[Any, Any]:
        """Rows of output and lse."""
        m, total, acc = self.add_sinks(c, state, rows)
        out, lse = self.normalise(c, total, acc), self.log_sum(c, m, total)
        return self.fill(c, out, lse, rows)

    def normalise(self, c: Call, total: Any, acc: Any) -> Any:
        """By the denominator."""
        return acc / total

    def log_sum(self, c: Call, m: Any, total: Any) -> Any:
        """The natural logarithm of the sum."""
        return (np.log(total) + self.safe(m))[..., 0]

    def fill(self, c: Call, out: Any, lse: Any, rows: slice) -> tuple[Any, Any]:
        """What rows that see nothing give (S3.7)."""
        live = c.visible[:, :, rows].any(axis=-1)
        return np.where(live[..., None], out, c.high(0)), np.where(live, lse, self.empty_lse(c))

    def empty_lse(self, c: Call) -> Any:
        """The lse of a row that sees nothing."""
        return c.high(-np.inf) if c.sinks is None else c.sinks[..., 0]

    # Backward

    def backward(self, c: Call, out: Any, lse: Any, d_out: Any, d_lse: Any) -> Gradients:
        """Weights are recomputed from lse, tile by tile."""
        c.backward = True
        d_out, d_lse = self.cotangents(c, d_out, d_lse)
        delta = self.delta(c, d_out, out)
        sums = {name: np.zeros((*c.grid.flat[:2], length, size), c.high)
                for name, length, size in (
                    ("dq", c.grid.Lq, c.D), ("dk", c.grid.Lk, c.D), ("dv", c.grid.Lk, c.Dv),
                )}  # fmt: skip
        if c.bias is not None:
            sums["dbias"] = np.zeros(c.grid.flat, c.high)
        for rows in self.row_blocks(c):
            for cols in self.key_blocks(c, rows):
                self.tile(c, sums, rows, cols, lse[:, :, rows, None], d_out[:, :, rows],
                          delta[:, :, rows, None], d_lse[:, :, rows, None])  # fmt: skip
        made = {
            name: self.pack(c, sums["dq"])
            if name == "dq"
            else self.pack(c, self.fold_heads(c, name, sums[name]))
            for name in ("dq", "dk", "dv")
        }
        if c.bias is not None:
            made["dbias"] = self.fold_bias(c, sums["dbias"], c.arrays["bias"].shape)
        if c.sinks is not None:
            made["dsinks"] = self.sinks_gradient(c, lse, delta, d_lse)
        return Gradients(**{name[1:]: self.give(c, name, grad) for name, grad in made.items()})

    def cotangents(self, c: Call, d_out: Any, d_lse: Any) -> tuple[Any, Any]:
        """Those of rows that see nothing are ignored (S3.7)."""
        d_out = self.load(c, "d_out", self.unpack(c, "d_out", d_out))
        d_out = np.where(c.live[..., None], d_out, c.high(0))
        if d_lse is None:
            return d_out, np.zeros(c.grid.flat[:3], c.high)
        d_lse = self.unpack(c, "d_lse", d_lse).astype(c.high)
        return d_out, d_lse if c.sinks is not None else np.where(c.live, d_lse, c.high(0))

    def delta(self, c: Call, d_out: Any, out: Any) -> Any:
        """Of the stored output."""
        return (d_out * out).sum(axis=-1)

    def tile(self, c: Call, sums: dict[str, Any], rows: slice, cols: slice, lse: Any, d_out: Any,
             delta: Any, d_lse: Any) -> None:  # fmt: skip
        """One tile's part of every gradient."""
        seen = c.visible[:, :, rows, cols]
        P = self.weights(c, self.scores(c, rows, cols), lse, seen)
        dropped = self.drop(c, P, rows, cols)
        dP = self.drop_gradient(c, self.dot(c, d_out, c.v[:, :, cols]), rows, cols)
        dS = np.where(seen, self.dS(c, P, dP, delta, d_lse), c.high(0))
        dR = np.where(seen, self.through_cap(c, dS, rows, cols), c.high(0))
        scale, q, k = c.high(c.scale), c.q[:, :, rows], c.k[:, :, cols]
        self.add(c, sums, "dq", rows, scale * self.product(c, dR, k, seen))
        self.add(c, sums, "dk", cols, scale * self.product(c, T(dR), q, T(seen)))
        self.add(c, sums, "dv", cols, self.product(c, T(dropped), d_out, T(seen)))
        if c.bias is not None:
            sums["dbias"][:, :, rows, cols] = self.bias_gradient(c, dS, dR)

    def weights(self, c: Call, s: Any, lse: Any, seen: Any) -> Any:
        """Recomputed from lse."""
        return np.where(seen, self.exp(c, s - lse), c.high(0))

    def dS(self, c: Call, P: Any, dP: Any, delta: Any, d_lse: Any) -> Any:
        """The gradient of the scores that the softmax sees."""
        return P * (dP - delta + d_lse)

    def through_cap(self, c: Call, dS: Any, rows: slice, cols: slice) -> Any:
        """The gradient of the scaled products."""
        return dS if c.softcap is None else dS * self.slope(c, self.scaled(c, rows, cols))

    def slope(self, c: Call, s: Any) -> Any:
        """The derivative of the cap."""
        return 1 - np.tanh(s / c.high(c.softcap)) ** 2

    def add(self, c: Call, sums: dict[str, Any], name: str, at: slice, part: Any) -> None:
        """A tile's part to a gradient."""
        sums[name][:, :, at] += part

    def bias_gradient(self, c: Call, dS: Any, dR: Any) -> Any:
        """Of the bias, before it is folded."""
        return dS

    def fold_heads(self, c: Call, name: str, grad: Any) -> Any:
        """Summed over each group."""
        folded = np.zeros((c.grid.N, c.Hk, *grad.shape[2:]), c.high)
        for head, key_head in enumerate(self.heads(c)):
            folded[:, key_head] += grad[:, head]
        return folded

    def fold_bias(self, c: Call, grad: Any, shape: tuple[int, ...]) -> Any:
        """Summed over every axis that the bias was broadcast along."""
        return c.grid.fold(grad, shape)

    def sinks_gradient(self, c: Call, lse: Any, delta: Any, d_lse: Any) -> Any:
        """By S6.3."""
        p_sink = np.where(c.live, np.exp(c.sinks[..., 0] - lse), c.high(1))
        return (p_sink * (d_lse - delta)).sum(axis=(0, 2))
