"""The page of a report in headless Chromium: a reader's hands on it, not its text.

`pytest -m browser tests/conformance/test_html_browser.py`; skipped where no Chromium is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chromium import Browser, browser

from attnx_conformance import html
from attnx_conformance.results import Report, Result

__all__ = ["browser"]

pytestmark = pytest.mark.browser


def results() -> Iterator[Result]:
    for n in range(3_000):
        bad = n % 500 == 7
        yield Result(
            subject="numpy" if n % 2 else "torch", case=f"case-{n:04d}", profile="masks",
            clauses=("S3.5",), ids=(), dtype="bfloat16" if n % 3 else "float64", layout="bhsd",
            way="vjp", seed=5, verdict="failed" if bad else "passed",
            detail=f"<b>out</b> at ({n},): got 3, expected 1" if bad else "",
            ratios={"out": n / 2_000, "lse": 0.1}, seconds=n / 1e4, target="numpy",
        )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    footer = {"route": {"numpy": {"calls": {"forward": 3}, "ledger": {"D": [8]}}}}
    report = Report({"seed": 5}, tuple(results()), footer)
    return html.write(report, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(browser: Browser, path: Path) -> Iterator[Browser]:
    """The page, fresh; whatever a test does, it must not complain or fetch anything."""
    browser.visit(path)
    yield browser
    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]


CELL = '.cell[data-subject="numpy"]'


def test_a_cell_opens_to_its_cases(page: Browser) -> None:
    """Its own subject's alone, faults first, and no more rows than a reader can use."""
    assert page.texts("#cases") == []
    page.click(CELL)
    assert page.texts("#cases-title") == ["numpy, masks"]
    assert page.run(f"document.querySelector('{CELL}').ariaExpanded") == "true"
    assert page.texts("#shown") == ["1500 of 1500 trials"]
    names = page.texts("#rows .name")
    assert len(names) == 200
    assert names[:2] == ["case-0007", "case-0507"]
    assert page.texts("#rows .verdict")[:6] == ["✗ failed"] * 6
    assert page.texts("#rows .verdict")[6] == "✓ passed"
    assert page.texts("#rows .said")[0] == "<b>out</b> at (7,): got 3, expected 1"
    page.click("#more")
    assert len(page.texts("#rows .name")) == 400
    page.click(CELL)
    assert page.texts("#cases") == []


def test_filters_narrow_the_list(page: Browser) -> None:
    """By words of any field, by verdict, and in another order."""
    page.click(CELL)
    page.type("#filter", "float64 case-00")
    names = page.texts("#rows .name")
    assert names == [f"case-{n:04d}" for n in range(3, 100, 6)]
    page.type("#filter", "")
    page.run("document.querySelector('#verdict').value = 'against'")
    page.run("document.querySelector('#verdict').dispatchEvent(new Event('change'))")
    assert page.texts("#shown") == ["6 of 1500 trials"]
    page.run("document.querySelector('#order').value = 'ratio'")
    page.run("document.querySelector('#order').dispatchEvent(new Event('change'))")
    assert page.texts("#rows .name")[0] == "case-2507"
    page.type("#filter", "nothing like it")
    assert page.texts("#shown") == ["0 of 1500 trials"]


def test_a_trial_opens_and_its_command_can_be_copied(page: Browser, path: Path) -> None:
    """What lands on the clipboard is what repeats the trial."""
    page.click(CELL)
    page.click("#rows .name")
    assert page.texts("#rows .inner pre") == ["<b>out</b> at (7,): got 3, expected 1"]
    assert page.texts("#rows .inner .hint") == ["Error / bound: out 0.0035, lse 0.1"]
    (command,) = page.texts("#rows .inner code")
    assert command.startswith("attnx conformance numpy --case case-0007 --dtype bfloat16")
    page.click("#rows .copy")
    page.run("new Promise(done => setTimeout(done, 100))")
    assert page.texts("#rows .copy") == ["Copied"]
    page.run("document.querySelector('#filter').focus()")
    page.press("v", "paste")
    assert page.run("document.querySelector('#filter').value") == command


def test_the_keyboard_is_enough(page: Browser) -> None:
    """Enter opens the cell that has the focus, Tab goes on inside, Escape comes back."""
    page.run(f"document.querySelector('{CELL}').focus()")
    page.press("Enter")
    assert page.texts("#cases-title") == ["numpy, masks"]
    assert page.run("document.activeElement.id") == "cases-title"
    page.press("Tab")
    assert page.run("document.activeElement.id") == "filter"
    page.press("Escape")
    assert page.texts("#cases") == []
    assert page.run("document.activeElement.dataset.subject") == "numpy"


def test_the_page_asks_for_dark_or_light(page: Browser) -> None:
    """It follows the reader's setting."""
    colours = []
    for value in ("light", "dark"):
        page.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": value}],
        )
        colours.append(page.run("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(253, 253, 251)", "rgb(23, 24, 22)"]


def test_a_page_that_would_fetch_something_is_seen(browser: Browser, path: Path) -> None:
    """The control of these tests: a complaint and a refused request do show."""
    browser.visit(path)
    browser.run("fetch('https://attnx.invalid/').catch(() => 0)")
    browser.run("console.error('seen')")
    assert any("seen" in complaint for complaint in browser.complaints)
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
