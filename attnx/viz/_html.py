"""A heat map as one HTML page that needs nothing but a browser.

The weights stand in the page once, as the bytes of float32, and visibility as bits beside them; the
script paints them and answers what lies under the pointer or the cursor. Its own security policy
forbids the page to fetch anything, so it may be opened from a disk and sent to anybody.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.viz._extra import needed

if TYPE_CHECKING:
    from attnx.viz._record import Heatmap

__all__ = ["page"]


def page(seen: Heatmap) -> str:
    """The page of a heat map; see `Heatmap.html`."""
    with needed("jinja2", "pages"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnx.viz", "_page"), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    template = environment.get_template("page.html.j2")
    return template.render(seen=seen, notes=_notes(seen), data=_data(seen))


def _notes(seen: Heatmap) -> tuple[str, ...]:
    """What the page says at its top; that no pair is hidden need not be said."""
    return seen.notes[1:] if seen.visible.all() else seen.notes


def _data(seen: Heatmap) -> str:
    """The heat map as JSON that may stand inside a script element."""
    data = {
        "heads": seen.heads,
        "rows": seen.rows,
        "columns": seen.columns,
        "queries": seen.queries,
        "keys": seen.keys,
        "most": seen.most,
        "weights": _text(_float32(seen.weights)),
        "visible": _text(np.packbits(seen.visible.ravel(), bitorder="little")),
        "empty": _text(np.packbits(seen.empty.ravel(), bitorder="little")),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # Inside a script element only these could end it, or start a comment.
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _float32(weights: Any) -> Any:
    """float64 weights that somebody else computed may be too large for it."""
    with np.errstate(over="ignore"):
        return weights.astype("<f4")


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
