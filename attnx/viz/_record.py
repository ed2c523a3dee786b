"""What there is to see, as arrays, apart from how it is drawn.

A picture says three things of a pair that must not be confused: a weight, however small; that the
query does not see the key; and that the weight is no number. So the record keeps visibility beside
the weights, and says in words what a picture shows in colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["SUFFIXES", "Heatmap", "check_path"]

SUFFIXES = (".png", ".svg", ".html")
LISTED = 8
"""Rows that are named one by one in a note."""


def check_path(path: Path | str) -> Path:
    """A path that says by its suffix what to make; ArgumentError for any other."""
    found = Path(path)
    if found.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"path: expected a name that ends in {', '.join(SUFFIXES)}, got {path}")
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """The attention weights of some heads of one batch entry, ready to be drawn.

    Attributes:
        weights: P `(heads, rows, columns)`, float32 or float64; 0 where a pair is hidden.
        visible: `(heads, rows, columns)`: whether the query sees the key (S3.1).
        empty: `(heads, rows)`: whether the query sees no key at all, shown or not (S3.7).
        heads: the index of each head.
        entry: the row-major flattened batch index.
        rows: (start, stop) of the queries.
        columns: (start, stop) of the keys.
        queries: a label for each row, or None.
        keys: a label for each column, or None.
        title: what the picture is called.

    Example:
        >>> import numpy as np
        >>> from attnx import viz
        >>> q = np.ones((2, 3, 4), np.float32)
        >>> viz.heatmap(q, q, causal=True)
        Heatmap('attention weights', heads 0, 1, 3 queries x 3 keys, 6 of 18 pairs hidden)
    """

    weights: NDArray[np.floating[Any]]
    visible: NDArray[np.bool_]
    empty: NDArray[np.bool_]
    heads: tuple[int, ...]
    entry: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    queries: tuple[str, ...] | None
    keys: tuple[str, ...] | None
    title: str

    @property
    def broken(self) -> NDArray[np.bool_]:
        """Where a visible weight is NaN or infinite."""
        return np.asarray(self.visible & ~np.isfinite(self.weights))

    @property
    def most(self) -> float:
        """The largest weight that is a number: where the colours end. 1 where there is none."""
        shown = self.weights[self.visible & np.isfinite(self.weights)]
        top = float(shown.max()) if shown.size else 0.0
        return top if top > 0 else 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said beside the picture: hidden pairs, empty rows, weights that are none."""
        hidden, broken = int((~self.visible).sum()), int(self.broken.sum())
        said = [f"{hidden} of {self.visible.size} pairs hidden"]
        if self.empty.any():
            said.append(self.empties)
        if broken:
            said.append(f"{broken} weights are NaN or infinite")
        return tuple(said)

    @property
    def empties(self) -> str:
        """Which queries see no key, in words; empty where each sees one."""
        if not self.empty.any():
            return ""
        return f"Queries that see no key (their output is 0): {self._empty_rows()}"

    def _empty_rows(self) -> str:
        start = self.rows[0]
        if (self.empty == self.empty[:1]).all():
            return _listed(np.flatnonzero(self.empty[0]) + start)
        return "; ".join(
            f"head {head}: {_listed(np.flatnonzero(rows) + start)}"
            for head, rows in zip(self.heads, self.empty, strict=True)
            if rows.any()
        )

    def figure(self) -> Figure:
        """The picture as a figure of matplotlib, which no global state holds.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        from attnx.viz._draw import figure

        return figure(self)

    def html(self) -> str:
        """The picture as one page that needs nothing but a browser.

        Raises:
            MissingExtra: jinja2 is not installed.
        """
        from attnx.viz._html import page

        return page(self)

    def save(self, path: Path | str) -> Path:
        """Write the picture as `.png` or `.svg`, or the page as `.html`, by the path's suffix.

        Args:
            path: where to; its folder is made where it does not exist.

        Returns:
            The path.

        Raises:
            ArgumentError: another suffix.
            MissingExtra: matplotlib or jinja2 is not installed.
        """
        target = check_path(path)
        if target.suffix.lower() == ".html":
            made = self.html().encode("utf-8")
        else:
            from attnx.viz._draw import drawn

            made = drawn(self, target.suffix.lower()[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made)
        return target

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        from attnx.viz._draw import drawn

        return drawn(self, "png")

    def __repr__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        _, R, C = self.weights.shape
        return f"Heatmap({self.title!r}, heads {heads}, {R} queries x {C} keys, {self.notes[0]})"


def _listed(rows: Any) -> str:
    names = ", ".join(map(str, rows[:LISTED]))
    return names if len(rows) <= LISTED else f"{names} and {len(rows) - LISTED} more"
