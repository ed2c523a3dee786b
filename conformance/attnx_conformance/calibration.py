"""How far correct kernels stay from their bounds: the evidence behind the limits of condition (b).

    python -m attnx_conformance.calibration [BACKEND]... [--full | --quick]

It runs the correct controls, and any backends that are named, over the cases, and prints for each
dtype and result the largest RMS of the error over that of the bound, and the largest drift. The
limits in `tolerance` are these maxima with room above; `docs/conformance.md` keeps the table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ._worker import wide_types
from .cases import CASES, DTYPES, HEAVY, Case
from .expectation import expectation
from .faults import CONTROLS
from .judgement import judge
from .runner import examine
from .subject import BackendSubject, Subject
from .tolerance import tells

__all__ = ["Figure", "main", "measured"]


class Figure(NamedTuple):
    """One result of one trial; `tells` where condition (b) looks at it."""

    subject: str
    case: str
    dtype: str
    result: str
    size: int
    ratio: float
    rms_ratio: float
    drift: float
    tells: bool


def measured(
    subjects: Iterable[Subject], cases: Iterable[Case] = CASES, *, full: bool = False
) -> Iterator[Figure]:
    """The figures of every trial that passes; with `full` in all dtypes, else in one each."""
    cases = [case for case in cases if full or case.scores <= HEAVY]
    for number, subject in enumerate(subjects):
        for place, case in enumerate(cases):
            chosen = case.dtypes if full else (case.dtypes[(place + number) % len(case.dtypes)],)
            for dtype in chosen:
                with wide_types(subject, dtype):
                    yield from _figures(subject, case, dtype)


def _figures(subject: Subject, case: Case, dtype: str) -> Iterator[Figure]:
    layout = subject.layouts[0]
    got = examine(case, subject, dtype, layout=layout)
    if got.verdict != "passed":
        return
    expected = expectation(case, dtype, layout, 0, subject.capabilities.scores)
    for name, array in got.results.items():
        if array.size:
            made = judge(array, expected.truth(name), expected.limit(name))
            yield Figure(
                subject.name, case.name, dtype, name, array.size, made.ratio, made.rms_ratio,
                made.drift, tells(made),
            )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the table."""
    names = [name for name in arguments if not name.startswith("-")]
    controls = CONTROLS[::4] if "--quick" in arguments else CONTROLS
    subjects: list[Subject] = [control.subject() for control in controls]
    subjects += [BackendSubject(name) for name in names]
    worst: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in measured(subjects, full="--full" in arguments):
        if figure.tells:
            worst[figure.dtype, figure.result].append(figure)
    print("| dtype | result | trials | error / bound | RMS / RMS | drift | where it drifts most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (dtype, result), found in sorted(
        worst.items(), key=lambda x: (DTYPES.index(x[0][0]), x[0])
    ):
        top = max(found, key=lambda f: f.drift)
        print(
            f"| {dtype} | {result} | {len(found)} | {max(f.ratio for f in found):.2f} "
            f"| {max(f.rms_ratio for f in found):.2f} | {top.drift:.2f} "
            f"| {top.case}, {top.subject} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
