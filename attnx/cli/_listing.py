"""`attnx backends`: what is installed, and what it can do."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import attnx
from attnx.cli._options import console, one_line_errors, output_kept_clean
from attnx.cli._records import backend_record
from attnx.cli._tables import print_backends

__all__ = ["backends"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@one_line_errors
def backends(as_json: AsJson = False) -> None:
    """List the installed backends: status, version, devices and capabilities.

    For example:

        attnx backends --json
    """
    with output_kept_clean():
        infos = attnx.backends()
    if as_json:
        typer.echo(json.dumps([backend_record(info) for info in infos], indent=2))
    else:
        print_backends(console(), infos)
