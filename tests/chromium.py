"""Headless Chromium for the tests of pages: a reader's hands, not their text.

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

__all__ = ["Browser", "browser"]

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
KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "End": (35, ""), "Home": (36, ""),
    "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
}  # fmt: skip


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

    def point(self, x: float, y: float) -> None:
        """With the mouse, at a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

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
