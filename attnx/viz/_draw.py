"""A heat map as PNG or SVG.

A cell is a whole number of pixels and every panel starts on one, so that no pair is blurred or
dropped by scaling; what is hidden is hatched in those same pixels. Figures are made through the
objects of matplotlib, never through pyplot, which keeps a state for the whole process.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx.viz._choose import MOST_HEADS
from attnx.viz._extra import DPI, settings
from attnx.viz._labels import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from attnx.viz._record import Heatmap

__all__ = ["drawn", "figure"]

COLOURS = "cividis"
GAMMA = 0.5
"""Colours go by the square root, or most weights of a long row could not be told from 0."""
HIDDEN, STRIPE = (226, 226, 222, 255), (150, 150, 146, 255)
BROKEN, DOT = (204, 0, 51, 255), (255, 255, 255, 255)
PATTERNS = {"hidden": (HIDDEN, STRIPE), "broken": (BROKEN, DOT)}
PERIOD = 8
"""Pixels from stripe to stripe."""
LARGEST, NAMED = 36, 15
"""Pixels of a cell: at most, and at least where its token is to be read."""
WIDEST, STRIP = 2400, 90
SIDES = ((1, 1100), (4, 620), (64, 400), (MOST_HEADS, 200))
"""Pixels that a panel is meant to have, beside so many others."""
TITLE, PANEL_TITLE, LINE, GAP = 52, 30, 24, 26


def figure(seen: Heatmap) -> Figure:
    """The figure of a heat map; see `Heatmap.figure`."""
    with settings():
        return _Picture(seen, replace=True).figure


def drawn(seen: Heatmap, kind: str) -> bytes:
    """The bytes of a heat map as `"png"` or `"svg"`, the same ones for the same weights."""
    told = {"Title": seen.title, "Description": "; ".join(seen.notes)}
    own = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    buffer = io.BytesIO()
    with settings(), warnings.catch_warnings():
        # Who opens an SVG has fonts of their own for what ours lack.
        warnings.filterwarnings(
            "ignore", message=r"Glyph .* missing from font", category=UserWarning
        )
        picture = _Picture(seen, replace=kind == "png")
        picture.figure.savefig(buffer, format=kind, dpi=DPI, metadata=told | own)
    return buffer.getvalue()


class _Layout(NamedTuple):
    """Sizes in pixels, and how many panels stand side by side; of a cell, down and across."""

    cell: tuple[int, int]
    width: int
    height: int
    left: int
    bottom: int
    across: int
    down: int

    @property
    def step(self) -> tuple[int, int]:
        return self.width + GAP, self.height + GAP + PANEL_TITLE

    @property
    def grid(self) -> tuple[int, int]:
        """Of all panels together."""
        across, down = self.step
        return self.across * across - GAP, self.down * down - GAP - PANEL_TITLE


def _layout(seen: Heatmap, texts: tuple[tuple[str, ...], tuple[str, ...]], measure: Any) -> _Layout:
    H, R, C = seen.weights.shape
    longest = max(R, C)
    side = next(pixels for most, pixels in SIDES if most >= H)
    cell = max(1, min(LARGEST, side // longest))
    if (seen.queries or seen.keys) and longest <= 64 and H <= 16:
        cell = max(cell, NAMED)
    # A few rows of a long sequence are a strip that must still be seen.
    cells = tuple(max(cell, min(LARGEST, STRIP // n)) for n in (R, C))
    height, width = R * cells[0], C * cells[1]
    across = max(1, min(H, round((H * 1.5 * height / width) ** 0.5), WIDEST // (width + GAP)))
    left, bottom = (
        60 + (max(map(measure, names)) if names and cell >= NAMED else 40)
        for names, cell in zip(texts, cells, strict=True)
    )
    down = -(-H // across)
    return _Layout((cells[0], cells[1]), width, height, int(left), int(bottom), across, down)


class _Picture:
    """One figure, panel by panel."""

    def __init__(self, seen: Heatmap, *, replace: bool) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.seen, self.replace = seen, replace
        self.figure = Figure(dpi=DPI, facecolor="white")
        self.canvas = FigureCanvasAgg(self.figure)
        self.queries, self.keys = (
            tuple(short(self.text(name)) for name in names or ())
            for names in (seen.queries, seen.keys)
        )
        self.lay = lay = _layout(seen, (self.queries, self.keys), self.measured)
        self.notes = [seen.empties] if seen.empties else []
        across, down = lay.grid
        self.foot = lay.bottom + LINE * (len(self.notes) + 2)
        self.size = (
            max(760, lay.left + across + 150),
            TITLE + PANEL_TITLE + max(down, 160) + self.foot,
        )
        self.figure.set_size_inches(self.size[0] / DPI, self.size[1] / DPI)
        self.write(16, 18, self.text(seen.title), size=11, top=True)
        for place in range(len(seen.heads)):
            self.panel(place)
        self.bar()
        self.legend()

    def text(self, label: str) -> str:
        """A label in letters that the font has; the others by their code, where we draw them."""
        if not self.replace:
            return label
        from matplotlib.font_manager import findfont, get_font

        font = get_font(findfont("DejaVu Sans"))
        return "".join(x if font.get_char_index(ord(x)) else f"\\u{ord(x):04x}" for x in label)

    def measured(self, label: str) -> float:
        from matplotlib.font_manager import FontProperties

        renderer: Any = self.canvas.get_renderer()  # type: ignore[no-untyped-call]
        width, _, _ = renderer.get_text_width_height_descent(
            label, FontProperties(size=self.points(NAMED)), False
        )
        return float(width) * 1.1

    def points(self, cell: int) -> float:
        """The size of a token's letters that fit into a cell."""
        return min(8.0, cell * 0.85 * 72 / DPI)

    def write(self, x: float, y: float, text: str, *, size: float = 8, top: bool = False) -> None:
        """Text at pixels from the left, and from the top or the bottom."""
        W, H = self.size
        self.figure.text(
            x / W, 1 - y / H if top else y / H, text, fontsize=size, color="#222222",
            va="top" if top else "bottom",
        )  # fmt: skip

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes by pixels from the left and from the top."""
        W, H = self.size
        return self.figure.add_axes((x / W, 1 - (y + height) / H, width / W, height / H))

    def panel(self, place: int) -> None:
        seen, lay = self.seen, self.lay
        row, column = divmod(place, lay.across)
        across, down = lay.step
        axes = self.axes(
            lay.left + column * across, TITLE + PANEL_TITLE + row * down, lay.width, lay.height
        )
        (top, bottom), (left, right) = seen.rows, seen.columns
        edges = (left - 0.5, right - 0.5, bottom - 0.5, top - 0.5)
        axes.imshow(
            _pixels(seen, place, lay.cell), extent=edges, aspect="auto", interpolation="none"
        )
        axes.set_title(f"head {seen.heads[place]}", fontsize=8, loc="left", pad=4)
        outer = column == 0, place + lay.across >= len(seen.heads)
        sizes = tuple(map(self.points, lay.cell))
        _ticks(axes.yaxis, self.queries, seen.rows, lay.cell[0], sizes[0], outer[0])
        _ticks(axes.xaxis, self.keys, seen.columns, lay.cell[1], sizes[1], outer[1])
        if lay.cell[1] >= NAMED and self.keys:
            axes.tick_params(axis="x", rotation=90)
        if outer[0]:
            axes.set_ylabel("query", fontsize=8)
        if outer[1]:
            axes.set_xlabel("key", fontsize=8)
        if lay.cell[0] >= 9:
            for i in np.flatnonzero(seen.empty[place]).tolist():
                axes.text(
                    right - 0.4, top + i, "∅", fontsize=sizes[0], va="center",
                    ha="left", clip_on=False,
                )  # fmt: skip

    def bar(self) -> None:
        """The scale of the colours, which all panels share."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import PowerNorm

        across, down = self.lay.grid
        axes = self.axes(
            self.lay.left + across + 44, TITLE + PANEL_TITLE, 22, min(max(down, 160), 420)
        )
        scale = ScalarMappable(PowerNorm(GAMMA, 0, self.seen.most), COLOURS)
        bar = self.figure.colorbar(scale, cax=axes)
        bar.ax.tick_params(labelsize=7)
        bar.set_label("weight", fontsize=8)

    def legend(self) -> None:
        """What is no weight, and what else must be said."""
        seen, x, y = self.seen, 16, 10 + LINE * len(self.notes)
        shown = {"hidden": not seen.visible.all(), "broken": seen.broken.any()}
        for kind in (kind for kind, some in shown.items() if some):
            text = seen.notes[0] if kind == "hidden" else seen.notes[-1]
            axes = self.axes(x, self.size[1] - y - 18, 36, 18)
            axes.imshow(_sample(kind), aspect="auto", interpolation="none")
            axes.set(xticks=[], yticks=[])
            self.write(x + 44, y, text, size=7.5)
            x += 60 + int(self.measured(text) * 1.25)
        for line, note in enumerate(reversed(self.notes)):
            self.write(
                16, 10 + LINE * line, note if len(note) < 150 else note[:149] + "…", size=7.5
            )


def _pixels(seen: Heatmap, place: int, cell: tuple[int, int]) -> NDArray[np.uint8]:
    """One head, pixel by pixel: weights coloured, what is hidden hatched, what is broken dotted."""
    import matplotlib

    weights, visible = seen.weights[place], seen.visible[place]
    broken = visible & ~np.isfinite(weights)
    share = np.where(visible & ~broken, weights, 0) / seen.most
    colours = matplotlib.colormaps[COLOURS](np.clip(share, 0, 1) ** GAMMA, bytes=True)
    large = np.asarray(_large(colours, cell))
    for kind, where in (("hidden", ~visible), ("broken", broken)):
        spots = _large(where, cell)
        base, mark = PATTERNS[kind]
        large[spots] = base
        large[spots & _marks(kind, spots.shape)] = mark
    return large


def _large(array: NDArray[Any], cell: tuple[int, int]) -> NDArray[Any]:
    return array.repeat(cell[0], axis=0).repeat(cell[1], axis=1)


def _marks(kind: str, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    y, x = np.ogrid[: shape[0], : shape[1]]
    if kind == "hidden":
        return np.asarray((x + y) % PERIOD < 2)
    return np.asarray((x % 4 < 2) & (y % 4 < 2))


def _sample(kind: str) -> NDArray[np.uint8]:
    base, mark = PATTERNS[kind]
    made = np.empty((18, 36, 4), np.uint8)
    made[:] = base
    made[_marks(kind, made.shape)] = mark
    return made


def _ticks(
    axis: Any, names: tuple[str, ...], ends: tuple[int, int], cell: int, size: float, outer: bool
) -> None:
    """Tokens where they can be read, else positions at round distances."""
    start, stop = ends
    if names and cell >= NAMED:
        axis.set_ticks(range(start, stop), names if outer else [""] * len(names))
        axis.set_tick_params(length=0, labelsize=size, pad=3)
        return
    steps = (n * 10**e for e in range(6) for n in (1, 2, 5))
    room = max(45, 12 * (len(str(stop)) + 2))
    step = next(s for s in steps if s * cell >= room)
    places = [n for n in range(start, stop) if n % step == 0] or [start]
    axis.set_ticks(places, [str(n) if outer else "" for n in places])
    axis.set_tick_params(length=3, labelsize=7)
