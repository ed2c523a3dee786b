"""Which pairs of a tile are kept (S9), in uint32 words, whose products wrap as Philox wants.

The words of a counter keep one axis each, so the first rounds run over rows or keys alone. The
threshold, the seed and the offsets are operands: a program serves them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from attnx.tiling import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_jax._tiles import Tiles

__all__ = ["Kept", "kept", "operands"]


class Kept(NamedTuple):
    """A call's dropout as operands; a pytree.

    Attributes:
        threshold: the least lane that is kept, uint32.
        scale: what kept elements are multiplied by.
        key: two words, uint32.
        offset: what is added to b, h, i and j, uint32 each.
    """

    threshold: Any
    scale: Any
    key: tuple[Any, Any]
    offset: tuple[Any, Any, Any, Any]


def operands(call: Call) -> Kept | None:
    """The operands of a call's dropout, or None without one."""
    drop = call.dropout
    if drop is None:
        return None
    low, high = (_word(x) if isinstance(x, int) else x.reshape(()) for x in drop.words)
    b, h, i, j = (_word(x) for x in drop.offset)
    return Kept(_word(drop.threshold), drop.scale, (low, high), (b, h, i, j))


def _word(x: Any) -> Any:
    return np.uint32(x) if isinstance(x, int) else x.astype(jnp.uint32)


def kept(drop: Kept, t: Tiles, place: tuple[Any, Any, Any]) -> Any:
    """True where kept, (bc, hc·g, bq, bk), of tile (c, i, j)."""
    s, (c, i, j) = t.s, place
    b, h = t.origin(c)
    start = t.start("j", j)
    # A tile may start within a block of lanes; then it draws one block more, and slides.
    aligned = s.nk == 1 or (s.bk % LANES == 0 and s.Lk % LANES == 0)
    blocks = -(-s.bk // LANES) + (0 if aligned else 1)
    columns = _counter(3, start // LANES, blocks, drop.offset[3] // LANES)
    words = _philox(
        columns,
        _counter(2, t.start("i", i), s.bq, drop.offset[2]),
        _counter(1, h * s.g, s.hc * s.g, drop.offset[1]),
        _counter(0, b, s.bc, drop.offset[0]),
        drop.key,
    )
    lanes = [lane for word in words for lane in (word & 0xFFFF, word >> 16)]
    drawn = jnp.stack(lanes, axis=-1) >= drop.threshold
    drawn = drawn.reshape(*drawn.shape[:3], blocks * LANES)
    if aligned:
        return drawn[..., : s.bk]
    return lax.dynamic_slice_in_dim(drawn, start % LANES, s.bk, axis=3)


def _counter(axis: int, start: Any, size: int, shift: Any) -> Any:
    shape = [1, 1, 1, 1]
    shape[axis] = size
    numbers = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start).astype(jnp.uint32)
    return (numbers + shift).reshape(shape)


def _philox(x0: Any, x1: Any, x2: Any, x3: Any, key: tuple[Any, Any]) -> tuple[Any, ...]:
    m0, m1 = (jnp.uint32(m) for m in MULTIPLIERS)
    k0, k1 = (jnp.asarray(k, jnp.uint32) for k in key)
    for _ in range(ROUNDS):
        high0, high1 = _high(x0, m0), _high(x2, m1)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, x2 * m1, high0 ^ x3 ^ k1, x0 * m0
        k0, k1 = k0 + jnp.uint32(KEY_STEPS[0]), k1 + jnp.uint32(KEY_STEPS[1])
    shape = jnp.broadcast_shapes(*(x.shape for x in (x0, x1, x2, x3)))
    return tuple(jnp.broadcast_to(x, shape) for x in (x0, x1, x2, x3))


def _high(x: Any, m: Any) -> Any:
    """The high word of a product."""
    return lax.mulhi(x, jnp.broadcast_to(m, x.shape))
