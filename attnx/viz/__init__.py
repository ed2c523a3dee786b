"""Seeing attention: the weights P as a picture or a page, and why scores are scaled.

It stands apart from the core, which imports no array library: pictures are drawn from NumPy's
arrays, by matplotlib and jinja2 (`pip install 'attnx[viz]'`), each imported when it first draws.
"""

from __future__ import annotations

from attnx.viz._heatmap import heatmap
from attnx.viz._record import Heatmap
from attnx.viz._scaling import Scaling, Spread, scaling

__all__ = ["Heatmap", "Scaling", "Spread", "heatmap", "scaling"]
