"""`attnx compare`: one call on every backend, each judged against the float64 reference."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import attnx
from attnx.cli._files import KNOWN, Inputs, read_file, read_sample
from attnx.cli._judge import check_size, judge_all
from attnx.cli._options import (
    CallFile,
    Causal,
    Layout,
    Scale,
    Softcap,
    causal_value,
    console,
    one_line_errors,
    output_kept_clean,
    progress_bar,
)
from attnx.cli._records import plain
from attnx.cli._request import Options, Request
from attnx.cli._runner import Row, run_backend
from attnx.cli._tables import print_comparison
from attnx.errors import ArgumentError, ArgumentTypeError, AttnxError, UnknownBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx import BackendInfo

__all__ = ["compare"]


@one_line_errors
def compare(
    file: CallFile = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            show_default=False,
            help="Only this backend; repeat it, or give several with commas. "
            "Else ATTNX_BACKEND restricts the run.",
        ),
    ] = None,
    causal: Causal = None,
    layout: Layout = "bhsd",
    scale: Scale = None,
    softcap: Softcap = None,
    seed: Annotated[int, typer.Option(min=0, help="Of d_out, the gradient that flows in.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs a time is the median of.")] = 7,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a backend may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Run one call on every installed backend and compare with a float64 reference.

    Errors are multiples of the error bound: up to 1 agrees. Times are of native arrays, without
    conversion. The peak is the resident memory of a process of its own for each backend, above
    its warm baseline, over forward and backward.

    Exit status: 0 all that ran agree, 1 one disagrees or crashed or none could run, 2 wrong use.

    For example:

        attnx compare

        attnx compare --causal --backend numpy,torch

        attnx compare captured.safetensors --layout bshd --json
    """
    inputs = read_sample() if file is None else read_file(file)
    options = Options(causal_value(causal), layout, scale, softcap)
    request = Request(inputs.arrays, options, seed, repeat)
    with output_kept_clean():
        _check_call(inputs, request)
        infos = chosen(backend, os.environ.get("ATTNX_BACKEND"), attnx.backends())
    rows = run_all(request, infos, timeout)
    if as_json:
        typer.echo(json.dumps(_report(inputs, request, rows), indent=2))
    else:
        print_comparison(console(), _title(inputs, request), request, rows)
    ran = any(row.status in ("agrees", "disagrees") for row in rows)
    if not ran:
        typer.echo("attnx: no backend could run this call", err=True)
    if not ran or any(row.status in ("disagrees", "crashed") for row in rows):
        raise typer.Exit(1)


def chosen(
    named: Sequence[str] | None, variable: str | None, infos: Sequence[BackendInfo]
) -> list[BackendInfo]:
    """The backends to run: those named, else those in the variable, else all.

    Raises:
        UnknownBackend: for a name that no backend is registered under.
    """
    source, given = ("--backend", named) if named else ("ATTNX_BACKEND", [variable or ""])
    names = [name.strip() for text in given or () for name in text.split(",") if name.strip()]
    known = {info.name: info for info in infos}
    for name in names:
        if name not in known:
            installed = ", ".join(known) or "none"
            raise UnknownBackend(f"{source}: no backend named {name!r}; installed: {installed}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(infos)


def run_all(request: Request, infos: Sequence[BackendInfo], timeout: float) -> list[Row]:
    """Run the request on each backend in turn and judge what they computed."""
    with (
        progress_bar() as progress,
        tempfile.TemporaryDirectory(prefix="attnx-compare-") as scratch,
    ):
        folder = Path(scratch)
        request.save(folder)
        task = progress.add_task("starting", total=len(infos) + 1)
        rows, results = [], {}
        wide = request.arrays["q"].dtype.name == "float64"
        for info in infos:
            progress.update(task, description=info.name)
            row, arrays = run_backend(info, folder, timeout, wide=wide)
            rows.append(row)
            if row.status == "ran":
                results[row.backend] = arrays
            progress.advance(task)
        progress.update(task, description="float64 reference")
        tiers = {i.name: i.capabilities.scores for i in infos if i.capabilities is not None}
        verdicts = judge_all(request, results, tiers)
        progress.advance(task)
    for row in rows:
        if row.status == "ran":
            _settle(row, verdicts[row.backend])
    return rows


def _settle(row: Row, verdict: dict[str, Any]) -> None:
    row.errors = {name: found.ratio for name, found in verdict.items()}
    row.details = {name: found.detail for name, found in verdict.items()}
    wrong = [name for name, ratio in row.errors.items() if not ratio <= 1]
    row.status = "disagrees" if wrong else "agrees"
    if wrong:
        row.why = "; ".join(f"{name} {row.details[name]}" for name in wrong)


def _check_call(inputs: Inputs, request: Request) -> None:
    """Refuse a wrong call before any process starts, with the messages of the API itself."""
    (q, k, v), options = request.call()
    try:
        attnx.get_backend("numpy")  # ATTNX_PLUGINS may block it, and its array type with it
        attnx.explain(q, k, v, return_lse=True, gradient=True, backend="numpy", **options)
    except (ArgumentError, ArgumentTypeError) as error:
        raise ArgumentError(f"{inputs.source}: {error}") from error
    except AttnxError:
        return  # which backend cannot do it, or is not there, is what the table will say
    check_size(request)


def _title(inputs: Inputs, request: Request) -> str:
    name = inputs.about.get("title")
    source = f"{inputs.source} ({name})" if name else inputs.source
    arrays = request.arrays
    shapes = ", ".join(f"{n} {arrays[n].shape}" for n in KNOWN if n in arrays)
    return f"{source}\n{shapes}; {arrays['q'].dtype.name}, {request.options.layout}"


def _report(inputs: Inputs, request: Request, rows: Sequence[Row]) -> dict[str, Any]:
    arrays = request.arrays
    return {
        "source": inputs.source,
        "about": inputs.about,
        "arrays": {n: {"shape": list(a.shape), "dtype": a.dtype.name} for n, a in arrays.items()},
        "options": asdict(request.options),
        "seed": request.seed,
        "repeat": request.repeat,
        "agree": any(row.status == "agrees" for row in rows)
        and not any(row.status in ("disagrees", "crashed") for row in rows),
        "backends": [plain(asdict(row)) for row in rows],
    }
