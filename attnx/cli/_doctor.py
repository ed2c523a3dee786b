"""`attnx doctor`: what is wrong with the plugins and settings, and what to do about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

import attnx
from attnx._findings import FAILURES
from attnx._registry import registry
from attnx.cli._bug_report import bug_report, own_names
from attnx.cli._options import console, one_line_errors, output_kept_clean
from attnx.cli._redact import redactor
from attnx.cli._tables import print_doctor
from attnx.cli._trials import ask_hooks, try_backend

if TYPE_CHECKING:
    from attnx import BackendInfo, Record

__all__ = ["doctor"]


@one_line_errors
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document for a bug report instead.")
    ] = False,
    paths: Annotated[
        bool, typer.Option("--paths", help="Leave personal paths in the JSON document.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the traceback of each failure as well.")
    ] = False,
    calls: Annotated[
        bool,
        typer.Option(
            "--calls/--no-calls", help="Try what each backend declares, with some small calls."
        ),
    ] = True,
) -> None:
    """Say what is wrong with the installed plugins and settings, and what to do about it.

    Each backend that can compute here is asked for some small calls, one or more for each option
    that it declares, whose answers are judged by the conformance suite. That takes a second, and
    some seconds where a framework compiles; a call that never returns is not ended.

    The JSON document has versions, settings, plugins, these records with their tracebacks, and the
    backends. It says `~`, `<user>`, `<site-packages>` and so on in place of personal paths.

    Exit status: 0 nothing failed, 1 something did.

    For example:

        attnx doctor

        attnx doctor --json > report.json
    """
    with output_kept_clean():
        infos, records = _examine(calls)
    if as_json:
        document = bug_report(records, infos)
        clean = redactor(keep=own_names())
        typer.echo(json.dumps(document if paths else clean(document), indent=2))
    else:
        print_doctor(console(), records, verbose)
    if any(record.status in FAILURES for record in records):
        raise typer.Exit(1)


def _examine(calls: bool) -> tuple[tuple[BackendInfo, ...], tuple[Record, ...]]:
    """The backends, and everything that was found."""
    registry.listening = True
    try:
        with registry.tolerant():
            infos = attnx.backends()
            tried: list[Record] = []
            if calls:
                names = [info.name for info in infos if info.status == "available"]
                ask_hooks(names)
                tried = [record for name in names for record in try_backend(name)]
            return infos, (*attnx.doctor(), *tried)
    finally:
        registry.listening = False
