"""What every record of a scaling shares: checked numbers, a text, and rules that several use.

A record is known to a compiled program by its text, numbers in hexadecimal, so that a compiler
need not look into an object, nor make a symbol of its floats.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NoReturn

from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions._numbers import real

__all__ = ["TAU", "Scaling", "fit", "grown", "ntk", "optional", "plain", "read", "several"]

TAU = 2 * math.pi


class Scaling:
    """The base of the records of `attnx.positions`; a rule of your own is a `Frequencies`.

    Attributes:
        attention_factor: what cos and sin are multiplied with; 1 for most.
        text: the record in words, for compilers.
    """

    __slots__ = ("attention_factor", "text")

    _fields: ClassVar[tuple[str, ...]] = ()

    attention_factor: float
    text: str

    def __init_subclass__(cls) -> None:
        """Only records of this library are known by their text."""
        if not cls.__module__.startswith("attnx.positions."):
            raise TypeError(f"{cls.__name__}: a scaling of your own is a Frequencies(values)")

    def _set(self, attention_factor: float = 1.0, **values: Any) -> None:
        object.__setattr__(self, "attention_factor", attention_factor)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        said = [_say(getattr(self, name)) for name in self._fields]
        object.__setattr__(self, "text", ";".join([type(self).__name__, *said]))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a scaling is frozen: make a new {type(self).__name__}")

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Scaling) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        said = ", ".join([f"{name}={getattr(self, name)!r}" for name in self._fields])
        return f"{type(self).__name__}({said})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles go by the text, since nothing can be set."""
        return read, (self.text,)

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """The `dim // 2` frequencies in radians a position, the fastest first.

        Args:
            dim: how many numbers are turned; even.
            base: of the wavelengths.
        """
        raise NotImplementedError


def read(text: str) -> Scaling:
    """The record that a text says."""
    kind, *said = text.split(";")
    made = next(cls for cls in Scaling.__subclasses__() if cls.__name__ == kind)
    return made(*[_read(word) for word in said])


def _say(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "," + ",".join([x.hex() for x in value])
    return f"{value}" if isinstance(value, int) else float(value).hex()


def _read(word: str) -> Any:
    if word in ("none", "True", "False"):
        return {"none": None, "True": True, "False": False}[word]
    if word.startswith(","):
        return tuple([float.fromhex(x) for x in word[1:].split(",")])
    return float.fromhex(word) if "x" in word else int(word)


def optional(name: str, value: Any) -> float | None:
    """A number above 0, or None."""
    return None if value is None else real(name, value, 0.0, above=True)


def several(name: str, values: Any, *, above: bool = False) -> tuple[float, ...]:
    """A tuple of at least one number of at least 0, or above it."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ArgumentTypeError(
            f"{name}: expected a sequence of numbers, got {type(values).__name__}"
        )
    made = tuple([real(name, x, 0.0, above=above) for x in values])
    if not made:
        raise ArgumentError(f"{name}: expected at least one number, got none")
    return made


def fit(name: str, values: tuple[float, ...], dim: int) -> None:
    """One number for each pair of the `dim` that are turned."""
    if len(values) != dim // 2:
        raise ArgumentError(
            f"{name}: expected {dim // 2} numbers, half of the {dim} that are turned, "
            f"got {len(values)}"
        )


def plain(dim: int, base: float) -> tuple[float, ...]:
    """The frequencies without a scaling, base ** (-2i / dim), in radians a position."""
    return tuple([base ** (-2.0 * i / dim) for i in range(dim // 2)])


def ntk(dim: int, base: float, factor: float) -> tuple[float, ...]:
    """The frequencies of a base that grew so that the slowest pair turns `factor` slower."""
    if dim == 2:
        raise ArgumentError("scaling: expected more than one pair for an NTK scaling, got dim 2")
    return plain(dim, base * factor ** (dim / (dim - 2)))


def grown(factor: float, weight: float) -> float:
    """YaRN's growth of the scores."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
