"""What a case must give: the exact answer, how far off it may be, and how far a plain kernel is.

It is the costly half of a trial and does not depend on the subject, so it is made once for all
subjects that are asked the same thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ._marshal import adapted, in_layout
from .cases import Case
from .judgement import Bound
from .oracle import Reference, reference
from .plain import plain
from .tolerance import Bounds, bounds

__all__ = ["Expectation", "expectation", "worse_than_plain"]

_HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_FLOOR = {"float16": 2.0**-24, "bfloat16": 2.0**-126}


def _sample(errors: Any) -> float:
    """How many elements an RMS really averages over: one, where one error outweighs the rest."""
    squares = np.square(errors / max(np.abs(errors).max(initial=0.0), 1e-300))
    total = float(squares.sum())
    return max(1.0, total * total / max(float(np.square(squares).sum()), 1e-300))


def _luck(n: float) -> float:
    """How far the RMS of two samples of n roundings may differ, and twice for what is no luck.

    Few roundings may cancel, and then the plain computation is better than it deserves: half the
    logarithm of a variance ratio has a deviation of 1 / sqrt(n - 1), and five of them are allowed.
    """
    if n <= 1.0 + 1e-6:
        return math.inf  # one rounding says nothing of the next
    return max(2.0 * (1.0 + 3.0 / math.sqrt(n)), math.exp(min(5.0 / math.sqrt(n - 1.0), 700.0)))


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(values**2)))


@dataclass(frozen=True)
class Expectation:
    """The answer of one call in one dtype.

    Attributes:
        reference: the exact answer, in float64.
        limits: the bound of condition (a), element by element.
        dtype: of q, k and v.
        yardstick: the plain computation, in 16-bit types; else empty.
        accumulated: the bound of the accumulator's own errors, in 16-bit types.
    """

    reference: Reference
    limits: Bounds
    dtype: str
    yardstick: dict[str, Any]
    accumulated: Bounds | None

    def truth(self, name: str) -> Any:
        """The exact value of a result: "out", "lse", "weights", "dq" and so on."""
        return getattr(self.reference, name)

    def limit(self, name: str) -> Bound:
        """Its bound."""
        found: Bound = getattr(self.limits, name)
        return found

    def worse_than_plain(self, name: str, actual: Any) -> str:
        """Condition (c): a 16-bit result is at most twice as far off as the plain computation.

        Returns:
            What is wrong, or "".
        """
        if name not in self.yardstick or name == "lse":
            return ""
        floor = getattr(self.accumulated, name).limit
        return worse_than_plain(actual, self.truth(name), self.yardstick[name], floor, self.dtype)


def worse_than_plain(actual: Any, truth: Any, plainly: Any, accumulated: Any, dtype: str) -> str:
    """Condition (c) on arrays alone; what is wrong, or "".

    Args:
        actual: what is judged.
        truth: the exact values.
        plainly: the plain computation's.
        accumulated: the bound of the accumulator's own errors.
        dtype: "float16" or "bfloat16".
    """
    own, yardstick = (
        np.where(np.isfinite(x), x, np.nan)
        for x in (actual.astype(np.float64), plainly.astype(np.float64))
    )
    use = np.isfinite(own) & np.isfinite(yardstick) & np.isfinite(truth)
    if not use.any():
        return ""
    error, allowed = (_rms(x[use] - truth[use]) for x in (own, yardstick))
    if allowed > 0:
        allowed *= _luck(_sample(yardstick[use] - truth[use]))
    allowed += _HALF[dtype] * _rms(truth[use]) + _FLOOR[dtype]
    # The accumulator's own errors are (a)'s to judge: (c) is about the 16-bit roundings.
    allowed += _rms(accumulated[use])
    if error <= allowed:
        return ""
    return f"RMS error {error:.3g}, the plain computation allows {allowed:.3g}"


@lru_cache(maxsize=64)
def expectation(
    case: Case, dtype: str, layout: str, seed: int, scores: str, lacks: frozenset[str] = frozenset()
) -> Expectation:
    """What a case expects of every subject with this tier of scores.

    Args:
        case: the case.
        dtype: of q, k and v.
        layout: "bhsd" or "bshd".
        seed: of the inputs.
        scores: `Capabilities.scores`.
        lacks: what the inputs were adapted to (see `adapted`).
    """
    inputs = in_layout(adapted(case.inputs(dtype, seed), lacks), layout)
    options = {k: v for k, v in case.options.items() if k != "assume_finite"}
    expected = reference(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, bias=inputs.bias, sinks=inputs.sinks,
        layout=layout, d_out=inputs.d_out, d_lse=inputs.d_lse, **options,
    )  # fmt: skip
    limits = bounds(
        expected, dtype, scores=scores,
        bias_dtype=None if expected.dbias is None else inputs.bias.dtype.name,
        sinks_dtype=None if inputs.sinks is None else inputs.sinks.dtype.name,
    )  # fmt: skip
    half = dtype in _HALF
    return Expectation(
        expected, limits, dtype, plain(expected.terms, dtype) if half else {},
        bounds(expected, "float32") if half else None,
    )  # fmt: skip
