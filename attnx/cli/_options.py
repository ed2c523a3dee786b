"""What several commands share: how options are spelled, and how an error leaves the program."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from attnx.errors import ArgumentError, AttnxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ALIGNMENTS",
    "CallFile",
    "Causal",
    "CausalCommand",
    "Layout",
    "Scale",
    "Softcap",
    "causal_value",
    "check_writable",
    "console",
    "integers",
    "interrupted_by_termination",
    "one_line_errors",
    "output_kept_clean",
    "progress_bar",
]

ALIGNMENTS = ("top_left", "bottom_right")
SQUARE = "square"
WIDE = 140  # of a table that goes into a file or a pipe

CallFile = Annotated[
    Path | None,
    typer.Argument(
        show_default=False,
        help="A .npz or .safetensors file with q, k, v and any of mask, bias, lengths, sinks. "
        "Without it: real activations that ship with attnx.",
    ),
]
Causal = Annotated[
    str | None,
    typer.Option(
        metavar="[top_left|bottom_right]",
        show_default=False,
        help="Hide later keys; an alignment is needed where Lq and Lk differ.",
    ),
]
Layout = Annotated[str, typer.Option(metavar="bhsd|bshd", help="The order of axes in the file.")]
Scale = Annotated[
    float | None, typer.Option(help="Factor on q · k; 1/sqrt(D) without it.", show_default=False)
]
Softcap = Annotated[
    float | None,
    typer.Option(help="Scores become softcap * tanh(s / softcap).", show_default=False),
]


def console() -> Console:
    """The console for tables; one that is no terminal gets room for whole cells."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=max(WIDE, found.width))


def progress_bar() -> Progress:
    """A bar on standard error, where that is a terminal, that leaves nothing behind."""
    screen = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=screen, transient=True, disable=not screen.is_terminal,
    )  # fmt: skip


def check_writable(path: Path | None) -> None:
    """Before a run of minutes, and not after it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a", encoding="utf-8").close()
        if not there:  # what fails later leaves no empty file
            path.unlink()
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def output_kept_clean() -> Iterator[None]:
    """What plugins print while they are loaded goes to standard error, not among the answer."""
    with redirect_stdout(sys.stderr), _native_output_to_stderr():
        yield


@contextmanager
def _native_output_to_stderr() -> Iterator[None]:
    """Alike what an extension writes to the descriptor itself, and what C keeps in its buffer."""
    try:
        kept = os.dup(1)
    except OSError:  # a process without standard output
        yield
        return
    with suppress(OSError):
        os.dup2(2, 1)
    try:
        yield
    finally:
        with suppress(Exception):  # no such function where C is another
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: with what it knows, and no worker left."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class CausalCommand(TyperCommand):
    """A command whose `--causal` may stand alone or name an alignment.

    Only an alignment is taken for its value, so that `--causal FILE` still means a file.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare `--causal` its value before the options are parsed."""
        spelled = []
        for position, argument in enumerate(args):
            spelled.append(argument)
            following = args[position + 1] if position + 1 < len(args) else ""
            if argument == "--causal" and following not in ALIGNMENTS:
                spelled.append(SQUARE)
        return super().parse_args(ctx, spelled)


def causal_value(option: str | None) -> bool | str:
    """What `attnx.attention` takes as `causal`."""
    if option is None or option == SQUARE:
        return option == SQUARE
    if option not in ALIGNMENTS:
        raise ArgumentError(f"--causal: expected nothing, top_left or bottom_right, got {option}")
    return option


def integers(option: str, text: str, *, unlimited: bool = False) -> tuple[Any, ...]:
    """`"1,8,128,64"` as integers; with `unlimited`, `none` stands for None.

    Raises:
        ArgumentError: for anything else, with the option's name.
    """
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    try:
        return tuple(
            None if unlimited and part.lower() == "none" else _natural(part) for part in parts
        )
    except ValueError:
        expected = "integers >= 0 with commas" + (", or none" if unlimited else "")
        raise ArgumentError(f"{option}: expected {expected}, got {text!r}") from None


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrong use ends with one line on stderr and exit status 2, never with a traceback."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AttnxError as error:
            print(f"attnx: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None

    return guarded
