"""ALiBi (S2.7): a bias that is said by one slope a head, so no array of Lq x Lk is ever made.

An `Alibi` is what a user gives as `bias=`, and after the checks also what a call holds: then its
arrays are those of the call's framework and its alignment is settled. Like a mask it is rebuilt
without a check, because frameworks put tracers and placeholders where its arrays were.
"""

from __future__ import annotations

import numbers
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from attnx import _install
from attnx._mask_base import is_scalar, show
from attnx._mask_fields import check_align, position_key, vector
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attnx._lane import Lane

__all__ = ["FIELDS", "Alibi", "detached", "slopes_of"]

FIELDS = ("slopes", "q_pos", "kv_pos")
"""What may be an array, in the order in which arrays are taken out."""

ARRAY = "*"
"""What stands for an array in what is left of an `Alibi` without them."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Alibi:
    """The bias -slopes[h] * |p - j| of query i at position p, never stored as an array (S2.7).

    Query i stands at p = i (`"top_left"`) or p = i + n_k - n_q (`"bottom_right"`, as when one query
    meets a cache), by the rules of `Causal` (S3.5). The distance is an integer until it is
    multiplied, in float32 at least. The slopes are constants to differentiation.

    Args:
        slopes: one a query head: a sequence of Hq numbers, or an array `(Hq,)` of q's framework and
            dtype, or float32. `attnx.alibi_slopes` gives those of the paper.
        align: `"top_left"`, `"bottom_right"`, or None, which needs Lq == Lk.
        q_pos: explicit positions of the queries, integers of shape (Lq,) or (*B, Lq).
        kv_pos: explicit positions of the keys, integers of shape (Lk,) or (*B, Lk).

    Raises:
        ArgumentError: for an unknown alignment, an alignment beside explicit positions, or a slope
            that is not finite (a ValueError).
        ArgumentTypeError: for slopes that are no numbers (a TypeError).

    Example:
        >>> import numpy as np, attnx
        >>> q, k = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 3, 4), np.float32)
        >>> steep = attnx.Alibi([1000.0], "bottom_right")
        >>> attnx.attention_weights(q, k, bias=steep)[0, 0].tolist()
        [[0.0, 0.0, 1.0]]
    """

    slopes: Any
    align: str | None = None
    _: KW_ONLY
    q_pos: Any = None
    kv_pos: Any = None

    def __post_init__(self) -> None:
        check_align("Alibi", self.align, self.q_pos, self.kv_pos)
        object.__setattr__(self, "slopes", _slopes(self.slopes))
        object.__setattr__(self, "q_pos", vector("Alibi", "q_pos", self.q_pos))
        object.__setattr__(self, "kv_pos", vector("Alibi", "kv_pos", self.kv_pos))
        if _install.early:
            _install.first_mask()

    @property
    def structure(self) -> str:
        """How positions are found: `"top_left"`, `"square"` where it is open, `"qpos"`."""
        return position_key(self)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays in it, in the order of `map_arrays`."""
        return self._taken_apart()[0]

    def map_arrays(self, fn: Callable[[Any], Any]) -> Alibi:
        """The same with `fn(array)` in place of each array."""
        arrays, rest = self._taken_apart()
        return self._put_together([fn(array) for array in arrays], rest)

    def given(self) -> dict[str, Any]:
        """The fields that are arrays, by name."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {n: x for n, x in values.items() if not isinstance(x, (tuple, type(None)))}

    def _taken_apart(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Its arrays and the rest, for a framework's trees."""
        given = self.given()
        rest = tuple([ARRAY if name in given else getattr(self, name) for name in FIELDS])
        return tuple(given.values()), (self.align, *rest)

    @classmethod
    def _put_together(cls, arrays: Iterable[Any], rest: tuple[Any, ...]) -> Alibi:
        """The way back, without a check: the arrays may be tracers or placeholders."""
        left = iter(arrays)
        align, *values = rest
        slopes, q_pos, kv_pos = (next(left) if isinstance(x, str) else x for x in values)
        return cls._of(slopes, align, q_pos, kv_pos)

    @classmethod
    def _of(cls, slopes: Any, align: str | None, q_pos: Any, kv_pos: Any) -> Alibi:
        """One without a check."""
        alibi: Alibi = object.__new__(cls)
        for name, value in zip(FIELDS, (slopes, q_pos, kv_pos), strict=True):
            object.__setattr__(alibi, name, value)
        object.__setattr__(alibi, "align", align)
        return alibi

    def __eq__(self, other: object) -> bool:
        """Equal numbers, and arrays that are the same object."""
        if not isinstance(other, Alibi):
            return NotImplemented
        pairs = [(getattr(self, name), getattr(other, name)) for name in FIELDS]
        return self.align == other.align and all(
            a is b or (isinstance(a, tuple) and isinstance(b, tuple) and a == b) for a, b in pairs
        )

    def __hash__(self) -> int:
        return hash((Alibi, self.structure))

    def __repr__(self) -> str:
        values = [(name, getattr(self, name)) for name in FIELDS[1:]]
        named = [f"{name}={show(value)}" for name, value in values if value is not None]
        align = [] if self.align is None else [repr(self.align)]
        return f"Alibi({', '.join([show(self.slopes), *align, *named])})"


def _slopes(slopes: Any) -> Any:
    """An array as it is; a sequence as a tuple of floats."""
    if hasattr(slopes, "shape") and not is_scalar(slopes):
        return slopes
    if not isinstance(slopes, (list, tuple)):
        raise ArgumentTypeError(
            "Alibi: slopes: expected an array (Hq,) or a sequence of Hq numbers, one a query head, "
            f"got {type(slopes).__name__}"
        )
    # A slope may be a symbol to a compiler, which guards comparisons with plain numbers alone.
    greatest: Any = 1.7976931348623157e308
    for slope in slopes:
        if isinstance(slope, bool) or not isinstance(slope, numbers.Real):
            raise ArgumentTypeError(f"Alibi: slopes: expected numbers, got {slope!r} in the list")
        if not -greatest <= slope <= greatest:
            raise ArgumentError(f"Alibi: slopes: expected finite numbers, got {slope!r}")
    return tuple([float(slope) for slope in slopes])


def detached(lane: Lane, bias: Any) -> Any:
    """A bias, constant to the framework's differentiation: an array, an `Alibi` or None."""
    return bias.map_arrays(lane.detached) if isinstance(bias, Alibi) else lane.detached(bias)


def slopes_of(bias: Any) -> Any:
    """What of a bias a framework may differentiate: itself, or the slopes of an `Alibi`."""
    if not isinstance(bias, Alibi):
        return bias
    return None if isinstance(bias.slopes, tuple) else bias.slopes
