"""cos and sin of position times frequency, as exact as the dtype holds at any position.

A product in float32 is off by 0.06 radians at position 10^6, and what the rotation loses there is
lost in every score. So frequencies are numbers of turns in fixed point, digits of 12 bits, and the
product is one of integers: whole turns drop out exactly, and what is left is rounded once. It fits
32 bits, since JAX has no more by default, and gives every framework the same angles.

With p = 4096 high + low and f = d1 / 4096 + d2 / 4096^2 + ..., the product without whole turns is
the sum over k of (low d_k + high d_(k+1)) / 4096^k. Digits are at most 2048 in size and high at
most 2^19 where p is below 2^31, so none of these sums leaves 32 bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx.positions._scaling import TAU, plain, read

if TYPE_CHECKING:
    from attnx.plugin import Lane

__all__ = ["Turns", "cos_sin", "digits", "from_digits", "split", "turns"]

BITS = 12
ONE = 1 << 2 * BITS
"""A whole turn, in units of the second digit."""

Rows = tuple[tuple[int, ...], ...]


class Turns(NamedTuple):
    """What rope turns by.

    Attributes:
        digits: `digits[k][i]`, digit k + 1 of frequency i in turns a position, whole turns left
            out.
        factor: what cos and sin are multiplied with.
    """

    digits: Rows
    factor: float


def turns(dim: int, base: str, scaling: str) -> Turns:
    """The frequencies of a rotation as digits.

    Args:
        dim: how many numbers are turned.
        base: of the wavelengths, in hexadecimal: a float could be a symbol to a compiler.
        scaling: the text of a `Scaling`, or "".
    """
    return _turns(dim, base, scaling)


# A compiler that reads Python calls it and takes the answer for a constant.
turns._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _turns(dim: int, base: str, scaling: str) -> Turns:
    record = read(scaling) if scaling else None
    given = plain if record is None else record.frequencies
    frequencies = given(dim, float.fromhex(base))
    return Turns(
        digits(tuple([f / TAU for f in frequencies]), 6),
        1.0 if record is None else record.attention_factor,
    )


def digits(values: tuple[float, ...], count: int) -> Rows:
    """The first digits behind the point, each -2048 to 2048; what stands before it is left out."""
    rows = []
    rest = [value - round(value) for value in values]
    for _ in range(count):
        shifted = [value * (1 << BITS) for value in rest]
        rows.append(tuple([round(value) for value in shifted]))
        rest = [value - round(value) for value in shifted]
    return tuple(rows)


def from_digits(xp: Any, rows: Any, dtype: str) -> Any:
    """The values again, (K, n) to (n,), from the last digit up; digit k weighs 4096^-k."""
    last = rows.shape[0] - 1
    value = xp.astype(rows[last, :], getattr(xp, dtype)) * 2.0 ** (-BITS * (last + 1))
    for k in range(last - 1, -1, -1):
        value = value + xp.astype(rows[k, :], getattr(xp, dtype)) * 2.0 ** (-BITS * (k + 1))
    return value


def split(lane: Lane, positions: Any) -> tuple[Any, Any]:
    """Positions in integers, and what floating ones have beyond them (None without).

    That is NaN at 2**31 and beyond, where no integer of 32 bits is meant.
    """
    xp = lane.xp
    if "int" in lane.dtype_name(positions):
        return lane.integers(positions, like=positions), None
    if lane.dtype_name(positions) in ("float16", "bfloat16"):
        positions = xp.astype(positions, xp.float32)
    whole = xp.floor(positions)
    near = (whole >= -(2.0**31)) & (whole < 2.0**31)
    rest = xp.where(near, positions - whole, xp.full_like(positions, float("nan")))
    return lane.integers(xp.astype(whole, xp.int32), like=positions), rest


def cos_sin(
    lane: Lane, positions: Any, rest: Any, rows: Rows, factor: float, dtype: str
) -> tuple[Any, Any]:
    """cos and sin (*, L, dim // 2) of positions (*, L), times a factor.

    Args:
        lane: of the positions.
        positions: integers of the framework's index type.
        rest: what floating positions have beyond them, or None.
        rows: the digits of the frequencies.
        factor: of the `Turns`.
        dtype: `"float32"` or `"float64"`, of the answer.
    """
    xp = lane.xp
    wide = getattr(xp, dtype)
    d = lane.integers(rows if dtype == "float64" else rows[:4], like=positions)
    positions = xp.expand_dims(positions, axis=-1)
    low, high = positions & ((1 << BITS) - 1), positions >> BITS
    first, second, *others = [
        low * d[k, :] + high * d[k + 1, :] for k in range(5 if dtype == "float64" else 3)
    ]
    near = ((first & ((1 << BITS) - 1)) << BITS) + (second & (ONE - 1))
    near = ((near + ONE // 2) & (ONE - 1)) - ONE // 2
    turned = xp.astype(near, wide) * (1.0 / ONE)
    for k, further in enumerate(others):
        turned = turned + xp.astype(further, wide) * 2.0 ** (-BITS * (k + 3))
    if rest is not None:
        rest = xp.expand_dims(xp.astype(rest, wide), axis=-1)
        turned = turned + rest * from_digits(xp, d, dtype)
    angles = turned * TAU
    cos, sin = xp.cos(angles), xp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
