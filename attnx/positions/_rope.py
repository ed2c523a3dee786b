"""Rotary positions (RoPE, arXiv 2104.09864): pairs of numbers turned by position times frequency.

Which numbers form a pair differs between models and cannot be seen in a weight, so the style has no
default. A table of cos and sin stands between positions and arrays, so that one serves all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnx._checks import check_integer
from attnx._dispatch import lane_of
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions._angles import cos_sin
from attnx.positions._arguments import (
    beside,
    check_scaling,
    fit_sizes,
    integers,
    rotary_size,
    same_side,
    sizes_of,
    turns_of,
    wide_of,
)
from attnx.positions._numbers import STYLES, check_base, choose, even
from attnx.positions._rotation import turned
from attnx.positions._scaling import Scaling, plain

__all__ = [
    "RopeTable", "inverse_frequencies", "rope", "rope_permutation", "rope_table", "rotate",
]  # fmt: skip


class RopeTable(NamedTuple):
    """cos and sin of every position and pair, for as many calls of `rotate` as use them.

    Attributes:
        cos: `(L, R // 2)` or `(*B, L, R // 2)`, with R the numbers that are turned.
        sin: alike.
    """

    cos: Any
    sin: Any


def rope(
    x: Any,
    positions: Any,
    *,
    style: str,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    scaling: Scaling | None = None,
    layout: str = "bhsd",
) -> Any:
    """Turn queries or keys by their positions, so that scores depend on differences of positions.

    Pair i of the token at position p is turned by the angle p * base ** (-2i / R), or by the
    frequencies of `scaling`, with R = `rotary_dim`. Angles, cos, sin and products are computed in
    float32, in float64 for a float64 x; angles are right to 1e-6 at positions up to 2**24, where a
    product in float32 is off by a radian. It is differentiable in x by the framework's own means:
    the gradient is the rotation by -positions. Keys go into a cache turned; a decode step turns its
    own query and key by the position at which they stand.

    To turn several arrays by the same positions, make a `rope_table` once and `rotate` each.

    Args:
        x: `(*B, H, L, D)`, with layout `"bshd"` `(*B, L, H, D)`; or `(L, D)`.
        positions: integers `(L,)`, or `(*B, L)` with batch axes that are full or 1; an array of
            x's framework on its device, or a sequence of Python integers, below 2**31 in size.
            Negative ones turn back.
        style: which two numbers are a pair. `"half"`: i and i + R / 2, as Hugging Face's Llama,
            Mistral, Qwen and Gemma, GPT-NeoX, and ONNX's interleaved=0. `"interleaved"`: 2i and
            2i + 1, as the paper, Meta's own Llama, GPT-J, and ONNX's interleaved=1. It has no
            default, because the wrong one gives no error; `rope_permutation` leads from one to the
            other.
        base: of the wavelengths, > 1 (`rope_theta`).
        rotary_dim: how many of the D numbers are turned, the first ones; even, by default all. The
            others pass through.
        scaling: a record of `attnx.positions`, such as `Yarn` or `Llama3`.
        layout: `"bhsd"` or `"bshd"` (S1.1).

    Returns:
        x turned, of its shape, dtype and framework; it aliases nothing.

    Raises:
        ArgumentError: a shape, a size, a number or a word is wrong (S8.1).
        ArgumentTypeError: a type or a dtype is wrong, or frameworks are mixed.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((1, 8, 16, 64), np.float32)
        >>> attnx.rope(q, np.arange(16), style="half", base=500000.0).shape
        (1, 8, 16, 64)
        >>> step = attnx.rope(q[:, :, 15:], [15], style="half", base=500000.0)
        >>> bool(np.all(step == attnx.rope(q, range(16), style="half", base=500000.0)[:, :, 15:]))
        True
    """
    lane = lane_of(x, "x")
    sizes = sizes_of(lane, x, layout)
    interleaved = choose("style", style, STYLES) == "interleaved"
    turning = turns_of(rotary_size(sizes.D, rotary_dim), base, scaling)
    positions = integers(lane, positions, x)
    fit_sizes("positions", tuple(positions.shape), sizes, x)
    dtype = wide_of(lane, x)
    with lane.quiet():
        cos, sin = cos_sin(lane, positions, None, *turning, dtype)
        return turned(
            lane.xp,
            x,
            beside(lane.xp, cos, x, layout),
            beside(lane.xp, sin, x, layout),
            interleaved=interleaved,
            dtype=dtype,
        )


def rope_table(
    positions: Any,
    dim: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    dtype: str = "float32",
) -> RopeTable:
    """cos and sin for `rotate`, made once for all layers, queries and keys.

    Args:
        positions: integers `(L,)` or `(*B, L)`, an array of any framework.
        dim: how many numbers are turned (`rotary_dim` of `rope`); even.
        base: as in `rope`.
        scaling: as in `rope`; its attention factor is in the table.
        dtype: `"float32"`, or `"float64"` to turn float64.

    Returns:
        `RopeTable(cos, sin)`, each `(*positions.shape, dim // 2)`.

    Raises:
        ArgumentError: as in `rope`.
        ArgumentTypeError: as in `rope`.

    Example:
        >>> import numpy as np
        >>> from attnx import positions
        >>> table = positions.rope_table(np.arange(16), 64)
        >>> q = np.ones((1, 8, 16, 64), np.float32)
        >>> positions.rotate(q, *table, style="half").shape
        (1, 8, 16, 64)
    """
    lane = lane_of(positions, "positions")
    choose("dtype", dtype, ("float32", "float64"))
    turning = turns_of(even("dim", dim), base, scaling)
    positions = integers(lane, positions, positions)
    with lane.quiet():
        return RopeTable(*cos_sin(lane, positions, None, *turning, dtype))


def rotate(x: Any, cos: Any, sin: Any, *, style: str, layout: str = "bhsd") -> Any:
    """Turn queries or keys by a table, as `rope` does by positions.

    Args:
        x: as in `rope`.
        cos: `(L, R // 2)`, or `(*B, L, R // 2)` with batch axes that are full or 1; R <= D numbers
            are turned. Of x's dtype or, beside 16 bits, float32.
        sin: alike.
        style: as in `rope`.
        layout: as in `rope`.

    Returns:
        x turned, of its shape, dtype and framework; it aliases nothing.

    Raises:
        ArgumentError: as in `rope`.
        ArgumentTypeError: as in `rope`.

    Example:
        >>> import numpy as np
        >>> from attnx import positions
        >>> x = np.array([[1.0, 2.0, 3.0]])
        >>> positions.rotate(x, np.array([[0.0]]), np.array([[1.0]]), style="half").tolist()
        [[-2.0, 1.0, 3.0]]
    """
    lane = lane_of(x, "x")
    sizes = sizes_of(lane, x, layout)
    interleaved = choose("style", style, STYLES) == "interleaved"
    dtype = wide_of(lane, x)
    for name, table in (("cos", cos), ("sin", sin)):
        same_side(lane, name, table, x)
        if lane.dtype_name(table) not in (lane.dtype_name(x), dtype):
            allowed = dict.fromkeys((lane.dtype_name(x), dtype))
            raise ArgumentTypeError(
                f"{name}: expected {' or '.join(allowed)} beside x of {lane.dtype_name(x)}, got "
                f"{lane.dtype_name(table)}; rope_table(..., dtype={dtype!r}) makes one"
            )
        if len(table.shape) < 2 or not 1 <= table.shape[-1] <= sizes.D // 2:
            raise ArgumentError(
                f"{name}: expected (L, R // 2) or (*B, L, R // 2) with 2 <= R <= D = {sizes.D}, "
                f"got {tuple(table.shape)}"
            )
        fit_sizes(name, tuple(table.shape[:-1]), sizes, x)
    if tuple(cos.shape) != tuple(sin.shape):
        raise ArgumentError(
            f"sin: expected the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )
    with lane.quiet():
        return turned(
            lane.xp,
            x,
            beside(lane.xp, cos, x, layout),
            beside(lane.xp, sin, x, layout),
            interleaved=interleaved,
            dtype=dtype,
        )


def inverse_frequencies(
    dim: int, *, base: float = 10000.0, scaling: Scaling | None = None
) -> tuple[float, ...]:
    """The frequencies that `rope` turns by, in radians a position, the fastest first.

    Args:
        dim: how many numbers are turned; even.
        base: as in `rope`.
        scaling: as in `rope`; what it multiplies cos and sin with is its `attention_factor`.

    Returns:
        `dim // 2` Python floats, `base ** (-2i / dim)` without a scaling.

    Raises:
        ArgumentError: as in `rope`.
        ArgumentTypeError: as in `rope`.

    Example:
        >>> from attnx import positions
        >>> positions.inverse_frequencies(4, base=100.0)
        (1.0, 0.1)
    """
    dim, base = even("dim", dim), check_base(base)
    check_scaling(scaling)
    return plain(dim, base) if scaling is None else scaling.frequencies(dim, base)


def rope_permutation(
    dim: int, *, source: str, target: str, rotary_dim: int | None = None, heads: int = 1
) -> tuple[int, ...]:
    """The order of weight rows by which a model of one style of `rope` runs in the other.

    With `rows = rope_permutation(...)` the projection whose output feature n is row `rows[n]` of
    the original gives queries or keys in the target's order. The weights of queries and keys, and
    their biases, are both put in order; values are not turned and stay.

    Args:
        dim: D, the size of a head.
        source: the style of the weights as they are.
        target: the style in which they will be turned.
        rotary_dim: as in `rope`.
        heads: how many heads stand one after the other in the weight: Hq for queries, Hk for keys.

    Returns:
        `heads * dim` Python integers.

    Raises:
        ArgumentError: as in `rope`.
        ArgumentTypeError: as in `rope`.

    Example:
        >>> from attnx import positions
        >>> positions.rope_permutation(6, source="interleaved", target="half", rotary_dim=4)
        (0, 2, 1, 3, 4, 5)
    """
    dim, heads = check_integer("dim", dim, 2), check_integer("heads", heads, 1)
    source, target = choose("source", source, STYLES), choose("target", target, STYLES)
    turning = rotary_size(dim, rotary_dim)
    half = turning // 2
    order = list(range(turning))
    if source != target and source == "interleaved":
        order = [*range(0, turning, 2), *range(1, turning, 2)]
    elif source != target:
        order = [row for i in range(half) for row in (i, i + half)]
    order += range(turning, dim)
    return tuple([head * dim + row for head in range(heads) for row in order])
