"""The page of a report: what it says without a script, and that no result can break it."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from attnx_conformance import html
from attnx_conformance.results import VERDICTS, Report, Result

EVIL = "</script><script>alert('x')</script><!-- <img src=x onerror=alert(1)> & \"quoted\" \u2028"


def result(**fields: Any) -> Result:
    given: dict[str, Any] = {
        "subject": "numpy", "case": "causal-square", "profile": "masks", "clauses": ("S3.5",),
        "ids": ("A1",), "dtype": "float32", "layout": "bhsd", "way": "vjp", "seed": 0,
        "verdict": "passed", "ratios": {"out": 0.25, "dq": 0.5}, "seconds": 0.0123,
    }  # fmt: skip
    return Result(**{**given, **fields})


RESULTS = (
    result(),
    result(case="causal-lengths", dtype="bfloat16", ratios={"out": 0.0, "dq": 0.004}),
    result(case="causal-lost", verdict="failed", detail="out at (0, 1): got 3, expected 1",
           ratios={"out": 7.5, "dq": math.inf}),
    result(case="crash", profile="numerics", verdict="crashed", ratios={},
           detail="Traceback:\n  File x\nZeroDivisionError: division by zero"),
    result(subject="torch", verdict="refused", detail="torch: no sinks", ratios={}),
    result(subject="torch", profile="gradients", verdict="waived", detail="slow on CPU"),
)  # fmt: skip
HEADER = {
    "attnx_conformance": 1, "seed": 11, "versions": {"numpy": "2.4.6", "python": "3.11.2"},
    "when": "2026-01-02T03:04:05Z", "planned": 9,
}  # fmt: skip
ROUTE = {
    "numpy": {
        "calls": {"forward": 41, "backward": 17}, "ledger": {"D": [8, 64], "mask": ["dense"]},
    },
    "torch": {},
}  # fmt: skip
FOOTER = {"route": ROUTE, "interrupted": False, "seconds": 4.5}


class Page(HTMLParser):
    """Its elements, its texts, and which elements were left open."""

    VOID = frozenset({"meta", "link", "br", "input", "line", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def prose(self) -> str:
        """What a reader sees, in one line."""
        seen = (text for tag, text in self.texts if tag not in ("script", "style"))
        return " ".join(" ".join(seen).split())

    @property
    def data(self) -> Any:
        """The trials that the page holds."""
        scripts = [text for tag, text in self.texts if tag == "script"]
        return json.loads(scripts[0])


def page(
    tmp_path: Path,
    results: tuple[Result, ...] = RESULTS,
    footer: Any = FOOTER,
    header: Any = HEADER,
) -> Page:
    path = html.write(Report(header, results, footer), tmp_path / "deep" / "report.html")
    made = Page(path.read_text("utf-8"))
    assert made.open == []
    return made


def test_the_matrix_has_a_cell_for_each_subject_and_profile(tmp_path: Path) -> None:
    """A cell says its verdict in a word and a mark, and counts every verdict."""
    made = page(tmp_path)
    cells = [
        (a["data-subject"], a["data-profile"], a["class"])
        for tag, a in made.elements
        if tag == "button" and "data-subject" in a
    ]
    assert cells == [
        ("numpy", "masks", "cell bad"),
        ("numpy", "numerics", "cell bad"),
        ("torch", "masks", "cell idle"),
        ("torch", "gradients", "cell idle"),
    ]
    assert "✗ 1 against 2 passed 1 failed" in made.prose
    assert "✗ 1 against 1 crashed" in made.prose
    assert "– not done 1 refused" in made.prose
    assert "✗ 2 of 6 trials count against their subject." in made.prose


def test_a_clean_report_says_so(tmp_path: Path) -> None:
    """Nothing is called a fault then."""
    made = page(tmp_path, RESULTS[:2])
    assert "✓ None of 2 trials counts against its subject." in made.prose
    assert "✓ none against 2 passed" in made.prose
    assert "What counts against them" not in made.prose


def test_every_verdict_has_a_mark() -> None:
    """Colour is never alone."""
    assert set(html.MARKS) == set(VERDICTS)
    assert all(html.MARKS.values())


def test_what_counts_against_a_subject_stands_on_the_page_itself(tmp_path: Path) -> None:
    """An author sees the fault, its clause and its reproduction without opening anything."""
    made = page(tmp_path)
    assert "causal-lost S3.5 out at (0, 1): got 3, expected 1" in made.prose
    assert "ZeroDivisionError: division by zero" in made.prose
    assert "File x" not in made.prose
    assert RESULTS[2].command in made.prose


def test_the_same_fault_in_many_trials_is_one_line(tmp_path: Path) -> None:
    """Cases are grouped, and a long list is cut with its rest counted."""
    many = tuple(
        result(case=f"case-{n}", dtype=dtype, verdict="failed", detail=f"detail {n}")
        for n in range(30)
        for dtype in ("float32", "float64")
    )
    made = page(tmp_path, many)
    assert made.prose.count("2 trials") == html.FAULTS_SHOWN
    assert f"and {30 - html.FAULTS_SHOWN} more cases" in made.prose


def test_the_data_holds_each_trial(tmp_path: Path) -> None:
    """The rows are what the script lists; infinity survives JSON."""
    data = page(tmp_path).data
    rows = [[data["texts"][n] for n in row[:10]] + row[10:] for row in data["rows"]]
    assert len(rows) == len(RESULTS)
    for row, given in zip(rows, RESULTS, strict=True):
        assert row[:10] == [
            given.subject, given.profile, given.case, ", ".join(given.clauses),
            ", ".join(given.ids), given.dtype, given.layout, given.way, given.verdict, given.detail,
        ]  # fmt: skip
        assert row[12] == given.command
    assert rows[2][10] == {"out": 7.5, "dq": "inf"}


def test_the_plots_say_their_numbers(tmp_path: Path) -> None:
    """Beside each histogram stand the counts and the worst, and the worst trials by name."""
    made = page(tmp_path)
    labels = [a["aria-label"] for tag, a in made.elements if tag == "svg" and "aria-label" in a]
    assert labels == [
        "out: 3 trials, median 0.25, worst 7.5",
        "dq: 3 trials, median 0.5, worst ∞",
        "out: 1 trials, median 0.25, worst 0.25",
        "dq: 1 trials, median 0.5, worst 0.5",
    ]
    bars = [a for tag, a in made.elements if tag == "rect"]
    assert len([a for a in bars if a.get("class") == "over"]) == 2
    for bar in bars:
        assert 0 <= float(bar["x"] or -1) < 480
        assert 0 < float(bar["height"] or 0) <= 34
    assert "causal-lost float32 bhsd dq ∞" in made.prose


def test_header_route_and_footer_are_shown(tmp_path: Path) -> None:
    """Who ran what where, and the proof that the subject did the work."""
    prose = page(tmp_path).prose
    assert (
        "seed 11 versions: numpy 2.4.6 versions: python 3.11.2 when 2026-01-02T03:04:05Z" in prose
    )
    assert "forward 41 backward 17" in prose
    assert "D 8, 64 mask dense" in prose
    assert "torch No call was counted." in prose
    assert "seconds 4.5" in prose


@pytest.mark.parametrize(
    ("footer", "said"),
    [
        ({}, "The run did not come to its end after 6 of 9 trials."),
        ({"interrupted": True, "route": ROUTE}, "The run was stopped after 6 of 9 trials."),
    ],
    ids=["killed", "interrupted"],
)
def test_a_report_that_is_cut_short_says_so(tmp_path: Path, footer: Any, said: str) -> None:
    """It stands on top, and is announced."""
    made = page(tmp_path, footer=footer)
    assert f"This report is cut short. {said}" in made.prose
    assert any(a.get("role") == "alert" for _, a in made.elements)
    assert "cut short" not in page(tmp_path).prose
    clean = page(tmp_path, RESULTS[:2], footer=footer)
    assert "None of the 2 trials that were run counts against its subject." in clean.prose


def test_a_report_without_trials_is_a_page(tmp_path: Path) -> None:
    """An empty run is no error."""
    made = page(tmp_path, (), {}, {"attnx_conformance": 1})
    assert "No trial was run." in made.prose


def test_nothing_in_a_result_becomes_markup(tmp_path: Path) -> None:
    """Script, attribute and comment in any field are text, inside the data too."""
    evil = result(
        subject=EVIL, case=EVIL, profile=EVIL, clauses=(EVIL,), ids=(EVIL,), dtype=EVIL, way=EVIL,
        verdict="failed", detail=EVIL, ratios={EVIL: 3.0},
    )  # fmt: skip
    route = {EVIL: {"calls": {EVIL: 1}, "ledger": {EVIL: [EVIL]}}}
    made = page(tmp_path, (evil,), {"route": route, EVIL: EVIL}, {**HEADER, EVIL: EVIL})
    assert [tag for tag, _ in made.elements].count("script") == 2
    assert "img" not in {tag for tag, _ in made.elements}
    assert not [a for _, a in made.elements if "onerror" in a]
    assert EVIL in made.data["texts"]
    between = re.search(r'id="data">(.*?)</script>', made.text, re.DOTALL)
    assert between is not None
    assert not set("<>&\u2028\u2029") & set(between[1])


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    """No address but data:, and its own policy forbids the rest."""
    made = page(tmp_path)
    for tag, attributes in made.elements:
        assert not {"src", "action", "srcset"} & set(attributes), tag
        assert (attributes.get("href") or "data:,").startswith("data:")
    policies = [a.get("content") or "" for _, a in made.elements if "http-equiv" in a]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]
    assert not re.search(r"https?://|@import|url\(", made.text)


def test_ten_thousand_trials_stay_small(tmp_path: Path) -> None:
    """Under 8 MB, and so are ten thousand different tracebacks."""
    kinds = ("out", "lse", "dq", "dk", "dv")
    many = tuple(
        result(subject=f"backend{n % 3}", case=f"a-case-with-a-long-name-{n % 811}", seed=n,
               dtype=f"float{n % 4}", ratios=dict.fromkeys(kinds, n / 1e4))
        for n in range(10_000)
    )  # fmt: skip
    html.write(Report(HEADER, many, FOOTER), tmp_path / "many.html")
    assert (tmp_path / "many.html").stat().st_size < 5_000_000
    broken = tuple(
        result(case=f"case-{n}", verdict="crashed", detail=f"{n} line\n" * 900 + f"Error {n}")
        for n in range(10_000)
    )
    html.write(Report(HEADER, broken, FOOTER), tmp_path / "broken.html")
    text = (tmp_path / "broken.html").read_text("utf-8")
    assert len(text.encode()) < 8_000_000
    assert "Error 9999" in text


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_has_enough_contrast(theme: int) -> None:
    """4.5 to 1 at least (WCAG AA), on paper and on each shade."""
    css = (resources.files("attnx_conformance") / "_page" / "page.css").read_text("utf-8")
    block = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]
    colour = dict(re.findall(r"--([\w-]+): (#\w{6})", block))

    def light(name: str) -> float:
        parts = [int(colour[name][n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = ("paper", "shade", "held-shade", "bad-shade", "idle-shade")
    pairs = [(text, ground) for text in ("ink", "faint") for ground in grounds]
    pairs += [("held", "paper"), ("held", "held-shade"), ("bad", "paper"), ("bad", "bad-shade")]
    for text, ground in pairs:
        low, high = sorted((light(text), light(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)
