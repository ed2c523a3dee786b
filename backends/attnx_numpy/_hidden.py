"""Keys that nobody sees, made zeros where their contents would choose another way of rounding.

Which of two ways a kernel takes (with a running maximum or without, selecting or multiplying) is
decided by a look at the keys. Both are right, and they round differently; S4.1 asks for the same
bits whatever stands in a key that no query sees. So where the look at all keys does not end well,
those that nobody sees are taken out of it, and it is repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnx_numpy._scores import bias_of
from attnx_numpy._tiles import TilePlan

if TYPE_CHECKING:
    from attnx.plugin import Call

__all__ = ["cleaned", "hides"]

SIZE = 512
"""Rows and keys of the tiles in which visibility is looked at."""


def hides(call: Call) -> bool:
    """Whether a key may be hidden from every query, and its contents may matter."""
    return not call.assume_finite and (call.mask is not None or call.bias is not None)


def cleaned(k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """The same keys and values, with zeros where no query of the batch entry and group sees."""
    unseen = ~_seen(call)
    if not unseen.any():
        return k, v
    where = unseen[..., None]
    return np.where(where, k.dtype.type(0), k), np.where(where, v.dtype.type(0), v)


def _seen(call: Call) -> Any:
    """Which keys some query sees, (1 or B, 1 or Hk, Lk)."""
    g = call.Hq // call.Hk
    plan = TilePlan(call, min(SIZE, max(2, call.Lq)), min(SIZE, max(2, call.Lk)))
    shape = (1, 1) if plan.classes is None else plan.classes.shape[:2]
    bias = call.bias if call.bias is not None and np.isneginf(call.bias).any() else None
    by_bias = (1, 1) if bias is None else bias.shape[:2]
    batches = call.B if max(shape[0], by_bias[0]) > 1 else 1
    groups = call.Hk if max(shape[1], by_bias[1]) > 1 else 1
    heads = g if groups > 1 else call.Hq
    seen = np.zeros((batches, groups, call.Lk), bool)
    for b in range(batches):
        for group in range(groups):
            mine = slice(group * g, group * g + heads)
            _look(seen[b, group], plan, bias, b, mine)
    return seen


def _look(seen: Any, plan: TilePlan, bias: Any, b: int, heads: slice) -> None:
    call = plan.call
    tiles = [
        tile
        for i0 in range(0, call.Lq, plan.q_size)
        for tile in plan.tiles(b, heads, i0, min(i0 + plan.q_size, call.Lq))
    ]
    for tile in sorted(tiles, key=lambda tile: tile.masked):  # whole tiles say most at no cost
        keys = slice(tile.j0, tile.j1)
        if seen[keys].all():
            continue
        shown = plan.shown(b, heads, tile) if tile.masked else None
        if bias is not None:
            unhidden = bias_of(bias, b, heads, tile) != -np.inf
            shown = unhidden if shown is None else shown & unhidden
        seen[keys] |= True if shown is None else shown.any(axis=(0, 1))
