"""Faults of the gradient alone: the output is right, and so nothing else would show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx_conformance._visibility import Grid

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("backward")


def _part(name: str, rule: Callable[[Call, Any], Any]) -> Any:
    """A tile's part of one gradient is changed before it is added."""

    def add(self: Kernel, c: Call, sums: dict[str, Any], to: str, at: slice, part: Any) -> None:
        Kernel.add(self, c, sums, to, at, rule(c, part) if to == name else part)

    return add


def _unscaled(c: Call, part: Any) -> Any:
    return part / c.high(c.scale) if c.scale else part


def _overwritten(name: str) -> Any:
    """Each tile overwrites the sum of those before it."""

    def add(self: Kernel, c: Call, sums: dict[str, Any], to: str, at: slice, part: Any) -> None:
        if to == name:
            sums[to][:, :, at] = part
        else:
            Kernel.add(self, c, sums, to, at, part)

    return add


def _one_tile_lost(self: Kernel, c: Call, sums: dict[str, Any], to: str, at: slice,
                   part: Any) -> None:  # fmt: skip
    """The last tile of keys is written for batch entry 0 alone."""
    if to != "dq" and at.start and at.stop == c.grid.Lk:
        part = np.where((np.arange(c.grid.N) == 0).reshape(-1, 1, 1, 1), part, c.high(0))
    Kernel.add(self, c, sums, to, at, part)


def _later_entries_lost(self: Kernel, c: Call, sums: dict[str, Any], to: str, at: slice,
                        part: Any) -> None:  # fmt: skip
    """Past batch entry 0 only the first tile of queries reaches dq."""
    if to == "dq" and at.start:
        part = np.where((np.arange(c.grid.N) == 0).reshape(-1, 1, 1, 1), part, c.high(0))
    Kernel.add(self, c, sums, to, at, part)


def _causal_tiles(self: Kernel, c: Call, sums: dict[str, Any], rows: slice, cols: slice,
                  *more: Any) -> None:  # fmt: skip
    """Tiles right of the diagonal are skipped whether the call is causal or not."""
    if cols.start < rows.stop:
        Kernel.tile(self, c, sums, rows, cols, *more)


def _last_tile_skipped(self: Kernel, c: Call, sums: dict[str, Any], rows: slice, cols: slice,
                       *more: Any) -> None:  # fmt: skip
    """The loop over queries is one short."""
    if rows.start == 0 or rows.stop < c.grid.Lq:
        Kernel.tile(self, c, sums, rows, cols, *more)


def _pick(index: int) -> Any:
    """dk and dv are those of one head of the group."""

    def fold_heads(self: Kernel, c: Call, name: str, grad: Any) -> Any:
        return grad.reshape(c.grid.N, c.Hk, c.g, *grad.shape[2:])[:, :, index]

    return fold_heads


def _mean_heads(self: Kernel, c: Call, name: str, grad: Any) -> Any:
    return Kernel.fold_heads(self, c, name, grad) / c.g


def _one_unfolded(which: str) -> Any:
    """One of dk and dv is summed, the other is the last head's."""

    def fold_heads(self: Kernel, c: Call, name: str, grad: Any) -> Any:
        return _pick(-1)(self, c, name, grad) if name == which else Kernel.fold_heads(
            self, c, name, grad)  # fmt: skip

    return fold_heads


def _interleaved(self: Kernel, c: Call, name: str, grad: Any) -> Any:
    """The group axis is taken to stand before the key heads."""
    return grad.reshape(c.grid.N, c.g, c.Hk, *grad.shape[2:]).sum(axis=1)


def _delta(rule: Callable[[Call, Any, Any], Any]) -> Any:
    return lambda self, c, d_out, out: rule(c, d_out, out)


def _dS(rule: Callable[[Any, Any, Any, Any], Any]) -> Any:
    return lambda self, c, P, dP, delta, d_lse: rule(P, dP, delta, d_lse)


def _folded(rule: Callable[[Grid, Any, tuple[int, ...]], Any]) -> Any:
    """dbias is folded in another way, to the right shape."""
    return lambda self, c, grad, shape: rule(c.grid, grad, shape)


def _broadcast_axes(grid: Grid, shape: tuple[int, ...]) -> list[int]:
    full = (1,) * (len(grid.full) - len(shape)) + shape
    return [axis for axis, n in enumerate(full) if n == 1 and grid.full[axis] != 1]


def _first_of(*only: int) -> Callable[[Grid, Any, tuple[int, ...]], Any]:
    """Along some axes of (*B, H, Lq, Lk), counted from the end, one index counts."""

    def rule(grid: Grid, grad: Any, shape: tuple[int, ...]) -> Any:
        made, rank = grad.reshape(grid.full), len(grid.full)
        for axis in _broadcast_axes(grid, shape):
            if axis - rank in only:
                made = made * (np.indices(made.shape, sparse=True)[axis] == 0)
        return grid.fold(made.reshape(grid.flat), shape)

    return rule


def _mean(grid: Grid, grad: Any, shape: tuple[int, ...]) -> Any:
    terms = max(1, int(np.prod([grid.full[axis] for axis in _broadcast_axes(grid, shape)])))
    return grid.fold(grad, shape) / terms


def _sinks(rule: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """Another gradient of sinks, from `p_sink, delta, d_lse, live`."""

    def sinks_gradient(self: Kernel, c: Call, lse: Any, delta: Any, d_lse: Any) -> Any:
        p_sink = np.where(c.live, np.exp(c.sinks[..., 0] - lse), c.high(1))
        return rule(p_sink, delta, d_lse, c.live).sum(axis=(0, 2))

    return sinks_gradient


def _low_rows_lost(self: Kernel, c: Call, s: Any, lse: Any, seen: Any) -> Any:
    """Rows past the last 128 whose lse is very negative are taken for padding."""
    P = Kernel.weights(self, c, s, lse, seen)
    return np.where(lse < -20, c.high(0), P) if c.grid.Lq % 128 == 64 else P


def _unnormalised(self: Kernel, c: Call, s: Any, lse: Any, seen: Any) -> Any:
    """exp(s - max of the tile): the sum is forgotten."""
    top = s.max(axis=-1, keepdims=True)
    return np.where(seen, self.exp(c, s - self.safe(top)), c.high(0))


def _without_bias(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    return s if c.backward else Kernel.add_bias(self, c, s, rows, cols)


def _first_rows(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """d_out is read with the strides of out, in which it was expanded: the first row's for all."""
    d_out, d_lse = Kernel.cotangents(self, c, d_out, d_lse)
    return d_out, np.broadcast_to(d_lse[:1], d_lse.shape) if d_lse.size else d_lse


def _default_scale(self: Kernel, c: Call, *more: Any) -> Any:
    """The gradient takes the default scale for the one that was given."""
    made = Kernel.cotangents(self, c, *more)
    c.notes["ratio"] = (1 / np.sqrt(c.D)) / c.scale if c.scale else 1.0
    return made


FAULTS: tuple[Fault, ...] = (
    fault("backward-dq-unscaled", "dq without the scale", add=_part("dq", _unscaled)),
    fault("backward-dk-unscaled", "dk without the scale", add=_part("dk", _unscaled)),
    fault("backward-dk-scaled-twice", "q was scaled, and so was dk",
          add=_part("dk", lambda c, part: part * c.high(c.scale))),
    fault("backward-default-scale", "dq and dk have the default scale in every call",
          cotangents=_default_scale,
          through_cap=lambda self, c, dS, rows, cols: Kernel.through_cap(self, c, dS, rows, cols)
          * c.high(c.notes["ratio"])),
    fault("backward-dq-sign", "dq has the wrong sign", add=_part("dq", lambda c, part: -part)),
    fault("backward-delta-missing", "dS = P dP", delta=_delta(lambda c, dO, out: 0 * out[..., 0])),
    fault("backward-delta-sign", "dS = P (dP + delta)",
          dS=_dS(lambda P, dP, delta, d_lse: P * (dP + delta + d_lse))),
    fault("backward-delta-unweighted", "dS = P dP - delta",
          dS=_dS(lambda P, dP, delta, d_lse: P * (dP + d_lse) - delta)),
    fault("backward-delta-mean", "delta is a mean over channels",
          delta=_delta(lambda c, dO, out: (dO * out).mean(axis=-1))),
    fault("backward-delta-first-head", "delta of head 0 serves all",
          delta=_delta(lambda c, dO, out: np.broadcast_to(
              (dO * out).sum(axis=-1)[:, :1], out.shape[:-1]))),
    fault("backward-delta-tail", "delta leaves channels past a multiple of 4 out",
          delta=_delta(lambda c, dO, out: (dO * out)[..., : c.Dv // 4 * 4 or c.Dv].sum(axis=-1))),
    fault("backward-delta-in-input-dtype", "delta is rounded to the inputs' dtype",
          delta=_delta(lambda c, dO, out: (dO * out).sum(axis=-1).astype(c.low).astype(c.high))),
    fault("backward-weights-missing", "dS = dP - delta",
          dS=_dS(lambda P, dP, delta, d_lse: dP - delta + d_lse)),
    fault("backward-d-lse-ignored", "the cotangent of lse is dropped",
          dS=_dS(lambda P, dP, delta, d_lse: P * (dP - delta))),
    fault("backward-d-lse-sign", "the cotangent of lse is subtracted",
          dS=_dS(lambda P, dP, delta, d_lse: P * (dP - delta - d_lse))),
    fault("backward-d-lse-unweighted", "the cotangent of lse is added without P",
          dS=_dS(lambda P, dP, delta, d_lse: P * (dP - delta) + d_lse)),
    fault("backward-d-lse-first-entry", "the cotangent of lse is entry 0's",
          cotangents=_first_rows),
    fault("backward-last-of-group", "dk and dv are the last head's", fold_heads=_pick(-1)),
    fault("backward-first-of-group", "dk and dv are the first head's", fold_heads=_pick(0)),
    fault("backward-dk-unreduced", "dk alone is not summed over its group",
          fold_heads=_one_unfolded("dk")),
    fault("backward-dv-unreduced", "dv alone is not summed over its group",
          fold_heads=_one_unfolded("dv")),
    fault("backward-mean-of-group", "dk and dv are means over the group", fold_heads=_mean_heads),
    fault("backward-groups-interleaved", "dk and dv are summed over every Hk-th head",
          fold_heads=_interleaved),
    fault("backward-tile-lost", "the last tile of dk and dv is written for entry 0 alone",
          add=_one_tile_lost),
    fault("backward-dq-tile-lost", "later tiles of dq are written for entry 0 alone",
          add=_later_entries_lost),
    fault("backward-dq-overwritten", "dq is the last tile's", add=_overwritten("dq")),
    fault("backward-dk-overwritten", "dk is the last tile's", add=_overwritten("dk")),
    fault("backward-dv-overwritten", "dv is the last tile's", add=_overwritten("dv")),
    fault("backward-always-causal", "a call that is not causal takes the causal branch",
          tile=_causal_tiles),
    fault("backward-last-rows-lost", "the last tile of queries is skipped",
          tile=_last_tile_skipped),
    fault("backward-low-rows-lost", "rows of very negative lse are lost where L % 128 is 64",
          weights=_low_rows_lost),
    fault("backward-weights-unnormalised", "weights are relative to the tile's maximum",
          weights=_unnormalised),
    fault("backward-without-bias", "scores are recomputed without the bias",
          add_bias=_without_bias),
    fault("backward-dbias-batch", "dbias is entry 0's, where it should be a sum",
          fold_bias=_folded(_first_of(-4))),
    fault("backward-dbias-heads", "dbias is head 0's, where it should be a sum",
          fold_bias=_folded(_first_of(-3))),
    fault("backward-dbias-queries", "dbias is query 0's, where it should be a sum",
          fold_bias=_folded(_first_of(-2))),
    fault("backward-dbias-keys", "dbias is key 0's, where it should be a sum",
          fold_bias=_folded(_first_of(-1))),
    fault("backward-dbias-mean", "dbias is a mean", fold_bias=_folded(_mean)),
    fault("backward-dbias-scaled", "dbias is multiplied by the scale",
          bias_gradient=lambda self, c, dS, dR: dS * c.high(c.scale)),
    fault("backward-dbias-through-cap", "dbias passes the softcap's derivative",
          bias_gradient=lambda self, c, dS, dR: dR),
    fault("backward-dbias-unmasked", "dbias of hidden pairs is not 0",
          bias_gradient=lambda self, c, dS, dR: np.where(dS == 0, c.high(1e-3), dS)),
    fault("backward-dsinks-without-d-lse", "dsinks leaves the cotangent of lse out",
          sinks_gradient=_sinks(lambda p, delta, d_lse, live: -p * delta)),
    fault("backward-dsinks-without-delta", "dsinks leaves delta out",
          sinks_gradient=_sinks(lambda p, delta, d_lse, live: p * d_lse)),
    fault("backward-dsinks-sign", "dsinks has the wrong sign",
          sinks_gradient=_sinks(lambda p, delta, d_lse, live: p * (delta - d_lse))),
    fault("backward-dsinks-unweighted", "dsinks without its weight",
          sinks_gradient=_sinks(lambda p, delta, d_lse, live: d_lse - delta)),
    fault("backward-dsinks-last-row", "dsinks is the last query's",
          sinks_gradient=_sinks(lambda p, delta, d_lse, live: (p * (d_lse - delta))[..., -1:])),
)  # fmt: skip
