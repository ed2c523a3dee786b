"""`attnx conformance badge`: a report that was written before, as a badge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnx.cli._options import check_writable, one_line_errors
from attnx.errors import ArgumentError

if TYPE_CHECKING:
    from attnx_conformance.results import Report

__all__ = ["badge", "check_badge", "write_badge"]


@one_line_errors
def badge(
    report: Annotated[Path, typer.Argument(help="What `--report` wrote, as JSON lines.")],
    file: Annotated[Path, typer.Argument(help="The badge to write, with the suffix .svg.")],
) -> None:
    """Write a report's badge: which profiles it holds, in one line for a README.

    Exit status: 0, whatever the report says, 2 wrong use.

    For example:

        attnx conformance badge report.jsonl badge.svg
    """
    from attnx_conformance.badge import badge as made
    from attnx_conformance.results import read

    try:
        found = read(report)
        made(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{report}: cannot be read as a report: {error}") from None
    check_badge(file)
    write_badge(found, file)


def check_badge(path: Path | None) -> None:
    """Before a run of minutes, and not after it."""
    if path is not None and path.suffix.lower() != ".svg":
        raise ArgumentError(f"badge: expected a name that ends in .svg, got {path}")
    check_writable(path)


def write_badge(report: Report, path: Path) -> None:
    """Write it and say where."""
    from attnx_conformance.badge import write

    typer.echo(f"badge: {write(report, path)}", err=True)
