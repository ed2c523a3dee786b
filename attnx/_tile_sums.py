"""The gradients of a call as they add up over tiles, for `ArrayBackend`.

Keys and values collect a sum a block of keys; queries are finished a block of rows at a time; a
bias is summed over whatever it was broadcast along (S6.3). Nothing is written in place, so any
array library will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx import _tile_ops as ops
from attnx._contract import Gradients

if TYPE_CHECKING:
    from attnx._call import Call
    from attnx._lane import Lane

__all__ = ["Sums"]


class Sums:
    """The running sums of one backward pass.

    Args:
        lane: the lane of the arrays.
        call: the call.
        k_size: keys of a tile.
        like: an array of the call, for the device.
    """

    def __init__(self, lane: Lane, call: Call, k_size: int, like: Any) -> None:
        self.lane, self.xp, self.call, self.k_size, self.like = lane, lane.xp, call, k_size, like
        self.acc = ops.accumulator(self.xp, call.dtype)
        self.dq: list[Any] = []
        self.dk: dict[int, Any] = {}
        self.dv: dict[int, Any] = {}
        self.dsinks: Any = None
        self.bias_rows: list[Any] = []
        self.bias_row: dict[int, Any] = {}

    def add_keys(self, tile: ops.Tile, dk: Any, dv: Any) -> None:
        """A tile's part of dk (before the scale) and dv."""
        _add(self.dk, tile.j0, dk)
        _add(self.dv, tile.j0, dv)

    def add_bias(self, tile: ops.Tile, ds: Any) -> None:
        """A tile's part of dbias: ds summed along the axes that the bias was broadcast along."""
        if self.call.bias is not None:
            shape = tuple(min(n, m) for n, m in zip(self.call.bias.shape, ds.shape, strict=True))
            key = tile.j0 if self.call.bias.shape[3] != 1 else 0
            _add(self.bias_row, key, ops.reduce_to(self.xp, ds, shape))

    def added(self, tile: ops.Tile) -> tuple[Any, ...]:
        """The sums that a tile added to."""
        return (self.dk[tile.j0], self.dv[tile.j0], *self.bias_row.values())

    def end_rows(self, dq: Any, sink_flow: Any) -> None:
        """A block of rows is done.

        Args:
            dq: its gradient before the scale, (B, Hq, n, D).
            sink_flow: p_sink (d_lse - delta) of S6.3, (B, Hq, n, 1); None without sinks.
        """
        self.dq.append(dq)
        if self.call.bias is not None:
            self.bias_rows.append(self._bias_keys(dq.shape[2]))
            self.bias_row = {}
        if sink_flow is not None:
            part = self.xp.sum(sink_flow, axis=(0, 2, 3))
            self.dsinks = part if self.dsinks is None else self.dsinks + part

    def gradients(self, q: Any, k: Any, v: Any) -> Gradients:
        """The sums, each in its input's dtype."""
        xp, call = self.xp, self.call
        return Gradients(
            ops.cast(xp, xp.concat(self.dq, axis=2) * call.scale, q.dtype),
            ops.cast(xp, self._keys(self.dk, k) * call.scale, k.dtype),
            ops.cast(xp, self._keys(self.dv, v), v.dtype),
            None if call.bias is None else ops.cast(xp, self._bias(), call.bias.dtype),
            None if call.sinks is None else ops.cast(xp, self.dsinks, call.sinks.dtype),
        )

    def _keys(self, sums: dict[int, Any], x: Any) -> Any:
        """All keys in order; those that no tile visited get exactly 0 (S6.4)."""
        B, Hk, Lk, d = x.shape
        parts = [
            sums[j0] if j0 in sums else self._zeros((B, Hk, min(self.k_size, Lk - j0), d))
            for j0 in range(0, Lk, self.k_size)
        ]
        return self.xp.concat(parts, axis=2) if parts else self._zeros((B, Hk, 0, d))

    def _bias_keys(self, count: int) -> Any:
        """A block of rows of dbias, all keys in order."""
        b, h, i, j = self.call.bias.shape
        starts = range(0, self.call.Lk, self.k_size) if j != 1 else (0,)
        rows = min(i, count)
        parts = [
            self.bias_row[j0]
            if j0 in self.bias_row
            else self._zeros((b, h, rows, min(self.k_size, j - j0)))
            for j0 in starts
        ]
        return self.xp.concat(parts, axis=3) if parts else self._zeros((b, h, rows, 0))

    def _bias(self) -> Any:
        if self.call.bias.shape[2] != 1:
            return self.xp.concat(self.bias_rows, axis=2)
        total = self.bias_rows[0]
        for row in self.bias_rows[1:]:
            total = total + row
        return total

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        return self.lane.full(shape, 0.0, self.acc, like=self.like)


def _add(sums: dict[int, Any], key: int, part: Any) -> None:
    sums[key] = sums[key] + part if key in sums else part
