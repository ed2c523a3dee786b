"""The comparator: one array against its expected values and its bound.

It must never let a NaN hide anything. A reference row of NaN and a kernel's number there is a
fault, and so is the reverse; an element passes only where a rule written here says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bound", "Judgement", "judge"]


@dataclass(frozen=True)
class Bound:
    """What may differ, element by element.

    Attributes:
        limit: Largest absolute error. 0 asks for the very value, the kind of infinity included.
        either: Where a value may be finite or not, as theory leaves it open.
        overflow: Magnitudes from here on may come as infinity in the result's dtype.
    """

    limit: NDArray[np.float64]
    either: NDArray[np.bool_]
    overflow: float = math.inf


@dataclass(frozen=True)
class Judgement:
    """The verdict on one array.

    Attributes:
        ok: Whether every element is within its bound.
        ratio: Largest error as a multiple of its bound; inf where non-finite values differ.
        where: Index of the worst element, or None when the array is empty.
        mismatches: Elements that are finite on one side alone, or of the wrong kind.
        detail: One line for a person.
        rms_ratio: RMS of the errors over RMS of the bounds.
        slope: The part of the error that is proportional to the expected values.
        drift: The slope as a share of what errors of the bounds' size, all of one sign, would give.
        distinct: How many different values were expected.
        share: The largest part that one expected value has in the squares of the bounds.
    """

    ok: bool
    ratio: float
    where: tuple[int, ...] | None
    mismatches: int
    detail: str
    rms_ratio: float = 0.0
    slope: float = 0.0
    drift: float = 0.0
    distinct: int = 0
    share: float = 0.0


def judge(actual: Any, expected: NDArray[np.float64], bound: Bound) -> Judgement:
    """Compare an array with its expected values.

    Args:
        actual: What a kernel gave, of any floating dtype.
        expected: The reference in float64, of the same shape.
        bound: The limits, of the same shape.
    """
    actual = np.asarray(actual)
    if actual.shape != expected.shape:
        detail = f"shape {actual.shape}, expected {expected.shape}"
        return Judgement(False, math.inf, None, 0, detail)
    if expected.size == 0:
        return Judgement(True, 0.0, None, 0, "empty")
    got = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio, mismatch = _ratios(got, expected, bound)
        where = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
        systematic = _systematic(got, expected, bound)
    worst = float(ratio[where])
    detail = (
        f"at {where}: got {got[where]:.9g}, expected {expected[where]:.9g}, "
        f"bound {bound.limit[where]:.3g}, ratio {worst:.3g}"
    )
    count = int(mismatch.sum())
    if count:
        detail += f"; {count} of {got.size} elements finite on one side alone or of the wrong kind"
    return Judgement(worst <= 1.0, worst, where, count, detail, *systematic)


def _ratios(
    got: NDArray[np.float64], expected: NDArray[np.float64], bound: Bound
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Error over bound of each element, and which elements are non-finite where they may not be."""
    got_finite, finite = np.isfinite(got), np.isfinite(expected)
    error = np.abs(got - expected)
    ratio = np.where(error == 0.0, 0.0, error / bound.limit)
    # A NaN limit must not turn into a pass.
    ratio = np.where(np.isnan(ratio), np.inf, ratio)

    same_kind = (got == expected) | (np.isnan(got) & np.isnan(expected))
    both_non_finite = ~got_finite & ~finite & ((bound.limit > 0.0) | same_kind)
    overflowed = (
        np.isinf(got)
        & finite
        & (np.abs(expected) + bound.limit >= bound.overflow)
        & (np.sign(got) == np.sign(expected))
    )
    open_question = bound.either & ~(got_finite & finite)
    excused = both_non_finite | overflowed | open_question
    mismatch = ~(got_finite & finite) & ~excused
    ratio = np.where(got_finite & finite, ratio, np.where(mismatch, np.inf, 0.0))
    return ratio, mismatch


def _systematic(
    got: NDArray[np.float64], expected: NDArray[np.float64], bound: Bound
) -> tuple[float, float, float, int, float]:
    """How much of the error is not noise, over the elements that are finite on both sides."""
    use = np.isfinite(got) & np.isfinite(expected) & np.isfinite(bound.limit)
    if not use.any():
        return 0.0, 0.0, 0.0, 0, 0.0
    error, truth, limit = got[use] - expected[use], expected[use], bound.limit[use]
    floor = math.sqrt(float(np.mean(limit**2)))
    power = float(truth @ truth)
    rms_ratio = math.sqrt(float(np.mean(error**2))) / floor if floor else 0.0
    along = abs(float(error @ truth))
    most = float(limit @ np.abs(truth))
    slope = along / power if power else 0.0
    drift = along / most if most else 0.0
    values, which = np.unique(truth, return_inverse=True)
    squares = np.bincount(which, weights=limit**2)
    share = float(squares.max() / squares.sum()) if floor else 0.0
    return rms_ratio, slope, drift, values.size, share
