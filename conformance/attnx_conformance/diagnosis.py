"""What a wrong answer looks like: the planted fault that gives the same one.

A number that is off says little to the author of a kernel. The suite knows two hundred mistakes by
their answers, so it asks each of them the same question; one that answers alike, within the error
bound, is the likely reason.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .cases import Case
from .expectation import expectation
from .judgement import Bound, judge
from .runner import Outcome, examine, lacking_of
from .subject import FunctionSubject, Subject

__all__ = ["likely"]

HEAVY, TOLD = 40_000, 3


def likely(
    outcome: Outcome, case: Case, subject: Subject, dtype: str, layout: str, seed: int
) -> tuple[str, ...]:
    """The planted faults that give a failed trial's wrong result, in words; a few at most.

    Args:
        outcome: of the trial, with its results.
        case: the case.
        subject: what failed it.
        dtype: of q, k and v.
        layout: "bhsd" or "bshd".
        seed: of the inputs.
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
        if len(found) == TOLD:
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
