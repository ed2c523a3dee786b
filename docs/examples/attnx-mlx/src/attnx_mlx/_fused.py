"""Where `mx.fast.scaled_dot_product_attention` gives the answer of the spec, and how.

Measured against the suite's oracle, in MLX 0.32: it is right for grouped heads, Dv != D, negative
scales, sinks, and `"causal"`, which is aligned bottom right. It is not asked for what it does
otherwise: on the CPU it multiplies 16-bit arrays in 16 bits and computes float64's exponential in
single precision; a row that sees nothing gets the mean of the values, or NaN under a bias; NaN in a
hidden value reaches every row; it gives no lse; and it multiplies q by the scale first, which may
overflow. On the CPU it keeps the whole matrix of scores, so it gets small calls alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attnx.masks import Causal
from attnx.tiling import Grid, position_offset, visible

if TYPE_CHECKING:
    from attnx.plugin import Call, CallClass

__all__ = ["MOST_SCORES", "attend", "fits", "may_fit", "plain"]

MOST_SCORES = 1 << 20
"""Of a call that `mx.fast` gets on the CPU, over all heads: 4 MB."""
SCALES = 2.0**-20, 2.0**20
"""Between which |scale| times q does not overflow, nor vanish, before it meets k."""


def may_fit(cls: CallClass) -> bool:
    """Whether some call of a class can be answered by `mx.fast`."""
    return not (cls.softcap or cls.alibi or cls.dropout or cls.need_lse or cls.dtype == "float64")


def plain(call: Call) -> bool:
    """Whether a call of the class hides nothing, or what `"causal"` hides."""
    if call.bias is not None:
        return False
    mask = call.mask
    if mask is None:
        return True
    if not isinstance(mask, Causal) or mask.q_pos is not None or mask.kv_pos is not None:
        return False
    return call.Lq == call.Lk or (mask.align == "bottom_right" and call.Lq <= call.Lk)


def fits(call: Call) -> bool:
    """Whether a call can be answered by `mx.fast`, but for what its values decide."""
    scores = call.B * call.Hq * call.Lq * call.Lk
    small = scores <= MOST_SCORES or (call.cls.device == "gpu" and plain(call))
    tame = call.scale == 0.0 or SCALES[0] <= abs(call.scale) <= SCALES[1]
    return may_fit(call.cls) and bool(scores) and small and tame


def attend(q: Any, k: Any, v: Any, call: Call, arange: Any, xp: Any) -> Any:
    """out, for a call that fits and whose values are finite wherever something is hidden."""
    mask, shown = None, None
    if plain(call):
        mask = None if call.mask is None else "causal"
    else:
        mask, shown = _mask(call, arange, xp)
    wide = [x.astype(mx.float32) for x in (q, k, v)]
    sinks = None if call.sinks is None else call.sinks.astype(mx.float32)
    out = mx.fast.scaled_dot_product_attention(*wide, scale=call.scale, mask=mask, sinks=sinks)
    if shown is not None:
        out = mx.where(mx.any(shown, axis=-1, keepdims=True), out, mx.zeros_like(out))
    return out.astype(q.dtype)


def _mask(call: Call, arange: Any, xp: Any) -> tuple[Any, Any]:
    """What `mx.fast` gets as its mask, and the visible pairs, (1 or B, 1 or Hq, 1 or Lq, Lk)."""
    shown = None
    if call.mask is not None:
        offset = position_offset(call.mask, call.Lq, call.Lk)
        b, h, i, j = (slice(0, n) for n in (call.B, call.Hq, call.Lq, call.Lk))
        shown = visible(call.mask, Grid(xp, arange, b, h, i, j, offset))
    if call.bias is None:
        return shown, shown
    open_pairs = call.bias != -mx.inf
    shown = open_pairs if shown is None else shown & open_pairs
    return mx.where(shown, call.bias.astype(mx.float32), -mx.inf), shown
