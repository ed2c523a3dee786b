"""Faults of ALiBi: other slopes, other distances, or the right ones in a wrong place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("alibi")


def _as_it_is(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    return s


def _forward_alone(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    return s if c.backward else Kernel.slant(self, c, s, rows, cols)


def _inside_the_cap(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    s = self.cap(c, Kernel.slant(self, c, self.scaled(c, rows, cols), rows, cols))
    return self.hide(c, s if c.bias is None else self.add_bias(c, s, rows, cols), rows, cols)


def _first_slope(self: Kernel, c: Call, alibi: Any) -> Any:
    return Kernel.slopes(self, c, alibi)[:1]


def _slopes_of_key_heads(self: Kernel, c: Call, alibi: Any) -> Any:
    return Kernel.slopes(self, c, alibi)[np.arange(c.grid.Hq) // c.g]


def _descending(self: Kernel, c: Call, alibi: Any) -> Any:
    return Kernel.slopes(self, c, alibi)[::-1]


def _of_tile(self: Kernel, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
    """Both indices start anew in each tile."""
    i, j = np.arange(rows.stop - rows.start), np.arange(cols.stop - cols.start)
    return np.abs(i[:, None] - j).astype(c.high)


def _key_of_tile(self: Kernel, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
    return np.abs(Kernel.away(self, c, alibi, rows, cols) + cols.start).astype(c.high)


def _top_left(self: Kernel, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
    align = None if alibi.align is None else "top_left"
    return Kernel.away(self, c, replace(alibi, align=align), rows, cols)


def _without_lengths(self: Kernel, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
    bare = replace_given(c, mask=None)
    return Kernel.away(self, bare, alibi, rows, cols)


def replace_given(c: Call, **changed: Any) -> Call:
    """The same call with other options."""
    return replace(c, given={**c.given, **changed})


def _without_positions(self: Kernel, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
    return Kernel.away(self, c, replace(alibi, q_pos=None, kv_pos=None), rows, cols)


FAULTS: tuple[Fault, ...] = (
    fault("alibi-ignored", "the option is dropped instead", slant=_as_it_is),
    fault("alibi-not-in-backward", "weights are recomputed without it", slant=_forward_alone),
    fault("alibi-before-softcap", "it is added before the cap", scores=_inside_the_cap),
    fault("alibi-scaled", "it is multiplied by the scale, as a part of the product",
          slopes=lambda self, c, alibi: Kernel.slopes(self, c, alibi) * c.high(c.scale)),
    fault("alibi-sign", "what is far is preferred",
          slopes=lambda self, c, alibi: -Kernel.slopes(self, c, alibi)),
    fault("alibi-one-slope", "every head has the first head's slope", slopes=_first_slope),
    fault("alibi-slopes-of-key-heads", "the heads of a group share a slope",
          slopes=_slopes_of_key_heads),
    fault("alibi-slopes-reversed", "the last head has the first slope", slopes=_descending),
    fault("alibi-signed", "keys after the query get more instead of less",
          distance=lambda self, c, alibi, rows, cols: self.away(
              c, alibi, rows, cols).astype(c.high)),
    fault("alibi-of-tile", "queries and keys are counted from the corner of their tile",
          distance=_of_tile),
    fault("alibi-key-of-tile", "keys are counted from the start of their tile",
          distance=_key_of_tile),
    fault("alibi-top-left", "bottom_right is read as top_left", away=_top_left),
    fault("alibi-ignores-lengths", "bottom_right of the arrays, not of the lengths",
          away=_without_lengths),
    fault("alibi-ignores-positions", "explicit positions are left out", away=_without_positions),
)  # fmt: skip
