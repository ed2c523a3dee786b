"""Pages of the site that are made from the code: hooks, capabilities, and the conformance matrix.

The matrix shows verdicts of runs, which take minutes to hours, so that they are kept in
`docs/conformance-matrix.json` (`scripts/build_matrix.py`): no cell says more than a run has shown.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["capabilities", "hooks", "matrix"]

ROOT = Path(__file__).resolve().parents[2]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _ours() -> list[str]:
    """The backends that this distribution brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return list(project["entry-points"]["attnx"])


def hooks() -> str:
    """The hooks of `attnx.plugin.hookspecs`."""
    from attnx.plugin import hookspecs

    parts = [
        "# Hooks",
        "What a plugin may implement, each a function marked with "
        "[`attnx.plugin.hookimpl`](attnx.plugin.md). An implementation may name fewer arguments.",
    ]
    for name, hook in vars(hookspecs()).items():
        if name.startswith("attnx_"):
            said = inspect.signature(hook)
            given = [
                f"    {p.name}: {p.annotation},"
                for p in said.parameters.values()
                if p.name != "self"
            ]
            told = "\n".join(["(", *given, ")"]) if given else "()"
            parts.append(f"## {name}")
            parts.append(f"```python\n{name}{told} -> {said.return_annotation}\n```")
            parts.append(inspect.getdoc(hook) or "")
    return "\n\n".join(parts)


def capabilities() -> str:
    """What each backend declares: a row a capability, a column a backend."""
    import attnx
    from attnx.plugin import MASK_KINDS, Capabilities

    told = _field_docs(Capabilities)
    infos = {info.name: info for info in attnx.backends()}
    declared = {name: infos[name].capabilities for name in _ours() if name in infos}
    columns = {name: found for name, found in declared.items() if found is not None}
    rows = []
    for field in Capabilities._fields:
        cells = [_words(getattr(found, field), MASK_KINDS) for found in columns.values()]
        rows.append([f"`{field}`", told[field], *cells])
    parts = [
        "# Capabilities",
        "What each backend declares in its [`Capabilities`][attnx.plugin.Capabilities]. Dispatch "
        "and the conformance suite read the same declaration: what is declared must be right, and "
        "what is not raises `UnsupportedError`. `attnx backends` prints it for what is installed.",
        _table(["capability", "what", *columns], rows),
    ]
    missing = [name for name in _ours() if name not in columns]
    if missing:
        parts.append(f"Not loaded where this page was made: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _field_docs(record: type) -> dict[str, str]:
    """The lines of a record's `Attributes:`."""
    text = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].split("\n\n")[0]
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, rest = line.strip().partition(": ")
        if colon and line.startswith("    ") and not line.startswith("     "):
            found[name] = rest
        elif found:
            found[next(reversed(found))] += f" {line.strip()}"
    return found


def _words(value: Any, everything: frozenset[str]) -> str:
    if isinstance(value, frozenset):
        if value == everything:
            return "all"
        left = everything - value
        if value and len(left) < len(value) and value < everything:
            return f"all but {', '.join(sorted(left))}"
        return ", ".join(sorted(value)) or "none"
    return {True: "yes", False: "–", None: "any"}.get(value, str(value))


def matrix() -> str:
    """Profile by backend: what was run, and what came of it."""
    kept = json.loads((ROOT / "docs" / "conformance-matrix.json").read_text("utf-8"))
    runs, profiles = kept["runs"], kept["profiles"]
    ours = [*_ours(), *(name for name in runs if name not in _ours())]
    rows = [
        [f"`{name}`", str(about["names"] or "–"), *(_cell(runs.get(each), name) for each in ours)]
        for name, about in profiles.items()
    ]
    parts = [
        "# Conformance matrix",
        "What the [suite](../conformance.md) found, by profile: cases and probes that passed, of "
        "those that apply. A refusal of what a backend does not declare is right, and counted "
        "apart; a dash says that none applies. Trials in 16 bits are `low-precision`, whatever "
        "their case is about; which dtype a case takes in a standard run is picked by its name.",
        _table(["profile", "cases and probes", *ours], rows),
        "## The runs",
        _table(
            ["backend", "level", "finished", "trials", "with"],
            [_run(name, runs.get(name)) for name in ours],
        ),
        "The figures are in [conformance-matrix.json](../conformance-matrix.json).",
    ]
    return "\n\n".join(parts)


def _cell(run: dict[str, Any] | None, profile: str) -> str:
    if run is None:
        return "not run"
    counts = run["profiles"].get(profile, {})
    wrong = sum(counts.get(v, 0) for v in ("failed", "crashed", "wrongly-accepted"))
    applied = sum(
        n for verdict, n in counts.items() if verdict not in ("not-applicable", "refused")
    )
    if not counts:
        return "not run"
    told = f"{counts.get('passed', 0)} of {applied}" if applied else "–"
    told = f"**not held**: {told}" if wrong else told
    told += f", {counts['waived']} waived" if counts.get("waived") else ""
    return told + (f", {counts['refused']} refused" if counts.get("refused") else "")


def _run(name: str, run: dict[str, Any] | None) -> list[str]:
    if run is None:
        return [name, "not run", "", "", ""]
    versions = ", ".join(f"{what} {number}" for what, number in run["versions"].items())
    return [name, run["level"], run["finished"], str(run["trials"]), versions]
