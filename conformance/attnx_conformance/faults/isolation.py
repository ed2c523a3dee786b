"""Leaks: what a query cannot see reaches it after all, mostly as 0 * NaN (S4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("isolation")


def _plain(when: Callable[[Call, Any, Any], bool]) -> Any:
    """A plain matrix product in some places: 0 * NaN is NaN."""

    def product(self: Kernel, c: Call, weights: Any, operand: Any, seen: Any) -> Any:
        if when(c, weights, operand):
            return weights @ operand
        return Kernel.product(self, c, weights, operand, seen)

    return product


def _values(self: Kernel, c: Call, acc: Any, P: Any, v: Any, seen: Any) -> Any:
    """Forward: P @ v as it is."""
    return acc + P @ v


def _only_nan(self: Kernel, c: Call, weights: Any, operand: Any, seen: Any) -> Any:
    """NaN is selected away, infinity is not."""
    if np.isnan(operand).any():
        return Kernel.product(self, c, weights, operand, seen)
    return weights @ operand


def _additive(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """-inf is added to hidden scores: NaN stays NaN, and +inf makes one."""
    return s + np.where(c.visible[:, :, rows, cols], c.high(0), c.high(-np.inf))


def _past(limit: int) -> Any:
    """Tiles past a limit take the fast route, which selects nothing."""

    def step(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
        c.notes["far"] = cols.start >= limit
        return Kernel.step(self, c, state, rows, cols)

    return step


def _far_values(self: Kernel, c: Call, acc: Any, P: Any, v: Any, seen: Any) -> Any:
    if c.notes.get("far"):
        return acc + P @ v
    return Kernel.add_values(self, c, acc, P, v, seen)


def _by_turn(which: str) -> dict[str, Any]:
    """The three products of a backward tile come in turn: dq, dk, dv."""

    def tile(self: Kernel, c: Call, *more: Any) -> None:
        c.notes["turn"] = 0
        Kernel.tile(self, c, *more)

    def product(self: Kernel, c: Call, weights: Any, operand: Any, seen: Any) -> Any:
        if c.backward and "turn" in c.notes:
            name = ("dq", "dk", "dv")[c.notes["turn"]]
            c.notes["turn"] += 1
            if name == which:
                return weights @ operand
        return Kernel.product(self, c, weights, operand, seen)

    return {"tile": tile, "product": product}


def _cleaned(*names: str) -> Any:
    """Unseen keys are zeroed and nothing is selected: what some rows see reaches all."""

    def clean(self: Kernel, c: Call) -> None:
        rows = c.visible.reshape(c.grid.N, c.Hk, c.g * c.grid.Lq, c.grid.Lk)
        seen = rows.any(axis=2).repeat(c.g, axis=1)
        for name in names:
            setattr(c, name, np.where(seen[..., None], getattr(c, name), c.high(0)))

    return clean


def _cleaned_by(pick: Callable[[Call], Any]) -> Any:
    """Keys are zeroed by one head's or one entry's visibility."""

    def clean(self: Kernel, c: Call) -> None:
        if c.visible.size:
            seen = np.broadcast_to(pick(c), c.v.shape[:3])
            c.v = np.where(seen[..., None], c.v, c.high(0))

    return clean


def _swallowed(*names: str) -> Any:
    """NaN in an operand becomes 0, where it is seen too."""

    def load(self: Kernel, c: Call, name: str, array: Any) -> Any:
        array = Kernel.load(self, c, name, array)
        return (
            np.nan_to_num(array, nan=0.0, posinf=np.inf, neginf=-np.inf) if name in names else array
        )

    return load


def _swallowed_scores(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    s = Kernel.scores(self, c, rows, cols)
    return np.where(np.isnan(s), c.high(-np.inf), s)


def _tile_max(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """NaN in one row makes the maximum of its whole tile NaN."""
    top = Kernel.running_max(self, c, m, s)
    return np.where(np.isnan(top).any(axis=-2, keepdims=True), c.high(np.nan), top)


def _max_of_all(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """The maximum is taken before the mask: a loud hidden key drowns the live ones."""
    raw = self.cap(c, self.scaled(c, rows, cols))
    s = self.scores(c, rows, cols)
    loud = np.nan_to_num(raw, nan=-np.inf, posinf=-np.inf).max(axis=-1, keepdims=True)
    m = np.where(np.isneginf(s.max(axis=-1, keepdims=True)), state.m,
                 np.maximum(self.running_max(c, state.m, s), loud))  # fmt: skip
    P = self.exp(c, s - self.safe(m))
    total, acc = self.carry(c, state, m)
    seen, dropped = c.visible[:, :, rows, cols], self.drop(c, P, rows, cols)
    return State(m, self.add_sum(c, total, P),
                 self.add_values(c, acc, dropped, c.v[:, :, cols], seen))  # fmt: skip


def _padding_gradient(self: Kernel, c: Call, name: str, grad: Any) -> Any:
    """Gradients of unseen keys are a rounding away from 0."""
    folded = Kernel.fold_heads(self, c, name, grad)
    return np.where(folded == 0, c.high(1e-7), folded)


def _raw_rows(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """d_out of empty rows takes part."""
    made = Kernel.cotangents(self, c, d_out, d_lse)
    return self.unpack(c, "d_out", d_out).astype(c.high), made[1]


FAULTS: tuple[Fault, ...] = (
    fault("leak-values", "0 * NaN of hidden values", add_values=_values),
    fault("leak-infinite-values", "0 * inf of hidden values, where no NaN is", product=_only_nan),
    fault("leak-keys", "NaN of hidden keys stays when -inf is added", hide=_additive),
    fault("leak-everywhere", "every product is plain", product=_plain(lambda c, w, x: True)),
    fault("leak-past-512", "hidden values leak past 512 keys", step=_past(512),
          add_values=_far_values),
    fault("leak-past-256", "hidden values leak past 256 keys", step=_past(256),
          add_values=_far_values),
    fault("leak-in-long-calls", "calls of 512 keys and more take a route that does not select",
          product=_plain(lambda c, w, x: c.grid.Lk >= 512)),
    fault("leak-at-one-query", "a decoding step does not select",
          product=_plain(lambda c, w, x: c.grid.Lq == 1)),
    fault("leak-with-softcap", "the route of capped scores does not select",
          product=_plain(lambda c, w, x: c.softcap is not None)),
    fault("leak-of-later-entries", "only batch entry 0 is selected",
          product=lambda self, c, weights, operand, seen: np.concatenate([
              Kernel.product(self, c, weights[:1], operand[:1], seen[:1]),
              weights[1:] @ operand[1:]])),
    fault("leak-in-dq", "0 * NaN of hidden keys in dq", **_by_turn("dq")),
    fault("leak-in-dk", "0 * NaN of rows that do not see the key in dk", **_by_turn("dk")),
    fault("leak-in-dv", "0 * NaN of cotangents in dv", **_by_turn("dv")),
    fault("leak-unseen-keys-alone", "unseen keys are zeroed, and nothing is selected",
          clean=_cleaned("k", "v"), product=_plain(lambda c, w, x: True)),
    fault("leak-values-not-cleaned", "unseen keys are zeroed, their values are not",
          clean=_cleaned("k"), product=_plain(lambda c, w, x: True)),
    fault("cleaned-by-first-entry", "values that entry 0 does not see are zeroed",
          clean=_cleaned_by(lambda c: c.visible[:1].any(axis=(1, 2), keepdims=True)[:, :, 0])),
    fault("cleaned-by-first-head", "values that head 0 does not see are zeroed",
          clean=_cleaned_by(lambda c: c.visible[:, :1].any(axis=2))),
    fault("swallows-nan-values", "NaN in v becomes 0 where it is seen", load=_swallowed("v")),
    fault("swallows-nan-keys", "NaN in k becomes 0 where it is seen", load=_swallowed("k")),
    fault("swallows-nan-queries", "NaN in q becomes 0", load=_swallowed("q")),
    fault("swallows-nan-scores", "NaN scores are taken for hidden", scores=_swallowed_scores),
    fault("nan-spreads-over-a-tile", "NaN in a row reaches the rows of its tile",
          running_max=_tile_max),
    fault("hidden-max", "the maximum is taken before the mask", step=_max_of_all),
    fault("unseen-gradient-not-zero", "gradients of unseen keys are 1e-7",
          fold_heads=_padding_gradient),
    fault("empty-row-cotangent", "d_out of empty rows reaches dsinks and dv",
          cotangents=_raw_rows, product=_plain(lambda c, w, x: c.backward)),
)  # fmt: skip
