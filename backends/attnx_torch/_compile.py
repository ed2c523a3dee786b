"""Attention inside `torch.compile` and `torch.export`.

A plain call becomes SDPA in the caller's graph, which every compiler of PyTorch knows. All else is
one operation that the compiler does not look into, `attnx::attend`: it computes as an eager call
does, by whichever backend was chosen, with a mask's structure and without a score kept. Under
`torch.func` inside a compiled program it is the formula, since a gradient through an operation of
Python's would come out wrong there.

What an operation takes is tensors, numbers and text, so a mask is taken apart for it: its tree as
text, its integers and its arrays in lists. A predicate is asked for all pairs beforehand.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from attnx import masks
from attnx.errors import UnsupportedError
from attnx.masks import And, Dense, Mask, Not, Or, Predicate, rebuild, walk
from attnx.plugin import Alibi, Call, CallClass, Reason
from attnx.tiling import Drop
from attnx_torch import _math, _sdpa
from attnx_torch._lane import transformed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compiled", "forward_by", "substitute"]

NODES: dict[str, type[Mask]] = {
    cls.__name__: cls for cls in masks.CLASSES if not issubclass(cls, (And, Or, Not, Predicate))
}

forward_by: dict[str, Callable[..., Any]] = {}
"""`forward` and `backward` of the core, by whom the operations compute."""


def substitute(original: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Have Dynamo inline `traced` where it meets `original`."""
    torch.compiler.substitute_in_graph(original)(traced)


def _transforming() -> bool:
    """Whether the program that is being compiled transforms the call; SDPA has no rules for it."""
    return bool(transformed()) or forward_ad._current_level >= 0


_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled(
    xp: Any, choice: str, backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Tensor | None]:
    """out and lse (None unless needed), traced."""
    cls = call.cls
    if _transforming():
        if backend != "torch":
            _refuse(backend)
        return _math.attend(xp, q, k, v, call)
    if backend == "torch" and _sdpa.may_serve(cls):
        return _in_graph(q, k, v, call), None
    return _opaque(xp, choice, q, k, v, call)


def _refuse(backend: str) -> NoReturn:
    reason = Reason(
        "transform", "torch.func inside a compiled program", "one or the other",
        "compile what is inside the transform, or call the transform outside the program",
    )  # fmt: skip
    message = (
        f"backend {backend!r} cannot do this call: {reason.option}={reason.got}; {reason.hint}"
    )
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(message)  # Dynamo can make no error with a constructor of its own
    raise UnsupportedError(message, backend=backend, reasons=(reason,))


def _in_graph(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    dtype, scale = q.dtype, None if call.cls.scale_sign is None else call.scale
    if q.device.type == "cpu" and dtype is torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    causal = call.mask is not None
    out = F.scaled_dot_product_attention(
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=call.cls.grouped
    )
    return out if out.dtype is dtype else out.to(dtype)


def _opaque(
    xp: Any, choice: str, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Tensor | None]:
    cls = call.cls
    leaves: list[Tensor] = []
    numbers: list[int] = []
    mask = call.mask
    if mask is not None and any(isinstance(node, Predicate) for node in walk(mask)):
        mask = Dense(_math.visible_pairs(xp, q, call))
    tree = "" if mask is None else _write(mask, leaves, numbers)
    drop = [] if call.dropout is None else _numbers(call.dropout, leaves)
    if call.alibi is not None:
        tree = f"{tree};{_write_alibi(call.alibi, leaves)}"
    wanted = "1" if cls.need_lse or cls.gradient is not None else "0"
    flags = ("1" if cls.assume_finite else "0") + wanted
    scale = None if cls.scale_sign is None else call.scale  # by default no symbol of the head size
    out, lse = torch.ops.attnx.attend(
        q, k, v, call.bias, call.sinks, leaves, numbers, drop, tree, scale, call.softcap,
        choice, flags,
    )  # fmt: skip
    return out, (lse if cls.need_lse else None)


def _numbers(drop: Drop, leaves: list[Tensor]) -> list[int]:
    """Threshold, seed in two words, four offsets; -1 stands for an array among the leaves."""
    leaves.extend(drop.arrays)
    words = [x if isinstance(x, int) else -1 for x in drop.words]
    return [drop.threshold, *words, *[x if isinstance(x, int) else -1 for x in drop.offset]]


def _drop_of(numbers: list[int], leaves: list[Tensor]) -> Drop | None:
    """The dropout that these numbers and the arrays left in the list stand for."""
    if not numbers:
        return None
    threshold, low, high, *offset = numbers
    seed: Any = leaves.pop(0) if low < 0 else low + (high << 32)
    b, h, i, j = (leaves.pop(0) if n < 0 else n for n in offset)
    return Drop(threshold, seed, (b, h, i, j))


def _write_alibi(alibi: Alibi, leaves: list[Tensor]) -> str:
    """An alignment, and which of its arrays are given; they go to the list."""
    leaves.extend(alibi.arrays)
    return " ".join([alibi.align or "-", *alibi.given()])


def _alibi_of(text: str, leaves: list[Tensor]) -> Alibi | None:
    """The record that this text and the arrays left in the list stand for."""
    if not text:
        return None
    align, *names = text.split(" ")
    given = {name: leaves.pop(0) for name in names}
    return Alibi(**given, align=None if align == "-" else align)


def _write(mask: Mask, leaves: list[Tensor], numbers: list[int]) -> str:
    """A mask as text; its arrays and integers go to the lists, in the order of the text."""
    if isinstance(mask, And | Or):
        inner = ",".join([_write(part, leaves, numbers) for part in mask.parts])
        return f"{'And' if isinstance(mask, And) else 'Or'}({inner})"
    if isinstance(mask, Not):
        return f"Not({_write(mask.part, leaves, numbers)})"
    marks = []
    for value in (*mask._static(), *mask._arrays()):
        if value is None:
            marks.append("-")
        elif isinstance(value, str):
            marks.append(value)
        elif isinstance(value, torch.Tensor):
            leaves.append(value)
            marks.append("*")
        else:
            numbers.append(value)
            marks.append("#")
    return f"{type(mask).__name__}[{' '.join(marks)}]"


def _read(text: str, leaves: list[Any], numbers: list[Any]) -> tuple[Mask, str]:
    """The mask that the text begins with, and the rest of the text; the lists are used up."""
    at = min(i for i in (text.find("("), text.find("[")) if i >= 0)
    name, opened, text = text[:at], text[at], text[at + 1 :]
    if opened == "(":
        parts = []
        while True:
            part, text = _read(text, leaves, numbers)
            parts.append(part)
            sign, text = text[0], text[1:]
            if sign == ")":
                break
        made: Mask = Not(parts[0]) if name == "Not" else (And if name == "And" else Or)(parts)
        return made, text
    inner, text = text.split("]", 1)
    values: list[Any] = []
    for mark in inner.split(" "):
        if mark == "-":
            values.append(None)
        elif mark == "*":
            values.append(leaves.pop(0))
        else:
            values.append(numbers.pop(0) if mark == "#" else mark)
    cls = NODES[name]
    static = len(cls._static_fields)
    made = rebuild(cls, tuple(values[:static]), tuple(values[static:]), "")
    object.__setattr__(made, "structure", made._key())
    return made, text


def _call_of(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    leaves: list[Tensor], numbers: list[int], drop: list[int], tree: str, scale: float | None,
    softcap: float | None,
    flags: str,
) -> Call:  # fmt: skip
    """The record of the call, as an eager one is given to a backend."""
    (B, Hq, Lq, D), (_, Hk, Lk, _), Dv = q.shape, k.shape, v.shape[-1]
    left = list(leaves)
    tree, _, slanted = tree.partition(";")
    mask = _read(tree, left, list(numbers))[0] if tree else None
    dropped = _drop_of(drop, left)
    alibi = _alibi_of(slanted, left)
    wanted = flags[1] == "1"
    cls = CallClass(
        "torch", str(q.device), str(q.dtype)[6:], D, Dv, Hq != Hk, Lq == Lk,
        mask=None if mask is None else mask.structure,
        scale_sign=None if scale is None else (scale > 0) - (scale < 0),
        softcap=softcap is not None,
        bias=None if bias is None else (str(bias.dtype)[6:], tuple(n != 1 for n in bias.shape)),
        sinks=None if sinks is None else str(sinks.dtype)[6:],
        alibi=alibi is not None, dropout=dropped is not None, need_lse=wanted,
        assume_finite=flags[0] == "1", gradient="vjp" if wanted else None,
    )  # fmt: skip
    factor = 1.0 / math.sqrt(D) if scale is None else scale
    return Call(cls, B, Hq, Hk, Lq, Lk, D, Dv, factor, softcap, mask, bias, sinks, dropped, alibi)


@torch.library.custom_op("attnx::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    leaves: list[Tensor], numbers: list[int], drop: list[int], tree: str, scale: float | None,
    softcap: float | None,
    choice: str, flags: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _call_of(q, k, v, bias, sinks, leaves, numbers, drop, tree, scale, softcap, flags)
    with torch.no_grad():
        out, lse = forward_by["forward"](choice, q, k, v, call)
    out = out.contiguous()
    return out, lse.contiguous() if flags[1] == "1" else q.new_empty(0, dtype=_wide(q))


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = q.shape[:-1] if rest[-1][1] == "1" else (0,)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=_wide(q))


@torch.library.custom_op("attnx::attend_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, sinks: Tensor | None, leaves: list[Tensor], numbers: list[int],
    drop: list[int], tree: str, scale: float | None, softcap: float | None, choice: str, flags: str,
) -> list[Tensor]:  # fmt: skip
    call = _call_of(q, k, v, bias, sinks, leaves, numbers, drop, tree, scale, softcap, flags)
    arrays = (q, k, v, out, lse, d_out, d_lse)
    with torch.no_grad():
        made = forward_by["backward"](choice, arrays, call)
    return [q.new_empty(0) if x is None else x.contiguous() for x in made]


@_attend_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    inputs = (q, k, v, bias, sinks)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, sinks, leaves, *ctx.rest = inputs
    # PyTorch compares structures, in which an empty list of numbers is no leaf.
    ctx.lists = [None] * len(leaves), *([] if x == [] else None for x in ctx.rest[:2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, bias, sinks, *leaves)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    nothing = (*[None] * 5, *ctx.lists, *[None] * 5)
    if d_out is None and d_lse is None:
        return nothing
    q, k, v, out, lse, bias, sinks, *leaves = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    made = torch.ops.attnx.attend_backward(
        d_out, d_lse, q, k, v, out, lse, bias, sinks, leaves, *ctx.rest
    )
    return (
        *made[:3], None if bias is None else made[3], None if sinks is None else made[4],
        *nothing[5:],
    )  # fmt: skip


_attend.register_autograd(_differentiate, setup_context=_setup)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32
