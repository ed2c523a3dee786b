"""Checks that the functions of positions share: real numbers, sizes, names of a few.

A number may be a symbol while a compiler reads the program, so a check here is a comparison with a
plain number, which becomes a guard: `math.isfinite` would be refused, infinity taken for granted.
"""

from __future__ import annotations

import difflib
import numbers
from typing import TYPE_CHECKING, Any

from attnx._checks import check_integer
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["STYLES", "check_base", "choose", "even", "real"]

GREATEST = 1.7976931348623157e308

STYLES = ("half", "interleaved")


def real(name: str, value: Any, least: float, *, above: bool = False) -> float:
    """A finite number of at least `least`, or above it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name}: expected a real number, got {type(value).__name__}")
    number = float(value)
    if not (number > least if above else number >= least) or not number <= GREATEST:
        sign = ">" if above else ">="
        raise ArgumentError(f"{name}: expected a finite number {sign} {least:g}, got {value!r}")
    return number


def even(name: str, value: Any) -> int:
    """An even integer of at least 2: numbers are turned in pairs."""
    number = check_integer(name, value, 2)
    if number % 2:
        raise ArgumentError(
            f"{name}: expected an even number, since numbers are turned in pairs, got {number}"
        )
    return number


def check_base(base: Any) -> float:
    """The base of the wavelengths."""
    return real("base", base, 1.0, above=True)


def choose(name: str, value: Any, allowed: Collection[str]) -> str:
    """One of a few words, with the nearest one told to who mistyped it."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    words = " or ".join([repr(word) for word in allowed])
    raise ArgumentError(f"{name}: expected {words}, got {value!r}{hint}")
