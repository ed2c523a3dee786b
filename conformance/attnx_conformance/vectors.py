"""Cases on disk, for kernels that no Python process can call.

A kernel in another language, on a board or behind a compiler, is judged like any other: `export`
writes inputs and expected values, somebody computes, and `verify` judges what came back. The files
say everything that the verdict needs, so that a later version of the cases cannot change it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnx.errors import ArgumentError
from attnx.plugin import Dropout

from ._marshal import in_layout, plain_dropout
from ._vector_files import FORMAT, README, judged, load, manifest, save
from .cases import CASES, DTYPES, LOW, Case, Inputs
from .expectation import Expectation, expectation
from .results import Result, versions

__all__ = ["export", "verify"]

Array = NDArray[Any]
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def export(
    directory: Path | str,
    cases: Iterable[Case] | None = None,
    dtypes: Iterable[str] | None = None,
    seed: int = 0,
    layout: str = "bhsd",
    scores: str = "float32",
) -> Path:
    """Write cases as one safetensors file each, with a manifest and a page that explains them.

    Args:
        directory: made where it does not exist.
        cases: which; all but those about strides, which no file can hold.
        dtypes: of q, k and v, all when absent; a case is written in those that it makes sense for.
        seed: of the inputs.
        layout: "bhsd" or "bshd".
        scores: "float32", or "input" for kernels that round scores to `dtype`.

    Returns:
        The manifest.

    Raises:
        ArgumentError: nothing is selected, or a dtype or layout is unknown.

    Example:
        >>> import tempfile
        >>> from attnx_conformance.cases import CASES
        >>> export(tempfile.mkdtemp(), CASES[:1], ["float32"]).name
        'manifest.json'
    """
    chosen = [case for case in CASES if not case.make.views] if cases is None else list(cases)
    wanted = list(DTYPES if dtypes is None else dtypes)
    for what, given, known in (("dtype", wanted, DTYPES), ("layout", [layout], ("bhsd", "bshd"))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ArgumentError(f"{what}: expected one of {', '.join(known)}, got {unknown[0]!r}")
    pairs = [(case, dtype) for case in chosen for dtype in wanted if dtype in case.dtypes]
    if not pairs:
        raise ArgumentError("export: no case makes sense in the dtypes that were asked for")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "manifest.json"
    path.unlink(missing_ok=True)  # written last: a folder without one is no whole export
    entries = [_write(folder, case, dtype, seed, layout, scores) for case, dtype in pairs]
    about = {"attnx_vectors": FORMAT, "made_by": versions(), "seed": seed, "layout": layout,
             "scores": scores, "cases": entries}  # fmt: skip
    (folder / "README.txt").write_text(README, encoding="utf-8")
    path.write_text(_laid_out(about), encoding="utf-8")
    return path


def _laid_out(about: dict[str, Any]) -> str:
    """JSON with one case a line, for people who look, and for diffs."""
    cases = ",\n".join(json.dumps(entry, allow_nan=False) for entry in about["cases"])
    head = json.dumps({**about, "cases": []}, indent=1, allow_nan=False)
    return head.removesuffix("[]\n}") + f"[\n{cases}\n]\n}}\n"


def _write(
    folder: Path, case: Case, dtype: str, seed: int, layout: str, scores: str
) -> dict[str, Any]:
    inputs = in_layout(case.inputs(dtype, seed), layout)
    expected = expectation(case, dtype, layout, seed, scores)
    arrays = _inputs(inputs, expected)
    given = {name: _described(array) for name, array in arrays.items()}
    results = {}
    for name in RESULTS:
        if name in case.compare and expected.truth(name) is not None:
            arrays |= _expected(name, expected)
            results[name] = _result(name, inputs, expected)
    file = f"{case.name}.{dtype}.safetensors"
    save(arrays, folder / file)
    terms = expected.reference.terms
    return {
        "name": case.name,
        "clauses": list(case.clauses),
        "profile": "low-precision" if dtype in LOW else case.profile,
        "ids": list(case.ids),
        "needs": list(case.needs),
        "dtype": dtype,
        "layout": layout,
        "options": {
            "scale": terms.scale,
            "softcap": terms.softcap,
            "mask": _shape_of_mask(arrays),
            "dropout": _numbers(case.options.get("dropout")),
        },
        "file": file,
        "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest(),
        "inputs": given,
        "results": results,
    }


def _inputs(inputs: Inputs, expected: Expectation) -> dict[str, Array]:
    names = ("q", "k", "v", "d_out", "d_lse", "bias", "sinks")
    arrays = {name: getattr(inputs, name) for name in names}
    arrays["mask"] = expected.reference.visible
    terms = expected.reference.terms
    if terms.bias is not None and terms.bias_shape is None:  # an Alibi, as what it stands for
        wide = np.float64 if expected.dtype == "float64" else np.float32
        arrays["bias"] = terms.restore_grid(terms.bias).astype(wide)
    return {name: array for name, array in arrays.items() if array is not None}


def _expected(name: str, expected: Expectation) -> dict[str, Array]:
    truth, bound = np.asarray(expected.truth(name)), expected.limit(name)
    limit = np.broadcast_to(bound.limit, truth.shape)
    either = np.broadcast_to(bound.either, truth.shape)
    arrays = {
        f"expected.{name}": truth,
        f"limit.{name}": limit if expected.dtype == "float64" else _rounded_up(limit),
    }
    if either.any():
        arrays[f"either.{name}"] = either
    if name in expected.yardstick and name != "lse":
        arrays[f"plain.{name}"] = expected.yardstick[name]
        floor = getattr(expected.accumulated, name).limit
        arrays[f"floor.{name}"] = _rounded_up(np.broadcast_to(floor, truth.shape))
    return arrays


def _rounded_up(limit: Array) -> Array:
    """Half the bytes, never a tighter bound; as it was where float32 is too narrow."""
    with np.errstate(over="ignore", under="ignore"):
        low = limit.astype(np.float32)
        low = np.where(low < limit, np.nextafter(low, np.float32(np.inf)), low)
    return limit if (np.isinf(low) & np.isfinite(limit)).any() else low


def _result(name: str, inputs: Inputs, expected: Expectation) -> dict[str, Any]:
    dtype = inputs.q.dtype.name
    if name == "lse":
        dtype = "float64" if dtype == "float64" else "float32"
    like = {"dbias": inputs.bias, "dsinks": inputs.sinks}.get(name)
    overflow = expected.limit(name).overflow
    return {
        "dtype": dtype if like is None else like.dtype.name,
        "shape": list(np.shape(expected.truth(name))),
        "overflow": overflow if math.isfinite(overflow) else None,
    }


def _numbers(dropout: Dropout | None) -> dict[str, Any] | None:
    """A dropout for readers whose numbers end at 2^53: the seed as two words, p as a threshold."""
    if dropout is None:
        return None
    plain = plain_dropout(dropout)
    return {
        "p": plain.p, "threshold": plain.threshold,
        "seed": [plain.seed % (1 << 32), plain.seed >> 32], "offset": list(plain.offset),
    }  # fmt: skip


def _described(array: Array) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape)}


def _shape_of_mask(arrays: dict[str, Array]) -> str:
    """How else a kernel may be told the mask: not at all, as causal, or by the array alone."""
    mask = arrays["mask"]
    Lq, Lk = mask.shape[-2:]
    spellings = {
        "none": np.ones((Lq, Lk), np.bool_),
        "top_left": np.tri(Lq, Lk, 0, np.bool_),
        "bottom_right": np.tri(Lq, Lk, Lk - Lq, np.bool_),
    }
    for name, spelled in spellings.items():
        if np.array_equal(np.broadcast_to(spelled, mask.shape), mask):
            return name
    return "array"


def verify(directory: Path | str, results: Path | str, *, subject: str = "") -> tuple[Result, ...]:
    """Judge results that were computed anywhere.

    Args:
        directory: what `export` wrote.
        results: a folder with a file for each case, of the same name as the case's own.
        subject: how reports call what computed them; the folder's name when empty.

    Returns:
        A verdict for each case of the manifest, in its order: "passed", "failed", "crashed" for a
        file that cannot be read, "not-applicable" where no file was handed in.

    Raises:
        ArgumentError: the manifest is not of a known version, a file of the export has changed, or
            no file of the results bears the name of a case.
    """
    folder, given = Path(directory), Path(results)
    about = manifest(folder)
    if not given.is_dir():
        raise ArgumentError(f"{given}: expected a folder with one file for each case")
    present = {path.name for path in given.iterdir()}
    wanted = [entry["file"] for entry in about["cases"]]
    if not present & set(wanted):
        held = f"it holds {sorted(present)[0]}" if present else "it is empty"
        raise ArgumentError(f"{given}: no file bears the name of a case ({wanted[0]}); {held}")
    name = subject or given.resolve().name
    return tuple(_verdict(folder, given, entry, about["seed"], name) for entry in about["cases"])


def _verdict(folder: Path, given: Path, entry: dict[str, Any], seed: int, subject: str) -> Result:
    file, ratios = given / entry["file"], dict[str, float]()
    if not file.exists():
        verdict, detail = "not-applicable", f"no {file.name} in {given}"
    else:
        expected = load(folder / entry["file"])
        try:
            arrays = load(file)
        except ArgumentError as error:
            verdict, detail = "crashed", str(error)
        else:
            wrong, detail, ratios = judged(arrays, expected, entry)
            verdict, detail = ("failed", wrong) if wrong else ("passed", detail)
    return Result(
        subject=subject, case=entry["name"], profile=entry["profile"],
        clauses=tuple(entry["clauses"]), ids=tuple(entry["ids"]), dtype=entry["dtype"],
        layout=entry["layout"], way="vectors", seed=seed, verdict=verdict, detail=detail,
        ratios=ratios,
    )  # fmt: skip
