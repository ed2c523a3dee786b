"""What a framework does to functions changes no answer: compiling, mapping, differentiating (S6.5).

A backend declares what it can be seen through; the rest must raise, and never give a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import attnx
from attnx.errors import UnsupportedError
from attnx_conformance._witness import Witness
from attnx_conformance.subject import BackendSubject

from ._derivatives import forward_mode, second_derivatives
from ._kit import FaultError, Kit
from ._probe import Probe
from ._transformed import Call, calls, slanted, stacked

__all__ = ["PROBES"]


def _framework(kit: Kit, name: str) -> Any:
    """A transform of the subject's framework."""
    found = getattr(kit.lane.transforms(), name)
    if found is None:
        kit.inapplicable(f"{kit.lane.name} has no {name}")
    return found


def _pulled(call: Call, vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs and gradients as a function of arrays and mask."""
    n = len(call.arrays)

    def fn(*arguments: Any) -> tuple[Any, ...]:
        made, gradients = vjp(
            lambda *arrays: call(*arrays, *arguments[n:]), arguments[:n], call.cotangents
        )
        return (*made, *gradients)

    return fn


def _told(call: Call, made: Sequence[Any]) -> dict[str, Any]:
    """The answer in what such a function gave."""
    n = 1 + call.has_lse
    return call.answer(made[:n], made[n:])


def _twins(kit: Kit, *, gradients: bool = False) -> Iterator[tuple[str, Call, Call]]:
    """Each call beside one with other numbers; beside itself with dropout, whose seed stays."""
    others = dict(calls(kit, gradients=gradients))
    for name, call in calls(kit, gradients=gradients):
        yield name, call, call if "dropout" in call.options else others[name]


# Compilers


def _compiled(kit: Kit) -> None:
    """A program is right for the numbers it was made with, and for others."""
    compile = _framework(kit, "compile")
    for name, call, twin in _twins(kit):
        program = compile(call.__call__)
        for one, what in ((call, "compiled"), (twin, "compiled, with other numbers")):
            one.right(one.outputs(program(*one.arguments)), f"{name}, {what}")


def _compiled_gradients(kit: Kit) -> None:
    """Through a program, and of a program that makes them itself."""
    compile, vjp = _framework(kit, "compile"), _framework(kit, "vjp")
    for name, call in calls(kit, gradients=True):
        program = compile(call.on)
        if kit.lane.vjp is not None:
            found = call.answer(*kit.lane.vjp(program, call.arrays, call.cotangents))
            call.right(found, f"{name}, gradients through a program")
        whole = compile(_pulled(call, vjp))
        call.right(_told(call, whole(*call.arguments)), f"{name}, gradients within a program")


def _compiled_at_other_lengths(kit: Kit) -> None:
    """One function for sequences that grow."""
    compile = _framework(kit, "compile")
    program, options = None, {"causal": True} if kit.able(causal=True) else {}
    for L in (9, 17, 33, 4):
        call = Call(kit, kit.inputs(L, L), options)
        program = program or compile(call.__call__)
        call.right(call.outputs(program(*call.arguments)), f"compiled, {L} tokens")


def _compiled_choice(kit: Kit) -> None:
    """`use_backend` is obeyed around a program and inside it, or refused, and left at its end."""
    compile = _framework(kit, "compile")
    if not isinstance(kit.subject, BackendSubject) or kit.subject.name == "numpy":
        kit.inapplicable("asked of backends with a framework's compiler")
    call = Call(kit, kit.inputs(), {})
    given: dict[str, Any] = {"layout": kit.layout}

    def around(q: Any, k: Any, v: Any) -> Any:
        return attnx.attention(q, k, v, **given)

    def inside(q: Any, k: Any, v: Any) -> Any:
        with attnx.use_backend("numpy"):
            return attnx.attention(q, k, v, **given)

    program, other = compile(around), compile(inside)
    for name, expected in ((kit.subject.name, False), ("numpy", True), (kit.subject.name, False)):
        with attnx.use_backend(name), Witness("numpy") as seen:
            made = _unless_refused(program, call, expected)
        asked = made is None or bool(sum(seen.calls.values()))
        kit.require(asked == expected, f"use_backend({name!r}) around: not obeyed")
        if made is not None:
            call.right(kit.back({"out": made}), f"compiled within use_backend({name!r})")
    with Witness("numpy") as seen:
        made = _unless_refused(other, call, True)
    if made is not None:
        call.right(kit.back({"out": made}), "use_backend within a program")
        kit.require(sum(seen.calls.values()), "use_backend('numpy') within a program: not obeyed")


def _unless_refused(program: Callable[..., Any], call: Call, foreign: bool) -> Any:
    """What a program gives; None where its framework cannot call another's backend, and says so."""
    try:
        return program(*call.arguments)
    except UnsupportedError:
        if foreign:
            return None
        raise


# Maps


def _mapped(kit: Kit) -> None:
    """An axis of every argument, masks and slopes included; and an axis of the queries alone."""
    vmap = _framework(kit, "vmap")
    alibi = slanted(kit)
    for name, call, twin in (*_twins(kit), *([] if alibi is None else [("an Alibi", *alibi)])):
        made = vmap(call.__call__, (0,) * len(call.arguments))(
            *stacked(kit, call.arguments, twin.arguments)
        )
        for n, one in enumerate((call, twin)):
            one.right(one.outputs([x[n] for x in made]), f"{name}, entry {n} of a mapped axis")
    call = Call(kit, kit.inputs(), {})
    twin = Call(kit, (kit.inputs()[0], *call.inputs[1:]), {})
    q = stacked(kit, call.arrays[:1], twin.arrays[:1])
    made = vmap(call.__call__, (0, None, None))(*q, *call.arrays[1:])
    for n, one in enumerate((call, twin)):
        one.right(one.outputs([x[n] for x in made]), f"queries alone are mapped, entry {n}")


def _mapped_gradients(kit: Kit) -> None:
    """Each entry's gradient is its own."""
    vmap, vjp = _framework(kit, "vmap"), _framework(kit, "vjp")
    for name, call, twin in _twins(kit, gradients=True):
        twin.cotangents = call.cotangents
        for cotangent in ("d_out", "d_lse"):
            if cotangent in call.options:
                twin.options[cotangent] = call.options[cotangent]
        made = vmap(_pulled(call, vjp), (0,) * len(call.arguments))(
            *stacked(kit, call.arguments, twin.arguments)
        )
        for n, one in enumerate((call, twin)):
            one.right(_told(one, [x[n] for x in made]), f"{name}, gradients of entry {n}")


def _scanned(kit: Kit) -> None:
    """A loop of the framework's."""
    scan = _framework(kit, "scan")
    for name, call, twin in _twins(kit):
        made = scan(call.__call__, stacked(kit, call.arguments, twin.arguments))
        for n, one in enumerate((call, twin)):
            one.right(one.outputs([x[n] for x in made]), f"{name}, step {n} of a loop")


# Derivatives


def _gradients(kit: Kit) -> None:
    """By the framework's functional differentiation."""
    vjp = _framework(kit, "vjp")
    for name, call in calls(kit, gradients=True):
        call.right(call.answer(*vjp(call.on, call.arrays, call.cotangents)), f"{name}, vjp")


def _checkpointed(kit: Kit) -> None:
    """What is computed again is the same: dropout drops what it dropped."""
    checkpoint = _framework(kit, "checkpoint")
    if kit.lane.vjp is None:
        kit.inapplicable(f"{kit.lane.name} has no differentiation of its own")
    for name, call in calls(kit, gradients=True):
        made = kit.lane.vjp(checkpoint(call.on), call.arrays, call.cotangents)
        call.right(call.answer(*made), f"{name}, checkpointed")


def _and_slanted(kit: Kit) -> Iterator[tuple[str, Call]]:
    """Every call, and one with an `Alibi`, whose slopes have no derivative."""
    yield from calls(kit, gradients=True)
    alibi = slanted(kit, gradients=True)
    if alibi is not None:
        yield "an Alibi", alibi[0]


def _forward_mode(kit: Kit) -> None:
    """Tangents, tied to the oracle's gradients."""
    jvp = _framework(kit, "jvp")
    for name, call in _and_slanted(kit):
        forward_mode(kit, call, jvp, name)


def _second_derivatives(kit: Kit) -> None:
    """Gradients of gradients, against differences of the oracle's gradients."""
    second = _framework(kit, "second")
    for name, call in _and_slanted(kit):
        second_derivatives(kit, call, second, name)


# Everywhere


def _asked(kit: Kit, transform: str) -> Callable[[], Any]:
    """A call through one transform."""
    fn = _framework(kit, transform)
    call = Call(kit, kit.inputs(), {}, gradients=True)
    ones = [kit.lane.xp.ones_like(x) for x in call.arrays]
    several: dict[str, Callable[[], Any]] = {
        "compile": lambda: fn(call.on)(*call.arrays),
        "vmap": lambda: fn(call.on, (0, 0, 0))(*stacked(kit, call.arrays, call.arrays)),
        "jvp": lambda: fn(call.on, call.arrays, ones),
        "second": lambda: fn(call.on, call.arrays, call.cotangents, ones),
    }
    return several[transform]


def _undeclared_raise(kit: Kit) -> None:
    """What a backend does not declare gives an error, and no number."""
    names = {
        "compile": "compile", "vmap": "vmap", "forward_mode": "jvp", "higher_order": "second",
    }  # fmt: skip
    transforms, asked = kit.lane.transforms(), 0
    for declared, transform in names.items():
        gradient = transform in ("compile", "vmap") or kit.has.gradient
        if getattr(kit.has, declared) or getattr(transforms, transform) is None or not gradient:
            continue
        run, asked = _asked(kit, transform), asked + 1
        try:
            run()
        except Exception:  # the frameworks do not let us raise ours everywhere
            continue
        raise FaultError(f"{declared} is not declared, and {transform} gave an answer")
    if not asked:
        kit.inapplicable(f"nothing of {kit.lane.name}'s is undeclared")


def _hidden_stays_hidden(kit: Kit) -> None:
    """Poison in what nobody sees reaches nothing through any transform (S4.1, S3.7)."""
    vjp = _framework(kit, "vjp")
    q, k, v = kit.inputs()
    shown = np.zeros((kit.B, 1, kit.L, kit.L), dtype=bool)
    shown[:, :, :-1, :9] = True
    k[:, :, 9:], v[:, :, 9:], q[:, :, -1:] = np.nan, np.inf, np.nan
    call = Call(kit, (q, k, v), {"mask": shown}, gradients=True)
    pulled = _pulled(call, vjp)
    ways: dict[str, Callable[[], Any]] = {"vjp": lambda: pulled(*call.arguments)}
    if kit.has.compile:
        compile = _framework(kit, "compile")
        ways["compile"] = lambda: compile(pulled)(*call.arguments)
    if kit.has.vmap:
        twice = stacked(kit, call.arguments, call.arguments)
        mapped = _framework(kit, "vmap")(pulled, (0,) * len(twice))
        ways["vmap"] = lambda: [x[1] for x in mapped(*twice)]
    for way, made in ways.items():
        call.right(_told(call, made()), f"poison under {way}")


def _autocast(kit: Kit) -> None:
    """q, k and v take autocast's dtype before anything else, and so does out (S5.1)."""
    autocast = _framework(kit, "autocast")
    if not kit.subject.refuses or "bfloat16" not in kit.has.dtypes:
        kit.inapplicable("asked of backends that take bfloat16")
    low = Kit(kit.subject, "bfloat16", kit.rng, kit.layout)
    for name, call in calls(low):
        wide = [kit.lane.from_numpy(np.asarray(kit.numpy(x), np.float32)) for x in call.arrays[:3]]
        with autocast("bfloat16"):
            made = call(*wide, *call.arguments[3:])
        dtype = kit.lane.dtype_name(made[0])
        kit.require(dtype == "bfloat16", f"{name} under autocast gave {dtype}")
        call.right(call.outputs(made), f"{name}, autocast")


WIDE = ("float32", "float64")


def _probe(
    name: str, check: Callable[[Kit], None], clauses: str = "S6.5", needs: str = "",
    ids: tuple[str, ...] = (), dtypes: tuple[str, ...] = WIDE,
) -> Probe:  # fmt: skip
    return Probe(
        name, tuple(clauses.split()), "transforms", check, needs=tuple(needs.split()), ids=ids,
        dtypes=dtypes,
    )  # fmt: skip


PROBES = (
    _probe("compiled-calls", _compiled, needs="compile"),
    _probe("compiled-gradients", _compiled_gradients, "S6.2 S6.5", "compile gradient",
           ids=("N10",)),
    _probe("compiled-at-other-lengths", _compiled_at_other_lengths, needs="compile"),
    _probe("compiled-choice", _compiled_choice, needs="compile"),
    _probe("mapped-calls", _mapped, needs="vmap"),
    _probe("mapped-gradients", _mapped_gradients, "S6.2 S6.5", "vmap gradient"),
    _probe("scanned-calls", _scanned, needs="compile"),
    _probe("functional-gradients", _gradients, "S6.2 S6.3", "gradient framework"),
    _probe("checkpointed-gradients", _checkpointed, "S6.2", "gradient framework"),
    _probe("forward-mode", _forward_mode, needs="forward_mode gradient", ids=("N2",)),
    _probe("second-derivatives", _second_derivatives, needs="higher_order gradient", ids=("N1",)),
    _probe("undeclared-transforms-raise", _undeclared_raise, ids=("N1", "N2")),
    _probe("hidden-under-transforms", _hidden_stays_hidden, "S3.7 S4.1 S6.5",
           "gradient framework"),
    _probe("autocast-of-inputs", _autocast, "S5.1", dtypes=("float32",)),
)  # fmt: skip
