"""Faults of the online softmax: tails, maxima, rescaling, and the merge of split keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("softmax")
maxima = of_kind("maxima")


def _whole_tiles(self: Kernel, c: Call, rows: slice) -> Any:
    """Keys past the last whole tile are skipped, if there is a whole one."""
    blocks = list(Kernel.key_blocks(self, c, rows))
    whole = [cols for cols in blocks if cols.stop - cols.start == self.block_k]
    return whole or blocks


def _whole_rows(self: Kernel, c: Call) -> Any:
    """Queries past the last whole tile are never computed."""
    blocks = list(Kernel.row_blocks(self, c))
    return [rows for rows in blocks if rows.stop - rows.start == self.block_q] or blocks


def _up_to(limit: int) -> Any:
    """Keys past a limit are skipped."""

    def key_blocks(self: Kernel, c: Call, rows: slice) -> Any:
        return [cols for cols in Kernel.key_blocks(self, c, rows) if cols.start < limit]

    return key_blocks


def _overlapping(self: Kernel, c: Call, rows: slice) -> Any:
    """The last tile is moved back to be whole: some keys are counted twice."""
    blocks = list(Kernel.key_blocks(self, c, rows))
    if len(blocks) > 1:
        blocks[-1] = slice(max(0, blocks[-1].stop - self.block_k), blocks[-1].stop)
    return blocks


def _first_twice(self: Kernel, c: Call, rows: slice) -> Any:
    """The prologue loads the first tile, and so does the loop."""
    blocks = list(Kernel.key_blocks(self, c, rows))
    return [*blocks[:1], *blocks] if len(blocks) > 1 else blocks


def _padding_counts(self: Kernel, c: Call, total: Any, P: Any) -> Any:
    """The tail is padded with zeros, whose scores are 0 and count in the denominator."""
    total = Kernel.add_sum(self, c, total, P)
    missing = -P.shape[-1] % 8
    return total + missing * np.exp(-self.safe(c.notes["m"]))


def _noted(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    c.notes["m"] = Kernel.running_max(self, c, m, s)
    return c.notes["m"]


def _no_max(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """Scores are not shifted; NaN still spreads."""
    return np.where(np.isneginf(np.maximum(m, s.max(axis=-1, keepdims=True))), m, c.high(0))


def _first_max(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """The maximum of the first tile serves all."""
    return np.where(np.isneginf(m), s.max(axis=-1, keepdims=True), m)


def _first_score(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """The shift is the first score, not the greatest."""
    first = np.where(np.isneginf(s[..., :1]), s.max(axis=-1, keepdims=True), s[..., :1])
    return np.where(np.isneginf(m), first, m)


def _floor(value: float) -> Any:
    """The running maximum starts at a finite number."""

    def start(self: Kernel, c: Call, rows: slice) -> State:
        state = Kernel.start(self, c, rows)
        return state._replace(m=np.full_like(state.m, value))

    return start


def _carry(total: bool, acc: bool) -> Any:
    """One of the two sums is not rescaled."""

    def carry(self: Kernel, c: Call, state: State, m: Any) -> tuple[Any, Any]:
        factor = self.factor(c, state.m, m)
        return state.total * (factor if total else 1), state.acc * (factor if acc else 1)

    return carry


def _upside_down(self: Kernel, c: Call, old: Any, new: Any) -> Any:
    """exp(new - old) for exp(old - new)."""
    return np.where(np.isneginf(old), c.high(0), np.exp(self.safe(new) - self.safe(old)))


def _lazy(self: Kernel, c: Call, old: Any, new: Any) -> Any:
    """Small moves of the maximum are not worth a rescale; but the new maximum is used."""
    factor = Kernel.factor(self, c, old, new)
    return np.where((factor > 0.5) & ~np.isneginf(old), c.high(1), factor)


def _last_unnormalised(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """The output is normalised before the last tile, which is added as it is."""
    last = cols.stop == c.grid.Lk and cols.start > 0
    if last:
        safe = np.where(state.total > 0, state.total, c.high(1))
        s = self.scores(c, rows, cols)
        m = self.running_max(c, state.m, s)
        total, acc = self.carry(c, state, m)
        P = self.exp(c, s - self.safe(m))
        total = self.add_sum(c, total, P)
        dropped = self.drop(c, P, rows, cols)
        part = self.product(c, dropped, c.v[:, :, cols], c.visible[:, :, rows, cols])
        return State(m, total, acc / safe * total + part)
    return Kernel.step(self, c, state, rows, cols)


def _mean_of_tiles(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """Each tile is normalised by itself, and tiles are averaged evenly."""
    alone = Kernel.step(self, c, self.start(c, rows), rows, cols)
    step = Kernel.step(self, c, State(state.m, state.total, 0 * state.acc), rows, cols)
    mean = np.where(alone.total > 0, alone.acc / alone.total, c.high(0))
    count = sum(1 for _ in self.key_blocks(c, rows))
    acc = state.acc + mean / count
    done = cols.stop == c.grid.Lk
    return State(step.m, step.total, acc * step.total if done else acc)


def _split_forward(weigh: Any) -> Any:
    """Two splits of the keys, merged wrongly."""

    def forward(self: Kernel, c: Call) -> tuple[Any, Any]:
        out, lse = Kernel.forward(self, c)
        blocks = list(self.key_blocks(c, slice(0, c.grid.Lq)))
        if len(blocks) < 2 or c.sinks is not None:
            return out, lse
        for rows in self.row_blocks(c):
            parts = []
            for half in (blocks[:1], blocks[1:]):
                state = self.start(c, rows)
                for cols in half:
                    state = self.step(c, state, rows, cols)
                parts.append(state)
            out[:, :, rows] = weigh(self, c, parts, rows)
        return out, lse

    return forward


def _evenly(self: Kernel, c: Call, parts: list[State], rows: slice) -> Any:
    """By half each, whatever their lse; empty parts are left out."""
    weights = [(part.total > 0) / np.where(part.total > 0, part.total, 1) for part in parts]
    count = np.maximum(1, sum((part.total > 0).astype(c.high) for part in parts))
    mixed = sum(part.acc * weight for part, weight in zip(parts, weights, strict=True)) / count
    return mixed.astype(c.high)


def _empty_part_is_nan(self: Kernel, c: Call, parts: list[State], rows: slice) -> Any:
    """A part without visible keys is 0/0, and its weight 0 does not help."""
    m = np.maximum(parts[0].m, parts[1].m)
    scales = [np.exp(part.m - self.safe(m)) * part.total for part in parts]
    whole = scales[0] + scales[1]
    mixed = sum(
        part.acc / part.total * (scale / whole) for part, scale in zip(parts, scales, strict=True)
    )
    return self.fill(c, mixed, np.zeros(mixed.shape[:-1], c.high), rows)[0]


def _every_second(self: Kernel, c: Call, rows: slice) -> Any:
    """Two groups of threads share the tiles, and the second group's sums are lost."""
    return list(Kernel.key_blocks(self, c, rows))[::2]


def _shared_max(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """One maximum for the rows of a tile: rows far below it underflow."""
    return np.broadcast_to(
        Kernel.running_max(self, c, m, s).max(axis=-2, keepdims=True), m.shape
    ) if m.shape[-2] else m  # fmt: skip


FAULTS: tuple[Fault, ...] = (
    fault("softmax-tail-skipped", "keys past the last whole tile are skipped",
          key_blocks=_whole_tiles),
    fault("softmax-query-tail-skipped", "queries past the last whole tile are not computed",
          row_blocks=_whole_rows),
    fault("softmax-tail-scored-zero", "padding of the tail counts with a score of 0",
          add_sum=_padding_counts, running_max=_noted),
    fault("softmax-tail-twice", "the last tile overlaps the one before it",
          key_blocks=_overlapping),
    fault("softmax-first-tile-twice", "the prologue's tile is read again", key_blocks=_first_twice),
    fault("softmax-stops-at-512", "keys past 512 are never read", key_blocks=_up_to(512)),
    fault("softmax-stops-at-1024", "keys past 1024 are never read", key_blocks=_up_to(1024)),
    fault("softmax-stops-at-2048", "keys past 2048 are never read", key_blocks=_up_to(2048)),
    fault("softmax-stops-at-4096", "keys past 4096 are never read", key_blocks=_up_to(4096)),
    fault("softmax-every-second-tile", "one of two groups' sums are lost",
          key_blocks=_every_second),
    maxima("softmax-no-max", "scores are not shifted by their maximum", running_max=_no_max),
    maxima("softmax-first-max", "the first tile's maximum serves all", running_max=_first_max),
    maxima("softmax-first-score", "the shift is the first score", running_max=_first_score),
    maxima("softmax-shared-max", "a tile of rows shares one maximum", running_max=_shared_max),
    maxima("softmax-max-from-zero", "the running maximum starts at 0", start=_floor(0.0)),
    maxima("softmax-max-from-minus-1e4", "the running maximum starts at -1e4", start=_floor(-1e4)),
    fault("softmax-output-not-rescaled", "P @ v keeps its old maximum", carry=_carry(True, False)),
    fault("softmax-sum-not-rescaled", "the sum keeps its old maximum", carry=_carry(False, True)),
    fault("softmax-nothing-rescaled", "neither sum is rescaled", carry=_carry(False, False)),
    fault("softmax-rescaled-upside-down", "exp(new - old)", factor=_upside_down),
    fault("softmax-rescale-skipped", "small moves of the maximum are not paid", factor=_lazy),
    fault("softmax-last-unnormalised", "the last tile is added unnormalised",
          step=_last_unnormalised),
    fault("softmax-mean-of-tiles", "tiles are normalised alone and averaged",
          step=_mean_of_tiles),
    fault("softmax-never-normalised", "the output is not divided",
          normalise=lambda self, c, total, acc: acc),
    fault("softmax-splits-evenly", "splits of the keys are averaged evenly",
          forward=_split_forward(_evenly)),
    fault("softmax-empty-split", "a split that sees nothing makes the row NaN",
          forward=_split_forward(_empty_part_is_nan)),
)  # fmt: skip
