"""`attnx explain`: shapes and options in, every backend's reasons out; no attention is computed."""

from __future__ import annotations

import functools
import json
import operator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import attnx
from attnx.cli._options import (
    ALIGNMENTS,
    causal_value,
    console,
    integers,
    one_line_errors,
    output_kept_clean,
)
from attnx.cli._records import explanation_record
from attnx.errors import ArgumentError, ArgumentTypeError, UnavailableBackend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attnx.plugin import Lane

__all__ = ["DTYPES", "explain", "lane_named", "zeros"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
Text = Annotated[str | None, typer.Option(show_default=False)]


def _text(help_: str, metavar: str) -> Any:
    return typer.Option(help=help_, metavar=metavar, show_default=False)


@one_line_errors
def explain(
    shape: Annotated[str | None, _text("The shape of q, k and v.", "B,H,L,D")] = None,
    q: Annotated[str | None, _text("The shape of q, where they differ.", "B,H,L,D")] = None,
    k: Annotated[str | None, _text("The shape of k; q's without it.", "B,H,L,D")] = None,
    v: Annotated[str | None, _text("The shape of v; k's without it.", "B,H,L,D")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    framework: Annotated[str, typer.Option(help="Whose arrays: numpy, torch, jax, …")] = "numpy",
    backend: Annotated[
        str | None, _text("Ask for this backend, as backend= does; several with commas.", "NAME")
    ] = None,
    causal: Annotated[
        str | None, _text("Hide later keys, by this alignment.", "[top_left|bottom_right]")
    ] = None,
    window: Annotated[
        str | None, _text("Keys before and after that are seen; none for all.", "L,R[,ALIGN]")
    ] = None,
    lengths: Annotated[str | None, _text("Real keys of each batch entry.", "N,N,…")] = None,
    mask: Annotated[str | None, _text("A boolean mask of this shape.", "Lq,Lk")] = None,
    bias: Annotated[str | None, _text("A bias of this shape.", "B,H,Lq,Lk")] = None,
    bias_dtype: Annotated[
        str | None, _text("The dtype of bias and sinks; that of q without it.", "DTYPE")
    ] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With a sink for each head.")] = False,
    scale: Annotated[float | None, _text("Factor on q · k.", "FLOAT")] = None,
    softcap: Annotated[float | None, _text("Cap of the scores.", "FLOAT")] = None,
    layout: Annotated[str, typer.Option(metavar="bhsd|bshd", help="The order of axes.")] = "bhsd",
    return_lse: Annotated[bool, typer.Option("--return-lse", help="With lse.")] = False,
    gradient: Annotated[bool, typer.Option("--gradient", help="With gradients.")] = False,
    assume_finite: Annotated[
        bool, typer.Option("--assume-finite", help="Nothing hidden is NaN or infinite.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say which backend would do a call, by which route, and why the others would not.

    Exit status: 0 a backend would do it, 1 none would, 2 wrong use.

    For example:

        attnx explain --shape 1,8,4096,64 --causal --framework torch

        attnx explain --q 1,32,1,128 --k 1,8,8192,128 --causal bottom_right --softcap 30

        attnx explain --shape 2,8,512,64 --window 127,0 --lengths 500,320 --gradient --json
    """
    with output_kept_clean():
        lane = lane_named(framework)
    shapes = _shapes(shape, q, k, v)
    arrays = [zeros(lane, size, dtype) for size in shapes]
    masks: list[attnx.masks.Mask] = []
    if window is not None:
        masks.append(_window(window, causal_value(causal)))
    if lengths is not None:
        masks.append(_lengths(integers("--lengths", lengths), shapes[0]))
    if mask is not None:
        masks.append(attnx.Dense(zeros(lane, integers("--mask", mask), "bool")))
    combined = functools.reduce(operator.and_, masks) if masks else None
    beside = bias_dtype or dtype
    heads = shapes[0][-2 if layout == "bshd" else -3] if len(shapes[0]) > 2 else 1
    found = attnx.explain(
        *arrays,
        mask=combined,
        causal=causal_value(causal),
        bias=None if bias is None else zeros(lane, integers("--bias", bias), beside),
        sinks=zeros(lane, (heads,), beside) if sinks else None,
        scale=scale,
        softcap=softcap,
        layout=layout,
        return_lse=return_lse,
        assume_finite=assume_finite,
        backend=_backend(backend),
        gradient=gradient,
    )
    if as_json:
        typer.echo(json.dumps(explanation_record(found), indent=2))
    else:
        console().print(found)
    if found.choice is None:
        raise typer.Exit(1)


def lane_named(framework: str) -> Lane:
    """The lane of a framework, from any backend of it that loads here."""
    infos = attnx.backends()
    mine = [info for info in infos if framework in (info.framework, info.name)]
    if not mine:
        known = ", ".join(dict.fromkeys(info.framework or info.name for info in infos))
        raise ArgumentError(f"--framework: expected one of {known}, got {framework!r}")
    for info in mine:
        if info.status == "available":
            return attnx.get_backend(info.name).lane
    raise UnavailableBackend(f"--framework {framework}: {mine[0].reason}")


def _backend(option: str | None) -> Any:
    names = [name.strip() for name in (option or "").split(",") if name.strip()]
    return names[0] if len(names) == 1 else tuple(names) or None


def _shapes(shape: str | None, *each: str | None) -> list[tuple[int, ...]]:
    if shape is None and each[0] is None:
        raise ArgumentError("expected --shape B,H,L,D, or --q, --k and --v")
    found = []
    for name, text in zip("qkv", each, strict=True):
        if text is not None:
            found.append(integers(f"--{name}", text))
        elif shape is not None:
            found.append(integers("--shape", shape))
        else:
            found.append(found[-1])
    return found


def _window(text: str, causal: bool | str) -> attnx.Window:
    """`L,R` stands where `causal` does; `L,R,bottom_right` says where by itself."""
    sizes, align = text, causal if isinstance(causal, str) else None
    for name in ALIGNMENTS:
        if text.endswith(f",{name}"):
            sizes, align = text.removesuffix(f",{name}"), name
    sides = integers("--window", sizes, unlimited=True)
    if len(sides) != 2:
        raise ArgumentError(f"--window: expected two sizes L,R, got {text!r}")
    return attnx.Window(*sides, align)


def _lengths(counts: tuple[int, ...], q: tuple[int, ...]) -> attnx.Lengths:
    """One number for all, or one a batch entry in row-major order."""
    if len(counts) == 1:
        return attnx.Lengths(counts[0])
    batch = q[:-3]
    array = np.array(counts, dtype=np.int32)
    if array.size == int(np.prod(batch, dtype=int)) and batch:
        array = array.reshape(batch)
    return attnx.Lengths(array.tolist())


def zeros(lane: Lane, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of the framework; only its shape and dtype are looked at."""
    array: NDArray[Any] = np.zeros(shape, _dtype(dtype))
    made = lane.from_numpy(array)
    if lane.dtype_name(made) != dtype:
        hint = "; set JAX_ENABLE_X64=1" if lane.name == "jax" else ""
        raise ArgumentTypeError(f"{lane.name} has no {dtype} here{hint}")
    return made


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    if name not in (*DTYPES, "bool"):
        raise ArgumentTypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return np.dtype(name)
