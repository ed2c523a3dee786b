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

__all__ = ["KNOWN", "SETTINGS", "Settings", "nearest", "read", "unknown"]

KNOWN = ("ATTNX_BACKEND", "ATTNX_PLUGINS", "ATTNX_POLICY", "ATTNX_STRICT_PLUGINS")


class Settings(NamedTuple):
    """What the environment asks for.

    Attributes:
        backend: `ATTNX_BACKEND`: one name, or several separated by commas, to try in order.
        allow: names of `ATTNX_PLUGINS`; None allows every plugin.
        block: names of `ATTNX_PLUGINS` written with a leading `-`.
        strict: `ATTNX_STRICT_PLUGINS=1`: a fault of a plugin raises.
        given: every `ATTNX_*` name that is set.
        policy: `ATTNX_POLICY`: the policy that chooses where nothing was asked for, or None.
    """

    backend: str | tuple[str, ...] | None
    allow: frozenset[str] | None
    block: frozenset[str]
    strict: bool
    given: tuple[str, ...]
    policy: str | None = None

    def blocks(self, plugin: str) -> bool:
        """Whether an installed plugin is not to be imported; a block is stronger than a leave."""
        return plugin in self.block or (self.allow is not None and plugin not in self.allow)


def read(environment: Mapping[str, str]) -> Settings:
    """Read the variables; an empty one counts as unset.

    Example:
        >>> read({"ATTNX_PLUGINS": "-slow"}).block
        frozenset({'slow'})
    """
    names = _names(environment.get("ATTNX_PLUGINS", ""))
    backends = tuple(_names(environment.get("ATTNX_BACKEND", "")))
    block = (n[1:].strip() for n in names if n.startswith("-"))
    return Settings(
        backend=backends[0] if len(backends) == 1 else backends or None,
        allow=frozenset(n for n in names if not n.startswith("-")) or None,
        block=frozenset(n for n in block if n),
        strict=environment.get("ATTNX_STRICT_PLUGINS", "").strip() not in ("", "0"),
        given=tuple(sorted(n for n in environment if n.startswith("ATTNX_"))),
        policy=environment.get("ATTNX_POLICY", "").strip() or None,
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def unknown(settings: Settings, declared: Iterable[str]) -> list[tuple[str, str | None]]:
    """Names that are set and that nobody reads, each with the nearest known one."""
    known = {*KNOWN, *declared}
    return [(name, nearest(name, known)) for name in settings.given if name not in known]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was perhaps meant, or None."""
    import difflib

    near = difflib.get_close_matches(name, sorted(known), n=1)
    return near[0] if near else None


SETTINGS = read(os.environ)
