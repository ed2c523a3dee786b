"""The fast path: a plain call of a class that was planned before.

A plain call has no mask object, bias, softcap, sinks or dropout, arrays of four axes in `bhsd`, and
a scale that is a Python float or left out. Its shapes and values are checked here, on every call;
whatever is not plainly right is left to the long way, which knows how to say what is wrong. The key
holds everything the plan depends on, so a plan never serves a call of another class.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnx._call import Call
from attnx._choice import context, process

if TYPE_CHECKING:
    from attnx._call import Options, Prepared
    from attnx._dispatch import Plan
    from attnx.plugin import Lane

__all__ = ["attention", "forget", "memory", "remember"]

_lanes: dict[type, Any] = {}
_plans: dict[Any, tuple[Any, ...]] = {}
_new = tuple.__new__
HUGE = 1.7976931348623157e308


def forget() -> None:
    """What is registered has changed: replace both dicts, so that a reader keeps its own."""
    global _plans, _lanes
    _plans, _lanes = {}, {}


def memory() -> tuple[dict[type, Any], dict[Any, tuple[Any, ...]]]:
    """Where a plan made from now on is kept, unless what is registered changes meanwhile."""
    return _lanes, _plans


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    scale: Any,
    return_lse: Any,
    assume_finite: Any,
    backend: Any,
) -> Any:
    """The answer, or None when the call must take the long way."""
    fast_key = _lanes.get(type(q))
    if fast_key is None:
        return None
    extra = fast_key(q, k, v)
    if extra is None:
        return None
    try:
        B, Hq, Lq, D = q.shape
        Bk, Hk, Lk, Dk = k.shape
        Bv, Hv, Lv, Dv = v.shape
    except (ValueError, RuntimeError):  # other ranks; a nested tensor has no shape at all
        return None
    dtype = q.dtype
    if (
        not B == Bk == Bv
        or Hk != Hv
        or Lk != Lv
        or Dk != D
        or not (Hk and Hq)
        or Hq % Hk
        or (k.dtype is not dtype and k.dtype != dtype)
        or (v.dtype is not dtype and v.dtype != dtype)
        or not (scale is None or (type(scale) is float and -HUGE <= scale <= HUGE))
        or not (causal is False or causal is True or type(causal) is str)
        or not (return_lse is False or return_lse is True)
        or not (assume_finite is False or assume_finite is True)
    ):
        return None
    key = (
        extra, dtype, D, Dv, Hq == Hk, Lq == Lk, causal,
        None if scale is None else (scale > 0) - (scale < 0),
        return_lse, assume_finite, backend, context.get() or process.default,
    )  # fmt: skip
    try:
        found = _plans.get(key)
    except TypeError:  # an unhashable backend=
        return None
    if found is None:
        return None
    apply, cls, mask, default_scale, direct = found
    if direct is not None:
        out = direct(q, k, v, scale, B * Hq * Lq * Lk, Lq, Lk)
        if out is not None:
            return out
    chosen = default_scale if scale is None else scale
    # A named tuple's own constructor costs three times as much; the test of `_fast` pins the order.
    call = _new(Call, (cls, B, Hq, Hk, Lq, Lk, D, Dv, chosen, None, mask, None, None))
    out, lse = apply(q, k, v, call)
    return (out, lse) if return_lse else out


def remember(
    kept: tuple[dict[type, Any], dict[Any, tuple[Any, ...]]], lane: Lane, q: Any, options: Options,
    backend: Any, plan: Plan, ready: Prepared,
) -> None:  # fmt: skip
    """Keep a plan for the fast path, if the call that made it was plain."""
    plain = ready.dims.plain and not any(
        x is not None
        for x in (options.mask, options.bias, options.softcap, options.sinks, options.dropout)
    )
    if not plain or not (options.scale is None or type(options.scale) is float):
        return
    if not (backend is None or type(backend) is str):
        return
    extra = lane.fast_key(ready.q, ready.k, ready.v)
    if extra is None:
        return
    call, cls = ready.call, ready.call.cls
    key = (
        extra, q.dtype, call.D, call.Dv, call.Hq == call.Hk, call.Lq == call.Lk, options.causal,
        cls.scale_sign, options.return_lse, options.assume_finite, backend,
        context.get() or process.default,
    )  # fmt: skip
    lanes, plans = kept
    lanes[type(q)] = lane.fast_key
    plans[key] = (plan.apply, cls, call.mask, 1.0 / math.sqrt(call.D), plan.direct)
