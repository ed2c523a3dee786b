"""What a compiler that reads Python (`torch.compile`) reads in place of functions of the core.

Here is no look-up, lock, cache or hash of a size: sizes may be symbols, and whatever is read
becomes a guard of the compiled program. The choice of a backend is one function of text that the
compiler calls while it compiles; the text holds who was asked, so a program is compiled once for
each choice it is called under, and found again after. What was registered is part of it through
`generation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from attnx import _attention, _check_alibi, _choice, _dispatch
from attnx._attention import outward, plan_for
from attnx._call import CallClass, Options, prepare
from attnx._choice import Choice, asked, normalize, process
from attnx._registry import registry
from attnx.errors import AttnxError, UnsupportedError

if TYPE_CHECKING:
    from attnx._call import Call
    from attnx._lane import Lane
    from attnx.plugin import Gradients

__all__ = ["attention", "install"]


class _Asked:
    """The choice of this thread or task as a compiler can read and guard it: by a getter in C."""

    key = property(asked.get)


class _State:
    """What the traced functions read; attributes of one object are guarded one by one."""

    lane: Lane
    generation: str = "0"
    override: str | None = None
    """The choice of a `use_backend` inside the compiled program."""


reader = _Asked()
state = _State()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    assume_finite: bool = False,
    backend: Any = None,
) -> Any:
    """`attnx.attention`, as a compiler reads it."""
    options = Options(
        mask, causal, bias, scale, softcap, sinks, dropout, layout, return_lse, assume_finite
    )
    lane = state.lane
    ready = prepare(lane, q, k, v, options)
    call = ready.call
    # Comparisons of sizes may be symbols, also as `bool` gives them; a branch decides and guards.
    cls = call.cls._replace(
        grouped=_decided(call.Hq != call.Hk), square=_decided(call.Lq == call.Lk), traced=True
    )
    call = call._replace(cls=cls)
    choice = _asked(backend)
    name = choose(state.generation, choice, _text(cls, same=_decided(call.Dv == call.D)))
    if name.startswith("!"):
        _refuse(name[1:])
    made = lane.compiled(choice, name, ready.q, ready.k, ready.v, call)
    return outward(lane, ready._replace(call=call), *made)


def _decided(comparison: bool) -> bool:
    return True if comparison else False  # noqa: SIM210


def _refuse(message: str) -> NoReturn:
    raise UnsupportedError(message)


def _refuse_in_a_program(message: str) -> NoReturn:
    """An error that a compiler can make while it reads; outside the program it is the other one."""
    raise NotImplementedError(message)


def _refuse_slopes() -> NoReturn:
    """The same for the slopes of an `Alibi`."""
    raise NotImplementedError(_check_alibi.NO_GRADIENT)


def _requested(backend: Any = None) -> NoReturn:
    """What all public calls but `attention` ask; they hand out plans, pullbacks and reports."""
    raise NotImplementedError(
        "attention_vjp, attention_weights, plan and explain cannot be part of a compiled program; "
        "call them outside it. attnx.attention can, and the compiler differentiates it"
    )


def _asked(backend: Any) -> str:
    """Who is asked, as text: `requested`, as a compiler reads it."""
    found = state.override
    if found is None:
        found = reader.key
        if found is reader:
            found = None
    if found is None:
        found = process.key
    if backend is None:
        return found
    items = normalize(backend, "backend") or ()
    names = ",".join([x if isinstance(x, str) else f"@{x.name}" for x in items])
    rest = found.split(";")
    return f"{names};{rest[1]};{rest[2]}"


def _text(cls: CallClass, *, same: bool) -> str:
    """A class without its sizes, as text."""
    bias = ""
    if cls.bias is not None:
        bias = cls.bias[0] + ":" + "".join(["1" if full else "0" for full in cls.bias[1]])
    flags = "".join(
        [
            "1" if x else "0"
            for x in (
                same, cls.grouped, cls.square, cls.softcap, cls.dropout, cls.need_lse,
                cls.assume_finite, cls.gradient is not None, cls.alibi,
            )
        ]
    )  # fmt: skip
    sign = "" if cls.scale_sign is None else f"{cls.scale_sign}"
    parts = (
        cls.framework, cls.device, cls.dtype, cls.layout, cls.mask or "", sign, bias,
        cls.sinks or "", flags,
    )  # fmt: skip
    return "/".join(parts)


def _class_of(text: str) -> CallClass:
    framework, device, dtype, layout, mask, sign, bias, sinks, flags = text.split("/")
    on = [flag == "1" for flag in flags]
    same, grouped, square, softcap, dropout, need_lse, finite, gradient, alibi = on
    kind, _, axes = bias.partition(":")
    return CallClass(
        framework, device, dtype, 1, 1 if same else 2, grouped, square, layout, mask or None,
        int(sign) if sign else None, softcap,
        (kind, tuple(axis == "1" for axis in axes)) if bias else None, alibi, sinks or None,
        dropout, need_lse, finite, "framework" if gradient else None, True,
    )  # fmt: skip


def _choice_of(key: str) -> Choice:
    names, fallback, transfer = key.split(";")
    items = tuple(names.split(",")) if names else None
    return Choice(items, "a compiled program", fallback, transfer == "transfer")


def choose(generation: str, key: str, text: str) -> str:
    """The chosen backend's name, or `!` and why there is none; called during compilation."""
    try:
        chosen = plan_for(_choice_of(key), _class_of(text))
    except AttnxError as error:
        return f"!{error}"
    return chosen.backend


choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forward(key: str, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    return plan_for(_choice_of(key), call.cls).forward(q, k, v, call)


def _backward(key: str, arrays: Any, call: Call) -> Gradients:
    return plan_for(_choice_of(key), call.cls).backward(arrays, call)


def _lane_of(q: Any, name: str = "q") -> Lane:
    """`lane_of`, as a compiler reads it."""
    return state.lane


def _entered(block: Any) -> None:
    """Entering `use_backend` inside a compiled program."""
    block._tokens.append(state.override)
    state.override = block._key


def _left(block: Any) -> None:
    """Leaving it."""
    state.override = block._tokens.pop()


def _registered() -> None:
    state.generation = str(registry.generation)


def install(framework: str) -> None:
    """Have a framework's compiler read these functions; once, when it is imported."""
    lane = state.lane = registry.lane(framework)
    _attention.traced[:] = [attention]
    _registered()
    registry.on_change.append(_registered)
    lane.compile_with(_forward, _backward)
    lane.read_instead(_attention.attention, attention)
    lane.read_instead(_dispatch.lane_of, _lane_of)
    lane.read_instead(_refuse, _refuse_in_a_program)
    lane.read_instead(_choice.requested, _requested)
    lane.read_instead(_check_alibi.refuse_gradient, _refuse_slopes)
    lane.read_instead(_choice._entered, _entered)
    lane.read_instead(_choice._left, _left)
