"""ArrayBackend: blocked attention in array-API terms, right for any conforming library.

This is the kernel that others start from: a new plugin gets every clause of the spec from a lane
and overrides what its framework does faster. It is written for clarity first: no in-place
operation, no array of Lq x Lk, one pass over key tiles a block of queries, all batch entries and
heads at once.

What cannot be seen has no effect (S4) in two ways. Scores are masked by selection, never by adding.
And where inputs hold NaN or inf (`careful`, decided by one look at the data), products are taken
of the finite part, and what a row does see is put back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _tile_ops as ops
from attnx._contract import Backend, Capabilities, Gradients
from attnx.tiling import EMPTY, FULL, Grid, position_offset, tile_classes, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnx._call import Call, CallClass
    from attnx._lane import Lane

__all__ = ["ArrayBackend", "Scores", "Tile"]


class Tile(NamedTuple):
    """Queries i0 to i1 against keys j0 to j1; `masked` when some pair may be hidden."""

    i0: int
    i1: int
    j0: int
    j1: int
    masked: bool


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
            dtypes=frozenset({"float32", "float64"}), native_masks=ops.STRUCTURED
        )

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
        return all(bool(xp.all(xp.isfinite(a))) for a in arrays if a is not None)

    def softmax_step(self, s: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """One step of the online softmax.

        Args:
            s: scores of a tile, -inf where hidden, (B, Hq, n, m).
            m: the running maximum, (B, Hq, n, 1).
            total: the running sum of exp(s - maximum), alike.

        Returns:
            exp(s - new maximum), the factor for what stands accumulated, the new maximum and sum.
        """
        xp = self.xp
        new = xp.maximum(m, xp.max(s, axis=-1, keepdims=True))
        shift = xp.where(new == -xp.inf, xp.zeros_like(new), new)
        p = xp.exp(s - shift)
        factor = xp.exp(m - shift)
        return p, factor, new, total * factor + xp.sum(p, axis=-1, keepdims=True)

    # The tile plan -----------------------------------------------------------------------------

    def plan_tiles(self, call: Call, like: Any) -> Iterator[tuple[int, int, list[Tile]]]:
        """Blocks of queries, each with the tiles that it must visit."""
        q_size, k_size = self.block_sizes(call)
        table = None
        if call.mask is not None and call.Lk and call.Lq:
            xp, arange = self.xp, partial(self.lane.arange, like=like)
            classes = tile_classes(
                call.mask, xp, arange, Lq=call.Lq, Lk=call.Lk, q_size=q_size, k_size=k_size
            )
            some, every = (
                xp.any(classes != EMPTY, axis=(0, 1)),
                xp.all(classes == FULL, axis=(0, 1)),
            )
            table = self.host(xp.astype(some, xp.int8) + xp.astype(every, xp.int8))
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
        acc = ops.accumulator(xp, call.dtype)
        keys = xp.astype(k[:, :, tile.j0 : tile.j1, :], acc)
        s = ops.product(xp, q, xp.matrix_transpose(keys)) * call.scale
        tanh = None
        if call.softcap is not None:
            tanh = xp.tanh(s / call.softcap)
            s = tanh * call.softcap
        shown = visible(call.mask, self.grid(call, tile, q)) if tile.masked else None
        if call.bias is not None:
            bias = ops.cut(call.bias, tile)
            open_pairs = bias != -xp.inf
            shown = open_pairs if shown is None else shown & open_pairs
            s = s + xp.astype(bias, acc)
        return Scores(s, tanh, shown)

    def grid(self, call: Call, tile: Tile, like: Any) -> Grid:
        """The indices of a tile."""
        offset = position_offset(call.mask, call.Lq, call.Lk)
        ranges = (slice(0, call.B), slice(0, call.Hq), slice(tile.i0, tile.i1))
        arange = partial(self.lane.arange, like=like)
        return Grid(self.xp, arange, *ranges, slice(tile.j0, tile.j1), offset)

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
            careful = not call.assume_finite and not self.finite(q, k, v)
            parts = [
                self._query_block(xp.astype(q[:, :, i0:i1, :], acc), k, v, call, tiles, careful)
                for i0, i1, tiles in self.plan_tiles(call, q)
            ]
            out = xp.astype(xp.concat([part[0] for part in parts], axis=2), q.dtype)
            return out, xp.concat([part[1] for part in parts], axis=2)

    def _query_block(
        self, q: Any, k: Any, v: Any, call: Call, tiles: list[Tile], careful: bool
    ) -> tuple[Any, Any]:
        xp = self.xp
        shape = (*q.shape[:3], 1)
        seen = self.lane.full(shape, False, xp.bool, like=q)
        out = self.lane.full((*shape[:3], call.Dv), 0.0, q.dtype, like=q)
        m, total = self._softmax_start(shape, call, q)
        for tile in tiles:
            s, _, shown = self.scores(q, k, call, tile)
            if shown is not None:
                s = xp.where(shown, s, xp.full_like(s, -xp.inf))
            p, factor, m, total = self.softmax_step(s, m, total)
            seen = seen | (True if shown is None else xp.any(shown, axis=-1, keepdims=True))
            values = xp.astype(v[:, :, tile.j0 : tile.j1, :], q.dtype)
            out = out * factor + self._product(p, values, shown if careful else None)
        answered = seen if call.sinks is None else seen | True
        safe = xp.where(answered, total, xp.ones_like(total))
        out = xp.where(seen, out / safe, xp.zeros_like(out))
        lse = xp.where(answered, m + xp.log(safe), xp.full_like(m, -xp.inf))
        return out, lse[..., 0]

    def _softmax_start(self, shape: tuple[int, ...], call: Call, like: Any) -> tuple[Any, Any]:
        """Nothing seen yet; a sink is a logit that every row has seen (S2.3)."""
        xp = self.xp
        m = self.lane.full(shape, -xp.inf, like.dtype, like=like)
        total = self.lane.full(shape, 0.0, like.dtype, like=like)
        if call.sinks is None:
            return m, total
        sinks = xp.reshape(xp.astype(call.sinks, like.dtype), (1, call.Hq, 1, 1))
        return xp.broadcast_to(sinks, shape), total + 1.0

    def _product(self, rows: Any, x: Any, shown: Any) -> Any:
        """`rows @ x`; where `shown` is given, rows are 0 outside it and x may hold NaN or inf."""
        xp = self.xp
        if shown is None:
            return ops.product(xp, rows, x)
        pairs = xp.broadcast_to(xp.astype(shown, rows.dtype), rows.shape)
        result = ops.product(xp, rows, ops.finite_part(xp, x))
        return result + ops.leak(xp, partial(ops.product, xp), pairs, x)

    def _product_t(self, rows: Any, y: Any, shown: Any, Hk: int) -> Any:
        """`rows.T @ y`, summed over each group, alike."""
        xp = self.xp
        if shown is None:
            return ops.product_t(xp, rows, y, Hk)
        pairs = xp.broadcast_to(xp.astype(shown, rows.dtype), rows.shape)
        result = ops.product_t(xp, rows, ops.finite_part(xp, y), Hk)
        return result + ops.leak(xp, partial(ops.product_t, xp, Hk=Hk), pairs, y)

    # Backward ----------------------------------------------------------------------------------

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `Backend.backward`; scores are computed again from lse, a tile at a time."""
        xp = self.xp
        if call.Lq == 0 or call.B == 0:
            return ops.zeros_like(xp, q, k, v, call.bias, call.sinks)
        acc = ops.accumulator(xp, call.dtype)
        sums = _Sums(self, call, k, v, acc)
        with self.lane.quiet():
            careful = not call.assume_finite and not self.finite(q, k, v, d_out)
            for i0, i1, tiles in self.plan_tiles(call, q):
                rows = [xp.astype(x[:, :, i0:i1, :], acc) for x in (q, out, d_out)]
                row_lse = lse[:, :, i0:i1, None]
                row_d_lse = None if d_lse is None else xp.astype(d_lse[:, :, i0:i1, None], acc)
                self._backward_block(*rows, row_lse, row_d_lse, k, v, call, tiles, careful, sums)
            return sums.gradients(q, k, v)

    def _backward_block(
        self, q: Any, out: Any, d_out: Any, lse: Any, d_lse: Any, k: Any, v: Any, call: Call,
        tiles: list[Tile], careful: bool, sums: _Sums,
    ) -> None:  # fmt: skip
        xp = self.xp
        delta = xp.sum(d_out * out, axis=-1, keepdims=True)
        seen = self.lane.full(lse.shape, False, xp.bool, like=q)
        shift = xp.where(lse == -xp.inf, xp.zeros_like(lse), lse)
        dq = xp.zeros_like(q)
        for tile in tiles:
            s, tanh, shown = self.scores(q, k, call, tile)
            p = xp.exp(s - shift)
            keys = xp.astype(k[:, :, tile.j0 : tile.j1, :], q.dtype)
            values = xp.astype(v[:, :, tile.j0 : tile.j1, :], q.dtype)
            ds = p * (
                ops.product(xp, d_out, xp.matrix_transpose(values))
                - (delta if d_lse is None else delta - d_lse)
            )
            d_raw = ds if tanh is None else ds * (1.0 - tanh * tanh)
            if shown is not None:
                zero = xp.zeros_like(s)
                p, ds, d_raw = (xp.where(shown, x, zero) for x in (p, ds, d_raw))
            seen = seen | (True if shown is None else xp.any(shown, axis=-1, keepdims=True))
            met = shown if careful else None
            dq = dq + self._product(d_raw, keys, met)
            sums.add_keys(
                tile,
                self._product_t(d_raw, q, met, call.Hk),
                self._product_t(p, d_out, met, call.Hk),
            )
            sums.add_bias(tile, ds)
        sums.end_rows(dq, xp.where(seen, delta, xp.zeros_like(delta)), d_lse, lse)

    # Weights -----------------------------------------------------------------------------------

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """P of S2.5 from lse, a tile at a time; a row that sees nothing is 0."""
        xp = self.xp
        no_values = self.lane.full((call.B, call.Hk, call.Lk, 1), 0.0, k.dtype, like=k)
        _, lse = self.forward(q, k, no_values, call._replace(Dv=1))
        acc = ops.accumulator(xp, call.dtype)
        blocks = []
        with self.lane.quiet():
            for i0, i1, tiles in self.plan_tiles(call, q):
                rows, row_lse = xp.astype(q[:, :, i0:i1, :], acc), lse[:, :, i0:i1, None]
                at = {tile.j0: self._weights_tile(rows, k, row_lse, call, tile) for tile in tiles}
                _, size = self.block_sizes(call)
                parts = [
                    at[j0] if j0 in at else self._hidden_tile(call, i0, i1, j0, size, rows)
                    for j0 in range(0, call.Lk, size)
                ]
                blocks.append(xp.concat(parts, axis=-1) if parts else rows[..., :0])
        if not blocks or call.B == 0:
            return self.lane.full((call.B, call.Hq, call.Lq, call.Lk), 0.0, q.dtype, like=q)
        return xp.astype(xp.concat(blocks, axis=2), q.dtype)

    def _weights_tile(self, q: Any, k: Any, lse: Any, call: Call, tile: Tile) -> Any:
        s, _, shown = self.scores(q, k, call, tile)
        p = self.xp.exp(s - lse)
        return p if shown is None else self.xp.where(shown, p, self.xp.zeros_like(p))

    def _hidden_tile(self, call: Call, i0: int, i1: int, j0: int, size: int, like: Any) -> Any:
        shape = (call.B, call.Hq, i1 - i0, min(size, call.Lk - j0))
        return self.lane.full(shape, 0.0, like.dtype, like=like)


class _Sums:
    """The gradients as they add up over blocks of queries."""

    def __init__(self, backend: ArrayBackend, call: Call, k: Any, v: Any, acc: Any) -> None:
        self.backend, self.call, self.acc = backend, call, acc
        self.xp = backend.xp
        self.like = k
        self.dk: dict[int, Any] = {}
        self.dv: dict[int, Any] = {}
        self.dq: list[Any] = []
        self.dsinks: Any = None
        self.bias_rows: list[Any] = []
        self.bias_row: dict[int, Any] = {}

    def add_keys(self, tile: Tile, dk: Any, dv: Any) -> None:
        self.dk[tile.j0] = dk if tile.j0 not in self.dk else self.dk[tile.j0] + dk
        self.dv[tile.j0] = dv if tile.j0 not in self.dv else self.dv[tile.j0] + dv

    def add_bias(self, tile: Tile, ds: Any) -> None:
        if self.call.bias is not None:
            key = tile.j0 if self.call.bias.shape[3] != 1 else 0
            part = ops.reduce_to(self.xp, ds, self._bias_tile(tile))
            self.bias_row[key] = part if key not in self.bias_row else self.bias_row[key] + part

    def _bias_tile(self, tile: Tile) -> tuple[int, ...]:
        b, h, i, j = self.call.bias.shape
        return b, h, min(i, tile.i1 - tile.i0), min(j, tile.j1 - tile.j0)

    def end_rows(self, dq: Any, delta: Any, d_lse: Any, lse: Any) -> None:
        xp, call = self.xp, self.call
        self.dq.append(dq)
        if call.bias is not None:
            self.bias_rows.append((dq.shape[2], self.bias_row))
            self.bias_row = {}
        if call.sinks is not None:
            sinks = xp.reshape(xp.astype(call.sinks, self.acc), (1, call.Hq, 1, 1))
            flow = -delta if d_lse is None else d_lse - delta
            part = xp.sum(xp.exp(sinks - lse) * flow, axis=(0, 2, 3))
            self.dsinks = part if self.dsinks is None else self.dsinks + part

    def gradients(self, q: Any, k: Any, v: Any) -> Gradients:
        xp, call = self.xp, self.call
        cast = xp.astype
        return Gradients(
            cast(xp.concat(self.dq, axis=2) * call.scale, q.dtype),
            cast(self._keys(self.dk, k) * call.scale, k.dtype),
            cast(self._keys(self.dv, v), v.dtype),
            None if call.bias is None else cast(self._bias(), call.bias.dtype),
            None if call.sinks is None else cast(self.dsinks, call.sinks.dtype),
        )

    def _keys(self, sums: dict[int, Any], like: Any) -> Any:
        _, size = self.backend.block_sizes(self.call)
        parts = [
            sums[j0] if j0 in sums else self.xp.zeros_like(like[:, :, j0 : j0 + size, :])
            for j0 in range(0, self.call.Lk, size)
        ]
        parts = [self.xp.astype(part, self.acc) for part in parts]
        return self.xp.concat(parts, axis=2) if parts else self.xp.astype(like, self.acc)

    def _bias(self) -> Any:
        xp, (_, _, i, j) = self.xp, self.call.bias.shape
        rows = [self._bias_keys(count, row) for count, row in self.bias_rows]
        if i != 1:
            return xp.concat(rows, axis=2)
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        return total

    def _bias_keys(self, count: int, row: dict[int, Any]) -> Any:
        b, h, i, j = self.call.bias.shape
        _, size = self.backend.block_sizes(self.call)
        starts = range(0, self.call.Lk, size) if j != 1 else (0,)
        full = self.backend.lane.full
        parts = [
            row[j0]
            if j0 in row
            else full((b, h, min(i, count), min(j - j0, size)), 0.0, self.acc, like=self.like)
            for j0 in starts
        ]
        if not parts:
            return full((b, h, min(i, count), 0), 0.0, self.acc, like=self.like)
        return self.xp.concat(parts, axis=3)
