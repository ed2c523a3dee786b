"""ArrayBackend: blocked attention in array-API terms, right for any conforming library.

This is the kernel that others start from: a new plugin gets every clause of the spec from a lane
and overrides what its framework does faster. It is written for clarity first: no in-place
operation, no array of Lq x Lk, one pass over key tiles a block of queries, all batch entries and
heads at once.

What cannot be seen has no effect (S4) in two ways. Scores are masked by selection, never by adding.
And where inputs hold NaN or inf (`careful`, decided by one look at the data), products are taken
of the finite part, and what a row does see is put back.

The backward computes probabilities again from lse. Where lse is so large that its own rounding
would swallow log(sum) (a row of scores at -1e9, say), the row's maximum and sum are found again
and kept apart.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnx import _tile_ops as ops
from attnx._contract import Backend, Capabilities, Gradients
from attnx._tile_ops import Block, Rows, Scores, Tile
from attnx._tile_sums import Sums
from attnx.tiling import (
    EMPTY,
    FULL,
    Grid,
    alibi_tile,
    kept,
    position_offset,
    tile_classes,
    visible,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnx._call import Call, CallClass
    from attnx._lane import Lane
    from attnx.masks import Mask

    Arange = Callable[[int, int], Any]

__all__ = ["ArrayBackend"]

EXACT = {"float32": 2.0**10, "float64": 2.0**39}
"""Up to which |lse| a probability taken from it is good to 2**-13."""


class ArrayBackend(Backend):
    """Attention for any array library, from its lane.

    Args:
        name: the backend's name.
        lane: the lane of the library.
        capabilities: what to declare; by default every option, in float32 and float64.

    Example:
        >>> import array_api_strict as xp
        >>> from attnx.plugin import ArrayBackend, Lane
        >>> class Strict(Lane):
        ...     name, xp, array_types = "strict", xp, (type(xp.zeros(1)),)
        >>> ArrayBackend("strict", Strict()).capabilities.softcap
        True
    """

    def __init__(self, name: str, lane: Lane, capabilities: Capabilities | None = None) -> None:
        self.name = name
        self.lane = lane
        self.xp = lane.xp
        self.capabilities = capabilities or Capabilities(
            dtypes=frozenset({"float32", "float64"}), native_masks=ops.STRUCTURED, dropout=True,
            alibi=True,
        )  # fmt: skip

    def route(self, cls: CallClass) -> str:
        """One route serves every call."""
        return "array tiles"

    # What a framework may do faster ------------------------------------------------------------

    def block_sizes(self, call: Call) -> tuple[int, int]:
        """Rows and keys of a tile; a tile of scores over all heads stays within 32 MB."""
        size = 512
        while size > 64 and call.B * call.Hq * size * size > 8 << 20:
            size //= 2
        return size, size

    def host(self, table: Any) -> list[list[int]]:
        """A small integer matrix as Python lists."""
        rows, columns = table.shape
        return [[int(table[r, c]) for c in range(columns)] for r in range(rows)]

    def finite(self, *arrays: Any) -> bool:
        """Whether all values are finite: the look that isolation costs (S4.4)."""
        xp = self.xp
        return all(bool(xp.all(xp.isfinite(a))) for a in arrays)

    def careful(self, call: Call, *arrays: Any) -> bool:
        """Whether something is hidden that may hold NaN or inf: then products keep to S4."""
        hides = call.mask is not None or call.bias is not None
        return hides and not call.assume_finite and not self.finite(*arrays)

    def settle(self, call: Call, *arrays: Any) -> None:
        """After each tile, what it added to: a lazy framework computes it here, or holds all."""

    def softmax_step(self, s: Any, shown: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """One step of the online softmax.

        Args:
            s: scores of a tile, (B, Hq, n, m); they are not needed afterwards.
            shown: the visible pairs, broadcasting to s, or None when all are.
            m: the running maximum, (B, Hq, n, 1).
            total: the running sum of exp(s - maximum), alike.

        Returns:
            exp(s - new maximum), the factor for what stands accumulated, the new maximum and sum.
        """
        xp = self.xp
        if shown is not None:
            s = xp.where(shown, s, xp.full_like(s, -xp.inf))
        new = xp.maximum(m, xp.max(s, axis=-1, keepdims=True))
        shift = xp.where(new == -xp.inf, xp.zeros_like(new), new)
        p = xp.exp(s - shift)
        factor = xp.exp(m - shift)
        return p, factor, new, total * factor + xp.sum(p, axis=-1, keepdims=True)

    def gradient_step(
        self, s: Any, dp: Any, tanh: Any, shown: Any, shift: Any, rest: Any, flow: Any
    ) -> tuple[Any, Any, Any]:
        """The elementwise part of the backward.

        Args:
            s: scores of a tile, (B, Hq, n, m); like dp and tanh they are not needed afterwards.
            dp: d_out @ v, alike.
            tanh: tanh of the softcap, alike, or None.
            shown: the visible pairs, broadcasting to s, or None when all are.
            shift: lse = shift + rest, (B, Hq, n, 1).
            rest: alike, or None for 0.
            flow: delta - d_lse, alike.

        Returns:
            P, the gradient of the scores, and the gradient before the softcap; 0 where hidden.
        """
        xp = self.xp
        p = ops.probability(xp, s, shift, rest)
        ds = p * (dp - flow)
        d_raw = ds if tanh is None else ds * (1.0 - tanh * tanh)
        if shown is None:
            return p, ds, d_raw
        zero = xp.zeros_like(s)
        return xp.where(shown, p, zero), xp.where(shown, ds, zero), xp.where(shown, d_raw, zero)

    # The tile plan -----------------------------------------------------------------------------

    def tile_table(
        self, mask: Mask, call: Call, q_size: int, k_size: int, like: Any
    ) -> list[list[int]]:
        """The class of each (query block, key block), over all batch entries and heads."""
        arange = partial(self.lane.arange, like=like)
        return self.host(self.classify(mask, call, q_size, k_size, self.xp, arange))

    def classify(
        self, mask: Mask, call: Call, q_size: int, k_size: int, xp: Any, arange: Arange
    ) -> Any:
        """`tile_table` as an array of a namespace."""
        classes = tile_classes(
            mask, xp, arange, Lq=call.Lq, Lk=call.Lk, q_size=q_size, k_size=k_size
        )
        some, every = xp.any(classes != EMPTY, axis=(0, 1)), xp.all(classes == FULL, axis=(0, 1))
        return xp.astype(some, xp.int8) + xp.astype(every, xp.int8)

    def plan_tiles(self, call: Call, like: Any) -> Iterator[tuple[int, int, list[Tile]]]:
        """Blocks of queries, each with the tiles that it must visit."""
        q_size, k_size = self.block_sizes(call)
        table = None
        if call.mask is not None and call.Lq and call.Lk:
            table = self.tile_table(call.mask, call, q_size, k_size, like)
        for row, i0 in enumerate(range(0, call.Lq, q_size)):
            i1 = min(i0 + q_size, call.Lq)
            tiles = [
                Tile(i0, i1, j0, min(j0 + k_size, call.Lk), kind != FULL)
                for column, j0 in enumerate(range(0, call.Lk, k_size))
                if (kind := FULL if table is None else table[row][column]) != EMPTY
            ]
            yield i0, i1, tiles

    def scores(self, q: Any, k: Any, call: Call, tile: Tile) -> Scores:
        """The scores of S2 for a tile; q holds the tile's rows, k every key."""
        xp = self.xp
        keys = ops.cast(xp, k[:, :, tile.j0 : tile.j1, :], q.dtype)
        s = ops.product(xp, q, xp.matrix_transpose(keys)) * call.scale
        tanh = None
        if call.softcap is not None:
            tanh = xp.tanh(s / call.softcap)
            s = tanh * call.softcap
        shown = None
        if tile.masked and call.mask is not None:
            shown = visible(call.mask, self.grid(call, tile, q))
        if call.bias is not None:
            bias = ops.cut(call.bias, tile)
            open_pairs = bias != -xp.inf
            shown = open_pairs if shown is None else shown & open_pairs
            s = s + ops.cast(xp, bias, q.dtype)
        if call.alibi is not None:
            s = s + alibi_tile(call.alibi, self.grid(call, tile, q), q.dtype)
        return Scores(s, tanh, shown)

    def grid(self, call: Call, tile: Tile, like: Any) -> Grid:
        """The indices of a tile."""
        offset = position_offset(call.mask, call.Lq, call.Lk)
        ranges = (slice(0, call.B), slice(0, call.Hq), slice(tile.i0, tile.i1))
        arange = partial(self.lane.arange, like=like)
        return Grid(self.xp, arange, *ranges, slice(tile.j0, tile.j1), offset)

    def dropout(self, call: Call, tile: Tile, like: Any) -> Any:
        """What dropout multiplies a tile of P with, (B, Hq, n, m) in the dtype of `like` (S9)."""
        if call.dropout is None:
            return None
        pairs = slice(tile.i0, tile.i1), slice(tile.j0, tile.j1)
        arange = partial(self.lane.arange, like=like)
        keep = kept(self.xp, arange, call.dropout, (slice(0, call.B), slice(0, call.Hq), *pairs))
        return ops.cast(self.xp, keep, like.dtype) * call.dropout.scale

    # Forward -----------------------------------------------------------------------------------

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `Backend.forward`."""
        xp = self.xp
        acc = ops.accumulator(xp, call.dtype)
        if call.Lq == 0 or call.B == 0:
            shape = (call.B, call.Hq, call.Lq)
            out = self.lane.full((*shape, call.Dv), 0.0, q.dtype, like=q)
            return out, self.lane.full(shape, 0.0, acc, like=q)
        with self.lane.quiet():
            careful = self.careful(call, q, k, v)
            parts = [
                self._query_block(ops.cast(xp, q[:, :, i0:i1, :], acc), k, v, call, tiles, careful)
                for i0, i1, tiles in self.plan_tiles(call, q)
            ]
            out = ops.cast(xp, xp.concat([part[0] for part in parts], axis=2), q.dtype)
            return out, xp.concat([part[1] for part in parts], axis=2)

    def _query_block(
        self, q: Any, k: Any, v: Any, call: Call, tiles: list[Tile], careful: bool
    ) -> tuple[Any, Any]:
        xp = self.xp
        out = self.lane.full((*q.shape[:3], call.Dv), 0.0, q.dtype, like=q)
        rows = self._first_rows(call, q)
        for tile in tiles:
            s, _, shown = self.scores(q, k, call, tile)
            p, factor, rows = self._absorb(rows, s, shown)
            values = ops.cast(xp, v[:, :, tile.j0 : tile.j1, :], q.dtype)
            drop = self.dropout(call, tile, q)
            p = p if drop is None else p * drop
            out = out * factor + ops.seen_product(xp, p, values, shown if careful else None)
            self.settle(call, out, *rows)
        total = self._safe_total(rows, call)
        out = xp.where(rows.seen, out / total, xp.zeros_like(out))
        return out, (rows.m + xp.log(total))[..., 0]

    def _first_rows(self, call: Call, q: Any) -> Rows:
        """Nothing seen yet; a sink is a logit that every row has met (S2.3)."""
        xp, shape = self.xp, (*q.shape[:3], 1)
        seen = self.lane.full(shape, False, xp.bool, like=q)
        total = self.lane.full(shape, 0.0, q.dtype, like=q)
        if call.sinks is None:
            return Rows(self.lane.full(shape, -xp.inf, q.dtype, like=q), total, seen)
        return Rows(xp.broadcast_to(self._sinks(call, q), shape), total + 1.0, seen)

    def _sinks(self, call: Call, like: Any) -> Any:
        return self.xp.reshape(ops.cast(self.xp, call.sinks, like.dtype), (1, call.Hq, 1, 1))

    def _absorb(self, rows: Rows, s: Any, shown: Any) -> tuple[Any, Any, Rows]:
        """One more tile: exp(s - m), the factor for what stands accumulated, and the new rows."""
        p, factor, m, total = self.softmax_step(s, shown, rows.m, rows.total)
        met = True if shown is None else self.xp.any(shown, axis=-1, keepdims=True)
        return p, factor, Rows(m, total, rows.seen | met)

    def _safe_total(self, rows: Rows, call: Call) -> Any:
        """The sums, and 1 in rows that met nothing, whose lse is then m = -inf (S3.7)."""
        if call.sinks is not None:
            return rows.total
        return self.xp.where(rows.seen, rows.total, self.xp.ones_like(rows.total))

    # Backward ----------------------------------------------------------------------------------

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `Backend.backward`; scores are computed again, a tile at a time."""
        xp = self.xp
        if call.Lq == 0 or call.B == 0:
            return ops.zeros_like(xp, q, k, v, call.bias, call.sinks)
        sums = Sums(self.lane, call, self.block_sizes(call)[1], q)
        acc = ops.accumulator(xp, call.dtype)
        with self.lane.quiet():
            careful = self.careful(call, q, k, v, d_out)
            steep = self.steep(lse, call)
            for i0, i1, tiles in self.plan_tiles(call, q):
                rows, o, d_o = (ops.cast(xp, x[:, :, i0:i1, :], acc) for x in (q, out, d_out))
                delta = xp.sum(d_o * o, axis=-1, keepdims=True)
                d_l = None if d_lse is None else ops.cast(xp, d_lse[:, :, i0:i1, None], acc)
                norm = self._norm(lse[:, :, i0:i1, None], rows, k, call, tiles, steep)
                block = Block(rows, d_o, delta, d_l, *norm)
                self._backward_block(block, k, v, call, tiles, careful, sums)
            return sums.gradients(q, k, v)

    def steep(self, lse: Any, call: Call) -> bool:
        """Whether the rounding of some lse would be felt in the probabilities taken from it."""
        large = self.xp.abs(lse) > EXACT["float64" if call.dtype == "float64" else "float32"]
        return bool(self.xp.any(large & self.xp.isfinite(lse)))

    def _norm(
        self, lse: Any, q: Any, k: Any, call: Call, tiles: list[Tile], steep: bool
    ) -> tuple[Any, Any]:
        """(shift, rest) whose sum is lse; rest is None for 0. A row that met nothing has 0."""
        xp = self.xp
        if not steep:
            return xp.where(lse == -xp.inf, xp.zeros_like(lse), lse), None
        rows = self._first_rows(call, q)
        for tile in tiles:
            s, _, shown = self.scores(q, k, call, tile)
            rows = self._absorb(rows, s, shown)[2]
        shift = xp.where(rows.m == -xp.inf, xp.zeros_like(rows.m), rows.m)
        return shift, xp.log(self._safe_total(rows, call))

    def _backward_block(
        self, block: Block, k: Any, v: Any, call: Call, tiles: list[Tile], careful: bool, sums: Sums
    ) -> None:
        """The gradients from one block of rows, tile by tile."""
        xp, (q, d_out, delta, d_lse, shift, rest) = self.xp, block
        flow = delta if d_lse is None else delta - d_lse
        seen = self.lane.full(delta.shape, False, xp.bool, like=q)
        dq = xp.zeros_like(q)
        for tile in tiles:
            s, tanh, shown = self.scores(q, k, call, tile)
            keys = ops.cast(xp, k[:, :, tile.j0 : tile.j1, :], q.dtype)
            values = ops.cast(xp, v[:, :, tile.j0 : tile.j1, :], q.dtype)
            dp = ops.product(xp, d_out, xp.matrix_transpose(values))
            drop = self.dropout(call, tile, q)
            dp = dp if drop is None else dp * drop
            p, ds, d_raw = self.gradient_step(s, dp, tanh, shown, shift, rest, flow)
            seen = seen | (True if shown is None else xp.any(shown, axis=-1, keepdims=True))
            met = shown if careful else None
            dq = dq + ops.seen_product(xp, d_raw, keys, met)
            dk = ops.seen_product_t(xp, d_raw, q, call.Hk, met)
            p = p if drop is None else p * drop
            sums.add_keys(tile, dk, ops.seen_product_t(xp, p, d_out, call.Hk, met))
            sums.add_bias(tile, ds)
            self.settle(call, dq, *sums.added(tile))
        sums.end_rows(dq, None if call.sinks is None else self._sink_flow(block, seen, call))

    def _sink_flow(self, block: Block, seen: Any, call: Call) -> Any:
        """p_sink (d_lse - delta); an empty row is all sink and gives its whole d_lse (S6.3)."""
        xp, (q, _, delta, d_lse, shift, rest) = self.xp, block
        p_sink = ops.probability(xp, self._sinks(call, q), shift, rest)
        none = xp.zeros_like(delta) if d_lse is None else d_lse
        return xp.where(seen, p_sink * (none - delta), none)

    # Weights -----------------------------------------------------------------------------------

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """P of S2.5, a tile at a time; a row that sees nothing is 0."""
        xp = self.xp
        if 0 in (call.B, call.Lq, call.Lk):
            return self.lane.full((call.B, call.Hq, call.Lq, call.Lk), 0.0, q.dtype, like=q)
        acc = ops.accumulator(xp, call.dtype)
        with self.lane.quiet():
            blocks = [
                self._weights_block(ops.cast(xp, q[:, :, i0:i1, :], acc), k, call, tiles)
                for i0, i1, tiles in self.plan_tiles(call, q)
            ]
            return ops.cast(xp, xp.concat(blocks, axis=2), q.dtype)

    def _weights_block(self, q: Any, k: Any, call: Call, tiles: list[Tile]) -> Any:
        norm = self._norm(None, q, k, call, tiles, steep=True)
        done = {tile.j0: self._weights_tile(q, k, norm, call, tile) for tile in tiles}
        size = self.block_sizes(call)[1]
        shape = tuple(q.shape[:3])
        parts = [
            done[j0]
            if j0 in done
            else self.lane.full((*shape, min(size, call.Lk - j0)), 0.0, q.dtype, like=q)
            for j0 in range(0, call.Lk, size)
        ]
        return self.xp.concat(parts, axis=-1)

    def _weights_tile(self, q: Any, k: Any, norm: tuple[Any, Any], call: Call, tile: Tile) -> Any:
        s, _, shown = self.scores(q, k, call, tile)
        p = ops.probability(self.xp, s, *norm)
        return p if shown is None else self.xp.where(shown, p, self.xp.zeros_like(p))
