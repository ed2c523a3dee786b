"""The public calls: check, plan, run. `attention` itself stands in `_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx import _gradients, _install
from attnx._alibi import detached, slopes_of
from attnx._attention import attention, outward, plan_for
from attnx._call import Options, prepare
from attnx._choice import requested
from attnx._dispatch import Explanation, Plan, explain_choice, lane_of
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx.plugin import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Backend

__all__ = [
    "BoundPlan",
    "attention",
    "attention_vjp",
    "attention_weights",
    "explain",
    "merge",
    "plan",
]


def attention_vjp(
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
) -> tuple[Any, Callable[..., Any]]:
    """Attention and its pullback, on every backend, NumPy and CuPy included (S6.1).

    The arguments are those of `attention`. The inputs count as constants to the framework's own
    differentiation; the pullback is the gradient. They are not copied: they must still hold the
    same values when the pullback is called.

    Returns:
        (out, pullback), or ((out, lse), pullback) with `return_lse`. `pullback(d_out, d_lse=None)`
        takes cotangents in the shapes of out and lse (d_lse only with `return_lse`; either may be
        None) and returns `Gradients(q, k, v, bias, sinks)`, each in its input's shape and dtype,
        None for what was not given and for an `Alibi`.

    Raises:
        ArgumentError: as in `attention`; also from the pullback, for a wrong cotangent.
        ArgumentTypeError: as in `attention`.
        UnsupportedError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((1, 2, 3, 4), np.float32)
        >>> out, pullback = attnx.attention_vjp(q, q, q)
        >>> pullback(np.ones_like(out)).v.shape
        (1, 2, 3, 4)
    """
    options = Options(
        mask, causal, bias, scale, softcap, sinks, dropout, layout, return_lse, assume_finite
    )
    lane = lane_of(q)
    q, k, v = lane.detached(q), lane.detached(k), lane.detached(v)
    options = options._replace(bias=detached(lane, bias), sinks=lane.detached(sinks))
    ready = prepare(lane, q, k, v, options, gradient="vjp")
    chosen = plan_for(requested(backend), ready.call.cls)
    if return_lse and not chosen.impl.capabilities.lse:  # its class is one without
        reason = Reason("return_lse", "given", "none")
        raise UnsupportedError.because(chosen.backend, reason)
    out, lse = chosen.forward(ready.q, ready.k, ready.v, ready.call)
    pullback = _gradients.pullback(lane, chosen, ready, options, (q, k, v), (out, lse))
    out = ready.dims.outward(lane.xp, out)
    return ((out, ready.dims.outward(lane.xp, lse)) if return_lse else out), pullback


def attention_weights(
    q: Any,
    k: Any,
    *,
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    assume_finite: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
) -> Any:
    """The probabilities P that `attention` multiplies v with (S2.5). It costs Lq x Lk memory.

    The arguments are those of `attention`. A row of P sums to 1 (with sinks, to less; where a row
    sees nothing, it is 0).

    Returns:
        P `(*B, Hq, Lq, Lk)` in either layout, in q's dtype.

    Raises:
        ArgumentError: as in `attention`.
        ArgumentTypeError: as in `attention`.
        UnsupportedError: as in `attention`; also while the framework records a gradient.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((2, 3, 4), np.float32)
        >>> attnx.attention_weights(q, q, causal=True)[0, 1].tolist()
        [0.5, 0.5, 0.0]
    """
    options = Options(mask, causal, bias, scale, softcap, sinks, None, layout, False, assume_finite)
    lane = lane_of(q)
    _gradients.refuse_recording(lane, "attention_weights", q, k, slopes_of(bias), sinks)
    ready = prepare(lane, q, k, k, options)
    chosen = plan_for(requested(backend), ready.call.cls)
    weights = chosen.weights(ready.q, ready.k, ready.call)
    return ready.dims._replace(layout="bhsd").outward(lane.xp, weights)


def merge(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Join attention over disjoint keys: [(out, lse), ...] to (out, lse) of the whole (S2.6).

    A part that saw nothing (lse -inf) weighs nothing. Sinks belong in one part only. The result is
    differentiable in all parts by the framework's own means.

    Args:
        parts: pairs of out `(…, Dv)` and lse `(…)`, all of one shape, dtype and framework, in
            either layout.

    Returns:
        out in the parts' dtype, and lse. Where every part is empty: 0 and -inf.

    Raises:
        ArgumentError: no parts, or shapes that differ.
        ArgumentTypeError: dtypes or frameworks that differ.

    Example:
        >>> import numpy as np, attnx
        >>> q, k = np.ones((1, 3, 4), np.float32), np.ones((1, 6, 4), np.float32)
        >>> halves = [attnx.attention(q, x, x, return_lse=True) for x in (k[:, :2], k[:, 2:])]
        >>> out, lse = attnx.merge(halves)
        >>> bool(np.allclose(lse, attnx.attention(q, k, k, return_lse=True)[1]))
        True
    """
    parts = list(parts)
    if not parts:
        raise ArgumentError("parts: expected at least one pair (out, lse), got none")
    for index, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ArgumentTypeError(f"parts[{index}]: expected a pair (out, lse)")
    lane = lane_of(parts[0][0], "parts[0].out")
    return _gradients.merge(lane, parts)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    gradient: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
    **options: Any,
) -> Explanation:
    """Why a call would be computed where it would be, without computing it.

    Args:
        q: as in `attention`; the arrays are looked at, not computed with.
        k: as in `attention`.
        v: as in `attention`.
        gradient: as if a gradient were wanted (`attention_vjp`).
        backend: as in `attention`.
        **options: the options of `attention`.

    Returns:
        An `Explanation`: the choice and who made it, the route, the exchange, and every registered
        backend with its reasons. It prints as a table.

    Raises:
        ArgumentError: the call itself is wrong (S8.1); a call that nobody can do is no error here.
        ArgumentTypeError: alike.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((1, 2, 3, 4), np.float32)
        >>> attnx.explain(q, q, q, backend="numpy").why
        'backend='
    """
    ready = prepare(
        lane_of(q), q, k, v, _options("explain", options), gradient="vjp" if gradient else None
    )
    return explain_choice(requested(backend), ready.call.cls)


class BoundPlan:
    """What `plan` returns: attention for one class of calls by one backend.

    Attributes:
        backend: the backend's name.
        route: its kernel route.
        reasons: for each backend that was asked before it, why it could not.
    """

    def __init__(self, chosen: Plan, options: Options) -> None:
        self.backend = chosen.backend
        self.route = chosen.route
        self.reasons = chosen.reasons
        self._plan = chosen
        self._options = options

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Compute a call of the plan's class.

        Args:
            q: as in `attention`; lengths and batch may differ from the planned call's.
            k: alike.
            v: alike.
            **options: options that replace those given to `plan`, of the same class.

        Raises:
            ArgumentError: the call is of another class than the plan.
        """
        lane = lane_of(q)
        given = _options("plan", {**self._options._asdict(), **options})
        cls = self._plan.cls
        gradient = "vjp" if cls.gradient == "vjp" else None
        ready = prepare(lane, q, k, v, given, gradient=gradient)
        if ready.call.cls != cls:
            differ = [f for f, a, b in zip(cls._fields, cls, ready.call.cls, strict=True) if a != b]
            raise ArgumentError(
                f"plan: the call differs in {', '.join(differ)} from the one it was made for; "
                "make a plan of its own"
            )
        if gradient is None:
            return outward(lane, ready, *self._plan.apply(ready.q, ready.k, ready.v, ready.call))
        out, lse = self._plan.forward(ready.q, ready.k, ready.v, ready.call)
        back = _gradients.pullback(lane, self._plan, ready, given, (q, k, v), (out, lse))
        out = ready.dims.outward(lane.xp, out)
        lse = ready.dims.outward(lane.xp, lse)
        return ((out, lse) if given.return_lse else out), back


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    gradient: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
    **options: Any,
) -> BoundPlan:
    """Choose a backend once, for calls of one class.

    Args:
        q: as in `attention`; an example of the calls to come.
        k: as in `attention`.
        v: as in `attention`.
        gradient: plan `attention_vjp` instead of `attention`.
        backend: as in `attention`.
        **options: the options of `attention`.

    Returns:
        A callable `(q, k, v, **options)` with `.backend`, `.route` and `.reasons`.

    Raises:
        ArgumentError: as in `attention`.
        ArgumentTypeError: as in `attention`.
        UnsupportedError: nobody who was asked can do it.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((1, 2, 3, 4), np.float32)
        >>> causal = attnx.plan(q, q, q, causal=True)
        >>> causal.backend, causal(q, q, q).shape
        ('numpy', (1, 2, 3, 4))
    """
    given = _options("plan", options)
    ready = prepare(lane_of(q), q, k, v, given, gradient="vjp" if gradient else None)
    return BoundPlan(plan_for(requested(backend), ready.call.cls), given)


def _options(caller: str, options: dict[str, Any]) -> Options:
    unknown = sorted(set(options) - set(Options._fields))
    if unknown:
        raise TypeError(f"{caller}() got unexpected keyword arguments {', '.join(unknown)}")
    return Options(**options)


def _compiler_came(framework: str) -> None:
    from attnx import _traced

    _traced.install(framework)


_install.arrivals["torch._dynamo"] = _compiler_came
