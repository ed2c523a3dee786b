"""Whether a spec tells the truth: its array types, its lane, its settings, beside the others'.

What can be seen without a framework is looked at when a plugin is collected; what its array types
really are, when its backend is loaded and the framework with it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from attnx._loading import framework
from attnx._settings import KNOWN, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnx.plugin import BackendSpec, Lane

__all__ = ["lies", "rivals", "settings_claimed"]

Finding = tuple[str, str]
"""What is wrong, and what to do about it."""


def rivals(spec: BackendSpec, others: Iterable[BackendSpec]) -> Iterator[Finding]:
    """Where an earlier spec's lane serves already: the first one owns an array type."""
    for other in others:
        if spec.lane is None or other.lane is None:
            continue
        shared = sorted(set(spec.array_types) & set(other.array_types))
        if not shared and framework(spec) != framework(other):
            continue
        whose = f"the lane of {', '.join(shared) or framework(spec)}"
        name = framework(other)
        yield (
            f"{whose} belongs to {other.name!r}",
            f"leave the spec's lane out and set framework={name!r}",
        )


def settings_claimed(specs: Iterable[BackendSpec]) -> Iterator[tuple[str, str, str]]:
    """Settings that a spec must not read: attnx's own, another's, or none of `ATTNX_*`."""
    owners: dict[str, BackendSpec] = {}
    for spec in specs:
        for name in spec.settings:
            other = owners.setdefault(name, spec)
            remedy = f"rename the setting in BackendSpec({spec.name!r}, settings=...)"
            if name in KNOWN:
                yield spec.name, f"declares the setting {name}, which attnx itself reads", remedy
            elif not name.startswith("ATTNX_"):
                yield spec.name, f"declares the setting {name!r}, not an ATTNX_* name", remedy
            elif other.name != spec.name:
                detail = f"declares the setting {name}, which {other.name!r} declares too"
                yield spec.name, detail, remedy


def lies(spec: BackendSpec, lane: Lane, specs: Iterable[BackendSpec]) -> Iterator[Finding]:
    """What a loaded backend's spec says of its array types and its framework and is not so."""
    owners = [other for other in specs if other.lane is not None]
    name = framework(spec)
    if all(framework(other) != name for other in owners):
        yield (
            f"nobody brings a lane for framework={name!r}, so that its arrays are not known",
            f"install the plugin that brings it, or give BackendSpec({spec.name!r}, lane=...)",
        )
    for dotted in spec.array_types:
        wrong = _wrong_type(dotted, lane)
        if not wrong:
            continue
        others = [framework(o) for o in owners if framework(o) != name and dotted in o.array_types]
        if others:
            wrong = f"it belongs to the framework {others[0]!r}, and the spec says {name!r}"
        classes = ", ".join(_dotted(kind) for kind in _classes(lane))
        remedy = f"name the classes of {name} arrays in BackendSpec(array_types=...)"
        yield f"array_types: {dotted!r}: {wrong}", f"{remedy}: {classes}" if classes else remedy


def _wrong_type(dotted: str, lane: Lane) -> str:
    """What is wrong with one of a spec's array types, or ""."""
    module, _, name = dotted.rpartition(".")
    found = sys.modules.get(module)
    if found is None:
        return f"loading the backend imported no module {module!r}"
    kind = getattr(found, name, None)
    if not isinstance(kind, type):
        near = nearest(name, [n for n, x in vars(found).items() if isinstance(x, type)])
        return f"{module} has no class {name!r}" + (f"; did you mean {near!r}?" if near else "")
    classes = _classes(lane)
    if classes and not any(issubclass(kind, own) or issubclass(own, kind) for own in classes):
        return "the lane does not own it"
    return ""


def _classes(lane: Lane) -> tuple[type, ...]:
    found: Any = getattr(lane, "array_types", ())
    return tuple(kind for kind in found if isinstance(kind, type))


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
