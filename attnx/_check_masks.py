"""The checks of masks (S3): arrays and mask objects, brought to the form that backends read.

They stand apart from the other checks because a mask is a tree: each of its leaves is named,
checked and made canonical by itself, and positions have a meaning only in the whole tree.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NoReturn

from attnx import masks
from attnx._checks import four_axes
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from attnx._call import Dims
    from attnx._lane import Lane
    from attnx.masks import Mask

__all__ = [
    "check_causal", "check_lengths", "check_mask", "check_positions", "positions_of",
    "refuse_open",
]  # fmt: skip


def check_causal(causal: Any, dims: Dims) -> str | None:
    """The alignment that `causal=` asks for, or None (S3.5)."""
    if causal is False:
        return None
    if causal is True:
        if dims.Lq != dims.Lk:
            _refuse_square("causal=True", dims, "causal='top_left'", "causal='bottom_right'")
        return "top_left"
    if isinstance(causal, str) and causal in ("top_left", "bottom_right"):
        return causal
    kind = ArgumentError if isinstance(causal, str) else ArgumentTypeError
    raise kind(f"causal: expected False, True, 'top_left' or 'bottom_right', got {causal!r}")


def _refuse_square(what: str, dims: Dims, top_left: str, bottom_right: str) -> NoReturn:
    raise ArgumentError(
        f"{what}: expected Lq == Lk, got Lq={dims.Lq} and Lk={dims.Lk}; write {top_left} (query i "
        f"stands at key i) or {bottom_right} (the last query stands at the last key)"
    )


def check_positions(mask: Mask, dims: Dims) -> Mask:
    """Resolve alignments that were left open, and refuse those that have no meaning (S3.5)."""
    if any(getattr(node, "align", None) == "bottom_right" for node in masks.walk(mask)):
        check_lengths("mask", mask)
    return _resolve(mask, dims)


def check_lengths(argument: str, mask: Mask | None) -> None:
    """Refuse lengths from which the bottom_right of an argument has no single meaning (S3.5)."""
    nodes = () if mask is None else masks.walk(mask)
    lengths = [node for node in nodes if isinstance(node, masks.Lengths)]
    if len(lengths) > 1:
        raise ArgumentError(
            f"{argument}: bottom_right beside {len(lengths)} Lengths has no single meaning; "
            "give one Lengths, or explicit q_pos and kv_pos"
        )
    chain = mask.parts if isinstance(mask, masks.And) else (mask,)
    if lengths and not any(part is lengths[0] for part in chain):
        raise ArgumentError(
            f"{argument}: bottom_right beside a Lengths under | or ~ has no meaning; put the "
            "Lengths into the top-level & chain, or give explicit q_pos and kv_pos"
        )


def _resolve(mask: Mask, dims: Dims) -> Mask:
    if isinstance(mask, (masks.And, masks.Or)):
        return type(mask)(_resolve(part, dims) for part in mask.parts)
    if isinstance(mask, masks.Not):
        return masks.Not(_resolve(mask.part, dims))
    if not isinstance(mask, (masks.Causal, masks.Window)) or mask.align is not None:
        return mask
    if mask.q_pos is None and dims.Lq != dims.Lk:
        refuse_open("mask", mask, dims)
    if mask.q_pos is not None or mask.kv_pos is not None:
        return mask
    if isinstance(mask, masks.Window):
        return masks.Window(mask.left, mask.right, "top_left")
    return masks.Causal("top_left")


def refuse_open(argument: str, node: Any, dims: Dims) -> NoReturn:
    """Say how positions can be told where Lq != Lk (S3.5), for a mask or an `Alibi`."""
    if node.kv_pos is not None:
        raise ArgumentError(
            f"{argument}: {node!r}: expected q_pos beside kv_pos where Lq != Lk, got Lq={dims.Lq} "
            f"and Lk={dims.Lk}; the positions of the queries follow from nothing else"
        )
    name = type(node).__name__
    first = f"{node.left}, {node.right}, " if isinstance(node, masks.Window) else ""
    first = "slopes, " if name == "Alibi" else first
    _refuse_square(
        f"{argument}: {node!r}", dims, f"{name}({first}'top_left')",
        f"{name}({first}'bottom_right')",
    )  # fmt: skip


def check_mask(lane: Lane, mask: Any, q: Any, dims: Dims) -> Mask | None:
    """A boolean array or a mask object, its leaves made canonical (S3.2, S3.3, S3.6)."""
    if mask is None:
        return None
    if not isinstance(mask, masks.Mask):
        return masks.Dense(_boolean(lane, "mask", mask, q, dims))

    def canonical(node: Mask, field: str, leaf: Any) -> Any:
        name = f"{type(node).__name__}.{field}"
        if isinstance(node, masks.Dense):
            return _boolean(lane, "mask", leaf, q, dims)
        if isinstance(node, masks.BlockMask):
            return _layout(lane, node, leaf, q, dims)
        length = dims.Lq if field in ("q", "q_pos", "q_ids") else dims.Lk
        if isinstance(node, (masks.Lengths, masks.Starts, masks.Prefix)):
            return _counts(lane, name, leaf, q, length, dims)
        return positions_of(lane, name, leaf, q, length, dims)

    return masks.map_leaves(mask, canonical)


def _layout(lane: Lane, node: masks.BlockMask, leaf: Any, q: Any, dims: Dims) -> Any:
    """A layout of blocks with four axes, as many blocks as the call has."""
    dtype = lane.dtype_name(leaf)
    if dtype != "bool":
        raise ArgumentTypeError(
            f"BlockMask.layout: expected a boolean array (True = visible), got {dtype}; "
            "write layout != 0"
        )
    rows, columns = -(-dims.Lq // node.q_block), -(-dims.Lk // node.kv_block)
    blocks = dims._replace(Lq=rows, Lk=columns)
    shape, full = tuple(leaf.shape), (*dims.batch, dims.Hq, rows, columns)[-max(dims.rank, 2) :]
    fits = all(n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False))
    if len(shape) not in (2, len(full)) or not fits:
        each = f" or (*B, Hq, query blocks, key blocks) = {full}" if len(full) > 2 else ""
        raise ArgumentError(
            f"BlockMask.layout: expected ({rows}, {columns}) blocks of {node.q_block} queries and "
            f"{node.kv_block} keys, for Lq={dims.Lq} and Lk={dims.Lk}{each}, each axis 1 or full, "
            f"got shape {shape}"
        )
    _check_device(lane, "BlockMask.layout", leaf, q)
    return four_axes(lane, "BlockMask.layout", leaf, blocks)


def _counts(lane: Lane, name: str, leaf: Any, q: Any, length: int, dims: Dims) -> Any:
    """A count as an int, or as integers of shape (B,), within [0, L]."""
    what = "Lq" if name == "Lengths.q" else "Lk"
    if isinstance(leaf, int):
        if leaf > length:
            raise ArgumentError(f"{name}: expected at most {what}={length}, got {leaf}")
        return leaf
    leaf = _integers(lane, name, leaf, q)
    # Number by number: a compiler decides, and guards, what may be a symbol.
    shape = tuple(leaf.shape)
    if shape and (len(shape) != len(dims.batch) or any(map(operator.ne, shape, dims.batch))):
        raise ArgumentError(
            f"{name}: expected an integer or integers of shape *B = {dims.batch}, got shape {shape}"
        )
    xp = lane.xp
    if shape == ():
        leaf = xp.broadcast_to(leaf, dims.batch)
    leaf = xp.reshape(leaf, (dims.B,))
    if not lane.readable(leaf):
        # Not by `clip`, which looks at a bound's value in some namespaces; here it may be a symbol.
        return xp.minimum(xp.maximum(leaf, xp.zeros_like(leaf)), xp.full_like(leaf, length))
    if dims.B:
        low, high = lane.extremes(leaf)
        if low < 0 or high > length:
            wrong = low if low < 0 else high
            raise ArgumentError(f"{name}: expected counts within [0, {what}={length}], got {wrong}")
    return leaf


def positions_of(lane: Lane, name: str, leaf: Any, q: Any, length: int, dims: Dims) -> Any:
    """Positions or ids as integers of shape (L,) or (B, L)."""
    leaf = _integers(lane, name, leaf, q)
    shape = tuple(leaf.shape)
    if shape == (length,):
        return leaf
    if shape != (*dims.batch, length):
        axis = "Lq" if length == dims.Lq and ".q_" in name else "Lk"
        raise ArgumentError(
            f"{name}: expected integers of shape ({axis},) = ({length},) or (*B, {axis}) = "
            f"{(*dims.batch, length)}, got {shape}"
        )
    return lane.xp.reshape(leaf, (dims.B, length))


def _integers(lane: Lane, name: str, leaf: Any, q: Any) -> Any:
    """A leaf in the framework's index type, in which no value of it may wrap around."""
    if isinstance(leaf, tuple):
        _check_nested(name, leaf)
        return lane.integers(leaf, q)
    dtype = lane.dtype_name(leaf)
    if not dtype.startswith(("int", "uint")):
        raise ArgumentTypeError(f"{name}: expected integers, got {dtype}")
    found = lane.integers(leaf, q)
    wide = dtype.startswith("uint64") and math.prod(found.shape) and lane.readable(found)
    if wide and lane.extremes(found)[0] < 0:
        raise ArgumentError(f"{name}: expected integers that fit into int64, got greater ones")
    return found


def _check_nested(name: str, leaf: Any) -> tuple[int, ...]:
    """The shape of nested tuples, which must be rectangular and hold what int64 can."""
    if isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**63:
            raise ArgumentError(f"{name}: expected integers that fit into int64, got {leaf}")
        return ()
    shapes = {_check_nested(name, item) for item in leaf}
    if len(shapes) > 1:
        raise ArgumentError(f"{name}: expected lists of one length, got {masks.show(leaf)}")
    return (len(leaf), *shapes.pop()) if shapes else (0,)


def _check_device(lane: Lane, name: str, array: Any, q: Any) -> None:
    """By kind: which of several may meet is for the framework to say, and meta has no values."""
    if lane.traced(q) or lane.traced(array):
        return
    got, wanted = (lane.device(x).partition(":")[0] for x in (array, q))
    if got != wanted:
        raise ArgumentError(
            f"{name}: expected the device of q, {wanted}, got {got}; nothing is moved silently"
        )


def _boolean(lane: Lane, name: str, array: Any, q: Any, dims: Dims) -> Any:
    dtype = lane.dtype_name(array)
    if dtype != "bool":
        raise ArgumentTypeError(
            f"{name}: expected a boolean array (True = visible), got {dtype}; "
            + (
                "pass additive values as bias="
                if dtype.startswith(("float", "bfloat", "int", "uint"))
                else "compare it to get booleans"
            )
        )
    _check_device(lane, name, array, q)
    return four_axes(lane, name, array, dims)
