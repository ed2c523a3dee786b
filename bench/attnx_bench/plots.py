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
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from .bars import ratio_pictures
from .canvas import DPI, TICKS, Style, picture, plain_ticks, settings, styles_of
from .report import Report, Series, machine_lines

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["draw"]


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
    with settings():
        pictures = list(_pictures(report))
        folder.mkdir(parents=True, exist_ok=True)
        return [path for name, made in pictures for path in _save(made, folder, name)]


def _pictures(report: Report) -> Iterator[tuple[str, Figure]]:
    styles = styles_of(report)
    taken: set[str] = set()
    for series in report.series:
        name = _slug(series.name, taken)
        for kind in (TIME, MEMORY):
            made = _against_length(report, series, kind, styles)
            if made is not None:
                yield f"{name}-{kind.name}", made
    yield from ratio_pictures(report, styles)


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
    made, axes = picture(4.6, [*_absences(points, kind), *machine_lines(report)])
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
    plain_ticks(axes.yaxis, [y for mine in shown.values() for _, y in mine if y > 0])
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
