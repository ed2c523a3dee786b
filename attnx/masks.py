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

from typing import TYPE_CHECKING, Any

from attnx._mask_base import (
    And,
    Mask,
    Not,
    Or,
    leaves,
    map_leaves,
    rebuild,
    show,
    walk,
)
from attnx._mask_fields import block_sizes, check_align, count, position_key, size, vector
from attnx.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CLASSES",
    "And",
    "BlockMask",
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
        check_align("Causal", align, q_pos, kv_pos)
        q_pos = vector("Causal", "q_pos", q_pos)
        kv_pos = vector("Causal", "kv_pos", kv_pos)
        self._set(align=align, q_pos=q_pos, kv_pos=kv_pos)

    def _key(self) -> str:
        return f"causal[{position_key(self)}]"


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
        left, right = size("Window", "left", left), size("Window", "right", right)
        check_align("Window", align, q_pos, kv_pos)
        q_pos = vector("Window", "q_pos", q_pos)
        kv_pos = vector("Window", "kv_pos", kv_pos)
        self._set(left=left, right=right, align=align, q_pos=q_pos, kv_pos=kv_pos)

    def _key(self) -> str:
        sides = ",".join("*" if side is None else "n" for side in (self.left, self.right))
        return f"window[{sides},{position_key(self)}]"


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
        kv = count("Lengths", "kv", kv)
        q = None if q is None else count("Lengths", "q", q)
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
        self._set(kv=count("Starts", "kv", kv))


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
        self._set(n=count("Prefix", "n", n))


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
        q_ids = vector("Segments", "q_ids", q_ids)
        kv_ids = vector("Segments", "kv_ids", kv_ids)
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


class BlockMask(Mask):
    """Visibility by blocks: query i sees key j where `layout[..., i // q_block, j // kv_block]`.

    Blocks of pairs that are hidden cost nothing on a backend with tiles. The last block of a row or
    column may be short.

    Args:
        layout: boolean, of shape (query blocks, key blocks) or `(*B, Hq, query blocks, key
            blocks)`, each axis 1 or full; True = visible.
        block: the size of a block, or (q_block, kv_block).

    Raises:
        ArgumentError: for a size below 1.
        ArgumentTypeError: for a layout that is no array, or a size that is no integer.

    Example:
        >>> import numpy as np
        >>> BlockMask(np.tri(4, dtype=bool), 128)
        BlockMask(layout=<bool (4, 4)>, block=(128, 128))
    """

    __slots__ = ("kv_block", "layout", "q_block")
    _array_fields = ("layout",)
    _static_fields = ("q_block", "kv_block")
    layout: Any
    q_block: int
    kv_block: int

    def __init__(self, layout: Any, block: int | tuple[int, int]) -> None:
        if isinstance(layout, Mask) or not hasattr(layout, "shape"):
            raise ArgumentTypeError(
                f"BlockMask: layout: expected a boolean array, got {type(layout).__name__}"
            )
        q_block, kv_block = block_sizes(block)
        self._set(layout=layout, q_block=q_block, kv_block=kv_block)

    def _key(self) -> str:
        return "blocks"

    def __repr__(self) -> str:
        return f"BlockMask(layout={show(self.layout)}, block=({self.q_block}, {self.kv_block}))"


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


CLASSES: tuple[type[Mask], ...] = (
    And, Or, Not, Causal, Window, Lengths, Starts, Prefix, Segments, Dense, BlockMask, Predicate,
)  # fmt: skip
"""Every class of mask, for frameworks that want to know them: as trees, or by name."""
