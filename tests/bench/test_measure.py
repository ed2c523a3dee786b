"""A cell is believed only after its answer was checked; every other end of it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx.errors import ArgumentError
from attnx_bench import measure, timing
from attnx_bench.benchmark import SPECIALS, Asked
from attnx_bench.goals import GOALS, Figures, judge
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.measure import time_row
from attnx_bench.peers._attnx import make_numpy
from attnx_bench.report import Cell, Row
from attnx_bench.timing import Taken, interleaved
from attnx_bench.truth import error_of, truth
from attnx_bench.workload import Arrays, Workload
from attnx_bench.workloads import WORKLOADS, find
from attnx_conformance.oracle import reference

SMALL = Workload("small", "small", B=2, Hq=4, Hk=2, Lq=24, Lk=24, D=8, Dv=6)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": "top_left"}, "chunk": {"causal": "bottom_right", "Lq": 7},
    "window": {"causal": "top_left", "window": 3}, "both sides": {"window": 3},
    "documents": {"documents": 4}, "padding": {"valid": 0.5}, "softcap": {"softcap": 2.0},
    "bias": {"bias": True}, "half": {"dtype": "float16"}, "lse": {"need_lse": True},
    "dropout": {"dropout": 0.4, "gradient": True},
    "gradient": {"gradient": True, "causal": "top_left"},
    "all": {"documents": 3, "valid": 0.7, "causal": "top_left", "softcap": 3.0, "gradient": True},
}  # fmt: skip


# What is right -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_truth_is_the_oracles_and_the_dense_mask_means_the_same(way: str) -> None:
    """What peers get as a dense mask and attnx as a structure is one thing."""
    workload = SMALL.with_(**WAYS[way])
    arrays = workload.arrays()
    right = truth(workload, arrays)
    options: dict[str, Any] = {
        "softcap": workload.softcap, "bias": arrays.bias, "dropout": workload.dropped,
    }  # fmt: skip
    seen = workload.dense
    if seen is not None:
        shape = (workload.B, 1, workload.Lq, workload.Lk)
        options["mask"] = attnx.Dense(np.broadcast_to(seen, shape))
    gradient = {"d_out": arrays.d_out} if workload.gradient else {}
    wanted = reference(arrays.q, arrays.k, arrays.v, **options, **gradient)
    assert np.allclose(right.results["out"], wanted.out[:1, :2], atol=1e-12)
    if workload.need_lse:
        assert np.allclose(right.results["lse"], wanted.lse[:1, :2], atol=1e-12)
    if workload.gradient:
        assert np.allclose(right.results["dq"], wanted.dq[:1, :2], atol=1e-12)
        assert np.allclose(right.results["dk"], wanted.dk[:1, :1], atol=1e-12)


def test_an_error_is_seen_and_a_rounding_is_not() -> None:
    workload = SMALL.with_(causal="top_left")
    arrays = workload.arrays()
    right = truth(workload, arrays)
    out = attnx.attention(arrays.q, arrays.k, arrays.v, causal=True)
    assert error_of({"out": out}, right, workload) < 0.1
    assert error_of({"out": out * np.float32(1.001)}, right, workload) > 1
    wrong = attnx.attention(arrays.q, arrays.k, arrays.v)
    assert error_of({"out": wrong}, right, workload) > 100
    assert error_of({"out": np.full_like(out, np.nan)}, right, workload) == np.inf
    assert (
        error_of({}, right, workload) == error_of({"out": out[:, :, 1:]}, right, workload) == np.inf
    )


def test_every_workload_has_a_name_of_its_own_and_the_goals_know_theirs() -> None:
    names = [w.name for w in WORKLOADS]
    assert len(set(names)) == len(names)
    for goal in GOALS:
        assert {find(name).name for name in goal.needs} == set(goal.needs)
        assert goal.needs or goal.measure.split()[0] in {"overhead", "peak", "callers", "import"}
    with pytest.raises(KeyError):
        find("none")


def test_operations_count_what_is_visible() -> None:
    whole = SMALL.with_(Dv=8).flops
    assert whole == 4 * 2 * 4 * 24 * 24 * 8
    assert SMALL.with_(Dv=8, causal="top_left").flops == whole * 25 / 48
    assert SMALL.with_(Dv=8, gradient=True).flops == whole * 3.5


# What is timed -----------------------------------------------------------------------------------


def _right(workload: Workload, arrays: Arrays) -> Ready:
    def run() -> Any:
        return attnx.attention(arrays.q, arrays.k, arrays.v, **workload.structured)

    return Ready(run, lambda out: {"out": out}, "the NumPy backend")


def _wrong(workload: Workload, arrays: Arrays) -> Ready:
    return Ready(lambda: arrays.q[..., : workload.Dv], lambda out: {"out": out})


def _absent(workload: Workload, arrays: Arrays) -> Ready:
    raise NotApplicable("has no such thing")


def _broken(workload: Workload, arrays: Arrays) -> Ready:
    raise RuntimeError("a message\nof two lines")


def test_each_end_of_a_cell_is_told() -> None:
    makers: dict[str, Callable[[Workload, Arrays], Ready]] = {
        "right": _right, "wrong": _wrong, "absent": _absent, "broken": _broken,
    }  # fmt: skip
    chosen = [Implementation(name, make) for name, make in makers.items()]
    chosen.append(Implementation("missing", _right, requires=("no_such_module",)))
    row = time_row(SMALL, chosen, budget=0.1)
    cells = {cell.implementation: cell for cell in row.cells}
    assert [cell.implementation for cell in row.cells] == [i.name for i in chosen]
    assert {name: cell.status for name, cell in cells.items()} == {
        "right": "ran", "wrong": "wrong", "absent": "not-applicable", "broken": "crashed",
        "missing": "missing",
    }  # fmt: skip
    assert cells["right"].seconds is not None
    assert cells["right"].error is not None
    assert cells["right"].error < 1
    assert [name for name, cell in cells.items() if cell.seconds is not None] == ["right"]
    assert cells["broken"].why == "RuntimeError: a message of two lines"
    assert cells["missing"].why == "no_such_module not installed"
    assert "times what is allowed" in cells["wrong"].why


def test_what_drops_by_a_generator_of_its_own_is_timed_without_a_right_answer() -> None:
    def random(workload: Workload, arrays: Arrays) -> Ready:
        return dataclasses.replace(_wrong(workload, arrays), compared=False)

    chosen = [Implementation("attnx numpy", make_numpy), Implementation("own", random)]
    ours, own = time_row(SMALL.with_(dropout=0.5), chosen, budget=0.1).cells
    assert (ours.status, own.status) == ("ran", "ran")
    assert ours.error is not None
    assert own.error is None
    assert own.seconds is not None


def _one_second(runs: dict[Any, Any], budget: float) -> dict[Any, Taken]:
    return {key: Taken(1.0, 1.0, 1.0, 3) for key in runs}


def test_what_a_goal_compares_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own backends also run the workloads beside this one, in its dtype, and checked."""
    seen: list[Workload] = []

    def ours(workload: Workload, arrays: Arrays) -> Ready:
        seen.append(workload)
        return _right(workload, arrays)

    other = SMALL.with_(name="other")
    monkeypatch.setattr(measure, "find", lambda name: other)
    monkeypatch.setattr(measure, "interleaved", _one_second)
    workload = SMALL.with_(beside=("other",), dtype="float64")
    chosen = [Implementation("attnx this", ours), Implementation("peer", ours)]
    row = time_row(workload, chosen)
    assert row.beside == {"other": {"attnx this": 1.0}}
    assert [(w.name, w.dtype) for w in seen] == [
        ("small", "float64"), ("small", "float64"), ("other", "float64"),
    ]  # fmt: skip
    assert [cell.implementation for cell in row.cells] == ["attnx this", "peer"]


def test_a_process_of_its_own_is_put_on_this_ones_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its baseline took twice as long there as here, so half of its time counts."""
    monkeypatch.setitem(measure.OWN_BASELINES, "elsewhere", "right")
    asked: dict[str, Any] = {}

    def ask(request: Any, environment: Any) -> Any:
        asked.update(request, environment=environment)
        cells = [Cell("small", "elsewhere", "ran"), Cell("small", "right", "ran")]
        return {
            "cells": [{**vars(c), "seconds": s} for c, s in zip(cells, (3.0, 2.0), strict=True)]
        }

    monkeypatch.setattr(measure, "ask", ask)
    monkeypatch.setattr(measure, "interleaved", _one_second)
    own = Implementation("elsewhere", _right, process="own", environment=(("A", "b"),))
    row = time_row(SMALL, [own, Implementation("right", _right)])
    assert row.cells[0].seconds == 1.5
    assert "where right took 2.00 of here" in row.cells[0].how
    assert asked["implementations"] == ["elsewhere", "right"]
    assert asked["environment"] == (("A", "b"),)
    assert Workload(**asked["workload"]) == SMALL

    def gone(request: Any, environment: Any) -> Any:
        raise RuntimeError("killed")

    monkeypatch.setattr(measure, "ask", gone)
    cell = time_row(SMALL, [own, Implementation("right", _right)]).cells[0]
    assert (cell.status, cell.why) == ("crashed", "killed")


def test_rounds_rotate_and_each_is_run_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []

    def timed(name: str, took: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            clock[0] += took

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: order.append("pause"))
    took = interleaved({"a": timed("a", 1.0), "b": timed("b", 2.0)}, budget=9.0)
    assert took["a"] == Taken(1.0, 1.0, 1.0, 3)
    assert took["b"].seconds == 2.0
    counted, rounds = order[:2], order[2:]
    assert counted == ["a", "b"]
    assert [x for x in rounds if x != "pause"] == ["a", "b", "b", "a", "a", "b"]
    assert rounds[::2] == ["pause"] * 6
    order.clear()
    short = interleaved({"c": timed("c", 0.01)}, budget=0.0)["c"]
    assert short.seconds == pytest.approx(0.01)
    assert order[1:6] == ["pause", "c", "c", "c", "c"]  # one untimed, three timed


# What is concluded -------------------------------------------------------------------------------


def test_goals_read_ratios_and_measures() -> None:
    def row(name: str, **seconds: float) -> Row:
        cells = (Cell(name, n.replace("_", " "), "ran", seconds=s) for n, s in seconds.items())
        return Row(name, name, {}, 1.0, tuple(cells))

    rows = [
        row("forward", attnx_numpy=1.0, torch_SDPA=0.95, numpy_naive=3.0),
        row("causal", attnx_numpy=1.0),
    ]
    special = {"overhead attnx numpy": 1.9, "import": 61.0}
    names = ("forward", "causal")
    found = judge(Figures.of(rows, special, {}), names, ("overhead", "import"))
    verdicts = {goal.text: goal.verdict for goal in found}
    assert verdicts["attnx numpy / torch SDPA: forward"] == "met"
    assert verdicts["attnx numpy / numpy naive: forward"] == "missed"
    assert verdicts["attnx numpy / torch SDPA: causal"] == "not measured"
    assert verdicts["import attnx over bare Python"] == "missed"
    assert "attnx numpy / torch SDPA: forward and backward" not in verdicts


def test_goals_of_two_workloads_read_what_took_turns() -> None:
    def row(name: str, seconds: float, **beside: float) -> Row:
        cells = (Cell(name, "attnx numpy", "ran", seconds=seconds),)
        others = {n.replace("_", "-"): {"attnx numpy": s} for n, s in beside.items()}
        return Row(name, name, {}, 1.0, cells, others)

    rows = [
        row("lse", 1.1, forward_2k=1.0), row("logits-10", 3.0, forward_2k=2.0),
        row("logits-100", 2.0, forward_2k=2.0),
        row("values", 3.0, forward_2k=2.0, heads_128=4.0),
        row("forward-2k", 100.0), row("heads-128", 0.01),
    ]  # fmt: skip
    found = judge(Figures.of(rows, {}, {}), [r.name for r in rows], ())
    figures = {goal.text: goal.figure for goal in found}
    assert figures["attnx numpy: lse as well"] == pytest.approx(1.1)
    assert figures["attnx numpy: logits 1, 10, 100"] == pytest.approx(1.5)
    assert figures["attnx numpy: Dv 128 beside D 64"] == pytest.approx(1.0)
    assert figures["attnx torch: lse as well"] is None


def test_a_goal_tells_what_the_machine_would_allow() -> None:
    """34.4e9 operations at 100 GF/s and 134e6 exponentials of 2 ns on 2 cores take 478 ms."""
    flops = 4.0 * 8 * 4096**2 * 64
    cells = tuple(
        Cell("forward", name, "ran", seconds=s)
        for name, s in (("attnx numpy", 0.8), ("torch SDPA", 0.4))
    )
    machine = {"sgemm_gflops": 100.0, "exp_ns": 2.0, "cores": 2}
    rows = [Row("forward", "forward", {}, flops, cells)]
    goal = judge(Figures.of(rows, {}, machine), ["forward"], ())[0]
    assert (goal.figure, goal.verdict) == (0.5, "missed")
    assert goal.why == "at best 0.84x here, by what NumPy's sgemm and exp take alone"
    assert not judge(Figures.of(rows, {}, {}), ["forward"], ())[0].why


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Asked(workloads=("windw-8k",)), "no workload 'windw-8k'; known: window-8k"),
        (Asked(implementations=("torch SPDA",)), "no backend 'torch SPDA'; known: torch SDPA"),
        (Asked(dtype="float8"), "no dtype 'float8'"),
    ],
    ids=["workload", "backend", "dtype"],
)
def test_wrong_names_are_told_with_near_ones(asked: Asked, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        asked.chosen()
    assert said in str(caught.value)


def test_a_selection_is_by_pattern_and_dtype() -> None:
    workloads, measures, chosen = Asked(("window-*", "overhead"), ("attnx *",), "float64").chosen()
    assert {w.name for w in workloads} == {"window-8k", "window-16k", "window-backward-8k"}
    assert {w.dtype for w in workloads} == {"float64"}
    assert measures == ["overhead"]
    assert [i.name for i in chosen] == ["attnx numpy", "attnx torch", "attnx jax"]
    quick, some, _ = Asked(quick=True).chosen()
    assert 0 < len(quick) < len(WORKLOADS)
    assert some == ["overhead"]
    assert Asked().chosen()[1] == list(SPECIALS)
