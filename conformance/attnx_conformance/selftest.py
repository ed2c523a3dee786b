"""The suite against planted faults: which case catches which, and no alarm on a correct kernel.

A fault is of some kind, and the cases that were written for that kind come first, so that most
faults are settled by a handful of trials. What a case expects is computed once for all faults of a
kind: trials are the outer loop, faults the inner one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from itertools import groupby
from multiprocessing import get_context
from typing import NamedTuple

from .cases import CASES, DTYPES, HEAVY, Case
from .faults import CONTROLS, FAULTS, Fault, find
from .runner import Outcome, examine

__all__ = [
    "Catch", "SelfTest", "Trial", "alarms", "in_parts", "matrix", "related", "self_test",
    "trials",
]  # fmt: skip

PART = 14
"""Faults that one process takes at a time."""


_NEAR: Mapping[str, tuple[str, ...]] = {
    "scale": ("scale", "head-size", "values-", "self", "cross"),
    "softcap": ("softcap", "bias-everything"),
    "causal": ("causal", "lengths-bottom", "lengths-decode", "starts-bottom", "window-positions"),
    "masks": ("bool", "wide-mask", "tall-mask", "segments", "prefix", "predicate", "not-", "or-",
              "and-", "triple", "lengths", "window-mask", "bias-mask", "gradient-mask",
              "numbers-negative-lse"),
    "combined": ("prefix-", "or-", "not-", "and-or", "triple", "starts-and", "lengths-twice"),
    "segments": ("segments",),
    "prefix": ("prefix",),
    "predicate": ("predicate",),
    "lengths": ("lengths", "starts", "triple", "empty-"),
    "windows": ("window", "triple", "and-or-not"),
    "empty-rows": ("empty", "none", "sinks-empty", "sinks-no-keys", "query-nan", "bias-hides"),
    "softmax": ("edge", "wide", "numbers", "long", "gradient-full", "ascending", "empty-past"),
    "maxima": ("300", "numbers-scale", "numbers-late", "ascending", "very-negative"),
    "heads": ("grouped", "one-key-head", "many-heads", "heads-as", "batch", "gradient-group"),
    "layout": ("strides", "tall", "head-size", "edge", "cross", "self", "grouped"),
    "bias": ("bias", "gradient-bias"),
    "sinks": ("sinks", "bias-everything", "gradient-softcap-everything"),
    "lse": ("cross", "grouped", "numbers", "sinks", "bias"),
    "dropout": ("dropout",),
    "alibi": ("alibi",),
    "backward": ("gradient", "grouped", "numbers-negative-lse", "sinks", "bias"),
    "behaviour": ("grouped", "one-pair", "one-key", "one-of-each", "bias", "sinks", "edge",
                  "empty"),
    "dtypes": ("grouped", "cross", "bias-float32"),
    "isolation": ("live", "wide-mask", "-nan", "poison", "empty", "numbers-masked", "bias-hides"),
    "numerics": ("numbers", "edge", "correlated", "gradient-full", "grouped", "bias-minus"),
}  # fmt: skip


class Trial(NamedTuple):
    """One case in one dtype."""

    case: Case
    dtype: str

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype}"


class Catch(NamedTuple):
    """A trial that a fault failed, and what the suite said of it."""

    trial: Trial
    outcome: Outcome


def trials(
    cases: Iterable[Case] = CASES,
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16", "float64"),
    *,
    heavy: bool = False,
) -> list[Trial]:
    """Every case in every dtype that it makes sense for, dtype by dtype.

    Args:
        cases: those to use.
        dtypes: in the order in which they are tried.
        heavy: whether cases with more than `HEAVY` scores a head are among them.
    """
    assert set(dtypes) <= set(DTYPES)
    chosen = [case for case in cases if heavy or case.scores <= HEAVY]
    return [Trial(case, dtype) for dtype in dtypes for case in chosen if dtype in case.dtypes]


def related(kind: str, case: Case) -> bool:
    """Whether a case was written with a kind of fault in mind."""
    return any(word in case.name for word in _NEAR.get(kind, ()))


def matrix(
    faults: Iterable[Fault], among: Sequence[Trial], *, stop: int | None = 2, seed: int = 0
) -> dict[str, list[Catch]]:
    """For each fault, by name, the trials that caught it.

    Args:
        faults: those to examine.
        among: the trials, in the order of choice within those that are related to a fault's kind.
        stop: a fault is settled once so many different cases have caught it; None for never.
        seed: of the inputs.

    Raises:
        RuntimeError: a planted fault crashed, which proves nothing about the suite.
    """
    found: dict[str, list[Catch]] = {}
    for kind, group in groupby(sorted(faults, key=lambda fault: fault.kind), lambda f: f.kind):
        open_faults = list(group)
        found |= {fault.name: [] for fault in open_faults}
        subjects = {fault.name: fault.subject() for fault in open_faults}
        for trial in sorted(among, key=lambda trial: not related(kind, trial.case)):
            for fault in open_faults:
                subject = subjects[fault.name]
                outcome = examine(trial.case, subject, trial.dtype, seed=seed, layout=fault.layout)
                if outcome.verdict == "crashed":
                    raise RuntimeError(f"{fault.name} on {trial}: {outcome.detail}")
                if not outcome.ok and _fair(trial, fault.layout, seed):
                    found[fault.name].append(Catch(trial, outcome))
            open_faults = [f for f in open_faults if not _settled(found[f.name], stop)]
            if not open_faults:
                break
    return found


@lru_cache(maxsize=4096)
def _fair(trial: Trial, layout: str, seed: int) -> bool:
    """Whether the kernel passes without a fault: a trial that accuses it catches nothing."""
    correct = Fault("correct", "control", "the kernel without a change", {}, layout)
    return examine(trial.case, correct.subject(), trial.dtype, seed=seed, layout=layout).ok


def _settled(catches: Collection[Catch], stop: int | None) -> bool:
    return stop is not None and len({catch.trial.case.name for catch in catches}) >= stop


def alarms(
    controls: Iterable[Fault], among: Iterable[Trial], *, seed: int = 0
) -> dict[str, list[Catch]]:
    """For each correct kernel, by name, what the suite holds against it: it should be nothing.

    Args:
        controls: the correct kernels.
        among: the trials.
        seed: of the inputs.
    """
    subjects = [(control, control.subject()) for control in controls]
    raised: dict[str, list[Catch]] = {control.name: [] for control, _ in subjects}
    for trial in among:
        for control, subject in subjects:
            outcome = examine(trial.case, subject, trial.dtype, seed=seed, layout=control.layout)
            if not outcome.ok:
                raised[control.name].append(Catch(trial, outcome))
    return raised


class SelfTest(NamedTuple):
    """What a self-test showed.

    Attributes:
        caught: for each fault, the names of the cases that caught it.
        alarms: for each control, by name, the trials that accuse it.
    """

    caught: dict[Fault, tuple[str, ...]]
    alarms: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Every fault has two killers, and no control is accused."""
        return all(len(set(names)) >= 2 for names in self.caught.values()) and not any(
            self.alarms.values()
        )


def self_test(
    faults: Iterable[Fault] = FAULTS,
    controls: Iterable[Fault] = CONTROLS,
    *,
    cases: Iterable[Case] = CASES,
    stop: int | None = 2,
    seed: int = 0,
) -> SelfTest:
    """Examine the suite: every fault, and every correct control.

    Heavy cases are used for the faults that no two light ones caught. With `stop`, a control meets
    each light case in one dtype, which its place in the list picks; without, in all.
    """
    faults, cases, light = list(faults), list(cases), trials(cases)
    found = matrix(faults, light, stop=stop, seed=seed)
    missing = [fault for fault in faults if not _settled(found[fault.name], 2)]
    heavy = [trial for trial in trials(cases, heavy=True) if trial.case.scores > HEAVY]
    for name, catches in matrix(missing, heavy, stop=stop, seed=seed).items():
        found[name] += catches
    sample = light if stop is None else _one_dtype_each(light)
    accused = alarms(controls, sample, seed=seed)
    return SelfTest(
        {fault: _cases(found[fault.name]) for fault in faults},
        {name: tuple(str(catch.trial) for catch in catches) for name, catches in accused.items()},
    )


def in_parts(
    jobs: int, *, stop: int | None = 2, seed: int = 0,
    on_part: Callable[[int, int], None] = lambda done, parts: None,
) -> SelfTest:  # fmt: skip
    """The whole self-test in several processes.

    Args:
        jobs: how many.
        stop: as in `self_test`.
        seed: alike.
        on_part: called with how many parts are done, and of how many.
    """
    by_kind = sorted(FAULTS, key=lambda fault: fault.kind)
    names = [fault.name for fault in by_kind]
    none: tuple[str, ...] = ()
    parts = [(tuple(names[at : at + PART]), none) for at in range(0, len(names), PART)]
    parts += [(none, (control.name,)) for control in CONTROLS]
    caught: dict[str, tuple[str, ...]] = {}
    accused: dict[str, tuple[str, ...]] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_part, *part, stop, seed) for part in parts]
        for done, future in enumerate(as_completed(waiting), 1):
            some_caught, some_accused = future.result()
            caught |= some_caught
            accused |= some_accused
            on_part(done, len(parts))
    return SelfTest({fault: caught[fault.name] for fault in FAULTS}, accused)


def _part(
    faults: Sequence[str], controls: Sequence[str], stop: int | None, seed: int
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    made = self_test(map(find, faults), map(find, controls), stop=stop, seed=seed)
    return {fault.name: names for fault, names in made.caught.items()}, made.alarms


def _one_dtype_each(among: Iterable[Trial]) -> list[Trial]:
    by_case: dict[str, list[Trial]] = {}
    for trial in among:
        by_case.setdefault(trial.case.name, []).append(trial)
    return [chosen[place % len(chosen)] for place, chosen in enumerate(by_case.values())]


def _cases(catches: Iterable[Catch]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(catch.trial.case.name for catch in catches))
