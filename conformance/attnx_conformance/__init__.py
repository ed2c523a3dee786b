"""The conformance suite: what an attention backend must get right, as data, with its judge.

The oracle and its bound import nothing of attnx, and so does this package until `check` is asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .oracle import Reference, reference
from .tolerance import Bounds, Judgement, bounds, judge

if TYPE_CHECKING:
    from .checking import ConformanceError, check

__all__ = [
    "Bounds",
    "ConformanceError",
    "Judgement",
    "Reference",
    "bounds",
    "check",
    "judge",
    "reference",
]


def __getattr__(name: str) -> Any:
    if name not in ("ConformanceError", "check"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import checking

    globals().update(check=checking.check, ConformanceError=checking.ConformanceError)
    return globals()[name]
