"""Arrays in safetensors files: what people hand in, and what parent and child hand each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["load_arrays", "save_arrays"]

# safetensors asks NumPy for the dtype "bfloat16", which exists once ml_dtypes is imported.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def save_arrays(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """Write arrays of any strides."""
    from safetensors.numpy import save_file

    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path)


def load_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read the arrays of a file and its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as archive:
        arrays = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        return arrays, archive.metadata() or {}
