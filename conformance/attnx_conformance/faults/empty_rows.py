"""Faults of rows that see nothing (S3.7), by the answer they give and by the cause they miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx.masks import Lengths

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("empty-rows")


def _gives(rows_of: Callable[[Any], Any], lse_of: Callable[[Any], Any] | None = None,
           when: Callable[[Kernel, Call], bool] = lambda self, c: True) -> Any:  # fmt: skip
    """Empty rows of the output, and perhaps their lse, hold something else in some calls."""

    def fill(self: Kernel, c: Call, out: Any, lse: Any, rows: slice) -> tuple[Any, Any]:
        out, lse = Kernel.fill(self, c, out, lse, rows)
        if not when(self, c):
            return out, lse
        live = c.visible[:, :, rows].any(axis=-1)
        out = np.where(live[..., None], out, c.high(1) * rows_of(c.v))
        return out, lse if lse_of is None else np.where(live, lse, c.high(1) * lse_of(lse))

    return fill


def _mean(v: Any) -> Any:
    return v.mean(axis=-2, keepdims=True) if v.shape[-2] else 0.0


def _lse(value: float) -> Any:
    return lambda self, c: c.high(value)


def _nothing_to_see(self: Kernel, c: Call) -> bool:
    return c.grid.Lk == 0


def _by_bias(self: Kernel, c: Call) -> bool:
    return c.given.get("bias") is not None


def _by_causal(self: Kernel, c: Call) -> bool:
    return c.causal is not False and c.mask is None


def _by_two(self: Kernel, c: Call) -> bool:
    """Each constraint alone leaves every row something."""
    parts = self.parts(c)
    return len(parts) > 1 and all(self.rule(c, part).any(axis=-1).all() for part in parts)


def _nan_is_empty(self: Kernel, c: Call, out: Any, lse: Any, rows: slice) -> tuple[Any, Any]:
    """Empty rows are recognised by their NaN, and so are live ones."""
    out, lse = Kernel.fill(self, c, out, lse, rows)
    return np.nan_to_num(out, nan=0.0, posinf=np.inf, neginf=-np.inf), lse


def _low_is_empty(self: Kernel, c: Call, out: Any, lse: Any, rows: slice) -> tuple[Any, Any]:
    """Rows whose scores are all below -1e4 are taken for empty."""
    out, lse = Kernel.fill(self, c, out, lse, rows)
    empty = lse < -1e4
    return np.where(empty[..., None], c.high(0), out), np.where(empty, c.high(-np.inf), lse)


def _stale(self: Kernel, c: Call, out: Any, lse: Any, rows: slice) -> tuple[Any, Any]:
    """Empty rows are not written: they keep what the row before them left in the buffer."""
    out, lse = Kernel.fill(self, c, out, lse, rows)
    live = c.visible[:, :, rows].any(axis=-1)
    return np.where(live[..., None], out, np.roll(out, 1, axis=-2)), lse


def _uniform_backward(self: Kernel, c: Call, s: Any, lse: Any, seen: Any) -> Any:
    """The backward pass gives an empty row the weights 1/Lk."""
    P = Kernel.weights(self, c, s, lse, seen)
    dead = np.isneginf(lse)
    return np.where(dead, c.high(1.0 / max(1, c.grid.Lk)), P)


def _raw_cotangents(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """The cotangents of empty rows are used."""
    d_out = self.unpack(c, "d_out", d_out).astype(c.high)
    d_lse = np.zeros(c.grid.flat[:3], c.high) if d_lse is None else (
        self.unpack(c, "d_lse", d_lse).astype(c.high))  # fmt: skip
    return d_out, d_lse


def _nan_dq(self: Kernel, c: Call, sums: dict[str, Any], name: str, at: slice, part: Any) -> None:
    Kernel.add(self, c, sums, name, at, part)
    if name == "dq":
        sums["dq"][:, :, at][~c.visible[:, :, at].any(axis=-1)] = np.nan


def _nan_everywhere(self: Kernel, c: Call, s: Any, lse: Any, seen: Any) -> Any:
    """Weights of an empty row are NaN in the backward pass, and reach every key."""
    P = self.exp(c, s - lse)
    return np.where(seen | np.isnan(P), P, c.high(0))


def _sinks_dead(self: Kernel, c: Call, lse: Any, delta: Any, d_lse: Any) -> Any:
    """An empty row gives nothing to the sink."""
    keep = c.live
    p_sink = np.where(keep, np.exp(c.sinks[..., 0] - lse), c.high(0))
    return np.where(p_sink > 0, p_sink * (d_lse - delta), c.high(0)).sum(axis=(0, 2))


def _by_lengths(self: Kernel, c: Call) -> bool:
    return any(isinstance(part, Lengths) for part in self.parts(c))


FAULTS: tuple[Fault, ...] = (
    fault("empty-uniform", "an empty row gives the mean of all values", fill=_gives(_mean)),
    fault("empty-nan", "an empty row gives NaN",
          fill=_gives(lambda v: np.nan, lambda lse: np.nan)),
    fault("empty-ones", "an empty row gives ones", fill=_gives(lambda v: 1.0)),
    fault("empty-first-value", "an empty row gives the first value",
          fill=_gives(lambda v: v[..., :1, :] if v.shape[-2] else 0.0)),
    fault("empty-stale", "an empty row keeps what the buffer held", fill=_stale),
    fault("empty-lse-zero", "lse of an empty row is 0", empty_lse=_lse(0.0)),
    fault("empty-lse-lowest", "lse of an empty row is finfo.min",
          empty_lse=_lse(float(np.finfo(np.float32).min))),
    fault("empty-lse-infinite", "lse of an empty row is +inf", empty_lse=_lse(np.inf)),
    fault("empty-lse-ignores-sinks", "an empty row's lse is -inf beside sinks",
          empty_lse=_lse(-np.inf)),
    fault("empty-without-keys", "Lk = 0 gives NaN",
          fill=_gives(lambda v: np.nan, lambda lse: np.nan, _nothing_to_see)),
    fault("empty-by-bias", "a row of -inf in bias gives NaN",
          fill=_gives(lambda v: np.nan, lambda lse: np.nan, _by_bias)),
    fault("empty-by-causal", "a row before the first key of bottom_right gives NaN",
          fill=_gives(lambda v: np.nan, lambda lse: np.nan, _by_causal)),
    fault("empty-by-length", "a length of 0 gives the mean", fill=_gives(_mean, None, _by_lengths)),
    fault("empty-by-two", "rows that only an intersection empties give the mean",
          fill=_gives(_mean, None, _by_two)),
    fault("empty-by-nan", "NaN is turned into 0, in live rows too", fill=_nan_is_empty),
    fault("empty-by-threshold", "a row with lse below -1e4 is taken for empty",
          fill=_low_is_empty),
    fault("empty-nan-dq", "dq of an empty row is NaN", add=_nan_dq),
    fault("empty-nan-keys", "exp(-inf - -inf) reaches dv from an empty row",
          weights=_nan_everywhere),
    fault("empty-uniform-backward", "an empty row has weights 1/Lk in the backward pass",
          weights=_uniform_backward, cotangents=_raw_cotangents),
    fault("empty-cotangents-used", "NaN in the cotangents of empty rows reaches dsinks and dv",
          cotangents=_raw_cotangents, product=lambda self, c, a, b, seen: a @ b),
    fault("empty-without-sink-gradient", "an empty row gives dsinks nothing",
          sinks_gradient=_sinks_dead),
)  # fmt: skip
