"""Planted faults: one correct blocked kernel, broken in one place at a time, and correct variants.

A suite that has never failed proves nothing. Each fault here is a mistake that kernels really
make; the self-test shows that every one is caught by at least two cases, and that none of the
correct variants is ever accused.
"""

from __future__ import annotations

from attnx_conformance.subject import FunctionSubject

from . import (
    additions,
    alibi,
    backward,
    behaviour,
    causal,
    dropout,
    empty_rows,
    heads,
    isolation,
    lengths,
    masks,
    numerics,
    scale,
    softmax,
    tiles,
)
from ._fault import Fault
from .controls import CONTROLS

__all__ = ["CONTROLS", "FAULTS", "Fault", "find"]

FAULTS: tuple[Fault, ...] = (
    *scale.FAULTS,
    *causal.FAULTS,
    *masks.FAULTS,
    *lengths.FAULTS,
    *empty_rows.FAULTS,
    *softmax.FAULTS,
    *heads.FAULTS,
    *additions.FAULTS,
    *backward.FAULTS,
    *behaviour.FAULTS,
    *isolation.FAULTS,
    *numerics.FAULTS,
    *dropout.FAULTS,
    *alibi.FAULTS,
    *tiles.FAULTS,
)


def find(name: str) -> Fault:
    """The fault or control of that name.

    Raises:
        KeyError: There is none.
    """
    for fault in (*FAULTS, *CONTROLS):
        if fault.name == name:
            return fault
    raise KeyError(name)


def __getattr__(attribute: str) -> FunctionSubject:
    """A fault's subject by its name with underscores, which is how a worker process finds it."""
    name, _, layout = attribute.partition("__")
    try:
        return find(name.replace("_", "-")).subject(layout or None)
    except KeyError:
        raise AttributeError(f"no planted fault is called {attribute}") from None
