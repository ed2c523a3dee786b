"""A report's badge: it says what the run showed, no more, and any browser can read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from attnx.plugin import Capabilities
from attnx_conformance import badge
from attnx_conformance.results import Report, Result
from attnx_conformance.suite import Selection

SVG = "{http://www.w3.org/2000/svg}"
GREEN, YELLOW, RED, GREY = (badge.COLOURS[name] for name in ("green", "yellow", "red", "grey"))


def report(*verdicts: str, planned: int | None = None, footer: Any = None) -> Report:
    """`report("masks passed", "masks refused")`: a run with one trial for each."""
    results = tuple(
        Result("demo", f"case-{n}", *text.split()[:1], ("S2",), (), "float32", "bhsd", "vjp", 0,
               text.split()[1])
        for n, text in enumerate(verdicts)
    )  # fmt: skip
    header = {"planned": len(results) if planned is None else planned}
    return Report(header, results, {"route": {}} if footer is None else footer)


def told(made: str) -> tuple[str, str]:
    """What a badge says, and its colour."""
    root = ElementTree.fromstring(made)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert texts[0] == "attnx"
    return texts[1], [rect.get("fill", "") for rect in root.iter(f"{SVG}rect")][-1]


@pytest.mark.parametrize(
    ("verdicts", "message", "colour"),
    [
        (["forward passed"], "passes forward", GREEN),
        (["gradients passed", "forward passed"], "passes forward, gradients", GREEN),
        (["masks passed", "forward passed", "system passed"], "passes 3 of 3 profiles", GREEN),
        (["masks refused", "forward passed", "system passed"],
         "passes forward, system, computes 66%", GREEN),
        (["forward passed", *199 * ["forward refused"]], "passes forward, computes 1%", GREEN),
        (["forward passed", "masks not-applicable"], "passes forward", GREEN),
        (["forward passed", "masks waived"], "passes forward, masks, 1 known deviation", YELLOW),
        (["forward passed", *2 * ["masks waived"]], "passes forward, masks, 2 known deviations",
         YELLOW),
        (["forward passed", "masks failed"], "fails masks", RED),
        (["forward passed", "forward of-another-kind"], "fails forward", RED),
        (["forward crashed", "masks wrongly-accepted", "system failed"],
         "fails 3 of 3 profiles", RED),
        (["forward refused", "masks refused"], "nothing shown", GREY),
        ([], "cut short", GREY),
    ],
)  # fmt: skip
def test_it_says_what_the_run_showed(verdicts: list[str], message: str, colour: str) -> None:
    """A refusal counts for a backend, so the share that was computed stands beside the profiles."""
    assert told(badge.badge(report(*verdicts))) == (message, colour)


@pytest.mark.parametrize(
    "cut",
    [{"planned": 2}, {"footer": {}}, {"footer": {"route": {}, "interrupted": True}}],
    ids=["fewer than planned", "no footer", "interrupted"],
)
def test_a_run_that_was_cut_short_passes_nothing(cut: dict[str, Any]) -> None:
    assert told(badge.badge(report("forward passed", **cut))) == ("cut short", GREY)


@pytest.mark.parametrize(
    ("selection", "sample"),
    [
        (Selection(), False),
        (Selection(profiles=("forward",), dtypes=("float32", "float64")), False),
        (Selection(cases=("self",)), True),
        (Selection(level="quick"), True),
        (Selection(dtypes=("float32",)), True),
        (Selection(ways=("vjp",)), True),
    ],
    ids=["all", "a profile", "a case", "quick", "a dtype", "a way"],
)
def test_a_run_of_some_cases_is_called_a_sample(selection: Selection, sample: bool) -> None:
    """A profile holds when all of it was asked, and one case is soon green."""
    subject: Any = SimpleNamespace(
        capabilities=Capabilities(dtypes=frozenset({"float32", "float64"}))
    )
    assert selection.sample([subject]) == sample
    made = report("forward passed")
    made.header["sample"] = sample  # type: ignore[index]
    said = ("passes forward, of a sample", GREY) if sample else ("passes forward", GREEN)
    assert told(badge.badge(made)) == said
    failed = report("forward failed")
    failed.header["sample"] = sample  # type: ignore[index]
    assert told(badge.badge(failed)) == ("fails forward", RED)


def test_a_backend_that_did_not_start_is_a_failure() -> None:
    made = report("forward passed", footer={"route": {}, "errors": ["other: it does not start"]})
    assert told(badge.badge(made)) == ("fails to start", RED)


def test_it_is_one_file_that_a_screen_reader_reads(tmp_path: Path) -> None:
    """The same bytes for the same results; nothing is fetched, and a name cannot break it."""
    made = report("forward passed", "masks refused")
    path = badge.write(made, tmp_path / "made" / "badge.svg")
    text = path.read_text("utf-8")
    assert text == badge.badge(made)
    root = ElementTree.fromstring(text)
    title = root.find(f"{SVG}title")
    assert title is not None
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == title.get("id")
    assert title.text == (
        "attnx conformance of demo: passes forward, computes 50%; 1 passed, 1 refused"
    )
    assert "href" not in text
    assert text.count("http") == 1
    evil = ElementTree.fromstring(badge.draw("<b> & </svg>", "red", 'a "title" </title>\x00\x1b'))
    assert [text.text for text in evil.iter(f"{SVG}text")] == ["attnx", "<b> & </svg>"]


def test_every_text_has_its_room() -> None:
    """As wide as its letters, so that `textLength` has little to squeeze."""
    short, long = (
        int(ElementTree.fromstring(badge.draw(text, "grey", "")).get("width", ""))
        for text in ("passes forward", "passes 10 of 10 profiles, computes 100%")
    )
    assert 120 < short < 160
    assert 260 < long < 330
