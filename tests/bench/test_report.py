"""The report of the benchmark: its file is strict JSON, and a terminal tells all of it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from typing import Any

import pytest
from rich.console import Console

from attnx_bench.report import (
    Cell,
    Goal,
    Report,
    Row,
    Series,
    baseline,
    cell_of,
    cell_record,
    from_json,
    machine_lines,
    to_json,
)  # fmt: skip
from attnx_bench.tables import print_report

MACHINE: dict[str, Any] = {
    "cpu": "Example 9000", "cores": 4, "threads": {"openblas": "3"}, "sgemm_gflops": 200.0,
    "versions": {"numpy": "2.4.6", "torch": "2.13.0"}, "seed": 7,
    "baselines": ["torch SDPA", "numpy naive"],
    "special": {"overhead attnx numpy": 2.21, "import": 36.0, "callers attnx torch": 1.8},
}  # fmt: skip
MANY = tuple(f"framework number{i}" for i in range(7))


def ran(workload: str, implementation: str, seconds: float, **more: Any) -> Cell:
    return Cell(workload, implementation, "ran", seconds=seconds, error=0.1, rounds=9, **more)


def row(name: str, *cells: Cell, gradient: bool = False, dtype: str = "float32") -> Row:
    about = {"B": 1, "dtype": dtype, "gradient": gradient}
    return Row(name, f"the title of {name}", about, 1e9, cells)


ROWS = (
    row(
        "forward",
        ran("forward", "torch SDPA", 0.010, how="scaled_dot_product_attention"),
        ran("forward", "attnx numpy", 0.008, spread=0.5),
        ran("forward", "numpy naive", 0.040, spread=0.01, peak_bytes=10**6),
        Cell("forward", "ONNX Runtime", "missing", "onnxruntime not installed"),
    ),
    row(
        "window-8k",
        Cell("window-8k", "torch SDPA", "crashed", "RuntimeError: out of\nmemory"),
        ran("window-8k", "attnx numpy", 0.5),
        ran("window-8k", "numpy naive", 2.0),
        Cell("window-8k", "ONNX Runtime", "not-applicable", "no window"),
    ),
    row(
        "window-16k",
        Cell("window-16k", "torch SDPA", "wrong", "out differs", error=12.5),
        ran("window-16k", "attnx numpy", 0.7),
        Cell("window-16k", "numpy naive", "not-applicable", "larger than memory"),
        Cell("window-16k", "ONNX Runtime", "not-applicable", "no window"),
    ),
    row("backward", ran("backward", "attnx numpy", 0.1), gradient=True),
    row("wide", *(ran("wide", name, 0.001 * (i + 1)) for i, name in enumerate(MANY)),
        dtype="bfloat16"),
)  # fmt: skip
GOALS = (
    Goal("faster than naive", 5.2, 5.0, "x", after=8.0),
    Goal("as fast as torch", 0.7, 0.9, "x"),
    Goal("small call", 61.0, 50.0, "µs", after=20.0),
    Goal("peak", 80.0, 100.0, "MB"),
    Goal("even", None, 1.3, "x at most", why="one of the two did not run"),
)
SERIES = (
    Series("causal, forward", {
        "attnx numpy": ((256, 0.001, 10**6), (512, 0.004, None)),
        "numpy naive": ((256, 0.002, None), (512, None, None)),
    }),
)  # fmt: skip
REPORT = Report(MACHINE, ROWS, GOALS, SERIES, interrupted=True)


def printed(report: Report, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_report(console, report)
    return console.export_text()


def words(text: str) -> str:
    """The text on one line, without the rules of tables."""
    return " ".join(text.translate({ord(c): " " for c in "┃│┏┓┡┩└┘├┤━─┳╇┴┼"}).split())


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_report_comes_back_from_its_file() -> None:
    assert from_json(to_json(REPORT)) == REPORT
    assert strict(to_json(REPORT))["attnx_bench"] == 1


def test_numbers_that_are_not_finite_stand_as_text_and_come_back() -> None:
    cell = ran("w", "i", math.inf, spread=math.nan)
    report = Report(
        {"sgemm_gflops": math.inf}, (row("w", cell),), (Goal("g", -math.inf, 1.0, "x"),),
        (Series("s", {"i": ((1, math.inf, None),)}),),
    )  # fmt: skip
    assert strict(to_json(report))["rows"][0]["cells"][0]["seconds"] == "inf"
    back = from_json(to_json(report))
    assert math.isnan(back.rows[0].cells[0].spread or 0.0)
    assert back.rows[0].cells[0].seconds == math.inf
    assert back.goals == report.goals
    assert back.series == report.series
    assert "inf" in printed(back)


def test_scalars_and_arrays_of_numpy_are_written_as_numbers() -> None:
    import numpy as np

    report = Report({"a": np.float32(0.5), "b": np.arange(3), "c": np.int64(4)})
    assert strict(to_json(report))["machine"] == {"a": 0.5, "b": [0, 1, 2], "c": 4}


def test_a_cell_comes_back_from_another_process() -> None:
    cell = dataclasses.replace(ran("w", "i", 0.5), error=math.inf)
    assert cell_of(strict(json.dumps(cell_record(cell)))) == cell


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"attnx_bench": 2}', '{"attnx_bench": 1}', to_json(REPORT)[:-40],
     to_json(REPORT).replace("0.01,", "NaN,"), to_json(REPORT).replace('"status"', '"state"')],
)  # fmt: skip
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_json(text)


def test_the_baseline_is_the_most_preferred_that_ran() -> None:
    found = [baseline(REPORT, one) for one in ROWS]
    names = [None if cell is None else cell.implementation for cell in found]
    assert names == ["torch SDPA", "numpy naive", None, None, None]


@pytest.mark.parametrize(
    ("figure", "must", "unit", "verdict"),
    [
        (5.0, 5.0, "x", "met"), (4.9, 5.0, "x", "missed"), (50.0, 50.0, "µs", "met"),
        (51.0, 50.0, "ms", "missed"), (101.0, 100.0, "MB", "missed"),
        (1.2, 1.3, "x at most", "met"), (1.4, 1.3, "x at most", "missed"),
        (None, 1.0, "x", "not measured"), (math.nan, 1.0, "MB", "not measured"),
    ],
)  # fmt: skip
def test_a_goal_is_met_in_the_direction_of_its_unit(
    figure: float | None, must: float, unit: str, verdict: str
) -> None:
    assert Goal("", figure, must, unit).verdict == verdict


def test_the_machine_is_told_in_two_lines() -> None:
    assert machine_lines(REPORT) == [
        "Example 9000; 4 cores; threads: openblas 3; sgemm 200 GF/s",
        "numpy 2.4.6, torch 2.13.0; seed 7",
    ]
    assert machine_lines(Report({})) == ["unknown CPU"]


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_nothing_is_lost_in_a_terminal(width: int) -> None:
    text = printed(REPORT, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    told = words(text)
    for one in ROWS:
        assert one.name in told
        for cell in one.cells:
            assert cell.implementation.split()[-1] in told
            assert " ".join(cell.why.split()) in told
            assert cell.how in told
    for figure in (
        "10.0", "~8.00", "(1.25x)", "(0.25x)", "50%", "(4.00x)", "wrong", "crashed", "Missing",
        "5.20x", "≥ 5x", "≥ 8x", "61.0 µs", "≤ 50 µs", "missed", "met", "≤ 1.3x",
        "2.21 µs", "36.0 ms", "1.80x", "1.00 MB", "256", "512", "Interrupted",
    ):  # fmt: skip
        assert figure in told


def test_each_reason_is_told_once_with_its_workloads() -> None:
    text = words(printed(REPORT))
    assert text.count("ONNX Runtime: no window (window-8k, window-16k)") == 1
    assert "numpy naive: larger than memory (window-16k)" in text
    assert "ONNX Runtime: onnxruntime not installed (forward)" in text
    assert "torch SDPA: RuntimeError: out of memory (window-8k)" in text
    assert "torch SDPA: out differs (window-16k 12.5 times the tolerance)" in text
    assert "Without a ratio, since no baseline ran: window-16k, backward, wide." in text


def test_a_reason_for_every_workload_is_told_without_their_names() -> None:
    rows = tuple(row(f"w{i}", Cell(f"w{i}", "cupy", "missing", "no device")) for i in range(5))
    text = printed(Report({}, rows))
    assert "cupy: no device (every workload)" in text
    assert all(f"w{i}" in text for i in range(5))


def test_an_implementation_has_a_column_where_it_was_tried() -> None:
    rows = [line for line in printed(REPORT, 200).splitlines() if line.startswith("┃")]
    assert sum("torch SDPA" in words(line) for line in rows) <= 1
    assert not any("ONNX" in line for line in rows)


def test_tables_are_split_rather_than_cut() -> None:
    for width, least in ((200, 2), (60, 2), (40, 3)):
        text = printed(Report(MACHINE, ROWS[-1:]), width)
        assert text.count("bfloat16, forward (ms)") >= least
        assert all(f"number{i}" in text for i in range(7))


def test_faults_and_missed_goals_are_red_and_met_ones_green() -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    print_report(console, REPORT)
    text = console.export_text(styles=True)
    for code, told in (("1;31", "wrong"), ("1;31", "crashed"), ("1;31", "missed"), ("32", "met")):
        assert re.search(rf"\x1b\[{code}m *{told}", text)


def test_no_share_of_a_peak_that_is_unknown() -> None:
    machine = {name: value for name, value in MACHINE.items() if name != "sgemm_gflops"}
    assert "%" not in printed(Report(machine, ROWS[1:]))


def test_brackets_are_no_markup() -> None:
    report = Report({"cpu": "[red]x"}, (row("[bold]w", ran("[bold]w", "[i]one", 1.0)),))
    text = printed(report)
    assert "[red]x" in text
    assert "[bold]w" in text
    assert "[i]one" in text
