"""`attnx bench`: attnx and its peers on this machine, checked and then timed side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnx.cli._options import (
    check_writable,
    console,
    interrupted_by_termination,
    one_line_errors,
    progress_bar,
)
from attnx.errors import ArgumentError

__all__ = ["bench"]


@one_line_errors
def bench(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Only this workload, or those of a pattern such as window-*; repeat it for "
            "several. --list names them.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Only this implementation, or those of a pattern: 'attnx *', 'torch*'.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(show_default=False, help="Run the workloads in this dtype.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="The workloads that stand for the others, less often.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the figures.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Also measure time and memory against the length, and draw them as PNG and SVG.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the operands.")] = 0,
    budget: Annotated[
        float, typer.Option(min=0.1, help="Seconds for the rounds of one workload.")
    ] = 20.0,
    names: Annotated[
        bool, typer.Option("--list", help="Name the workloads and implementations, and end.")
    ] = False,
) -> None:
    """Time attention on this machine: attnx's backends and what else a user would call.

    Each is checked against float64 before it is timed; they take turns in one process, with a
    pause between two of them, and the figure is the median of several rounds.

    Exit status: 0, 1 an implementation of attnx is wrong or crashed, 2 wrong use, 130 interrupted.

    For example:

        attnx bench --quick

        attnx bench --workload 'window-*' --backend 'attnx *' --backend 'torch SDPA'

        attnx bench --json bench.json --plot plots
    """
    from attnx_bench import Asked, run
    from attnx_bench.report import to_json
    from attnx_bench.tables import print_report

    asked = Asked(
        tuple(workload or ()), tuple(backend or ()), dtype, quick, plot is not None, seed, budget
    )
    workloads, measures, chosen = asked.chosen()
    if names:
        for each in workloads:
            typer.echo(f"{each.name:20}{each.title}")
        typer.echo(f"\nmeasures: {', '.join(measures)}")
        typer.echo(f"implementations: {', '.join(i.name for i in chosen)}")
        return
    if not workloads and not measures:
        raise ArgumentError("--workload: nothing is left to run")
    check_writable(json)
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
    with interrupted_by_termination(), progress_bar() as progress:
        task = progress.add_task("bench", total=None)
        report = run(asked, lambda what: progress.update(task, description=what))
    print_report(console(), report)
    if json is not None:
        json.write_text(to_json(report), encoding="utf-8")
    if plot is not None:
        from attnx_bench.plots import draw

        for made in draw(report, plot):
            typer.echo(f"plot: {made}", err=True)
    if report.interrupted:
        raise typer.Exit(130)
    cells = [cell for row in report.rows for cell in row.cells]
    ours = [cell for cell in cells if cell.implementation.startswith("attnx ")]
    if any(cell.status in ("wrong", "crashed") for cell in ours):
        raise typer.Exit(1)
