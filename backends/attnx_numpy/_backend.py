"""NumPy backend (first slice: the shared array tiles)."""

from __future__ import annotations

from attnx.plugin import ArrayBackend, Capabilities
from attnx_numpy._lane import LANE

__all__ = ["NumpyBackend"]


class NumpyBackend(ArrayBackend):
    """Shared tiles for now."""

    def __init__(self) -> None:
        super().__init__(
            "numpy",
            LANE,
            Capabilities(dtypes=frozenset({"float16", "bfloat16", "float32", "float64"})),
        )
