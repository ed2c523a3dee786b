"""The `ATTNX_*` environment variables, read once, at import.

A variable that nobody knows is a typing error until proven otherwise: it warns and suggests the
nearest name, or is an error under `ATTNX_STRICT_PLUGINS=1`. Plugins may declare names of their own,
so the check waits until they have been collected.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["SETTINGS", "Settings", "read", "unknown"]

KNOWN = ("ATTNX_BACKEND", "ATTNX_PLUGINS", "ATTNX_STRICT_PLUGINS")


class Settings(NamedTuple):
    """What the environment asks for.

    Attributes:
        backend: `ATTNX_BACKEND`: one name, or several separated by commas, to try in order.
        allow: names of `ATTNX_PLUGINS`; None allows every plugin.
        block: names of `ATTNX_PLUGINS` written with a leading `-`.
        strict: `ATTNX_STRICT_PLUGINS=1`: a fault of a plugin raises.
        given: every `ATTNX_*` name that is set.
    """

    backend: str | tuple[str, ...] | None
    allow: frozenset[str] | None
    block: frozenset[str]
    strict: bool
    given: tuple[str, ...]


def read(environment: Mapping[str, str]) -> Settings:
    """Read the variables; an empty one counts as unset.

    Example:
        >>> read({"ATTNX_PLUGINS": "-slow"}).block
        frozenset({'slow'})
    """
    names = [n.strip() for n in environment.get("ATTNX_PLUGINS", "").split(",") if n.strip()]
    allow = frozenset(n for n in names if not n.startswith("-"))
    backends = tuple(
        n.strip() for n in environment.get("ATTNX_BACKEND", "").split(",") if n.strip()
    )
    return Settings(
        backend=backends[0] if len(backends) == 1 else backends or None,
        allow=allow or None,
        block=frozenset(n[1:] for n in names if n.startswith("-")),
        strict=environment.get("ATTNX_STRICT_PLUGINS", "") not in ("", "0"),
        given=tuple(sorted(n for n in environment if n.startswith("ATTNX_"))),
    )


def unknown(settings: Settings, declared: Iterable[str]) -> list[tuple[str, str | None]]:
    """Names that are set and that nobody reads, each with the nearest known one."""
    known = {*KNOWN, *declared}
    found = []
    for name in settings.given:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, sorted(known), n=1)
            found.append((name, near[0] if near else None))
    return found


SETTINGS = read(os.environ)
