"""The expected answer: closed-form attention in float64, on the exact inputs, from NumPy alone.

Every verdict of the suite rests on this module, so it is written to be read beside the
specification and not to be fast. It imports nothing of attnx: it expands masks, alignment,
grouping, layout and the default scale itself, and never casts a result back down. Gradients are
the closed form of S6, not automatic differentiation.

Example:
    >>> import numpy as np
    >>> q = k = v = np.eye(3)
    >>> reference(q, k, v, causal=True).visible.astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._dropout import dropout_factor
from ._selection import Bools, Floats, any_of, selected_product
from ._visibility import Grid, alibi_bias, is_alibi, visibility

__all__ = ["Reference", "Terms", "reference"]


@dataclass(frozen=True)
class Terms:
    """The intermediates that an error bound is made of, in one canonical shape.

    Arrays have axes `(N, Hq, ...)`: the batch axes flattened, the heads of k and v repeated to Hq.
    Rows that see nothing have zeros in q, d_out and (without sinks) d_lse; keys that no query of
    their group sees have zeros in k and v. `F` is what dropout multiplies P with, of ones (and of
    shape `(1, 1, 1, 1)`) without. `bias_shape` is None without a bias that has a gradient.
    """

    grid: Grid
    Hk: int
    layout: str
    scale: float
    softcap: float | None
    q: Floats
    k: Floats
    v: Floats
    d_out: Floats
    d_lse: Floats
    sinks: Floats | None
    bias: Floats | None
    bias_shape: tuple[int, ...] | None
    visible: Bools
    raw: Floats
    s: Floats
    P: Floats
    F: Floats
    out: Floats
    lse: Floats
    delta: Floats
    dS: Floats
    dS_raw: Floats

    @property
    def g(self) -> int:
        """Query heads per key head."""
        return self.grid.Hq // self.Hk

    @property
    def live(self) -> Bools:
        """Rows that see something, `(N, Hq, Lq)`."""
        return any_of(self.visible, -1)

    def fold_heads(self, per_query_head: NDArray[Any]) -> NDArray[Any]:
        """Sum `(N, Hq, ...)` over each group, to `(N, Hk, ...)`."""
        N, _, *rest = per_query_head.shape
        return np.asarray(per_query_head.reshape(N, self.Hk, self.g, *rest).sum(axis=2))

    def restore(self, array: NDArray[Any]) -> NDArray[Any]:
        """From `(N, H, L[, D])` to the caller's rank and layout."""
        _, H, *rest = array.shape
        heads = () if self.grid.rank == 2 else (H,)
        array = array.reshape(*self.grid.batch, *heads, *rest)
        if self.layout == "bshd" and heads:
            axis = len(self.grid.batch)
            array = np.swapaxes(array, axis, axis + 1)
        return array

    def canonical(self, array: Any) -> Floats:
        """The inverse of `restore`, for arrays with a last axis: to float64 `(N, H, L, D)`."""
        array = _canonical(array, self.layout)
        return np.asarray(array.reshape(self.grid.N, *array.shape[-3:]))

    def restore_grid(self, array: NDArray[Any]) -> NDArray[Any]:
        """From `(N, Hq, Lq, Lk)` to `(*B, Hq, Lq, Lk)`, the same in either layout."""
        return array.reshape(self.grid.full)


@dataclass(frozen=True)
class Reference:
    """Expected values in float64, in the caller's rank and layout.

    `weights` and `visible` are `(*B, Hq, Lq, Lk)` in either layout; `dbias` has the shape of bias.
    `out`, `dq`, `dk`, `dv`, `dbias` and `dsinks` are None where they do not exist: no v, no
    cotangent, no bias, no sinks.
    """

    out: Floats | None
    lse: Floats
    weights: Floats
    visible: Bools
    dq: Floats | None
    dk: Floats | None
    dv: Floats | None
    dbias: Floats | None
    dsinks: Floats | None
    terms: Terms


def reference(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any] | None = None,
    *,
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
    dropout: Any = None,
    layout: str = "bhsd",
    d_out: NDArray[Any] | None = None,
    d_lse: NDArray[Any] | None = None,
) -> Reference:
    """Attention and its gradients as the specification defines them (S1 to S7).

    Args:
        q: `(*B, Hq, Lq, D)`, or with the head and sequence axes swapped under "bshd", or `(Lq, D)`.
        k: `(*B, Hk, Lk, D)`.
        v: `(*B, Hk, Lk, Dv)`; without it there are weights and lse, and no output or gradient.
        mask: A boolean array, or a mask object whose leaves are integers and NumPy arrays.
        causal: False, True, "top_left" or "bottom_right".
        bias: An array that is added to the scores, where -inf hides; or an object with `slopes`,
            `align`, `q_pos` and `kv_pos`, as `attnx.Alibi` has them (S2.7).
        scale: Defaults to `1 / sqrt(D)`.
        softcap: Scores become `softcap * tanh(s / softcap)`.
        sinks: `(Hq,)`, in the denominator alone.
        dropout: An object with `p`, `seed` and `offset`, as `attnx.Dropout` has them (S9).
        layout: "bhsd" or "bshd".
        d_out: Cotangent of the output, of its shape. Zeros when only `d_lse` is given.
        d_lse: Cotangent of lse.

    Raises:
        ValueError: Shapes do not fit, or an alignment is missing (S3.5).
        TypeError: A mask of an unknown type.
    """
    with np.errstate(all="ignore"):
        terms = _terms(
            q, k, v, mask, causal, bias, scale, softcap, sinks, dropout, layout, d_out, d_lse
        )
        wanted = v is not None and (d_out is not None or d_lse is not None)
        dq, dk, dv, dbias, dsinks = _gradients(terms) if wanted else (None,) * 5
    return Reference(
        out=None if v is None else terms.restore(terms.out),
        lse=terms.restore(terms.lse),
        weights=terms.restore_grid(terms.P),
        visible=terms.restore_grid(terms.visible),
        dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks,
        terms=terms,
    )  # fmt: skip


def _terms(
    q: Any, k: Any, v: Any, mask: Any, causal: bool | str, bias: Any, scale: float | None,
    softcap: float | None, sinks: Any, dropout: Any, layout: str, d_out: Any, d_lse: Any,
) -> Terms:  # fmt: skip
    rank = np.ndim(q)
    q, k = _canonical(q, layout), _canonical(k, layout)
    v = np.zeros((*k.shape[:-1], 0)) if v is None else _canonical(v, layout)
    batch: tuple[int, ...] = q.shape[:-3]
    Hq, Lq, D = q.shape[-3:]
    Hk, Lk, Dv = k.shape[-3], k.shape[-2], v.shape[-1]
    if batch != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or k.shape[-1] != D or Hq % Hk:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    grid = Grid(batch if rank > 2 else (), Hq, Lq, Lk, rank)
    bias_shape = None if bias is None or is_alibi(bias) else np.shape(bias)
    visible = visibility(mask, causal, None if bias_shape is None else bias, grid)
    live, seen = any_of(visible, -1), _seen_keys(visible, Hk)

    q = np.where(live[..., None], q.reshape(grid.N, Hq, Lq, D), 0.0)
    k = np.repeat(np.where(seen, k.reshape(grid.N, Hk, Lk, D), 0.0), Hq // Hk, axis=1)
    v = np.repeat(np.where(seen, v.reshape(grid.N, Hk, Lk, Dv), 0.0), Hq // Hk, axis=1)
    scale = 1.0 / math.sqrt(D) if scale is None else float(scale)
    raw = np.where(visible, scale * _dot(q, k), -np.inf)
    s = raw if softcap is None else softcap * np.tanh(raw / softcap)
    if bias_shape is not None:
        bias = grid.expand(np.asarray(bias).astype(np.float64))
    elif bias is not None:
        bias = alibi_bias(bias, mask, grid)
    s = s if bias is None else s + bias
    s = np.where(visible, s, -np.inf)
    sinks = None if sinks is None else np.asarray(sinks).astype(np.float64)
    lse, P = _softmax(s, sinks)
    P = np.where(visible, P, 0.0)
    F = dropout_factor(dropout, grid.flat)
    out = selected_product(F * P, v, visible)

    d_out = _cotangent(d_out, layout, out.shape, live)
    d_lse = _cotangent(d_lse, layout, lse.shape, live if sinks is None else np.ones_like(live))
    delta = (d_out * out).sum(axis=-1)
    dP = F * _dot(d_out, v)
    dS = np.where(visible, P * (dP - delta[..., None] + d_lse[..., None]), 0.0)
    dS_raw = dS
    if softcap is not None:
        dS_raw = np.where(visible, dS * (1.0 - np.tanh(raw / softcap) ** 2), 0.0)
    return Terms(
        grid, Hk, layout, scale, None if softcap is None else float(softcap), q, k, v, d_out, d_lse,
        sinks, bias, bias_shape, visible, raw, s, P, F, out, lse, delta, dS,
        dS_raw,
    )  # fmt: skip


def _canonical(array: Any, layout: str) -> Floats:
    """To float64 `(*B, H, L, D)`; 2-D arrays get a head axis."""
    array = np.asarray(array).astype(np.float64)
    if array.ndim == 2:
        return np.asarray(array[None])
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"unknown layout {layout!r}")
    return np.asarray(np.swapaxes(array, -3, -2) if layout == "bshd" else array)


def _cotangent(array: Any, layout: str, shape: tuple[int, ...], keep: Bools) -> Floats:
    """To float64 `shape`, with zeros where it is absent or ignored (S3.7)."""
    if array is None:
        return np.zeros(shape)
    array = np.asarray(array).astype(np.float64)
    if len(shape) == 3:  # lse has no last axis: borrow one for the layout
        array = array[..., None]
    array = _canonical(array, layout).reshape((*shape, 1)[:4])
    keep = keep.reshape(*keep.shape, 1)
    return np.asarray(np.where(keep, array, 0.0).reshape(shape))


def _dot(rows: Floats, columns: Floats) -> Floats:
    return np.asarray(rows @ np.swapaxes(columns, -1, -2))


def _seen_keys(visible: Bools, Hk: int) -> Bools:
    """Keys that some query of some head in their group sees, `(N, Hk, Lk, 1)` (S4.1)."""
    N, Hq, Lq, Lk = visible.shape
    grouped = visible.reshape(N, Hk, Hq // Hk, Lq, Lk)
    return any_of(grouped, (2, 3))[..., None]


def _softmax(s: Floats, sinks: Floats | None) -> tuple[Floats, Floats]:
    """Lse and P; P from the shifted sum, because `s - lse` loses digits where lse is large."""
    top = s.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    # A row without a finite score keeps shift 0, so that exp never meets inf - inf.
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(s - shift[..., None])
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - shift)
    # An infinite score makes its whole row NaN, as inf - inf does in every kernel.
    total = np.where(np.isposinf(total), np.nan, total)
    return np.log(total) + shift, weights / total[..., None]


def _gradients(t: Terms) -> tuple[Floats, Floats, Floats, Floats | None, Floats | None]:
    seen_by = np.swapaxes(t.visible, -1, -2)
    dq = t.scale * selected_product(t.dS_raw, t.k, t.visible)
    dk = t.scale * selected_product(np.swapaxes(t.dS_raw, -1, -2), t.q, seen_by)
    dv = selected_product(np.swapaxes(t.F * t.P, -1, -2), t.d_out, seen_by)
    dbias = dsinks = None
    if t.bias_shape is not None:
        dbias = t.grid.fold(t.dS, t.bias_shape)
    if t.sinks is not None:
        # An empty row has lse = sink: its whole d_lse belongs to the sink (S6.3).
        p_sink = np.where(t.live, np.exp(t.sinks[:, None] - t.lse), 1.0)
        dsinks = (p_sink * (t.d_lse - t.delta)).sum(axis=(0, 2))
    return (
        t.restore(dq),
        t.restore(t.fold_heads(dk)),
        t.restore(t.fold_heads(dv)),
        dbias,
        dsinks,
    )
