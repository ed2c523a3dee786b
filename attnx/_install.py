"""Making a lane in time, and telling it of a changed choice.

A mask may reach `jax.jit` as an argument before any call of attention was made, a chosen backend
must be part of that jit's key, and a compiler that reads Python must know what to read before it
meets the first call. So a lane is made as soon as its framework is imported, before or after attnx:
a finder at the head of `sys.meta_path` waits for these few modules and takes itself away with the
last of them. This module stands at the bottom of the core; the registry, the choice and the traced
calls fill it in.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["arrivals", "early", "first_mask", "followers", "look", "ranked", "tell", "waiting"]

waiting: dict[str, str] = {"jax": "jax", "torch._dynamo": "torch"}
"""Modules that want a lane early and have not been imported in this process yet, and whose lane."""

early: list[str] = ["torch"]
"""Frameworks whose lane is made with the first mask, where they are imported by then: `vmap` may
meet a mask before attention does. PyTorch's costs too much to be made whenever PyTorch is imported.
"""

arrivals: dict[str, Callable[[str], None]] = {}
"""By module: what is to be done with the lane's framework beyond making the lane."""

followers: dict[str, Callable[[Any, Any], None]] = {}
"""By framework: `follow(choice of this thread or task, or None; the process's default)`."""


policies: int = 0
"""How often a plugin that ranks backends came or went."""


def _nothing(framework: str) -> None:
    """Stands in until the registry is imported."""


def _nobody() -> tuple[Any, Any]:
    """Stands in until the choice is imported."""
    return None, None


install: Callable[[str], None] = _nothing
lane: Callable[[str], Any]
"""Set by the registry: a framework's lane, made when it is first asked for."""
current: Callable[[], tuple[Any, Any]] = _nobody


def look() -> None:
    """Make the lanes of what is imported already, and wait for the rest."""
    for module in tuple(waiting):
        if module in sys.modules:
            _arrived(module)
    if waiting:
        sys.meta_path.insert(0, _Finder())


def first_mask() -> None:
    """A mask is being made, and some lanes have not been."""
    for framework in tuple(early):
        if framework in sys.modules:
            early.remove(framework)
            install(framework)


def _arrived(module: str) -> None:
    framework = waiting.pop(module)
    if framework in early:
        early.remove(framework)
    install(framework)
    then = arrivals.get(module)
    if then is not None:
        then(framework)


class _Finder:
    """Finds nothing by itself: it lets the others find, and is told when the module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec as the other finders have it, with a loader that tells."""
        if name not in waiting:
            return None
        others = [f for f in sys.meta_path if f is not self]
        found = (f.find_spec(name, path, target) for f in others)
        spec = next((s for s in found if s is not None), None)
        if spec is not None and spec.loader is not None:
            self._listen(spec.loader, name)
        return spec

    def _listen(self, loader: Any, name: str) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            try:
                if name in waiting:
                    _arrived(name)
            except Exception as error:  # the import of a framework is not ours to break
                warnings.warn(f"attnx: after {name} was imported: {error!r}", stacklevel=2)
            if not waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


def ranked() -> None:
    """A policy came or went: what lanes follow is another choice from now on."""
    global policies
    policies += 1
    tell()


def asked() -> tuple[Any, Any]:
    """What lanes follow: the choice and the default; with policies, as of their last change."""
    choice, default = current()
    if not policies:
        return choice, default
    return None if choice is None else (choice, policies), (default, policies)


def tell() -> None:
    """Tell the lanes that follow it which backend is chosen now."""
    for follow in followers.values():
        follow(*asked())
