"""How the commands' records look in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from attnx.cli._judge import RESULTS
from attnx.plugin import MASK_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from attnx import BackendInfo, Record
    from attnx.cli._request import Request
    from attnx.cli._runner import Row
    from attnx.plugin import Capabilities

__all__ = ["bytes_text", "print_backends", "print_comparison", "print_doctor", "seconds_text"]

ONE_TABLE = 116  # columns of a terminal that hold errors and costs side by side
COLOURS = {
    "agrees": "green",
    "available": "green",
    "ok": "green",
    "disagrees": "bold red",
    "crashed": "bold red",
    "failed": "bold red",
    "refused": "yellow",
    "warning": "yellow",
    "unavailable": "yellow",
}


def print_comparison(screen: Console, title: str, request: Request, rows: Sequence[Row]) -> None:
    """The table of `attnx compare`, then a line for each backend that has something to say."""
    shown = [name for name in RESULTS if any(name in row.errors for row in rows)]
    errors = shown or ["out", "lse", "dq", "dk", "dv"]
    costs = ["forward", "fwd + bwd", "peak"]
    # A narrow terminal gets two whole tables rather than one of clipped cells.
    parts = [["backend", "route", *errors, *costs, "verdict"]]
    if screen.width < ONE_TABLE:
        parts = [["backend", *errors, "verdict"], ["backend", "route", *costs]]
    for number, columns in enumerate(parts):
        heading = None if number else escape(title)
        table = Table(title=heading, title_justify="left", title_style="", pad_edge=len(parts) == 1)
        for name in columns:
            if name in ("backend", "route"):
                table.add_column(name, min_width=8, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(_cell(row, name) for name in columns))
        screen.print(table)
    screen.print(
        f"Errors are multiples of the error bound (up to 1 agrees); times the median of "
        f"{request.repeat}; peak resident memory above the warm process, of forward and backward."
    )
    for row in rows:
        if row.why:
            screen.print(f"{escape(row.backend)}: {_coloured(row.status)}: {escape(row.why)}")


def _cell(row: Row, column: str) -> str:
    made = {
        "backend": lambda: escape(f"{row.backend} {row.version or ''}".strip()),
        "route": lambda: escape(row.route or "-"),
        "forward": lambda: seconds_text(row.forward_s),
        "fwd + bwd": lambda: seconds_text(row.forward_backward_s),
        "peak": lambda: bytes_text(row.peak_bytes),
        "verdict": lambda: _coloured(row.status),
    }
    return made[column]() if column in made else _ratio(row.errors.get(column))


def print_backends(screen: Console, infos: Sequence[BackendInfo]) -> None:
    """The table of `attnx backends`."""
    table = Table(show_lines=True)
    for name in ("backend", "status", "version", "devices", "capabilities", "from"):
        table.add_column(name, overflow="fold")
    for info in infos:
        able = [info.reason] if info.reason else []
        able += [capabilities_text(info.capabilities)] if info.capabilities else []
        table.add_row(
            escape(info.name),
            _coloured(info.status),
            escape(info.version or "-"),
            escape(", ".join(info.devices) or "-"),
            escape("\n".join(able)),
            escape(info.distribution or "-"),
        )
    screen.print(table)


def capabilities_text(capabilities: Capabilities) -> str:
    """What a backend declares, in a few lines: lists by name, then what it has and lacks."""
    declared = capabilities._asdict()
    lines = []
    for name, value in declared.items():
        words = "all" if value == MASK_KINDS else value
        if isinstance(value, frozenset):
            words = words if isinstance(words, str) else ", ".join(sorted(value)) or "none"
        elif value is None or isinstance(value, bool):
            continue
        lines.append(f"{name.replace('_', ' ')}: {words}")
    for label, wanted in (("has", True), ("lacks", False)):
        found = [name.replace("_", " ") for name, value in declared.items() if value is wanted]
        lines += [f"{label}: {', '.join(found)}"] if found else []
    return "\n".join(lines)


def print_doctor(screen: Console, records: Sequence[Record], verbose: bool = False) -> None:
    """The table of `attnx doctor`, and the tracebacks if asked."""
    table = Table()
    for name in ("subject", "status", "what was found", "what to do", "from"):
        table.add_column(name, overflow="fold")
    for record in records:
        table.add_row(
            escape(record.subject),
            _coloured(record.status),
            escape(record.detail or ""),
            escape(record.remedy or ""),
            escape(record.distribution or "-"),
        )
    screen.print(table)
    for record in records:
        if verbose and record.traceback:
            screen.print(escape(f"{record.subject}: {record.detail}\n{record.traceback}"))


def _coloured(status: str) -> str:
    colour = COLOURS.get(status)
    return f"[{colour}]{escape(status)}[/]" if colour else escape(status)


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    text = f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0e}"
    return text if ratio <= 1 else f"[bold red]{text}[/]"


def seconds_text(seconds: float | None) -> str:
    """A duration with three digits and its unit."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def bytes_text(count: int | None) -> str:
    """A size in MB, of a million bytes."""
    return "-" if count is None else f"{count / 1e6:.1f} MB"
