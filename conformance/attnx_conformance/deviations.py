"""Known deviations of a subject: each with a reason that a user would accept.

A file in TOML, one table a deviation:

    [[deviation]]
    case = "poison-*"
    dtype = "float16"
    reason = "the kernel reads the whole cache, as its manual says"
    link = "https://example.org/issues/1"

A trial that a line names and that fails is `waived`; one that passes is a failure, so that the file
never outlives the fault.
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnx.errors import ArgumentError

from .cases import DTYPES
from .results import Result

__all__ = ["Deviation", "load", "waive"]

FIELDS = {"case", "dtype", "reason", "link"}


@dataclass(frozen=True)
class Deviation:
    """One line of the file; `case` may be a pattern, and no `dtype` means every one."""

    case: str
    reason: str
    link: str
    dtype: str = "*"

    def names(self, result: Result) -> bool:
        """Whether it is about a result."""
        return fnmatch.fnmatchcase(result.case, self.case) and self.dtype in ("*", result.dtype)


def load(path: Path | str) -> tuple[Deviation, ...]:
    """The deviations in a file.

    Raises:
        ArgumentError: it cannot be read, or a table lacks a field or has one too many.
    """
    try:
        whole = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"deviations: cannot read {path}: {error}") from None
    found = whole.pop("deviation", [])
    if whole or not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise ArgumentError(
            f"deviations: {path}: expected tables [[deviation]] and nothing else, got "
            f"{', '.join(whole) or 'another deviation'}"
        )
    for number, table in enumerate(found, 1):
        missing = {"case", "reason", "link"} - {k for k, v in table.items() if v}
        unknown = set(table) - FIELDS
        if missing or unknown:
            wrong = [f"lacks {x}" for x in sorted(missing)]
            wrong += [f"has an unknown {x}" for x in sorted(unknown)]
            raise ArgumentError(f"deviations: {path}, table {number}: {', '.join(wrong)}")
        odd = [name for name, value in table.items() if not isinstance(value, str)]
        if odd:
            raise ArgumentError(f"deviations: {path}, table {number}: {odd[0]} is not text")
        _check_names(f"deviations: {path}, table {number}", table)
    return tuple(Deviation(**table) for table in found)


def _check_names(where: str, table: dict[str, str]) -> None:
    """A line that names nothing would outlive its case."""
    from ._items import names, registered

    known = names(patterns=(table["case"],))
    if not any(fnmatch.fnmatchcase(name, table["case"]) for name in known):
        known = names(registered(), (table["case"],))  # some plugin's own
    if not any(fnmatch.fnmatchcase(name, table["case"]) for name in known):
        near = difflib.get_close_matches(table["case"], known, n=3) or ["none near"]
        raise ArgumentError(f"{where}: no case {table['case']!r}; near: {', '.join(near)}")
    if table.get("dtype", "*") not in ("*", *DTYPES):
        raise ArgumentError(f"{where}: no dtype {table['dtype']!r}; known: {', '.join(DTYPES)}")


def waive(result: Result, deviations: Sequence[Deviation]) -> Result:
    """The result as the deviations see it."""
    for line in deviations:
        if not line.names(result) or result.verdict in ("refused", "not-applicable"):
            continue
        if result.verdict == "passed":
            detail = f"waived, and yet it passes: take the line out ({line.reason})"
            return replace(result, verdict="failed", detail=detail)
        told = f"{line.reason} ({line.link}); {result.detail}"
        return replace(result, verdict="waived", detail=told)
    return result
