"""A report as one HTML page that needs nothing but a browser.

A run has ten thousand trials, so the page holds them once, as compact JSON, and makes a table's
rows when a cell is opened. What a reader needs first (the matrix, what counts against a subject,
the plots, the route) is plain markup made here, and stands there without a script too. Its own
security policy forbids the page to fetch anything.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ._items import PROFILES
from ._plots import distributions
from .results import OK, VERDICTS, Report, Result, profiles, unproven

__all__ = ["MARKS", "write"]

MARKS = {
    "passed": "✓", "failed": "✗", "crashed": "✗", "wrongly-accepted": "✗", "refused": "–",
    "not-applicable": "·", "waived": "~",
}  # fmt: skip
"""What stands before a verdict, so that it reads without colour."""

FAULTS_SHOWN = 25
DETAIL = 4_000
DETAILS = 3_000_000
"""Characters of one detail, and of all of them before only their ends are kept."""


def write(report: Report, path: Path | str) -> Path:
    """Write a report as one self-contained page.

    Args:
        report: a whole run, or what is known of one that was cut short.
        path: of the page; its folder is made where it does not exist.

    Returns:
        The path.
    """
    environment = Environment(
        loader=PackageLoader("attnx_conformance", "_page"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = environment.get_template("page.html.j2").render(**_content(report))
    target.write_text(page, encoding="utf-8")
    return target


def _content(report: Report) -> dict[str, Any]:
    results = report.results
    table = profiles(results)
    names = sorted({r.profile for r in results}, key=_place)
    against = [r for r in results if not r.ok]
    route = report.footer.get("route", report.footer.get("routes", {}))
    rest = {k: v for k, v in report.footer.items() if k not in ("route", "routes")}
    return {
        "complete": report.complete,
        "interrupted": bool(report.footer),
        "planned": report.header.get("planned", report.header.get("trials")),
        "header": _pairs(report.header),
        "footer": _pairs(rest),
        "absent": dict(_mapping(report.header.get("absent"))),
        "unproven": unproven(results),
        "route": {str(name): _route(found) for name, found in _mapping(route).items()},
        "profiles": names,
        "matrix": {
            subject: {name: _cell(counts.get(name, Counter())) for name in names}
            for subject, counts in table.items()
        },
        "totals": _cell(Counter(r.verdict for r in results)),
        "faults": _faults(against),
        "plots": distributions(results),
        "marks": MARKS,
        "verdicts": VERDICTS,
        "ok": OK,
        "data": _data(results),
    }


def _place(profile: str) -> tuple[int, str]:
    return (PROFILES.index(profile) if profile in PROFILES else len(PROFILES), profile)


def _cell(counts: Mapping[str, int]) -> dict[str, Any]:
    """What one cell of the matrix says."""
    bad = sum(n for verdict, n in counts.items() if verdict not in OK)
    total, passed = sum(counts.values()), counts.get("passed", 0)
    state = "bad" if bad else "none" if not total else "held" if passed else "idle"
    return {
        "state": state, "total": total, "bad": bad,
        "counts": [(verdict, counts[verdict]) for verdict in VERDICTS if counts.get(verdict)],
    }  # fmt: skip


def _faults(against: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Of each subject, the cases that count against it, and how often."""
    found: dict[str, dict[str, list[Result]]] = {}
    for result in against:
        found.setdefault(result.subject, {}).setdefault(result.case, []).append(result)
    return {
        subject: {
            "cases": [
                {"first": group[0], "count": len(group), "line": last_line(group[0])}
                for group in list(cases.values())[:FAULTS_SHOWN]
            ],
            "more": max(0, len(cases) - FAULTS_SHOWN),
        }
        for subject, cases in found.items()
    }


def last_line(result: Result) -> str:
    """The line of a detail that says what happened; a traceback says it last."""
    lines = result.detail.strip().splitlines() or [""]
    return lines[-1][:400]


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _pairs(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A record as names and texts, inner records flattened."""
    pairs = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            pairs += [(f"{name}: {inner}", text) for inner, text in _pairs(value)]
        elif name != "attnx_conformance" and value not in (None, "", [], ()):
            pairs.append((str(name), _text(value)))
    return pairs


def _text(value: Any) -> str:
    listed = isinstance(value, Iterable) and not isinstance(value, str)
    return ", ".join(str(x) for x in value) if listed else str(value)


def _route(found: Any) -> dict[str, list[tuple[str, str]]]:
    """The calls that were counted and the values that arrived, of one subject."""
    record = _mapping(found)
    return {
        "calls": _pairs(_mapping(record.get("calls"))),
        "ledger": [(str(axis), _text(v)) for axis, v in _mapping(record.get("ledger")).items()],
    }


class _Details:
    """Texts by number, each kept once, and no more of them than a page can hold."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._spent = 0

    def number(self, text: str) -> int:
        room = DETAIL if self._spent < DETAILS else 300
        if len(text) > room:  # a traceback ends with what happened
            text = "… " + text[-room:]
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
            self._spent += len(text)
        return self._numbers[text]


def _data(results: Sequence[Result]) -> str:
    """The trials as JSON that may stand inside a script element."""
    texts = _Details()
    rows = [
        [
            *(texts.number(x) for x in (r.subject, r.profile, r.case, ", ".join(r.clauses),
                                        ", ".join(r.ids), r.dtype, r.layout, r.way or "",
                                        r.verdict, r.detail)),
            {kind: _number(ratio) for kind, ratio in r.ratios.items()},
            round(r.seconds, 3),
            r.command,
        ]
        for r in results
    ]  # fmt: skip
    data = {"texts": texts.texts, "rows": rows, "marks": MARKS, "ok": sorted(OK)}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # Inside a script element only these could end it, or start a comment.
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _number(ratio: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return float(f"{ratio:.4g}") if math.isfinite(ratio) else str(ratio)
