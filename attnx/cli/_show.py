"""`attnx show`: the attention weights of one call, in the terminal, as a picture or as a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from attnx import viz
from attnx.cli._files import Inputs, read_file, read_sample
from attnx.cli._options import (
    CallFile,
    Causal,
    Layout,
    Scale,
    Softcap,
    causal_value,
    check_writable,
    console,
    integers,
    one_line_errors,
)
from attnx.cli._request import Options, Request
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.viz._record import SUFFIXES

if TYPE_CHECKING:
    from attnx.viz import Heatmap

__all__ = ["show"]

STRONGEST = 4
"""Keys of a row that the terminal names."""


@one_line_errors
def show(
    file: CallFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            show_default=False,
            help="Write a page (.html) or a picture (.png, .svg), of all heads if --head is not "
            "given. Without it: the strongest keys of each query, in the terminal.",
        ),
    ] = None,
    head: Annotated[
        str, typer.Option(metavar="N,...", show_default=False, help="Only these query heads.")
    ] = "",
    entry: Annotated[int, typer.Option(help="The batch entry.")] = 0,
    rows: Annotated[
        str, typer.Option(metavar="START,STOP", show_default=False, help="Only these queries.")
    ] = "",
    columns: Annotated[
        str, typer.Option(metavar="START,STOP", show_default=False, help="Only these keys.")
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Names of the queries, and of the keys if there are as many: one token a line, or "
            "a .json list. Else those in the file's metadata.",
        ),
    ] = None,
    key_tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Names of the keys, alike."),
    ] = None,
    causal: Causal = None,
    layout: Layout = "bhsd",
    scale: Scale = None,
    softcap: Softcap = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", "-b", metavar="NAME", show_default=False, help="Who computes."),
    ] = None,
    title: Annotated[str, typer.Option(show_default=False, help="What the picture says.")] = "",
) -> None:
    """Show who attends to whom: the weights of one call.

    Hidden pairs are hatched, so that they are not mistaken for small weights. The page needs
    nothing but a browser: it has all chosen heads, and says what lies under the pointer.

    Exit status: 0, 2 wrong use.

    For example:

        attnx show

        attnx show --head 0,3 --entry 2 --out attention.html

        attnx show captured.safetensors --causal --tokens words.txt --out attention.png
    """
    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"--out: expected a name that ends in {', '.join(SUFFIXES)}, got {out}")
    inputs = read_sample() if file is None else read_file(file)
    request = Request(inputs.arrays, Options(causal_value(causal), layout, scale, softcap))
    (q, k, _), options = request.call()
    heads = integers("--head", head) if head else None
    try:
        seen = viz.heatmap(
            q, k, entry=entry, rows=_range("--rows", rows), columns=_range("--columns", columns),
            heads=(0,) if heads is None and out is None else heads,
            tokens=_tokens("--tokens", tokens) if tokens else _own_tokens(inputs, entry, q),
            key_tokens=_tokens("--key-tokens", key_tokens) if key_tokens else None,
            title=title or _title(inputs, entry),
            backend=backend, **options,
        )  # fmt: skip
    except (ArgumentError, ArgumentTypeError) as error:
        raise ArgumentError(f"{inputs.source}: {error}") from error
    if out is None:
        _print(seen, q.shape[-3 if layout == "bhsd" else -2] if q.ndim > 2 else 1)
        return
    check_writable(out)
    seen.save(out)
    typer.echo(f"{out}: {seen!r}")


def _title(inputs: Inputs, entry: int) -> str:
    name = inputs.about.get("title")
    return f"{name if isinstance(name, str) else Path(inputs.source).name}, entry {entry}"


def _range(option: str, text: str) -> tuple[Any, ...] | None:
    if not text:
        return None
    found = integers(option, text.replace(":", ","))
    if len(found) != 2:
        raise ArgumentError(f"{option}: expected START,STOP, got {text!r}")
    return found


def _tokens(option: str, path: Path) -> list[str]:
    """The tokens of a file: a JSON list, or a line each."""
    listed = path.suffix.lower() == ".json"
    try:
        text = path.read_bytes().decode("utf-8")
        found = json.loads(text) if listed else None
    except OSError as error:
        raise ArgumentError(f"{option}: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        kind = "UTF-8 or JSON" if listed else "UTF-8"
        raise ArgumentError(f"{option}: {path}: not readable as {kind}: {error}") from None
    if listed:
        if not isinstance(found, list):
            raise ArgumentError(f"{option}: {path}: expected a list of strings")
        return found
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _own_tokens(inputs: Inputs, entry: int, q: Any) -> Any:
    """The entry's tokens by the file itself: `tokens` in its metadata, a list for each entry."""
    listed = inputs.about.get("tokens")
    if listed is None:
        return None
    entries = math.prod(q.shape[:-3])
    if not isinstance(listed, list) or len(listed) != entries:
        raise ArgumentError(
            f"{inputs.source}: tokens in its metadata: expected one list for each of {entries} "
            "batch entries; name them with --tokens instead"
        )
    return listed[entry] if 0 <= entry < entries else None


def _print(seen: Heatmap, total: int) -> None:
    """Each query of each head, with its strongest keys."""
    screen = console()
    for place, head in enumerate(seen.heads):
        name = f"{seen.title}\nhead {head} of {total}"
        table = Table(title=escape(name), title_justify="left", title_style="")
        table.add_column("query", overflow="fold")
        table.add_column("sees", justify="right")
        for n in range(STRONGEST):
            table.add_column("strongest keys" if n == 0 else "", overflow="fold")
        for i in range(seen.weights.shape[1]):
            sees = int(seen.visible[place, i].sum())
            found = _strongest(seen, place, i)
            table.add_row(_named(seen.queries, i, seen.rows[0]), str(sees or "nothing"), *found)
        screen.print(table)
    for note in seen.notes:
        screen.print(escape(f"{note}."))
    if len(seen.heads) < total:
        screen.print("Other heads: --head; all of them on a page: --out attention.html")


def _strongest(seen: Heatmap, place: int, i: int) -> list[str]:
    row, visible = seen.weights[place, i], seen.visible[place, i]
    size = np.where(visible, np.where(np.isfinite(row), row, np.inf), -np.inf)
    order = np.argsort(-size, kind="stable")[:STRONGEST]
    return [
        f"{_named(seen.keys, int(j), seen.columns[0])} {row[j]:.2f}" for j in order if visible[j]
    ]


def _named(labels: tuple[str, ...] | None, n: int, start: int) -> str:
    return str(n + start) if labels is None else escape(f"{n + start} {labels[n]}")
