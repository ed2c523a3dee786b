"""`attnx bench`: what it runs, what it says of wrong use, and how it ends."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import attnx
from attnx.cli._app import app
from attnx_bench import benchmark as run_module
from attnx_bench import special
from attnx_bench.benchmark import Asked, run
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.report import from_json
from attnx_bench.workload import Arrays, Workload

TINY = (
    Workload("tiny", "tiny", Hq=2, Hk=2, Lq=16, Lk=16, D=8, Dv=8, quick=True),
    Workload("tiny-causal", "tiny, causal", Hq=2, Hk=2, Lq=16, Lk=16, D=8, Dv=8,
             causal="top_left"),
)  # fmt: skip


def _right(workload: Workload, arrays: Arrays) -> Ready:
    def work() -> Any:
        return attnx.attention(arrays.q, arrays.k, arrays.v, **workload.structured)

    return Ready(work, lambda out: {"out": out}, "here")


def _wrong(workload: Workload, arrays: Arrays) -> Ready:
    return Ready(lambda: arrays.v * np.float32(2), lambda out: {"out": out})


def _never(workload: Workload, arrays: Arrays) -> Ready:
    raise NotApplicable("knows no such thing")


RIGHT = Implementation("attnx numpy", _right)
PEER = Implementation("numpy naive", _right)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small workloads, implementations that need nothing, and a machine that is not measured."""
    monkeypatch.setattr(run_module, "WORKLOADS", TINY)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", (RIGHT, PEER))
    monkeypatch.setattr(run_module, "about", lambda: {"cpu": "a", "cores": 2, "versions": {}})


def ran(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", "--budget", "0.1", *arguments])
    return done.exit_code, done.output


def test_a_run_is_checked_timed_told_and_written(tmp_path: Path) -> None:
    file = tmp_path / "made" / "bench.json"
    status, told = ran("--workload", "tiny*", "--json", str(file))
    assert status == 0
    assert "tiny-causal" in told
    report = from_json(file.read_text("utf-8"))
    assert [row.name for row in report.rows] == ["tiny", "tiny-causal"]
    cells = [cell for row in report.rows for cell in row.cells]
    assert all(cell.seconds is not None and cell.status == "ran" for cell in cells)
    assert not report.interrupted
    assert report.machine["baselines"][0] == "torch SDPA"
    assert json.loads(file.read_text("utf-8"))["attnx_bench"] == 1


@pytest.mark.sweep
def test_plots_have_a_series_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run_module, "LENGTHS", (8, 16))
    monkeypatch.setattr(run_module, "WEIGHED", ())
    never = Implementation("never", _never)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", (RIGHT, PEER, never))
    status, told = ran("--workload", "tiny", "--plot", str(tmp_path))
    assert status == 1, told  # `_right` gives no gradients, and the series asks for them
    names = {path.suffix for path in tmp_path.iterdir()}
    assert names == {".png", ".svg"}
    assert "knows no such thing" in told
    assert "KeyError" in told or "off by" in told


def test_it_names_what_there_is() -> None:
    status, told = ran("--list")
    assert status == 0
    assert "tiny, causal" in told
    assert "implementations: attnx numpy, numpy naive" in told
    assert "measures: overhead, import, memory, callers" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "tinny"), "no workload 'tinny'; known: tiny"),
        (("--backend", "attnx nmpy"), "known: attnx numpy"),
        (("--dtype", "int8"), "no dtype 'int8'"),
    ],
    ids=["workload", "backend", "dtype"],
)
def test_wrong_use_is_told_in_a_line(arguments: tuple[str, ...], said: str) -> None:
    status, told = ran(*arguments)
    assert status == 2
    assert said in told
    assert len(told.strip().splitlines()) == 1


def test_a_wrong_answer_of_ours_fails_the_run_and_of_a_peer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = dataclasses.replace(RIGHT, make=_wrong)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", (ours, PEER))
    status, told = ran("--workload", "tiny")
    assert status == 1
    assert "wrong" in told
    theirs = dataclasses.replace(PEER, make=_wrong)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", (RIGHT, theirs))
    status, told = ran("--workload", "tiny")
    assert status == 0
    assert "wrong" in told


@pytest.mark.sweep
def test_an_interrupt_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(workload: Workload, arrays: Arrays) -> Ready:
        if workload.name == "tiny":
            return _right(workload, arrays)
        raise KeyboardInterrupt

    chosen = (dataclasses.replace(RIGHT, make=stop), PEER)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", chosen)
    report = run(Asked(("tiny*",), budget=0.1))
    assert report.interrupted
    assert [row.name for row in report.rows] == ["tiny"]
    assert ran("--workload", "tiny*")[0] == 130


def test_an_implementation_may_wait_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shy = dataclasses.replace(PEER, name="shy", named=True)
    monkeypatch.setattr(run_module, "IMPLEMENTATIONS", (RIGHT, shy))
    assert [i.name for i in Asked().chosen()[2]] == ["attnx numpy"]
    assert [i.name for i in Asked(implementations=("s*",)).chosen()[2]] == ["shy"]


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_overhead_is_what_a_call_takes_beyond_its_kernel(backend: str) -> None:
    pytest.importorskip(backend)
    found = special.overhead(backend, rounds=4)
    assert found.kernel[0] > 0.5
    assert found.kernel[0] <= found.kernel[1]
    assert found.call[1] > -found.kernel[1]


def test_special_measures_are_figures_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "imports", lambda: 40.0)
    monkeypatch.setattr(special, "concurrent", lambda backend: 1.05)
    report = run(Asked(("import", "callers")))
    assert report.machine["special"] == {"import": 40.0, "callers attnx numpy": 1.05}
    verdicts = {goal.text: goal.verdict for goal in report.goals}
    assert verdicts == {
        "import attnx over bare Python": "met", "attnx numpy: 4 callers at once": "met",
        "attnx torch: 4 callers at once": "not measured",
        "attnx jax: 4 callers at once": "not measured",
    }  # fmt: skip
