"""What the tests of `fastest` share: a measurement that is told and not taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import attnx
from attnx._registry import registry
from attnx.policies import fastest


class Told:
    """Stands for the clock: seconds by name, and how often who was measured."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[list[str]] = []

    def __call__(self, runs: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        self.asked.append(sorted(runs))
        for run in runs.values():
            run()
        return {name: self.seconds[name] for name in runs}


@pytest.fixture(autouse=True)
def _no_records_left() -> Iterator[None]:
    yield
    registry.records = [r for r in registry.records if r.subject != "fastest"]


@pytest.fixture
def ranked(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`ranked("a", "b", a=2.0, b=1.0)`: `fastest` registered, with a told clock as its `.told`."""
    held: list[str] = []

    def ranked(*names: str, measure: Any = None, **seconds: float) -> Any:
        while held:
            attnx.unregister(held.pop())
        told = Told(**seconds)
        policy = fastest(*names, lengths=(16, 32), folder=tmp_path, measure=measure or told)
        attnx.register(policy)
        held.append("fastest")
        policy.told = told  # type: ignore[attr-defined]
        return policy

    yield ranked
    while held:
        attnx.unregister(held.pop())
