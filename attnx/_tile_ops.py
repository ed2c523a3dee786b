"""The products and selections of one tile, in array-API terms, for `ArrayBackend`.

A group's query heads are folded into rows: (B, Hq, n, x) is seen as (B, Hk, g n, x), so that keys
and values are never repeated and sums over a group come out of the product itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from attnx._contract import MASK_KINDS, Gradients
from attnx.tiling import Tile

__all__ = [
    "STRUCTURED",
    "Block",
    "Rows",
    "Scores",
    "Tile",
    "accumulator",
    "cast",
    "cut",
    "probability",
    "product",
    "product_t",
    "reduce_to",
    "seen_product",
    "seen_product_t",
    "zeros_like",
]

STRUCTURED = MASK_KINDS - {"dense", "predicate"}
"""The kinds of mask whose structure a tile plan turns into saved work."""


class Scores(NamedTuple):
    """A tile's scores (B, Hq, n, m), before hidden pairs are taken out.

    Attributes:
        s: softcapped and biased.
        tanh: tanh(s / softcap), or None; its derivative is needed in the backward.
        shown: the visible pairs, or None when all are.
    """

    s: Any
    tanh: Any
    shown: Any


class Rows(NamedTuple):
    """What the online softmax knows of a block of rows, each (B, Hq, n, 1).

    Attributes:
        m: the greatest score so far, sinks included.
        total: the sum of exp(score - m).
        seen: whether the row has seen a key.
    """

    m: Any
    total: Any
    seen: Any


class Block(NamedTuple):
    """A block of rows in the backward: q and d_out (B, Hq, n, D or Dv), the rest (B, Hq, n, 1).

    Attributes:
        q: its queries.
        d_out: its cotangent of out.
        delta: sum over d of d_out times out.
        d_lse: its cotangent of lse, or None.
        shift: shift + rest is lse.
        rest: None for 0.
    """

    q: Any
    d_out: Any
    delta: Any
    d_lse: Any
    shift: Any
    rest: Any


def accumulator(xp: Any, dtype: str) -> Any:
    """Scores and sums are kept in float32 at least; float64 stays float64 (S5.2)."""
    return xp.float64 if dtype == "float64" else xp.float32


def cast(xp: Any, x: Any, dtype: Any) -> Any:
    """The array in a dtype: itself where it has it already."""
    return xp.astype(x, dtype, copy=False)


def product(xp: Any, rows: Any, x: Any) -> Any:
    """Sum over keys: (B, Hq, n, m) with (B, Hk, m, d) gives (B, Hq, n, d)."""
    B, Hq, n, m = rows.shape
    Hk = x.shape[1]
    folded = xp.reshape(rows, (B, Hk, (Hq // Hk) * n, m)) if Hk != Hq else rows
    return xp.reshape(xp.matmul(folded, x), (B, Hq, n, x.shape[-1]))


def product_t(xp: Any, rows: Any, y: Any, Hk: int) -> Any:
    """Sum over queries and groups: (B, Hq, n, m) with (B, Hq, n, d) gives (B, Hk, m, d)."""
    B, Hq, n, m = rows.shape
    if Hk != Hq:
        rows = xp.reshape(rows, (B, Hk, (Hq // Hk) * n, m))
        y = xp.reshape(y, (B, Hk, (Hq // Hk) * n, y.shape[-1]))
    return xp.matmul(xp.matrix_transpose(rows), y)


def seen_product(xp: Any, rows: Any, x: Any, shown: Any) -> Any:
    """`product`, where x may hold NaN and inf that reach only the rows that see them (S4.2).

    Args:
        xp: the namespace.
        rows: (B, Hq, n, m), 0 where hidden.
        x: (B, Hk, m, d).
        shown: the visible pairs, broadcasting to rows, or None to multiply plainly.
    """
    return _isolated(xp, partial(product, xp), rows, x, shown)


def seen_product_t(xp: Any, rows: Any, y: Any, Hk: int, shown: Any) -> Any:
    """`product_t`, alike: NaN and inf of a row reach only the keys that it sees."""
    return _isolated(xp, partial(product_t, xp, Hk=Hk), rows, y, shown)


def _isolated(xp: Any, multiply: Any, rows: Any, x: Any, shown: Any) -> Any:
    if shown is None:
        return multiply(rows, x)
    pairs = xp.broadcast_to(xp.astype(shown, rows.dtype), rows.shape)
    finite = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    return multiply(rows, finite) + _leak(xp, multiply, pairs, x)


def _leak(xp: Any, multiply: Any, pairs: Any, x: Any) -> Any:
    """What a product with `x` owes to its NaN and inf: 0 where no visible pair meets one."""
    parts = []
    for value, where in ((xp.nan, xp.isnan(x)), (xp.inf, x == xp.inf), (-xp.inf, x == -xp.inf)):
        hits = multiply(pairs, xp.astype(where, pairs.dtype))
        parts.append(xp.where(hits > 0, xp.full_like(hits, value), xp.zeros_like(hits)))
    return parts[0] + parts[1] + parts[2]


def probability(xp: Any, s: Any, shift: Any, rest: Any) -> Any:
    """exp(s - shift - rest), for shift + rest = lse; `rest` may be None for 0.

    No score that counts exceeds the shift by more than rounding, so the difference is cut at 0:
    hidden scores, which nothing bounds, do not overflow, and huge ones do not magnify rounding.
    """
    below = xp.minimum(s - shift, xp.zeros_like(shift))
    return xp.exp(below if rest is None else below - rest)


def cut(bias: Any, tile: Tile) -> Any:
    """The part of a bias of four axes that a tile covers; axes of size 1 stay."""
    if bias.shape[2] != 1:
        bias = bias[:, :, tile.i0 : tile.i1, :]
    return bias if bias.shape[3] == 1 else bias[:, :, :, tile.j0 : tile.j1]


def reduce_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes that were broadcast from size 1."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return xp.sum(x, axis=axes, keepdims=True) if axes else x


def zeros_like(xp: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Gradients:
    """Gradients of nothing."""
    return Gradients(*(None if x is None else xp.zeros_like(x) for x in (q, k, v, bias, sinks)))
