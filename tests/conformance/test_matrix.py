"""The matrix on the docs site says what runs have shown, of the cases that there are."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnx_conformance.results import Report, Result

ROOT = Path(__file__).resolve().parents[2]
BUILD = runpy.run_path(str(ROOT / "scripts" / "build_matrix.py"))
PAGE = runpy.run_path(str(ROOT / "scripts" / "site" / "tables.py"))


def test_the_kept_matrix_is_of_the_cases_that_there_are() -> None:
    kept = json.loads(BUILD["KEPT"].read_text("utf-8"))
    now = BUILD["current"]()
    stale = [name for name in now if kept["profiles"].get(name) != now[name]]
    if stale:
        pytest.fail(
            f"docs/conformance-matrix.json is of other cases in {', '.join(stale)}. Run `attnx "
            "conformance --report run.jsonl`, then `python scripts/build_matrix.py run.jsonl`.",
            pytrace=False,
        )


@pytest.fixture
def report() -> Report:
    """A whole run in which everything passed."""
    line = Result("mine", "", "masks", (), (), "float32", "bhsd", None, 0, "passed")
    results = tuple(replace(line, case=item.name, profile=item.profile) for item in BUILD["OURS"])
    header = {
        "subjects": ["mine"], "level": "standard", "seed": 0, "planned": len(results),
        "versions": {"python": "3.11", "attnx": "1"},
    }  # fmt: skip
    return Report(header, results, {"finished": "2026-01-02T03:04:05", "errors": []})


def test_a_whole_run_is_kept_with_its_place_and_date(report: Report) -> None:
    made = BUILD["summary"]([report], {})
    run = made["runs"]["mine"]
    assert (run["level"], run["finished"], run["trials"]) == (
        "standard", "2026-01-02", len(report.results),
    )  # fmt: skip
    assert run["versions"] == {"python": "3.11", "attnx": "1"}
    assert run["profiles"]["masks"] == {"passed": made["profiles"]["masks"]["names"]}


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ({"footer": {}}, "cut short"),
        ({"footer": {"finished": "2026-01-02", "errors": ["a worker did not start"]}}, "cut short"),
        ({"results": ()}, r"the report lacks \d+ cases of mine"),
    ],
    ids=["no footer", "errors", "no results"],
)  # fmt: skip
def test_half_a_run_is_refused(lacking: dict[str, Any], told: str, report: Report) -> None:
    with pytest.raises(ValueError, match=told):
        BUILD["summary"]([replace(report, **lacking)], {})


def test_a_kept_run_goes_with_its_cases(report: Report) -> None:
    kept = BUILD["summary"]([report], {})
    assert BUILD["summary"]([], kept) == kept
    other = kept["profiles"] | {"masks": {"names": 1, "digest": "another"}}
    assert BUILD["summary"]([], kept | {"profiles": other})["runs"] == {}


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (None, "not run"),
        ({"masks": {}}, "not run"),
        ({"masks": {"passed": 3}}, "3 of 3"),
        ({"masks": {"passed": 3, "not-applicable": 2, "refused": 1}}, "3 of 3, 1 refused"),
        ({"masks": {"refused": 4}}, "–, 4 refused"),
        ({"masks": {"passed": 3, "failed": 1}}, "**not held**: 3 of 4"),
        ({"masks": {"passed": 3, "waived": 1}}, "3 of 4, 1 waived"),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_a_cell_says_no_more_than_was_run(counts: Any, told: str) -> None:
    run = None if counts is None else {"profiles": counts}
    assert PAGE["_cell"](run, "masks") == told
