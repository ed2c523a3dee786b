"""`attention`: check, plan, run; with a fast path for plain calls of a class planned before.

A plain call has no mask object, bias, softcap, sinks or dropout, arrays of four axes in `bhsd`, and
a scale that is a Python float or left out. Its shapes and values are checked on every call; what is
not plainly right is left to the long way, which knows how to say what is wrong. The key holds
everything the plan depends on, so a plan never serves a call of another class; what the process's
default backend was is not in it, and a new default forgets these plans.

The fast path stands inside `attention` itself: a call of a function that hands eight arguments on
costs as much as all the checks of their values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnx._call import Call, Options, prepare
from attnx._checks import FLOAT32_MAX
from attnx._choice import context, on_default, requested
from attnx._dispatch import lane_of, make_plan
from attnx._registry import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx._call import CallClass, Prepared
    from attnx._choice import Choice
    from attnx._dispatch import Plan
    from attnx.plugin import Backend, Lane

__all__ = ["attention", "outward", "plan_for"]

_lanes: dict[type, Any] = {}
"""`Lane.fast_key` by the type of q, of the lanes that a plain call was planned for."""

_plain: dict[Any, Any] = {}
"""By what the calls of a class share: (direct or None, `Lane.late_key`, ways), where the ways are
(apply, class, mask) by what `late_key` tells apart."""

_exact: dict[Any, Any] = {}
"""By that and the three shapes: (direct or None, scores, late_key, ways, sizes)."""

_plans: dict[tuple[CallClass, Choice], Plan] = {}

traced: list[Any] = []
"""`attention` as a compiler reads it, once there is one."""

DEFAULTS = False, None, False, None
SHAPES = 4096  # how many are kept at a time; a decoding run meets a new one with every token


def _forget() -> None:
    """What is registered has changed: replace the dicts, so that a reader keeps its own."""
    global _lanes, _plain, _exact, _plans
    _lanes, _plain, _exact, _plans = {}, {}, {}, {}


def _forget_plain() -> None:
    """The process's default has changed, which the fast path's key leaves out to be short."""
    global _plain, _exact
    _plain, _exact = {}, {}


registry.on_change.append(_forget)
on_default.append(_forget_plain)


def plan_for(choice: Choice, cls: CallClass) -> Plan:
    """The plan for a class of calls by whom it is asked of; made once."""
    plans = _plans
    found = plans.get((cls, choice))
    if found is None:
        found = plans[cls, choice] = make_plan(choice, cls)
    return found


def outward(lane: Lane, ready: Prepared, out: Any, lse: Any) -> Any:
    """The answer in the caller's layout: out, or (out, lse) where lse is wanted."""
    out = ready.dims.outward(lane.xp, out)
    return (out, ready.dims.outward(lane.xp, lse)) if ready.call.need_lse else out


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    assume_finite: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
) -> Any:
    """Scaled dot-product attention, with one meaning on every backend (spec S1 to S8).

    Args:
        q: queries `(*B, Hq, Lq, D)`; float16, bfloat16, float32 or float64 (S5.1).
        k: keys `(*B, Hk, Lk, D)` of q's dtype; Hq is a multiple of Hk (S1.3).
        v: values `(*B, Hk, Lk, Dv)` of q's dtype.
        mask: a boolean array, True = visible, or a mask object of `attnx.masks` (S3).
        causal: True (needs Lq == Lk), `"top_left"` or `"bottom_right"` (S3.5); intersects `mask`.
        bias: floating, added to the scores; broadcasts to `(*B, Hq, Lq, Lk)` (S2, S3.4). Or
            `attnx.Alibi(slopes)`, which stands for such an array and makes none (S2.7).
        scale: a finite real number; by default 1/sqrt(D).
        softcap: scores become softcap * tanh(score / softcap) (S2).
        sinks: `(Hq,)`, one logit a head in the denominator alone (S2.3).
        dropout: `attnx.Dropout(p, seed)`: which elements of P are dropped depends on that and their
            indices alone, not on the backend (S9); never active by itself.
        layout: `"bhsd"`, or `"bshd"` for arrays with the sequence before the heads (S1.1).
        return_lse: also return the log of the softmax's denominator, natural, sinks included.
        assume_finite: vouch that nothing holds NaN or inf, so isolation need not be looked after.
        backend: a name, a backend object, or a sequence to try in order.

    Returns:
        out `(*B, Hq, Lq, Dv)` in the layout, dtype, framework and on the device of q; with
        `return_lse` the pair (out, lse), lse of out's shape without its last axis, float32 (or
        float64). A row that sees nothing has out 0 and lse -inf (S3.7).

    Raises:
        ArgumentError: wrong shapes, lengths or values (a ValueError).
        ArgumentTypeError: wrong types or dtypes, or several frameworks (a TypeError).
        UnsupportedError: the backend cannot do this call (S8.2).
        UnavailableBackend: the backend's framework or device is missing here.

    Example:
        >>> import numpy as np, attnx
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = rng.standard_normal((3, 1, 2, 5, 4), dtype=np.float32)
        >>> attnx.attention(q, k, v, causal=True).shape
        (1, 2, 5, 4)
    """
    if (
        mask is None
        and bias is None
        and softcap is None
        and sinks is None
        and dropout is None
        and layout == "bhsd"
        and (fast_key := _lanes.get(type(q))) is not None
        and (extra := fast_key(q, k, v)) is not None
        and (assume_finite is False or assume_finite is True)
    ):
        asked = None
        if not (causal is False and scale is None and return_lse is False and backend is None):
            asked = _asked(causal, scale, return_lse, backend)
        try:
            key = q.shape, k.shape, v.shape, extra, assume_finite, asked, context.get()
        except RuntimeError:  # a nested tensor, without a shape
            found = None
        else:
            found = _exact.get(key) or _of_class(key)
        if found is not None:
            direct, scores, late_key, ways, sizes = found
            if direct is not None:
                out = direct(q, k, v, scale, scores)
                if out is not None:
                    return out
            if (way := ways.get(late_key(q, k, v))) is not None:
                apply, cls, kept_mask = way
                factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
                rest = (None, kept_mask, None, None, None, None)
                out, lse = apply(q, k, v, Call._make((cls, *sizes, factor, *rest)))
                return (out, lse) if return_lse else out
    options = Options(
        mask, causal, bias, scale, softcap, sinks, dropout, layout, return_lse, assume_finite
    )
    return _long_way(q, k, v, options, backend)


def _of_class(key: Any) -> Any:
    """What a plain call of a known class and of shapes not met before needs; kept for the next.

    Returns:
        None where the class is not known, or the shapes do not fit: the long way tells.
    """
    q, k, v, *rest = key
    if not len(q) == len(k) == len(v) == 4:
        return None
    (B, Hq, Lq, D), (Bk, Hk, Lk, Dk), (Bv, Hv, Lv, Dv) = q, k, v
    if not (Bk == B and Bv == B and Hv == Hk and Lv == Lk and Dk == D and Hk and Hq) or Hq % Hk:
        return None
    exact, plain = _exact, _plain
    found = plain.get((D, Dv, Hq == Hk, Lq == Lk, *rest))
    if found is None:
        return None
    direct, late_key, ways = found
    if len(exact) >= SHAPES:
        exact.clear()
    made = direct, B * Hq * Lq * Lk, late_key, ways, (B, Hq, Hk, Lq, Lk, D, Dv)
    exact[key] = made
    return made


def _long_way(q: Any, k: Any, v: Any, options: Options, backend: Any) -> Any:
    lane = lane_of(q)
    if lane.compiling(q):
        return traced[0](q, k, v, **options._asdict(), backend=backend)
    ready = prepare(lane, q, k, v, options)
    kept = _lanes, _plain, _exact
    chosen = plan_for(requested(backend), ready.call.cls)
    _remember(kept, lane, options, backend, chosen, ready)
    return outward(lane, ready, *chosen.apply(ready.q, ready.k, ready.v, ready.call))


def _asked(causal: Any, scale: Any, return_lse: Any, backend: Any) -> Any:
    """What the key holds of options that are not all left out.

    Returns:
        None for the defaults; `...`, which no kept key holds, for what only the long way knows. A
        1 is not True here, though it has True's hash and would find its plan.
    """
    if (
        not (causal is False or causal is True or type(causal) is str)
        or not (scale is None or (type(scale) is float and -FLOAT32_MAX <= scale <= FLOAT32_MAX))
        or not (return_lse is False or return_lse is True)
        or not (backend is None or type(backend) is str)
    ):
        return ...
    asked = causal, None if scale is None else (scale > 0) - (scale < 0), return_lse, backend
    return None if asked == DEFAULTS else asked


def _remember(
    kept: tuple[dict[type, Any], dict[Any, Any], dict[Any, Any]], lane: Lane, options: Options,
    backend: Any, plan: Plan, ready: Prepared,
) -> None:  # fmt: skip
    """Keep a plan for the fast path, if the call that made it was plain."""
    beyond = (options.mask, options.bias, options.softcap, options.sinks, options.dropout)
    if not ready.dims.plain or any(x is not None for x in beyond):
        return
    asked = _asked(options.causal, options.scale, options.return_lse, backend)
    q, k, v, call, _ = ready
    extra, late = lane.fast_key(q, k, v), lane.late_key(q, k, v)
    if asked is ... or extra is None or late is None:
        return
    key = (
        call.D, call.Dv, call.Hq == call.Hk, call.Lq == call.Lk,
        extra, options.assume_finite, asked, context.get(),
    )  # fmt: skip
    lanes, plain, exact = kept
    direct, _, ways = plain.get(key, (None, None, {}))
    ways[late] = plan.apply, call.cls, call.mask
    if plan.direct is not None and direct is None:
        direct = plan.direct
        exact.clear()  # it holds entries without it
    plain[key] = direct, lane.late_key, ways
    lanes[type(q)] = lane.fast_key
