"""The mask objects (spec S3.6): what a query may see, said by structure, never as an L x L array.

A mask is a small frozen tree. Its arrays (lengths, segment ids, positions) are leaves and may be
traced; everything else is static and makes up `structure`, a string that a plan's key can hold.
The objects say only what was asked for; `_visibility` gives them their meaning on index grids.

Indices are absolute: `i` counts the query rows of the call, `j` its keys, and a mask never depends
on how a backend tiles them. Masks combine with `&`, `|` and `~`.

    >>> from attnx import Causal, Lengths, Prefix
    >>> (Causal() | Prefix(4)) & Lengths([7, 9])
    (Causal() | Prefix(4)) & Lengths([7, 9])
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from attnx._mask_base import (
    And,
    Mask,
    Not,
    Or,
    is_scalar,
    leaves,
    map_leaves,
    rebuild,
    show,
    walk,
)
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Lengths",
    "Mask",
    "Not",
    "Or",
    "Predicate",
    "Prefix",
    "Segments",
    "Starts",
    "Window",
    "leaves",
    "map_leaves",
    "rebuild",
    "show",
    "walk",
]

ALIGNMENTS = ("top_left", "bottom_right")


class Causal(Mask):
    """Query i sees key j when j <= p, where p is the position at which query i stands (S3.5).

    Args:
        align: `"top_left"` (p = i), `"bottom_right"` (p = i + n_k - n_q, with the lengths of a
            `Lengths` in the same `&` chain, else Lk and Lq), or None, which needs Lq == Lk.
        q_pos: explicit positions of the queries, integers of shape (Lq,) or (*B, Lq).
        kv_pos: explicit positions of the keys, integers of shape (Lk,) or (*B, Lk).

    Raises:
        ArgumentError: for an unknown alignment, or an alignment beside explicit positions.

    Example:
        >>> Causal("bottom_right")
        Causal('bottom_right')
    """

    __slots__ = ("align", "kv_pos", "q_pos")
    _array_fields = ("q_pos", "kv_pos")
    _static_fields = ("align",)
    align: str | None
    q_pos: Any
    kv_pos: Any

    def __init__(self, align: str | None = None, *, q_pos: Any = None, kv_pos: Any = None) -> None:
        _check_align("Causal", align, q_pos, kv_pos)
        q_pos = _vector("Causal", "q_pos", q_pos)
        kv_pos = _vector("Causal", "kv_pos", kv_pos)
        self._set(align=align, q_pos=q_pos, kv_pos=kv_pos)

    def _key(self) -> str:
        return f"causal[{_position_key(self)}]"


class Window(Mask):
    """Query i sees keys from p - left to p + right, both ends included (S3.6).

    Args:
        left: how many keys before its own position a query sees; None for all of them.
        right: how many after it; None for all of them. `Window(3, 0)` is four keys wide.
        align: as in `Causal`.
        q_pos: as in `Causal`.
        kv_pos: as in `Causal`.

    Raises:
        ArgumentError: for a negative size or an unknown alignment.
        ArgumentTypeError: for a size that is not an integer.

    Example:
        >>> Window(512, 0) & Causal()
        Window(512, 0) & Causal()
    """

    __slots__ = ("align", "kv_pos", "left", "q_pos", "right")
    _array_fields = ("q_pos", "kv_pos")
    _static_fields = ("left", "right", "align")
    left: int | None
    right: int | None
    align: str | None
    q_pos: Any
    kv_pos: Any

    def __init__(
        self,
        left: int | None,
        right: int | None,
        align: str | None = None,
        *,
        q_pos: Any = None,
        kv_pos: Any = None,
    ) -> None:
        left, right = _size("Window", "left", left), _size("Window", "right", right)
        _check_align("Window", align, q_pos, kv_pos)
        q_pos = _vector("Window", "q_pos", q_pos)
        kv_pos = _vector("Window", "kv_pos", kv_pos)
        self._set(left=left, right=right, align=align, q_pos=q_pos, kv_pos=kv_pos)

    def _key(self) -> str:
        sides = ",".join("*" if side is None else "n" for side in (self.left, self.right))
        return f"window[{sides},{_position_key(self)}]"


class Lengths(Mask):
    """Right padding: only keys j < kv and queries i < q are real (S3.6).

    Args:
        kv: how many keys are real, an integer or integers of shape *B.
        q: how many queries are real, alike; None for all of them.

    Example:
        >>> Lengths([7, 9])
        Lengths([7, 9])
    """

    __slots__ = ("kv", "q")
    _array_fields = ("kv", "q")
    kv: Any
    q: Any

    def __init__(self, kv: Any, q: Any = None) -> None:
        kv = _count("Lengths", "kv", kv)
        q = None if q is None else _count("Lengths", "q", q)
        self._set(kv=kv, q=q)

    def _key(self) -> str:
        return "lengths[kv]" if self.q is None else "lengths[kv,q]"


class Starts(Mask):
    """Left padding: only keys j >= kv are real (S3.6). It never moves a position (S3.5).

    Args:
        kv: the first real key, an integer or integers of shape *B.

    Example:
        >>> Starts(2)
        Starts(2)
    """

    __slots__ = ("kv",)
    _array_fields = ("kv",)
    kv: Any

    def __init__(self, kv: Any) -> None:
        self._set(kv=_count("Starts", "kv", kv))


class Prefix(Mask):
    """Every query sees the keys j < n (S3.6); `Causal() | Prefix(n)` is a prefix language model.

    Args:
        n: an integer or integers of shape *B.

    Example:
        >>> Causal() | Prefix(4)
        Causal() | Prefix(4)
    """

    __slots__ = ("n",)
    _array_fields = ("n",)
    n: Any

    def __init__(self, n: Any) -> None:
        self._set(n=_count("Prefix", "n", n))


class Segments(Mask):
    """Packed documents: a query sees the keys of its own segment (S3.6).

    Args:
        q_ids: integers of shape (Lq,) or (*B, Lq). A negative id matches nothing.
        kv_ids: integers of shape (Lk,) or (*B, Lk), alike.

    Example:
        >>> Segments([0, 0, 1], [0, 0, 1])
        Segments([0, 0, 1], [0, 0, 1])
    """

    __slots__ = ("kv_ids", "q_ids")
    _array_fields = ("q_ids", "kv_ids")
    q_ids: Any
    kv_ids: Any

    def __init__(self, q_ids: Any, kv_ids: Any) -> None:
        if q_ids is None or kv_ids is None:
            raise ArgumentTypeError("Segments: expected integer ids for queries and keys, got None")
        q_ids = _vector("Segments", "q_ids", q_ids)
        kv_ids = _vector("Segments", "kv_ids", kv_ids)
        self._set(q_ids=q_ids, kv_ids=kv_ids)


class Dense(Mask):
    """A boolean array as a mask object, so that it can be combined (S3.3). True = visible.

    Args:
        array: boolean, of shape (Lq, Lk) or with q's number of axes, each 1 or full.

    Example:
        >>> import numpy as np
        >>> ~Dense(np.eye(3, dtype=bool))
        ~Dense(<bool (3, 3)>)
    """

    __slots__ = ("array",)
    _array_fields = ("array",)
    array: Any

    def __init__(self, array: Any) -> None:
        if isinstance(array, Mask):
            raise ArgumentTypeError(f"Dense: expected a boolean array, got the mask {array!r}")
        if not hasattr(array, "shape"):
            raise ArgumentTypeError(
                f"Dense: expected a boolean array, got {type(array).__name__}; "
                "make it an array of q's framework first"
            )
        self._set(array=array)


class Predicate(Mask):
    """Visibility by a function of the indices (S3.6).

    Args:
        fn: `fn(b, h, i, j) -> bool array`, called on integer arrays of the call's framework that
            broadcast against each other; b is the row-major flattened batch index. It must be a
            pure function of its arguments: a backend may call it once a tile.

    Example:
        >>> stride = Predicate(lambda b, h, i, j: (i - j) % 4 == 0)
    """

    __slots__ = ("fn",)
    _static_fields = ("fn",)
    fn: Callable[[Any, Any, Any, Any], Any]

    def __init__(self, fn: Callable[[Any, Any, Any, Any], Any]) -> None:
        if not callable(fn):
            raise ArgumentTypeError(
                "Predicate: expected a function fn(b, h, i, j) -> bool array, "
                f"got {type(fn).__name__}"
            )
        self._set(fn=fn)

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.fn, '__name__', self.fn)})"


def _position_key(mask: Causal | Window) -> str:
    if mask.q_pos is None and mask.kv_pos is None:
        return mask.align or "square"
    return f"{'q' if mask.q_pos is not None else ''}{'k' if mask.kv_pos is not None else ''}pos"


def _check_align(owner: str, align: str | None, q_pos: Any, kv_pos: Any) -> None:
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


def _size(owner: str, name: str, value: Any) -> int | None:
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


def _count(owner: str, name: str, value: Any) -> Any:
    """An integer or a list is checked here; an array's dtype and shape when it meets a call."""
    if isinstance(value, (list, tuple)):
        return _vector(owner, name, value)
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


def _vector(owner: str, name: str, value: Any) -> Any:
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
    if isinstance(value, bool) or (hasattr(value, "shape") and value.shape != ()):
        return None
    if hasattr(value, "dtype") and (value.dtype == bool or not hasattr(value, "item")):
        return None
    if hasattr(value, "dtype") and type(value).__module__ != "numpy":
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
