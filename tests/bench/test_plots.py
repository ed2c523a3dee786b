"""The plots of the benchmark: which are drawn, that they repeat, and that they leave no trace."""

from __future__ import annotations

import builtins
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attnx_bench import bars
from attnx_bench.plots import draw
from attnx_bench.report import Cell, Report, Row, Series

NAMES = tuple(f"implementation {i} of $many_" for i in range(12))


def report(**changes: Any) -> Report:
    rows = tuple(
        Row(name, name, {}, 1e9, (
            *(Cell(name, one, "ran", seconds=0.01 * (i + 1) / (k + 1))
              for i, one in enumerate(NAMES)),
            Cell(name, "broken", "crashed", "RuntimeError"), Cell(name, "other", "missing"),
        ))
        for k, name in enumerate(("forward", "a-workload-with-a-name-that-is-long"))
    )  # fmt: skip
    points = {
        one: tuple((2**k, 1e-6 * 4**k, None if i else 10**k) for k in range(8, 15))
        for i, one in enumerate(NAMES)
    }
    gaps = {
        "gaps": ((256, None, 0), (512, math.inf, None), (1024, 0.25, 4096)),
        "nothing": ((256, None, None),),
    }
    given: dict[str, Any] = {
        "machine": {"cpu": "Example 9000", "baselines": [NAMES[1]], "versions": {"numpy": "2.4"}},
        "rows": rows,
        "series": (Series("Causal, forward", points | gaps),),
    }
    return Report(**{**given, **changes})


def drawn(one: Report, folder: Path) -> list[str]:
    pytest.importorskip("matplotlib")
    paths = draw(one, folder)
    assert sorted(paths) == sorted(folder.iterdir())
    return [path.name for path in paths]


def test_each_picture_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    stems = ("causal-forward-time", "causal-forward-memory", "ratios")
    assert drawn(report(), folder) == [f"{s}.{kind}" for s in stems for kind in ("png", "svg")]
    for stem in stems:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(folder / f"{stem}.svg").getroot().tag.endswith("svg")


def test_many_rows_are_drawn_on_several_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "PAGE", 4)
    rows = tuple(
        Row(
            n, n, {}, 1.0, (Cell(n, NAMES[1], "ran", seconds=1.0), Cell(n, "x", "ran", seconds=2.0))
        )
        for n in ("first", "second", "third")
    )
    made = drawn(report(rows=rows, series=()), tmp_path)
    assert [name for name in made if name.endswith("svg")] == [
        "ratios-1.svg", "ratios-2.svg", "ratios-3.svg",
    ]  # fmt: skip


def test_a_report_is_drawn_alike_twice(tmp_path: Path) -> None:
    names = drawn(report(), tmp_path / "one")
    assert drawn(report(), tmp_path / "two") == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_picture_without_anything_to_show_is_not_drawn(tmp_path: Path) -> None:
    assert drawn(Report({}), tmp_path / "none") == []
    only_time = Series("x", {"one": ((256, 0.5, None),)})
    assert drawn(Report({}, series=(only_time,)), tmp_path / "x") == ["x-time.png", "x-time.svg"]
    crashed = Row("w", "w", {}, 1.0, (Cell("w", "one", "crashed"),))
    assert drawn(Report({}, rows=(crashed,)), tmp_path / "w") == []


def test_series_of_one_title_have_files_of_their_own(tmp_path: Path) -> None:
    points = {"one": ((256, 0.5, None), (512, 0.7, None))}
    series = tuple(Series(name, points) for name in ("A b", "a-b", "…"))
    names = drawn(Report({}, series=series), tmp_path)
    assert [name for name in names if name.endswith("svg")] == [
        "a-b-time.svg", "a-b-2-time.svg", "series-time.svg",
    ]  # fmt: skip


@pytest.mark.sweep
def test_the_settings_of_others_are_left_alone_and_change_nothing(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pyplot = "matplotlib.pyplot" in sys.modules
    one = report(rows=())
    names = drawn(one, tmp_path / "plain")
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30.0}):
        drawn(one, tmp_path / "set")
        assert matplotlib.rcParams["figure.facecolor"] == "black"
        assert matplotlib.rcParams["font.size"] == 30.0
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "set" / name).read_bytes()
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'attnx\[bench\]'"):
        draw(report(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
