"""Everything that can be run by its name: cases, probes, ONNX's cases, and what plugins add."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import attnx
from attnx.errors import ArgumentError

from . import onnx_cases
from .cases import CASES, LOW, Case
from .onnx_cases import OnnxCase
from .probes import PROBES, examine_probe
from .runner import Outcome, examine
from .subject import BackendSubject, Subject

__all__ = ["PROFILES", "Item", "absent", "find", "items", "names", "registered"]

PROFILES = (
    "forward", "masks", "gradients", "low-precision", "numerics", "system", "transforms",
    "layers", "relatives", "onnx",
)  # fmt: skip
ONNX = "onnx-"
"""What the names of ONNX's cases begin with: `test_attention_4d_gqa` is `onnx-4d-gqa`."""


@dataclass(frozen=True, eq=False)
class Item:
    """A case or a probe, as a run sees it.

    Attributes:
        name: unique, with words joined by hyphens.
        profile: the profile that it counts for; a trial in 16 bits may count for another.
        clauses: those that it guards.
        ids: known faults that it would have caught.
        dtypes: those that it makes sense for.
        scores: how many scores it has a head, or 0 where it is cheap.
        source: a `Case`, a `Probe` or an `OnnxCase`.
    """

    name: str
    profile: str
    clauses: tuple[str, ...]
    ids: tuple[str, ...]
    dtypes: tuple[str, ...]
    scores: int
    source: Any

    @property
    def is_case(self) -> bool:
        """Whether it is one call's inputs and outputs, with gradients."""
        return isinstance(self.source, Case)

    def profile_of(self, dtype: str) -> str:
        """The profile that a trial counts for: ours in 16 bits are all "low-precision"."""
        ours = not isinstance(self.source, OnnxCase)
        return "low-precision" if ours and dtype in LOW else self.profile

    def examine(
        self, subject: Subject, dtype: str, layout: str, way: str | None, seed: int
    ) -> Outcome:
        """Run it."""
        if isinstance(self.source, Case):
            return examine(self.source, subject, dtype, seed=seed, layout=layout, gradients=way)
        if isinstance(self.source, OnnxCase):
            return onnx_cases.check(self.source, subject, layout)
        return examine_probe(self.source, subject, dtype, seed=seed, layout=layout)


def items(subject: Subject | None = None, patterns: Iterable[str] = ()) -> tuple[Item, ...]:
    """All of them that there are for a subject.

    Args:
        subject: a backend's plugins may have cases of their own for it.
        patterns: the names or patterns that are asked for, all when empty; ONNX's cases take a
            second to generate, and are left out where none of them can be meant.

    Raises:
        ArgumentError: a plugin gives what is no case of its own.
    """
    plugged = _plugged(subject.name) if isinstance(subject, BackendSubject) else ()
    patterns = tuple(patterns)
    wanted = not patterns or any(p.startswith((ONNX, "*", "?", "[")) for p in patterns)
    return (*_own(), *(_onnx()[0] if wanted else ()), *plugged)


def names(subjects: Iterable[Subject] = (), patterns: Iterable[str] = ()) -> list[str]:
    """The names of all items of some subjects."""
    patterns = tuple(patterns)
    found = dict.fromkeys(item.name for item in items(None, patterns))
    for subject in subjects:
        found |= dict.fromkeys(item.name for item in items(subject, patterns))
    return list(found)


def find(name: str, subject: Subject | None = None) -> Item:
    """The item of that name.

    Raises:
        KeyError: there is none.
    """
    for among in (None, subject):  # plugins are asked for their cases only where none is ours
        for item in items(among, (name,)):
            if item.name == name:
                return item
    raise KeyError(name)


def absent() -> dict[str, str]:
    """The profiles that cannot be run here, and why."""
    why = _onnx()[1]
    return {"onnx": why} if why else {}


@cache
def _own() -> tuple[Item, ...]:
    probes = (Item(p.name, p.profile, p.clauses, p.ids, p.dtypes, 0, p) for p in PROBES)
    return (*map(_item, CASES), *probes)


def _item(case: Case) -> Item:
    return Item(case.name, case.profile, case.clauses, case.ids, case.dtypes, case.scores, case)


@cache
def _onnx() -> tuple[tuple[Item, ...], str]:
    """ONNX's cases, or why there are none."""
    try:
        found = onnx_cases.cases()
    except (ModuleNotFoundError, RuntimeError) as error:
        return (), " ".join(str(error).split())
    return tuple(
        Item(
            ONNX + case.name.removeprefix("test_attention_").replace("_", "-"),
            "onnx", ("S1", "S2", "S3"), (), (case.inputs["Q"].dtype.name,), 0, case,
        )
        for case in found
    ), ""  # fmt: skip


def _plugged(backend: str) -> tuple[Item, ...]:
    """The cases that plugins have for a backend."""
    taken = {item.name for item in _own()}
    found: list[Item] = []
    for plugin, ask in attnx.implementations("attnx_conformance_cases"):
        for case in _answer(plugin, ask, backend):
            wrong = _wrong(case, taken)
            if wrong:
                raise ArgumentError(
                    f"attnx_conformance_cases of plugin {plugin!r}: {wrong}; see Adding a case in "
                    "docs/conformance.md"
                )
            taken.add(case.name)
            found.append(_item(case))
    return tuple(found)


def _answer(plugin: str, ask: Callable[..., Any], backend: str) -> list[Any]:
    try:
        return list(ask(backend=backend) or ())
    except Exception as error:  # fewer cases than the plugin has would be a verdict too good
        told = f"{type(error).__name__}: {error}"
        raise ArgumentError(
            f"attnx_conformance_cases of plugin {plugin!r} failed: {told}"
        ) from error


def _wrong(case: Any, taken: set[str]) -> str:
    """What is wrong with a plugin's case, or ""."""
    if not isinstance(case, Case):
        return f"expected attnx_conformance.cases.Case, got {type(case).__name__}"
    if case.name in taken or case.name.startswith(ONNX):
        return f"the name {case.name!r} is taken; put the plugin's own in front"
    if case.profile not in PROFILES[:-1] or case.profile == "low-precision":
        return f"{case.name}: no profile {case.profile!r}"
    return ""


def registered() -> list[BackendSubject]:
    """Every backend that can be loaded here."""
    return [BackendSubject(i.name) for i in attnx.backends() if i.status == "available"]
