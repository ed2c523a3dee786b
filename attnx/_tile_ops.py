"""The products and selections of one tile, in array-API terms, for `ArrayBackend`.

A group's query heads are folded into rows: (B, Hq, n, x) is seen as (B, Hk, g n, x), so that keys
and values are never repeated and sums over a group come out of the product itself.
"""

from __future__ import annotations

from typing import Any

from attnx._contract import Gradients

__all__ = [
    "STRUCTURED",
    "accumulator",
    "cut",
    "finite_part",
    "leak",
    "product",
    "product_t",
    "reduce_to",
    "zeros_like",
]

STRUCTURED = frozenset("causal window lengths starts prefix segments positions or not".split())
"""The kinds of mask whose structure a tile plan turns into saved work."""


def accumulator(xp: Any, dtype: str) -> Any:
    """Scores and sums are kept in float32 at least; float64 stays float64 (S5.2)."""
    return xp.float64 if dtype == "float64" else xp.float32


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


def cut(bias: Any, tile: Any) -> Any:
    """The part of a mask or bias of four axes that a tile covers; axes of size 1 stay."""
    if bias.shape[2] != 1:
        bias = bias[:, :, tile.i0 : tile.i1, :]
    return bias if bias.shape[3] == 1 else bias[:, :, :, tile.j0 : tile.j1]


def finite_part(xp: Any, x: Any) -> Any:
    """The array with 0 in place of NaN and inf."""
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def leak(xp: Any, multiply: Any, shown: Any, x: Any) -> Any:
    """What a product with `x` owes to its NaN and inf, through the pairs that are visible.

    Args:
        xp: the namespace.
        multiply: `product` or `product_t`, of `shown` as numbers and an indicator.
        shown: the visible pairs, (B, Hq, n, m), as numbers.
        x: the factor that holds NaN or inf.

    Returns:
        0 where no visible pair meets a NaN or inf; there the NaN or inf (S4.2).
    """
    parts = []
    for value, where in ((xp.nan, xp.isnan(x)), (xp.inf, x == xp.inf), (-xp.inf, x == -xp.inf)):
        hits = multiply(shown, xp.astype(where, shown.dtype))
        parts.append(xp.where(hits > 0, xp.full_like(hits, value), xp.zeros_like(hits)))
    return parts[0] + parts[1] + parts[2]


def reduce_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes that were broadcast from size 1."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return xp.sum(x, axis=axes, keepdims=True) if axes else x


def zeros_like(xp: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Gradients:
    """Gradients of nothing."""
    return Gradients(*(None if x is None else xp.zeros_like(x) for x in (q, k, v, bias, sinks)))
