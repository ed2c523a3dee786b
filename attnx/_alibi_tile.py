"""What `Alibi` adds to the scores of a tile, in one place for every backend.

Positions come from the indices of the tile, by the same rules as those of masks, so a tile says the
same wherever it stands and however a backend cuts the call. The distances are integers: nothing is
rounded before the one product with a slope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._visibility import positions

if TYPE_CHECKING:
    from attnx._alibi import Alibi
    from attnx._visibility import Grid

__all__ = ["alibi_distances", "alibi_tile"]


def alibi_distances(alibi: Alibi, grid: Grid) -> Any:
    """-|p_i - j|, integers (1 or B, 1, queries, keys), over the grid's queries and keys."""
    p, j = positions(alibi, grid)
    return -grid.xp.abs(p - j)


def alibi_tile(alibi: Alibi, grid: Grid, dtype: Any) -> Any:
    """-slopes[h] |p_i - j|, (1 or B, heads, queries, keys), to be added after a softcap.

    Args:
        alibi: a call's; its arrays may be traced.
        grid: the indices.
        dtype: of the scores, float32 or float64.

    Example:
        >>> import numpy as np
        >>> from attnx import Alibi
        >>> from attnx.tiling import Grid
        >>> alibi = Alibi(np.array([1.0, 0.25], np.float32), "top_left")
        >>> grid = Grid(np, np.arange, *(slice(0, n) for n in (1, 2, 1, 3)))
        >>> alibi_tile(alibi, grid, np.float32)[0, :, 0].tolist()
        [[0.0, -1.0, -2.0], [0.0, -0.25, -0.5]]
    """
    xp = grid.xp
    slopes = xp.astype(grid.per_head(alibi.slopes), dtype)
    return xp.astype(alibi_distances(alibi, grid), dtype) * slopes
