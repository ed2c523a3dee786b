"""How long each of several functions takes, measured so that what disturbs one disturbs all.

They take turns, the first place moves on with each round, and the figure is the median: a machine
that slows down, or another program's burst, falls on all of them. A turn of shorter calls begins
with one that is not counted: threads that fell asleep while others ran are awake after it, as they
are in a program that calls one backend again and again.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["interleaved"]

ROUNDS = 3, 10
TURN = 3
"""Calls that are counted in a turn, at most."""

SHORT, LONG = 0.01, 0.1
"""Seconds after which a turn ends, and of calls beside which waking up is nothing."""

BUDGET = 0.5
"""Seconds after which the least number of rounds is enough."""

PATIENCE = 10.0
"""Seconds after which one round is."""


def interleaved(
    runs: Mapping[str, Callable[[], None]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each function.

    Example:
        >>> ticks = iter(range(1000))
        >>> interleaved({"one": int, "other": int}, clock=lambda: next(ticks))
        {'one': 1, 'other': 1}
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    least, most = ROUNDS
    spent = 0.0
    for number in range(most):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times = _turn(runs[name], clock, wake=min(taken[name], default=0.0) < LONG)
            taken[name] += times
            spent += sum(times)
        if spent > (BUDGET if number + 1 >= least else PATIENCE):
            break
    return {name: statistics.median(times) for name, times in taken.items()}


def _turn(run: Callable[[], None], clock: Callable[[], float], *, wake: bool) -> list[float]:
    """The times of one turn."""
    if wake:
        run()
    times: list[float] = []
    while len(times) < TURN and sum(times) < SHORT:
        start = clock()
        run()
        times.append(clock() - start)
    return times
