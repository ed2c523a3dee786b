"""Who sees whom, one method a kind of mask, so that a fault can change a single rule.

A third reading of S3 beside attnx's own and the oracle's. It shares no line with either: a mask
fault is planted here, in the way that kernels really get that mask wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnx.masks import And, Causal, Dense, Lengths
from attnx_conformance._visibility import Grid

__all__ = ["Call", "Sight"]


@dataclass
class Call:
    """One call in canonical form: axes `(N, H, L, ...)`, k and v repeated to the query heads.

    Attributes:
        given: the options as they came.
        arrays: the operands as they came, by name.
        low: the dtype of q, k and v.
        high: the dtype of scores and sums.
        backward: whether the gradient is being computed.
    """

    given: dict[str, Any]
    arrays: dict[str, Any]
    grid: Grid
    Hk: int
    D: int
    Dv: int
    low: Any
    high: Any
    layout: str
    scale: float = 1.0
    softcap: float | None = None
    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    sinks: Any = None
    visible: Any = None
    backward: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def g(self) -> int:
        """Query heads a key head."""
        return self.grid.Hq // self.Hk

    @property
    def mask(self) -> Any:
        """The mask as it came."""
        return self.given.get("mask")

    @property
    def causal(self) -> Any:
        """The option `causal` as it came."""
        return self.given.get("causal", False)

    @property
    def dropout(self) -> Any:
        """The option `dropout` as it came."""
        return self.given.get("dropout")

    @property
    def live(self) -> Any:
        """Rows that see something, `(N, Hq, Lq)`."""
        return self.visible.any(axis=-1)


class Sight:
    """The rules of S3.1 to S3.6. Each method gives booleans that broadcast to `(N, Hq, Lq, Lk)`."""

    def visible(self, c: Call) -> Any:
        """All constraints together."""
        seen = np.ones(c.grid.flat, dtype=bool)
        for part in self.parts(c):
            seen &= self.rule(c, part)
        if c.arrays.get("bias") is not None:
            seen &= self.shown_by_bias(c, c.arrays["bias"])
        return seen

    def parts(self, c: Call) -> list[Any]:
        """The constraints that must all hold."""
        causal = c.causal
        option = [] if causal is False else [Causal(None if causal is True else str(causal))]
        return [*option, *self.conjuncts(c.mask)]

    def conjuncts(self, mask: Any) -> Iterator[Any]:
        """The parts of a top-level `&`."""
        if isinstance(mask, And):
            for part in mask.parts:
                yield from self.conjuncts(part)
        elif mask is not None:
            yield Dense(mask) if isinstance(mask, np.ndarray) else mask

    def rule(self, c: Call, mask: Any) -> Any:
        """By the mask's type."""
        kind = type(mask).__name__.lower()
        return np.broadcast_to(getattr(self, f"{kind}_rule")(c, mask), c.grid.flat)

    def shown_by_bias(self, c: Call, bias: Any) -> Any:
        """Everything but -inf."""
        return self.spread(c, ~np.isneginf(bias))

    def spread(self, c: Call, array: Any) -> Any:
        """A mask or a bias over the whole grid (S3.3)."""
        return np.broadcast_to(array, c.grid.full).reshape(c.grid.flat)

    def i(self, c: Call) -> Any:
        """Query indices."""
        return np.arange(c.grid.Lq)[:, None]

    def j(self, c: Call) -> Any:
        """Key indices."""
        return np.arange(c.grid.Lk)

    def entries(self, c: Call, value: Any) -> Any:
        """A count per batch entry, `(N, 1, 1, 1)`."""
        counts = np.broadcast_to(np.asarray(value).astype(np.int64), c.grid.batch)
        return counts.reshape(-1, 1, 1, 1)

    def tokens(self, c: Call, value: Any, length: int) -> Any:
        """An integer per token, `(N, 1, L)`."""
        ids = np.broadcast_to(np.asarray(value).astype(np.int64), (*c.grid.batch, length))
        return ids.reshape(c.grid.N, 1, length)

    # One rule a kind

    def dense_rule(self, c: Call, mask: Any) -> Any:
        """True is visible."""
        return self.spread(c, np.asarray(mask.array))

    def and_rule(self, c: Call, mask: Any) -> Any:
        """Below a `|` or a `~`."""
        return np.logical_and.reduce([self.rule(c, part) for part in mask.parts])

    def or_rule(self, c: Call, mask: Any) -> Any:
        """Any of the parts."""
        return np.logical_or.reduce([self.rule(c, part) for part in mask.parts])

    def not_rule(self, c: Call, mask: Any) -> Any:
        """The complement on the whole grid."""
        return ~self.rule(c, mask.part)

    def lengths_rule(self, c: Call, mask: Any) -> Any:
        """Right padding."""
        seen = self.j(c) < self.entries(c, mask.kv)
        return seen if mask.q is None else seen & (self.i(c) < self.entries(c, mask.q))

    def starts_rule(self, c: Call, mask: Any) -> Any:
        """Left padding."""
        return self.j(c) >= self.entries(c, mask.kv)

    def prefix_rule(self, c: Call, mask: Any) -> Any:
        """The first keys."""
        return self.j(c) < self.entries(c, mask.n)

    def segments_rule(self, c: Call, mask: Any) -> Any:
        """Equal ids, none of them negative."""
        q_ids = self.tokens(c, mask.q_ids, c.grid.Lq)[..., None]
        kv_ids = self.tokens(c, mask.kv_ids, c.grid.Lk)[..., None, :]
        return (q_ids == kv_ids) & (q_ids >= 0)

    def blockmask_rule(self, c: Call, mask: Any) -> Any:
        """Each pair as the block in which it lies."""
        shown = np.asarray(mask.layout)
        for axis, index, size in (
            (-2, self.i(c)[:, 0], self.block_sizes(mask)[0]),
            (-1, self.j(c), self.block_sizes(mask)[1]),
        ):
            if shown.shape[axis] != 1:
                shown = np.take(shown, np.minimum(index // size, shown.shape[axis] - 1), axis=axis)
        return self.spread(c, shown)

    def block_sizes(self, mask: Any) -> tuple[int, int]:
        """Of queries and of keys."""
        return mask.q_block, mask.kv_block

    def predicate_rule(self, c: Call, mask: Any) -> Any:
        """Asked on index arrays."""
        b = np.arange(c.grid.N)[:, None, None, None]
        h = np.arange(c.grid.Hq)[:, None, None]
        return np.asarray(mask.fn(b, h, self.i(c), self.j(c)), dtype=bool)

    def causal_rule(self, c: Call, mask: Any) -> Any:
        """Keys up to the query's position."""
        return self.key_positions(c, mask) <= self.positions(c, mask)

    def window_rule(self, c: Call, mask: Any) -> Any:
        """Keys from `left` before the query's position to `right` after it."""
        away = self.key_positions(c, mask) - self.positions(c, mask)
        seen = np.ones(away.shape, dtype=bool)
        if mask.left is not None:
            seen &= away >= -mask.left
        if mask.right is not None:
            seen &= away <= mask.right
        return seen

    def key_positions(self, c: Call, mask: Any) -> Any:
        """Where each key stands."""
        if mask.kv_pos is None:
            return self.j(c)
        return self.tokens(c, mask.kv_pos, c.grid.Lk)[..., None, :]

    def positions(self, c: Call, mask: Any) -> Any:
        """Where each query stands (S3.5)."""
        if mask.q_pos is not None:
            return self.tokens(c, mask.q_pos, c.grid.Lq)[..., None]
        return self.i(c) + (self.offset(c) if mask.align == "bottom_right" else 0)

    def offset(self, c: Call) -> Any:
        """What `bottom_right` adds: n_k - n_q."""
        n_k, n_q = c.grid.Lk, c.grid.Lq
        for part in self.conjuncts(c.mask):
            if isinstance(part, Lengths):
                n_k = np.clip(self.entries(c, part.kv), 0, c.grid.Lk)
                n_q = n_q if part.q is None else np.clip(self.entries(c, part.q), 0, c.grid.Lq)
        return n_k - n_q
