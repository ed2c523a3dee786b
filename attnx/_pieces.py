"""A call restricted to some of its query rows and keys: what each mask means on a piece.

A piece is a call of its own whose indices start at 0 again, so everything that counts rows or keys
moves with it: counts are clamped and shifted, ids, positions and arrays are sliced, and a diagonal
becomes explicit positions, resolved in the whole call, lengths included (S3.5). Where the diagonal
of the piece happens to be one that `Causal` or `Window` can name, the name is kept, since a backend
may have a faster kernel for it.

Masks are canonical here, as `_call` makes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._alibi import Alibi
from attnx._dropout import WORD, Dropout
from attnx._visibility import Grid, position_offset, positions
from attnx.errors import ArgumentTypeError
from attnx.masks import (
    And,
    BlockMask,
    Causal,
    Dense,
    Lengths,
    Mask,
    Not,
    Or,
    Predicate,
    Prefix,
    Segments,
    Starts,
    Window,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._call import Call
    from attnx._lane import Lane

__all__ = ["Piece", "piece_of", "reach"]


class Piece(NamedTuple):
    """Rows i0 to i1 and keys j0 to j1 of a whole call."""

    lane: Lane
    like: Any
    call: Call
    i0: int
    i1: int
    j0: int
    j1: int

    @property
    def rows(self) -> int:
        """Lq of the piece."""
        return self.i1 - self.i0

    @property
    def keys(self) -> int:
        """Lk of the piece."""
        return self.j1 - self.j0

    def arange(self, start: int, stop: int) -> Any:
        """Integers on the call's device."""
        return self.lane.arange(start, stop, self.like)

    def mask(self) -> Mask | None:
        """The call's mask as the piece has it."""
        return None if self.call.mask is None else _cut(self.call.mask, self)

    def pairs(self, array: Any) -> Any:
        """(1 or B, 1 or Hq, 1 or Lq, 1 or Lk), cut along the axes that are full."""
        if array.shape[2] != 1:
            array = array[:, :, self.i0 : self.i1, :]
        return array[:, :, :, self.j0 : self.j1] if array.shape[3] != 1 else array

    def bias(self) -> Any:
        """The call's bias as the piece has it."""
        if self.call.alibi is not None:
            return _diagonal(self.call.alibi, self)
        return None if self.call.bias is None else self.pairs(self.call.bias)

    def dropout(self, dropout: Dropout | None) -> Dropout | None:
        """The same elements dropped: the offsets of i and j say where the piece stands (S9)."""
        if dropout is None:
            return None
        b, h, i, j = dropout.offset
        i = (i + self.i0) & WORD if isinstance(i, int) else i + self.i0
        return Dropout(dropout.p, dropout.seed, (b, h, i, j + self.j0))


def piece_of(lane: Lane, like: Any, call: Call, rows: range, keys: range) -> Piece:
    """The piece of a call at these rows and keys.

    Args:
        lane: the lane of the call.
        like: one of its arrays.
        call: the whole call.
        rows: a range of query rows, with a step of 1.
        keys: a range of keys, alike.
    """
    return Piece(lane, like, call, rows.start, rows.stop, keys.start, keys.stop)


def _cut(mask: Mask, piece: Piece) -> Mask:
    i0, i1, j0, j1 = piece[3:]
    match mask:
        case And() | Or():
            return type(mask)([_cut(part, piece) for part in mask.parts])
        case Not():
            return Not(_cut(mask.part, piece))
        case Causal() | Window():
            diagonal: Mask = _diagonal(mask, piece)
            return diagonal
        case Lengths():
            q = None if mask.q is None else _count(piece, mask.q, i0, piece.rows)
            return Lengths(_count(piece, mask.kv, j0, piece.keys), q)
        case Starts():
            return Starts(_count(piece, mask.kv, j0, piece.keys))
        case Prefix():
            return Prefix(_count(piece, mask.n, j0, piece.keys))
        case Segments():
            return Segments(mask.q_ids[..., i0:i1], mask.kv_ids[..., j0:j1])
        case Dense():
            return Dense(piece.pairs(mask.array))
        case BlockMask():
            return _blocks(mask, piece)
        case Predicate():
            return mask if i0 == 0 and j0 == 0 else Predicate(_moved(mask.fn, i0, j0))
    raise ArgumentTypeError(f"mask: expected an attnx mask object, got {type(mask).__name__}")


def _count(piece: Piece, count: Any, start: int, length: int) -> Any:
    """A count of the whole as the piece has it, within [0, L]."""
    if isinstance(count, int):
        return min(max(count - start, 0), length)
    xp, moved = piece.lane.xp, count - start
    # As in the checks of a call: `clip` looks at a bound's value in some namespaces.
    return xp.minimum(xp.maximum(moved, xp.zeros_like(moved)), xp.full_like(moved, length))


def _moved(fn: Callable[..., Any], i0: int, j0: int) -> Callable[..., Any]:
    def moved(b: Any, h: Any, i: Any, j: Any) -> Any:
        return fn(b, h, i + i0, j + j0)

    return moved


def _diagonal(mask: Any, piece: Piece) -> Any:
    """What says its distances by positions: a `Causal`, a `Window` or an `Alibi`."""
    call = piece.call
    offset = position_offset(call.mask, call.Lq, call.Lk) if mask.align == "bottom_right" else 0
    if mask.q_pos is None and mask.kv_pos is None and isinstance(offset, int):
        shift = offset + piece.i0 - piece.j0
        if shift == 0:
            return _like(mask, align="top_left")
        # Beside a Lengths this name would mean another diagonal.
        if shift == piece.keys - piece.rows and not _has_lengths(call.mask):
            return _like(mask, align="bottom_right")
    grid = Grid(
        piece.lane.xp, piece.arange, slice(0, call.B), slice(0, 1), slice(piece.i0, piece.i1),
        slice(piece.j0, piece.j1), offset,
    )  # fmt: skip
    query, key = positions(mask, grid)
    return _like(mask, q_pos=_leaf(piece, query, 2), kv_pos=_leaf(piece, key, 3))


def _like(mask: Any, **where: Any) -> Any:
    if isinstance(mask, Alibi):
        return Alibi(mask.slopes, **where)
    return Window(mask.left, mask.right, **where) if isinstance(mask, Window) else Causal(**where)


def _leaf(piece: Piece, grid_positions: Any, axis: int) -> Any:
    """Positions on a grid as the leaf of a mask, (L,) or (B, L)."""
    shape = tuple(grid_positions.shape)
    varied = shape[0] != 1
    wanted = (shape[0], shape[axis]) if varied else (shape[axis],)
    return piece.lane.xp.reshape(grid_positions, wanted)


def _has_lengths(mask: Mask | None) -> bool:
    return mask is not None and any(isinstance(node, Lengths) for node in walk(mask))


def _blocks(mask: BlockMask, piece: Piece) -> BlockMask:
    """Blocks of the greatest size whose borders meet both those of the whole and the cut."""
    layout, sizes = mask.layout, []
    cuts = ((2, mask.q_block, piece.i0, piece.rows), (3, mask.kv_block, piece.j0, piece.keys))
    for axis, size, start, length in cuts:
        small = math.gcd(size, start)
        sizes.append(small)
        if layout.shape[axis] != 1:
            index = (piece.arange(0, -(-length // small)) * small + start) // size
            layout = piece.lane.xp.take(layout, index, axis=axis)
    return BlockMask(layout, (sizes[0], sizes[1]))


def reach(mask: Mask | None, call: Call, rows: range) -> range:
    """Keys outside of which these rows see nothing: never too few, maybe too many.

    Only what is known without looking at an array counts, so that it holds under every transform.
    """
    low, high = (0, call.Lk) if mask is None else _reach(mask, call, rows)
    low = min(max(low, 0), call.Lk)
    return range(low, max(min(high, call.Lk), low))


def _reach(mask: Mask, call: Call, rows: range) -> tuple[int, int]:
    match mask:
        case And():
            ends = [_reach(part, call, rows) for part in mask.parts]
            return max(low for low, _ in ends), min(high for _, high in ends)
        case Or():
            ends = [_reach(part, call, rows) for part in mask.parts]
            return min(low for low, _ in ends), max(high for _, high in ends)
        case Causal(q_pos=None, kv_pos=None) | Window(q_pos=None, kv_pos=None):
            return _diagonal_reach(mask, call, rows)
        case Lengths(kv=int()):
            return 0, mask.kv
        case Starts(kv=int()):
            return mask.kv, call.Lk
        case Prefix(n=int()):
            return 0, mask.n
    return 0, call.Lk


def _diagonal_reach(mask: Causal | Window, call: Call, rows: range) -> tuple[int, int]:
    left, right = (mask.left, mask.right) if isinstance(mask, Window) else (None, 0)
    offset = 0
    if mask.align == "bottom_right":
        offset = position_offset(call.mask, call.Lq, call.Lk)
        if not isinstance(offset, int):
            return 0, call.Lk
    low = 0 if left is None else rows.start + offset - left
    return low, call.Lk if right is None else rows.stop + offset + right
