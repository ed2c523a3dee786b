"""Making a lane in time, and telling it of a changed choice.

A mask may reach `jax.jit` as an argument before any call of attention was made, and a chosen
backend must be part of that jit's key. So a lane is made as soon as its framework is there: at
`import attnx`, else at the first mask, `use_backend` or call. This module stands at the bottom of
the core, where masks can reach it; the registry and the choice fill it in.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["followers", "look", "tell", "waiting"]

waiting: list[str] = ["jax"]
"""Frameworks that want their lane early, and have not been seen in this process yet."""

followers: dict[str, Callable[[Any, Any], None]] = {}
"""By framework: `follow(choice of this thread or task, or None; the process's default)`."""


def _nothing(framework: str) -> None:
    """Stands in until the registry is imported."""


def _nobody() -> tuple[Any, Any]:
    """Stands in until the choice is imported."""
    return None, None


install: Callable[[str], None] = _nothing
current: Callable[[], tuple[Any, Any]] = _nobody


def look() -> None:
    """Make the lanes of frameworks that have been imported since the last look."""
    for framework in tuple(waiting):
        if framework in sys.modules:
            waiting.remove(framework)
            install(framework)


def tell() -> None:
    """Tell the lanes that follow it which backend is chosen now."""
    for follow in followers.values():
        follow(*current())
