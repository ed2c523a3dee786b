"""Each implementation that is timed gives the formula's answer, or says why it has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnx_bench
from attnx.tiling import Drop, kept
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.peers import IMPLEMENTATIONS, _torch
from attnx_bench.workload import Array, Arrays, Workload

PEERS = {each.name: each for each in IMPLEMENTATIONS}
ON_JAX = ("attnx jax", "jax.nn", "jax formula")
ON_KERAS = ("keras on torch", "keras on jax", "keras on numpy")
QUICK = [name for name in PEERS if name not in (*ON_JAX, *ON_KERAS, "torch flex")]

TINY = Workload("tiny", "", B=2, Hq=4, Hk=4, Lq=70, Lk=70, D=16, Dv=16)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "causal, few keys": {"causal": "top_left", "Lk": 50},
    "causal, behind": {"causal": "bottom_right", "Lq": 40, "Lk": 110},
    "window": {"causal": "top_left", "window": 9},
    "window, ahead all": {"window": 9},
    "documents": {"documents": 4},
    "documents, causal": {"documents": 4, "causal": "top_left"},
    "padding": {"valid": 0.6},
    "padding, causal": {"valid": 0.6, "causal": "top_left"},
    "grouped": {"Hk": 2, "causal": "top_left"},
    "one key head": {"Hk": 1},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
    "bias": {"bias": True},
    "bias, causal": {"bias": True, "causal": "top_left", "Hk": 2},
    "lse": {"need_lse": True, "causal": "top_left"},
    "lse, gradient": {"need_lse": True, "gradient": True},
    "gradient": {"gradient": True, "causal": "top_left"},
    "gradient, all": {"gradient": True, "softcap": 3.0, "bias": True, "window": 20, "Hk": 2},
    "gradient, padding": {"gradient": True, "valid": 0.6},
    "gradient, float16": {"gradient": True, "dtype": "float16", "Hk": 2},
    "values": {"Dv": 24},
    "float16": {"dtype": "float16", "causal": "top_left"},
    "float16, bias": {"dtype": "float16", "bias": True, "window": 9},
    "float16, mask": {"dtype": "float16", "documents": 3},
    "bfloat16": {"dtype": "bfloat16", "window": 9},
    "float64": {"dtype": "float64"},
    "finite": {"finite": True},
    "dropout": {"dropout": 0.4},
    "dropout, gradient": {"dropout": 0.4, "gradient": True, "Hk": 2},
}

NO_LSE, NO_CAP = {"lse", "lse, gradient"}, {"softcap", "gradient, all"}
NO_GRADIENT = {name for name in CASES if "gradient" in name}
NO_DROPOUT = {name for name in CASES if "dropout" in name}
REFUSED: dict[str, set[str]] = {
    "torch SDPA": NO_LSE | NO_CAP,
    "torch flex": NO_GRADIENT | NO_DROPOUT | {"lse", "float64"},
    "numpy naive": NO_DROPOUT,
    "jax.nn": NO_CAP | NO_DROPOUT | {"values", "float64"},
    "jax formula": NO_DROPOUT,
    "ONNX Runtime": NO_LSE | NO_GRADIENT | NO_DROPOUT | {"bfloat16"},
    "keras on torch": NO_LSE | NO_CAP | NO_DROPOUT | {"float64"},
    "keras on jax": NO_LSE | NO_CAP | NO_DROPOUT | {"values", "float64"},
    "keras on numpy": NO_LSE | NO_CAP | NO_GRADIENT | NO_DROPOUT
    | {"grouped", "bias, causal", "float64"},
}  # fmt: skip
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}


def reference(workload: Workload, arrays: Arrays) -> dict[str, Array]:
    """The formula, in float64."""
    group = workload.Hq // workload.Hk
    q, k, v, d_out = (
        array.astype(np.float64) for array in (arrays.q, arrays.k, arrays.v, arrays.d_out)
    )
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores, bend = q @ k.swapaxes(-1, -2) * workload.scale, np.ones(())
    if workload.softcap is not None:
        bend = 1 - np.tanh(scores / workload.softcap) ** 2
        scores = workload.softcap * np.tanh(scores / workload.softcap)
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(np.float64)
    shown = workload.dense
    if shown is not None:
        scores = np.where(shown, scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    drop = kept_share(workload)
    found = {"out": weights * drop @ v}
    if workload.need_lse:
        found["lse"] = lse
    if workload.gradient:
        d_weights = d_out @ v.swapaxes(-1, -2) * drop
        mean = (d_weights * weights).sum(-1, keepdims=True)
        d_scores = weights * (d_weights - mean) * bend * workload.scale
        found["dq"] = d_scores @ k
        shape = (workload.B, workload.Hk, group, workload.Lk, -1)
        found["dk"] = (d_scores.swapaxes(-1, -2) @ q).reshape(shape).sum(2)
        found["dv"] = ((weights * drop).swapaxes(-1, -2) @ d_out).reshape(shape).sum(2)
    return found


def kept_share(workload: Workload) -> Array:
    """What dropout multiplies P with (S9)."""
    dropout = workload.dropped
    if dropout is None:
        return np.ones((1, 1, 1, 1))
    drop = Drop(dropout.threshold, dropout.seed, dropout.offset)
    sizes = (workload.B, workload.Hq, workload.Lq, workload.Lk)
    b, h, i, j = (slice(0, n) for n in sizes)
    share: Array = kept(np, np.arange, drop, (b, h, i, j)) * drop.scale
    return share


def check(workload: Workload, found: dict[str, Array]) -> None:
    expected = reference(workload, workload.arrays())
    assert set(found) == set(expected)
    for name, array in found.items():
        assert array.shape == expected[name].shape, name
        size = max(1.0, float(np.abs(expected[name]).max()))
        error = float(np.abs(array.astype(np.float64) - expected[name]).max()) / size
        assert error <= TOLERANCE[workload.dtype], name


def make(name: str, case: str) -> tuple[Workload, Ready]:
    """The case made ready, or a skip where a framework is missing."""
    each = PEERS[name]
    for module in each.requires:
        pytest.importorskip(module)
    workload = TINY.with_(**CASES[case])
    return workload, each.make(workload, workload.arrays())


def confirm(name: str, case: str) -> None:
    """The case is refused where that is known, and right elsewhere, on a second run as well."""
    if case in REFUSED.get(name, ()):
        with pytest.raises(NotApplicable, match=r"\w"):
            make(name, case)
        return
    workload, ready = make(name, case)
    first, second = (ready.results(ready.run()) for _ in range(2))
    assert "\n" not in ready.how
    if ready.compared:
        check(workload, second)
        return
    assert workload.dropout
    assert np.isfinite(second["out"]).all()
    assert not np.array_equal(first["out"], second["out"])  # its generator has moved on


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", QUICK)
def test_the_answer(name: str, case: str) -> None:
    confirm(name, case)


# A compilation takes a second, so JAX gets the cases that its ways differ in.
@pytest.mark.parametrize("case", ["plain", "grouped", "gradient", "dropout"])
@pytest.mark.parametrize("name", ON_JAX)
def test_the_answer_of_jax(name: str, case: str) -> None:
    confirm(name, case)


@pytest.mark.parametrize("case", ["window, ahead all", "padding, causal", "lse", "values"])
def test_the_options_of_jax_nn(case: str) -> None:
    confirm("jax.nn", case)


@pytest.mark.parametrize("case", ["causal, behind", "documents, causal", "gradient, all"])
def test_masks_in_jax_as_arguments(case: str) -> None:
    confirm("attnx jax", case)


@pytest.mark.parametrize("name", ["attnx jax", "jax formula"])
def test_float64_in_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        confirm(name, "float64")


@pytest.mark.sweep
# Compiled for the host it takes half a minute and says the same.
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_answer_of_flex_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(_torch, "compiled", lambda: flex.flex_attention)
    monkeypatch.setattr(_torch, "_compiler", lambda: True)
    confirm("torch flex", case)


# Keras ----------------------------------------------------------------------------------------

CHILD = """
import json, sys
import numpy as np
from attnx_bench.implementation import NotApplicable
from attnx_bench.peers import IMPLEMENTATIONS
from attnx_bench.workload import Workload

request = json.load(sys.stdin)
each = next(each for each in IMPLEMENTATIONS if each.name == request["name"])
for case, fields in request["cases"].items():
    workload = Workload("tiny", "", **fields)
    try:
        ready = each.make(workload, workload.arrays())
    except NotApplicable as reason:
        np.savez(f"{request['folder']}/{case}.npz", refused=str(reason))
    else:
        results = ready.results(ready.run())
        wide = {name: np.asarray(array).astype(np.float64) for name, array in results.items()}
        np.savez(f"{request['folder']}/{case}.npz", **wide)
"""


def child(code: str, given: str, **environment: str) -> str:
    """What a fresh process prints."""
    path = str(Path(attnx_bench.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("name", ON_KERAS)
def test_the_answers_of_keras(name: str, tmp_path: Path) -> None:
    each = PEERS[name]
    for module in each.requires:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    few = (
        "plain",
        "grouped",
        "float64",
        "bias, causal",
        "padding, causal",
        "gradient",
        "values",
        "lse",
    )
    cases = {case: CASES[case] for case in (few if "jax" in name else CASES)}
    fields = {"B": 2, "Hq": 4, "Hk": 4, "Lq": 70, "Lk": 70, "D": 16, "Dv": 16}
    request = {
        "name": name, "folder": str(tmp_path),
        "cases": {case: {**fields, **changes} for case, changes in cases.items()},
    }  # fmt: skip
    child(CHILD, json.dumps(request), **dict(each.environment))
    for case, changes in cases.items():
        with np.load(tmp_path / f"{case}.npz") as found:
            if "refused" in found or case in REFUSED[name]:
                assert ("refused" in found) == (case in REFUSED[name]), (case, dict(found))
                continue
            check(TINY.with_(**changes), dict(found))


def test_keras_refuses_a_process_of_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    with pytest.raises(NotApplicable, match="KERAS_BACKEND=torch"):
        PEERS["keras on torch"].make(TINY, TINY.arrays())


# What is said of them -------------------------------------------------------------------------


def test_no_framework_is_imported_with_them() -> None:
    code = (
        "import sys, attnx_bench.peers; names = ('torch', 'jax', 'keras', 'onnx', 'onnxruntime');"
        "print([name for name in names if name in sys.modules])"
    )
    assert child(code, "").strip() == "[]"


def test_names_are_unique_and_keras_has_processes_of_its_own() -> None:
    assert len(PEERS) == len(IMPLEMENTATIONS)
    assert {each.name for each in IMPLEMENTATIONS if each.process} == set(ON_KERAS)


def holders() -> list[Implementation]:
    return [PEERS[name] for name in ("numpy naive", "torch eager", "ONNX Runtime")]


@pytest.mark.parametrize("each", holders(), ids=lambda each: each.name)
def test_too_many_scores_are_refused(each: Implementation) -> None:
    for module in each.requires:
        pytest.importorskip(module)
    large = TINY.with_(Lq=1 << 16, Lk=1 << 16, D=1, Dv=1)
    with pytest.raises(NotApplicable, match=r"128\.0 GiB"):
        each.make(large, TINY.arrays())


def test_a_dense_mask_that_is_too_large_is_refused() -> None:
    pytest.importorskip("torch")
    large = TINY.with_(Lq=1 << 16, Lk=1 << 16, window=9)
    with pytest.raises(NotApplicable, match=r"dense mask: 4\.0 GiB"):
        PEERS["torch SDPA"].make(large, TINY.arrays())
