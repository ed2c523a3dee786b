"""Attention in parts: over slices of the keys that are merged, or of the queries.

The softmax over all keys is a weighted mean of those over some of them, and the weights follow from
their lse (`attnx.merge`, S2.6). So keys that do not fit, stand on several devices, or came at
different times can be attended to one part after another. Query rows are independent anyway (S7).

What makes this easy to get wrong is everything that counts rows and keys. Here a whole call is
described once, and each part is cut out of it: masks keep the alignments of the whole call, lengths
included; dropout drops the same elements; sinks count once.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _gradients
from attnx._attention import attention
from attnx._call import Options, Prepared, prepare
from attnx._checks import check_integer
from attnx._dispatch import lane_of
from attnx._dropout import LANES
from attnx._pieces import piece_of, reach
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx.plugin import Backend, Lane

__all__ = ["piece", "prefill", "split_kv"]


def split_kv(
    q: Any,
    k: Any,
    v: Any,
    *,
    parts: int | Sequence[int],
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    assume_finite: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
) -> Any:
    """Attention over one slice of the keys after another, merged: equal to the whole call.

    The options are those of `attention` for the whole call. Each part sees its keys at the places
    they have there (`causal="bottom_right"`, say, is aligned to the last of all keys), and the
    sinks stand in the first part that has keys. Parts of float16 and bfloat16 are each rounded to
    their dtype before they are joined.

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        parts: how many parts of about one size, or the keys at which to cut: [3, 8] gives the keys
            before 3, from 3 to 8, and from 8 on. Parts may be empty. Beside dropout the cuts are
            multiples of 8, since 8 keys share one counter (S9).
        mask: as in `attention`.
        causal: as in `attention`.
        bias: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sinks: as in `attention`.
        dropout: as in `attention`.
        layout: as in `attention`.
        return_lse: as in `attention`.
        assume_finite: as in `attention`.
        backend: as in `attention`.

    Returns:
        out, or (out, lse), as of `attention`; differentiable by the framework's own means.

    Raises:
        ArgumentError: as in `attention`; fewer than one part, or cuts that do not rise within
            [0, Lk].
        ArgumentTypeError: as in `attention`.
        UnsupportedError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 4))
        >>> out = attnx.split_kv(q, k, v, parts=3, causal=True)
        >>> bool(np.allclose(out, attnx.attention(q, k, v, causal=True)))
        True
    """
    options = Options(
        mask, causal, bias, scale, softcap, sinks, dropout, layout, return_lse, assume_finite
    )
    whole = _Whole.of(q, k, v, options)
    call = whole.ready.call
    cuts = _cuts(parts, call.Lk, LANES if call.dropout is not None else 1)
    # A part without keys weighs nothing; only where no part has any is one of them asked.
    pieces = [keys for keys in cuts if len(keys) > 0] or cuts[:1]
    found = []
    for index, keys in enumerate(pieces):
        arrays, given = whole.cut(range(call.Lq), keys)
        given["sinks"] = sinks if index == 0 else None
        found.append(attention(*arrays, **given, return_lse=True, backend=backend))
    out, lse = found[0] if len(found) == 1 else _gradients.merge(whole.lane, found)
    return whole.outward(out, lse)


def prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    chunk: int,
    mask: Any = None,
    causal: bool | str = "bottom_right",
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    assume_finite: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
) -> Any:
    """Attention for some of the queries after others, each over the keys they can see.

    It is equal to the whole call. The memory that a backend needs beyond the arrays follows the
    chunk instead of Lq, and keys that a chunk cannot see are left out: those after it, and those
    before its window. The options are those of `attention` for the whole call.

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        chunk: how many queries at a time.
        mask: as in `attention`.
        causal: as in `attention`, but by default the last query stands at the last key: a prompt,
            alone or behind the keys of what came before.
        bias: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sinks: as in `attention`.
        dropout: as in `attention`.
        layout: as in `attention`.
        return_lse: as in `attention`.
        assume_finite: as in `attention`.
        backend: as in `attention`.

    Returns:
        out, or (out, lse), as of `attention`; differentiable by the framework's own means.

    Raises:
        ArgumentError: as in `attention`; a chunk below 1.
        ArgumentTypeError: as in `attention`.
        UnsupportedError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 4))
        >>> out = attnx.prefill(q, k, v, chunk=8)
        >>> bool(np.allclose(out, attnx.attention(q, k, v, causal=True)))
        True
    """
    size = check_integer("chunk", chunk)
    if size < 1:
        raise ArgumentError(f"chunk: expected how many queries at a time, at least 1, got {size}")
    options = Options(
        mask, causal, bias, scale, softcap, sinks, dropout, layout, return_lse, assume_finite
    )
    whole = _Whole.of(q, k, v, options)
    call = whole.ready.call
    found = []
    for start in range(0, call.Lq, size) if call.Lq else (0,):
        rows = range(start, min(start + size, call.Lq))
        keys = reach(call.mask, call, rows)
        first = keys.start // LANES * LANES if call.dropout is not None else keys.start
        arrays, given = whole.cut(rows, range(first, keys.stop))
        made = attention(*arrays, **given, return_lse=return_lse, backend=backend)
        found.append(made if return_lse else (made, None))
    if len(found) == 1:
        return whole.outward(*found[0])
    xp = whole.lane.xp
    lse = xp.concat([lse for _, lse in found], axis=2) if return_lse else None
    return whole.outward(xp.concat([out for out, _ in found], axis=2), lse)


def piece(
    q: Any,
    k: Any,
    v: Any,
    *,
    queries: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """A call restricted to some query rows and keys, for whoever distributes parts.

    `attention(*arrays, **given, return_lse=True)` of pieces with all keys between them, merged, is
    the whole call; so are pieces of the rows, one after another. The piece is in the layout "bhsd"
    with one batch axis, whatever the whole call's. Sinks are in every piece: of the pieces that
    share rows, all but one must go without (`given["sinks"] = None`).

    Args:
        q: as in `attention`, all of it.
        k: alike.
        v: alike.
        queries: the first row and the one after the last; None for all.
        keys: the first key and the one after the last, alike; beside dropout the first is a
            multiple of 8 (S9).
        **options: the options of `attention` for the whole call.

    Returns:
        ((q, k, v), given): arrays `(B, H, L, D)` and the options of the piece.

    Raises:
        ArgumentError: as in `attention`; a range that does not lie within the whole.
        ArgumentTypeError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> from attnx.parts import piece
        >>> q = np.ones((1, 2, 16, 4), np.float32)
        >>> arrays, given = piece(q, q, q, queries=(4, 8), keys=(2, 16), causal=True)
        >>> given["mask"]
        Causal(q_pos=<int64 (4,)>, kv_pos=<int64 (14,)>)
        >>> attnx.attention(*arrays, **given).shape
        (1, 2, 4, 4)
    """
    unknown = sorted(set(options) - set(Options._fields))
    if unknown:
        raise TypeError(f"piece() got unexpected keyword arguments {', '.join(unknown)}")
    whole = _Whole.of(q, k, v, Options(**options))
    call = whole.ready.call
    columns = _range("keys", keys, call.Lk)
    if call.dropout is not None:
        _check_dropout("keys", columns.start)
    arrays, given = whole.cut(_range("queries", queries, call.Lq), columns)
    return arrays, given | {"return_lse": whole.options.return_lse}


class _Whole(NamedTuple):
    """The whole call, checked once."""

    lane: Lane
    ready: Prepared
    options: Options

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> _Whole:
        """Check a call."""
        lane = lane_of(q)
        return cls(lane, prepare(lane, q, k, v, options), options)

    def cut(
        self, rows: range, keys: range
    ) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:  # fmt: skip
        """The arguments of `attention` for a piece, without `return_lse` and `backend`."""
        q, k, v, call, _ = self.ready
        piece = piece_of(self.lane, q, call, rows, keys)
        arrays = (
            q[:, :, rows.start : rows.stop, :],
            k[:, :, keys.start : keys.stop, :],
            v[:, :, keys.start : keys.stop, :],
        )
        return arrays, {
            "mask": piece.mask(),
            "bias": piece.bias(),
            "scale": self.options.scale,
            "softcap": self.options.softcap,
            "sinks": call.sinks,
            "dropout": piece.dropout(self.options.dropout),
            "assume_finite": self.options.assume_finite,
        }

    def outward(self, out: Any, lse: Any) -> Any:
        """The answer as the caller of the whole call expects it."""
        xp, dims = self.lane.xp, self.ready.dims
        out = dims.outward(xp, out)
        return (out, dims.outward(xp, lse)) if self.options.return_lse else out


def _cuts(parts: Any, Lk: int, multiple: int) -> list[range]:
    """The ranges of keys; of a number of parts the last ones may be shorter, or empty."""
    if not isinstance(parts, (tuple, list)):
        count = check_integer("parts", parts, other=" or the keys at which to cut")
        if count < 1:
            raise ArgumentError(f"parts: expected at least one part, got {count}")
        size = -(-Lk // (count * multiple)) * multiple
        ends = [0, *(min(n * size, Lk) for n in range(1, min(count, Lk + 1))), Lk]
    else:
        ends = [0, *(check_integer(f"parts[{n}]", x) for n, x in enumerate(parts)), Lk]
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise ArgumentError(
                f"parts: expected cuts that rise within [0, Lk={Lk}], got {list(parts)}"
            )
        if multiple > 1:
            for cut in ends[1:-1]:
                _check_dropout("parts", cut)
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _check_dropout(name: str, cut: int) -> None:
    if cut % LANES:
        raise ArgumentError(
            f"{name}: expected to start at a multiple of {LANES} beside dropout, since {LANES} "
            f"keys share one counter, got {cut}; cut at {cut // LANES * LANES}"
        )


def _range(name: str, given: Any, length: int) -> range:
    if given is None:
        return range(length)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ArgumentTypeError(
            f"{name}: expected the first and the one after the last, (start, stop), got {given!r}"
        )
    start, stop = (check_integer(name, n) for n in given)
    if not 0 <= start <= stop <= length:
        raise ArgumentError(
            f"{name}: expected 0 <= start <= stop <= {length}, got ({start}, {stop})"
        )
    return range(start, stop)
