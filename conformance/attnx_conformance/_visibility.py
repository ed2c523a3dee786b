"""Who sees whom, expanded from the plain fields of a mask by nothing but NumPy.

This is the oracle's own reading of clauses S3.1 to S3.6. It must not share a line with
`attnx.masks`: a fault there would otherwise move the expected answer along with the computed one,
and no test could see it. Mask objects are therefore known by the name of their type, and read
through their public fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._selection import Bools, Floats, any_of

__all__ = ["Grid", "alibi_bias", "is_alibi", "visibility"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """The shape of a score matrix: `batch` axes, `Hq` heads, `Lq` queries, `Lk` keys.

    `rank` is the number of axes of q, which a full-rank mask or bias has too.
    """

    batch: tuple[int, ...]
    Hq: int
    Lq: int
    Lk: int
    rank: int

    @property
    def N(self) -> int:
        """Batch entries, with the batch axes flattened in row-major order."""
        return math.prod(self.batch)

    @property
    def full(self) -> tuple[int, ...]:
        """The caller's score matrix: `(*B, Hq, Lq, Lk)`, or `(Lq, Lk)` for 2-D inputs."""
        heads = () if self.rank == 2 else (self.Hq,)
        return (*self.batch, *heads, self.Lq, self.Lk)

    @property
    def flat(self) -> tuple[int, int, int, int]:
        """The same with one batch axis and one head axis: `(N, Hq, Lq, Lk)`."""
        return (self.N, self.Hq, self.Lq, self.Lk)

    def expand(self, array: NDArray[Any]) -> NDArray[Any]:
        """Broadcast a mask or bias with 2 axes, or with q's number of axes, to `flat` (S3.3)."""
        if array.ndim not in (2, self.rank):
            raise ValueError(f"expected 2 or {self.rank} axes, got shape {array.shape}")
        return np.broadcast_to(array, self.full).reshape(self.flat)

    def fold(self, grad: Floats, shape: tuple[int, ...]) -> Floats:
        """Sum a gradient of shape `flat` over every axis that `expand` broadcast from `shape`."""
        grad = grad.reshape(self.full)
        lead = grad.ndim - len(shape)
        grad = np.asarray(grad.sum(axis=tuple(range(lead))))
        axes = tuple(a for a, n in enumerate(shape) if n == 1 and grad.shape[a] != 1)
        return np.asarray(grad.sum(axis=axes, keepdims=True))

    def per_entry(self, value: Any) -> Ints:
        """An integer scalar or an array of shape `*B`, as `(N, 1, 1, 1)`."""
        array = np.asarray(value).astype(np.int64)
        return np.broadcast_to(array, self.batch).reshape(self.N, 1, 1, 1)

    def per_token(self, value: Any, length: int) -> Ints:
        """An array of shape `(L,)` or `(*B, L)`, as `(N, L)`."""
        array = np.asarray(value).astype(np.int64)
        return np.broadcast_to(array, (*self.batch, length)).reshape(self.N, length)


def visibility(mask: Any, causal: bool | str, bias: NDArray[Any] | None, grid: Grid) -> Bools:
    """Whether query i sees key j, as an array of shape `grid.flat` (S3.1).

    Args:
        mask: A boolean array, a mask object, or None.
        causal: False, True, "top_left" or "bottom_right".
        bias: A floating array whose -inf entries hide (S3.4), or None.
        grid: The shape of the score matrix.

    Raises:
        ValueError: An alignment is needed and not given, or cannot be determined (S3.5).
        TypeError: The mask is of an unknown type.
    """
    chain = tuple(_conjuncts(mask))
    expand = _Expansion(grid, chain)
    seen = np.ones(grid.flat, dtype=np.bool_)
    for part in chain:
        seen &= expand(part)
    if causal is not False:
        align = None if causal is True else str(causal)
        seen &= expand.causal(align, None, None)
    if bias is not None:
        seen &= grid.expand(~np.isneginf(np.asarray(bias, dtype=np.float64)))
    return seen


def alibi_bias(alibi: Any, mask: Any, grid: Grid) -> Floats:
    """The bias that an `Alibi` stands for, -slopes[h] |p_i - j|, of shape `grid.flat` (S2.7).

    Args:
        alibi: An object with `slopes`, `align`, `q_pos` and `kv_pos`.
        mask: As in `visibility`; its `Lengths` move `bottom_right`.
        grid: The shape of the score matrix.
    """
    at = _Expansion(grid, tuple(_conjuncts(mask)))
    away = np.abs(at.positions(alibi.align, alibi.q_pos, alibi.kv_pos) - at.keys(alibi.kv_pos))
    slopes = np.asarray(alibi.slopes).astype(np.float64).reshape(1, grid.Hq, 1, 1)
    return np.broadcast_to(-slopes * away, grid.flat)


def is_alibi(bias: Any) -> bool:
    """Whether a bias is said by slopes, and not by an array."""
    return type(bias).__name__ == "Alibi"


def _conjuncts(mask: Any) -> Iterator[Any]:
    """The parts of the top-level `&` chain."""
    if mask is None:
        return
    if _kind(mask) == "And":
        for part in mask.parts:
            yield from _conjuncts(part)
    else:
        yield mask


def _kind(mask: Any) -> str:
    return "array" if isinstance(mask, np.ndarray) else type(mask).__name__


def _count_lengths(mask: Any) -> int:
    kind = _kind(mask)
    if kind == "Lengths":
        return 1
    if kind in ("And", "Or"):
        return sum(_count_lengths(part) for part in mask.parts)
    return _count_lengths(mask.part) if kind == "Not" else 0


class _Expansion:
    """Expands mask objects over one grid, with the lengths that move `bottom_right` known."""

    def __init__(self, grid: Grid, chain: tuple[Any, ...]) -> None:
        self.grid = grid
        self.chain = chain
        self.i = np.arange(grid.Lq).reshape(1, 1, -1, 1)
        self.j = np.arange(grid.Lk).reshape(1, 1, 1, -1)

    def __call__(self, mask: Any) -> Bools:
        """The visibility that one mask gives, broadcast to the whole grid."""
        kind = _kind(mask)
        rule = getattr(self, f"_{kind.lower()}", None)
        if rule is None:
            raise TypeError(f"the oracle does not know a mask of type {kind}")
        return np.broadcast_to(rule(mask), self.grid.flat)

    def _array(self, mask: NDArray[Any]) -> Bools:
        if mask.dtype != np.bool_:
            raise TypeError(f"expected a boolean mask, got {mask.dtype}")
        return self.grid.expand(mask)

    def _dense(self, mask: Any) -> Bools:
        return self._array(np.asarray(mask.array))

    def _and(self, mask: Any) -> Bools:
        return ~any_of(np.stack([~self(part) for part in mask.parts]), 0)

    def _or(self, mask: Any) -> Bools:
        return any_of(np.stack([self(part) for part in mask.parts]), 0)

    def _not(self, mask: Any) -> Bools:
        return ~self(mask.part)

    def _blockmask(self, mask: Any) -> Bools:
        rows, columns = (
            np.arange(self.grid.Lq) // mask.q_block,
            np.arange(self.grid.Lk) // mask.kv_block,
        )
        blocks = np.asarray(mask.layout)
        blocks = blocks if blocks.shape[-2] == 1 else blocks[..., rows, :]
        return self._array(blocks if blocks.shape[-1] == 1 else blocks[..., columns])

    def _lengths(self, mask: Any) -> Bools:
        seen: Bools = self.j < self.grid.per_entry(mask.kv)
        if mask.q is not None:
            seen = seen & (self.i < self.grid.per_entry(mask.q))
        return seen

    def _starts(self, mask: Any) -> Bools:
        seen: Bools = self.j >= self.grid.per_entry(mask.kv)
        return seen

    def _prefix(self, mask: Any) -> Bools:
        seen: Bools = self.j < self.grid.per_entry(mask.n)
        return seen

    def _segments(self, mask: Any) -> Bools:
        N, _, Lq, Lk = self.grid.flat
        q_ids = self.grid.per_token(mask.q_ids, Lq).reshape(N, 1, Lq, 1)
        kv_ids = self.grid.per_token(mask.kv_ids, Lk).reshape(N, 1, 1, Lk)
        seen: Bools = (q_ids == kv_ids) & (q_ids >= 0)
        return seen

    def _predicate(self, mask: Any) -> Bools:
        b = np.arange(self.grid.N).reshape(-1, 1, 1, 1)
        h = np.arange(self.grid.Hq).reshape(1, -1, 1, 1)
        return np.asarray(mask.fn(b, h, self.i, self.j), dtype=np.bool_)

    def _causal(self, mask: Any) -> Bools:
        return self.causal(mask.align, mask.q_pos, mask.kv_pos)

    def causal(self, align: str | None, q_pos: Any, kv_pos: Any) -> Bools:
        """Keys at or before the position of the query."""
        seen: Bools = self.keys(kv_pos) <= self.positions(align, q_pos, kv_pos)
        return seen

    def _window(self, mask: Any) -> Bools:
        p, j = self.positions(mask.align, mask.q_pos, mask.kv_pos), self.keys(mask.kv_pos)
        seen = np.ones(np.broadcast_shapes(p.shape, j.shape), dtype=np.bool_)
        if mask.left is not None:
            seen &= j >= p - mask.left
        if mask.right is not None:
            seen &= j <= p + mask.right
        return seen

    def keys(self, kv_pos: Any) -> Ints:
        """Where each key stands: `(1 or N, 1, 1, Lk)`."""
        if kv_pos is None:
            return self.j
        return self.grid.per_token(kv_pos, self.grid.Lk).reshape(self.grid.N, 1, 1, -1)

    def positions(self, align: str | None, q_pos: Any, kv_pos: Any) -> Ints:
        """Where each query stands (S3.5): `(1 or N, 1, Lq, 1)`."""
        Lq, Lk = self.grid.Lq, self.grid.Lk
        if q_pos is not None:
            return self.grid.per_token(q_pos, Lq).reshape(self.grid.N, 1, Lq, 1)
        if align is None and kv_pos is None and Lq != Lk:
            raise ValueError(f"Lq {Lq} != Lk {Lk} needs an alignment (S3.5)")
        if align in (None, "top_left"):
            return self.i
        if align != "bottom_right":
            raise ValueError(f"unknown alignment {align!r}")
        lengths = [part for part in self.chain if _kind(part) == "Lengths"]
        if len(lengths) > 1 or len(lengths) != sum(map(_count_lengths, self.chain)):
            raise ValueError("bottom_right needs at most one Lengths, in the top-level & (S3.5)")
        n_k, n_q = self.grid.per_entry(Lk), self.grid.per_entry(Lq)
        if lengths:
            n_k = np.clip(self.grid.per_entry(lengths[0].kv), 0, Lk)
            if lengths[0].q is not None:
                n_q = np.clip(self.grid.per_entry(lengths[0].q), 0, Lq)
        return self.i + n_k - n_q
