"""What a run asks for, and the run itself.

A run is a list of trials, the same for every subject and machine: which dtype, layout and way to
gradients a case takes is picked by its name. Nothing is skipped inside a profile without a verdict
that says so.
"""

from __future__ import annotations

import difflib
import fnmatch
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from attnx.errors import ArgumentError

from ._items import PROFILES, Item, absent, items, names
from ._pool import Pool, Task
from .cases import DTYPES, HEAVY, Case
from .deviations import Deviation, waive
from .results import Result
from .subject import LAYOUTS, Subject

__all__ = [
    "LEVELS",
    "PROFILES",
    "Selection",
    "Trial",
    "cases_of",
    "examine_all",
    "trials",
]

LEVELS = ("quick", "standard", "full")
WAYS = ("vjp", "framework")


@dataclass(frozen=True)
class Trial:
    """One thing to run."""

    item: Item
    dtype: str
    layout: str
    way: str | None
    seed: int

    @property
    def task(self) -> Task:
        """The same by its names, and what its result has to carry."""
        item = self.item
        profile = item.profile_of(self.dtype)
        return Task(
            item.name, self.dtype, self.layout, self.way, self.seed, profile, item.clauses, item.ids
        )


@dataclass(frozen=True)
class Selection:
    """Which trials a run holds.

    Attributes:
        level: "quick" (a sample), "standard" (every case once) or "full" (every case in every
            dtype, layout and way to gradients).
        profiles: those wanted; all when empty.
        cases: names or patterns (`causal-*`); all when empty.
        dtypes: those wanted; all when empty.
        layouts: alike.
        ways: ways to gradients, "vjp" and "framework"; all when empty.
        seed: of the inputs.
    """

    level: str = "standard"
    profiles: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    seed: int = 0
    ways: tuple[str, ...] = ()

    def check(self, subjects: Iterable[Subject] = ()) -> None:
        """Refuse a name that nothing bears.

        Args:
            subjects: those to be examined; their plugins may have cases of their own.

        Raises:
            ArgumentError: with the names that come near.
        """
        _known("level", (self.level,), LEVELS)
        _known("profile", self.profiles, PROFILES)
        _known("dtype", self.dtypes, DTYPES)
        _known("layout", self.layouts, LAYOUTS)
        _known("way", self.ways, WAYS)
        for profile, why in self.absent().items() if self.profiles else ():
            raise ArgumentError(f"profile: {profile} cannot be run here: {why}")
        known = names(subjects, self.cases) if self.cases else []
        plain = [n for n in self.cases if not any(fnmatch.fnmatchcase(x, n) for x in known)]
        _known("case", plain, known)

    def sample(self, subjects: Iterable[Subject]) -> bool:
        """Whether it leaves out trials of the profiles that it is about."""
        narrowed = bool(self.cases or self.ways) or self.level == "quick"
        wanted = set(self.dtypes)
        return narrowed or any(wanted and s.capabilities.dtypes - wanted for s in subjects)

    def absent(self) -> dict[str, str]:
        """The profiles that are asked for and cannot be run here, and why."""
        if self.cases:
            return {}
        return {p: w for p, w in absent().items() if not self.profiles or p in self.profiles}

    def wants(self, item: Item) -> bool:
        """Whether an item is asked for by its name, and in some dtype by its profile."""
        named = any(fnmatch.fnmatchcase(item.name, pattern) for pattern in self.cases)
        return (not self.cases or named) and bool(self.dtypes_of(item))

    def dtypes_of(self, item: Item) -> list[str]:
        """The dtypes of an item that are asked for."""
        return [
            dtype
            for dtype in item.dtypes
            if (not self.dtypes or dtype in self.dtypes)
            and (not self.profiles or item.profile_of(dtype) in self.profiles)
        ]


def cases_of(selection: Selection) -> tuple[Case, ...]:
    """The plain cases that a selection asks for, less those about strides: no file holds them."""
    return tuple(
        item.source
        for item in items(None, selection.cases)
        if isinstance(item.source, Case)
        and not item.source.make.views
        and selection.wants(item)
        and _sampled(item, selection)
    )


def _known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or list(known)[:8]
            raise ArgumentError(f"{what}: no {what} {name!r}; did you mean {', '.join(near)}?")


def trials(subject: Subject, selection: Selection) -> tuple[Trial, ...]:
    """The trials of a selection, cheap ones first."""
    selection.check((subject,))
    chosen: list[Trial] = []
    for item in items(subject, selection.cases):
        if selection.wants(item) and _sampled(item, selection):
            chosen += _of(item, subject, selection)
    if not chosen:
        asked = [x for x in (*selection.cases, *selection.profiles, *selection.dtypes,
                             *selection.layouts, *selection.ways) if x]  # fmt: skip
        raise ArgumentError(
            f"nothing to run for {subject.name}: no trial is all of {', '.join(asked)}; trials in "
            "16 bits are of the profile low-precision alone"
        )
    return tuple(sorted(chosen, key=lambda trial: trial.item.scores > HEAVY))


def _sampled(item: Item, selection: Selection) -> bool:
    if selection.level != "quick" or selection.cases:
        return True
    pick = zlib.crc32(item.name.encode())
    return item.scores <= HEAVY and (pick >> 16) % 4 == 0


def _of(item: Item, subject: Subject, selection: Selection) -> list[Trial]:
    dtypes = selection.dtypes_of(item)
    layouts = [x for x in selection.layouts or LAYOUTS if x in subject.layouts]
    ways: Sequence[str | None] = subject.ways or (None,)
    ways = [w for w in ways if not selection.ways or w is None or w in selection.ways]
    if not (dtypes and layouts and ways):
        return []
    if selection.level == "full" and item.is_case:
        return [Trial(item, d, x, w, selection.seed) for d in dtypes for x in layouts for w in ways]
    declared = [d for d in dtypes if d in subject.capabilities.dtypes] or dtypes
    pick = zlib.crc32(item.name.encode())
    dtype, layout = declared[pick % len(declared)], layouts[(pick >> 8) % len(layouts)]
    return [Trial(item, dtype, layout, ways[(pick >> 9) % len(ways)], selection.seed)]


def examine_all(
    subject: Subject,
    planned: Sequence[Trial],
    *,
    jobs: int = 1,
    timeout: float = 300.0,
    deviations: Sequence[Deviation] = (),
    on_result: Callable[[Result], None] = lambda result: None,
    on_route: Callable[[dict[str, Any]], None] = lambda route: None,
) -> None:
    """Run trials in worker processes, so that a crash or a hang is a verdict on one case.

    Args:
        subject: what is examined; it is made again in each worker from its `spec`.
        planned: the trials.
        jobs: how many workers run at once.
        timeout: seconds after which a trial counts as hanging.
        deviations: the subject's known deviations.
        on_result: called with each result, in the order in which they come.
        on_route: called at the end, also of a run that is interrupted, with what was seen of the
            route: `{"calls": {method: count}, "ledger": {axis: [values]}}`, empty for a function.
    """
    pool = Pool(subject.spec, subject.target, jobs, timeout)
    try:
        with closing(pool.run([trial.task for trial in planned], subject.name)) as results:
            for result in results:
                on_result(waive(result, deviations))
    finally:
        on_route(pool.route)
