"""The fields of mask objects as their constructors take them: numbers, lists, arrays (S3.6).

Only what a value says by itself is checked here: an array's dtype and shape are looked at when it
meets a call.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from attnx._mask_base import is_scalar, show
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from attnx._alibi import Alibi
    from attnx.masks import Causal, Window

__all__ = ["block_sizes", "check_align", "count", "position_key", "size", "vector"]

ALIGNMENTS = ("top_left", "bottom_right")


def position_key(mask: Causal | Window | Alibi) -> str:
    if mask.q_pos is None and mask.kv_pos is None:
        return mask.align or "square"
    return f"{'q' if mask.q_pos is not None else ''}{'k' if mask.kv_pos is not None else ''}pos"


def check_align(owner: str, align: str | None, q_pos: Any, kv_pos: Any) -> None:
    if align is not None and not (isinstance(align, str) and align in ALIGNMENTS):
        hint = "; positions go by name: q_pos=, kv_pos=" if hasattr(align, "shape") else ""
        raise (ArgumentError if isinstance(align, str) else ArgumentTypeError)(
            f"{owner}: align: expected 'top_left', 'bottom_right' or None, got {show(align)}{hint}"
        )
    if align is not None and (q_pos is not None or kv_pos is not None):
        raise ArgumentError(
            f"{owner}: align={align!r} beside explicit positions: the positions say it all, "
            "so leave align out"
        )


def size(owner: str, name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = _integer(value)
    if number is None:
        raise ArgumentTypeError(
            f"{owner}: {name}: expected an integer or None, got {type(value).__name__}"
        )
    if number < 0:
        raise ArgumentError(
            f"{owner}: {name}: expected an integer >= 0 or None (no limit), got {number}"
        )
    return number


def block_sizes(block: Any) -> tuple[int, int]:
    """The sizes of a `BlockMask`, of queries and of keys."""
    sizes = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(sizes) != 2:
        raise ArgumentError(
            f"BlockMask: block: expected a size or (q_block, kv_block), got {block!r}"
        )
    q_block, kv_block = map(_integer, sizes)
    if q_block is None or kv_block is None:
        raise ArgumentTypeError(
            f"BlockMask: block: expected an integer or (q_block, kv_block), got {block!r}"
        )
    if q_block < 1 or kv_block < 1:
        raise ArgumentError(f"BlockMask: block: expected integers >= 1, got {block!r}")
    return q_block, kv_block


def count(owner: str, name: str, value: Any) -> Any:
    """An integer or a list is checked here; an array's dtype and shape when it meets a call."""
    if isinstance(value, (list, tuple)):
        return vector(owner, name, value)
    number = _integer(value)
    if number is None:
        if not hasattr(value, "shape") or is_scalar(value):
            raise ArgumentTypeError(
                f"{owner}: {name}: expected an integer or integers of shape *B, "
                f"got {type(value).__name__}"
            )
        return value
    if number < 0:
        raise ArgumentError(f"{owner}: {name}: expected an integer >= 0, got {number}")
    return number


def vector(owner: str, name: str, value: Any) -> Any:
    if value is None or (hasattr(value, "shape") and not is_scalar(value)):
        return value
    if isinstance(value, (list, tuple)):
        return _freeze(owner, name, value)
    raise ArgumentTypeError(
        f"{owner}: {name}: expected an integer array, got {type(value).__name__}"
    )


def _freeze(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(owner, name, item) for item in value)
    number = _integer(value)
    if number is None:
        raise ArgumentTypeError(f"{owner}: {name}: expected integers, got {value!r} in the list")
    return number


def _integer(value: Any) -> int | None:
    """A Python or NumPy integer as int; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):  # before any other look: inside a compiler it may be a symbol
        return value if type(value) is int else int(value)
    if hasattr(value, "shape") and value.shape != ():
        return None
    if hasattr(value, "dtype") and (value.dtype == bool or not hasattr(value, "item")):
        return None
    if hasattr(value, "dtype") and type(value).__module__ != "numpy":
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
