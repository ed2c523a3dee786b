"""Which tiles a block of queries visits, and what stands hidden in each.

Blocks are classified twice as finely as they are computed, so that a tile on an edge (the causal
diagonal, the rim of a window) is cut into halves of its rows, and each half computes only the keys
that it may see.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.tiling import (
    EMPTY,
    FULL,
    Grid,
    Tile,
    alibi_distances,
    position_offset,
    stationary,
    tile_classes,
    visible,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Alibi, Call

__all__ = ["Tile", "TilePlan"]

INDICES = partial(np.arange, dtype=np.int32)
"""Half as wide as NumPy's own, where nothing but distances is made of them."""

HELD = 8
"""Most arrays of a tile's pairs that a plan keeps, a megabyte each."""


class TilePlan:
    """The tiles of a call.

    Args:
        call: the call, with Lq and Lk at least 1.
        q_size: rows of a block.
        k_size: keys of a tile.
    """

    def __init__(self, call: Call, q_size: int, k_size: int) -> None:
        self.call = call
        self.q_size, self.k_size = q_size, k_size
        self.fine_q, self.fine_k = max(1, q_size // 2), max(1, k_size // 2)
        mask = call.mask if call.bias is None else None  # a bias may hide, too
        self.repeats = mask is not None and stationary(mask)
        self.held: dict[tuple[Any, ...], Any] = {}

    @cached_property
    def classes(self) -> Any:
        """Class of each fine block, (1 or B, 1 or Hq, rows, columns); None without a mask."""
        call = self.call
        if call.mask is None:
            return None
        return tile_classes(
            call.mask, np, np.arange, Lq=call.Lq, Lk=call.Lk, q_size=self.fine_q, k_size=self.fine_k
        )

    @cached_property
    def offset(self) -> Any:
        """n_k - n_q of S3.5."""
        return position_offset(self.call.mask, self.call.Lq, self.call.Lk)

    def tiles(self, b: int, heads: slice, i0: int, i1: int) -> list[Tile]:
        """The tiles of queries i0 to i1, in order of keys, for some heads of one batch entry."""
        Lk = self.call.Lk
        if self.classes is None:
            return [
                Tile(i0, i1, j, min(j + self.k_size, Lk), False) for j in range(0, Lk, self.k_size)
            ]
        table = self._table(b, heads, i0, i1)
        found: list[Tile] = []
        per_tile = self.k_size // self.fine_k
        for column in range(0, table.shape[1], per_tile):
            found += self._cut(table[:, column : column + per_tile], column, i0, i1)
        return found

    def _table(self, b: int, heads: slice, i0: int, i1: int) -> Any:
        """Classes over a set of heads: full if full for all, empty if empty for all."""
        table = self.classes[b if self.classes.shape[0] != 1 else 0]
        table = table[heads] if table.shape[0] != 1 else table
        table = table[:, i0 // self.fine_q : -(-i1 // self.fine_q)]
        if table.shape[0] == 1:
            return table[0]
        low, high = table.min(axis=0), table.max(axis=0)
        return np.where(low == high, low, 1)

    def _cut(self, part: Any, column: int, i0: int, i1: int) -> list[Tile]:
        """The tiles of one coarse block, whose fine classes are `part` (rows, columns)."""
        if (part == EMPTY).all():
            return []
        rows = [self._row(row, column) for row in part]
        if len(rows) == 1 or all(row == rows[0] for row in rows):
            return [Tile(i0, i1, *piece) for piece in rows[0]]
        edges = [*range(i0, i1, self.fine_q), i1]
        return [Tile(edges[r], edges[r + 1], *piece) for r, row in enumerate(rows) for piece in row]

    def _row(self, row: Any, column: int) -> list[tuple[int, int, bool]]:
        """Ranges of keys of one fine row: neighbours that are not empty are joined."""
        pieces: list[tuple[int, int, bool]] = []
        for c, kind in enumerate(row.tolist(), column):
            if kind == EMPTY:
                continue
            j0, j1 = c * self.fine_k, min((c + 1) * self.fine_k, self.call.Lk)
            masked = kind != FULL
            if pieces and pieces[-1][1] == j0:
                j0, masked = pieces[-1][0], masked or pieces[-1][2]
                pieces.pop()
            pieces.append((j0, j1, masked))
        return pieces

    def shown(self, b: int, heads: slice, tile: Tile) -> Any:
        """The visible pairs of a tile, (1 or heads, rows, keys) after broadcasting; to be read."""
        return self._held("shown", tile, lambda: self._shown(b, heads, tile))

    def factor(self, shown: Any, tile: Tile, dtype: Any) -> Any:
        """Those pairs as 1, and 0 where hidden."""
        return self._held("factor", tile, lambda: shown.astype(dtype))

    def penalty(self, shown: Any, tile: Tile, dtype: Any) -> Any:
        """Those pairs as 0, and -inf where hidden."""
        return self._held(
            "penalty", tile, lambda: np.where(shown, dtype.type(0), dtype.type(-np.inf))
        )

    def _held(self, kind: str, tile: Tile, make: Callable[[], Any]) -> Any:
        """What is made of a tile, once for all tiles that stand alike to the diagonal."""
        return self._kept((kind,), tile, make) if self.repeats else make()

    def _kept(self, kind: tuple[Any, ...], tile: Tile, make: Callable[[], Any]) -> Any:
        key = (*kind, tile.i1 - tile.i0, tile.j1 - tile.j0, tile.i0 - tile.j0)
        found = self.held.get(key)
        if found is None:
            if len(self.held) >= HELD:
                self.held.clear()
            found = self.held[key] = make()
        return found

    def away(self, alibi: Alibi, b: int, tile: Tile, dtype: Any) -> Any:
        """-|p_i - j| over a tile, (rows, keys); to be read."""

        def make() -> Any:
            grid = self._grid(b, slice(0, 1), tile)._replace(arange=INDICES)
            return alibi_distances(alibi, grid)[0, 0].astype(dtype)

        if alibi.q_pos is not None or alibi.kv_pos is not None:
            return make()
        at = b if alibi.align == "bottom_right" and not isinstance(self.offset, int) else 0
        return self._kept(("away", at), tile, make)

    def _grid(self, b: int, heads: slice, tile: Tile) -> Grid:
        return Grid(
            np, np.arange, slice(b, b + 1), heads, slice(tile.i0, tile.i1),
            slice(tile.j0, tile.j1), self.offset,
        )  # fmt: skip

    def _shown(self, b: int, heads: slice, tile: Tile) -> Any:
        grid = self._grid(b, heads, tile)
        pairs = visible(self.call.mask, grid)[0] if self.call.mask is not None else None
        if pairs is None:
            return None
        return np.broadcast_to(pairs, (pairs.shape[0], tile.i1 - tile.i0, tile.j1 - tile.j0))
