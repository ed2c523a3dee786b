"""What all pictures share: their settings, how an implementation looks, an empty picture.

Pictures are drawn through the objects of matplotlib alone, never through pyplot, which keeps a
state for the whole process.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .report import Report, implementations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["DPI", "TICKS", "Style", "picture", "plain_ticks", "settings", "styles_of"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart, but for yellow: too faint on white."""
MARKERS = "osD^vPX<>h"
LINES = ("-", "--", ":")
HATCHES = ("", "////", "....")
"""What tells implementations apart where the colours come round again."""

WIDTH = 8.0
"""Inches; with 10 points of type, still readable at 800 pixels."""
DPI = 150
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


@contextmanager
def settings() -> Iterator[None]:
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


@dataclass(frozen=True)
class Style:
    """How an implementation looks, the same in all pictures."""

    colour: str
    marker: str
    line: str
    hatch: str


def styles_of(report: Report) -> dict[str, Style]:
    """How each implementation of a report looks."""
    styles = {}
    for i, name in enumerate(implementations(report)):
        turn = i // len(COLOURS)
        styles[name] = Style(
            COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)],
            LINES[turn % len(LINES)], HATCHES[turn % len(HATCHES)],
        )  # fmt: skip
    return styles


def picture(height: float, caption: Sequence[str]) -> tuple[Figure, Axes]:
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


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Ticks written as plain numbers; between the powers of ten too where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(max(values) / min(values))
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=TICKS + 2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:.4g}"
