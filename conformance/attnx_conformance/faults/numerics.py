"""Faults of precision: right in real numbers, wrong in the numbers that there are (S5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("numerics")


def _low(c: Call, array: Any) -> Any:
    """Through the inputs' dtype."""
    return array.astype(c.low).astype(c.high)


def _through(dtype: Any) -> Callable[[Call, Any], Any]:
    return lambda c, array: array.astype(dtype).astype(c.high)


def _when(kinds: tuple[str, ...], rule: Callable[[Call, Any], Any]) -> Callable[[Call, Any], Any]:
    """For some dtypes of the inputs."""
    return lambda c, array: rule(c, array) if np.dtype(c.low).name in kinds else array


def _scaled(rule: Callable[[Call, Any], Any]) -> Any:
    return lambda self, c, rows, cols: rule(c, Kernel.scaled(self, c, rows, cols))


def _dot(rule: Callable[[Call, Any], Any]) -> Any:
    return lambda self, c, q, k: rule(c, Kernel.dot(self, c, q, k))


def _tf32(c: Call, array: Any) -> Any:
    """Ten bits of mantissa, as tensor cores read float32."""
    if c.high is not np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _tf32_dot(self: Kernel, c: Call, q: Any, k: Any) -> Any:
    return Kernel.dot(self, c, _tf32(c, q), _tf32(c, k))


def _acc(rule: Callable[[Call, Any], Any]) -> Any:
    return lambda self, c, acc, P, v, seen: rule(c, Kernel.add_values(self, c, acc, P, v, seen))


def _sum(rule: Callable[[Call, Any], Any]) -> Any:
    return lambda self, c, total, P: rule(c, Kernel.add_sum(self, c, total, P))


def _low_add(self: Kernel, c: Call, sums: dict[str, Any], name: str, at: slice,
             part: Any) -> None:  # fmt: skip
    """Gradients are summed in the inputs' dtype from tile to tile."""
    Kernel.add(self, c, sums, name, at, part)
    sums[name][:, :, at] = _low(c, sums[name][:, :, at])


def _sequential_low(self: Kernel, c: Call, total: Any, P: Any) -> Any:
    """The denominator is summed key by key in the inputs' dtype."""
    total = _low(c, total)
    for j in range(P.shape[-1]):
        total = _low(c, total + P[..., j : j + 1])
    return total


def _polynomial(degree: int) -> Any:
    """exp by 2^n and a Taylor polynomial of 2^f, as written for speed."""

    def exp(self: Kernel, c: Call, x: Any) -> Any:
        power = x * c.high(1.4426950408889634)
        n = np.floor(power)
        f = (power - n) * c.high(0.6931471805599453)
        series, term = np.ones_like(f), np.ones_like(f)
        for k in range(1, degree + 1):
            term = term * f / c.high(k)
            series = series + term
        return np.where(np.isneginf(x), c.high(0), series * np.exp2(n))

    return exp


def _schraudolph(self: Kernel, c: Call, x: Any) -> Any:
    """exp by writing the exponent's bits: errors of 3 %."""
    power = x * c.high(1.4426950408889634)
    n = np.floor(power)
    return np.where(np.isneginf(x), c.high(0), (1 + (power - n)) * np.exp2(n))


def _flushed(self: Kernel, c: Call, x: Any) -> Any:
    """exp gives 0 below e^-10."""
    return np.where(x < -10, c.high(0), np.exp(x))


def _clamped(self: Kernel, c: Call, x: Any) -> Any:
    """The argument of exp is kept above -20: far keys keep a weight."""
    return np.where(np.isneginf(x), c.high(0), np.exp(np.maximum(x, -20)))


def _reciprocal(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """An approximate reciprocal of 12 bits."""
    return acc * (1 / total).astype(np.float32).astype(np.float16).astype(c.high)


def _epsilon(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """The division is kept from 0 by 1e-3."""
    return acc / (total + c.high(1e-3))


def _truncated(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """bfloat16 by cutting bits off."""
    made = Kernel.give(self, c, name, array)
    if made.dtype != ml_dtypes.bfloat16:
        return made
    bits = np.ascontiguousarray(array.astype(np.float32)).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(ml_dtypes.bfloat16)


def _twice_rounded(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """Every result passes through bfloat16 on its way, whatever its dtype."""
    return Kernel.give(self, c, name, array.astype(ml_dtypes.bfloat16).astype(c.high))


def _half_overflow(c: Call, array: Any) -> Any:
    return array.astype(np.float16).astype(c.high)


def _narrow(self: Kernel, low: Any) -> Any:
    return np.float32


def _rounded_sum(self: Kernel, c: Call, total: Any, P: Any) -> Any:
    """The denominator sums weights rounded down to 8 bits; the numerator's are exact."""
    return total + np.floor(P * 256).sum(axis=-1, keepdims=True) / c.high(256)


def _query_scaled_low(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    """q is scaled and rounded to the inputs' dtype before the product."""
    return self.dot(c, _low(c, c.q[:, :, rows] * c.high(c.scale)), c.k[:, :, cols])


FULL = ("float32", "float64")

FAULTS: tuple[Fault, ...] = (
    fault("scores-in-input-dtype", "scores are rounded to the inputs' dtype", scaled=_scaled(_low)),
    fault("products-in-input-dtype", "products are rounded before the scale", dot=_dot(_low)),
    fault("scores-in-float16", "float16 scores overflow beyond 65504",
          dot=_dot(_when(("float16",), _half_overflow))),
    fault("scores-in-bfloat16", "scores are rounded to bfloat16",
          scaled=_scaled(_through(ml_dtypes.bfloat16))),
    fault("query-scaled-in-input-dtype", "the scaled q is rounded to the inputs' dtype",
          scaled=_query_scaled_low),
    fault("products-in-tf32", "float32 products read ten bits", dot=_tf32_dot),
    fault("accumulator-in-input-dtype", "P @ v is summed in the inputs' dtype",
          add_values=_acc(_low)),
    fault("accumulator-in-float16", "P @ v is summed in float16",
          add_values=_acc(_through(np.float16))),
    fault("sum-in-input-dtype", "the denominator is summed in the inputs' dtype from tile to tile",
          add_sum=_sum(_low)),
    fault("sum-sequential-in-input-dtype", "the denominator is summed key by key in 16 bits",
          add_sum=_sequential_low),
    fault("gradients-summed-in-input-dtype", "gradients are summed in the inputs' dtype",
          add=_low_add),
    fault("weights-in-bfloat16", "P is rounded to bfloat16 beside float32 inputs",
          rounded=lambda self, c, P: _when(FULL, _through(ml_dtypes.bfloat16))(c, P)),
    fault("weights-in-float16", "P is rounded to float16 beside float32 inputs",
          rounded=lambda self, c, P: _when(FULL, _through(np.float16))(c, P)),
    fault("weights-in-8-bits", "P is rounded to 3 bits of mantissa",
          rounded=lambda self, c, P: P.astype(ml_dtypes.float8_e4m3fn).astype(c.high)),
    fault("denominator-of-rounded-down", "the denominator sums weights of 8 bits",
          add_sum=_rounded_sum),
    fault("exp-of-degree-2", "exp by a polynomial of degree 2", exp=_polynomial(2)),
    fault("exp-of-degree-4", "exp by a polynomial of degree 4", exp=_polynomial(4)),
    fault("exp-by-bits", "exp by its exponent's bits", exp=_schraudolph),
    fault("exp-flushed", "exp gives 0 below e^-10", exp=_flushed),
    fault("exp-clamped", "exp's argument is kept above -20", exp=_clamped),
    fault("exp-in-input-dtype", "exp is computed in the inputs' dtype",
          exp=lambda self, c, x: _low(c, np.exp(_low(c, x)))),
    fault("reciprocal-of-12-bits", "the division is an approximate reciprocal",
          normalise=_reciprocal),
    fault("division-with-epsilon", "the denominator has 1e-3 added", normalise=_epsilon),
    fault("float64-in-float32", "float64 is computed in float32", precision=_narrow,
          give_lse=lambda self, c, lse: Kernel.give_lse(self, c, lse).astype(
              np.float64 if c.low == np.float64 else np.float32)),
    fault("float64-values-in-float32", "float64 values pass through float32",
          load=lambda self, c, name, array: Kernel.load(self, c, name, array).astype(np.float32)
          .astype(c.high) if name == "v" else Kernel.load(self, c, name, array)),
    fault("results-through-bfloat16", "every result passes through bfloat16",
          give=_twice_rounded),
    fault("bfloat16-truncated", "bfloat16 results are cut, not rounded", give=_truncated),
    fault("dS-in-bfloat16", "dS is rounded to bfloat16 in every dtype",
          dS=lambda self, c, P, dP, delta, d_lse: _through(ml_dtypes.bfloat16)(
              c, Kernel.dS(self, c, P, dP, delta, d_lse))),
    fault("backward-lse-in-input-dtype", "the backward pass keeps lse in the inputs' dtype",
          weights=lambda self, c, s, lse, seen: Kernel.weights(self, c, s, _low(c, lse), seen)),
)  # fmt: skip
