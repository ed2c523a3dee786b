"""`attnx conformance`: the suite on backends or on one plain function, and its portable vectors."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from operator import setitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import attnx
from attnx.cli._badge import badge as badge_command
from attnx.cli._badge import check_badge, write_badge
from attnx.cli._compare import chosen
from attnx.cli._conformance_tables import print_report, print_self_test
from attnx.cli._options import (
    check_writable,
    console,
    interrupted_by_termination,
    one_line_errors,
    progress_bar,
)
from attnx.errors import ArgumentError, AttnxError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx_conformance.results import Report, Result
    from attnx_conformance.subject import Subject
    from attnx_conformance.suite import Selection

__all__ = ["suite"]


class _RunUnlessNamed(TyperGroup):
    """`attnx conformance numpy` runs the suite; `attnx conformance export DIR` is a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


suite = typer.Typer(
    cls=_RunUnlessNamed,
    help="Check backends, or one plain function, against the specification. `attnx conformance` "
    "runs every case on every installed backend; `attnx conformance run --help` has the options.",
)

Names = Annotated[list[str] | None, typer.Option(show_default=False)]


@suite.command("run")
@one_line_errors
def run(
    backend: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BACKEND]...",
            show_default=False,
            help="Backends to examine. Without any: those of ATTNX_BACKEND, else all installed.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="Only this profile; repeat it for several."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False, help="Only this case, or those of a pattern such as causal-*."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="Only this dtype; of a function, what it takes."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False, help="Only bhsd or bshd; of a function, what it takes (bhsd)."
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="Only gradients by vjp, or by the framework."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every input.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A sample: a quarter of it.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every case in every dtype, layout and way.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Worker processes; 0 takes one a core.", show_default=False)
    ] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a case hangs.")] = 300,
    function: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CALLABLE",
            show_default=False,
            help="Examine a plain function fn(q, k, v, **options) instead of a backend.",
        ),
    ] = None,
    framework: Annotated[str, typer.Option(help="Whose arrays the function takes.")] = "numpy",
    supports: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            show_default=False,
            help="What the function takes beside q, k, v: causal, mask, bias, scale, softcap, "
            "sinks, alibi, dropout, lse, gqa, gradients, memory (grows with L alone), and what it "
            "may be seen through: compile, vmap, forward_mode, higher_order.",
        ),
    ] = "",
    isolation: Annotated[
        str,
        typer.Option(
            metavar="full|unseen|none", help="Whether the function keeps NaN from other rows (S4)."
        ),
    ] = "full",
    deviations: Annotated[
        Path | None,
        typer.Option(show_default=False, help="A TOML file of known deviations, with reasons."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(show_default=False, help="Write the results as JSON lines.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(show_default=False, help="Write one self-contained HTML page.")
    ] = None,
    badge: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", show_default=False, help="Write a badge: the profiles it holds."
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Examine the suite itself: planted faults and controls."),
    ] = False,
) -> None:
    """Check backends, or one plain function, against the specification.

    Each case runs in a worker process, so that a crash or a hang is a verdict on that case alone.

    Exit status: 0 everything declared is right, 1 something is not, 2 wrong use, 130 interrupted.

    For example:

        attnx conformance

        attnx conformance torch --profile gradients --jobs 2 --html report.html

        attnx conformance --function my_kernel:attention --framework torch --supports causal,mask
    """
    from attnx_conformance.deviations import load
    from attnx_conformance.results import unproven
    from attnx_conformance.suite import Selection

    if self_test:
        if backend or function or report or html or badge or deviations:
            raise ArgumentError("--self-test: it examines the suite alone, and writes no report")
        _self_test(full, jobs or os.cpu_count() or 1, seed)
        return
    selection = Selection(
        level="full" if full else "quick" if quick else "standard",
        profiles=tuple(profile or ()), cases=tuple(case or ()), dtypes=tuple(dtype or ()),
        layouts=tuple(layout or ()), seed=seed, ways=tuple(way or ()),
    )  # fmt: skip
    if function is None:
        subjects, absent = _backends(backend)
    else:
        if backend:
            raise ArgumentError("--function: examine it alone, without naming backends")
        absent = []
        subjects = [_function(function, framework, supports, isolation, selection)]
    selection.check(subjects)
    known = () if deviations is None else load(deviations)
    for path in (report, html):
        check_writable(path)
    check_badge(badge)
    if known and len(subjects) != 1:
        raise ArgumentError("--deviations: a file is about one backend; name it")
    made = _run_all(subjects, selection, jobs or os.cpu_count() or 1, timeout, known, report)
    print_report(console(), made, [*absent, *made.footer["errors"]])
    if html is not None:
        from attnx_conformance.html import write

        write(made, html)
        typer.echo(f"report: {html}", err=True)
    if badge is not None:
        write_badge(made, badge)
    if made.footer.get("interrupted"):
        raise typer.Exit(130)
    right = bool(made.results) and all(result.ok for result in made.results)
    if not right or unproven(made.results):
        raise typer.Exit(1)


def _backends(named: Sequence[str] | None) -> tuple[list[Subject], list[str]]:
    """The backends to examine, and a line for each that cannot be."""
    from attnx_conformance.subject import BackendSubject

    variable = os.environ.get("ATTNX_BACKEND")
    infos = chosen(named, variable, attnx.backends())
    subjects = [BackendSubject(i.name) for i in infos if i.status == "available"]
    absent = [f"{i.name}: {i.status}: {i.reason}" for i in infos if i.status != "available"]
    if absent and (named or variable):
        raise ArgumentError("; ".join(absent))
    if not subjects:
        raise ArgumentError("no backend can run here: " + ("; ".join(absent) or "none installed"))
    return [*subjects], absent


def _function(
    text: str, framework: str, supports: str, isolation: str, selection: Selection
) -> Subject:
    """The plain function of `--function`, from a module that the current folder may hold."""
    from attnx_conformance.subject import function_spec, resolve

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    layouts = selection.layouts or ("bhsd",)
    return resolve(
        function_spec(
            text, framework=framework, layouts=layouts, dtypes=selection.dtypes or ("float32",),
            supports=[x for x in supports.split(",") if x], isolation=isolation,
        )
    )  # fmt: skip


def _run_all(
    subjects: Sequence[Subject], selection: Selection, jobs: int, timeout: float, known: Any,
    report: Path | None,
) -> Report:  # fmt: skip
    from attnx_conformance.results import Report, Writer, versions
    from attnx_conformance.suite import examine_all, trials

    planned = {subject.name: trials(subject, selection) for subject in subjects}
    header = {
        "subjects": list(planned), "seed": selection.seed, "level": selection.level,
        "versions": versions(), "planned": sum(map(len, planned.values())), "started": _now(),
        "absent": selection.absent(), "sample": selection.sample(subjects),
    }  # fmt: skip
    results: list[Result] = []
    footer: dict[str, Any] = {"route": {}, "interrupted": False, "errors": []}
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(report, header)) if report is not None else None
        progress = stack.enter_context(progress_bar())

        def keep(result: Result) -> None:
            results.append(result)
            progress.advance(task)
            if writer is not None:
                writer.add(result)

        stack.enter_context(interrupted_by_termination())
        try:
            for subject in subjects:
                chosen_trials = planned[subject.name]
                task = progress.add_task(subject.name, total=len(chosen_trials))
                try:
                    examine_all(
                        subject, chosen_trials, jobs=jobs, timeout=timeout, deviations=known,
                        on_result=keep, on_route=partial(setitem, footer["route"], subject.name),
                    )  # fmt: skip
                except AttnxError as error:  # its workers do not start; the others' results stand
                    footer["errors"].append(" ".join(str(error).split()))
        except KeyboardInterrupt:
            footer["interrupted"] = True
        footer["finished"] = _now()
        if writer is not None:
            writer.finish(footer)
    return Report(header, tuple(results), footer)


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")


def _self_test(full: bool, jobs: int, seed: int) -> None:
    from attnx_conformance.selftest import in_parts

    with progress_bar() as progress:
        task = progress.add_task("planted faults", total=None)
        made = in_parts(
            jobs, stop=None if full else 2, seed=seed,
            on_part=lambda done, parts: progress.update(task, completed=done, total=parts),
        )  # fmt: skip
    print_self_test(console(), made)
    if not made.ok:
        raise typer.Exit(1)


suite.command("badge")(badge_command)


@suite.command("export")
@one_line_errors
def export(
    directory: Annotated[Path, typer.Argument(help="A folder to make.")],
    case: Annotated[list[str] | None, typer.Option(show_default=False)] = None,
    dtype: Annotated[list[str] | None, typer.Option(show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A sample: a quarter of it.")] = False,
) -> None:
    """Write cases with their expected answers and bounds, for a kernel in any language.

    All cases in all dtypes are some 600 MB; `--quick`, `--case` and `--dtype` write fewer.
    """
    from attnx_conformance import vectors
    from attnx_conformance.suite import Selection, cases_of

    selection = Selection(
        "quick" if quick else "standard", cases=tuple(case or ()), dtypes=tuple(dtype or ()),
        seed=seed,
    )  # fmt: skip
    selection.check()
    made = vectors.export(
        directory, cases=cases_of(selection), dtypes=selection.dtypes or None, seed=seed
    )
    typer.echo(f"wrote {made}")


@suite.command("verify")
@one_line_errors
def verify(
    directory: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    results: Annotated[Path, typer.Argument(help="A folder of results, a file a case.")],
) -> None:
    """Judge results that were computed anywhere. Exit status as for a run."""
    from attnx_conformance import vectors
    from attnx_conformance.results import Report

    judged = vectors.verify(directory, results)
    print_report(console(), Report({}, judged, {"route": {}}), [])
    if not judged or not all(result.ok for result in judged):
        raise typer.Exit(1)
