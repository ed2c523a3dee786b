"""What rounding means for each dtype, of the inputs and of the accumulator that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Limits", "Precision", "limits"]

_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_EXPONENTS = {
    "float16": (-14, 15),
    "bfloat16": (-126, 127),
    "float32": (-126, 127),
    "float64": (-1022, 1023),
}
_TF32_BITS = 11


class Limits(NamedTuple):
    """The ends of a dtype: its largest finite value and its smallest subnormal one."""

    largest: float
    subnormal: float


def limits(dtype: str) -> Limits:
    """The `Limits` of a dtype by name."""
    lowest, highest = _EXPONENTS[dtype]
    bits = _BITS[dtype]
    return Limits((2.0 - 2.0 ** (1 - bits)) * 2.0**highest, 2.0 ** (lowest + 1 - bits))


@dataclass(frozen=True)
class Precision:
    """The rounding of one dtype and of the accumulator that goes with it.

    Attributes:
        u_w: Unit roundoff of inputs and outputs.
        u_a: Unit roundoff of the accumulator.
        u_p: Unit roundoff of P, where a kernel may round it before the product with v.
        tiny: Smallest normal of the accumulator; what is below may flush to 0 (S5.3).
        eta: Absolute error of any stored result: half a subnormal, or one that flushed.
        overflow: Magnitudes from here on round to infinity in the output.
        P_underflow: Absolute error of a P rounded to float16; 0 for wider exponents.
        P_faint: Below this a P may be 0 in some kernel, so that a NaN beside it may vanish.
    """

    u_w: float
    u_a: float
    u_p: float
    tiny: float
    eta: float
    overflow: float
    P_underflow: float
    P_faint: float

    @classmethod
    def of(cls, dtype: str, *, tf32: bool = False) -> Precision:
        """The precision of a call with inputs of `dtype`."""
        accumulator = "float64" if dtype == "float64" else "float32"
        u_w, half = 2.0 ** -_BITS[dtype], _BITS[dtype] < _BITS["float32"]
        highest = _EXPONENTS[dtype][1]
        tiny = 2.0 ** _EXPONENTS[accumulator][0]
        return cls(
            u_w=u_w,
            u_a=2.0 ** -(_TF32_BITS if tf32 else _BITS[accumulator]),
            u_p=u_w if half else 0.0,
            tiny=tiny,
            eta=limits(dtype).subnormal / 2 + tiny,
            overflow=(1.0 - u_w / 2) * 2.0**highest * 2.0,
            P_underflow=2.0**-25 if dtype == "float16" else 0.0,
            P_faint={"float16": 2.0**-24, "float64": 2.0**-600}.get(dtype, 2.0**-80),
        )

    def g(self, n: int) -> float:
        """Half the relative error of a sum of n terms of one sign, in any order of summation.

        Random terms err by the square root of n; equal ones all round the same way. Over 400
        addends, sequential float32 sums of n equal terms erred by at most 0.246 n roundoffs (n
        from 64 to 131072), which the safety of 2 turns into a slope of 1/8.
        """
        return self.u_a * min(n, math.sqrt(n) + 1 + n / 8)
