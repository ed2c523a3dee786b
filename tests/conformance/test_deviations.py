"""Known deviations: read strictly, and never outliving the fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnx.errors import ArgumentError
from attnx_conformance.deviations import Deviation, load, waive
from attnx_conformance.results import Result

RESULT = Result(
    "numpy", "poison-keys", "masks", ("S4.1",), (), "float16", "bhsd", "vjp", 0, "failed", "wrong"
)
LINE = Deviation("poison-*", "reads the whole cache", "https://example.org/1", "float16")


def test_a_failure_that_is_named_is_waived() -> None:
    for verdict in ("failed", "crashed", "wrongly-accepted"):
        got = waive(replace(RESULT, verdict=verdict), (LINE,))
        assert got.verdict == "waived"
        assert got.ok
        assert got.detail == "reads the whole cache (https://example.org/1); wrong"


def test_a_pass_that_is_named_is_a_failure() -> None:
    got = waive(replace(RESULT, verdict="passed"), (LINE,))
    assert got.verdict == "failed"
    assert "take the line out" in got.detail


def test_what_is_not_named_or_not_judged_stays() -> None:
    for other in (
        replace(RESULT, case="causal"), replace(RESULT, dtype="float32"),
        replace(RESULT, verdict="refused"), replace(RESULT, verdict="not-applicable"),
    ):  # fmt: skip
        assert waive(other, (LINE,)) is other


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(
        '[[deviation]]\ncase = "self"\nreason = "b"\nlink = "c"\n'
        '[[deviation]]\ncase = "wind*"\ndtype = "float16"\nreason = "e"\nlink = "f"\n'
    )
    assert load(file) == (Deviation("self", "b", "c"), Deviation("wind*", "e", "f", "float16"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[deviation]]\ncase = "a"\nlink = "c"\n', "table 1: lacks reason"),
        ('[[deviation]]\ncase = "a"\nreason = ""\nlink = "c"\n', "lacks reason"),
        ('[[deviation]]\ncase = "a"\nreason = "b"\nlink = "c"\nwhy = 1\n', "has an unknown why"),
        ("[[deviation]", "cannot read"),
        ("[[deviations]]\n", "nothing else, got deviations"),
        ('deviation = "x"\n', "expected tables"),
        ('[[deviation]]\ncase = 5\nreason = "b"\nlink = "c"\n', "case is not text"),
        ('[[deviation]]\ncase = "slef"\nreason = "b"\nlink = "c"\n', "near: self"),
        ('[[deviation]]\ncase = "self"\ndtype = "fp16"\nreason = "b"\nlink = "c"\n', "fp16"),
    ],
    ids=["missing", "empty", "unknown", "broken", "spelling", "text", "number", "case", "dtype"],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "known.toml"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        load(file)
