"""Everything that can be run by its name: cases, probes, and what plugins add."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from .cases import CASES, Case
from .probes import PROBES, examine_probe
from .runner import Outcome, examine
from .subject import Subject

__all__ = ["Item", "find", "items"]


@dataclass(frozen=True, eq=False)
class Item:
    """A case or a probe, as a run sees it."""

    name: str
    profile: str
    clauses: tuple[str, ...]
    ids: tuple[str, ...]
    dtypes: tuple[str, ...]
    scores: int
    source: Any

    @property
    def is_case(self) -> bool:
        """Whether it is one call's inputs and outputs."""
        return isinstance(self.source, Case)

    def examine(
        self, subject: Subject, dtype: str, layout: str, way: str | None, seed: int
    ) -> Outcome:
        """Run it."""
        if isinstance(self.source, Case):
            return examine(self.source, subject, dtype, seed=seed, layout=layout, gradients=way)
        return examine_probe(self.source, subject, dtype, seed=seed, layout=layout)


@cache
def items() -> tuple[Item, ...]:
    """All of them."""
    cases = (Item(c.name, c.profile, c.clauses, c.ids, c.dtypes, c.scores, c) for c in CASES)
    probes = (Item(p.name, p.profile, p.clauses, p.ids, p.dtypes, 0, p) for p in PROBES)
    return (*cases, *probes)


@cache
def _by_name() -> dict[str, Item]:
    return {item.name: item for item in items()}


def find(name: str) -> Item:
    """The item of that name.

    Raises:
        KeyError: there is none.
    """
    return _by_name()[name]
