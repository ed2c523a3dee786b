"""Changes to drawn inputs that make a fault visible: poison, spikes, scores of every temper.

An edit gets the context, the float64 arrays by name, and who sees whom as `(N, Hq, Lq, Lk)`. A
random normal input lets a kernel read one key too many unnoticed; these do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._case import Context, Edit

__all__ = [
    "ascending", "correlated", "onehot", "poison", "put", "scaled", "set_to", "shifted", "spike",
]  # fmt: skip

Arrays = dict[str, Any]
Bools = NDArray[np.bool_]


def _flat(array: Any, rows: int) -> Any:
    """A view with axes `(N * H, L, ...)`: `rows` is the number of axes after the heads."""
    return array.reshape(-1, *array.shape[array.ndim - rows :])


def _seen_keys(ctx: Context, seen: Bools) -> Bools:
    """Keys that some head of their group sees, `(N * Hk, Lk)`."""
    N, Hq, Lq, Lk = seen.shape
    grouped = seen.reshape(N, ctx.shape.Hk, Hq // ctx.shape.Hk, Lq, Lk)
    return np.asarray(grouped.any(axis=(2, 3)).reshape(-1, Lk))


def poison(keys: float = np.nan, values: float = np.nan) -> Edit:
    """Unseen keys and values, and q, d_out and d_lse of rows that see nothing, hold poison."""

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        unseen = ~_seen_keys(ctx, seen)
        _flat(arrays["k"], 2)[unseen] = keys
        _flat(arrays["v"], 2)[unseen] = values
        dead = ~seen.any(axis=-1).reshape(-1, seen.shape[2])
        _flat(arrays["q"], 2)[dead] = np.nan
        _flat(arrays["d_out"], 2)[dead] = np.nan
        if "d_lse" in arrays and "sinks" not in arrays:
            _flat(arrays["d_lse"], 1)[dead] = np.nan

    return edit


def spike(value: float) -> Edit:
    """One value beside an edge of the mask, a different edge in each head: seen by some rows only.

    A row that wrongly sees it, or wrongly misses it, is off by far more than any rounding.
    """

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        N, Hq, Lq, Lk = seen.shape
        rows = seen.reshape(N * ctx.shape.Hk, (Hq // ctx.shape.Hk) * Lq, Lk)
        values = _flat(arrays["v"], 2)
        for head in range(rows.shape[0]):
            edges = np.flatnonzero((rows[head, :, 1:] != rows[head, :, :-1]).any(axis=0))
            if edges.size:
                j = int(ctx.rng.choice(edges)) + int(ctx.rng.integers(2))
                d = slice(None) if np.isfinite(value) else int(ctx.rng.integers(values.shape[-1]))
                values[head, j, d] = value

    return edit


def onehot(ctx: Context, arrays: Arrays, seen: Bools) -> None:
    """Each value names its key: `v[j, j mod Dv] = 1`, so a shifted or swapped key shows at once."""
    Lk, Dv = arrays["v"].shape[-2:]
    arrays["v"][...] = np.arange(Lk)[:, None] % Dv == np.arange(Dv)


def scaled(**factors: float) -> Edit:
    """Operands times a factor."""

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        for name, factor in factors.items():
            arrays[name] *= factor

    return edit


def shifted(**offsets: float) -> Edit:
    """Operands plus an offset."""

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        for name, offset in offsets.items():
            arrays[name] += offset

    return edit


def set_to(**values: float) -> Edit:
    """Operands filled with one value."""

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        for name, value in values.items():
            arrays[name][...] = value

    return edit


def put(name: str, index: Any, value: float) -> Edit:
    """One place of an operand holds a value."""

    def edit(ctx: Context, arrays: Arrays, seen: Bools) -> None:
        arrays[name][index] = value

    return edit


def ascending(ctx: Context, arrays: Arrays, seen: Bools) -> None:
    """Scores grow along the keys, so that a running maximum moves in every tile."""
    steps = np.linspace(-8.0, 8.0, arrays["k"].shape[-2])
    arrays["q"][...] = np.abs(arrays["q"])
    arrays["k"][...] = steps[:, None] + 0.1 * arrays["k"]


def correlated(ctx: Context, arrays: Arrays, seen: Bools) -> None:
    """Like activations: neighbours alike, a few channels large, a common direction in k and v."""
    for name in ("q", "k", "v"):
        array = arrays[name]
        drift = np.cumsum(array, axis=-2) / np.sqrt(1 + np.arange(array.shape[-2]))[:, None]
        channels = np.where(np.arange(array.shape[-1]) % 4 == 0, 3.0, 0.5)
        array[...] = (0.7 * drift + 0.5 * array + (0.8 if name != "q" else 0.0)) * channels
