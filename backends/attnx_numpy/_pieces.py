"""A small call in pieces: some key heads of some batch entries each, and what their queries see.

A piece is what one thread does at a time, its scores in one array; all of it stays in cache.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx.tiling import Grid, position_offset, stationary, visible
from attnx_numpy import _threads

if TYPE_CHECKING:
    from attnx.plugin import Call

__all__ = ["SCORES", "Piece", "Sight", "Sights", "indices", "pieces"]

SCORES = 1 << 16
"""Scores of a call up to which threads cost more than they give."""

PIECE = 1 << 19
"""Numbers that a piece of several heads reads and makes, at most."""


class Piece(NamedTuple):
    """Some key heads of some batch entries, with the query heads that read them."""

    number: int
    b: slice
    groups: slice
    heads: slice


def pieces(call: Call) -> list[Piece]:
    """The pieces, in order: one where threads do not pay, else at least one a thread."""
    g = call.Hq // call.Hk
    total = call.B * call.Hk
    scores = g * call.Lq * call.Lk
    read = call.Lk * (call.D + call.Dv)
    if total * scores <= SCORES and total * read <= PIECE:
        return [Piece(0, slice(0, call.B), slice(0, call.Hk), slice(0, call.Hq))]
    size = max(1, min(PIECE // (scores + read), -(-total // _threads.threads())))
    batches, size = (size // call.Hk, call.Hk) if size >= call.Hk else (1, size)
    made: list[Piece] = []
    for b, h in itertools.product(range(0, call.B, batches), range(0, call.Hk, size)):
        b1, h1 = min(b + batches, call.B), min(h + size, call.Hk)
        made.append(Piece(len(made), slice(b, b1), slice(h, h1), slice(g * h, g * h1)))
    return made


def indices(call: Call, piece: Piece) -> Grid:
    """All pairs of a piece."""
    offset = position_offset(call.mask, call.Lq, call.Lk)
    i, j = slice(0, call.Lq), slice(0, call.Lk)
    return Grid(np, np.arange, piece.b, piece.heads, i, j, offset)


class Sight(NamedTuple):
    """What a piece's queries see.

    Attributes:
        penalty: 0 where a pair is visible and -inf where not, to broadcast to (b, heads, Lq, Lk).
        dead: the rows that see nothing, to broadcast to (b, heads, Lq, 1); None for none.
    """

    penalty: Any
    dead: Any


class Sights:
    """What the pieces of a call see, found once where all see the same."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.alike = call.bias is None and call.mask is not None and stationary(call.mask)
        self.common: Sight | None = None

    def of(self, piece: Piece, bias: Any) -> Sight | None:
        """A piece's; None where nothing hides any pair."""
        if self.alike and self.common is not None:
            return self.common
        shown = self._shown(piece, bias)
        if shown is None:
            return None
        acc = np.float64 if self.call.dtype == "float64" else np.float32
        dead = ~shown.any(axis=-1, keepdims=True)
        penalty = np.where(shown, acc(0), acc(-np.inf))
        found = Sight(penalty, dead if dead.any() else None)
        if self.alike:
            self.common = found
        return found

    def _shown(self, piece: Piece, bias: Any) -> Any:
        """The visible pairs of a piece, (…, Lq, Lk), or None."""
        call, shown = self.call, None
        if call.mask is not None:
            shown = visible(call.mask, indices(call, piece))
        if bias is not None:
            unhidden = bias != -np.inf
            if not unhidden.all():
                shown = unhidden if shown is None else shown & unhidden
        return shown
