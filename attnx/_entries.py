"""The installed plugins: every entry point of the group `attnx`, found without importing one.

A single distribution whose metadata cannot be read makes `importlib.metadata.entry_points` raise
for all of them. Then the distributions are looked at one by one, and that one is told of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._diagnosis import say, traceback_of
from attnx._findings import Record
from attnx.plugin import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

__all__ = ["Entry", "entries"]

GROUP = "attnx"


class Entry(NamedTuple):
    """An installed plugin before it is imported.

    Attributes:
        name: as `ATTNX_PLUGINS` names it.
        target: the module that it names.
        distribution: what brought it, with its version, or "".
        load: imports it.
    """

    name: str
    target: str
    distribution: str
    load: Callable[[], Any]


def entries() -> tuple[list[Entry], list[Record]]:
    """The installed plugins, ours first, and a record for what cannot be read."""
    from importlib.metadata import entry_points  # some milliseconds, which `import attnx` is spared

    records: list[Record] = []
    try:
        points = list(entry_points(group=GROUP))
    except Exception:
        points = _one_by_one(records)
    found = [Entry(p.name, p.value.split(":")[0].strip(), _origin(p), p.load) for p in points]
    # Ours first, so that a third party cannot take their names or lanes; then in one order always.
    return sorted(found, key=lambda e: (not _ours(e), e.name, e.distribution)), records


def _one_by_one(records: list[Record]) -> list[EntryPoint]:
    from importlib.metadata import distributions

    points: list[EntryPoint] = []
    seen: set[str] = set()
    for distribution in distributions():
        name = "?"
        try:
            name = str(distribution.metadata["Name"])
            if name.lower() not in seen:
                seen.add(name.lower())
                points += [p for p in distribution.entry_points if p.group == GROUP]
        except Exception as error:
            detail = f"its entry points cannot be read: {say(error)}"
            remedy = f"pip install --force-reinstall {name}"
            records.append(
                Record(name, "failed", detail, remedy, name, "", None, traceback_of(error))
            )
    return points


def _origin(point: EntryPoint) -> str:
    """What brought an entry point: `"attnx-mlx 0.2"`."""
    try:
        dist = point.dist
        return "" if dist is None or not dist.name else f"{dist.name} {dist.version or '?'}"
    except Exception:  # metadata without a name or a version
        return ""


def _ours(entry: Entry) -> bool:
    return entry.distribution.split(" ")[0] == PROJECT
