"""How a run of the benchmark reads in a terminal.

A table that leaves out what an implementation cannot do flatters it: every reason is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import (
    Cell,
    Goal,
    Report,
    Row,
    Series,
    baseline,
    figure,
    implementations,
    machine_lines,
    peak_of,
    ratio_of,
    seconds_of,
)

__all__ = ["print_report"]

STATUSES = ("wrong", "crashed", "missing", "not-applicable")
"""What a cell without a figure may be, worst first: the order in which reasons are told."""
STYLES = {"wrong": "bold red", "crashed": "bold red", "missing": "yellow", "not-applicable": "dim"}

COLUMNS = 5
"""Implementations in one table; more are no longer read across."""
NOISY = 0.2
"""The spread above which a time is marked."""
SPECIALS = {"overhead": "µs", "import": "ms", "peak": "MB", "callers": "x"}
"""The unit of a special measure, by how its name begins."""


def print_report(console: Console, report: Report) -> None:
    """Tell a report: the machine, times, figures against the length, goals, and every reason.

    Tables are split rather than cut where they are wider than the terminal. What a table has no
    room for, the number of rounds and the errors of right results, stands in the JSON.
    """
    for line in machine_lines(report):
        console.print(Text(line))
    for title, rows in _groups(report.rows).items():
        _print_rows(console, report, title, rows)
    _print_legend(console, report)
    for series in report.series:
        _print_series(console, series)
    _print_special(console, report.machine.get("special"))
    _print_goals(console, report.goals)
    _print_reasons(console, report)
    _print_calls(console, report)
    if report.interrupted:
        console.print(Text("Interrupted: this is not the whole run.", style="bold red"))


def _groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows that can be read against each other: of one dtype, with or without gradients."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        kind = "forward and gradients" if row.about.get("gradient") else "forward"
        title = ", ".join(word for word in (str(row.about.get("dtype", "")), kind) if word)
        found.setdefault(title, []).append(row)
    return found


def _print_rows(console: Console, report: Report, title: str, rows: Sequence[Row]) -> None:
    tried = {
        cell.implementation
        for row in rows
        for cell in row.cells
        if cell.status in ("ran", "wrong", "crashed")
    }
    names = [name for name in implementations(report) if name in tried]
    lines = []
    for row in rows:
        cells = {cell.implementation: cell for cell in row.cells}
        label = Text(row.name)
        if row.title and row.title != row.name:
            label.append(f"\n{row.title}", style="dim")
        lines.append((label, [_told(report, row, cells.get(name)) for name in names]))
    _print_split(console, f"{title} (ms)", "workload", names, lines)


def _told(report: Report, row: Row, cell: Cell | None) -> Text:
    """A cell of the table: its time, the ratio, and its share of the peak, each on a line."""
    if cell is None:
        return Text("missing", style=STYLES["missing"])
    if cell.status != "ran":
        told = "-" if cell.status == "not-applicable" else cell.status
        return Text(told, style=STYLES.get(cell.status, ""))
    if cell.seconds is None:
        return Text("untimed", style="yellow")
    noisy = cell.spread is not None and not cell.spread <= NOISY
    text = Text(("~" if noisy else "") + figure(1e3 * cell.seconds))
    against, seconds = baseline(report, row), seconds_of(cell)
    if against is not None and against.seconds is not None and against is not cell and seconds:
        ratio = against.seconds / seconds
        text.append(f"\n({ratio_of(ratio)})", style="green" if ratio >= 1 else "yellow")
    peak = peak_of(report)
    if peak is not None and seconds and math.isfinite(row.flops):
        text.append(f"\n{100 * row.flops / seconds / peak:.0f}%", style="dim")
    return text


def _print_legend(console: Console, report: Report) -> None:
    """How to read the tables of times: what the brackets compare with, and the other signs."""
    if not report.rows:
        return
    found = {row.name: baseline(report, row) for row in report.rows}
    used = dict.fromkeys(cell.implementation for cell in found.values() if cell is not None)
    if used:
        among = " or else ".join(used)
        console.print(Text(f"In brackets: how many times faster than {among}.", style="dim"))
    if used and (alone := [name for name, cell in found.items() if cell is None]):
        told = f"Without a ratio, since no baseline ran: {', '.join(alone)}."
        console.print(Text(told, style="yellow"))
    if peak_of(report) is not None:
        console.print(Text("In percent: the share of the sgemm peak.", style="dim"))
    cells = [cell for row in report.rows for cell in row.cells]
    if any(cell.spread is not None and not cell.spread <= NOISY for cell in cells):
        told = f"~: the rounds lie further apart than {100 * NOISY:.0f}% of their median."
        console.print(Text(told, style="dim"))
    if any(cell.status == "not-applicable" for cell in cells):
        console.print(Text("-: not applicable, see below.", style="dim"))


def _print_series(console: Console, series: Series) -> None:
    names = list(series.points)
    by_length: dict[int, dict[str, Text]] = {}
    for name, points in series.points.items():
        for length, seconds, peak in points:
            text = Text("-" if seconds is None else figure(1e3 * seconds))
            if peak is not None:
                text.append(f"\n{figure(peak / 1e6)} MB", style="dim")
            by_length.setdefault(length, {})[name] = text
    lines = [
        (Text(str(length)), [cells.get(name, Text("-")) for name in names])
        for length, cells in sorted(by_length.items())
    ]
    _print_split(console, f"{series.name} (ms, and memory at the peak)", "L", names, lines)


def _print_special(console: Console, special: Any) -> None:
    """What was measured beside the calls: overhead, import, memory, several callers at once."""
    if isinstance(special, Mapping) and special:
        lines = [(Text(str(name)), [_special(name, value)]) for name, value in special.items()]
        _print_split(console, "Special measures", "measure", ["figure"], lines, ruled=False)


def _special(name: str, value: Any) -> Text:
    known = isinstance(value, int | float)
    unit = next((unit for start, unit in SPECIALS.items() if name.startswith(start)), "")
    return Text(_with_unit(value, unit).strip() if known else str(value))


def _print_goals(console: Console, goals: Sequence[Goal]) -> None:
    if not goals:
        return
    lines = []
    for goal in goals:
        label = Text(goal.text)
        if goal.why:
            label.append(f"\n{goal.why}", style="dim")
        sign = "≥" if goal.unit == "x" else "≤"
        figures = [
            Text(_with_unit(goal.figure, goal.unit)),
            *(
                Text("-" if asked is None else f"{sign} {_joined(f'{asked:g}', goal.unit)}")
                for asked in (goal.must, goal.after)
            ),
        ]
        style = {"met": "green", "missed": "bold red"}.get(goal.verdict, "yellow")
        lines.append((label, [*figures, Text(goal.verdict.replace(" ", "\n"), style=style)]))
    _print_split(console, "Goals", "goal", ["figure", "must", "after", "verdict"], lines)


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else _joined(figure(value), unit)


def _joined(number: str, unit: str) -> str:
    return f"{number}x" if unit.startswith("x") else f"{number} {unit}"


def _print_reasons(console: Console, report: Report) -> None:
    """Why cells have no figure: each reason of an implementation once, with its workloads."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in report.rows:
        for cell in row.cells:
            if cell.status != "ran":
                key = (cell.status, cell.implementation, " ".join(cell.why.split()))
                found.setdefault(key, []).append(row.name + _error(cell))
    known = [*STATUSES, *(status for status, _, _ in found if status not in STATUSES)]
    for status in dict.fromkeys(known):
        mine = {key[1:]: names for key, names in found.items() if key[0] == status}
        if mine:
            heading = status.replace("-", " ").capitalize()
            console.print(Text(f"{heading}:", style=STYLES.get(status, "bold")))
        for (implementation, why), names in mine.items():
            where = _where(names, report)
            console.print(Text(f"  {implementation}: {why or 'no reason given'} ({where})"))


def _error(cell: Cell) -> str:
    """How wrong a cell is, where its reason does not say so itself."""
    if cell.status != "wrong" or cell.error is None or f"{cell.error:.3g}" in cell.why:
        return ""
    return f" {figure(cell.error)} times the tolerance"


def _where(names: Sequence[str], report: Report) -> str:
    everywhere = len(names) > 3 and set(names) == {row.name for row in report.rows}
    return "every workload" if everywhere else ", ".join(names)


def _print_calls(console: Console, report: Report) -> None:
    """What was really called, each once; where it is the same for all workloads, without them."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in report.rows:
        for cell in row.cells:
            if cell.how:
                found.setdefault(cell.implementation, {}).setdefault(cell.how, []).append(row.name)
    if found:
        console.print(Text("Called:", style="dim"))
    for implementation, calls in found.items():
        for how, names in calls.items():
            where = f" ({_where(names, report)})" if len(calls) > 1 else ""
            console.print(Text(f"  {implementation}: {how}{where}", style="dim"))


# Tables that fit ----------------------------------------------------------------------------------


def _print_split(
    console: Console,
    title: str,
    corner: str,
    names: Sequence[str],
    lines: Sequence[tuple[Text, Sequence[Text]]],
    *,
    ruled: bool = True,
) -> None:
    """A table, or several with the same first column where one is wider than the terminal."""
    widths = [
        max(_longest_word(name), *(_longest_line(cells[i]) for _, cells in lines))
        for i, name in enumerate(names)
    ]
    least = max([cell_len(corner), *(_longest_word(label.plain) for label, _ in lines)])
    most = max([cell_len(corner), *(_longest_line(label) for label, _ in lines)])
    for start, stop in _spans(widths, console.width - least):
        room = console.width - _taken(widths[start:stop])
        table = Table(title=Text(title), title_justify="left", title_style="bold", show_lines=ruled)
        table.add_column(corner, width=max(1, min(most, room)), overflow="fold")
        for name, width in zip(names[start:stop], widths[start:stop], strict=True):
            table.add_column(Text(name), width=width, justify="right", overflow="fold")
        for label, cells in lines:
            table.add_row(label, *cells[start:stop])
        console.print(table)


def _spans(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """How columns are shared out among tables that have `room` beside their first column."""
    spans, start = [], 0
    while start < len(widths):
        stop = start + 1
        while stop < min(len(widths), start + COLUMNS) and _taken(widths[start : stop + 1]) <= room:
            stop += 1
        spans.append((start, stop))
        start = stop
    return spans or [(0, 0)]


def _taken(widths: Sequence[int]) -> int:
    """What columns take, with the rules and blanks around them and around the first column."""
    return sum(widths) + 3 * (len(widths) + 1) + 1


def _longest_word(text: str) -> int:
    return max((cell_len(word) for word in text.split()), default=1)


def _longest_line(text: Text) -> int:
    return max((cell_len(line) for line in text.plain.splitlines()), default=1)
