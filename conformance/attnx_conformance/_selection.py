"""Sums over visible keys that a hidden NaN cannot reach.

`0 * NaN` is NaN, so a plain matrix product carries what a hidden key holds into every row. The
oracle multiplies finite numbers only, and then writes NaN exactly where a visible term is not
finite (S4.1 to S4.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "any_of", "blocks", "finite", "selected_product", "touches"]

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
_CHUNK = 1 << 17


def any_of(flag: Bools, axis: int | tuple[int, ...]) -> Bools:
    """`flag.any(axis)`, as an array whatever its number of axes."""
    return np.asarray(np.logical_or.reduce(flag, axis=axis), dtype=np.bool_)


def finite(array: NDArray[Any]) -> Floats:
    """The array with zeros where it is NaN or infinite."""
    return np.where(np.isfinite(array), array, 0.0)


def touches(visible: Bools, flag: Bools) -> Bools:
    """Whether row i sees any flagged element of column d: `visible @ flag` over booleans.

    Args:
        visible: `(..., n, m)`.
        flag: `(..., m, d)`.
    """
    if not flag.any():
        return np.zeros((*visible.shape[:-1], flag.shape[-1]), dtype=np.bool_)
    # float32 counts are exact below 2^24 and take the fast matrix product.
    return np.asarray(visible.astype(np.float32) @ flag.astype(np.float32) > 0)


def selected_product(weights: Floats, operand: Floats, visible: Bools) -> Floats:
    """`weights @ operand` where only visible pairs exist; NaN where a visible term is not finite.

    Args:
        weights: `(..., n, m)`, 0 where not visible.
        operand: `(..., m, d)`.
        visible: `(..., n, m)`.
    """
    total = finite(weights) @ finite(operand)
    bad = (visible & ~np.isfinite(weights)).any(axis=-1, keepdims=True)
    return np.where(bad | touches(visible, ~np.isfinite(operand)), np.nan, total)


def blocks(lead: tuple[int, ...], rows: int, row_size: int) -> Iterator[tuple[Any, ...]]:
    """Indices `(*lead, slice)` that cut an array into pieces of bounded size."""
    step = max(1, _CHUNK // max(1, row_size))
    for index in np.ndindex(*lead):
        for start in range(0, rows, step):
            yield (*index, slice(start, start + step))
