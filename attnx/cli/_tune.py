"""`attnx tune`: measure ahead what the policy `fastest` would measure at a first call."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

import attnx
from attnx.cli._compare import chosen
from attnx.cli._explain import DTYPES, lane_named, zeros
from attnx.cli._options import (
    Causal,
    causal_value,
    console,
    integers,
    interrupted_by_termination,
    one_line_errors,
    progress_bar,
)
from attnx.cli._records import plain
from attnx.errors import ArgumentError
from attnx.plugin import CallClass, Lane
from attnx.policies import fastest
from attnx.policies._fastest import LENGTHS, times
from attnx.policies._store import Store
from attnx.tracing import short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnx.policies import Measured
    from attnx.policies._store import Stored

__all__ = ["tune"]


def _text(help_: str, metavar: str) -> Any:
    return typer.Option(help=help_, metavar=metavar, show_default=True)


@one_line_errors
def tune(
    framework: Annotated[str, _text("Whose arrays: numpy, torch, jax, …", "NAME")] = "numpy",
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME,…",
            show_default=False,
            help="The candidates; all that are available without it.",
        ),
    ] = "",
    dtype: Annotated[str, _text("One or several with commas.", "NAME,…")] = "float32",
    head_size: Annotated[str, _text("D, one or several with commas.", "N,…")] = "64",
    causal: Causal = None,
    grouped: Annotated[
        bool, typer.Option("--grouped", help="Fewer key heads than query heads.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="One query against many keys: Lq and Lk differ.")
    ] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="With a softcap.")] = False,
    layout: Annotated[str, _text("The order of axes.", "bhsd|bshd")] = "bhsd",
    gradient: Annotated[
        bool, typer.Option("--gradient", help="With gradients, by every way to them.")
    ] = False,
    lengths: Annotated[str, _text("As the policy has them: fastest(lengths=…).", "N,…")] = ",".join(
        map(str, LENGTHS)
    ),
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing; print what is kept of this machine.")
    ] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Measure nothing; forget what is kept.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure the backends at classes of calls on this machine, for the policy `fastest`.

    What has been measured is not measured again, unless a version has changed. Each class is kept
    when it is done, so an interrupted run loses one class at most.

    Exit status: 0 every class has an order, 1 one has none or a candidate failed, 2 wrong use,
    130 interrupted.

    For example:

        attnx tune --causal --backend numpy,torch,jax

        attnx tune --framework torch --dtype float32,bfloat16 --head-size 64,128 --gradient

        ATTNX_POLICY=fastest:numpy,torch,jax attnx explain --shape 1,8,512,64 --causal top_left
    """
    policy = fastest(lengths=integers("--lengths", lengths))
    if show and clear:
        raise ArgumentError("--show and --clear: expected one of them")
    if clear:
        _clear(Store(), as_json=as_json)
        return
    if show:
        _show(Store(), as_json=as_json)
        return
    lane = lane_named(framework)
    names = _candidates(backend)
    given: dict[str, Any] = {"causal": causal_value(causal), "layout": layout}
    given |= {"softcap": 30.0} if softcap else {}
    classes = [
        call
        for kind in _words("--dtype", dtype, DTYPES)
        for D in integers("--head-size", head_size)
        for call in _classes(lane, kind, D, grouped, decode, gradient, given)
    ]
    rows: list[tuple[CallClass, dict[str, Measured]]] = []
    interrupted = False
    with interrupted_by_termination(), progress_bar() as progress:
        task = progress.add_task("tune", total=len(classes))
        try:
            for call in classes:
                progress.update(task, description=short(call))
                rows.append((call, policy.tune(call, names)))
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        report = {"interrupted": interrupted, "classes": [_record(*row, policy) for row in rows]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(
            [
                Row(short(call), policy.lengths, found, "" if found else policy.lacking(call))
                for call, found in rows
            ]
        )
    if interrupted:
        raise typer.Exit(130)
    if any(not found or any(m.failure for m in found.values()) for _, found in rows):
        raise typer.Exit(1)


def _words(option: str, text: str, known: Sequence[str]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ArgumentError(f"{option}: expected one of {', '.join(known)}, got {word!r}")
    if not words:
        raise ArgumentError(f"{option}: expected one of {', '.join(known)}, got nothing")
    return words


def _candidates(option: str) -> list[str]:
    """Those named, or every backend that is available here."""
    named = option.strip(", ")
    infos = chosen([option], None, attnx.backends())
    found = [info.name for info in infos if named or info.status == "available"]
    if len(found) < 2:
        raise ArgumentError(f"--backend: expected at least two candidates, got {found}")
    return found


def _classes(
    lane: Lane, dtype: str, D: int, grouped: bool, decode: bool, gradient: bool,
    options: dict[str, Any],
) -> Iterator[CallClass]:  # fmt: skip
    """The classes that calls with these options have."""
    heads = (4, 2 if grouped else 4)
    sizes = [(4, 1 if decode else 8), (heads[1], 8), (heads[1], 8)]
    if options["layout"] == "bshd":
        sizes = [(L, H) for H, L in sizes]
    arrays = [zeros(lane, (1, *size, D), dtype) for size in sizes]
    call = attnx.explain(*arrays, **options, gradient=gradient).call
    yield call
    if gradient and type(lane).wants_gradient is not Lane.wants_gradient:
        yield call._replace(gradient="framework", need_lse=False)


class Row(NamedTuple):
    """One class in the table."""

    title: str
    lengths: tuple[int, ...]
    found: dict[str, Measured]
    fault: str = ""


def _row_of(stored: Stored) -> Row:
    if stored.fault:
        return Row(stored.path.name, (), {}, f"cannot be used: {stored.fault}")
    return Row(short(CallClass(**stored.call)), stored.lengths, stored.backends)


def _print(rows: Sequence[Row]) -> None:
    table = Table()
    for name in ("class of calls", "backend", "measured", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        ranked = sorted(row.found.items(), key=lambda item: item[1].mean)
        title = escape(row.title)
        for name, kept in ranked:
            ratio = kept.mean / ranked[0][1].mean
            verdict = "fastest" if name == ranked[0][0] else f"{ratio:.3g}x"
            said = (
                ("-", f"failed: {kept.failure}")
                if kept.failure
                else (times(kept, row.lengths), verdict)
            )
            table.add_row(title, escape(name), *map(escape, said))
            title = ""
        if not ranked:
            table.add_row(title, "-", "-", escape(row.fault))
    console().print(table)


def _record(call: CallClass, found: dict[str, Measured], policy: fastest) -> dict[str, Any]:
    """One class as JSON; the order is that of the policy."""
    why = "" if found else policy.lacking(call)
    return {**_measured(call, policy.lengths, found), "why": why}


def _shown(stored: Stored) -> dict[str, Any]:
    found = _measured(stored.call, stored.lengths, stored.backends)
    return {"file": stored.path.name, **found, "fault": stored.fault}


def _measured(call: Any, lengths: Sequence[int], found: dict[str, Measured]) -> dict[str, Any]:
    return {
        "call": plain(call),
        "lengths": list(lengths),
        "order": sorted(found, key=lambda name: found[name].mean),
        "backends": {name: plain(kept) for name, kept in found.items()},
    }


def _show(store: Store, *, as_json: bool) -> None:
    kept = list(store.everything())
    if as_json:
        classes = [_shown(each) for each in kept]
        typer.echo(json.dumps({"folder": str(store.folder), "classes": classes}, indent=2))
    else:
        typer.echo(f"kept in {store.folder}")
        _print([_row_of(each) for each in kept])


def _clear(store: Store, *, as_json: bool) -> None:
    try:
        count = store.clear()
    except OSError as error:
        raise ArgumentError(f"--clear: {error}") from None
    if as_json:
        typer.echo(json.dumps({"removed": count}))
    else:
        typer.echo(f"removed {count} file(s) below {store.folder}")
