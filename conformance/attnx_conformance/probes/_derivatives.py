"""Forward mode and second derivatives, tied to the oracle's gradients.

The oracle has gradients alone. A tangent is checked through them: what a cotangent picks of it must
be what the gradients of that cotangent give along the direction, and the bound of the gradients
carries over. Since a Hessian is symmetric, a second gradient is the change of the first ones along
its directions, which central differences of the oracle give in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx_conformance.oracle import reference
from attnx_conformance.plain import numpy_dtype

from ._kit import Array, Kit
from ._transformed import Call

__all__ = ["forward_mode", "second_derivatives"]

PICKS = 12
STEP = 1e-4
SLACK = {"float32": 1e-4, "float64": 1e-6}
"""Central differences err by STEP², float32 by hundreds of roundings; a wrong term by about 1."""


def _operands(call: Call) -> dict[str, Array]:
    q, k, v = call.inputs
    given = {"q": q, "k": k, "v": v, **call.options}
    return {name: given[name] for name in call.names}


def _directions(kit: Kit, call: Call) -> tuple[dict[str, Array], list[Any]]:
    """One for each operand, as NumPy arrays in "bhsd" and as the subject takes them."""
    drawn = {name: kit.draw(*x.shape) for name, x in _operands(call).items()}
    q, k, v = (drawn[name] for name in ("q", "k", "v"))
    rest = {name: drawn[name] for name in ("bias", "sinks") if name in drawn}
    args, _ = kit.arguments(q, k, v, **rest)
    return drawn, [getattr(args, name) for name in call.names]


def _plain(call: Call) -> dict[str, Any]:
    """The options without operands and cotangents."""
    return {n: x for n, x in call.options.items() if n not in (*call.names, "d_out", "d_lse")}


def forward_mode(kit: Kit, call: Call, jvp: Callable[..., Any], name: str) -> None:
    """The tangents of out and lse are right where a few cotangents look."""
    drawn, tangents = _directions(kit, call)
    made, moved = jvp(call.on, call.arrays, tangents)
    call.right(call.outputs(made), f"{name}, forward mode")
    found = call.outputs(moved)
    live = np.isfinite(call.outputs(made).get("lse", np.zeros(())))
    for _ in range(PICKS):
        for result, tangent in found.items():
            at = tuple(int(kit.rng.integers(n)) for n in tangent.shape)
            if result == "lse" and not live[at]:
                continue  # it is -inf there, and has no tangent that would mean something
            one = np.zeros(
                tangent.shape, numpy_dtype(kit.dtype if result == "out" else tangent.dtype.name)
            )
            one[at] = 1
            zero = np.zeros(found["out"].shape, found["out"].dtype)
            cotangents = {"d_out": one} if result == "out" else {"d_out": zero, "d_lse": one}
            told, allowed = _along(kit, call, drawn, cotangents)
            off = abs(float(tangent[at]) - told)
            kit.require(
                off <= allowed,
                f"{name}, forward mode: the tangent of {result} is {float(tangent[at]):.6g} at "
                f"{at}, where gradients give {told:.6g}",
            )


def _along(
    kit: Kit, call: Call, drawn: dict[str, Array], cotangents: dict[str, Array]
) -> tuple[float, float]:
    """What the gradients of a cotangent give along a direction, and how far that may be off."""
    options = {**call.options, **cotangents}
    if "d_lse" not in cotangents:
        options.pop("d_lse", None)
    truth, limits = reference(*call.inputs, **options), kit.bounds(*call.inputs, **options)
    told, allowed = 0.0, 0.0
    for operand, direction in drawn.items():
        parts = getattr(truth, f"d{operand}") * direction.astype(np.float64)
        told += float(parts.sum())
        allowed += float((getattr(limits, f"d{operand}").limit * np.abs(direction)).sum())
        allowed += 1e-6 * float(np.abs(parts).sum()) if kit.dtype == "float32" else 0.0
    return told, allowed


def second_derivatives(kit: Kit, call: Call, second: Callable[..., Any], name: str) -> None:
    """Gradients of gradients agree with differences of the oracle's."""
    drawn, directions = _directions(kit, call)
    made = second(call.on, call.arrays, call.cotangents, directions)
    answer = kit.back({f"d{n}": x for n, x in zip(call.names, made, strict=True)})
    cotangents = {n: call.options[n] for n in ("d_out", "d_lse") if n in call.options}
    ends = []
    for step in (STEP, -STEP):
        there: dict[str, Any] = {
            n: x.astype(np.float64) + step * drawn[n] for n, x in _operands(call).items()
        }
        ends.append(reference(**there, **_plain(call), **cotangents))
    for result, found in answer.items():
        ahead, behind = (getattr(end, result) for end in ends)
        told = (ahead - behind) / (2 * STEP)
        off = float(np.abs(found.astype(np.float64) - told).max(initial=0.0))
        allowed = SLACK[kit.dtype] * (1.0 + float(np.abs(told).max(initial=0.0)))
        kit.require(
            off <= allowed,
            f"{name}: the second derivative is off by {off:.3g} in {result}, {allowed:.3g} allowed",
        )
