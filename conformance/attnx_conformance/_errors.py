"""The error of each stage of a call, from which every bound is made.

Names are those of the specification: `s` scores, `P` weights, `dS` their gradient, with axes
`(N, Hq, Lq, Lk)`. Hidden pairs are absent from every sum, and so is what is not finite: those
elements are compared by kind, not by distance.
"""

from __future__ import annotations

import numpy as np

from ._precision import Precision
from ._selection import Bools, Floats, any_of, blocks, finite, touches
from .oracle import Terms

__all__ = ["BackwardErrors", "C", "ForwardErrors"]

_HOPELESS = 1e30
C = 2.0
"""Safety: what theory allows, twice. It also covers the oracle's own float64 rounding."""


class ForwardErrors:
    """Errors of scores, weights, lse and output.

    Attributes:
        E: Absolute error of the score that the softmax sees; `E_raw` before softcap and bias.
        rho: Relative error of P as the forward pass computes it.
        spread: `P * rho`, and its sum `shift`, by which the denominator may move.
        B_lse: Bound of lse; and `lost`, that of lse less the maximum it was made from.
        B_out: Bound of the output.
        rows_either: Rows with an infinite visible score beside finite ones: they may be NaN.
        faint: Pairs whose P may have underflowed to 0.
    """

    def __init__(self, t: Terms, p: Precision, *, rounded_scores: bool) -> None:
        self.t, self.p, Lk = t, p, t.grid.Lk
        self.P = finite(t.P)
        self.q, self.k, self.v = (np.abs(finite(x)) for x in (t.q, t.k, t.v))
        self.E_raw, self.E = self._scores(rounded_scores)
        top = t.s.max(axis=-1, initial=-np.inf)
        if t.sinks is not None:
            top = np.maximum(top, t.sinks[:, None])
        self.rho = self.relative(t.s - top[..., None])
        self.spread = self.weigh(self.rho)
        self.shift = self.spread.sum(axis=-1)
        lse = np.abs(finite(t.lse))
        summed = p.tiny + C * (self.shift + p.g(Lk) + 4 * p.u_a)
        self.B_lse = summed + C * 2 * p.u_a * lse
        # However large lse is, rounding `max + log(sum)` loses no more than the logarithm.
        self.lost = np.minimum(self.B_lse, summed + np.abs(finite(_log_sum(t, top))))
        self.B_out = self._output()
        infinite = t.visible & np.isinf(t.raw)
        self.rows_either: Bools = any_of(infinite, -1) & np.isfinite(t.lse)
        self.faint: Bools = t.visible & (p.P_faint > t.P)

    def relative(self, distance: Floats, shifted: Floats | float = 0.0) -> Floats:
        """Relative error of `exp(s - shift)`, where `distance` is `s - shift`.

        Args:
            distance: the exponent.
            shifted: the error of the shift itself.
        """
        rho = self.E + shifted + self.p.u_a * np.abs(finite(distance)) + 4 * self.p.u_a
        return np.where(self.E + shifted > 0.3, np.minimum(np.expm1(rho), _HOPELESS), rho)

    def weigh(self, error: Floats) -> Floats:
        """`P * error`, 0 where P is 0 even if the error overflowed."""
        return np.where(self.P > 0.0, self.P * error, 0.0)

    def _scores(self, rounded: bool) -> tuple[Floats, Floats]:
        t, p = self.t, self.p
        products = abs(t.scale) * (self.q @ np.swapaxes(self.k, -1, -2))
        raw, s = finite(t.raw), np.abs(finite(t.s))
        capped = raw
        E = E_raw = (
            (p.g(t.q.shape[-1]) + 3 * p.u_a) * products
            + 2 * p.u_a * np.abs(raw)
            + (p.u_w * (products + np.abs(raw)) if rounded else 0.0)
        )
        if t.softcap is not None:
            tanh = np.tanh(raw / t.softcap)
            # The second term is the curvature of tanh, for errors no longer small beside the cap.
            E = (1.0 - tanh**2) * E + np.minimum(E, E * E / t.softcap)
            capped = t.softcap * tanh
            E = E + 6 * p.u_a * np.abs(capped)
        if t.bias is not None:
            bias = np.abs(finite(t.bias))
            # Beside a bias so large that its neighbours differ by 64, a score is lost, no more.
            lost = np.where(p.u_a * bias >= 32.0, E + np.abs(capped), np.inf)
            E = np.minimum(E + p.u_a * (bias + s), lost)
        return np.where(t.visible, E_raw, 0.0), np.where(t.visible, E, 0.0)

    def _output(self) -> Floats:
        t, p = self.t, self.p
        values, out = finite(t.v), finite(t.out)
        B = np.empty(t.out.shape)
        factor = np.broadcast_to(t.F, t.P.shape)
        for n, h, rows in blocks(t.P.shape[:2], t.grid.Lq, t.grid.Lk):
            weights = self.spread[n, h, rows]
            for d in range(values.shape[-1]):
                kept = factor[n, h, rows] * values[n, h, None, :, d]
                distance = np.abs(kept - out[n, h, rows, None, d])
                B[n, h, rows, d] = np.einsum("ij,ij->i", weights, distance)
        B *= 1.0 + self.shift[..., None]  # where errors are not small, the denominator moves too
        B += (p.u_p + 2 * p.g(t.grid.Lk) + 6 * p.u_a) * ((t.F * self.P) @ self.v) + p.u_w * np.abs(
            out
        )
        if p.P_underflow:
            top = self.P.max(axis=-1, initial=0.0)[..., None]
            B += p.P_underflow * top * ((t.F * t.visible) @ self.v)
        largest = self.v.max(axis=(-2, -1), initial=0.0)[..., None, None]
        return np.asarray(C * B + p.eta + t.grid.Lk * p.tiny * largest)


def _log_sum(t: Terms, top: Floats) -> Floats:
    """lse less the maximum: beside scores of -1e308 even the oracle's own lse has lost it."""
    total = np.where(t.visible, np.exp(t.s - top[..., None]), 0.0).sum(axis=-1)
    if t.sinks is not None:
        total += np.exp(t.sinks[:, None] - top)
    return np.asarray(np.log(total))


class BackwardErrors:
    """Errors of delta and dS.

    Attributes:
        e_delta: Error of `delta = sum_d d_out out`, one a row: all its dS share it.
        E_dS: Error of dS without the part that comes from delta.
        E_raw: The same before softcap, and `P_raw` the weights that carry delta's error there.
        B_P: Bound of P as the backward pass recomputes it from lse.
        rows_either: Rows whose dS may or may not be finite.
        pairs_either: Pairs whose dS may or may not be finite.
    """

    def __init__(self, f: ForwardErrors) -> None:
        self.f = f
        t, p = f.t, f.p
        d_out = np.abs(finite(t.d_out))
        Dv = t.v.shape[-1]
        self.d_out = d_out
        self.B_P = f.weigh(f.relative(t.s - t.lse[..., None], f.lost[..., None]))
        self.e_delta = np.sqrt(((d_out * f.B_out) ** 2).sum(axis=-1))
        self.e_delta += p.g(Dv) * (d_out * np.abs(finite(t.out))).sum(axis=-1)
        dP = t.F * (finite(t.d_out) @ np.swapaxes(finite(t.v), -1, -2))
        slack = dP - finite(t.delta)[..., None] + finite(t.d_lse)[..., None]
        absolute = t.F * (d_out @ np.swapaxes(f.v, -1, -2))
        dS = np.abs(finite(t.dS))
        # A kernel may differentiate lse apart from P: where lse is lost, the two do not cancel.
        apart = np.abs(dP - finite(t.delta)[..., None]) + np.abs(finite(t.d_lse))[..., None]
        moved = np.where(f.lost[..., None] > 0.3, apart, np.abs(slack))
        self.E_dS = self.B_P * moved + f.P * p.g(Dv) * absolute
        self.E_dS += f.P * p.u_a * np.abs(finite(t.d_lse))[..., None] + (p.u_p + 3 * p.u_a) * dS
        self.E_dS += p.tiny * t.visible * np.abs(slack)  # P itself may flush to 0 (S5.3)
        self.E_raw, self.P_raw = self.E_dS, f.P
        if t.softcap is not None:
            tanh = np.tanh(finite(t.raw) / t.softcap)
            slope = 1.0 - tanh**2
            bend = np.minimum(1.0, 2 * np.abs(tanh) * slope * f.E_raw / t.softcap)
            self.E_raw = slope * self.E_dS + (8 * p.u_a + bend) * dS
            self.P_raw = f.P * slope
        self._leave_open()

    def _leave_open(self) -> None:
        t, f = self.f.t, self.f
        infinite = ~np.isfinite(t.v)
        perhaps = any_of(touches(f.faint, infinite), -1)
        surely = any_of(touches(t.visible & ~f.faint, infinite), -1)
        self.rows_either: Bools = f.rows_either | (perhaps & ~surely)
        self.pairs_either: Bools = t.visible & (
            self.rows_either[..., None] | (f.faint & ~np.isfinite(t.dS))
        )
