"""What a wrong answer looks like: the planted fault that gives the same one.

A number that is off says little to the author of a kernel. The suite knows two hundred mistakes by
their answers, so it asks each of them the same question; one that answers alike, within the error
bound, is the likely reason.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from .cases import HEAVY, Case
from .expectation import expectation
from .judgement import Bound, judge
from .runner import Outcome, examine, lacking_of
from .subject import FunctionSubject, Subject

__all__ = ["Diagnosis", "likely"]

TOLD = 3
ALIKE, SECONDS = 2, 15.0
"""Failures of the same clauses that are diagnosed, and the time that a run may spend on it."""


class Diagnosis:
    """Diagnoses the first few failures of each kind, as long as its time lasts."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, ...]] = Counter()
        self._left = SECONDS

    def line(
        self, case: Any, outcome: Outcome, subject: Subject, dtype: str, layout: str, seed: int
    ) -> str:
        """A line for the detail of a failed outcome, or ""; it never raises."""
        if outcome.verdict != "failed" or not isinstance(case, Case):
            return ""
        self._seen[case.clauses] += 1
        if self._seen[case.clauses] > ALIKE or self._left <= 0:
            return ""
        start = time.perf_counter()
        try:
            found = likely(outcome, case, subject, dtype, layout, seed, until=start + self._left)
        except Exception:  # a diagnosis is a courtesy: the verdict stands without it
            found = ()
        self._left -= time.perf_counter() - start
        return f"\nas if: {'; or '.join(found)}" if found else ""


def likely(
    outcome: Outcome, case: Case, subject: Subject, dtype: str, layout: str, seed: int, *,
    until: float = math.inf,
) -> tuple[str, ...]:  # fmt: skip
    """The planted faults that give a failed trial's wrong result, in words; a few at most.

    Args:
        outcome: of the trial, with its results.
        case: the case.
        subject: what failed it.
        dtype: of q, k and v.
        layout: "bhsd" or "bshd".
        seed: of the inputs.
        until: when to stop looking, by `time.perf_counter`.
    """
    name = outcome.wrong
    if not name or case.scores > HEAVY:
        return ()
    lacks = lacking_of(case, subject)
    expected = expectation(case, dtype, layout, seed, subject.capabilities.scores, lacks)
    wrong, found = outcome.results[name], []
    if wrong.shape != expected.truth(name).shape:
        return ()
    way = "vjp" if name.startswith("d") else None
    for what, faulty in _faults(layout):
        theirs = examine(
            case, faulty, dtype, seed=seed, layout=layout, gradients=way, lacks=lacks
        ).results.get(name)
        if theirs is None or theirs.shape != wrong.shape:
            continue
        limit = expected.limit(name)
        if judge(theirs, expected.truth(name), limit).ok:
            continue
        if _alike(wrong, theirs.astype(np.float64), limit):
            found.append(what)
        if len(found) == TOLD or time.perf_counter() > until:
            break
    return tuple(found)


def _alike(wrong: Any, theirs: Any, bound: Bound) -> bool:
    """Whether two wrong answers agree: where the right one is exactly 0 there is no bound left."""
    with np.errstate(all="ignore"):
        size = np.where(np.isfinite(theirs), np.abs(theirs), 0.0)
        return judge(wrong, theirs, Bound(bound.limit + 1e-3 * size + 1e-6, bound.either)).ok


@cache
def _faults(layout: str) -> tuple[tuple[str, FunctionSubject], ...]:
    from .faults import FAULTS

    return tuple((fault.what, fault.subject(layout)) for fault in FAULTS)
