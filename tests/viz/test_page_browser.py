"""The page of a heat map in headless Chromium: a reader's hands on it, not its text.

`pytest -m browser tests/viz/test_page_browser.py`; skipped where no Chromium is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.chromium import Browser, browser

from attnx import Segments, viz

__all__ = ["browser"]

pytestmark = pytest.mark.browser

TOKENS = ["<b>one</b>", "</script>", "שלום", "😀", "five"]


@pytest.fixture(scope="module")
def seen() -> viz.Heatmap:
    """Two heads with hidden pairs, a row that sees nothing, and NaN."""
    q = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    q[1, 4] = np.nan
    mask = Segments([0, 0, 0, -1, 0], [0] * 5)
    return viz.heatmap(q, q, heads=[1, 0], causal=True, mask=mask, tokens=TOKENS, title="A <page>")


@pytest.fixture(scope="module")
def path(seen: viz.Heatmap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seen.save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def page(browser: Browser, path: Path) -> Iterator[Browser]:
    """The page, fresh; whatever a test does, it must not complain or fetch anything."""
    browser.visit(path)
    yield browser
    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]


def told(page: Browser) -> list[str]:
    return [page.texts(selector)[0] for selector in ("#query", "#key", "#weight")]


def point(page: Browser, i: int, j: int) -> None:
    """At the middle of a cell: the panel ends 22 pixels before the canvas, and 2 above its end."""
    x, y = page.run(
        "(() => { const box = document.querySelector('#map').getBoundingClientRect();"
        f" return [box.right - 22 - 26 * {5 - j} + 13, box.bottom - 2 - 26 * {5 - i} + 13] }})()"
    )
    page.point(x, y)


def value(seen: viz.Heatmap, place: int, i: int, j: int) -> str:
    return f"{seen.weights[place, i, j]:.4g}"


def test_the_pointer_is_told_what_lies_under_it(page: Browser, seen: viz.Heatmap) -> None:
    """Query, key and weight; a hidden pair is hidden, not 0; a token is text, not markup."""
    assert page.texts("h1") == ["A <page>"]
    point(page, 2, 1)
    assert told(page) == ["2שלום", "1</script>", value(seen, 0, 2, 1)]
    point(page, 1, 0)
    assert told(page) == ["1</script>", "0<b>one</b>", value(seen, 0, 1, 0)]
    point(page, 1, 4)
    assert told(page)[2] == "hidden"
    point(page, 4, 2)
    assert told(page)[2] == "NaN"
    assert page.texts("#row-note") == ["It sees 5 of the 5 keys shown; their weights sum to NaN."]
    point(page, 3, 2)
    assert page.texts("#row-note") == ["This query sees no key: its output is 0."]
    assert page.texts("#strongest tr") == []


def test_the_keyboard_is_enough(page: Browser, seen: viz.Heatmap) -> None:
    """Tab reaches heads, scale and picture; arrows go from head to head, from pair to pair."""
    page.press("Tab")
    assert page.run("document.activeElement.name") == "head"
    page.press("ArrowRight")
    assert page.texts("#pair") == [f"Head 0, query 0, key 0: {value(seen, 1, 0, 0)}"]
    page.press("Tab")
    assert page.run("document.activeElement.id") == "scale"
    page.press("Tab")
    assert page.run("document.activeElement.id") == "map"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.press(key)
    assert page.texts("#pair") == ["Head 0, query 2, key 1: " + value(seen, 1, 2, 1)]
    page.press("End")
    assert page.texts("#pair") == ["Head 0, query 2, key 4: hidden"]
    row = sorted(seen.weights[1, 2, :3], reverse=True)
    assert page.texts("#strongest .number") == [f"{x:.4g}" for x in row]


def test_the_cursor_stays_in_sight(browser: Browser, tmp_path: Path) -> None:
    """A picture larger than the window is scrolled to where the keys went."""
    page = viz.heatmap(weights=np.ones((1, 1400, 1400))).save(tmp_path / "large.html")
    browser.visit(page)
    browser.run("document.querySelector('#map').focus()")
    view = "document.querySelector('.scroll')"
    for keys, pair in (
        (["End"], (0, 1399)),
        (["PageDown"] * 99, (990, 1399)),
        (["Home"], (990, 0)),
    ):
        for key in keys:
            browser.press(key)
        assert browser.texts("#pair") == [f"Head 0, query {pair[0]}, key {pair[1]}: 1"]
        ends = browser.run(
            f"[{view}.scrollTop, {view}.clientHeight, {view}.scrollLeft, {view}.clientWidth]"
        )
        for place, start, size in zip(pair, ends[::2], ends[1::2], strict=True):
            assert start <= place + 40 <= start + size
    assert browser.complaints == []


def test_a_head_is_picked_and_a_pair_is_held(page: Browser, seen: viz.Heatmap) -> None:
    """A click holds the pair while the head changes; Escape lets it go."""
    page.click("#map")
    held = page.texts("#pair")[0]
    assert held.endswith(" (held)")
    point(page, 0, 0)
    assert page.texts("#pair") == [held]
    page.click(".heads label:nth-of-type(2)")
    assert page.texts("#pair")[0].startswith("Head 0,")
    assert page.texts("#pair")[0].endswith(" (held)")
    page.run("document.querySelector('#map').focus()")
    page.press("Escape")
    point(page, 0, 0)
    assert page.texts("#pair") == [f"Head 0, query 0, key 0: {value(seen, 1, 0, 0)}"]


PIXELS = """(() => {{
  const map = document.querySelector('#map'), copy = document.createElement('canvas');
  [copy.width, copy.height] = [16, 1];
  const pen = copy.getContext('2d', {{ willReadFrequently: true }});
  pen.drawImage(map, 26 * {right} - map.width + 22 - 5, 26 * {below} - map.height + 2 - 13);
  return [...pen.getImageData(0, 0, 16, 1).data];
}})()"""


def colours(page: Browser, i: int, j: int) -> set[tuple[int, ...]]:
    """Those of a line through a cell."""
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    data = page.run(PIXELS.format(right=5 - j, below=5 - i))
    return {tuple(data[n : n + 4]) for n in range(0, 64, 4)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hidden_is_not_a_small_weight(page: Browser, scheme: str) -> None:
    """Hidden cells are hatched, in both schemes; a weight has one colour, by the chosen scale."""
    page.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    grounds = {"light": (228, 228, 223, 255), "dark": (46, 47, 44, 255)}
    hidden = colours(page, 0, 3)
    assert grounds[scheme] in hidden
    assert len(hidden) > 1
    assert colours(page, 3, 0) == hidden
    (root,) = colours(page, 2, 0)
    page.run("document.querySelector('#scale').value = 'linear'")
    page.run("document.querySelector('#scale').dispatchEvent(new Event('change'))")
    (linear,) = colours(page, 2, 0)
    assert linear != root
    assert linear not in hidden
    assert colours(page, 0, 3) == hidden
