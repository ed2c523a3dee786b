"""What an `Alibi` adds, one method a decision, so that a fault can change a single one of them.

Like `Sight` it is a third reading, here of S2.7, beside attnx's own and the oracle's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.plugin import Alibi

from ._sight import Call, Sight

__all__ = ["Slants"]


class Slants(Sight):
    """Clause S2.7."""

    def added(self, given: dict[str, Any]) -> Any:
        """A bias that is an array, or None."""
        bias = given.get("bias")
        return None if isinstance(bias, Alibi) else bias

    def slant(self, c: Call, s: Any, rows: slice, cols: slice) -> Any:
        """Scores with what an `Alibi` adds, after the cap."""
        alibi = c.given.get("bias")
        if not isinstance(alibi, Alibi):
            return s
        return s - self.slopes(c, alibi) * self.distance(c, alibi, rows, cols)

    def slopes(self, c: Call, alibi: Any) -> Any:
        """One a query head, `(Hq, 1, 1)`."""
        return np.asarray(alibi.slopes).astype(c.high)[:, None, None]

    def distance(self, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
        """How far apart they stand, `(1 or N, 1, r, n)`."""
        return np.abs(self.away(c, alibi, rows, cols)).astype(c.high)

    def away(self, c: Call, alibi: Any, rows: slice, cols: slice) -> Any:
        """Positions of queries less those of keys."""
        i, j = self.positions(c, alibi), self.key_positions(c, alibi)
        return i[..., rows, :] - j[..., cols]
