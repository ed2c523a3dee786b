"""What loading a plugin does beside giving something: how long it takes, and what it imports.

The time and the imports are looked at always. What a plugin prints, and of what it warns, is heard
only where the command listens: in a user's process its output and its warning filters are not ours
to touch.
"""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["SLOW_IMPORT", "SLOW_LOAD", "Watch", "watching"]

SLOW_IMPORT = 1.0
"""Seconds that finding a plugin's backends may take; without a framework it is milliseconds."""
SLOW_LOAD = 30.0
"""Seconds that a backend or a lane may take to load: that does import the framework."""
FRAMEWORKS = frozenset(
    {"cupy", "jax", "keras", "mlx", "paddle", "tensorflow", "tinygrad", "torch", "triton"}
)


class Watch:
    """What was seen.

    Attributes:
        seconds: how long it took.
        frameworks: the frameworks that it imported, by their top-level modules.
        printed: what it wrote to standard output, where that was listened to.
        warned: of what it warned, alike.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.frameworks: tuple[str, ...] = ()
        self.printed = ""
        self.warned: tuple[str, ...] = ()
        self._before = FRAMEWORKS & sys.modules.keys()
        self._start = time.perf_counter()

    def stop(self) -> None:
        """End the measurement."""
        self.seconds = time.perf_counter() - self._start
        self.frameworks = tuple(sorted((FRAMEWORKS & sys.modules.keys()) - self._before))

    def complaints(self) -> Iterator[tuple[str, str]]:
        """What a plugin should not have done when it was imported, each with the remedy."""
        if self.frameworks:
            names = ", ".join(self.frameworks)
            detail = f"finding its backends took {self.seconds:.1f} s and imported {names}"
            yield detail, f"import {names} in BackendSpec.load, not with the plugin"
        elif self.seconds > SLOW_IMPORT:
            detail = f"finding its backends took {self.seconds:.1f} s"
            yield detail, "import what is slow in BackendSpec.load, not with the plugin"
        if self.printed:
            detail = f"it prints when it is imported: {_first(self.printed)!r}"
            yield detail, "use warnings or logging: standard output is the program's"
        for text in self.warned:
            yield f"it warns when it is imported: {text}", "see the warning"


@contextmanager
def watching(listen: bool) -> Iterator[Watch]:
    """Watch what is loaded in the block; `listen` keeps its output and warnings to the record."""
    watch = Watch()
    try:
        if not listen:
            yield watch
            return
        heard, before = StringIO(), sys.stdout
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            sys.stdout = heard
            try:
                yield watch
            finally:
                sys.stdout = before
                watch.printed = heard.getvalue().strip()
                watch.warned = tuple(_texts(caught))
    finally:
        watch.stop()


def _texts(caught: Iterable[warnings.WarningMessage]) -> Iterator[str]:
    yield from dict.fromkeys(f"{c.category.__name__}: {_first(str(c.message))}" for c in caught)


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
