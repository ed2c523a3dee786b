"""What is timed: one call of attention, said so that every implementation can be asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import attnx

__all__ = ["Arrays", "Workload", "numpy_dtype"]

Array = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, bfloat16 by ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Arrays:
    """The operands of a workload, as NumPy arrays in the layout bhsd."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    bias: Array | None = None


@dataclass(frozen=True)
class Workload:
    """One call.

    Attributes:
        name: unique, with words joined by hyphens.
        title: one line for a table.
        B: batch entries.
        Hq: query heads.
        Hk: key/value heads.
        Lq: queries.
        Lk: keys.
        D: head size of q and k.
        Dv: head size of v.
        dtype: of q, k and v.
        causal: False, "top_left" or "bottom_right"; `True` of the API where Lq == Lk.
        window: how many keys back from its own position a query sees; None for all.
        documents: packed one after the other in the sequence; 1 for none.
        valid: the share of the sequence that is valid in each batch entry, the rest padding.
        softcap: or None.
        bias: whether a bias (1, Hq, Lq, Lk) of q's dtype is added.
        dropout: the probability with which elements of P are dropped; 0 for none.
        need_lse: whether lse is asked for as well.
        gradient: whether the gradients of q, k and v are part of what is timed.
        logits: a factor on q, to peak the scores.
        finite: whether the caller vouches that all values are finite (S4.4).
        quick: whether `--quick` runs it.
        beside: workloads that our own backends also run in the rounds of this one, because a goal
            compares the two: what was timed in other minutes cannot be compared so closely.
    """

    name: str
    title: str
    B: int = 1
    Hq: int = 8
    Hk: int = 8
    Lq: int = 4096
    Lk: int = 4096
    D: int = 64
    Dv: int = 64
    dtype: str = "float32"
    causal: bool | str = False
    window: int | None = None
    documents: int = 1
    valid: float = 1.0
    softcap: float | None = None
    bias: bool = False
    dropout: float = 0.0
    need_lse: bool = False
    gradient: bool = False
    logits: float = 1.0
    finite: bool = False
    quick: bool = False
    beside: tuple[str, ...] = ()
    _memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """What the fields of a workload cannot say alike in every implementation's words."""
        if self.causal == "bottom_right" and self.valid < 1.0:
            raise ValueError("bottom_right means another row where part of the keys is padding")

    def with_(self, **changes: Any) -> Workload:
        """The same with other values."""
        return replace(self, _memo={}, **changes)

    def one_head(self) -> Workload:
        """One batch entry and one key head of it, with the query heads that it serves."""
        return self.with_(B=1, Hq=self.Hq // self.Hk, Hk=1)

    # What goes in ------------------------------------------------------------------------------

    def arrays(self, seed: int = 0) -> Arrays:
        """Its operands, standard normal."""
        rng = np.random.default_rng(seed)
        low = numpy_dtype(self.dtype)

        def normal(*shape: int, scale: float = 1.0) -> Array:
            drawn = rng.standard_normal(shape, dtype=np.float32)
            return (drawn * np.float32(scale)).astype(low)

        return Arrays(
            q=normal(self.B, self.Hq, self.Lq, self.D, scale=self.logits),
            k=normal(self.B, self.Hk, self.Lk, self.D),
            v=normal(self.B, self.Hk, self.Lk, self.Dv),
            d_out=normal(self.B, self.Hq, self.Lq, self.Dv),
            bias=normal(1, self.Hq, self.Lq, self.Lk) if self.bias else None,
        )

    @cached_property
    def lengths(self) -> Array | None:
        """How many keys of each batch entry are valid, (B,), or None when all are."""
        return None if self.valid == 1.0 else np.full(self.B, int(self.Lk * self.valid), np.int32)

    @cached_property
    def segments(self) -> Array | None:
        """The document of each position, (Lk,), or None; ragged, and the same on every machine.

        The longest is three times as long as the shortest, as when short ones are packed together.
        """
        if self.documents == 1:
            return None
        lengths = np.random.default_rng(1).uniform(0.5, 1.5, self.documents)
        ends = np.round(np.cumsum(lengths) / lengths.sum() * self.Lk)
        ids: Array = np.searchsorted(ends[:-1], np.arange(self.Lk), side="right")
        return ids.astype(np.int32)

    @property
    def structured(self) -> dict[str, Any]:
        """The options that say what is visible, in attnx's words, arrays as NumPy's."""
        mask: Any = None
        if self.window is not None:
            align: dict[str, Any] = (
                {} if self.Lq == self.Lk else {"align": self.causal or "top_left"}
            )
            mask = attnx.Window(self.window, None if self.causal is False else 0, **align)
        for part in (
            None
            if self.segments is None
            else attnx.Segments(self.segments[-self.Lq :], self.segments),
            None if self.lengths is None else attnx.Lengths(self.lengths),
        ):
            if part is not None:
                mask = part if mask is None else mask & part
        found: dict[str, Any] = {} if mask is None else {"mask": mask}
        if self.causal is not False and self.window is None:
            found["causal"] = self.causal
        return found

    @property
    def dropped(self) -> attnx.Dropout | None:
        """Its dropout in attnx's words: it drops the same elements on every backend."""
        return attnx.Dropout(self.dropout, seed=2026) if self.dropout else None

    @property
    def dense(self) -> Array | None:
        """The visible pairs, boolean, to broadcast to (B, Hq, Lq, Lk); None when all are.

        For implementations that know no structure. It is made anew, since it may be large.
        """
        rows, keys = np.arange(self.Lq)[:, None], np.arange(self.Lk)[None, :]
        at = rows + (self.Lk - self.Lq if self.causal == "bottom_right" else 0)
        seen: Array | None = None
        if self.causal is not False:
            seen = keys <= at
        if self.window is not None:
            near = keys >= at - self.window
            seen = near if seen is None else seen & near
        if self.segments is not None:
            same = self.segments[-self.Lq :, None] == self.segments[None, :]
            seen = same if seen is None else seen & same
        found = None if seen is None else seen[None, None]
        if self.lengths is not None:
            valid = (keys[0] < self.lengths[:, None])[:, None, None, :]
            found = valid if found is None else found & valid
        return found

    @property
    def masked(self) -> bool:
        """Whether anything is hidden beyond what `causal` hides."""
        return self.window is not None or self.documents > 1 or self.valid < 1.0

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(1.0 / np.sqrt(self.D))

    @property
    def flops(self) -> float:
        """Operations of both products over the visible pairs; 3.5 times as many with gradients."""
        pairs = float(self.Lq) * self.Lk
        if self.causal is not False or self.masked:
            seen = self.dense
            share = 1.0 if seen is None else float(seen.mean())
            pairs *= share
        once = 2.0 * self.B * self.Hq * pairs * (self.D + self.Dv)
        return once * (3.5 if self.gradient else 1.0)

    def describe(self) -> Mapping[str, Any]:
        """What a report says of it."""
        names = ("B", "Hq", "Hk", "Lq", "Lk", "D", "Dv", "dtype", "gradient")
        return {name: getattr(self, name) for name in names}
