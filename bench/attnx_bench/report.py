"""What a run of the benchmark found, kept as JSON, and what may be asked of it.

Every cell that has no figure says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "Cell", "Goal", "Report", "Row", "Series", "baseline", "cell_of", "cell_record", "figure",
    "from_json", "implementations", "machine_lines", "peak_of", "ratio_of", "seconds_of", "to_json",
]  # fmt: skip

FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """One implementation on one workload.

    Attributes:
        workload: the name of the workload.
        implementation: the name of the implementation.
        status: "ran", "not-applicable", "wrong", "crashed" or "missing".
        why: the reason, in a few words, where it did not run.
        how: what was really called.
        seconds: the median.
        spread: how far the rounds lie apart: (p90 - p10) / median.
        error: the largest error over its tolerance; at most 1 is right.
        peak_bytes: memory at the peak of the call.
        rounds: how often it was timed.
    """

    workload: str
    implementation: str
    status: str
    why: str = ""
    how: str = ""
    seconds: float | None = None
    spread: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    rounds: int = 0


@dataclass(frozen=True)
class Row:
    """One workload on every implementation.

    Attributes:
        name: of the workload.
        title: one line for a table.
        about: the sizes, as `Workload.describe` gives them.
        flops: floating-point operations of one call.
        cells: one for each implementation.
        beside: seconds, by workload and implementation, of what took turns with this one.
    """

    name: str
    title: str
    about: Mapping[str, Any]
    flops: float
    cells: tuple[Cell, ...]
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """A figure that the library sets itself.

    Attributes:
        text: what is compared, in one line.
        figure: what was measured, or None.
        must: what it has to reach.
        unit: "x" for ratios, where higher is better; "x at most", "µs", "ms" or "MB", where lower
            is.
        after: what to go for once `must` is reached, or None.
        why: the reason why there is no figure.
    """

    text: str
    figure: float | None
    must: float
    unit: str
    after: float | None = None
    why: str = ""

    @property
    def verdict(self) -> str:
        """Whether `must` is reached: "met", "missed" or "not measured"."""
        if self.figure is None or math.isnan(self.figure):
            return "not measured"
        reached = self.figure >= self.must if self.unit == "x" else self.figure <= self.must
        return "met" if reached else "missed"


@dataclass(frozen=True)
class Series:
    """One call at several lengths.

    Attributes:
        name: the title of its plots.
        points: of each implementation (L, seconds or None, peak bytes or None).
    """

    name: str
    points: Mapping[str, tuple[tuple[int, float | None, int | None], ...]]


@dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        machine: "cpu", "cores", "threads", "versions" (by package), "sgemm_gflops" (10^9
            floating-point operations a second), "exp_ns" (an exponential of NumPy's on one core),
            "baselines" (implementations, in order of preference) and "special" (measures by name
            that are no call of attention); each may be absent, and whatever else there is is told
            as well.
        rows: one for each workload.
        goals: what the library sets itself.
        series: figures against the length, for plots.
        interrupted: whether the run was stopped before its end.
    """

    machine: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    goals: tuple[Goal, ...] = ()
    series: tuple[Series, ...] = ()
    interrupted: bool = False


# As a file ----------------------------------------------------------------------------------------


def to_json(report: Report) -> str:
    """The report as strict JSON; JSON has no NaN and no infinity, so such numbers stand as text."""
    record = {"attnx_bench": FORMAT, **asdict(report)}
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote.

    Numbers that are not finite come back as numbers, but for those in `machine` and `about`, of
    which nothing says that they were numbers.

    Raises:
        ValueError: it is no report, or one of another format.
    """
    record = json.loads(text, parse_constant=_refuse)
    if not isinstance(record, dict) or record.get("attnx_bench") != FORMAT:
        raise ValueError(f"expected a report of the benchmark, format {FORMAT}")
    try:
        return Report(
            machine=record["machine"],
            rows=tuple(_row(one) for one in record["rows"]),
            goals=tuple(_goal(one) for one in record["goals"]),
            series=tuple(_series(one) for one in record["series"]),
            interrupted=record["interrupted"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a damaged report of the benchmark: {error!r}") from error


def cell_record(cell: Cell) -> dict[str, Any]:
    """A cell as JSON knows it, for another process."""
    record: dict[str, Any] = _plain(asdict(cell))
    return record


def cell_of(record: Mapping[str, Any]) -> Cell:
    """The cell that `cell_record` wrote."""
    numbers = {name: _number(record[name]) for name in ("seconds", "spread", "error")}
    return Cell(**{**record, **numbers})


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _plain(value: Any) -> Any:
    """The same out of what JSON knows, NumPy's scalars and arrays included."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _row(record: dict[str, Any]) -> Row:
    cells = tuple(cell_of(one) for one in record["cells"])
    return Row(**{**record, "flops": float(record["flops"]), "cells": cells})


def _goal(record: dict[str, Any]) -> Goal:
    numbers = {name: _number(record[name]) for name in ("figure", "after")}
    return Goal(**{**record, **numbers, "must": float(record["must"])})


def _series(record: dict[str, Any]) -> Series:
    points = {
        name: tuple((length, _number(seconds), peak) for length, seconds, peak in mine)
        for name, mine in record["points"].items()
    }
    return Series(record["name"], points)


# What is asked of a report ------------------------------------------------------------------------


def seconds_of(cell: Cell) -> float | None:
    """Its time where that can be compared: it ran, and took a finite time above zero."""
    if cell.status != "ran" or cell.seconds is None:
        return None
    return cell.seconds if math.isfinite(cell.seconds) and cell.seconds > 0 else None


def baseline(report: Report, row: Row) -> Cell | None:
    """What the others of a row are compared with: the most preferred baseline that ran in it."""
    ran = {cell.implementation: cell for cell in row.cells if seconds_of(cell) is not None}
    return next((ran[name] for name in report.machine.get("baselines", ()) if name in ran), None)


def implementations(report: Report) -> list[str]:
    """Every implementation that is named, in the order of its first appearance."""
    in_rows = (cell.implementation for row in report.rows for cell in row.cells)
    in_series = (name for series in report.series for name in series.points)
    return list(dict.fromkeys([*in_rows, *in_series]))


def machine_lines(report: Report) -> list[str]:
    """What the figures were measured on: the processor, the versions, and what else is known."""
    apart = (
        "baselines",
        "special",
        "cpu",
        "cores",
        "threads",
        "sgemm_gflops",
        "exp_ns",
        "versions",
    )
    known = report.machine
    first = [str(known.get("cpu", "unknown CPU"))]
    if "cores" in known:
        first.append(f"{known['cores']} cores")
    if known.get("threads"):
        first.append(f"threads: {_pairs(known['threads'])}")
    if (peak := peak_of(report)) is not None:
        first.append(f"sgemm {figure(peak / 1e9)} GF/s")
    if "exp_ns" in known:
        first.append(f"NumPy's exp {figure(known['exp_ns'])} ns")
    others = _pairs({name: value for name, value in known.items() if name not in apart})
    second = [text for text in (_pairs(known.get("versions", "")), others) if text]
    return ["; ".join(line) for line in (first, second) if line]


def _pairs(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{name} {_pairs(one)}" for name, one in value.items())


def peak_of(report: Report) -> float | None:
    """Floating-point operations a second of sgemm, where they were measured."""
    try:
        peak = 1e9 * float(report.machine["sgemm_gflops"])
    except (KeyError, TypeError, ValueError):
        return None
    return peak if math.isfinite(peak) and peak > 0 else None


def figure(value: float) -> str:
    """A number to three digits, without an exponent where it can be read without one."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size < 0.1:
        return f"{value:.3g}"
    digits = next((n for least, n in ((100, 0), (10, 1), (1, 2)) if size >= least), 3)
    return f"{value:,.{digits}f}"


def ratio_of(value: float) -> str:
    """A ratio of times, to what two measurements are good for."""
    if value >= 0.995:
        return f"{figure(value)}x"
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"
