"""Faults of masks: dropped, inverted, broadcast or combined wrongly, added and not selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx.masks import Predicate

from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("masks")
combined = of_kind("combined")
segments = of_kind("segments")
blocks = of_kind("blocks")
prefix = of_kind("prefix")
predicate = of_kind("predicate")


def _dropped(when: Callable[[Call], bool]) -> Any:
    """The mask is dropped in some calls; `causal` and bias stay."""

    def conjuncts(self: Kernel, c: Call) -> Any:
        parts = Kernel.parts(self, c)
        return parts[: int(c.causal is not False)] if when(c) else parts

    return conjuncts


def _array(rule: Callable[[Call, Any], Any]) -> Any:
    """A boolean mask is read in another way."""

    def dense_rule(self: Kernel, c: Call, mask: Any) -> Any:
        return self.spread(c, rule(c, np.asarray(mask.array)))

    return dense_rule


def _first(axis: int) -> Callable[[Call, Any], Any]:
    """Only the first index of an axis is read, counted from the end."""

    def rule(c: Call, array: Any) -> Any:
        if array.ndim < -axis or (array.ndim == 2 and axis < -2):
            return array
        return np.take(array, [0], axis=axis) if array.shape[axis] else array

    return rule


def _heads_as_batch(c: Call, array: Any) -> Any:
    """A mask `(1, H, ...)` is read as `(B, 1, ...)`: entry b takes head b's."""
    if array.ndim != 4 or array.shape[0] != 1 or array.shape[1] < 2 or not c.grid.N:
        return array
    return np.swapaxes(np.take(array, np.arange(c.grid.N) % array.shape[1], axis=1), 0, 1)


def _batch_as_heads(c: Call, array: Any) -> Any:
    """A mask `(B, 1, ...)` is read as `(1, H, ...)`: head h takes entry h's."""
    if array.ndim != 4 or array.shape[1] != 1 or array.shape[0] < 2:
        return array
    return np.swapaxes(np.take(array, np.arange(c.grid.Hq) % array.shape[0], axis=0), 0, 1)


def _transposed(c: Call, array: Any) -> Any:
    """Read key by query, where the shape lets it pass."""
    return np.swapaxes(array, -1, -2) if array.shape[-1] == array.shape[-2] else array


def _keys_per_entry(c: Call, array: Any) -> Any:
    """Of a key padding mask `(B, 1, 1, Lk)` only Lq keys are read; the rest is seen."""
    if array.shape[-2] != 1 or array.shape[-1] != c.grid.Lk or c.grid.Lq >= c.grid.Lk:
        return array
    return array | (np.arange(c.grid.Lk) >= c.grid.Lq)


def _added(value: float) -> Any:
    """Hidden scores get a large negative number added, and stay."""

    def hide(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
        return s + np.where(c.visible[:, :, rows, cols], c.high(0), c.high(value))

    return hide


def _replaced(value: float) -> Any:
    """Hidden scores become a large negative number."""

    def hide(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
        return np.where(c.visible[:, :, rows, cols], s, c.high(value))

    return hide


def _as_numbers(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """A boolean mask is added to the scores as 1 and 0."""
    if not isinstance(c.mask, np.ndarray):
        return Kernel.hide(self, c, s, rows, cols)
    return s + self.spread(c, c.mask)[:, :, rows, cols]


def _step_after(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """Hidden weights are zeroed after the denominator has counted them."""
    s = self.cap(c, self.scaled(c, rows, cols))
    s = s if c.bias is None else self.add_bias(c, s, rows, cols)
    m = self.running_max(c, state.m, s)
    P = self.exp(c, s - self.safe(m))
    total, acc = self.carry(c, state, m)
    seen = c.visible[:, :, rows, cols]
    P_seen = np.where(seen, P, c.high(0))
    dropped = self.drop(c, P_seen, rows, cols)
    acc = self.add_values(c, acc, dropped, c.v[:, :, cols], seen)
    return State(m, self.add_sum(c, total, P), acc)


def _first_tile_only(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """The mask's pointer is not moved: every tile of keys reads the first one's."""
    if not isinstance(c.mask, np.ndarray):
        return Kernel.hide(self, c, s, rows, cols)
    width = cols.stop - cols.start
    return np.where(c.visible[:, :, rows, :width], s, c.high(-np.inf))


def _forgotten(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """The backward pass is given the call without its mask."""
    made = Kernel.cotangents(self, c, d_out, d_lse)
    c.given = {**c.given, "mask": None}
    c.visible = self.visible(c)
    return made


def _last_wins(self: Kernel, c: Call) -> Any:
    parts = Kernel.parts(self, c)
    return parts[-1:]


def _pairs_only(self: Kernel, c: Call) -> Any:
    return Kernel.parts(self, c)[:2]


def _or_of_all(self: Kernel, c: Call, mask: Any) -> Any:
    return np.logical_and.reduce([self.rule(c, part) for part in mask.parts])


def _not_of_first(self: Kernel, c: Call, mask: Any) -> Any:
    """`~` below an `&` or `|` is lost."""
    return self.rule(c, mask.part)


def _any_part(self: Kernel, c: Call) -> Any:
    seen = np.logical_or.reduce(
        [np.zeros(c.grid.flat, bool), *(self.rule(c, part) for part in self.parts(c))]
    )
    seen = seen if self.parts(c) else np.ones(c.grid.flat, bool)
    bias = c.arrays.get("bias")
    return seen if bias is None else seen & self.shown_by_bias(c, bias)


def _strangers(self: Kernel, c: Call, mask: Any) -> Any:
    """Negative ids, which mean padding, see each other."""
    q_ids = self.tokens(c, mask.q_ids, c.grid.Lq)[..., None]
    return q_ids == self.tokens(c, mask.kv_ids, c.grid.Lk)[..., None, :]


def _first_segments(self: Kernel, c: Call, mask: Any) -> Any:
    seen = Kernel.segments_rule(self, c, mask)
    return seen[:1] if seen.size else seen


def _later_segments(self: Kernel, c: Call, mask: Any) -> Any:
    """Earlier documents stay visible: `>=` for `==`."""
    q_ids = self.tokens(c, mask.q_ids, c.grid.Lq)[..., None]
    return (q_ids >= self.tokens(c, mask.kv_ids, c.grid.Lk)[..., None, :]) & (q_ids >= 0)


def _first_layout(self: Kernel, c: Call, mask: Any) -> Any:
    return Kernel.blockmask_rule(self, c, mask)[:, :1]


def _layout_of_key_heads(self: Kernel, c: Call, mask: Any) -> Any:
    seen = Kernel.blockmask_rule(self, c, mask)
    return seen[:, np.arange(c.grid.Hq) // c.g] if seen.size else seen


def _short_last(self: Kernel, c: Call, mask: Any) -> Any:
    size = mask.kv_block
    return Kernel.blockmask_rule(self, c, mask) | (self.j(c) >= c.grid.Lk // size * size)


def _asked(**zeros: bool) -> Any:
    """A predicate is asked with an index that is always 0, or local to its tile."""

    def predicate_rule(self: Kernel, c: Call, mask: Any) -> Any:
        def fn(b: Any, h: Any, i: Any, j: Any) -> Any:
            b, h = (0 * b if "b" in zeros else b), (0 * h if "h" in zeros else h)
            return mask.fn(b, h, i, j % self.block_k if "j" in zeros else j)

        return Kernel.predicate_rule(self, c, Predicate(fn))

    return predicate_rule


def _key_heads(self: Kernel, c: Call, mask: Any) -> Any:
    """A predicate is asked with the key head's number."""
    return Kernel.predicate_rule(self, c, Predicate(lambda b, h, i, j: mask.fn(b, h // c.g, i, j)))


def _complement_of_real(self: Kernel, c: Call, mask: Any) -> Any:
    """`~Lengths` is taken within the padded grid of the causal triangle."""
    return ~self.rule(c, mask.part) & (self.j(c) <= self.i(c) + c.grid.Lk - c.grid.Lq)


FAULTS: tuple[Fault, ...] = (
    fault("mask-dropped", "a mask that stands alone is dropped",
          parts=_dropped(lambda c: c.causal is False)),
    fault("mask-dropped-with-causal", "causal wins over the mask",
          parts=_dropped(lambda c: c.causal is not False)),
    fault("mask-dropped-at-one-query", "a decoding step reads no mask",
          parts=_dropped(lambda c: c.grid.Lq == 1)),
    fault("mask-dropped-with-softcap", "lost on the route of capped scores",
          parts=_dropped(lambda c: c.given.get("softcap") is not None)),
    fault("mask-dropped-with-bias", "bias and mask share a slot: the bias wins",
          parts=_dropped(lambda c: c.given.get("bias") is not None)),
    fault("mask-dropped-with-groups", "lost on the route of grouped heads",
          parts=_dropped(lambda c: c.g > 1)),
    fault("mask-array-dropped", "boolean arrays are dropped, structured masks are not",
          dense_rule=lambda self, c, mask: True),
    fault("mask-inverted", "True is read as hidden", dense_rule=_array(lambda c, x: ~x)),
    fault("mask-first-head", "the first head's mask serves all", dense_rule=_array(_first(-3))),
    fault("mask-first-entry", "the first entry's mask serves all", dense_rule=_array(_first(-4))),
    fault("mask-first-row", "the first query's mask serves all", dense_rule=_array(_first(-2))),
    fault("mask-heads-as-batch", "(1, H, Lq, Lk) is read as (B, 1, Lq, Lk)",
          dense_rule=_array(_heads_as_batch)),
    fault("mask-batch-as-heads", "(B, 1, Lq, Lk) is read as (1, H, Lq, Lk)",
          dense_rule=_array(_batch_as_heads)),
    fault("mask-transposed", "a square mask is read key by query", dense_rule=_array(_transposed)),
    fault("mask-keys-cut", "key padding is read for as many keys as there are queries",
          dense_rule=_array(_keys_per_entry)),
    fault("mask-adds-1e4", "hidden scores get -1e4 added", hide=_added(-1e4)),
    fault("mask-adds-lowest", "hidden scores get finfo.min added",
          hide=_added(float(np.finfo(np.float32).min))),
    fault("mask-is-1e9", "hidden scores become -1e9", hide=_replaced(-1e9),
          fill=lambda self, c, out, lse, rows: (out, lse)),
    fault("mask-is-minus-100", "hidden scores become -100", hide=_replaced(-100.0)),
    fault("mask-as-numbers", "True and False are added as 1 and 0", hide=_as_numbers),
    fault("mask-after-softmax", "hidden weights are zeroed, and not renormalised",
          step=_step_after),
    fault("mask-first-tile", "every tile reads the mask of the first one", hide=_first_tile_only),
    fault("mask-not-in-backward", "the backward pass has no mask", cotangents=_forgotten),
    combined("mask-last-part-wins", "of constraints joined by & only the last counts",
          parts=_last_wins),
    combined("mask-third-part-lost", "of three constraints the third is lost", parts=_pairs_only),
    combined("mask-and-is-or", "constraints are joined by or", visible=_any_part),
    combined("mask-or-is-and", "| is computed as &", or_rule=_or_of_all),
    combined("mask-or-first-part", "of a | only the first part counts",
          or_rule=lambda self, c, mask: self.rule(c, mask.parts[0])),
    combined("mask-not-lost", "~ is dropped", not_rule=_not_of_first),
    combined("mask-not-within-causal", "~ is taken within the causal triangle",
          not_rule=_complement_of_real),
    segments("segments-dropped", "documents see each other",
          segments_rule=lambda self, c, mask: True),
    segments("segments-padding-matches", "negative ids see each other", segments_rule=_strangers),
    segments("segments-first-entry", "the first entry's ids serve all",
          segments_rule=_first_segments),
    segments("segments-earlier-seen", "earlier documents are seen", segments_rule=_later_segments),
    prefix("prefix-dropped", "a prefix hides nothing", prefix_rule=lambda self, c, mask: True),
    prefix("prefix-one-more", "j <= n",
          prefix_rule=lambda self, c, mask: self.j(c) <= self.entries(c, mask.n)),
    prefix("prefix-one-less", "j < n - 1",
          prefix_rule=lambda self, c, mask: self.j(c) < self.entries(c, mask.n) - 1),
    blocks("blocks-dropped", "blocks hide nothing", blockmask_rule=lambda self, c, mask: True),
    blocks("blocks-square", "the block size of queries serves keys too",
          block_sizes=lambda self, mask: (mask.q_block, mask.q_block)),
    blocks("blocks-swapped", "the block sizes are swapped",
          block_sizes=lambda self, mask: (mask.kv_block, mask.q_block)),
    blocks("blocks-first-head", "the first head's layout serves all", blockmask_rule=_first_layout),
    blocks("blocks-of-key-heads", "a layout is read by the key head's number",
          blockmask_rule=_layout_of_key_heads),
    blocks("blocks-short-last", "a short last block shows all", blockmask_rule=_short_last),
    predicate("predicate-without-batch", "the predicate gets b = 0", predicate_rule=_asked(b=True)),
    predicate("predicate-without-heads", "the predicate gets h = 0", predicate_rule=_asked(h=True)),
    predicate("predicate-of-key-heads", "the predicate gets the key head",
          predicate_rule=_key_heads),
    predicate("predicate-in-its-tile", "the predicate gets keys counted within a tile",
          predicate_rule=_asked(j=True)),
)  # fmt: skip
