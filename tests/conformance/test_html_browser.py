"""The page of a report in headless Chromium: a reader's hands on it, not its text.

`pytest -m browser tests/conformance/test_html_browser.py`; skipped where no Chromium is installed.
The browser is spoken to over a pipe, in its own protocol, so that no driver is needed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnx_conformance import html
from attnx_conformance.results import Report, Result

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--window-size=1300,1000", "--remote-debugging-pipe",
)  # fmt: skip
# The protocol wants file descriptors 3 and 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """One page in one headless browser."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(to_browser), str(to_us), binary, *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        self._out, self._in, self._rest = from_us, from_browser, b""
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        self.process.terminate()
        self.process.wait()
        os.close(self._in)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], 60)
            chunk = os.read(self._in, 1 << 16) if ready else b""
            assert chunk, "the browser says nothing more"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def visit(self, path: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """What is to be read in each visible element."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.run(f"{every}.filter(x => x.checkVisibility()).map(x => x.innerText)"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first such element."""
        found = f"document.querySelector({json.dumps(selector)})"
        x, y = self.run(
            f"(() => {{ {found}.scrollIntoView({{block: 'center'}});"
            f" const r = {found}.getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *commands: str) -> None:
        code, text = KEYS.get(key, (0, ""))
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "",
                commands=list(commands) if kind == "keyDown" else [],
            )  # fmt: skip

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.press("Delete", "delete")
        self.send("Input.insertText", text=text)

    @property
    def complaints(self) -> list[str]:
        """Exceptions, console messages and log entries since the page was opened."""
        loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in loud]

    @property
    def requests(self) -> list[str]:
        """What was fetched since then."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} on the PATH")
    opened = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def results() -> Iterator[Result]:
    for n in range(3_000):
        bad = n % 500 == 7
        yield Result(
            subject="numpy" if n % 2 else "torch", case=f"case-{n:04d}", profile="masks",
            clauses=("S3.5",), ids=(), dtype="bfloat16" if n % 3 else "float64", layout="bhsd",
            way="vjp", seed=5, verdict="failed" if bad else "passed",
            detail=f"<b>out</b> at ({n},): got 3, expected 1" if bad else "",
            ratios={"out": n / 2_000, "lse": 0.1}, seconds=n / 1e4,
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
