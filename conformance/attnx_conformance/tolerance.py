"""How far a correct answer may lie from the exact one, element by element.

The bounds follow rounding theory for a kernel that keeps scores, softmax and sums in float32 or
better, in any order of summation. A single relative tolerance would either cry wolf at peaked
rows or sleep through a missing key, so each element has a bound of its own, made of the
magnitudes that really meet in it. What must be exact (a row that sees nothing, the gradient of an
unseen key) has bound 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._errors import BackwardErrors, C, ForwardErrors
from ._precision import Precision
from ._selection import Bools, Floats, any_of, finite, touches
from .judgement import Bound, Judgement, judge
from .oracle import Reference

__all__ = [
    "MANY", "NOISE", "SHARE", "Bound", "Bounds", "Judgement", "bounds", "judge", "more_than_noise",
    "tells",
]  # fmt: skip


MANY = 24
"""Different expected values from which an array's errors tell of more than luck."""

SHARE = 0.25
"""The largest part that one of them may have in the bounds' squares.

A value that stands in many rows is rounded alike in all of them, and would pass for a pattern: with
scores in base 2, as exp2 asks for, an lse of 200 is one unit of the last place off in float64, and
one of 120 is exact. Of the whole numbers up to 400, which are exact otherwise, 22 % are off.
"""

NOISE = {
    "float16": (0.85, 0.6), "bfloat16": (0.6, 0.4), "float32": (0.2, 0.12), "float64": (0.2, 0.12),
}  # fmt: skip
"""By dtype: the largest RMS of the errors over that of the bounds, and the largest drift.

`python -m attnx_conformance.calibration` repeats the evidence: correct kernels reach 0.57 and 0.31
in float16, 0.31 and 0.16 in bfloat16, 0.06 and 0.04 above. In all dtypes PyTorch's backend reaches
0.09 and 0.08 in float64, where a sink is above all scores.
"""


def tells(found: Judgement) -> bool:
    """Whether an array's errors are those of many values, and not of one that is repeated."""
    return found.distinct >= MANY and found.share <= SHARE


def more_than_noise(judgement: Judgement, dtype: str) -> str:
    """Condition (b): what of an error within its bounds is too much or too regular for rounding.

    Args:
        judgement: of one result.
        dtype: of the result.

    Returns:
        What is wrong, or "".
    """
    if not tells(judgement):
        return ""
    most, drift = NOISE[dtype]
    if judgement.rms_ratio > most:
        return (
            f"RMS error is {judgement.rms_ratio:.2f} of the bounds' RMS; correct kernels stay "
            f"under {most}"
        )
    if judgement.drift > drift:
        return (
            f"error is proportional to the answer, by {judgement.slope:.2g} of it: "
            f"{judgement.drift:.2f} of what the bounds allow; correct kernels stay under {drift}"
        )
    return ""


@dataclass(frozen=True)
class Bounds:
    """A bound for each result of a call, in the shapes of the `Reference` it was made from."""

    lse: Bound
    weights: Bound
    out: Bound | None = None
    dq: Bound | None = None
    dk: Bound | None = None
    dv: Bound | None = None
    dbias: Bound | None = None
    dsinks: Bound | None = None


def bounds(
    reference: Reference,
    dtype: str,
    *,
    scores: str = "float32",
    tf32: bool = False,
    bias_dtype: str | None = None,
    sinks_dtype: str | None = None,
) -> Bounds:
    """The largest error that each element of each result may have.

    Args:
        reference: The exact answer.
        dtype: Of q, k and v: "float16", "bfloat16", "float32" or "float64".
        scores: "float32", or "input" for a backend whose declared tier rounds scores to `dtype`.
        tf32: Whether products run in TF32.
        bias_dtype: Of bias and its gradient; `dtype` when absent.
        sinks_dtype: Of sinks and their gradient; `dtype` when absent.

    Example:
        >>> import numpy as np
        >>> from attnx_conformance.oracle import reference
        >>> q = k = v = np.ones((4, 8), np.float32)
        >>> expected = reference(q, k, v)
        >>> judge(np.ones((4, 8), np.float32), expected.out, bounds(expected, "float32").out).ok
        True
    """
    t, p = reference.terms, Precision.of(dtype, tf32=tf32)
    with np.errstate(all="ignore"):
        f = ForwardErrors(t, p, rounded_scores=scores == "input")
        made = {"lse": _lse(f, dtype), "weights": _weights(f)}
        if reference.out is not None:
            made["out"] = _out(f)
        if reference.dq is not None:
            b = BackwardErrors(f)
            dq, dk, dv = (t.canonical(x) for x in (reference.dq, reference.dk, reference.dv))
            made |= {"dq": _dq(b, dq), "dk": _dk(b, dk), "dv": _dv(b, dv)}
            if reference.dbias is not None:
                made["dbias"] = _dbias(b, reference.dbias, Precision.of(bias_dtype or dtype))
            if reference.dsinks is not None:
                made["dsinks"] = _dsinks(b, reference.dsinks, Precision.of(sinks_dtype or dtype))
    return Bounds(**made)


def _lse(f: ForwardErrors, dtype: str) -> Bound:
    t = f.t
    result = Precision.of("float64" if dtype == "float64" else "float32")
    limit = f.B_lse if t.sinks is not None else np.where(t.live, f.B_lse, 0.0)
    return Bound(t.restore(limit), t.restore(f.rows_either), result.overflow)


def _weights(f: ForwardErrors) -> Bound:
    t, p = f.t, f.p
    shared = (f.shift + p.g(t.grid.Lk) + 4 * p.u_a)[..., None]
    limit = C * (f.spread * (1 + shared) + f.P * (shared + p.u_w) + p.P_underflow) + p.eta
    return Bound(
        t.restore_grid(np.where(t.visible, limit, 0.0)),
        t.restore_grid(t.visible & f.rows_either[..., None]),
        p.overflow,
    )


def _out(f: ForwardErrors) -> Bound:
    t = f.t
    infinite = ~np.isfinite(t.v)
    perhaps = touches(f.faint, infinite) & ~touches(t.visible & ~f.faint, infinite)
    return Bound(
        t.restore(np.where(t.live[..., None], f.B_out, 0.0)),
        t.restore(f.rows_either[..., None] | perhaps),
        f.p.overflow,
    )


def _dq(b: BackwardErrors, dq: Floats) -> Bound:
    t, p, k = b.f.t, b.f.p, b.f.k
    dS = np.abs(finite(t.dS_raw))
    shared = b.e_delta[..., None] * np.abs(b.P_raw @ finite(t.k))
    error = b.E_raw @ k + shared + p.g(t.grid.Lk) * (dS @ k) + p.P_underflow * (t.visible @ k)
    limit = C * (abs(t.scale) * error + p.u_w * np.abs(finite(dq)))
    limit += p.eta + _flushed(p, abs(t.scale), k, t.grid.Lk)
    return Bound(
        t.restore(np.where(t.live[..., None], limit, 0.0)),
        t.restore(np.broadcast_to(b.rows_either[..., None], limit.shape)),
        p.overflow,
    )


def _dk(b: BackwardErrors, dk: Floats) -> Bound:
    t, p, q = b.f.t, b.f.p, b.f.q
    dS = finite(t.dS_raw)
    error = _transposed(b.E_raw + b.e_delta[..., None] * b.P_raw) @ q
    error += p.g(t.grid.Lq * t.g) * (_transposed(np.abs(dS)) @ q)
    error += p.P_underflow * (_transposed(t.visible) @ q)
    per_head = t.scale * (_transposed(dS) @ finite(t.q))
    return _key_bound(
        b, abs(t.scale) * error, per_head, dk, _flushed(p, abs(t.scale), q, t.grid.Lq)
    )


def _dv(b: BackwardErrors, dv: Floats) -> Bound:
    t, p = b.f.t, b.f.p
    rounding = p.u_p + p.g(t.grid.Lq * t.g)
    weights = b.B_P + rounding * b.f.P + p.P_underflow * t.visible
    error = _transposed(t.F * weights) @ b.d_out
    per_head = _transposed(t.F * b.f.P) @ finite(t.d_out)
    faint = touches(_transposed(b.f.faint), ~np.isfinite(t.d_out))
    return _key_bound(b, error, per_head, dv, _flushed(p, 1.0, b.d_out, t.grid.Lq), faint)


def _key_bound(
    b: BackwardErrors, error: Floats, per_head: Floats, grad: Floats, flushed: Floats,
    either: Bools | None = None,
) -> Bound:  # fmt: skip
    """The bound of a gradient that is summed over a group of heads; 0 for unseen keys (S6.4)."""
    t, p = b.f.t, b.f.p
    if t.g > 1:  # a kernel may round each head before it adds them
        error = error + p.u_w * np.abs(per_head)
        flushed = flushed + p.eta
    limit = C * (t.fold_heads(error) + p.u_w * np.abs(finite(grad)))
    limit += p.eta + t.fold_heads(flushed)
    seen = t.fold_heads(any_of(t.visible, -2)) > 0
    open_keys = any_of(b.pairs_either, -2)[..., None]
    open_keys = open_keys if either is None else open_keys | either
    open_keys = t.fold_heads(np.broadcast_to(open_keys, per_head.shape)) > 0
    return Bound(t.restore(np.where(seen[..., None], limit, 0.0)), t.restore(open_keys), p.overflow)


def _dbias(b: BackwardErrors, dbias: Floats, p_bias: Precision) -> Bound:
    t, p, shape = b.f.t, b.f.p, dbias.shape
    dS = finite(t.dS)
    terms = t.visible.size // max(1, dbias.size)
    error = b.E_dS + b.e_delta[..., None] * b.f.P + p.g(terms) * np.abs(dS)
    error += p.P_underflow * t.visible
    limit = t.grid.fold(error, shape) + p_bias.u_w * np.abs(finite(dbias))
    if terms > 1:  # and each head's sum may be rounded to the bias's dtype before the last fold
        per_head = _fold_rows(dS, shape)
        limit += p_bias.u_w * t.grid.fold(np.abs(per_head), shape)
    limit = C * limit + p_bias.eta + terms * p.tiny
    seen = t.grid.fold(t.visible.astype(np.float64), shape) > 0
    either = t.grid.fold(b.pairs_either.astype(np.float64), shape) > 0
    return Bound(np.where(seen, limit, 0.0), either, p_bias.overflow)


def _fold_rows(dS: Floats, shape: tuple[int, ...]) -> Floats:
    """Each head's sum over the sequence axes that `shape` broadcasts, put in its first place."""
    axes = tuple(axis for axis in (-2, -1) if shape[axis] == 1 and dS.shape[axis] > 1)
    folded = np.zeros_like(dS)
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in (-2, -1))
    folded[(..., *first)] = dS.sum(axis=axes, keepdims=True)
    return folded


def _dsinks(b: BackwardErrors, dsinks: Floats, p_sinks: Precision) -> Bound:
    t, p = b.f.t, b.f.p
    if t.sinks is None:
        raise AssertionError("a gradient of sinks without sinks")
    sinks = t.sinks[:, None]
    p_sink = np.where(t.live, np.exp(sinks - t.lse), 1.0)
    relative = p.u_a * np.abs(finite(sinks - t.lse)) + 4 * p.u_a + b.f.B_lse
    inner = np.abs(finite(t.d_lse - t.delta))
    terms = t.grid.N * t.grid.Lq
    error = p_sink * (relative * inner + b.e_delta + (p.g(terms) + 3 * p.u_a) * inner)
    error += p.tiny * inner
    limit = finite(error).sum(axis=(0, 2)) + p_sinks.u_w * np.abs(finite(dsinks))
    either = any_of(b.rows_either, (0, 2))
    return Bound(C * limit + p_sinks.eta + terms * p.tiny, either, p_sinks.overflow)


def _flushed(p: Precision, factor: float, operand: Floats, terms: int) -> Floats:
    """What is lost where terms below the accumulator's smallest normal flush to 0 (S5.3)."""
    largest = operand.max(axis=(-2, -1), initial=0.0)[..., None, None]
    return np.asarray(factor * terms * p.tiny * largest)


def _transposed(array: NDArray[Any]) -> NDArray[Any]:
    return np.swapaxes(array, -1, -2)
