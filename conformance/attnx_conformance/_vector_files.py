"""The format of portable vectors: how files are written, read, refused and compared.

Results come from outside, so whatever a reader raises on a file becomes one line that names it, and
what does not fit is told what was expected.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from attnx.errors import ArgumentError

from .expectation import worse_than_plain
from .judgement import Bound, judge

__all__ = ["FORMAT", "README", "judged", "load", "manifest", "save"]

Array = NDArray[Any]
FORMAT = 1

# safetensors asks NumPy for the dtype "bfloat16", which exists once ml_dtypes is imported.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

README = """\
Attention test vectors, version 1
=================================

manifest.json lists the cases. Each is one call in one file of the safetensors format: an 8-byte
little-endian length, a JSON header of that length, then the arrays, little-endian, row by row.

Inputs         q k v, d_out (the gradient that arrives at out), and where the case has them bias,
               sinks and d_lse (the gradient that arrives at lse).
mask           boolean, true = visible; (*B, Hq, Lq, Lk) in either layout, (Lq, Lk) for 2-D inputs.
               It is the whole truth: causal, windows, lengths and a bias of -inf are in it.
               options.mask says how else it may be told: "none" (all visible), "top_left" or
               "bottom_right" (causal with that alignment), "array" (by the array alone).
options        scale is the number to use; softcap and dropout are null where there is none.
dropout        P is multiplied by F after lse is taken: out = (F P) v. Element (b, h, i, j), plus
               offset, reads lane j mod 8 of Philox4x32-10 with counter (j / 8, i, h, b) and key
               seed (low word, high word); lane 2w is the low half of word w, 2w + 1 the high one;
               b is the row-major batch index. F is 0 where the lane is below threshold, else
               65536 / (65536 - threshold); threshold is floor(65536 p).
layout         "bhsd": q is (*B, Hq, Lq, D). "bshd": q is (*B, Lq, Hq, D).

What is asked  s = scale * q k';  s = softcap * tanh(s / softcap);  s = s + bias;  not visible: -inf
               lse = log(sum_j exp(s_j) [+ exp(sink of the head)]);  P = exp(s - lse);  out = P v
               A row that sees nothing: out 0, lse -inf (with sinks: the sink), gradients 0.
               Query head h reads key head h // (Hq / Hk).
               dq dk dv dbias dsinks: the gradients for d_out and d_lse together.

Hand in        a folder with one safetensors file for each case, of the same name. It must hold out,
               and may hold any of the others that the case lists under "results", each in the shape
               and dtype given there. Leave out a case, or a result, that your kernel does not do:
               it counts as not applicable. Cases that need "isolation" hold NaN where some rows
               cannot see it. Then run: attnx conformance verify THIS_FOLDER YOUR_FOLDER

bfloat16       is the safetensors type BF16: the upper 16 bits of a float32.

Verdict        expected.X is the exact result in float64. X passes where |X - expected.X| is at most
               limit.X everywhere; limits are stored in float32, rounded up, and in float64 for
               float64 inputs. A limit of 0 asks for the very value. Non-finite values must stand
               in the same places, except where either.X is true. In 16-bit types the RMS error
               must also stay within about twice that of plain.X, a plain computation in the same
               type, plus the RMS of floor.X, what the accumulator's own errors may add.
"""


def save(arrays: dict[str, Array], path: Path) -> None:
    """Write arrays of any strides."""
    save_file({name: np.array(array, order="C") for name, array in arrays.items()}, path)


def load(path: Path) -> dict[str, Array]:
    """Read the arrays of a file.

    Raises:
        ArgumentError: it cannot be read, in one line.
    """
    if not path.is_file():
        raise ArgumentError(f"{path}: expected a safetensors file")
    try:
        with safe_open(path, framework="np") as archive:
            return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except Exception as error:  # its parser raises half a dozen types, TypeError for dtypes too
        why = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"{path}: not a readable safetensors file: {why}") from error


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export, with every file that it names still as it was written.

    Raises:
        ArgumentError: there is none, it is of another version, or a file is missing or changed.
    """
    path = folder / "manifest.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ArgumentError(f"{path}: expected the manifest of an export: {why}") from error
    version = about.get("attnx_vectors") if isinstance(about, dict) else None
    if version != FORMAT:
        raise ArgumentError(
            f"{path}: expected vectors of version {FORMAT}, got "
            f"{'no version' if version is None else version}"
        )
    for entry in about["cases"]:
        _unchanged(folder, entry)
    return dict(about)


def _unchanged(folder: Path, entry: dict[str, Any]) -> None:
    file = folder / entry["file"]
    if Path(entry["file"]).name != entry["file"]:
        raise ArgumentError(f"{folder}: {entry['file']!r} is no file name")
    if not file.is_file():
        raise ArgumentError(f"{file}: named by the manifest, but missing; export it again")
    if hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
        raise ArgumentError(f"{file}: is not what was exported (sha256 differs); export it again")


def judged(
    arrays: dict[str, Array], expected: dict[str, Array], entry: dict[str, Any]
) -> tuple[str, str, dict[str, float]]:
    """What is wrong with the results of a case, what to say if nothing is, and error over bound.

    Args:
        arrays: what was handed in.
        expected: the case's own file.
        entry: the case's entry in the manifest.
    """
    specs = entry["results"]
    wrong = _misnamed(arrays, specs)
    ratios: dict[str, float] = {}
    for name in (name for name in specs if name in arrays):
        actual, spec = arrays[name], specs[name]
        if actual.dtype.name != spec["dtype"] or list(actual.shape) != spec["shape"]:
            wrong.append(
                f"{name} is {actual.dtype.name} {actual.shape}, expected {spec['dtype']} "
                f"{tuple(spec['shape'])}"
            )
            continue
        found, ratios[name] = _compared(name, actual, expected, entry)
        wrong += [f"{name} {found}"] if found else []
    absent = [name for name in specs if name not in arrays]
    return "; ".join(wrong), f"not handed in: {', '.join(absent)}" if absent else "", ratios


def _misnamed(arrays: dict[str, Array], specs: dict[str, Any]) -> list[str]:
    unknown = sorted(set(arrays) - set(specs))
    others = [name for name in specs if name != "out"]
    wanted = f"expected out and any of {', '.join(others)}"
    wrong = [f"no result is called {', '.join(unknown)}: {wanted}"] if unknown else []
    return wrong if "out" in arrays or "out" not in specs else [*wrong, f"no out: {wanted}"]


def _compared(
    name: str, actual: Array, expected: dict[str, Array], entry: dict[str, Any]
) -> tuple[str, float]:
    truth = expected[f"expected.{name}"]
    overflow = entry["results"][name]["overflow"]
    bound = Bound(
        expected[f"limit.{name}"].astype(np.float64),
        expected.get(f"either.{name}", np.zeros(truth.shape, np.bool_)),
        math.inf if overflow is None else overflow,
    )
    judgement = judge(actual, truth, bound)
    if not judgement.ok:
        return judgement.detail, judgement.ratio
    if f"plain.{name}" not in expected:
        return "", judgement.ratio
    plainly, floor = expected[f"plain.{name}"], expected[f"floor.{name}"]
    worse = worse_than_plain(actual, truth, plainly, floor, entry["dtype"])
    return worse, judgement.ratio
