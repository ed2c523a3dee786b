"""Pictures and pages of attention: what is drawn is what was computed, and hidden is not small."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from attnx import Segments, errors, viz

f32 = np.float32
Array = np.ndarray[Any, Any]
WICKED = "</script><script>alert('&amp;')</script><!-- \u2028\" שלום 😀 \u202e"


# Pictures -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> viz.Heatmap:
    """Two heads of weights small and large, hidden pairs, an empty row, and NaN."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 5, 8)).astype(f32)
    bias = np.zeros((5, 5), f32)
    bias[1, 0] = np.nan
    tokens = ["$a$", WICKED, "", "d" * 40, "e"]
    mask = Segments([0, 0, 0, -1, 0], [0] * 5)
    return viz.heatmap(q, q, causal=True, mask=mask, bias=bias, tokens=tokens, title="<$T$>\x00 ")


def expected_colours(seen: viz.Heatmap, place: int, i: int, j: int) -> set[tuple[int, ...]]:
    """Every colour that a cell may hold."""
    if not seen.visible[place, i, j]:
        return {(226, 226, 222), (150, 150, 146)}
    if seen.broken[place, i, j]:
        return {(204, 0, 51), (255, 255, 255)}
    share = math.sqrt(seen.weights[place, i, j] / seen.most)
    return {tuple(int(c) for c in matplotlib.colormaps["cividis"](share, bytes=True)[:3])}


def check_cells(pixels: Array, seen: viz.Heatmap, place: int) -> None:
    """Each cell of a panel holds all its colours, and no others."""
    _, R, C = seen.weights.shape
    height, width = pixels.shape[0] // R, pixels.shape[1] // C
    assert pixels.shape[:2] == (height * R, width * C)
    for i in range(R):
        for j in range(C):
            cell = pixels[i * height : (i + 1) * height, j * width : (j + 1) * width, :3]
            found = {tuple(int(c) for c in colour) for colour in cell.reshape(-1, 3)}
            assert found == expected_colours(seen, place, i, j), (i, j)


def test_a_png_holds_every_pair_in_its_colour(seen: viz.Heatmap, tmp_path: Path) -> None:
    """Pixel by pixel: a weight by its size, a hidden pair hatched, NaN dotted."""
    path = seen.save(tmp_path / "made" / "here.png")
    pixels = (imread(path) * 255).round().astype(int)
    figure = seen.figure()
    assert pixels.shape[:2] == tuple(round(x * figure.dpi) for x in figure.get_size_inches()[::-1])
    for place, axes in enumerate(figure.axes[:2]):
        box = axes.get_window_extent()
        top, bottom = (pixels.shape[0] - round(y) for y in (box.y1, box.y0))
        panel = pixels[top:bottom, round(box.x0) : round(box.x1)]
        size = panel.shape[0] // 5
        # The frame lies over the outermost pixels.
        for i, j in ((0, 4), (1, 0), (3, 2), (1, 1), (4, 2), (4, 3)):
            cell = panel[i * size + 3 : (i + 1) * size - 3, j * size + 3 : (j + 1) * size - 3, :3]
            found = {tuple(c) for c in cell.reshape(-1, 3).tolist()}
            assert found == expected_colours(seen, place, i, j), (place, i, j)
    assert seen._repr_png_() == path.read_bytes()


def test_an_svg_is_xml_with_the_pixels_and_the_tokens(seen: viz.Heatmap, tmp_path: Path) -> None:
    """The panels are the same pixels; the tokens are text, for the fonts of whoever reads."""
    path = tmp_path / "a.svg"
    seen.save(path)
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"$a$", "(empty)", "<$T$>\\x00", "d" * 15 + "…", "head 1", "query", "∅"} <= texts
    sources = [node.get("{http://www.w3.org/1999/xlink}href") or "" for node in root.iter()]
    images = [base64.b64decode(s.split(",")[1]) for s in sources if s.startswith("data:image")]
    for place in (0, 1):
        pixels = (imread(io.BytesIO(images[place])) * 255).round().astype(int)
        check_cells(pixels, seen, place)
    assert seen.save(tmp_path / "b.svg").read_bytes() == path.read_bytes()


def test_what_a_person_set_is_left_alone(seen: viz.Heatmap) -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"text.parse_math": True, "font.size": 30.0}):
        assert "$a$" in {label.get_text() for label in seen.figure().axes[0].get_yticklabels()}
        assert matplotlib.rcParams["font.size"] == 30.0
    assert dict(matplotlib.rcParams) == before


def test_letters_that_the_font_lacks_are_written_out() -> None:
    """matplotlib would draw a box and warn; warnings are errors here."""
    seen = viz.heatmap(weights=np.ones((1, 1)), tokens=["漢"], title="漢")
    axes = seen.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["\\u6f22"]
    assert seen._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("R", "C", "H"), [(1, 1500, 1), (700, 1, 2), (3, 3, 17)])
def test_a_picture_has_room_for_all_pairs(R: int, C: int, H: int) -> None:
    """Each pair is at least a pixel, and a thin strip is not too thin to see."""
    figure = viz.heatmap(weights=np.ones((H, R, C))).figure()
    for axes in figure.axes[:H]:
        box = axes.get_window_extent()
        assert box.width >= max(C, 30) - 1e-6
        assert box.height >= max(R, 30) - 1e-6
        assert box.width / C == pytest.approx(round(box.width / C))


# The page -----------------------------------------------------------------------------------------


class Scripts(HTMLParser):
    """The scripts of a page, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag == "script"
        self.found += [""] if self.inside else []

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1] += data
        else:
            self.text += data


def test_the_page_holds_the_weights(seen: viz.Heatmap, tmp_path: Path) -> None:
    """What the script reads is P, who sees whom, and the tokens, whatever stands in them."""
    page = seen.save(tmp_path / "page.html").read_text("utf-8")
    scripts = Scripts(page)
    assert len(scripts.found) == 2
    assert "<$T$>" in scripts.text
    data = json.loads(scripts.found[0])
    assert (data["heads"], data["rows"], data["columns"]) == ([0, 1], [0, 5], [0, 5])
    weights = np.frombuffer(base64.b64decode(data["weights"]), "<f4").reshape(2, 5, 5)
    np.testing.assert_array_equal(weights, seen.weights)
    for name in ("visible", "empty"):
        bits = np.frombuffer(base64.b64decode(data[name]), np.uint8)
        array = getattr(seen, name)
        flat = np.unpackbits(bits, bitorder="little")[: array.size]
        assert (flat.reshape(array.shape) == array).all()
    assert tuple(data["queries"]) == seen.queries
    assert "</script><script>alert" in data["queries"][1]
    assert data["most"] == pytest.approx(seen.most)


def test_the_page_fetches_nothing(seen: viz.Heatmap) -> None:
    """Its policy forbids it, and it names no address but its own empty icon."""
    page = seen.html()
    assert "default-src 'none'" in page
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')> ]*)""", page) == ["data:,"]
    assert "innerHTML" not in page


def test_the_page_says_what_its_colours_do() -> None:
    """A legend only for what is there; the colours are matplotlib's."""
    page = viz.heatmap(weights=np.ones((2, 2, 2))).html()
    assert "NaN or infinite" not in page
    assert 'id="sample-hidden"' not in page
    (letters,) = re.findall(r'ANCHORS = "([0-9a-f]*)"', page)
    anchors = np.frombuffer(bytes.fromhex(letters), np.uint8).reshape(-1, 3)
    exact = matplotlib.colormaps["cividis"](np.arange(0, 256, 5), bytes=True)[:, :3]
    np.testing.assert_array_equal(anchors, exact)


# Scaling ------------------------------------------------------------------------------------------


def test_the_scale_keeps_scores_at_unit_variance() -> None:
    """S7: 1 with the scale whatever D, D without it; then the softmax has no entropy left."""
    found = viz.scaling()
    assert [x.D for x in found.scaled] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for scaled, unscaled in zip(found.scaled, found.unscaled, strict=True):
        assert scaled.variance == pytest.approx(1, rel=0.15)
        assert unscaled.variance == pytest.approx(scaled.D, rel=0.15)
        assert scaled.scale == pytest.approx(scaled.D**-0.5)
        assert unscaled.variance == pytest.approx(scaled.variance * scaled.D)
        assert 3.4 < scaled.entropy < math.log(found.keys)
        assert scaled.largest < 0.2
    entropies = [x.entropy for x in found.unscaled]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < 0.2
    assert found.unscaled[-1].largest > 0.9
    assert viz.scaling(dims=(4,)) == viz.scaling(dims=(4,)) != viz.scaling(dims=(4,), seed=1)
    assert len(str(found).splitlines()) == 19


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_scaling_is_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / f"scaling.{suffix}"
    viz.scaling(path, dims=(4, 64))
    if suffix == "png":
        assert imread(path).shape == (510, 1200, 4)
    else:
        texts = {x.text for x in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
        assert {"head size D", "variance of the scores", "scale 1/sqrt(D)"} <= texts


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"path": "x.html"}, errors.ArgumentError, ".png or .svg, got x.html"),
        ({"dims": []}, errors.ArgumentError, "dims: expected at least one"),
        ({"dims": [4, 0]}, errors.ArgumentError, "dims: expected head sizes >= 1, got 0"),
        ({"dims": 4}, errors.ArgumentTypeError, "dims: expected several head sizes, got 4"),
        ({"dims": [4.0]}, errors.ArgumentTypeError, "dims: expected integers, got 4.0"),
    ],
)
def test_wrong_sizes_are_refused(given: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        viz.scaling(**given)
