"""Positions that nothing is learned of: the sinusoidal table of a token, ALiBi's slopes."""

from __future__ import annotations

from typing import Any

from attnx._checks import check_integer
from attnx._dispatch import lane_of
from attnx.errors import ArgumentTypeError
from attnx.positions._angles import cos_sin, digits, from_digits, split, turns
from attnx.positions._arguments import check_far
from attnx.positions._numbers import STYLES, check_base, choose, even

__all__ = ["alibi_slopes", "sinusoidal"]


def sinusoidal(
    positions: Any, dim: int, *, base: float = 10000.0, style: str = "interleaved"
) -> Any:
    """The sinusoidal encoding of "Attention is all you need", to be added to embeddings.

    Pair i of position p is sin and cos of p * base ** (-2i / dim), right to 1e-6 at positions up to
    2**24. Floating positions (times of a diffusion, say) are legal and differentiable; at 2**31 and
    beyond they give NaN, and integers there are refused wherever they can be read.

    Args:
        positions: integers or floating numbers of any shape `(*, L)`, an array of any framework.
        dim: how many numbers a position gets; even.
        base: of the wavelengths, > 1.
        style: `"interleaved"`, as the paper: sin at 2i, cos at 2i + 1. `"half"`: sines first,
            cosines behind, with the same frequencies.

    Returns:
        `(*, L, dim)` in float32.

    Raises:
        ArgumentError: a size, a number or a word is wrong (S8.1).
        ArgumentTypeError: positions are no array of a registered framework, or of another dtype.

    Example:
        >>> import numpy as np, attnx
        >>> attnx.sinusoidal(np.arange(3), 4)[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    lane = lane_of(positions, "positions")
    xp, dim = lane.xp, even("dim", dim)
    dtype = lane.dtype_name(positions)
    if "int" not in dtype and "float" not in dtype:
        raise ArgumentTypeError(f"positions: expected integers or floating numbers, got {dtype}")
    interleaved = choose("style", style, STYLES) == "interleaved"
    turning = turns(dim, check_base(base).hex(), "")
    if "int" in dtype:
        check_far(lane, positions)
    with lane.quiet():
        whole, rest = split(lane, positions)
        cos, sin = cos_sin(lane, whole, rest, *turning, "float32")
        if not interleaved:
            return xp.concat([sin, cos], axis=-1)
        return xp.reshape(xp.stack([sin, cos], axis=-1), (*positions.shape, dim))


def alibi_slopes(heads: int, *, like: Any = None) -> Any:
    """ALiBi's slope of each head (arXiv 2108.12409): head h adds -slope * distance to its scores.

    For n heads, n a power of two, 2 ** (-8 (h + 1) / n). For others those of the next lower power
    of two n, then every second one of 2n, as the paper's own code has it.

    Args:
        heads: how many heads.
        like: an array; the slopes are then one of its framework and device.

    Returns:
        `heads` Python floats; or an array `(heads,)` in float32, float64 beside a float64 `like`.

    Raises:
        ArgumentError: `heads` is below 1.
        ArgumentTypeError: `heads` is no integer, or `like` no array of a registered framework.

    Example:
        >>> import attnx
        >>> attnx.alibi_slopes(3)
        (0.0625, 0.00390625, 0.25)
    """
    heads = check_integer("heads", heads, 1)
    power = 1 << heads.bit_length() - 1
    slopes = _slopes(power) + _slopes(2 * power)[::2][: heads - power]
    if like is None:
        return slopes
    lane = lane_of(like, "like")
    dtype = "float64" if lane.dtype_name(like) == "float64" else "float32"
    halves = digits(tuple([slope / 2 for slope in slopes]), 6)  # digits hold at most a half
    return 2.0 * from_digits(lane.xp, lane.integers(halves, like=like), dtype)


def _slopes(heads: int) -> tuple[float, ...]:
    return tuple([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])
