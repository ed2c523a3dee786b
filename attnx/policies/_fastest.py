"""`fastest`: measure who is quickest at a class of calls, once on this machine, and remember.

It measures when a plan is made, so the first call of a class waits and no other does. It never
measures where nothing may be computed: for an explanation, and where a transform is looking; there
it uses what is known. While it measures, whoever asks again in the same thread gets no answer.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnx._choice import Choice
from attnx._dispatch import make_plan
from attnx._loading import say
from attnx._registry import registry
from attnx.errors import ArgumentError, ArgumentTypeError, UnavailableBackend, UnsupportedError
from attnx.plugin import CallClass, Ranking, hookimpl
from attnx.policies._inputs import CannotBeMade, make
from attnx.policies._machine import version
from attnx.policies._names import Names
from attnx.policies._runs import Guarded, run_of
from attnx.policies._store import Measured, Store
from attnx.policies._timing import interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnx._dispatch import Plan

__all__ = ["LENGTHS", "fastest", "times"]

LENGTHS = (128, 1024)
NOT_YET = "not measured yet; the first such call does, or `attnx tune`"

_measuring = threading.local()
_one_at_a_time = threading.RLock()
"""Two measurements side by side would each measure the other."""
WAIT = 60.0
"""Seconds to wait for another's; it may itself wait for whoever asks, in a thread of a backend."""


class fastest:
    """The backend that was quickest when measured, for each class of calls on this machine.

    The first call of a class waits until its candidates have been measured, on synthetic arrays of
    one batch entry and four heads at each of `lengths`, with gradients where the call wants them;
    the order is that of the geometric means. The result is kept in the user's cache folder until
    the processor, the cores, the GPUs, attnx or a candidate's version changes. A candidate that
    fails while it is measured comes last. Inside `torch.compile` and under JAX's transforms nothing
    is measured: what is known is used, else the arrays' own framework.

    Args:
        *candidates: backends; without any, those of the arrays' own framework. Naming another
            framework's backend is the opt-in to exchange, whose cost is measured with it.
        lengths: Lk of the synthetic calls, each at least 16.
        folder: where to keep measurements instead of the user's cache folder.
        measure: `measure(runs) -> seconds` by name, for `runs` by name, instead of the median of
            runs in turn.

    Raises:
        ArgumentError: a name twice, or lengths that are none or too small.
        ArgumentTypeError: something that is no name, no integer, no path or no function.

    Example:
        >>> import attnx
        >>> from attnx import policies
        >>> attnx.register(policies.fastest("numpy", "torch"))
        >>> attnx.unregister("fastest")
    """

    __name__ = "fastest"

    def __init__(
        self,
        *candidates: str,
        lengths: Sequence[int] = LENGTHS,
        folder: str | Path | None = None,
        measure: Callable[[Mapping[str, Callable[[], None]]], Mapping[str, float]] = interleaved,
    ) -> None:
        self._names = Names("fastest", candidates)
        self.lengths = _checked(lengths)
        if not callable(measure):
            raise ArgumentTypeError(
                f"fastest: measure: expected a function of runs, got {type(measure).__name__}"
            )
        if not (folder is None or (isinstance(folder, (str, Path)) and str(folder))):
            raise ArgumentTypeError(f"fastest: folder: expected a path, got {folder!r}")
        self._store = Store(None if folder is None else Path(folder).absolute())
        self._measure = measure
        self._impossible: dict[CallClass, str] = {}
        self._guessed = False

    def __repr__(self) -> str:
        return f"fastest({', '.join(map(repr, self._names.all))})"

    @hookimpl
    def attnx_rank(
        self, call: CallClass, candidates: list[str], explaining: bool
    ) -> Ranking | None:
        """The candidates in the order of their times; measures them first where it may."""
        names = self._names.registered() if self._names.all else candidates
        if getattr(_measuring, "busy", False) or len(names) < (1 if self._names.all else 2):
            return None
        owner = candidates[:1]
        if len(names) < 2:
            found: Ranking | None = Ranking(names, self.lacking(call))
        elif call.traced:
            found = self._traced(call, names, owner)
        elif explaining:
            known = self._current(call, names)
            found = self._ranking(known, names, owner) if known else None
        else:
            known = self.tune(call, names)
            found = self._ranking(known, names, owner) if known else None
        if found is None:
            return self._unmeasured(call, names, owner, explaining=explaining)
        return found._replace(order=[*found.order, *(n for n in owner if n not in found.order)])

    def known(self, call: CallClass) -> dict[str, Measured]:
        """What was measured for a class of calls, as far as it still holds; measures nothing."""
        return self._current(call, list(self._store.load(_key(call), self.lengths)))

    def tune(self, call: CallClass, names: Sequence[str] | None = None) -> dict[str, Measured]:
        """Measure those that can do a class of calls, unless each has been measured already.

        Args:
            call: the class, as `attnx.explain(...).call` gives it.
            names: the candidates; by default those of the policy.

        Returns:
            By name, what is known of each that can do it.

        Raises:
            TimeoutError: another thread has been measuring for a minute; ask again later.
        """
        if names is None:
            names = self._names.registered() or registry.native(call.framework)
        if not _one_at_a_time.acquire(timeout=WAIT):
            self._guessed = True
            raise TimeoutError(f"another thread has been measuring for {WAIT:g} s")
        try:
            return self._tuned(_key(call), names)
        finally:
            _one_at_a_time.release()

    def _tuned(self, key: CallClass, names: Sequence[str]) -> dict[str, Measured]:
        """What is known; measured first, if somebody who can do it has not been."""
        known = self._current(key, names)
        missing = [name for name in names if name not in known]
        if not _plans(key, missing):
            return known
        plans = _plans(key, names)
        if len(plans) < 2 or key in self._impossible:
            return {}
        _measuring.busy = True
        try:
            measured = self._times(key, plans)
        except CannotBeMade as error:
            self._impossible[key] = str(error)
            return {}
        finally:
            _measuring.busy = False
        self._store.save(key, self.lengths, measured)
        self._correct()
        return measured

    def _correct(self) -> None:
        """Have plans made anew, if one was made under a transform or beside this, and knew less."""
        if self._guessed:
            self._guessed = False
            for forget in registry.on_change:
                forget()

    def lacking(self, call: CallClass) -> str:
        """Why a class of calls has no order, after `tune`."""
        return self._impossible.get(_key(call), "fewer than two candidates can do it")

    def _times(self, call: CallClass, plans: Mapping[str, Plan]) -> dict[str, Measured]:
        """Each length in turn, with one call of each beforehand: compilers compile in it."""
        lane = registry.lane(call.framework)
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        failures: dict[str, str] = {}
        for length in self.lengths:
            with lane.eager():
                ready = make(lane, call, length)
                runs = {
                    name: Guarded(run_of(lane, plan, ready), name, failures)
                    for name, plan in plans.items()
                    if name not in failures
                }
                for run in runs.values():
                    run()
                left = {name: run for name, run in runs.items() if name not in failures}
                taken = self._measure(left) if left else {}
            for name in left:
                seconds[name].append(_seconds(taken, name))
        return {
            name: Measured(version(name), (), failures[name])
            if name in failures
            else Measured(version(name), tuple(seconds[name]))
            for name in plans
        }

    def _current(self, call: CallClass, names: Sequence[str]) -> dict[str, Measured]:
        """What is stored of these names and was measured with what is installed now."""
        stored = self._store.load(_key(call), self.lengths)
        return self._still(stored, names)

    def _still(self, stored: Mapping[str, Measured], names: Sequence[str]) -> dict[str, Measured]:
        """Of what was stored, what holds for what is installed now."""
        registered = registry.names()
        asked = [name for name in names if name in stored and name in registered]
        return {name: stored[name] for name in asked if _installed(name) == stored[name].version}

    def _traced(self, call: CallClass, names: Sequence[str], owner: list[str]) -> Ranking | None:
        """What is known of the class outside a transform.

        A compiler that reads Python does not tell the head size (it puts 1, and 2 for another Dv):
        then what was measured at other sizes decides, if it agrees on who is first.
        """
        known = self._current(call, names)
        if known:
            return self._ranking(known, names, owner)
        if (call.D, call.Dv) not in ((1, 1), (1, 2)):
            return None
        rankings = []
        for kept in self._store.any_head_size(_key(call), self.lengths):
            current = self._still(kept, names)
            rankings += [self._ranking(current, names, owner)] if current else []
        if len({ranking.order[0] for ranking in rankings}) != 1:
            return None
        return rankings[0]._replace(why="measured at the head sizes that were met", notes=None)

    def _unmeasured(
        self, call: CallClass, names: Sequence[str], owner: list[str], *, explaining: bool
    ) -> Ranking:
        """Who computes where nothing is known, and why nothing is."""
        if _key(call) in self._impossible:
            return Ranking(owner, f"cannot be measured: {self.lacking(call)}")
        if call.traced:
            self._guessed = True
            return Ranking(owner, "not measured, and under a transform nothing is")
        if explaining:
            return Ranking(owner, NOT_YET, dict.fromkeys(names, "not measured yet"))
        order = [*names, *(name for name in owner if name not in names)]
        return Ranking(order, self.lacking(call))

    def _ranking(
        self, known: Mapping[str, Measured], names: Sequence[str], owner: list[str]
    ) -> Ranking:
        """By time; then those that were not measured, then the owner, and last what failed."""
        ranked = sorted(known, key=lambda name: (known[name].mean, names.index(name)))
        best = known[ranked[0]].mean
        notes = {name: self._note(known[name], best, first=name == ranked[0]) for name in ranked}
        rest = [name for name in names if name not in known]
        notes.update(dict.fromkeys(rest, "not measured"))
        failed = [name for name in ranked if known[name].failure]
        order = [*(name for name in ranked if name not in failed), *rest]
        order += [name for name in owner if name not in known and name not in rest]
        return Ranking([*order, *failed], "measured on this machine", notes)

    def _note(self, kept: Measured, best: float, *, first: bool) -> str:
        if kept.failure:
            return f"failed while it was measured: {kept.failure}"
        verdict = "fastest" if first else f"{kept.mean / best:.3g}x"
        return f"{times(kept, self.lengths)} (measured, {verdict})"


def duration(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> duration(0.00187)
        '1.87 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def times(kept: Measured, lengths: Sequence[int]) -> str:
    """What was measured, by length.

    Example:
        >>> times(Measured("numpy 2", (9e-5, 2e-3)), (128, 1024))
        '90 µs at 128, 2 ms at 1024'
    """
    pairs = zip(kept.seconds, lengths, strict=True)
    return ", ".join(f"{duration(seconds)} at {length}" for seconds, length in pairs)


def _seconds(taken: Mapping[str, float], name: str) -> float:
    """What a measurement says of one backend, which must be a time."""
    given = taken.get(name)
    if not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise ArgumentError(f"fastest: measure: expected seconds of {name!r}, got {given!r}")
    return max(float(given), 1e-9)


def _checked(lengths: Any) -> tuple[int, ...]:
    given = tuple(lengths) if isinstance(lengths, (list, tuple)) else lengths
    if not isinstance(given, tuple) or not all(type(n) is int for n in given):
        raise ArgumentTypeError(f"fastest: lengths: expected integers, got {lengths!r}")
    if not given or min(given) < 16 or len(set(given)) < len(given):
        raise ArgumentError(f"fastest: lengths: expected integers >= 16, each once, got {given!r}")
    return given


def _key(call: CallClass) -> CallClass:
    """The class that is measured: what a transform does to a call is not in a time."""
    return call._replace(traced=False)


def _plans(call: CallClass, names: Sequence[str]) -> dict[str, Plan]:
    """A plan by each that can do a class of calls; it serves the measurement alone."""
    found = {}
    for name in names:
        try:
            found[name] = make_plan(Choice((name,), "fastest"), call, observed=False)
        except (UnsupportedError, UnavailableBackend):
            continue
    return found


def _installed(name: str) -> str:
    try:
        return version(name)
    except Exception as error:  # a backend that cannot be loaded was not measured
        return say(error)
