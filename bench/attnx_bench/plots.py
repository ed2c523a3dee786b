"""A report as pictures: time and memory against the length, and the ratios of all workloads.

Pictures are drawn through the objects of matplotlib alone, never through pyplot, which keeps a
state for the whole process; and they come out the same, byte for byte, from the same report, so
that a change in a picture under version control is a change in a figure.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import (
    Report,
    Row,
    Series,
    baseline,
    figure,
    implementations,
    machine_lines,
    ratio_of,
    seconds_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["draw"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart, but for yellow: too faint on white."""
MARKERS = "osD^vPX<>h"
LINES = ("-", "--", ":")
HATCHES = ("", "////", "....")
"""What tells implementations apart where the colours come round again."""
ALARM = "#B00020"

WIDTH = 8.0
"""Inches; with 10 points of type, still readable at 800 pixels."""
DPI = 150
BAR = 0.155
"""Inches for a bar, with the figure at its end."""
PAGE = 90
"""Bars of a picture, blanks between rows included."""
LINE = 0.15
"""Inches for a line of the caption."""
CAPTION = 118
"""Letters in a line of the caption."""
TICKS = 10

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "attnx", "svg.fonttype": "path", "text.parse_math": False, "font.size": 10.0,
    "axes.titlesize": 12.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.edgecolor": "#666666", "hatch.linewidth": 0.6, "hatch.color": "white",
}  # fmt: skip


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw all pictures of a report into a folder, each as PNG and as SVG.

    Args:
        report: what to draw.
        folder: where to; it is made if need be.

    Returns:
        The files that were written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with _settings():
        pictures = list(_pictures(report))
        folder.mkdir(parents=True, exist_ok=True)
        return [path for name, made in pictures for path in _save(made, folder, name)]


@contextmanager
def _settings() -> Iterator[None]:
    """The settings of the pictures, whatever a person has set; theirs come back afterwards."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        hint = "plots need matplotlib: pip install 'attnx[bench]'"
        raise ModuleNotFoundError(hint, name="matplotlib") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def _pictures(report: Report) -> Iterator[tuple[str, Figure]]:
    styles = _styles(report)
    taken: set[str] = set()
    for series in report.series:
        name = _slug(series.name, taken)
        for kind in (TIME, MEMORY):
            made = _against_length(report, series, kind, styles)
            if made is not None:
                yield f"{name}-{kind.name}", made
    pages = list(_pages(report))
    for number, page in enumerate(pages, 1):
        ratios = _ratios(page, styles)
        if ratios is not None:
            yield "ratios" if len(pages) == 1 else f"ratios-{number}", ratios


def _save(made: Figure, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    made.savefig(paths[0], dpi=DPI, metadata={"Software": None})
    made.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def _slug(title: str, taken: set[str]) -> str:
    """The beginning of a file's name, one for each series even where titles are alike."""
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "series"
    numbered = (plain if n == 1 else f"{plain}-{n}" for n in count(1))
    found = next(name for name in numbered if name not in taken)
    taken.add(found)
    return found


@dataclass(frozen=True)
class Style:
    """How an implementation looks, the same in all pictures."""

    colour: str
    marker: str
    line: str
    hatch: str


def _styles(report: Report) -> dict[str, Style]:
    styles = {}
    for i, name in enumerate(implementations(report)):
        turn = i // len(COLOURS)
        styles[name] = Style(
            COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)],
            LINES[turn % len(LINES)], HATCHES[turn % len(HATCHES)],
        )  # fmt: skip
    return styles


def _figure(height: float, caption: Sequence[str]) -> tuple[Figure, Axes]:
    """An empty picture over its caption, for which it grows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [line for text in caption for line in textwrap.wrap(text, CAPTION)]
    foot = LINE * (len(lines) + 1)
    made = Figure(figsize=(WIDTH, height + foot), facecolor="white")
    FigureCanvasAgg(made)
    share = foot / (height + foot)
    made.set_layout_engine("constrained", rect=(0.005, share, 0.99, 1 - share - 0.005))
    made.text(
        0.012, 0.5 * LINE / (height + foot), "\n".join(lines),
        fontsize=7.5, color="#555555", va="bottom", linespacing=1.3,
    )  # fmt: skip
    return made, made.add_subplot()


# Against the length -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is drawn against the length: which of a point, in which unit."""

    name: str
    at: int
    factor: float
    label: str


TIME = Kind("time", 1, 1e3, "time of one call (ms)")
MEMORY = Kind("memory", 2, 1e-6, "memory at the peak (MB)")

Points = dict[str, list[tuple[int, float]]]


def _against_length(
    report: Report, series: Series, kind: Kind, styles: dict[str, Style]
) -> Figure | None:
    points = _points(series, kind)
    shown = {name: mine for name, mine in points.items() if any(y > 0 for _, y in mine)}
    if not shown:
        return None
    made, axes = _figure(4.6, [*_absences(points, kind), *machine_lines(report)])
    for name in sorted(shown, key=lambda one: _end(shown[one]), reverse=True):
        style = styles[name]
        axes.plot(
            [x for x, _ in shown[name]], [y for _, y in shown[name]],
            color=style.colour, marker=style.marker, linestyle=style.line,
            markersize=6, linewidth=1.6, markeredgecolor="white", markeredgewidth=0.6, label=name,
        )  # fmt: skip
    axes.set_title(textwrap.fill(series.name, 70), loc="left")
    axes.set(xlabel="sequence length L (positions)", ylabel=kind.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _length_ticks(axes.xaxis, sorted({x for mine in shown.values() for x, _ in mine}))
    _figure_ticks(axes.yaxis, [y for mine in shown.values() for _, y in mine if y > 0])
    made.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=2.6)
    return made


def _points(series: Series, kind: Kind) -> Points:
    """Their points in the unit of the axis; NaN, a gap in the line, where there is no figure.

    Lengths at which nothing has a figure were not asked for, and make no gaps.
    """
    found = {
        name: [(point[0], _value(point[kind.at], kind)) for point in sorted(points, key=_at)]
        for name, points in series.points.items()
    }
    asked = {x for mine in found.values() for x, y in mine if y > 0}
    return {name: [(x, y) for x, y in mine if x in asked] for name, mine in found.items()}


def _at(point: tuple[int, float | None, int | None]) -> int:
    return point[0]


def _value(value: float | None, kind: Kind) -> float:
    """A value in the unit of the axis, NaN where a logarithmic axis has no place for it."""
    if value is None or not math.isfinite(value) or value <= 0:
        return math.nan
    return value * kind.factor


def _end(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Where its line ends: names are listed in the order in which the lines end."""
    return max(point for point in points if point[1] > 0)


def _absences(points: Points, kind: Kind) -> list[str]:
    """What the picture cannot show, said under it."""
    told = []
    for name, mine in points.items():
        lengths = [x for x, y in mine if not y > 0]
        if lengths and len(lengths) < len(mine):
            told.append(f"{name} at L = {', '.join(_length(x) for x in lengths)}")
        elif len(lengths) == len(mine):
            told.append(name)
    return [f"No {kind.name} measured: {'; '.join(told)}."] if told else []


def _length(value: float) -> str:
    whole = int(value)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else str(whole)


def _length_ticks(axis: Axis, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    step = math.ceil(len(lengths) / TICKS)
    axis.set_major_locator(FixedLocator([float(x) for x in lengths[::step]]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _length(value)))
    axis.set_minor_locator(NullLocator())


def _figure_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Ticks written as plain numbers; between the powers of ten too where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(max(values) / min(values))
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=TICKS + 2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:.4g}"


# The ratios ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One bar: a ratio, or what stands in its place."""

    name: str
    ratio: float | None
    told: str


def _pages(report: Report) -> Iterator[Report]:
    """The report in parts whose bars fit a page, each with some of the rows."""
    rows: list[Row] = []
    slots = 0
    for row in report.rows:
        bars = len(_bars(report, row)) + 1
        if rows and slots + bars > PAGE:
            yield replace(report, rows=tuple(rows))
            rows, slots = [], 0
        rows.append(row)
        slots += bars
    yield replace(report, rows=tuple(rows))


def _ratios(report: Report, styles: dict[str, Style]) -> Figure | None:
    """All ratios to the baselines, in bars that begin at 1: to the right is faster."""
    rows = {row.name: _bars(report, row) for row in report.rows}
    shown = {name: bars for name, bars in rows.items() if bars}
    if not any(bar.ratio for bars in shown.values() for bar in bars):
        return None
    used = dict.fromkeys(bar.name for bars in shown.values() for bar in bars)
    columns = 3 if max(len(name) for name in used) <= 24 else 2
    slots = sum(len(bars) for bars in shown.values()) + len(shown)
    head = 1.4 + 0.2 * math.ceil(len(used) / columns)
    made, axes = _figure(
        max(2.5, BAR * slots + head), [*_ratio_notes(report, rows), *machine_lines(report)]
    )
    _draw_bars(axes, shown, styles)
    _draw_legend(made, list(used), styles, columns)
    return made


def _bars(report: Report, row: Row) -> list[Bar]:
    against = baseline(report, row)
    bars = []
    for cell in row.cells:
        seconds = seconds_of(cell)
        if cell.status in ("wrong", "crashed"):
            bars.append(Bar(cell.implementation, None, cell.status))
        elif against is not None and against.seconds is not None and seconds is not None:
            ratio = against.seconds / seconds
            own = f"{cell.implementation}: {figure(1e3 * seconds)} ms"
            told = own if cell is against else ratio_of(ratio)
            bars.append(Bar(cell.implementation, ratio, told))
    return bars


def _ratio_notes(report: Report, rows: dict[str, list[Bar]]) -> list[str]:
    told = ["What has no such call has no bar."]
    alone = [row.name for row in report.rows if baseline(report, row) is None]
    if alone:
        told.append(f"No ratio, since no baseline ran: {', '.join(alone)}.")
    empty = [name for name, bars in rows.items() if not bars and name not in alone]
    if empty:
        told.append(f"No bar at all: {', '.join(empty)}.")
    return [" ".join(told)]


def _draw_bars(axes: Axes, rows: dict[str, list[Bar]], styles: dict[str, Style]) -> None:
    at, middles = 0.0, []
    for bars in rows.values():
        middles.append(at + (len(bars) - 1) / 2)
        for bar in bars:
            _draw_bar(axes, at, bar, styles[bar.name])
            at += 1
        at += 1
    ratios = [bar.ratio for bars in rows.values() for bar in bars if bar.ratio]
    axes.set_xscale("log")
    # Room for the figures at the ends of the bars, which would otherwise run out of the axes.
    axes.set_xlim(min(*ratios, 0.8) / 1.7, max(*ratios, 1.25) * 1.9)
    axes.set_ylim(at - 0.7, -1.0)
    axes.set_yticks(middles, [textwrap.fill(name, 22) for name in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.axvline(1.0, color="#444444", linewidth=1.0)
    _figure_ticks(axes.xaxis, axes.get_xlim())
    axes.set_xlabel("time of the baseline / own time (x; to the right of 1: faster)")


def _draw_bar(axes: Axes, at: float, bar: Bar, style: Style) -> None:
    ratio = bar.ratio or 1.0
    axes.barh(
        at, ratio - 1.0, left=1.0, height=0.86, color=style.colour, hatch=style.hatch,
        edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    left = ratio < 1.0
    colour = "#222222" if bar.ratio else ALARM
    told = bar.told if bar.ratio else f"{bar.name}: {bar.told}"
    axes.annotate(
        told, (ratio, at), xytext=(-3 if left else 3, 0), textcoords="offset points",
        ha="right" if left else "left", va="center", fontsize=7.5, color=colour,
    )  # fmt: skip


def _draw_legend(
    made: Figure, names: Sequence[str], styles: dict[str, Style], columns: int
) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=styles[n].colour, hatch=styles[n].hatch, edgecolor="white", label=n)
        for n in names
    ]
    made.legend(
        handles=patches, loc="outside upper left", ncols=columns, frameon=False, fontsize=9,
        title="Speed against the baseline", title_fontsize=12, alignment="left",
    )  # fmt: skip
