"""Known faults of other projects that no attention call can show, each with the reason.

Every other row of the list stands on a case or a probe. This is the only place that leaves one out.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OUTSIDE"]

OUTSIDE: Mapping[str, str] = {
    "A18": "a fault of a comparator: the judge's own tests show that NaN on one side alone fails",
    "G13": "rotary positions: they are applied before the call",
    "I6": "the specification leaves the strides of a result open",
    "N9": "a compiler's rewriting of hand-written attention",
    "N11": "a compiler's rewriting of hand-written attention",
    "O6": "speed: measured elsewhere, and no verdict",
}
