"""`attnx compare`: what it says, what it exits with, and that no backend can take it down."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import attnx
from attnx.cli._app import app

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROW_KEYS = {
    "backend", "version", "status", "route", "errors", "details", "forward_s",
    "forward_backward_s", "peak_bytes", "peak_method", "why", "reasons", "log",
}  # fmt: skip
GRADIENTS = {"dq", "dk", "dv"}
FAULTY = "numpy,faulty"  # for ATTNX_PLUGINS: no framework to load where none is looked at


def _installed() -> list[str]:
    return [info.name for info in attnx.backends() if info.status == "available"]


def _rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["backend"]: row for row in json.loads(text)["backends"]}


def _save(path: Path, seed: int = 0, **more: Any) -> Path:
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    np.savez(path, **{**arrays, **more})
    return path


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.sweep), True])
@pytest.mark.parametrize(
    "plugins", ["numpy,torch", pytest.param("", marks=pytest.mark.sweep)], ids=["two", "all"]
)
def test_every_backend_agrees_on_the_sample(run: Run, causal: bool, plugins: str) -> None:
    """The main job: out, lse and gradients of each installed backend lie within the bound."""
    given = ["--causal"] if causal else []
    done = run("compare", "--json", "--repeat", 1, *given, ATTNX_PLUGINS=plugins)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["agree"] is True
    assert report["source"] == "the shipped sample"
    assert report["options"]["causal"] is causal
    assert report["arrays"]["lengths"] == {"shape": [7], "dtype": "int32"}
    rows = _rows(done.stdout)
    listed = plugins.split(",") if plugins else [info.name for info in attnx.backends()]
    assert set(rows) == set(listed)
    for name in set(_installed()) & set(rows):
        row = rows[name]
        assert set(row) == ROW_KEYS
        assert row["status"] == "agrees", row
        assert set(row["errors"]) == {"out", "lse"} | GRADIENTS
        assert all(0 <= ratio <= 1 for ratio in row["errors"].values()), row["errors"]
        assert row["route"]
        assert row["forward_s"] > 0
        assert row["forward_backward_s"] > 0
        assert row["peak_bytes"] is None or 0 <= row["peak_bytes"] < 1 << 30
    for name in set(rows) - set(_installed()):
        assert rows[name]["status"] == "unavailable"
        assert rows[name]["why"]


def test_the_table_names_routes_figures_and_reasons(run: Run) -> None:
    """What a person reads: title, columns, verdict, and the note under the table."""
    done = run("compare", "--backend", "numpy", "--repeat", 1, ATTNX_PLUGINS="numpy")
    assert done.returncode == 0, done.stderr
    assert "the shipped sample (all-MiniLM-L6-v2, layer 3, 7 sentences)" in done.stdout
    for words in ("numpy", "route", "dq", "fwd + bwd", "peak", "agrees", "multiples of the error"):
        assert words in done.stdout


@pytest.mark.parametrize("how", ["variable", "option", "commas"])
def test_a_backend_is_chosen_by_option_or_variable(run: Run, how: str) -> None:
    """`--backend` restricts the run, else ATTNX_BACKEND does."""
    few = {"ATTNX_PLUGINS": "numpy,cupy"}
    if how == "variable":
        done = run("compare", "--json", "--repeat", 1, ATTNX_BACKEND="numpy", **few)
        assert done.returncode == 0, done.stderr
        assert set(_rows(done.stdout)) == {"numpy"}
        return
    names = ["--backend", "numpy,cupy"] if how == "commas" else ["-b", "numpy", "-b", "cupy"]
    done = run("compare", "--json", "--repeat", 1, *names, ATTNX_BACKEND="torch", **few)
    assert set(_rows(done.stdout)) == {"numpy", "cupy"}


@pytest.mark.parametrize("source", ["--backend", "ATTNX_BACKEND"])
def test_an_unknown_backend_is_wrong_use(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody registered ends with status 2, and with the names there are."""
    arguments = ["compare"]
    if source == "--backend":
        arguments += ["--backend", "nunpy"]
    else:
        monkeypatch.setenv("ATTNX_BACKEND", "nunpy")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"attnx: {source}: no backend named 'nunpy'; installed: ")
    assert done.stderr.count("\n") == 1


F32, F64 = np.float32, np.float64
WRONG_CALLS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "rank": ({"q": np.ones((5,), F32)}, [], "q:"),
    "other rank": ({"k": np.ones((7, 8), F32)}, [], "k:"),
    "no axes": ({"q": np.float32(1)}, [], "q:"),
    "head size": ({"q": np.ones((2, 4, 5, 9), F32)}, [], "D"),
    "batch": ({"k": np.ones((3, 2, 7, 8), F32)}, [], "k:"),
    "grouping": ({"q": np.ones((2, 3, 5, 8), F32)}, [], "Hq"),
    "integers": ({"q": np.ones((2, 4, 5, 8), int)}, [], "int64"),
    "text": ({"q": np.full((2, 4, 5, 8), "x")}, [], "q"),
    "mixed dtypes": ({"q": np.ones((2, 4, 5, 8), F64)}, [], "float64"),
    "mask polarity": ({"mask": np.ones((5, 7), F32)}, [], "bias"),
    "mask shape": ({"mask": np.ones((5, 6), bool)}, [], "mask"),
    "boolean bias": ({"bias": np.ones((5, 7), bool)}, [], "mask"),
    "lengths beyond": ({"lengths": np.array([7, 8])}, [], "8"),
    "float lengths": ({"lengths": np.array([7.0, 5.0])}, [], "integer"),
    "sinks shape": ({"sinks": np.ones(3, F32)}, [], "sinks"),
    "alignment": ({}, ["--causal"], "bottom_right"),
    "layout": ({}, ["--layout", "bhds"], "layout"),
    "scale": ({}, ["--scale", "nan"], "scale"),
    "softcap": ({}, ["--softcap", "-1"], "softcap"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_call_is_one_line_and_status_2(case: str, tmp_path: Path) -> None:
    """Wrong shapes, dtypes and options are refused by the API's own checks, before any run."""
    arrays, options, words = WRONG_CALLS[case]
    path = _save(tmp_path / "a.npz", **arrays)
    done = CliRunner().invoke(app, ["compare", str(path), *options])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"attnx: {path}: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_of_the_file_and_of_the_command_meet(run: Run, tmp_path: Path) -> None:
    """Mask, bias, lengths and sinks are read; gradients of bias and sinks are judged too."""
    rng = np.random.default_rng(1)
    path = _save(
        tmp_path / "a.npz",
        mask=rng.random((5, 7)) > 0.2,
        bias=rng.standard_normal((1, 4, 5, 7)).astype(np.float32),
        lengths=np.array([7, 4]),
        sinks=rng.standard_normal(4).astype(np.float32),
    )
    done = run("compare", path, "--json", "--repeat", 1, "--backend", "numpy", "--scale", 0.3,
               "--causal", "bottom_right", "--softcap", 4, "--seed", 5,
               ATTNX_PLUGINS="numpy")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["options"] == {
        "causal": "bottom_right", "layout": "bhsd", "scale": 0.3, "softcap": 4.0
    }  # fmt: skip
    assert report["seed"] == 5
    assert set(report["backends"][0]["errors"]) == {"out", "lse", "dbias", "dsinks"} | GRADIENTS


@pytest.mark.parametrize(
    "dtype",
    ["float16", *(pytest.param(d, marks=pytest.mark.sweep) for d in ("bfloat16", "float64"))],
)
def test_other_dtypes_and_the_other_layout(run: Run, tmp_path: Path, dtype: str) -> None:
    """safetensors brings bfloat16; each dtype is judged by its own bound, in either layout."""
    rng = np.random.default_rng(2)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    arrays = {n: rng.standard_normal((2, 9, 3, 16)).astype(kind) for n in "qkv"}
    save_file(arrays, tmp_path / "a.safetensors")
    few = {"ATTNX_PLUGINS": "numpy"} if dtype == "float16" else {}
    done = run("compare", tmp_path / "a.safetensors", "--layout", "bshd", "--causal",
               "--json", "--repeat", 1, **few)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = _rows(done.stdout)
    assert json.loads(done.stdout)["arrays"]["q"]["dtype"] == dtype
    ran = {name for name in _installed() if name in rows}
    assert {rows[name]["status"] for name in ran} == {"agrees"}


def test_faulty_backends_are_rows_and_never_an_end(run: Run, faulty_plugin: Path) -> None:
    """A segmentation fault, an exit or an error stays in its row; the others finish."""
    names = "wrong,dies,quits,raises,forward-only,broken,numpy"
    done = run("compare", "--json", "--repeat", 1, "--backend", names,
               path=(faulty_plugin,), ATTNX_PLUGINS=FAULTY)  # fmt: skip
    assert done.returncode == 1
    rows = _rows(done.stdout)
    status = {name: row["status"] for name, row in rows.items()}
    assert status == {
        "wrong": "disagrees", "dies": "crashed", "quits": "crashed", "raises": "crashed",
        "forward-only": "agrees", "broken": "unavailable", "numpy": "agrees",
    }  # fmt: skip
    assert rows["wrong"]["errors"]["out"] > 1
    assert rows["wrong"]["why"].startswith("out at (")
    assert "the process died of SIGSEGV" in rows["dies"]["why"]
    assert "Segmentation fault" in rows["dies"]["log"]
    assert "status 7" in rows["quits"]["why"]
    assert rows["raises"]["why"] == "RuntimeError: a message of two lines"
    assert "Traceback" in rows["raises"]["log"]
    assert set(rows["forward-only"]["errors"]) == {"out", "lse"}
    assert rows["forward-only"]["why"].startswith("no gradients: ")
    assert "cannot be loaded" in rows["broken"]["why"]


def test_a_backend_that_hangs_is_ended(run: Run, faulty_plugin: Path) -> None:
    """`--timeout` turns a hang into a row."""
    done = run("compare", "--json", "--timeout", 3, "--backend", "hangs",
               path=(faulty_plugin,), ATTNX_PLUGINS=FAULTY)  # fmt: skip
    assert done.returncode == 1
    row = _rows(done.stdout)["hangs"]
    assert (row["status"], row["why"]) == ("crashed", "no answer within 3 s")


def test_one_wrong_backend_makes_the_exit_status_1(run: Run, faulty_plugin: Path) -> None:
    """The command can stand in a build: disagreement is a failure, and the table says where."""
    done = run("compare", "--repeat", 1, "--backend", "numpy,wrong",
               path=(faulty_plugin,), ATTNX_PLUGINS=FAULTY)  # fmt: skip
    assert done.returncode == 1
    assert "wrong: disagrees: out at (" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_refusal_carries_its_reasons(run: Run, faulty_plugin: Path) -> None:
    """Refusing is right, and says which option is lacking; the others' verdict stands."""
    done = run("compare", "--json", "--repeat", 1, "--softcap", 5, "--backend",
               "no-softcap,numpy", path=(faulty_plugin,), ATTNX_PLUGINS=FAULTY)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = _rows(done.stdout)["no-softcap"]
    assert row["status"] == "refused"
    assert [reason["option"] for reason in row["reasons"]] == ["softcap"]


def test_no_backend_that_can_run_is_status_1(run: Run, faulty_plugin: Path) -> None:
    """A comparison of nothing is no success."""
    done = run("compare", "--softcap", 5, "--backend", "no-softcap",
               path=(faulty_plugin,), ATTNX_PLUGINS=FAULTY)  # fmt: skip
    assert done.returncode == 1
    assert "attnx: no backend could run this call" in done.stderr
    assert "no-softcap: refused: " in done.stdout
