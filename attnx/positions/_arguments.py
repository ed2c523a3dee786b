"""What rope asks of its arguments; all of it is told before anything is computed (S8.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._checks import FLOATING, check_device, check_integer
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions._angles import Turns, split, turns
from attnx.positions._numbers import check_base, choose, even
from attnx.positions._scaling import Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx.plugin import Lane

__all__ = [
    "Sizes", "beside", "check_far", "check_scaling", "fit_sizes", "integers", "rotary_size",
    "same_side", "sizes_of", "turns_of", "wide_of",
]  # fmt: skip

FAR = 1 << 31
"""Where the products of digits leave 32 bits."""

SHAPES = {"bhsd": "(*B, H, L, D)", "bshd": "(*B, L, H, D)"}


class Sizes(NamedTuple):
    """Of x: what positions must fit."""

    batch: tuple[int, ...]
    L: int
    D: int


def sizes_of(lane: Lane, x: Any, layout: str) -> Sizes:
    """The sizes of x, once it is an array that rope can turn."""
    choose("layout", layout, SHAPES)
    if isinstance(x, lane.refused_types):
        raise ArgumentTypeError(
            f"x: {type(x).__name__} has a meaning of its own that rope would drop; convert it to "
            f"a plain {lane.name} array first"
        )
    if lane.dtype_name(x) not in FLOATING:
        raise ArgumentTypeError(
            f"x: expected one of {', '.join(FLOATING)}, got {lane.dtype_name(x)}"
        )
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise ArgumentError(f"x: expected {SHAPES[layout]} or (L, D), got shape {shape}")
    L = shape[-3] if layout == "bshd" and len(shape) > 2 else shape[-2]
    # A compiler may have a symbol for D; the frequencies need a number.
    return Sizes(shape[:-3], L, len(range(shape[-1])))


def rotary_size(D: int, rotary_dim: int | None) -> int:
    """How many numbers are turned."""
    if rotary_dim is None:
        if D < 2 or D % 2:
            raise ArgumentError(
                f"x: expected an even head size D, since numbers are turned in pairs, got {D}; "
                "rotary_dim turns a part of them"
            )
        return D
    number = even("rotary_dim", rotary_dim)
    if number > D:
        raise ArgumentError(f"rotary_dim: expected at most D = {D}, got {number}")
    return number


def turns_of(dim: int, base: float, scaling: Scaling | None) -> Turns:
    """The frequencies, once base and scaling are what they should be."""
    check_scaling(scaling)
    return turns(dim, check_base(base).hex(), "" if scaling is None else scaling.text)


def check_scaling(scaling: Any) -> None:
    """A record or None; a configuration's dict is not read."""
    if scaling is not None and not isinstance(scaling, Scaling):
        raise ArgumentTypeError(
            "scaling: expected a record of attnx.positions, such as Yarn(...), or None, "
            f"got {type(scaling).__name__}"
        )


def same_side(lane: Lane, name: str, array: Any, x: Any) -> None:
    """Of x's framework, and on its device where that can be told."""
    if not lane.owns(array):
        raise ArgumentTypeError(
            f"{name}: expected a {lane.name} array like x, got "
            f"{type(array).__module__.split('.')[0]}.{type(array).__name__}; convert it first"
        )
    check_device(lane, name, array, "x", x)


def integers(lane: Lane, positions: Any, x: Any) -> Any:
    """Positions as integers of the framework's index type."""
    if isinstance(positions, (list, tuple, range)):
        checked: Sequence[int] = [
            check_integer(f"positions[{n}]", p) for n, p in enumerate(positions)
        ]
        if checked:
            _check_far(min(checked), max(checked))
        return lane.integers(tuple(checked), like=x)
    same_side(lane, "positions", positions, x)
    if "int" not in lane.dtype_name(positions):
        raise ArgumentTypeError(f"positions: expected integers, got {lane.dtype_name(positions)}")
    check_far(lane, positions)
    return split(lane, positions)[0]


def check_far(lane: Lane, positions: Any) -> None:
    """Whether angles can be right there, wherever positions can be read."""
    if 0 not in positions.shape and lane.readable(positions):
        _check_far(*lane.extremes(positions))


def _check_far(least: int, greatest: int) -> None:
    if least < -FAR or greatest >= FAR:
        wrong = least if least < -FAR else greatest
        raise ArgumentError(f"positions: expected integers within [-2**31, 2**31), got {wrong}")


def fit_sizes(name: str, shape: tuple[int, ...], sizes: Sizes, x: Any) -> None:
    """(L,) or (*B, L), each axis of B full or 1."""
    batch, rest = shape[:-1], shape[-1:]
    fits = rest == (sizes.L,) and (
        not batch
        or (
            len(batch) == len(sizes.batch)
            and all(n in (1, m) for n, m in zip(batch, sizes.batch, strict=True))
        )
    )
    if not fits:
        full = (*sizes.batch, sizes.L)
        either = f" or (*B, L) = {full}" if sizes.batch else ""
        raise ArgumentError(
            f"{name}: expected (L,) = ({sizes.L},){either} beside x {tuple(x.shape)}, got {shape}"
            + (" before its last axis" if name != "positions" else "")
            + ("; is it the other layout?" if shape[-1:] != (sizes.L,) and x.ndim > 2 else "")
        )


def wide_of(lane: Lane, x: Any) -> str:
    """What x is turned in."""
    return "float64" if lane.dtype_name(x) == "float64" else "float32"


def beside(xp: Any, table: Any, x: Any, layout: str) -> Any:
    """A table (*B, L, n) with an axis for the heads of x."""
    if x.ndim == 2:
        return table
    return xp.expand_dims(table, axis=-2 if layout == "bshd" else -3)
