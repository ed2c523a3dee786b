"""From a mask to a tile plan: which (query block, key block) are empty, full or partial.

This is where structure becomes speed: causal work is halved, and windows, segments and lengths cost
what they show, because an empty tile is never touched and a full one never looks at the mask. The
plan is found from the mask's structure alone, without an Lq x Lk array; it needs one byte a block.
A plan may call an empty tile partial (it costs a little time), never the reverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._alibi_tile import alibi_distances, alibi_tile
from attnx._dropout import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS, Drop, kept
from attnx._visibility import (
    Blocks,
    Grid,
    block_bounds,
    position_offset,
    stationary,
    visible,
)
from attnx.masks import BlockMask, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.masks import Mask

__all__ = [
    "EMPTY",
    "FULL",
    "KEY_STEPS",
    "LANES",
    "MULTIPLIERS",
    "PARTIAL",
    "ROUNDS",
    "Drop",
    "Grid",
    "Tile",
    "alibi_distances",
    "alibi_tile",
    "kept",
    "mask_blocks",
    "position_offset",
    "stationary",
    "tile_classes",
    "visible",
]

EMPTY = 0
"""No pair of a tile is visible: it is not touched."""

PARTIAL = 1
"""Some may be: the mask is asked, pair by pair."""

FULL = 2
"""All are: the mask need not be asked."""


class Tile(NamedTuple):
    """Queries i0 to i1 against keys j0 to j1; `masked` when some pair may be hidden."""

    i0: int
    i1: int
    j0: int
    j1: int
    masked: bool


def mask_blocks(mask: Mask | None) -> tuple[int, int] | None:
    """The smallest blocks of the `BlockMask` objects in a mask; None where there are none.

    A tile that is no larger than such a block is hidden or shown as a whole.

    Example:
        >>> import numpy as np
        >>> from attnx.masks import BlockMask, Causal
        >>> mask_blocks(BlockMask(np.ones((2, 2), bool), (64, 128)) & Causal())
        (64, 128)
    """
    found = [] if mask is None else [n for n in walk(mask) if isinstance(n, BlockMask)]
    if not found:
        return None
    return min(n.q_block for n in found), min(n.kv_block for n in found)


def tile_classes(
    mask: Mask,
    xp: Any,
    arange: Callable[[int, int], Any],
    *,
    Lq: int,
    Lk: int,
    q_size: int,
    k_size: int,
) -> Any:
    """Classify every block of the (Lq, Lk) grid, for `Lq >= 1` and `Lk >= 1`.

    Args:
        mask: a canonical mask; its leaves may be traced.
        xp: the array namespace to compute in (array API terms).
        arange: `arange(start, stop)`, integers on the leaves' device.
        Lq: number of queries.
        Lk: number of keys.
        q_size: rows of a block.
        k_size: keys of a block.

    Returns:
        int8 array of shape (B or 1, Hq or 1, ceil(Lq / q_size), ceil(Lk / k_size)) that holds
        `EMPTY`, `PARTIAL` or `FULL`.

    Example:
        >>> import numpy as np
        >>> from attnx.masks import Causal
        >>> tile_classes(Causal("top_left"), np, np.arange, Lq=6, Lk=6, q_size=2, k_size=3)[0, 0]
        array([[1, 0],
               [2, 1],
               [2, 1]], dtype=int8)
    """
    offset = position_offset(mask, Lq, Lk)
    some, every = block_bounds(mask, Blocks(xp, arange, Lq, Lk, q_size, k_size, offset))
    classes = xp.astype(some, xp.int8) + xp.astype(some & every, xp.int8)
    shape = (*classes.shape[:2], -(-Lq // q_size), -(-Lk // k_size))
    return xp.broadcast_to(classes, shape)
