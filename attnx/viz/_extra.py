"""Libraries that only pictures need, imported when one is made."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnx.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DPI", "needed", "settings"]

DPI = 150

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "attnx", "svg.fonttype": "none", "text.parse_math": False, "font.size": 8.0,
    "axes.edgecolor": "#666666", "axes.linewidth": 0.6, "hatch.linewidth": 0.6,
    "hatch.color": "#707070",
}  # fmt: skip


@contextmanager
def needed(library: str, what: str) -> Iterator[None]:
    """Turn the absence of a library, and no other import error, into one that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingExtra(
            f"{what} need {library}: pip install 'attnx[viz]'", name=library
        ) from None


@contextmanager
def settings() -> Iterator[None]:
    """The settings of the pictures, whatever a person has set; theirs come back afterwards."""
    with needed("matplotlib", "pictures"):
        import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield
