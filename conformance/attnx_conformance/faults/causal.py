"""Faults of causality: dropped, aligned wrongly, off by one, blind to lengths and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Starts

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("causal")


def _dropped(when: Callable[[Call], bool]) -> Any:
    """No causal constraint in some calls."""

    def rule(self: Kernel, c: Call, mask: Any) -> Any:
        return True if when(c) else Kernel.causal_rule(self, c, mask)

    return rule


def _shifted(by: int) -> Any:
    def rule(self: Kernel, c: Call, mask: Any) -> Any:
        return self.key_positions(c, mask) <= self.positions(c, mask) + by

    return rule


def _aligned(align: Callable[[Any], Any]) -> Any:
    """Positions under another alignment; explicit ones are right."""

    def positions(self: Kernel, c: Call, mask: Any) -> Any:
        if mask.q_pos is not None:
            return Kernel.positions(self, c, mask)
        return Kernel.positions(self, c, Causal(align(mask.align)))

    return positions


def _whole_offset(self: Kernel, c: Call) -> Any:
    return c.grid.Lk - c.grid.Lq


def _first_offset(self: Kernel, c: Call) -> Any:
    offset = Kernel.offset(self, c)
    return offset if np.ndim(offset) == 0 or not offset.size else offset.reshape(-1)[0]


def _clamped_offset(self: Kernel, c: Call) -> Any:
    return np.maximum(Kernel.offset(self, c), 0)


def _keys_only_offset(self: Kernel, c: Call) -> Any:
    """Lengths of keys count, those of queries do not."""
    n_k: Any = c.grid.Lk
    for part in self.conjuncts(c.mask):
        if isinstance(part, Lengths):
            n_k = self.entries(c, part.kv)
    return n_k - c.grid.Lq


def _starts_offset(self: Kernel, c: Call) -> Any:
    offset = Kernel.offset(self, c)
    for part in self.conjuncts(c.mask):
        if isinstance(part, Starts):
            offset = offset - self.entries(c, part.kv)
    return offset


def _square_tiles(self: Kernel, c: Call, rows: slice) -> Any:
    """Tiles right of the diagonal are skipped, as if positions were always top-left."""
    blocks = Kernel.key_blocks(self, c, rows)
    causal = any(isinstance(part, Causal) for part in self.parts(c))
    return [cols for cols in blocks if not causal or cols.start < rows.stop]


def _diagonal_only(self: Kernel, c: Call, mask: Any) -> Any:
    """Only the tile on the diagonal is masked; those right of it are not skipped."""
    tile_i, tile_j = self.i(c) // self.block_q, self.j(c) // self.block_q
    return Kernel.causal_rule(self, c, mask) | (tile_j > tile_i)


def _early_skip(self: Kernel, c: Call, rows: slice) -> Any:
    """The number of tiles is rounded down: the tile that holds the diagonal is lost."""
    blocks = list(Kernel.key_blocks(self, c, rows))
    if c.causal is False or c.mask is not None or c.grid.Lq != c.grid.Lk:
        return blocks
    return blocks[: max(1, rows.stop // self.block_k)]


def _forgotten(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """The backward pass is given the call without its causal option."""
    made = Kernel.cotangents(self, c, d_out, d_lse)
    c.given = {**c.given, "causal": False}
    c.visible = self.visible(c)
    return made


FAULTS: tuple[Fault, ...] = (
    fault("causal-dropped", "causality is dropped", causal_rule=_dropped(lambda c: True)),
    fault("causal-dropped-with-mask", "a mask given beside it wins",
          causal_rule=_dropped(lambda c: c.mask is not None and c.causal is not False)),
    fault("causal-dropped-with-bias", "a bias given beside it wins",
          causal_rule=_dropped(lambda c: c.given.get("bias") is not None)),
    fault("causal-dropped-with-softcap", "lost on the route of capped scores",
          causal_rule=_dropped(lambda c: c.given.get("softcap") is not None)),
    fault("causal-dropped-at-one-query", "a decoding step is taken to see everything",
          causal_rule=_dropped(lambda c: c.grid.Lq == 1)),
    fault("causal-dropped-when-rectangular", "only square calls are masked",
          causal_rule=_dropped(lambda c: c.grid.Lq != c.grid.Lk)),
    fault("causal-dropped-past-the-first-entry", "only batch entry 0 is masked",
          causal_rule=lambda self, c, mask: Kernel.causal_rule(self, c, mask)
          | (np.arange(c.grid.N) > 0).reshape(-1, 1, 1, 1)),
    fault("causal-always-top-left", "bottom_right is read as top_left",
          positions=_aligned(lambda align: "top_left")),
    fault("causal-always-bottom-right", "top_left is read as bottom_right",
          positions=_aligned(lambda align: "bottom_right")),
    fault("causal-strict", "a query does not see its own key", causal_rule=_shifted(-1)),
    fault("causal-one-too-many", "a query sees the next key", causal_rule=_shifted(1)),
    fault("causal-flipped", "a query sees what comes after it",
          causal_rule=lambda self, c, mask: self.key_positions(c, mask) >= self.positions(c, mask)),
    fault("causal-ignores-lengths", "bottom_right aligns with the padded ends",
          offset=_whole_offset),
    fault("causal-ignores-query-lengths", "bottom_right counts padded queries",
          offset=_keys_only_offset),
    fault("causal-first-length", "bottom_right takes the first entry's lengths for all",
          offset=_first_offset),
    fault("causal-offset-clamped", "with more queries than keys the first rows see key 0 and more",
          offset=_clamped_offset),
    fault("causal-moved-by-starts", "left padding moves positions", offset=_starts_offset),
    fault("causal-ignores-query-positions", "explicit q_pos is dropped",
          positions=lambda self, c, mask: self.i(c) if mask.q_pos is not None
          else Kernel.positions(self, c, mask)),
    fault("causal-ignores-key-positions", "explicit kv_pos is dropped",
          key_positions=lambda self, c, mask: self.j(c)),
    fault("causal-skips-by-the-diagonal", "tiles right of the square diagonal are skipped",
          key_blocks=_square_tiles),
    fault("causal-masks-one-tile", "tiles past the diagonal one are read unmasked",
          causal_rule=_diagonal_only),
    fault("causal-last-tile-lost", "the count of visible tiles is rounded down",
          key_blocks=_early_skip),
    fault("causal-not-in-backward", "the backward pass computes all pairs",
          cotangents=_forgotten),
)  # fmt: skip
