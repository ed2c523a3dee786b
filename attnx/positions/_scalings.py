"""How a model was taught longer texts: changes of the frequencies that rope turns by.

A record says its numbers and computes in Python's floats, once for a table. What each computes is
what transformers' models of that `rope_type` compute, in double precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnx._checks import check_integer
from attnx.errors import ArgumentError
from attnx.positions._numbers import real
from attnx.positions._scaling import Scaling, fit, ntk, optional, plain, several

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DynamicNtk", "Frequencies", "Linear", "LongRope", "Ntk", "Proportional"]


class Linear(Scaling):
    """Every frequency divided by `factor` (transformers' `"linear"`).

    Args:
        factor: how many times longer the texts are, >= 1.

    Raises:
        ArgumentError: a number out of its range.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Linear
        >>> Linear(4).frequencies(4, 100.0)
        (0.25, 0.025)
    """

    __slots__ = ("factor",)
    _fields = ("factor",)
    factor: float

    def __init__(
        self,
        factor: float,
    ) -> None:
        self._set(factor=real("Linear: factor", factor, 1.0))

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        return tuple([f / self.factor for f in plain(dim, base)])


class Ntk(Scaling):
    """The base multiplied by `factor ** (dim / (dim - 2))`: the slowest pair turns `factor` slower.

    Args:
        factor: as in `Linear`. It holds at every length; see `DynamicNtk` for one that follows it.

    Raises:
        ArgumentError: a number out of its range.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Ntk
        >>> Ntk(4).frequencies(4, 100.0)
        (1.0, 0.025)
    """

    __slots__ = ("factor",)
    _fields = ("factor",)
    factor: float

    def __init__(
        self,
        factor: float,
    ) -> None:
        self._set(factor=real("Ntk: factor", factor, 1.0))

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        return ntk(dim, base, self.factor)


class DynamicNtk(Scaling):
    """NTK scaling that grows with the text (transformers' `"dynamic"`).

    The frequencies depend on `length`, so keys that were turned at one length do not fit queries
    turned at another; transformers' models keep such keys nevertheless.

    Args:
        factor: as in `Linear`.
        original_length: `max_position_embeddings` of the model.
        length: how long the text is now; at most `original_length` changes nothing.

    Raises:
        ArgumentError: a number out of its range.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import DynamicNtk
        >>> DynamicNtk(2, original_length=1024, length=2048).frequencies(4, 100.0)[1] * 30
        1.0
    """

    __slots__ = ("factor", "length", "original_length")
    _fields = ("factor", "original_length", "length")
    factor: float
    original_length: int
    length: int

    def __init__(
        self,
        factor: float,
        original_length: int,
        length: int,
    ) -> None:
        self._set(
            factor=real("DynamicNtk: factor", factor, 1.0),
            original_length=check_integer("DynamicNtk: original_length", original_length, 1),
            length=check_integer("DynamicNtk: length", length, 1),
        )

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        times = max(self.length, self.original_length) / self.original_length
        return ntk(dim, base, self.factor * times - (self.factor - 1.0))


class LongRope(Scaling):
    """LongRoPE: a divisor for each pair, of two lists by how long the text is (`"longrope"`).

    Args:
        short_factors: dim // 2 numbers > 0, for texts up to `original_length`.
        long_factors: alike, for longer ones.
        original_length: the length that the model was first taught.
        length: how long the text is now; it chooses the list. Keys turned by one list do not fit
            queries turned by the other.
        factor: as in `Linear`; `max_position_embeddings / original_length` where a model's
            configuration has none. It makes the attention factor.
        attention_factor: what cos and sin are multiplied with; by default
            `sqrt(1 + log(factor) / log(original_length))`. The attribute holds the number.

    Raises:
        ArgumentError: a number out of its range; from rope also a list of another length.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import LongRope
        >>> LongRope((1, 1), (1, 5), 4096, length=8192, factor=32).frequencies(4, 100.0)
        (1.0, 0.02)
    """

    __slots__ = ("factor", "length", "long_factors", "original_length", "short_factors")
    _fields = (
        "short_factors",
        "long_factors",
        "original_length",
        "length",
        "factor",
        "attention_factor",
    )
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    length: int
    factor: float

    def __init__(
        self,
        short_factors: Sequence[float],
        long_factors: Sequence[float],
        original_length: int,
        length: int,
        factor: float,
        attention_factor: float | None = None,
    ) -> None:
        original = check_integer("LongRope: original_length", original_length, 2)
        factor = real("LongRope: factor", factor, 1.0)
        times = optional("LongRope: attention_factor", attention_factor)
        if times is None:
            times = math.sqrt(1 + math.log(factor) / math.log(original))
        self._set(
            short_factors=several("LongRope: short_factors", short_factors, above=True),
            long_factors=several("LongRope: long_factors", long_factors, above=True),
            original_length=original,
            length=check_integer("LongRope: length", length, 1),
            factor=factor,
            attention_factor=times,
        )

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        long = self.length > self.original_length
        name, divisors = (
            ("long_factors", self.long_factors) if long else ("short_factors", self.short_factors)
        )
        fit(f"LongRope: {name}", divisors, dim)
        return tuple([f / d for f, d in zip(plain(dim, base), divisors, strict=True)])


class Proportional(Scaling):
    """Only the fastest pairs turn, at the frequencies of the whole (`"proportional"`).

    Unlike `rotary_dim`, which counts frequencies anew for the part that turns.

    Args:
        fraction: of the pairs that turn, 0 <= fraction <= 1 (`partial_rotary_factor`).
        factor: as in `Linear`.

    Raises:
        ArgumentError: a number out of its range.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Proportional
        >>> Proportional(0.5).frequencies(4, 100.0)
        (1.0, 0.0)
    """

    __slots__ = ("factor", "fraction")
    _fields = ("fraction", "factor")
    fraction: float
    factor: float

    def __init__(
        self,
        fraction: float,
        factor: float = 1.0,
    ) -> None:
        given = real("Proportional: fraction", fraction, 0.0)
        if given > 1.0:
            raise ArgumentError(f"Proportional: fraction: expected at most 1, got {fraction!r}")
        self._set(fraction=given, factor=real("Proportional: factor", factor, 1.0))

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        turning = int(self.fraction * dim // 2)
        return tuple(
            [f / self.factor if i < turning else 0.0 for i, f in enumerate(plain(dim, base))]
        )


class Frequencies(Scaling):
    """Frequencies written out, for a rule that has no record here; `base` is then not looked at.

    Args:
        values: dim // 2 numbers >= 0 in radians a position.
        attention_factor: what cos and sin are multiplied with.

    Raises:
        ArgumentError: a number out of its range; from rope also values of another count.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Frequencies
        >>> Frequencies((1.0, 0.5)).frequencies(4, 10000.0)
        (1.0, 0.5)
    """

    __slots__ = ("values",)
    _fields = ("values", "attention_factor")
    values: tuple[float, ...]

    def __init__(
        self,
        values: Sequence[float],
        attention_factor: float = 1.0,
    ) -> None:
        times = real("Frequencies: attention_factor", attention_factor, 0.0, above=True)
        self._set(values=several("Frequencies: values", values), attention_factor=times)

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        fit("Frequencies: values", self.values, dim)
        return self.values
