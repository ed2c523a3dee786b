"""A run of the benchmark: the rows, the special measures, the goals and the plots' series."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnx.errors import ArgumentError

from . import special
from ._child import ask
from .goals import Figures, judge
from .implementation import Implementation
from .machine import about
from .measure import record_of, time_row
from .peers import IMPLEMENTATIONS
from .report import Report, Row, Series
from .workload import Workload
from .workloads import WORKLOADS

__all__ = ["BASELINES", "SPECIALS", "Asked", "run"]

BASELINES = ("torch SDPA", "numpy naive", "jax.nn", "attnx numpy")
"""What a row's ratios refer to: the first of these that ran in it."""
OURS = ("numpy", "torch", "jax")
SPECIALS = ("overhead", "import", "memory", "callers")
"""Workloads that are no call of attention."""
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
WEIGHED = (1024, 4096, 8192)
"""Lengths of the plots, and those at which memory is measured, a process each."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Asked:
    """What a run holds.

    Attributes:
        workloads: names or patterns of workloads and special measures; all when empty.
        implementations: names or patterns (`"attnx *"`, `"torch*"`); all when empty.
        dtype: what the workloads are run in; their own when "".
        quick: only the workloads that stand for the others, for fewer rounds.
        series: whether the plots' series are measured as well.
        seed: of the operands.
        budget: seconds for the rounds of one workload.
    """

    workloads: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    dtype: str = ""
    quick: bool = False
    series: bool = False
    seed: int = 0
    budget: float = 20.0

    def chosen(self) -> tuple[list[Workload], list[str], list[Implementation]]:
        """The workloads, the special measures and the implementations.

        Raises:
            ArgumentError: a name that nothing bears, with those that come near.
        """
        known = [w.name for w in WORKLOADS] + list(SPECIALS)
        names = [i.name for i in IMPLEMENTATIONS]
        _known("workload", self.workloads, known)
        _known("backend", self.implementations, names)
        _known("dtype", (self.dtype,) if self.dtype else (), DTYPES)
        wanted = [w for w in WORKLOADS if _named(w.name, self.workloads)]
        if self.quick and not self.workloads:
            wanted = [w for w in wanted if w.quick]
        if self.dtype:
            wanted = [w.with_(dtype=self.dtype) for w in wanted]
        measures = [name for name in SPECIALS if _named(name, self.workloads)]
        if self.quick and not self.workloads:
            measures = ["overhead"]
        patterns = self.implementations
        chosen = [
            i for i in IMPLEMENTATIONS if _named(i.name, patterns) and (patterns or not i.named)
        ]
        return wanted, measures, chosen


def _named(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if not any(fnmatch.fnmatchcase(x, name) for x in known):
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or list(known)
            raise ArgumentError(f"{what}: no {what} {name!r}; known: {', '.join(near)}")


@dataclass
class _Run:
    asked: Asked
    progress: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    special: dict[str, float] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)

    def rows_of(self, workloads: Sequence[Workload], chosen: Sequence[Implementation]) -> None:
        for workload in workloads:
            self.rows.append(self.row(workload, chosen))

    def row(self, workload: Workload, chosen: Sequence[Implementation]) -> Row:
        return time_row(
            workload, chosen, seed=self.asked.seed,
            budget=self.asked.budget / (3 if self.asked.quick else 1),
            on_cell=lambda name: self.progress(f"{workload.name}: {name}"),
        )  # fmt: skip

    def special_of(self, measures: Sequence[str], chosen: Sequence[Implementation]) -> None:
        ours = [name for name in OURS if any(i.name == f"attnx {name}" for i in chosen)]
        for name in measures:
            if name == "import":
                self.progress(name)
                self.special["import"] = special.imports()
            elif name == "memory":
                self.memory([i for i in chosen if not i.process])
            else:
                self.each(name, ours)

    def each(self, measure: str, backends: Sequence[str]) -> None:
        for backend in backends:
            self.progress(f"{measure}: {backend}")
            if measure == "callers":
                self.special[f"callers attnx {backend}"] = special.concurrent(backend)
                continue
            taken = special.overhead(backend, 150 if self.asked.quick else 400)
            for at, which in enumerate(("", " median")):
                for part in ("kernel", "call", "look"):
                    label = "overhead" if part == "call" else f"overhead's {part}"
                    self.special[f"{label} attnx {backend}{which}"] = getattr(taken, part)[at]

    def memory(self, chosen: Sequence[Implementation]) -> None:
        for name in ("long", "long-backward"):
            workload = next(w for w in WORKLOADS if w.name == name)
            for each in chosen:
                self.progress(f"memory of {name}: {each.name}")
                peak = self.peak(workload, each)
                if peak is not None:
                    self.special[f"peak {each.name}: {name}"] = peak / 1e6

    def peak(self, workload: Workload, each: Implementation) -> int | None:
        """Its peak in a fresh process, or None where it does not run the workload."""
        request = {
            "what": "peak", "workload": record_of(workload), "implementations": [each.name],
            "seed": self.asked.seed,
        }  # fmt: skip
        try:
            peak: int | None = ask(request, each.environment)["peak"]
        except RuntimeError:
            return None
        return peak

    def series_of(self, chosen: Sequence[Implementation]) -> None:
        here = [i for i in chosen if not i.process]
        for title, changes in (
            ("causal, forward", {"causal": "top_left"}),
            ("causal, forward and backward", {"causal": "top_left", "gradient": True}),
        ):
            points: dict[str, list[tuple[int, float | None, int | None]]] = {}
            for length in LENGTHS:
                base = Workload(f"L {length}", title, Lq=length, Lk=length)
                workload = base.with_(**changes)
                row = self.row(workload, here)
                faults = tuple(c for c in row.cells if c.status in ("wrong", "crashed"))
                if faults:  # a point that is missing for a fault is told as a row is
                    name = f"{title}, L {length}"
                    self.rows.append(replace(row, name=name, cells=faults))
                for cell in row.cells:
                    each = next(i for i in here if i.name == cell.implementation)
                    weighed = length in WEIGHED and cell.seconds is not None
                    peak = self.peak(workload, each) if weighed else None
                    found = points.setdefault(cell.implementation, [])
                    found.append((length, cell.seconds, peak))
            kept = {name: tuple(p) for name, p in points.items() if any(x[1] for x in p)}
            if kept:
                self.series.append(Series(title, kept))


def run(asked: Asked, progress: Callable[[str], None] = lambda what: None) -> Report:
    """Measure what is asked for; an interrupt ends it with what is known."""
    workloads, measures, chosen = asked.chosen()
    progress("the machine's sgemm peak")
    machine: dict[str, Any] = about() | {"baselines": list(BASELINES), "seed": asked.seed}
    made = _Run(asked, progress)
    interrupted = False
    try:
        made.rows_of(workloads, chosen)
        made.special_of(measures, chosen)
        if asked.series:
            made.series_of(chosen)
    except KeyboardInterrupt:
        interrupted = True
    goals = judge(
        Figures.of(made.rows, made.special, machine), [r.name for r in made.rows], measures
    )
    machine["special"] = {name: round(value, 3) for name, value in made.special.items()}
    return Report(machine, tuple(made.rows), tuple(goals), tuple(made.series), interrupted)
