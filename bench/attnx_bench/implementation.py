"""An implementation: it makes one function of a workload, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .workload import Arrays, Workload

__all__ = ["Implementation", "NotApplicable", "Ready"]


class NotApplicable(Exception):
    """This implementation has no such call; the message says why in a few words."""


@dataclass(frozen=True)
class Ready:
    """A workload made ready: arrays converted; programs are compiled at its first run.

    Attributes:
        run: does the work once, to its end (asynchronous work is waited for), and gives what
            `results` reads.
        results: what a run gave, as NumPy arrays by name: "out", and "lse", "dq", "dk", "dv" where
            the workload asks for them.
        how: what it really calls, in a few words.
        compared: whether its results are held against the right ones before it is timed. What a
            generator of its own drops has no right answer.
    """

    run: Callable[[], Any]
    results: Callable[[Any], dict[str, Any]]
    how: str = ""
    compared: bool = True


@dataclass(frozen=True)
class Implementation:
    """Something a user would call.

    Attributes:
        name: as tables say it, such as "attnx numpy" or "torch SDPA".
        make: makes a workload ready, or raises `NotApplicable`.
        requires: the modules that must be importable.
        process: the name of the process that it runs in; "" for the main one. Keras fixes its
            backend when it is imported, so each of its backends has one of its own.
        environment: variables that this process needs.
        named: whether it is run only where it is asked for by name.
    """

    name: str
    make: Callable[[Workload, Arrays], Ready]
    requires: tuple[str, ...] = ()
    process: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    named: bool = False
