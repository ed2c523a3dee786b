"""Gradients against differences of the subject's own outputs, so without the oracle (S6).

Central differences in float64 err by about h² in theory and 1e-16 / h in rounding: with h = 1e-5
both are far below any wrong term of a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._kit import Kit
from ._probe import Probe

__all__ = ["PROBES"]

STEP = 1e-5


def _call(kit: Kit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands that have gradients, and the other options: all that the subject declares."""
    q, k, v = kit.inputs(Lq=7, Lk=9)
    operands: dict[str, Any] = {"q": q, "k": k, "v": v}
    options: dict[str, Any] = {}
    if kit.has.bias and kit.has.bias_gradient:
        operands["bias"] = kit.draw(1, kit.Hq, 1, 9)
    if kit.has.sinks and kit.has.sinks_gradient:
        operands["sinks"] = kit.draw(kit.Hq)
    if kit.has.softcap:
        options["softcap"] = 1.5
    if "dense" in kit.has.masks:
        seen = kit.rng.random((kit.B, 1, 7, 9)) < 0.6
        seen[:, :, 2] = False
        options["mask"] = seen
    return operands, options


def _value(kit: Kit, operands: dict[str, Any], options: dict[str, Any], d: Any) -> float:
    """What the cotangents pick of the outputs: its gradients are those of the pullback."""
    made = kit.call(**operands, **options, lse="d_lse" in d)
    total = float((made["out"] * d["d_out"]).sum())
    if "d_lse" in d:
        total += float(np.where(np.isfinite(made["lse"]), made["lse"] * d["d_lse"], 0.0).sum())
    return total


def _differences(kit: Kit, way: str) -> None:
    operands, options = _call(kit)
    d = kit.cotangents(operands["q"], operands["v"])
    if "d_lse" in d and "mask" in options and "sinks" not in operands:
        d["d_lse"][:, :, 2] = 0.0  # lse is -inf there, and its cotangent is ignored (S3.7)
    answer = kit.call(**operands, **options, **d, way=way)
    for name, array in operands.items():
        grad = answer[f"d{name}"]
        kit.require(grad.shape == array.shape, f"d{name} has shape {grad.shape}")
        for _ in range(2):
            u = kit.rng.standard_normal(array.shape)
            ahead, behind = (
                _value(kit, operands | {name: array + sign * STEP * u}, options, d)
                for sign in (1, -1)
            )
            found, told = (ahead - behind) / (2 * STEP), float((grad * u).sum())
            allowed = 1e-6 * (1.0 + float(np.abs(grad * u).sum()))
            kit.require(
                abs(found - told) <= allowed,
                f"d{name} by {way} says {told:.9g} along a direction in which the output moves by "
                f"{found:.9g}",
            )


def _by_pullback(kit: Kit) -> None:
    """Those of the explicit pullback."""
    if "vjp" not in kit.subject.ways:
        kit.inapplicable(f"{kit.subject.name} has no pullback")
    _differences(kit, "vjp")


def _by_framework(kit: Kit) -> None:
    """Those of the framework's own differentiation."""
    _differences(kit, "framework")


PROBES = (
    Probe("differences-of-pullback", ("S6.1", "S6.3"), "gradients", _by_pullback,
          needs=("gradient",), dtypes=("float64",)),
    Probe("differences-of-framework", ("S6.2", "S6.3"), "gradients", _by_framework,
          needs=("gradient", "framework"), ids=("N3",), dtypes=("float64",)),
)  # fmt: skip
