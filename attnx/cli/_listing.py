"""`attnx backends` and `attnx doctor`: what is installed, and whether it is well."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import attnx
from attnx.cli._options import console, one_line_errors
from attnx.cli._records import backend_record, doctor_record
from attnx.cli._tables import print_backends, print_doctor

__all__ = ["backends", "doctor"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
FAILURES = ("failed", "refused")


@one_line_errors
def backends(as_json: AsJson = False) -> None:
    """List the installed backends: status, version, devices and capabilities.

    For example:

        attnx backends --json
    """
    infos = attnx.backends()
    if as_json:
        typer.echo(json.dumps([backend_record(info) for info in infos], indent=2))
    else:
        print_backends(console(), infos)


@one_line_errors
def doctor(as_json: AsJson = False) -> None:
    """Say what is wrong with the installed plugins and settings, and what to do about it.

    Exit status: 0 nothing failed, 1 something did.

    For example:

        attnx doctor
    """
    records = attnx.doctor()
    if as_json:
        typer.echo(json.dumps([doctor_record(record) for record in records], indent=2))
    else:
        print_doctor(console(), records)
    if any(record.status in FAILURES for record in records):
        raise typer.Exit(1)
