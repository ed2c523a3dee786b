"""Keep what runs of the conformance suite found, for the matrix on the docs site.

    attnx conformance --report run.jsonl                  # hours on JAX, minutes elsewhere
    python scripts/build_matrix.py run.jsonl              # several reports may be given

Writes `docs/conformance-matrix.json`. A run counts only whole: every case and probe that there is
now, at one level, to its end. Other backends' runs are kept for as long as the cases are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnx_conformance._items import PROFILES
from attnx_conformance.cases import CASES
from attnx_conformance.probes import PROBES
from attnx_conformance.results import Report, Result, profiles, read

__all__ = ["KEPT", "current", "summary"]

KEPT = Path(__file__).resolve().parents[1] / "docs" / "conformance-matrix.json"
PLACES = ("python", "attnx", "numpy")
"""Whose versions are kept, beside those of the backend's own framework."""

OURS = (*CASES, *PROBES)


def current() -> dict[str, dict[str, Any]]:
    """Each profile with how many cases and probes it has, and a digest of their names.

    "low-precision" has none of its own: it is made of the others' trials in 16 bits. Those of
    "onnx" belong to the version of ONNX that is installed.
    """
    names: dict[str, list[str]] = {profile: [] for profile in PROFILES}
    for item in OURS:
        names[item.profile].append(item.name)
    return {
        profile: {
            "names": len(found),
            "digest": hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16],
        }
        for profile, found in names.items()
    }


def summary(reports: Sequence[Report], kept: dict[str, Any]) -> dict[str, Any]:
    """What is written: the set of cases, and a run for each backend.

    Raises:
        ValueError: a report was cut short, or lacks cases that there are.
    """
    cases = current()
    runs = dict(kept.get("runs", {})) if kept.get("profiles") == cases else {}
    for report in reports:
        if not report.complete or report.footer.get("errors"):
            raise ValueError("a report was cut short: run the suite to its end")
        for subject in report.header["subjects"]:
            results = [result for result in report.results if result.subject == subject]
            runs[subject] = _run(subject, report, results)
    return {"profiles": cases, "runs": dict(sorted(runs.items()))}


def _run(subject: str, report: Report, results: list[Result]) -> dict[str, Any]:
    known = {item.name for item in OURS}
    seen = {result.case for result in results}
    if known - seen:
        some = ", ".join(sorted(known - seen)[:3])
        raise ValueError(f"the report lacks {len(known - seen)} cases of {subject}: {some} ...")
    ours = [x for x in results if x.case in known or x.profile == "onnx"]  # no plugin's own
    versions = report.header["versions"]
    found = profiles(ours)[subject]
    return {
        "level": report.header["level"],
        "seed": report.header["seed"],
        "finished": report.footer["finished"][:10],
        "trials": len(ours),
        "versions": {
            name: number
            for name, number in versions.items()
            if name in PLACES or name.startswith(subject)
        },
        "profiles": {
            profile: dict(sorted(found[profile].items()))
            for profile in PROFILES
            if profile in found
        },
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Keep what runs of the suite found.")
    parser.add_argument("report", type=Path, nargs="+", help="of `attnx conformance --report`")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    try:
        made = summary([read(path) for path in given.report], kept)
    except ValueError as error:
        print(f"build_matrix: {error}", file=sys.stderr)
        return 1
    KEPT.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
