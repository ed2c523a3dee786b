"""What the commands say as JSON: plain records of attnx's own objects, in one place.

The keys are part of the command's interface; tests pin them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnx import BackendInfo, Explanation, Record
    from attnx.plugin import Reason

__all__ = [
    "backend_record",
    "doctor_record",
    "explanation_record",
    "number",
    "plain",
    "reason_record",
]


def plain(value: Any) -> Any:
    """A value that JSON can hold: containers as lists and objects, the rest as it prints."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    fields = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if fields:
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def number(value: float | None) -> float | str | None:
    """JSON has no infinity and no NaN; they travel as `"inf"`, `"-inf"` and `"nan"`."""
    return value if value is None or math.isfinite(value) else str(value)


def reason_record(reason: Reason) -> dict[str, Any]:
    """One reason why a backend does not do a call."""
    return {name: plain(getattr(reason, name)) for name in ("option", "got", "supported", "hint")}


def backend_record(info: BackendInfo) -> dict[str, Any]:
    """One installed backend."""
    names = (
        "name", "status", "version", "framework", "devices", "array_types", "capabilities",
        "reason", "summary", "distribution",
    )  # fmt: skip
    return {name: plain(getattr(info, name)) for name in names}


def doctor_record(record: Record) -> dict[str, Any]:
    """One finding of the doctor."""
    return {name: plain(getattr(record, name)) for name in record._fields}


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """The choice for one call, and every candidate with its reasons."""
    names = ("choice", "why", "route", "exchange")
    return {
        **{name: plain(getattr(explanation, name)) for name in names},
        "candidates": [
            {
                "name": candidate.name,
                "chosen": bool(candidate.chosen),
                "note": plain(candidate.note),
                "reasons": [reason_record(reason) for reason in candidate.reasons],
            }
            for candidate in explanation.candidates
        ],
    }
