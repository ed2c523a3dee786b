"""Timing several things against each other on a machine that is not quiet.

Threads of OpenMP and OpenBLAS spin on after a call and slow what comes next, so there is a pause
between two implementations; a core that was idle for a while is slow to start, so what is timed is
run once untimed after the pause. Every round times each of them once, in an order that rotates,
and the figure is the median over rounds: what disturbs a while disturbs all alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

__all__ = ["Taken", "interleaved"]

Name = TypeVar("Name", bound=Hashable)

PAUSE = 0.03
BATCH = 0.03
"""Seconds that a timed batch lasts at least, so that a call of 50 µs is not lost in the clock."""
SHORT = 1.0
"""Seconds up to which a start from cold would be felt."""
ROUNDS = (3, 15)
MOST = 10_000


class Taken(NamedTuple):
    """What a call took.

    Attributes:
        seconds: the median over rounds.
        low: the tenth percentile, which neighbours spare.
        high: the ninetieth.
        rounds: how many there were.
    """

    seconds: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, by the median."""
        return (self.high - self.low) / self.seconds


def interleaved(
    runs: Mapping[Name, Callable[[], Any]], *, budget: float = 20.0, pause: float = PAUSE
) -> dict[Name, Taken]:
    """Time calls against each other, in turn.

    Args:
        runs: what is timed, by name; each does its work to the end.
        budget: seconds that all rounds together should take; there are three rounds at least.
        pause: seconds between two of them.
    """
    once = {name: _seconds(run) for name, run in runs.items()}
    taken: dict[Name, list[float]] = {name: [] for name in runs}
    names, turn, start = list(runs), 0, time.perf_counter()
    while names and (turn < ROUNDS[0] or (turn < ROUNDS[1] and _left(start, turn, budget))):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(_once(runs[name], once[name], pause))
        turn += 1
    return {name: _summed(values) for name, values in taken.items()}


def _left(start: float, turns: int, budget: float) -> bool:
    """Whether another round fits."""
    spent = time.perf_counter() - start
    return spent * (turns + 1) / turns <= budget


def _seconds(run: Callable[[], Any]) -> float:
    """What a run takes, roughly; what is timed has run once before, when it was checked."""
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, 1e-7)


def _once(run: Callable[[], Any], took: float, pause: float) -> float:
    """Mean seconds of one run in a batch, after a pause and, if it is short, an untimed run."""
    count = max(1, min(MOST, round(BATCH / took)))
    gc.collect()
    time.sleep(pause)
    if took < SHORT:
        run()
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def _summed(values: list[float]) -> Taken:
    if len(values) < 2:
        return Taken(values[0], values[0], values[0], 1)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Taken(statistics.median(values), tenths[0], tenths[-1], len(values))
