"""The weights of a part of a call, and who sees whom in it.

Only what is shown is computed: rows of P do not depend on each other (S7), so a few rows of a long
sequence cost their own memory and not Lq x Lk. Positions would move with the rows, so what the mask
says of them is written out first, by the rules that the backends themselves read (S3).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnx._alibi import Alibi, detached
from attnx._api import attention_weights
from attnx._call import Options, prepare
from attnx._dispatch import lane_of
from attnx._visibility import Grid, position_offset, positions, visible
from attnx.errors import ArgumentTypeError
from attnx.masks import Dense
from attnx.viz._choose import Part, choose

if TYPE_CHECKING:
    from attnx._call import Call
    from attnx.plugin import Lane

__all__ = ["weights_of"]


def weights_of(
    q: Any, k: Any, options: dict[str, Any], heads: Any, entry: Any, rows: Any, columns: Any
) -> tuple[Part, Any, Any, tuple[int, int]]:
    """Compute P of the chosen heads, entry and rows, over all keys.

    Returns:
        The part; P `(heads, rows, Lk)` and visibility, which broadcasts to it, as NumPy arrays; and
        (Lq, Lk).
    """
    backend = options.pop("backend", None)
    unknown = sorted(set(options) - set(attention_weights.__kwdefaults__ or {}))
    if unknown:
        raise TypeError(f"heatmap() got unexpected keyword arguments {', '.join(unknown)}")
    lane = lane_of(q)
    if lane.traced(q) or lane.traced(k):
        raise ArgumentTypeError(
            "q: a picture needs values, and a transform of the framework has none; "
            "return q and k from it, and draw outside"
        )
    given = Options(**options)
    given = given._replace(bias=detached(lane, given.bias), sinks=lane.detached(given.sinks))
    q, k = lane.detached(q), lane.detached(k)
    ready = prepare(lane, q, k, k, given)
    call = ready.call
    part = choose((call.B, call.Hq, call.Lq, call.Lk), heads, entry, rows, columns)
    cut = _Cut(lane, call, part, ready.q)
    shown = cut.visible()
    found = attention_weights(
        cut.rows(cut.heads(cut.entry(ready.q))),
        cut.heads(cut.entry(ready.k), keys=True),
        mask=None if shown is None else Dense(shown),
        bias=cut.bias(),
        scale=given.scale,
        softcap=given.softcap,
        sinks=None if call.sinks is None else cut.taken(call.sinks, 0, part.heads),
        assume_finite=given.assume_finite,
        backend=backend,
    )
    lane.wait(found)
    return part, lane.to_numpy(found)[0], cut.sight(shown), (call.Lq, call.Lk)


class _Cut:
    """The chosen part of each array of a call, in the caller's framework."""

    def __init__(self, lane: Lane, call: Call, part: Part, like: Any) -> None:
        self.lane, self.call, self.part, self.like = lane, call, part, like
        self.all_heads = part.heads == tuple(range(call.Hq))

    def taken(self, array: Any, axis: int, index: tuple[int, ...]) -> Any:
        return self.lane.xp.take(array, self.lane.integers(index, self.like), axis=axis)

    def entry(self, array: Any) -> Any:
        """One batch entry of an axis that may have been broadcast."""
        b = self.part.entry if array.shape[0] != 1 else 0
        return array[b : b + 1, ...]

    def heads(self, array: Any, keys: bool = False) -> Any:
        """The chosen heads; each gets a key head of its own, whoever shares it in the call."""
        if self.all_heads or (array.shape[1] == 1 and not keys):
            return array
        share = self.call.Hq // self.call.Hk if keys else 1
        return self.taken(array, 1, tuple(head // share for head in self.part.heads))

    def rows(self, array: Any) -> Any:
        """The chosen queries, where the array has one for each."""
        start, stop = self.part.rows
        return array if array.shape[2] == 1 else array[:, :, start:stop, :]

    def pairs(self, array: Any) -> Any:
        """Of an array over (B, Hq, Lq, Lk), each axis 1 or full; None stays None."""
        return None if array is None else self.rows(self.heads(self.entry(array)))

    def visible(self) -> Any:
        """What the mask shows, with four axes, each 1 or full; None where there is no mask."""
        return None if self.call.mask is None else visible(self.call.mask, self.grid())

    def grid(self) -> Grid:
        """The indices of the part in the whole call."""
        call, part = self.call, self.part
        heads: Any = slice(0, call.Hq)
        if not self.all_heads:
            heads = self.lane.integers(part.heads, self.like)
        arange = partial(self.lane.arange, like=self.like)
        offset = position_offset(call.mask, call.Lq, call.Lk)
        ranges = slice(part.entry, part.entry + 1), heads, slice(*part.rows), slice(0, call.Lk)
        return Grid(self.lane.xp, arange, *ranges, offset)

    def bias(self) -> Any:
        """The bias of the part; an `Alibi` says where its rows stood in the whole call."""
        alibi = self.call.alibi
        if alibi is None:
            return self.pairs(self.call.bias)
        p, j = (self.lane.xp.reshape(x, (-1,)) for x in positions(alibi, self.grid()))
        return Alibi(self.taken(alibi.slopes, 0, self.part.heads), q_pos=p, kv_pos=j)

    def sight(self, shown: Any) -> Any:
        """What mask and bias show together (S3.1), as a NumPy array (heads or 1, rows or 1, Lk)."""
        bias = self.pairs(self.call.bias)
        if bias is not None:
            open_pairs = bias != -self.lane.xp.inf
            shown = open_pairs if shown is None else shown & open_pairs
        if shown is None:
            shown = self.lane.arange(0, self.call.Lk, self.like)[None, None, None, :] >= 0
        return self.lane.to_numpy(shown)[0]
