"""Faults of dropout: it is applied at the wrong place, drawn wrongly, or lost on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._drops import LANES, WORD, Drops
from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("dropout")


# Where it is applied


def _as_it_is(self: Kernel, c: Call, array: Any, rows: slice, cols: slice) -> Any:
    return array


def _forward_alone(self: Kernel, c: Call, P: Any, rows: slice, cols: slice) -> Any:
    return P if c.backward else Kernel.drop(self, c, P, rows, cols)


def _dropped_scores(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    """Before the softmax: a score becomes 0."""
    s = Kernel.scores(self, c, rows, cols)
    return np.where(c.visible[:, :, rows, cols], Kernel.drop(self, c, s, rows, cols), s)


def _step_dropped_first(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """Dropped, then summed: the row is normalised by what was kept, and lse is that of it."""
    made = Kernel.step(self, c, state, rows, cols)
    if c.dropout is None:
        return made
    P = self.exp(c, self.scores(c, rows, cols) - self.safe(made.m))
    total, _ = self.carry(c, state, made.m)
    return made._replace(total=self.add_sum(c, total, self.drop(c, P, rows, cols)))


def _step_kept_sum(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """The output is normalised by what was kept; lse is right."""
    first = cols.start == 0
    before = state._replace(total=np.zeros_like(state.total) if first else c.notes["kept"])
    c.notes["kept"] = _step_dropped_first(self, c, before, rows, cols).total
    return Kernel.step(self, c, state, rows, cols)


def _by_kept_sum(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    if c.dropout is None or "kept" not in c.notes:
        return Kernel.normalise(self, c, total, acc)
    kept = c.notes.pop("kept")
    return acc / np.where(kept > 0, kept, c.high(1))


def _lse_of_output(self: Kernel, c: Call, m: Any, total: Any) -> Any:
    """lse is that of the scaled weights."""
    lse = Kernel.log_sum(self, c, m, total)
    return lse if c.dropout is None else lse + c.high(np.log(self.gain(c)))


def _undropped_delta(self: Kernel, c: Call, d_out: Any, out: Any) -> Any:
    """delta of an output that was never dropped."""
    given, c.given = c.given, {**c.given, "dropout": None}
    out = self.forward(c)[0]
    c.given = given
    return Kernel.delta(self, c, d_out, out)


def _only_when(when: Callable[[Call], Any]) -> Any:
    """A route of its own for some calls, which knows no dropout."""

    def prepare(self: Kernel, q: Any, k: Any, v: Any, given: dict[str, Any]) -> Call:
        c = Kernel.prepare(self, q, k, v, given)
        if not when(c):
            c.given = {**c.given, "dropout": None}
        return c

    return prepare


# What is drawn


def _backward_ranges(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    """The backward pass counts from the corner of its tile."""
    if not c.backward:
        return Kernel.ranges(self, c, rows, cols)
    return _local(rows=True, cols=True)(self, c, rows, cols)


def _backward_key(self: Kernel, c: Call) -> tuple[int, int]:
    """A generator's state has moved on."""
    low, high = Kernel.key(self, c)
    return (low + c.backward) & WORD, high


def _local(*, rows: bool = False, cols: bool = False) -> Any:
    """Indices that start anew in each tile."""

    def ranges(self: Kernel, c: Call, at_rows: slice, at_cols: slice) -> Any:
        b, h, i, j = Kernel.ranges(self, c, at_rows, at_cols)
        i = slice(0, i.stop - i.start) if rows else i
        return b, h, i, slice(0, j.stop - j.start) if cols else j

    return ranges


def _counter(rule: Callable[[Call, Any, Any, Any, Any], tuple[Any, ...]]) -> Any:
    """Another counter from `b, h, i, group`."""

    def counter(self: Kernel, c: Call, b: Any, h: Any, i: Any, group: Any) -> list[Any]:
        return [word & WORD for word in rule(c, b, h, i, group)]

    return counter


def _shifts(rule: Callable[[int, int, int, int], tuple[int, ...]]) -> Any:
    return lambda self, c: rule(*Kernel.shifts(self, c))


def _entry_of_last_axis(c: Call, b: Any, h: Any, i: Any, group: Any) -> tuple[Any, ...]:
    """Of two batch axes, the last one counts."""
    return group, i, h, b % np.uint64(c.grid.batch[-1] if len(c.grid.batch) > 1 else 1 << 32)


def _lanes(rule: Callable[[Any], Any]) -> Any:
    return lambda self, words: rule(Drops.lanes(self, words))


def _rounded_threshold(self: Kernel, c: Call) -> int:
    return min(round(float(c.dropout.p) * 65536), 65535)


def _without_tail(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    """Keys past the last whole counter are never dropped."""
    whole = c.grid.Lk // LANES * LANES
    return Kernel.keeps(self, c, rows, cols) | (np.arange(cols.start, cols.stop) >= whole)


FAULTS: tuple[Fault, ...] = (
    fault("dropout-ignored", "the option is dropped instead", drop=_as_it_is,
          drop_gradient=_as_it_is),
    fault("dropout-not-in-backward", "the gradient is that of a call without dropout",
          drop=_forward_alone, drop_gradient=_as_it_is),
    fault("dropout-not-in-dv", "dv has the weights before dropout", drop=_forward_alone),
    fault("dropout-not-in-dS", "the gradient of P passes dropped elements",
          drop_gradient=_as_it_is),
    fault("dropout-of-scores", "scores are dropped, before the softmax", scores=_dropped_scores,
          drop=_as_it_is, drop_gradient=_as_it_is),
    fault("dropout-before-normaliser", "a row and its lse are normalised by what was kept",
          step=_step_dropped_first),
    fault("dropout-renormalised", "a row is normalised by what was kept; lse is right",
          step=_step_kept_sum, normalise=_by_kept_sum),
    fault("dropout-moves-lse", "lse is that of the scaled weights", log_sum=_lse_of_output),
    fault("dropout-delta-undropped", "delta is that of the output without dropout",
          delta=_undropped_delta),
    fault("dropout-not-at-decoding", "a call of one query knows no dropout",
          prepare=_only_when(lambda c: c.grid.Lq != 1)),
    fault("dropout-not-beside-a-mask", "a masked call knows no dropout",
          prepare=_only_when(lambda c: c.mask is None)),
    fault("dropout-not-beside-causal", "a causal call knows no dropout",
          prepare=_only_when(lambda c: c.causal is False)),
    fault("dropout-unscaled", "what is kept is not scaled", gain=lambda self, c: 1.0),
    fault("dropout-scaled-by-p", "what is kept is scaled by 1 / (1 - p), p as it was given",
          gain=lambda self, c: 1 / (1 - c.dropout.p)),
    fault("dropout-backward-scale", "the gradient is scaled by 1 - p instead",
          gain=lambda self, c: 1 / Kernel.gain(self, c) if c.backward else Kernel.gain(self, c)),
    fault("dropout-keeps-p", "p is taken for the probability of being kept",
          threshold=lambda self, c: -Kernel.threshold(self, c) % 65536),
    fault("dropout-threshold-rounded", "p is rounded to a lane, not cut off",
          threshold=_rounded_threshold),
    fault("dropout-threshold-dropped", "a lane equal to the threshold is dropped",
          keeps=lambda self, c, rows, cols: self.drawn(c, rows, cols) > self.threshold(c)),
    fault("dropout-threshold-byte", "8 of the 16 bits are compared",
          keeps=lambda self, c, rows, cols: self.drawn(c, rows, cols) >> 8
          >= self.threshold(c) >> 8),
    fault("dropout-tail-kept", "keys past the last whole counter are kept", keeps=_without_tail),
    fault("dropout-backward-blocks", "the backward pass counts from the corner of its tile",
          ranges=_backward_ranges),
    fault("dropout-backward-next", "the backward pass draws what comes next", key=_backward_key),
    fault("dropout-query-of-tile", "queries are counted from the start of their tile",
          ranges=_local(rows=True)),
    fault("dropout-key-of-tile", "keys are counted from the start of their tile",
          ranges=_local(cols=True)),
    fault("dropout-heads-alike", "every head drops the same elements",
          counter=_counter(lambda c, b, h, i, group: (group, i, 0 * h, b))),
    fault("dropout-heads-of-keys", "the heads of a group drop the same elements",
          counter=_counter(lambda c, b, h, i, group: (group, i, h // c.g, b))),
    fault("dropout-batch-alike", "every batch entry drops the same elements",
          counter=_counter(lambda c, b, h, i, group: (group, i, h, 0 * b))),
    fault("dropout-batch-last-axis", "of two batch axes the last alone is counted",
          counter=_counter(_entry_of_last_axis)),
    fault("dropout-batch-and-head", "b and h share a word, b * Hq + h",
          counter=_counter(lambda c, b, h, i, group: (
              group, i, b * np.uint64(c.grid.Hq) + h, 0 * b))),
    fault("dropout-queries-and-heads", "i and h stand in each other's word",
          counter=_counter(lambda c, b, h, i, group: (group, h, i, b))),
    fault("dropout-offset-ignored", "the call is taken for the whole",
          shifts=_shifts(lambda b, h, i, j: (0, 0, 0, 0))),
    fault("dropout-offset-of-sequence", "offsets of batch and heads are ignored",
          shifts=_shifts(lambda b, h, i, j: (0, 0, i, j))),
    fault("dropout-offset-of-keys", "the offset of keys is ignored",
          shifts=_shifts(lambda b, h, i, j: (b, h, i, 0))),
    fault("dropout-offset-in-counters", "the offset of keys is taken for one of counters",
          shifts=_shifts(lambda b, h, i, j: (b, h, i, LANES * j))),
    fault("dropout-high-half-first", "of a word the high half comes first",
          lanes=_lanes(lambda lanes: lanes[[1, 0, 3, 2, 5, 4, 7, 6]])),
    fault("dropout-low-halves-first", "the low halves of the four words, then the high ones",
          lanes=_lanes(lambda lanes: lanes[[0, 2, 4, 6, 1, 3, 5, 7]])),
    fault("dropout-seed-low-word", "the seed's high word is ignored",
          key=lambda self, c: (Kernel.key(self, c)[0], 0)),
    fault("dropout-seed-words-swapped", "the seed's high word comes first",
          key=lambda self, c: Kernel.key(self, c)[::-1]),
    fault("dropout-seed-signed", "the seed is cut to 63 bits",
          key=lambda self, c: (Kernel.key(self, c)[0], Kernel.key(self, c)[1] & 0x7FFFFFFF)),
    fault("dropout-seven-rounds", "Philox of seven rounds", rounds=7),
)  # fmt: skip
