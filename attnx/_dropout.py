"""Dropout (S9): which elements of P are dropped is arithmetic, and no state of a generator.

Each pair (b, h, i, j) reads one lane of a Philox4x32-10 block whose counter is made of its own
indices. So the backward draws what the forward drew, and another tiling, layout, shard or framework
draws the same again. The words are kept in 64 bits: a product of two of them wraps modulo 2^64 in
signed arithmetic too, and its halves are then cut out by shifts and masks.

Two of a counter's four words depend on the row alone and two on the column alone; arrays that
broadcast keep it so through the first rounds, which therefore cost next to nothing.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._mask_base import is_scalar
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Arange = Callable[[int, int], Any]

__all__ = [
    "AXES",
    "KEY_STEPS",
    "LANES",
    "MULTIPLIERS",
    "ROUNDS",
    "Drop",
    "Dropout",
    "check_shift",
    "kept",
    "philox",
]

LANES = 8
"""16-bit lanes of a block: so many keys share one counter."""

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
AXES = ("b", "h", "i", "j")


@dataclass(frozen=True, eq=False, slots=True)
class Dropout:
    """Drop elements of P with probability p, the same ones on every backend (S9).

    Element (b, h, i, j) is kept when its lane of Philox4x32-10 is at least `floor(p * 65536)`; kept
    elements are scaled by `65536 / (65536 - floor(p * 65536))`. lse and `attention_weights` are
    those without dropout. The same seed drops the same elements: give each layer and step its own.

    Args:
        p: the probability, 0 <= p < 1.
        seed: an integer, 0 <= seed < 2**64; or an unsigned 32-bit array of q's framework of shape
            (2,), the words (seed mod 2**32, seed >> 32), which may be traced.
        offset: where (b, h, i, j) of this call stand in a larger one, for shards: each an integer
            >= 0, or an integer array of q's framework without axes. That of j counts keys, and is a
            multiple of 8.

    Raises:
        ArgumentError: a value outside its range, or an array of another shape (a ValueError).
        ArgumentTypeError: something that is no number, or a boolean (a TypeError).

    Example:
        >>> import numpy as np, attnx
        >>> q = np.zeros((1, 1, 2, 4), np.float32)
        >>> v = np.eye(4, dtype=np.float32)[None, None]
        >>> attnx.attention(q, v, v, dropout=attnx.Dropout(0.5, seed=5))[0, 0].tolist()
        [[0.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]]
    """

    p: float
    seed: Any
    offset: tuple[Any, Any, Any, Any] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", _probability(self.p))
        object.__setattr__(self, "seed", _seed(self.seed))
        object.__setattr__(self, "offset", _offset(self.offset))

    def __eq__(self, other: object) -> bool:
        """Equal numbers, and arrays that are the same object."""
        if not isinstance(other, Dropout):
            return NotImplemented
        pairs = zip((self.seed, *self.offset), (other.seed, *other.offset), strict=True)
        return self.p == other.p and all(
            a is b or (isinstance(a, int) and isinstance(b, int) and a == b) for a, b in pairs
        )

    def __hash__(self) -> int:
        return hash((Dropout, self.p))

    @property
    def threshold(self) -> int:
        """The lanes below this are dropped: `floor(p * 65536)`."""
        return math.floor(self.p * 65536)

    def _taken_apart(
        self, words: Callable[[int, int], Any]
    ) -> tuple[tuple[Any, ...], tuple[float, tuple[int | None, ...]]]:
        """Its arrays and the rest, for a framework's trees; the seed is an array in any case.

        Args:
            words: makes the seed of its two words, the low one first.
        """
        seed = self.seed
        if isinstance(seed, int):
            seed = words(seed & WORD, seed >> 32)
        arrays = tuple(x for x in self.offset if not isinstance(x, int))
        fixed = tuple(x if isinstance(x, int) else None for x in self.offset)
        return (seed, *arrays), (self.p, fixed)

    @classmethod
    def _put_together(
        cls, arrays: Iterable[Any], rest: tuple[float, tuple[int | None, ...]]
    ) -> Dropout:
        """The way back, without a check: the arrays may be tracers or placeholders."""
        (seed, *left), (p, fixed) = arrays, rest
        shifts = iter(left)
        dropout: Dropout = object.__new__(cls)
        object.__setattr__(dropout, "p", p)
        object.__setattr__(dropout, "seed", seed)
        offset = tuple(next(shifts) if x is None else x for x in fixed)
        object.__setattr__(dropout, "offset", offset)
        return dropout


class Drop(NamedTuple):
    """What a backend needs of a dropout that drops something.

    Attributes:
        threshold: the least lane that is kept, 1 to 65535.
        seed: an integer, or an unsigned 32-bit array of two words, the low one first.
        offset: what is added to b, h, i and j; integers, or integer arrays without axes.
    """

    threshold: int
    seed: Any
    offset: tuple[Any, Any, Any, Any]

    @property
    def scale(self) -> float:
        """What kept elements are multiplied by."""
        return 65536 / (65536 - self.threshold)

    @property
    def words(self) -> tuple[Any, Any]:
        """The key: two Python integers, or two slices of the array, of shape (1,)."""
        if isinstance(self.seed, int):
            return self.seed & WORD, self.seed >> 32
        return self.seed[0:1], self.seed[1:2]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays in it, in the order of `map_arrays`."""
        return tuple(x for x in (self.seed, *self.offset) if not isinstance(x, int))

    def map_arrays(self, fn: Callable[[Any], Any]) -> Drop:
        """The same with `fn(array)` in place of each array, the seed first."""
        seed, b, h, i, j = (x if isinstance(x, int) else fn(x) for x in (self.seed, *self.offset))
        return Drop(self.threshold, seed, (b, h, i, j))


def philox(xp: Any, counter: tuple[Any, ...], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """The four words of Philox4x32-10, for counters and keys that broadcast.

    Args:
        xp: an array namespace with int64.
        counter: four int64 arrays, each word within [0, 2**32).
        key: two alike, or Python integers.

    Example:
        >>> import numpy as np
        >>> zero = np.zeros(1, np.int64)
        >>> [hex(w[0]) for w in philox(np, (zero, zero, zero, zero), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x2 = ((b >> 32) ^ x1 ^ k0) & WORD, ((a >> 32) ^ x3 ^ k1) & WORD
        x1, x3 = b, a  # their high words are cut off when they are used
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return x0, x1 & WORD, x2, x3 & WORD


def kept(xp: Any, arange: Arange, drop: Drop, at: tuple[slice, slice, slice, slice]) -> Any:
    """Which pairs are kept, over ranges of b, h, i and j.

    Args:
        xp: an array namespace with int64.
        arange: `arange(start, stop)`, int64 on the call's device.
        drop: the call's.
        at: the ranges.

    Returns:
        A boolean array, (b, h, i, j).

    Example:
        >>> import numpy as np
        >>> every = slice(0, 1)
        >>> kept(np, np.arange, Drop(32768, 5, (0, 0, 0, 0)), (every, every, every, slice(2, 6)))
        array([[[[False, False, False,  True]]]])
    """
    b, h, i, j = at
    first, last = j.start // LANES, -(-j.stop // LANES)
    ranges = ((first, last), (i.start, i.stop), (h.start, h.stop), (b.start, b.stop))
    drop = drop.map_arrays(lambda x: xp.astype(x, xp.int64))  # PyTorch divides no uint32
    counter = []
    for axis, (start, stop), shift in zip((3, 2, 1, 0), ranges, counts(drop), strict=True):
        shape = [1, 1, 1, 1]
        shape[axis] = stop - start
        numbers = (arange(start, stop) + _wide(xp, shift)) & WORD
        counter.append(xp.reshape(numbers, tuple(shape)))
    key = tuple(_wide(xp, word, (1, 1, 1, 1)) for word in drop.words)
    words = philox(xp, tuple(counter), (key[0], key[1]))
    lanes = [lane for word in words for lane in (word & 0xFFFF, word >> 16)]
    drawn = xp.reshape(xp.stack(lanes, axis=-1), (*words[0].shape[:3], LANES * (last - first)))
    return drawn[..., j.start - LANES * first : j.stop - LANES * first] >= drop.threshold


def counts(drop: Drop) -> tuple[Any, Any, Any, Any]:
    """What is added to the words of a counter: (j // 8, i, h, b)."""
    b, h, i, j = drop.offset
    return j // LANES, i, h, b


def _wide(xp: Any, value: Any, shape: tuple[int, ...] = (1,)) -> Any:
    """An array as int64 with axes, so that nothing warns where it wraps; an integer as it is."""
    return value if isinstance(value, int) else xp.reshape(xp.astype(value, xp.int64), shape)


def _probability(p: Any) -> float:
    if isinstance(p, bool) or not isinstance(p, numbers.Real):
        raise ArgumentTypeError(
            f"Dropout: expected p as a Python or NumPy scalar, got {type(p).__name__}"
        )
    number = float(p)
    if not 0 <= number < 1:
        raise ArgumentError(f"Dropout: expected 0 <= p < 1, got p={number}")
    return number


def _seed(seed: Any) -> Any:
    number = _integer("seed", seed, " or an unsigned 32-bit array of shape (2,)")
    if number is None:
        if tuple(seed.shape) != (2,) or not str(seed.dtype).endswith("uint32"):
            raise ArgumentError(
                "Dropout: expected seed as an integer, or as a uint32 array of shape (2,), the "
                "words (seed mod 2**32, seed >> 32); got an array of "
                f"{str(seed.dtype).rsplit('.', 1)[-1]} of shape {tuple(seed.shape)}"
            )
        return seed
    if not 0 <= number < 1 << 64:
        raise ArgumentError(f"Dropout: expected 0 <= seed < 2**64, got seed={number}")
    return number


def _offset(offset: Any) -> tuple[Any, Any, Any, Any]:
    if not isinstance(offset, (tuple, list)) or len(offset) != len(AXES):
        raise ArgumentError(
            f"Dropout: expected offset as four integers (b, h, i, j), got {offset!r}"
        )
    b, h, i, j = (_shift(axis, x) for axis, x in zip(AXES, offset, strict=True))
    return b, h, i, j


def _shift(axis: str, value: Any) -> Any:
    name = f"the offset of {axis}"
    number = _integer(name, value, "")
    if number is None:
        if tuple(value.shape) or "int" not in str(value.dtype):
            raise ArgumentError(
                f"Dropout: expected {name} as an integer, or as an integer array without axes; got "
                f"an array of {str(value.dtype).rsplit('.', 1)[-1]} of shape {tuple(value.shape)}"
            )
        return value
    check_shift(axis, number)
    return number


def check_shift(axis: str, number: int) -> None:
    """Refuse an offset of b, h, i or j that no counter can hold (S9)."""
    name = f"the offset of {axis}"
    if not 0 <= number < 1 << 32:
        raise ArgumentError(f"Dropout: expected 0 <= {name} < 2**32, got {number}")
    if axis == "j" and number % LANES:
        raise ArgumentError(
            f"Dropout: expected {name} as a multiple of {LANES}, since {LANES} keys share one "
            f"counter, got {number}; split the keys at a multiple of {LANES}"
        )


def _integer(name: str, value: Any, other: str) -> int | None:
    """The integer, or None for an array."""
    if type(value) is int:  # before any other look: inside a compiler it may be a symbol
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype") and not is_scalar(value):
        return None
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ArgumentTypeError(
            f"Dropout: expected {name} as an integer{other}, got {type(value).__name__}"
        )
    return operator.index(value)
