"""Small calls in one piece, or a piece of some heads for each thread: no tiles.

Where a head's whole score array fits the caches, the blocked kernel costs more in Python than it
saves in memory, and a dozen NumPy calls over several heads do the work. So it is with a few queries
before a long cache, whose scores are few beside the keys that give them. Values that are not finite
take the blocked kernel, which knows how to keep them apart.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx.plugin import Gradients
from attnx.tiling import alibi_tile
from attnx_numpy import _threads
from attnx_numpy._pieces import SCORES, Piece, Sight, Sights, indices, pieces
from attnx_numpy._scores import tame

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass
    from attnx_numpy._threads import Scratch

__all__ = ["backward", "direct", "fits", "forward"]

HEAD = 1 << 18
"""Most scores of a key head's queries: a megabyte of float32. With a mask a quarter of it, since
tiles leave out what is hidden."""

FEW = 16
"""Query rows of a key head up to which a call is small at any length: its scores then take a tenth
of the memory of its keys and values. In 16 bits these would be upcast whole."""

FULL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}


def fits(call: Call) -> bool:
    """Whether a call is small, not empty, and without dropout, which stands in tiles alone."""
    if call.dropout is not None:
        return False
    rows = call.Lq * (call.Hq // call.Hk)
    if call.B * call.Hk * rows * call.Lk == 0:
        return False
    most = HEAD if call.mask is None else HEAD // 4
    return rows * call.Lk <= most or (rows <= FEW and call.dtype in FULL)


class _Wild(Exception):
    """Something is not finite, or may make something that is not."""


class _Part(NamedTuple):
    """A piece of a call: its arrays in the accumulator's dtype, and what it shows.

    Attributes:
        q: (b, groups, rows, D), the query heads of a group as rows of one.
        k: (b, groups, Lk, D).
        v: (b, groups, Lk, Dv).
        bias: as the call's, for these heads; None without one.
        alibi: what it adds, (1 or b, heads, Lq, Lk), or None.
        sinks: (heads, 1, 1), or None.
        sight: what is visible; None when all is.
        shape: (b, heads, Lq, Lk).
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    alibi: Any
    sinks: Any
    sight: Sight | None
    shape: tuple[int, int, int, int]


def _open(call: Call) -> bool:
    """Whether every row sees every key, and nothing else decides.

    NaN, inf and what overflows then end as NaN or inf in the answer of a row that they should
    reach anyway, so that a look at the answer will do: decoding thus reads its cache once.
    """
    return call.mask is None and call.bias is None and call.sinks is None and call.softcap is None


def _part(q: Any, k: Any, v: Any, call: Call, piece: Piece, sights: Sights, *, look: bool) -> _Part:
    """A piece's part of a call; `look` for values that are not finite.

    Raises:
        _Wild: a value must be kept from rows that do not see it.
    """
    dtype = np.float64 if call.dtype == "float64" else np.float32
    q, k, v = q[piece.b, piece.heads], k[piece.b, piece.groups], v[piece.b, piece.groups]
    bias = call.bias
    if bias is not None:
        bias = bias[piece.b] if bias.shape[0] != 1 else bias
        bias = bias[:, piece.heads] if bias.shape[1] != 1 else bias
    if look and not (tame(call.scale, q, k, v) and (bias is None or bool(bias.max() < np.inf))):
        raise _Wild
    alibi = call.alibi
    if alibi is not None:
        if look and not np.isfinite(alibi.slopes).all():
            raise _Wild
        alibi = alibi_tile(alibi, indices(call, piece), dtype)
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks[piece.heads].astype(dtype)[:, None, None]
    b, heads = q.shape[:2]
    return _Part(
        q.astype(dtype, copy=False).reshape(b, k.shape[1], -1, call.D),
        k.astype(dtype, copy=False), v.astype(dtype, copy=False), bias, alibi, sinks,
        sights.of(piece, bias), (b, heads, call.Lq, call.Lk),
    )  # fmt: skip


def _run(job: Callable[[Piece, Scratch], None], parts: list[Piece]) -> bool:
    """Do every piece; whether all were tame."""
    try:
        _threads.run(job, parts, min(_threads.threads(), len(parts)))
    except _Wild:
        return False
    return True


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any] | None:
    """The answer (out, lse) of a call that `fits`; None where the blocked kernel must isolate."""
    out = np.empty((call.B, call.Hq, call.Lq, call.Dv), q.dtype)
    lse = None
    if call.need_lse:
        lse = np.empty(out.shape[:3], np.float64 if call.dtype == "float64" else np.float32)
    sights = Sights(call)
    late = _open(call) and not call.assume_finite

    def job(piece: Piece, scratch: Scratch) -> None:
        part = _part(q, k, v, call, piece, sights, look=not (late or call.assume_finite))
        p, m, total, _ = _softmax(part, call, scratch)
        rows = np.matmul(p.reshape(*part.k.shape[:2], -1, call.Lk), part.v)
        at = (piece.b, piece.heads)
        rows, rows_lse = _finish(rows.reshape(*part.shape[:3], -1), m, total, part, call)
        if late and not np.isfinite(rows.sum()):
            raise _Wild
        out[at] = rows
        if lse is not None:
            lse[at] = rows_lse

    return (out, lse) if _run(job, pieces(call)) else None


def backward(
    q: Any, k: Any, v: Any, out: Any, d_out: Any, d_lse: Any, call: Call
) -> Gradients | None:
    """The gradients of a call that `fits`, or None; P is made from the scores, not from lse."""
    if not call.assume_finite and not (
        tame(1.0, d_out) and (d_lse is None or bool(np.isfinite(d_lse).all()))
    ):
        return None
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    shared = _InOrder(call)
    sights = Sights(call)

    def job(piece: Piece, scratch: Scratch) -> None:
        part = _part(q, k, v, call, piece, sights, look=not call.assume_finite)
        at, keys = (piece.b, piece.heads), (piece.b, piece.groups)
        o, d = (x[at].astype(part.q.dtype, copy=False) for x in (out, d_out))
        flow = np.einsum("bhid,bhid->bhi", o, d)
        if d_lse is not None:
            flow -= d_lse[at]
        found = _gradients(part, d, flow, call, scratch)
        dq[at], dk[keys], dv[keys] = found.q, found.k, found.v
        shared.add(piece, found)

    if not _run(job, pieces(call)):
        return None
    return Gradients(dq, dk, dv, *shared.sums())


def _gradients(part: _Part, d_out: Any, flow: Any, call: Call, scratch: Scratch) -> Gradients:
    """The gradients of a piece; its own share of those of the bias and the sinks."""
    p, m, total, slope = _softmax(part, call, scratch, sloped=call.softcap is not None)
    dtype = p.dtype
    flat = (*part.k.shape[:2], -1, call.Lk)
    seen = total if part.sight is None else np.where(total > 0, total, 1)
    p /= seen
    d = d_out.reshape(*flat[:3], call.Dv)
    dv = np.matmul(p.reshape(flat).swapaxes(-1, -2), d)
    ds = np.matmul(d, part.v.swapaxes(-1, -2)).reshape(p.shape)
    ds -= flow[..., None]
    ds *= p
    bias = sinks = None
    if part.bias is not None:
        bias = _summed_to(ds, part.bias.shape)
    if part.sinks is not None:
        below = part.sinks - np.where(np.isneginf(m), dtype.type(0), m)
        share = np.exp(below) / seen
        sinks = -(share[..., 0] * flow).sum(axis=(0, 2))
    if slope is not None:
        ds *= slope
    ds *= dtype.type(call.scale)
    raw = ds.reshape(flat)
    dq = np.matmul(raw, part.k).reshape(*part.shape[:3], call.D)
    return Gradients(dq, np.matmul(raw.swapaxes(-1, -2), part.q), dv, bias, sinks)


class _InOrder:
    """The gradients of bias and sinks, summed over pieces in the pieces' order.

    Threads finish in any order, and a sum must not depend on it; what comes early waits.
    """

    def __init__(self, call: Call) -> None:
        self.inputs = (call.bias, call.sinks)
        dtype = np.float64 if call.dtype == "float64" else np.float32
        self.totals = [None if x is None else np.zeros(x.shape, dtype) for x in self.inputs]
        self.done = 0
        self.early: dict[int, tuple[Piece, Gradients]] = {}
        self.lock = threading.Lock()

    def add(self, piece: Piece, found: Gradients) -> None:
        """Add a piece's share when its turn comes."""
        bias, sinks = self.totals
        with self.lock:
            self.early[piece.number] = piece, found._replace(q=None, k=None, v=None)
            while self.done in self.early:
                at, share = self.early.pop(self.done)
                if bias is not None:
                    b = at.b if bias.shape[0] != 1 else slice(None)
                    bias[b, at.heads if bias.shape[1] != 1 else slice(None)] += share.bias
                if sinks is not None:
                    sinks[at.heads] += share.sinks
                self.done += 1

    def sums(self) -> list[Any]:
        """The sums in their inputs' dtypes."""
        return [
            None if total is None else total.astype(x.dtype, copy=False)
            for total, x in zip(self.totals, self.inputs, strict=True)
        ]


def _softmax(
    part: _Part, call: Call, scratch: Scratch, *, sloped: bool = False
) -> tuple[Any, Any, Any, Any]:
    """exp(s - m) (b, heads, Lq, Lk), m, its sums with the sinks', the cap's slope."""
    dtype = part.q.dtype.type
    s = scratch("s", part.shape, part.q.dtype)
    flat = s.reshape(*part.k.shape[:2], -1, call.Lk)
    np.matmul(part.q, part.k.swapaxes(-1, -2), out=flat)
    s *= dtype(call.scale)
    slope = None
    if call.softcap is not None:
        s /= dtype(call.softcap)
        np.tanh(s, out=s)
        slope = 1 - s * s if sloped else None
        s *= dtype(call.softcap)
    if part.bias is not None:
        s += part.bias.astype(dtype, copy=False)
    if part.alibi is not None:
        s += part.alibi
    if part.sight is not None:
        s += part.sight.penalty
    m = s.max(axis=-1, keepdims=True)
    if part.sinks is not None:
        m = np.maximum(m, part.sinks)
    shift = m if part.sight is None else np.where(np.isneginf(m), dtype(0), m)
    s -= shift
    p = np.exp(s, out=s)
    if p.size <= SCORES:  # as `direct` does it, to the bit
        total = p.sum(axis=-1, keepdims=True)
    else:
        total = np.matmul(p, np.ones(call.Lk, dtype))[..., None]
    if part.sinks is not None:
        total += np.exp(part.sinks - shift)
    return p, m, total, slope


def _summed_to(ds: Any, shape: tuple[int, ...]) -> Any:
    """Summed over the axes along which the bias was broadcast."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and ds.shape[axis] != 1)
    return ds.sum(axis=axes, keepdims=True) if axes else ds.copy()


def direct(cls: CallClass) -> Callable[..., Any] | None:
    """Small calls of a class without mask, group or upcast: out, or None to look closer."""
    if cls.mask is not None or cls.grouped or cls.need_lse or cls.dtype not in FULL:
        return None
    dtype, look = FULL[cls.dtype], not cls.assume_finite
    default = dtype(1 / math.sqrt(cls.D))

    def direct(q: Any, k: Any, v: Any, scale: float | None, scores: int) -> Any:
        if not 0 < scores <= SCORES:
            return None
        with np.errstate(all="ignore"):
            if look and not tame(1.0 if scale is None else scale, q, k, v):
                return None
            s = np.matmul(q, k.swapaxes(-1, -2))
            s *= default if scale is None else dtype(scale)
            s -= s.max(axis=-1, keepdims=True)
            np.exp(s, out=s)
            out = np.matmul(s, v)
            out /= s.sum(axis=-1, keepdims=True)
            return out

    return direct


def _finish(rows: Any, m: Any, total: Any, part: _Part, call: Call) -> tuple[Any, Any]:
    """A piece's out, from its sums over v, and its lse where it is needed."""
    dead = None if part.sight is None else part.sight.dead
    if dead is not None:
        total = np.where(dead, rows.dtype.type(1), total)
    rows /= total
    lse = m + np.log(total) if call.need_lse else None
    if dead is not None:
        np.copyto(rows, 0, where=dead)
        if lse is not None:
            lse = np.where(dead, -np.inf if part.sinks is None else part.sinks, lse)
    return rows, None if lse is None else lse[..., 0]
