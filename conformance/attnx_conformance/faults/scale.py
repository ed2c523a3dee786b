"""Faults of the scale and of the softcap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

scale = of_kind("scale")
softcap = of_kind("softcap")


def _default(rule: Any) -> Any:
    """A default scale by another rule; a scale that is given is right."""

    def scale_of(self: Kernel, c: Call, given: Any) -> float:
        return float(rule(c) if given is None else given)

    return scale_of


def _padded(c: Call, multiple: int) -> float:
    return 1.0 / math.sqrt(-(-c.D // multiple) * multiple)


def _max_before_scale(self: Kernel, c: Call, m: Any, s: Any) -> Any:
    """The running maximum is kept of unscaled scores, whose order a negative scale turns round."""
    if c.scale >= 0 or c.softcap is not None or c.bias is not None:
        return Kernel.running_max(self, c, m, s)
    least = np.where(np.isneginf(s), np.inf, s).min(axis=-1, keepdims=True)
    first = np.where(np.isposinf(least), -np.inf, least)
    return np.where(np.isneginf(m), first, np.minimum(m, np.where(np.isneginf(first), m, first)))


def _cap_last(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    s = self.scaled(c, rows, cols)
    s = s if c.bias is None else self.add_bias(c, s, rows, cols)
    return self.hide(c, self.cap(c, s), rows, cols)


def _cap_hides(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    s = self.scaled(c, rows, cols)
    s = self.cap(c, self.hide(c, s, rows, cols))
    return s if c.bias is None else self.add_bias(c, s, rows, cols)


def _cap_first(self: Kernel, c: Call, rows: slice, cols: slice) -> Any:
    s = self.cap(c, self.dot(c, c.q[:, :, rows], c.k[:, :, cols]))
    s = s if c.softcap is None else s * c.high(c.scale)
    s = s if c.softcap is not None else self.scaled(c, rows, cols)
    s = s if c.bias is None else self.add_bias(c, s, rows, cols)
    return self.hide(c, s, rows, cols)


def _cap(rule: Any) -> Any:
    """Another function of the score and the cap."""

    def cap(self: Kernel, c: Call, s: Any) -> Any:
        return s if c.softcap is None else rule(s, c.high(c.softcap))

    return cap


def _slope(rule: Any) -> Any:
    """Another derivative."""
    return lambda self, c, s: rule(s, c.high(c.softcap))


def _backward_without(self: Kernel, c: Call, s: Any) -> Any:
    return s if c.backward else Kernel.cap(self, c, s)


def _coarse_tanh(s: Any, cap: Any) -> Any:
    """As hardware's approximation: relative errors of 2^-11."""
    tanh = np.tanh(s / cap)
    return cap * (tanh * (1 + s.dtype.type(2.0**-11) * np.cos(37 * s)))


_SCALE = (
    scale("scale-missing", "without a scale there is none", scale_of=_default(lambda c: 1.0)),
    scale("scale-one-over-d", "1/D for 1/sqrt(D)", scale_of=_default(lambda c: 1 / c.D)),
    scale("scale-from-dv", "1/sqrt(Dv)", scale_of=_default(lambda c: 1 / math.sqrt(c.Dv))),
    scale("scale-from-model-width", "1/sqrt(Hq D)",
          scale_of=_default(lambda c: 1 / math.sqrt(c.grid.Hq * c.D))),
    scale("scale-from-padded-d-8", "D is padded to 8 before the root",
          scale_of=_default(lambda c: _padded(c, 8))),
    scale("scale-from-padded-d-64", "D is padded to 64 before the root",
          scale_of=_default(lambda c: _padded(c, 64))),
    scale("scale-zero-is-default", "`scale or default`: 0 is read as none",
          scale_of=lambda self, c, given: float(given or 1 / math.sqrt(c.D))),
    scale("scale-given-ignored", "the scale that is given is dropped",
          scale_of=lambda self, c, given: 1 / math.sqrt(c.D)),
    scale("scale-given-times-default", "the scale that is given multiplies the default",
          scale_of=lambda self, c, given: (1.0 if given is None else given) / math.sqrt(c.D)),
    scale("scale-sign-lost", "a negative scale is taken by its root, without its sign",
          scale_of=lambda self, c, given: abs(Kernel.scale_of(self, c, given))),
    scale("scale-twice", "both q and the scores are scaled",
          scale_of=lambda self, c, given: Kernel.scale_of(self, c, given) ** 2),
    scale("scale-in-input-dtype", "the scale is rounded to the inputs' dtype",
          scale_of=lambda self, c, given: float(
              c.low.type(Kernel.scale_of(self, c, given)))),
    scale("scale-integer", "an integer scale divides where it should multiply",
          scale_of=lambda self, c, given: 1.0 / given if isinstance(given, int) and given > 1
          else float(int(given)) if given is not None and abs(given) < 1
          else Kernel.scale_of(self, c, given)),
    scale("scale-max-before-scale", "the maximum is of unscaled scores: wrong for scale < 0",
          running_max=_max_before_scale),
)  # fmt: skip

_SOFTCAP = (
    softcap("softcap-dropped", "scores are not capped", softcap_of=lambda self, c, given: None),
    softcap("softcap-after-bias", "the bias is capped too", scores=_cap_last),
    softcap("softcap-before-scale", "unscaled products are capped", scores=_cap_first),
    softcap("softcap-after-mask", "-inf is capped to -softcap, so hidden keys are seen",
            scores=_cap_hides),
    softcap("softcap-clips", "scores are clipped", cap=_cap(lambda s, cap: np.clip(s, -cap, cap))),
    softcap("softcap-not-multiplied", "tanh(s / cap) without the factor",
            cap=_cap(lambda s, cap: np.tanh(s / cap))),
    softcap("softcap-not-divided", "cap tanh(s)", cap=_cap(lambda s, cap: cap * np.tanh(s))),
    softcap("softcap-rational", "x / (1 + |x|) for tanh(x)",
            cap=_cap(lambda s, cap: s / (1 + np.abs(s / cap)))),
    softcap("softcap-coarse-tanh", "tanh by an instruction of 11 bits", cap=_cap(_coarse_tanh)),
    softcap("softcap-derivative-missing", "the gradient passes the cap as it is",
            through_cap=lambda self, c, dS, rows, cols: dS),
    softcap("softcap-derivative-not-squared", "1 - |tanh|",
            slope=_slope(lambda s, cap: 1 - np.abs(np.tanh(s / cap)))),
    softcap("softcap-derivative-of-capped", "the derivative at the capped score",
            slope=_slope(lambda s, cap: 1 - np.tanh(np.tanh(s / cap)) ** 2)),
    softcap("softcap-derivative-undivided", "1 - s_cap², with the cap left in",
            slope=_slope(lambda s, cap: 1 - (cap * np.tanh(s / cap)) ** 2)),
    softcap("softcap-not-recomputed", "the backward pass recomputes scores without the cap",
            cap=_backward_without),
    softcap("softcap-dropped-with-sinks", "two options at once: one is forgotten",
            softcap_of=lambda self, c, given: None if c.given.get("sinks") is not None
            else Kernel.softcap_of(self, c, given)),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_SCALE, *_SOFTCAP)
