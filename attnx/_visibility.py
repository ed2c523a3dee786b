"""What the mask objects mean (spec S3): visibility on index grids, and bounds on blocks of them.

Two questions are asked of a mask. `visible` answers exactly, for a grid of indices. `block_bounds`
answers for whole blocks, conservatively: "some pair may be visible" and "every pair is". Both take
their array namespace from the caller and work on traced arrays, so each rule stands here once for
every backend. Masks must be canonical, as `_call` makes them: integer leaves of shape (B,), (L,) or
(B, L), a dense array with four axes, alignments resolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx.errors import ArgumentError, ArgumentTypeError
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
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._alibi import Alibi

__all__ = [
    "Blocks",
    "Grid",
    "block_bounds",
    "position_offset",
    "positions",
    "stationary",
    "visible",
]


class Grid(NamedTuple):
    """The indices at which visibility is asked: four one-dimensional index sets.

    Each is a slice with a start and a stop (cheap on arrays) or an integer array (which may be
    traced). `offset` is n_k - n_q, an int or an array of shape (B,). `arange(start, stop)` makes
    an integer array on the right device. The indices of an axis are a run, and `xp.take` may count
    on that; `xp.take_any`, where there is one, does not.
    """

    xp: Any
    arange: Callable[[int, int], Any]
    b: Any
    h: Any
    i: Any
    j: Any
    offset: Any = 0

    def axis(self, name: str) -> Any:
        """The indices of one axis as an array that broadcasts along it."""
        index = getattr(self, name)
        if isinstance(index, slice):
            index = self.arange(index.start, index.stop)
        return _spread(self.xp, index, "bhij".index(name))

    def per_batch(self, leaf: Any) -> Any:
        """A leaf of shape (B,), or an int, for the grid's batch entries."""
        if isinstance(leaf, int):
            return leaf
        return _spread(self.xp, _take(self.xp, leaf, self.b, 0), 0)

    def per_head(self, leaf: Any) -> Any:
        """A leaf of shape (Hq,), for the grid's heads."""
        return _spread(self.xp, _take(self.xp, leaf, self.h, 0), 1)

    def per_position(self, leaf: Any, name: str) -> Any:
        """A leaf of shape (L,) or (B, L), for the grid's queries or keys."""
        values = _take(self.xp, leaf, getattr(self, name), leaf.ndim - 1)
        if leaf.ndim == 1:
            return _spread(self.xp, values, "bhij".index(name))
        values = _take(self.xp, values, self.b, 0)
        n, length = values.shape
        return self.xp.reshape(values, (n, 1, length, 1) if name == "i" else (n, 1, 1, length))


def _spread(xp: Any, values: Any, axis: int) -> Any:
    shape = [1, 1, 1, 1]
    shape[axis] = values.shape[0]
    return xp.reshape(values, tuple(shape))


def _take(xp: Any, array: Any, index: Any, axis: int) -> Any:
    if isinstance(index, slice):
        return array[(*(slice(None),) * axis, index, ...)]
    return xp.take(array, index, axis=axis)


def position_offset(mask: Mask | None, Lq: int, Lk: int) -> Any:
    """n_k - n_q of S3.5: from the one `Lengths` in the top-level chain, else from Lq and Lk."""
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Lengths):
            return part.kv - (Lq if part.q is None else part.q)
    return Lk - Lq


def stationary(mask: Mask) -> bool:
    """Whether it depends on i - j alone which pairs are visible: tiles with the same are alike.

    Example:
        >>> stationary(Causal("top_left") & Window(7, 0)), stationary(Lengths(3))
        (True, False)
    """
    match mask:
        case And() | Or():
            return all(stationary(part) for part in mask.parts)
        case Not():
            return stationary(mask.part)
        case Causal() | Window():
            return mask.q_pos is None and mask.kv_pos is None
    return False


def visible(mask: Mask, grid: Grid) -> Any:
    """Whether query i of (b, h) sees key j: booleans that broadcast over the grid's four axes."""
    match mask:
        case And():
            return _fold([visible(part, grid) for part in mask.parts], "__and__")
        case Or():
            return _fold([visible(part, grid) for part in mask.parts], "__or__")
        case Not():
            return ~visible(mask.part, grid)
        case Causal():
            return _key_position(mask, grid) <= _query_position(mask, grid)
        case Window():
            distance = _key_position(mask, grid) - _query_position(mask, grid)
            shown = distance == distance
            if mask.left is not None:
                shown = shown & (distance >= -mask.left)
            return shown if mask.right is None else shown & (distance <= mask.right)
        case Lengths():
            real = grid.axis("j") < grid.per_batch(mask.kv)
            return real if mask.q is None else real & (grid.axis("i") < grid.per_batch(mask.q))
        case Starts():
            return grid.axis("j") >= grid.per_batch(mask.kv)
        case Prefix():
            return grid.axis("j") < grid.per_batch(mask.n)
        case Segments():
            query_ids = grid.per_position(mask.q_ids, "i")
            return (query_ids == grid.per_position(mask.kv_ids, "j")) & (query_ids >= 0)
        case Dense():
            return _dense_tile(mask.array, grid)
        case BlockMask():
            return _layout_tile(mask, grid)
        case Predicate():
            return _ask(mask, grid)
    raise ArgumentTypeError(f"mask: expected an attnx mask object, got {type(mask).__name__}")


def _fold(parts: list[Any], operation: str) -> Any:
    result = parts[0]
    for part in parts[1:]:
        result = result & part if operation == "__and__" else result | part
    return result


def positions(mask: Causal | Window | Alibi, grid: Grid) -> tuple[Any, Any]:
    """Where the grid's queries and keys stand for this mask (S3.5); they broadcast over it."""
    return _query_position(mask, grid), _key_position(mask, grid)


def _query_position(mask: Causal | Window | Alibi, grid: Grid) -> Any:
    if mask.q_pos is not None:
        return grid.per_position(mask.q_pos, "i")
    i = grid.axis("i")
    return i + grid.per_batch(grid.offset) if mask.align == "bottom_right" else i


def _key_position(mask: Causal | Window | Alibi, grid: Grid) -> Any:
    return grid.axis("j") if mask.kv_pos is None else grid.per_position(mask.kv_pos, "j")


def _dense_tile(array: Any, grid: Grid) -> Any:
    for axis, index in enumerate((grid.b, grid.h, grid.i, grid.j)):
        if array.shape[axis] != 1:
            array = _take(grid.xp, array, index, axis)
    return array


def _layout_tile(mask: BlockMask, grid: Grid) -> Any:
    """Each pair as its block; the indices of blocks repeat, so they are no run of a tile's."""
    shown = _dense_tile(mask.layout, grid._replace(i=slice(None), j=slice(None)))
    take = getattr(grid.xp, "take_any", grid.xp.take)
    for axis, name, size in ((2, "i", mask.q_block), (3, "j", mask.kv_block)):
        if shown.shape[axis] != 1:
            index = getattr(grid, name)
            if isinstance(index, slice):
                index = grid.arange(index.start, index.stop)
            shown = take(shown, index // size, axis=axis)
    return shown


def _ask(mask: Predicate, grid: Grid) -> Any:
    shown = mask.fn(grid.axis("b"), grid.axis("h"), grid.axis("i"), grid.axis("j"))
    if not str(getattr(shown, "dtype", type(shown).__name__)).endswith("bool"):
        raise ArgumentTypeError(
            "Predicate: expected fn(b, h, i, j) to return a boolean array of the call's framework, "
            f"got {getattr(shown, 'dtype', type(shown).__name__)}"
        )
    shape = tuple(getattr(shown, "shape", ()))
    if shape == ():
        return grid.xp.reshape(shown, (1, 1, 1, 1))
    full = tuple(grid.axis(name).shape["bhij".index(name)] for name in "bhij")
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ArgumentError(
            "Predicate: expected fn(b, h, i, j) to return what its arguments broadcast to, "
            f"each axis of {full} 1 or full, got shape {shape}"
        )
    return shown


class Blocks(NamedTuple):
    """A partition of the (Lq, Lk) grid into blocks of (q_size, k_size); the last may be short."""

    xp: Any
    arange: Callable[[int, int], Any]
    Lq: int
    Lk: int
    q_size: int
    k_size: int
    offset: Any = 0

    def ends(self, name: str) -> tuple[Any, Any]:
        """First and last index of each block, as arrays that broadcast along its axis."""
        length, size = (self.Lq, self.q_size) if name == "i" else (self.Lk, self.k_size)
        first = self.arange(0, -(-length // size)) * size
        last = self.xp.minimum(first + (size - 1), self.arange(length - 1, length))
        axis = "bhij".index(name)
        return _spread(self.xp, first, axis), _spread(self.xp, last, axis)

    def extremes(self, leaf: Any, name: str) -> tuple[Any, Any]:
        """Least and greatest value of a leaf (L,) or (B, L) in each block."""
        size = self.q_size if name == "i" else self.k_size
        blocks = _in_blocks(self, leaf, leaf.ndim - 1, size)
        low, high = self.xp.min(blocks, axis=-1), self.xp.max(blocks, axis=-1)
        batch, count = (low.shape[0] if leaf.ndim == 2 else 1), low.shape[-1]
        shape = (batch, 1, count, 1) if name == "i" else (batch, 1, 1, count)
        return self.xp.reshape(low, shape), self.xp.reshape(high, shape)


def _in_blocks(blocks: Blocks, array: Any, axis: int, size: int) -> Any:
    """Split an axis into (blocks, size), the last block filled up with the last element."""
    length = array.shape[axis]
    count = -(-length // size)
    if count * size != length:
        index = blocks.arange(0, count * size)
        last = blocks.arange(length - 1, length)
        array = blocks.xp.take(array, blocks.xp.minimum(index, last), axis=axis)
    shape = (*array.shape[:axis], count, size, *array.shape[axis + 1 :])
    return blocks.xp.reshape(array, shape)


def _leaf4(xp: Any, leaf: Any) -> Any:
    return leaf if isinstance(leaf, int) else _spread(xp, leaf, 0)


def block_bounds(mask: Mask, blocks: Blocks) -> tuple[Any, Any]:
    """For each block: may some pair be visible, and are all of them? Never wrong, maybe cautious.

    Returns two boolean arrays that broadcast to (B, Hq, query blocks, key blocks).
    """
    match mask:
        case And():
            pairs = [block_bounds(part, blocks) for part in mask.parts]
            return _fold([p[0] for p in pairs], "__and__"), _fold([p[1] for p in pairs], "__and__")
        case Or():
            pairs = [block_bounds(part, blocks) for part in mask.parts]
            return _fold([p[0] for p in pairs], "__or__"), _fold([p[1] for p in pairs], "__or__")
        case Not():
            some, every = block_bounds(mask.part, blocks)
            return ~every, ~some
        case Causal():
            return _distance_bounds(mask, blocks, None, 0)
        case Window():
            return _distance_bounds(mask, blocks, mask.left, mask.right)
        case Lengths():
            return _length_bounds(mask, blocks)
        case Starts():
            first, last = blocks.ends("j")
            start = _leaf4(blocks.xp, mask.kv)
            return last >= start, first >= start
        case Prefix():
            first, last = blocks.ends("j")
            stop = _leaf4(blocks.xp, mask.n)
            return first < stop, last < stop
        case Segments():
            return _segment_bounds(mask, blocks)
        case Dense():
            return _dense_bounds(mask.array, blocks)
        case BlockMask():
            return _layout_bounds(mask, blocks)
    i, j = blocks.ends("i")[0], blocks.ends("j")[0]
    return (i >= 0) & (j >= 0), (i < 0) & (j < 0)


def _distance_bounds(
    mask: Causal | Window, blocks: Blocks, left: int | None, right: int | None
) -> tuple[Any, Any]:
    if mask.q_pos is not None:
        q_low, q_high = blocks.extremes(mask.q_pos, "i")
    else:
        q_low, q_high = blocks.ends("i")
        if mask.align == "bottom_right":
            shift = _leaf4(blocks.xp, blocks.offset)
            q_low, q_high = q_low + shift, q_high + shift
    ends = blocks.ends("j") if mask.kv_pos is None else blocks.extremes(mask.kv_pos, "j")
    nearest, farthest = ends[0] - q_high, ends[1] - q_low
    if left is None and right is None:
        return farthest >= nearest, farthest >= nearest
    # No tautology is added for the shape alone: LLVM was seen to make it false (jaxlib 0.10.2).
    if left is None:
        return nearest <= right, farthest <= right
    if right is None:
        return farthest >= -left, nearest >= -left
    return (
        (farthest >= -left) & (nearest <= right),
        (nearest >= -left) & (farthest <= right),
    )


def _length_bounds(mask: Lengths, blocks: Blocks) -> tuple[Any, Any]:
    first, last = blocks.ends("j")
    stop = _leaf4(blocks.xp, mask.kv)
    some, every = first < stop, last < stop
    if mask.q is not None:
        first, last = blocks.ends("i")
        stop = _leaf4(blocks.xp, mask.q)
        some, every = some & (first < stop), every & (last < stop)
    return some, every


def _segment_bounds(mask: Segments, blocks: Blocks) -> tuple[Any, Any]:
    q_low, q_high = blocks.extremes(mask.q_ids, "i")
    k_low, k_high = blocks.extremes(mask.kv_ids, "j")
    some = (k_low <= q_high) & (q_low <= k_high) & (q_high >= 0) & (k_high >= 0)
    every = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return some, every


def _dense_bounds(array: Any, blocks: Blocks) -> tuple[Any, Any]:
    some = every = array
    for axis, size in ((2, blocks.q_size), (3, blocks.k_size)):
        if array.shape[axis] != 1:
            some = blocks.xp.any(_in_blocks(blocks, some, axis, size), axis=axis + 1)
            every = blocks.xp.all(_in_blocks(blocks, every, axis, size), axis=axis + 1)
    return some, every


def _layout_bounds(mask: BlockMask, blocks: Blocks) -> tuple[Any, Any]:
    """By sums over rectangles of the layout: a block of ours may cover several of the mask's."""
    xp = blocks.xp
    total = xp.astype(mask.layout, xp.int32)
    cells: Any = 1
    for name, axis, size in (("i", 2, mask.q_block), ("j", 3, mask.kv_block)):
        if mask.layout.shape[axis] == 1:
            continue
        first, last = (xp.reshape(end, (-1,)) // size for end in blocks.ends(name))
        before = xp.cumulative_sum(total, axis=axis, dtype=xp.int32, include_initial=True)
        total = xp.take(before, last + 1, axis=axis) - xp.take(before, first, axis=axis)
        cells = cells * _spread(xp, last + 1 - first, axis)
    return total > 0, total == cells
