"""Which part of P is shown: heads, one batch entry, ranges of rows and columns; and how much.

A picture of N² pairs stops being one at a few thousand tokens: below one pixel a pair, most weights
are not drawn at all and nobody can see which. So more than that is refused, before anything is
computed, with the ranges to ask for.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from attnx.errors import ArgumentError, ArgumentTypeError

__all__ = ["MOST_HEADS", "MOST_PAIRS", "MOST_TOKENS", "Part", "choose"]

MOST_TOKENS = 2048
"""Rows or columns of one picture."""
MOST_PAIRS = 1 << 22
"""Pairs of all its heads together: 16 MB of float32."""
MOST_HEADS = 256


class Part(NamedTuple):
    """A part of `(B, Hq, Lq, Lk)`: the heads by index, the entry, and two ranges."""

    heads: tuple[int, ...]
    entry: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def choose(
    sizes: tuple[int, int, int, int], heads: Any, entry: Any, rows: Any, columns: Any
) -> Part:
    """The part that is asked for, once it is there and can be shown.

    Args:
        sizes: B, Hq, Lq and Lk.
        heads: an index, several, or None for all.
        entry: the row-major flattened batch index.
        rows: `(start, stop)` of queries, or None for all.
        columns: `(start, stop)` of keys, or None for all.
    """
    B, Hq, Lq, Lk = sizes
    entry = _index("entry", entry, "B", B)
    if heads is None:
        found = tuple(range(Hq))
    else:
        given = heads if _is_sequence(heads) else [heads]
        found = tuple(_index("heads", head, "Hq", Hq) for head in given)
    if len(set(found)) != len(found) or not found:
        raise ArgumentError(f"heads: expected different heads within [0, Hq={Hq}), got {heads!r}")
    part = Part(found, entry, _range("rows", rows, "Lq", Lq), _range("columns", columns, "Lk", Lk))
    _check_size(part)
    return part


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str) and not _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == ()


def _index(name: str, value: Any, axis: str, length: int) -> int:
    number = _integer(name, value, f"an index within [0, {axis}={length})")
    if not 0 <= number < length:
        raise ArgumentError(f"{name}: expected an index within [0, {axis}={length}), got {number}")
    return number


def _integer(name: str, value: Any, expected: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected {expected}, got {value!r}") from None


def _range(name: str, given: Any, axis: str, length: int) -> tuple[int, int]:
    if length == 0:
        raise ArgumentError(f"{name}: there is nothing to show, {axis} = 0")
    if given is None:
        return 0, length
    expected = f"a pair (start, stop) with 0 <= start < stop <= {axis}={length}"
    if not _is_sequence(given) or len(given) != 2:
        raise ArgumentTypeError(f"{name}: expected {expected}, got {given!r}")
    start, stop = (_integer(name, value, expected) for value in given)
    if not 0 <= start < stop <= length:
        raise ArgumentError(f"{name}: expected {expected}, got ({start}, {stop})")
    return start, stop


def _check_size(part: Part) -> None:
    sides = {"rows": part.rows, "columns": part.columns}
    for name, (start, stop) in sides.items():
        if stop - start > MOST_TOKENS:
            raise ArgumentError(
                f"{name}: {stop - start} of them cannot be seen in one picture, which holds "
                f"{MOST_TOKENS}; choose some, as in {name}=({start}, {start + 512})"
            )
    R, C = (stop - start for start, stop in sides.values())
    most = min(MOST_HEADS, max(1, MOST_PAIRS // (R * C)))
    if len(part.heads) > most:
        raise ArgumentError(
            f"heads: {len(part.heads)} heads of {R} x {C} pairs are too many for one picture, "
            f"which holds {MOST_HEADS} heads and {MOST_PAIRS} pairs; choose {most} heads, as in "
            f"heads=range({most}), or rows= and columns="
        )
