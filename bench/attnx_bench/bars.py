"""The ratios of all workloads to their baselines, in bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .canvas import Style, picture, plain_ticks
from .report import Report, Row, baseline, figure, machine_lines, ratio_of, seconds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ratio_pictures"]

ALARM = "#B00020"
BAR = 0.155
"""Inches for a bar, with the figure at its end."""
PAGE = 90
"""Bars of a picture, blanks between rows included."""


@dataclass(frozen=True)
class Bar:
    """One bar: a ratio, or what stands in its place."""

    name: str
    ratio: float | None
    told: str


def ratio_pictures(report: Report, styles: dict[str, Style]) -> Iterator[tuple[str, Figure]]:
    """The pictures of all ratios, by the beginning of a file's name."""
    pages = list(_pages(report))
    for number, page in enumerate(pages, 1):
        ratios = _ratios(page, styles)
        if ratios is not None:
            yield "ratios" if len(pages) == 1 else f"ratios-{number}", ratios


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
    made, axes = picture(
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
    plain_ticks(axes.xaxis, axes.get_xlim())
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
