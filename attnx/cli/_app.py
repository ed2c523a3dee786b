"""The typer application: which commands there are."""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from attnx.cli._bench import bench
from attnx.cli._compare import compare
from attnx.cli._conformance import suite
from attnx.cli._doctor import doctor
from attnx.cli._explain import explain
from attnx.cli._listing import backends
from attnx.cli._new_backend import new_backend
from attnx.cli._options import CausalCommand
from attnx.cli._show import show
from attnx.cli._tune import tune

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(backends)
app.command(cls=CausalCommand)(explain)
app.command()(doctor)
app.command(cls=CausalCommand)(compare)
app.command(cls=CausalCommand)(show)
app.command()(bench)
app.command(cls=CausalCommand)(tune)
app.command("new-backend")(new_backend)
app.add_typer(suite, name="conformance")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnx {distribution_version('attnx')}")
        raise typer.Exit


@app.callback()
def attnx_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Attention with one meaning on every backend."""
