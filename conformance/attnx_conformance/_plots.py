"""How the errors of a run lie under their bounds, as pictures and as numbers.

A verdict says that an error is under its bound, not by how much. A kernel that passes at 0.9 in
one result and at 0.01 in the others has something to tell, and a histogram on a logarithmic axis
shows it; the numbers stand beside it, for whom the picture is no use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .results import Result

__all__ = ["Distribution", "Worst", "distributions"]

LOW, HIGH = -5.0, 1.0
"""Decades of the axis; what lies outside is counted at its end."""
BINS = 48
WIDTH, HEIGHT = 480, 34
WORST = 8
KINDS = ("out", "lse", "weights", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Worst:
    """One trial that came near its bound, or over it."""

    result: Result
    kind: str
    ratio: str


@dataclass(frozen=True)
class Distribution:
    """The errors of one result of a subject, as multiples of their bounds.

    Attributes:
        kind: "out", "lse", "dq" and so on.
        count: trials that compared it.
        exact: those without any error.
        median: half of the trials are below it.
        worst: the largest.
        over: trials above 1.
        bars: `(x, y, width, height)` of the histogram, in the units of the picture.
    """

    kind: str
    count: int
    exact: int
    median: str
    worst: str
    over: int
    bars: tuple[tuple[float, float, float, float], ...]


def distributions(
    results: Sequence[Result],
) -> dict[str, tuple[tuple[Distribution, ...], tuple[Worst, ...]]]:
    """Of each subject that compared anything, the distributions and the worst trials."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.ratios:
            found.setdefault(result.subject, []).append(result)
    return {subject: (_of(mine), _worst(mine)) for subject, mine in found.items()}


def _of(results: Sequence[Result]) -> tuple[Distribution, ...]:
    made: dict[str, list[float]] = {}
    for result in results:
        for kind, ratio in result.ratios.items():
            made.setdefault(kind, []).append(math.inf if math.isnan(ratio) else ratio)
    order = sorted(made, key=lambda kind: (*KINDS, kind).index(kind))
    return tuple(_distribution(kind, sorted(made[kind])) for kind in order)


def _distribution(kind: str, ratios: list[float]) -> Distribution:
    counts = [0] * BINS
    for ratio in ratios:
        if ratio > 0:
            place = math.log10(ratio) if math.isfinite(ratio) else HIGH
            bin_ = int((place - LOW) / (HIGH - LOW) * BINS)
            counts[min(max(bin_, 0), BINS - 1)] += 1
    step, most = WIDTH / BINS, max(*counts, 1)
    heights = [max(1.5, (HEIGHT - 2) * n / most) if n else 0.0 for n in counts]
    bars = tuple(
        (round(i * step, 1), round(HEIGHT - h, 1), round(step - 1, 1), round(h, 1))
        for i, h in enumerate(heights)
        if h
    )
    return Distribution(
        kind, len(ratios), sum(r == 0 for r in ratios), _said(ratios[len(ratios) // 2]),
        _said(ratios[-1]), sum(r > 1 for r in ratios), bars,
    )  # fmt: skip


def _worst(results: Sequence[Result]) -> tuple[Worst, ...]:
    """The trials nearest their bound, each once, those above it first."""

    def size(result: Result) -> float:
        return max(math.inf if math.isnan(x) else x for x in result.ratios.values())

    chosen = sorted(results, key=size, reverse=True)[:WORST]
    made = []
    for result in chosen:
        kind = max(result.ratios, key=lambda k: (math.isnan(result.ratios[k]), result.ratios[k]))
        made.append(Worst(result, kind, _said(result.ratios[kind])))
    return tuple(made)


def _said(ratio: float) -> str:
    return f"{ratio:.3g}" if math.isfinite(ratio) else "∞"
