"""One call to compare, as a record that can be written for a child process and read there.

Parent and child build the keyword arguments of `attnx.attention` with the same code, so that what
is checked is what is run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.cli._exchange import load_arrays, save_arrays
from attnx.masks import Dense, Lengths

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Options", "Request", "load_request"]


@dataclass(frozen=True)
class Options:
    """The options of the call that are no arrays."""

    causal: bool | str = False
    layout: str = "bhsd"
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Request:
    """The arrays and options of one call, and how to measure it."""

    arrays: dict[str, NDArray[Any]]
    options: Options = field(default_factory=Options)
    seed: int = 0
    repeat: int = 5

    def call(
        self, convert: Callable[[NDArray[Any]], Any] = lambda array: array
    ) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """Return `(q, k, v)` and the keyword arguments, each array passed through `convert`."""
        arrays = {name: convert(array) for name, array in self.arrays.items()}
        mask = arrays.get("mask")
        if "lengths" in arrays:
            lengths = Lengths(arrays["lengths"])
            mask = lengths if mask is None else lengths & Dense(mask)
        options: dict[str, Any] = asdict(self.options)
        options.update(mask=mask, bias=arrays.get("bias"), sinks=arrays.get("sinks"))
        given = {name: value for name, value in options.items() if value is not None}
        return (arrays["q"], arrays["k"], arrays["v"]), given

    def d_out(self) -> NDArray[Any]:
        """Return the seeded cotangent of out, in q's dtype."""
        q, v = self.arrays["q"], self.arrays["v"]
        noise = np.random.default_rng(self.seed).standard_normal((*q.shape[:-1], v.shape[-1]))
        return noise.astype(q.dtype)

    def save(self, folder: Path) -> None:
        """Write the request into a folder, for `load_request`."""
        save_arrays(self.arrays, folder / "inputs.safetensors")
        record = {"options": asdict(self.options), "seed": self.seed, "repeat": self.repeat}
        (folder / "request.json").write_text(json.dumps(record), encoding="utf-8")


def load_request(folder: Path) -> Request:
    """Read what `Request.save` wrote."""
    record = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    arrays, _ = load_arrays(folder / "inputs.safetensors")
    return Request(arrays, Options(**record["options"]), record["seed"], record["repeat"])
