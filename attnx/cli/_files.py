"""Read q, k, v and their options from a file that may be anything.

The file comes from outside, so whatever a reader raises on it becomes one `ArgumentError` that
names the file. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnx.cli._exchange import load_arrays
from attnx.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["KNOWN", "Inputs", "read_file", "read_sample"]

REQUIRED = ("q", "k", "v")
KNOWN = (*REQUIRED, "mask", "bias", "lengths", "sinks")
SAMPLE = "minilm_l6_layer3.safetensors"


@dataclass(frozen=True)
class Inputs:
    """The arrays of one call by name, where they came from, and what the file says of itself."""

    source: str
    arrays: dict[str, NDArray[Any]]
    about: dict[str, Any] = field(default_factory=dict)


def read_file(path: Path) -> Inputs:
    """Read a `.npz` or `.safetensors` file; ArgumentError for anything that is not one."""
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ArgumentError(f"{path}: expected a .npz or .safetensors file")
    arrays, about = _guarded(path, reader)
    _check_names(path, arrays)
    return Inputs(str(path), {name: _native(path, name, a) for name, a in arrays.items()}, about)


def read_sample() -> Inputs:
    """Read the shipped sample: q, k, v and lengths of a real model on real text."""
    file = resources.files("attnx.cli") / "data" / SAMPLE
    with resources.as_file(file) as path:
        found = read_file(path)
    return Inputs("the shipped sample", found.arrays, found.about)


def _guarded(
    path: Path, reader: Callable[[Path], tuple[dict[str, NDArray[Any]], dict[str, Any]]]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    if path.is_dir():
        raise ArgumentError(f"{path}: expected a file, got a directory")
    try:
        with path.open("rb") as handle:
            if not handle.read(1):
                raise ArgumentError(f"{path}: the file is empty")
        return reader(path)
    except ArgumentError:
        raise
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        raise ArgumentError(f"{path}: cannot be read: {why}") from error
    except Exception as error:  # zip, npy and safetensors parsers raise a dozen different types
        why = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"{path}: not a readable {path.suffix} file: {why}") from error


def _read_npz(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    with path.open("rb") as handle:
        magic = handle.read(6)
        if not magic.startswith(b"PK"):
            what = "a single .npy array" if magic == b"\x93NUMPY" else "no zip archive"
            raise ArgumentError(
                f"{path}: not a readable .npz file: it is {what} (a pickle is never loaded); "
                "write one with numpy.savez(path, q=q, k=k, v=v)"
            )
        handle.seek(0)
        # By handle: numpy leaves a file that it opened itself open when the archive is broken.
        with np.load(handle, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}, {}


def _read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    arrays, metadata = load_arrays(path)
    try:
        about = json.loads(metadata.get("about", "{}"))
    except ValueError:
        about = {}
    return arrays, about if isinstance(about, dict) else {}


def _check_names(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        held = ", ".join(sorted(arrays)) or "none"
        raise ArgumentError(f"{path}: no array named {', '.join(missing)}; the file holds {held}")
    unknown = sorted(set(arrays) - set(KNOWN))
    if unknown:
        raise ArgumentError(
            f"{path}: unknown arrays {', '.join(unknown)}; expected q, k, v and any of "
            f"{', '.join(KNOWN[3:])}"
        )


def _native(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if (
        array.dtype.kind == "V"
        and array.dtype.names is None
        and array.dtype.name.startswith("void")
    ):
        raise ArgumentError(
            f"{path}: {name}: dtype {array.dtype} has no meaning here; .npz cannot hold bfloat16, "
            "so write a .safetensors file"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
