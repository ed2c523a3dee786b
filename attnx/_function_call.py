"""What a wrapped function gets for a call, and what is done around it.

A function is asked only for what it can be trusted with. What causal alignment hides on its own is
cut off before it is called, so it never meets a row or a key at the edge that nobody sees. Where it
does not keep apart what is hidden by itself, keys that no row sees and rows that see no key become
zeros (S3.7, S4.1). Its answer in rows that see nothing is replaced, whatever it was.

All of it is arithmetic on shapes and masks in array-API terms: it can be traced and differentiated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._alibi import Alibi
from attnx._dropout import WORD, Drop, Dropout
from attnx._visibility import positions
from attnx.errors import UnsupportedError
from attnx.masks import And, Causal, Lengths, Mask
from attnx.tiling import Grid, position_offset, visible

if TYPE_CHECKING:
    from attnx._call import Call
    from attnx._lane import Lane
    from attnx._supports import Supports

__all__ = ["Asked", "ask"]


class Asked(NamedTuple):
    """A call as a function gets it.

    Attributes:
        q: the rows from i0 on.
        k: the keys before j1.
        v: alike.
        options: the keyword arguments, without `return_lse`.
        live: (B or 1, Hq or 1, n or 1, 1), the rows that see a key; None where all do.
        i0: rows before it see nothing.
        j1: keys from it on are seen by nobody.
    """

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    live: Any
    i0: int
    j1: int


def ask(
    lane: Lane, has: Supports, q: Any, k: Any, v: Any, call: Call, *, guard: bool, fill: bool
) -> Asked:
    """Translate a call with Lq >= 1 and Lk >= 1.

    Args:
        lane: the lane of the arrays.
        has: what the function takes.
        q: (B, Hq, Lq, D).
        k: (B, Hk, Lk, D).
        v: (B, Hk, Lk, Dv).
        call: the call.
        guard: whether what nobody sees becomes 0.
        fill: whether a row that sees nothing is shown all keys, so that the derivative of the
            function's own arithmetic is finite there; what it gives for the row is not used.
    """
    xp = lane.xp
    align, rest = _split(has, call)
    i0, j1 = _cut(align, call) if rest is None or "mask_objects" not in has else (0, call.Lk)
    q, k, v = q[:, :, i0:, :], k[:, :, :j1, :], v[:, :, :j1, :]
    bias = None if call.bias is None else _window(call.bias, i0, j1)
    grid = _grid(lane, q, call, i0, j1)
    shown = None if rest is None or "mask_objects" in has else visible(rest, grid)
    live = None
    if _must_look(has, rest, bias, guard=guard):
        sight = _sight(xp, align, rest if shown is None else shown, bias, grid)
        live = xp.any(sight, axis=-1, keepdims=True)
        if guard and not call.assume_finite:
            seen = _seen_keys(xp, sight, call)
            q = xp.where(live, q, xp.zeros_like(q))
            k, v = (xp.where(seen, x, xp.zeros_like(x)) for x in (k, v))
        if fill:
            shown = None if shown is None else shown | ~live
            bias = None if bias is None else xp.where(live, bias, xp.zeros_like(bias))
    options = _masks(has, align, rest, shown, square=q.shape[2] == k.shape[2])
    options |= _others(lane, has, call, bias, grid, moved=i0 > 0 or j1 < call.Lk)
    return Asked(q, k, v, options, live, i0, j1)


def _split(has: Supports, call: Call) -> tuple[str | None, Mask | None]:
    """The alignment that goes by its name, and what of the mask is left."""
    mask = call.mask
    parts = () if mask is None else mask.parts if isinstance(mask, And) else (mask,)
    for at, part in enumerate(parts):
        if not isinstance(part, Causal) or part.q_pos is not None or part.kv_pos is not None:
            continue
        others = (*parts[:at], *parts[at + 1 :])
        told = "mask_objects" in has or not any(isinstance(x, Lengths) for x in others)
        aligned = part.align == "top_left" or told  # lengths move the other one (S3.5)
        if aligned and has.takes_causal(part.align, square=call.Lq == call.Lk):
            rest = And(others) if len(others) > 1 else others[0] if others else None
            return part.align, rest
    return None, mask


def _cut(align: str | None, call: Call) -> tuple[int, int]:
    """The first row that sees a key, and the end of the keys that are seen, by causal alone."""
    if align == "bottom_right":
        return max(0, call.Lq - call.Lk), call.Lk
    return 0, min(call.Lq, call.Lk) if align == "top_left" else call.Lk


def _window(array: Any, i0: int, j1: int) -> Any:
    """Four axes, cut alike where they are full."""
    array = array if array.shape[2] == 1 else array[:, :, i0:, :]
    return array if array.shape[3] == 1 else array[:, :, :, :j1]


def _grid(lane: Lane, like: Any, call: Call, i0: int, j1: int) -> Grid:
    arange = partial(lane.arange, like=like)
    rows, keys = slice(i0, call.Lq), slice(0, j1)
    offset = position_offset(call.mask, call.Lq, call.Lk)
    return Grid(lane.xp, arange, slice(0, call.B), slice(0, call.Hq), rows, keys, offset)


def _must_look(has: Supports, rest: Mask | None, bias: Any, *, guard: bool) -> bool:
    """Whether some row may see nothing, and it is the wrapper's to know.

    A function that takes masks as objects makes no array of Lq x Lk, and so neither does the
    wrapper, unless it must guard.
    """
    if rest is None and bias is None:
        return False
    return guard or "mask_objects" not in has


def _sight(xp: Any, align: str | None, rest: Any, bias: Any, grid: Grid) -> Any:
    """What is visible, causal and -inf in the bias included; it broadcasts over the grid."""
    parts = [] if rest is None else [visible(rest, grid) if isinstance(rest, Mask) else rest]
    parts += [] if bias is None else [bias != -xp.inf]
    parts += [] if align is None else [visible(Causal(align), grid)]
    sight = parts[0]
    for part in parts[1:]:
        sight = sight & part
    return sight


def _seen_keys(xp: Any, sight: Any, call: Call) -> Any:
    """(B or 1, Hk or 1, n or 1, 1): the keys that some row of some head of the group sees."""
    seen = xp.any(sight, axis=2)
    if seen.shape[1] != 1:
        groups = (seen.shape[0], call.Hk, call.Hq // call.Hk, seen.shape[2])
        seen = xp.any(xp.reshape(seen, groups), axis=2)
    return seen[..., None]


def _masks(
    has: Supports, align: str | None, rest: Mask | None, shown: Any, *, square: bool
) -> dict[str, Any]:
    if "mask_objects" in has:
        return {"causal": align or False} | ({} if rest is None else {"mask": rest})
    passed = {} if shown is None else {"mask": shown}
    if align is None:
        return passed
    return passed | {"causal": True if square or "causal" not in has else align}


def _others(
    lane: Lane, has: Supports, call: Call, bias: Any, grid: Grid, *, moved: bool
) -> dict[str, Any]:
    """The options that are no masks; what is not taken was refused by the capabilities."""
    if call.alibi is not None:
        bias = _slanted(call.alibi, grid) if moved or _by_lengths(has, call) else call.alibi
    given = {
        "bias": bias, "softcap": call.softcap, "sinks": call.sinks,
        "dropout": None if call.dropout is None else _dropout(lane, call.dropout, grid.i.start),
    }  # fmt: skip
    options = {name: x for name, x in given.items() if x is not None}
    return options | ({"scale": call.scale} if "scale" in has else {})


def _by_lengths(has: Supports, call: Call) -> bool:
    """Whether positions follow from lengths (S3.5), which are not in a boolean mask."""
    mask, alibi = call.mask, call.alibi
    parts = mask.parts if isinstance(mask, And) else (mask,)
    lengths = any(isinstance(part, Lengths) for part in parts)
    moved = alibi is not None and alibi.align == "bottom_right" and lengths
    return moved and "mask_objects" not in has


def _slanted(alibi: Alibi, grid: Grid) -> Alibi:
    """The same distances, with positions that are explicit."""
    p, j = positions(alibi, grid)
    q_pos, kv_pos = p[:, 0, :, 0], j[:, 0, 0, :]
    q_pos, kv_pos = (x[0, :] if x.shape[0] == 1 else x for x in (q_pos, kv_pos))
    return Alibi._of(alibi.slopes, None, q_pos, None if alibi.kv_pos is None else kv_pos)


def _dropout(lane: Lane, drop: Drop, i0: int) -> Dropout:
    """Integers, and rows that are counted from the first of the call."""
    b, h, i, j = (_integer(lane, x) for x in drop.offset)
    low, high = (_integer(lane, x) for x in drop.words)
    return Dropout(drop.threshold / 65536, low | high << 32, (b, h, (i + i0) & WORD, j))


def _integer(lane: Lane, value: Any) -> int:
    """An integer of a dropout, which a function gets as one."""
    if isinstance(value, int):
        return value
    if not lane.readable(value):
        raise UnsupportedError(
            "dropout: this function takes a seed and offsets of integers, and these cannot be read "
            "under a transform or from a device; pass integers"
        )
    return int(lane.to_numpy(value).reshape(-1)[0])
