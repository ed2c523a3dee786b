"""Linear attention: a state in place of all keys, so that time grows with L, not its square.

Without the softmax the sum over keys can be taken before the query comes. With phi the feature map,
h a query head and h // (Hq // Hk) its key head, each step t of a sequence does

    S_t = d_t S_(t-1) + phi(k_t) v_t^T        (D, Dv)
    z_t = d_t z_(t-1) + phi(k_t)              (D,), where normalised
    out_t = phi(q_t)^T S_t                    divided by phi(q_t)^T z_t where normalised

from S_0 = 0, or from the state of what came before. d_t in (0, 1] is the decay, 1 when absent; for
each head alone it is that of RetNet, and for each step that of Mamba-2's state-space duality and of
scalar gates. Unrolled it is causal attention whose scores are used as they are:

    out_i = sum_(j <= i) (d_(j+1) … d_i) (phi(q_i)^T phi(k_j)) v_j

`linear_attention` computes whole sequences by chunks, `linear_attention_step` one token; each gives
the other's numbers, up to rounding. The framework of the arrays computes: no backend is chosen,
for all of this is a handful of products in array-API terms. PyTorch and JAX differentiate, map and
compile it by their own means, and `linear_attention_vjp` is the gradient for everybody.

There is no scale, as there is no softmax whose temperature it would be: multiply q. A NaN or an
infinity in k or v spoils its own step, every later one and the state, for no decay forgets it; and
no earlier step, so that what pads a sequence at its end may hold anything. Gradients of q are not
isolated within the chunk of such a key. Sums and states are kept in float32, in float64 for float64
arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx import _linear_call as calls
from attnx import _linear_chunks as chunks
from attnx._dispatch import lane_of
from attnx._linear_call import Call, LinearState, Options
from attnx._linear_gradients import LinearGradients, pullback
from attnx.errors import ArgumentError, UnsupportedError
from attnx.plugin import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._linear_chunks import Inputs

__all__ = [
    "LinearGradients",
    "LinearState",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
]


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    log_decay: Any = None,
    feature_map: str | Callable[[Any], Any] | None = None,
    normalize: bool | None = None,
    causal: bool = True,
    chunk: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    layout: str = "bhsd",
) -> Any:
    """Linear attention over a sequence, in time and memory that grow with L.

    The module says what is computed. Axes, layouts, grouped heads and dtypes are those of
    `attention` (S1, S5.1). Memory is L (chunk + D Dv / chunk) numbers a head beside the arrays.

    Args:
        q: `(*B, Hq, Lq, D)`.
        k: `(*B, Hk, Lk, D)`.
        v: `(*B, Hk, Lk, Dv)`.
        decay: d, in (0, 1]: a number, `(Hq,)`, or one a step, `(*B, Hq, L)` (`(*B, L, Hq)` in the
            layout "bshd", `(L,)` beside two axes); in the dtype of q or float32.
        log_decay: its natural logarithm in its place, <= 0. It is exact where a decay close to 1 is
            not, and -inf is a step that forgets all that came before it.
        feature_map: phi, on rows of q and k: None for the identity; "elu", elu(x) + 1, which is
            positive; or a function from `(…, D)` to `(…, D')`, which gets the caller's axes in
            float32 at least.
        normalize: whether out is divided; None for True with "elu", else False. Where the divisor
            is 0, out is 0.
        causal: False for queries that all see every key, Lk then being of any size; no decay.
        chunk: steps that are weighed pair by pair. It changes nothing but the cost.
        state: the `LinearState` of the steps before, for one that goes on.
        return_state: also return the state after the last step.
        layout: `"bhsd"` or `"bshd"`.

    Returns:
        out `(*B, Hq, Lq, Dv)` in q's dtype and layout, or (out, state) with `return_state`.

    Raises:
        ArgumentError: a wrong shape, length or value (S8.1).
        ArgumentTypeError: a wrong type or dtype, or several frameworks.

    Example:
        >>> import numpy as np, attnx
        >>> x = np.ones((1, 3, 1), np.float32)
        >>> attnx.linear_attention(x, x, x, decay=0.5)[0, :, 0].tolist()
        [1.0, 1.5, 1.75]
        >>> start, state = attnx.linear_attention(
        ...     x[:, :2], x[:, :2], x[:, :2], decay=0.5, return_state=True
        ... )
        >>> attnx.linear_attention(x[:, 2:], x[:, 2:], x[:, 2:], decay=0.5, state=state).tolist()
        [[[1.75]]]
    """
    options = Options(
        decay, log_decay, feature_map, normalize, causal, chunk, state, return_state, layout
    )
    lane = lane_of(q)
    q, k, v, call = calls.prepare(lane, q, k, v, options)
    with lane.quiet():
        x = calls.inputs(
            call, calls.map_features(call, "q", q), calls.map_features(call, "k", k), v
        )
        out, last = chunks.forward(lane, x, chunk) if causal else chunks.forward_all(lane, x)
        return _answer(call, x, out, last)


def linear_attention_step(
    q: Any,
    k: Any,
    v: Any,
    state: LinearState | None,
    *,
    decay: Any = None,
    log_decay: Any = None,
    feature_map: str | Callable[[Any], Any] | None = None,
    normalize: bool | None = None,
    layout: str = "bhsd",
) -> tuple[Any, LinearState]:
    """One token of `linear_attention`, as decoding asks for it: constant time and memory.

    Args:
        q: `(*B, Hq, 1, D)`.
        k: `(*B, Hk, 1, D)`.
        v: `(*B, Hk, 1, Dv)`.
        state: that of the tokens before, or None at the beginning.
        decay: as in `linear_attention`; L is 1.
        log_decay: alike.
        feature_map: alike.
        normalize: alike.
        layout: alike.

    Returns:
        out `(*B, Hq, 1, Dv)` in q's dtype, and the state with this token in it.

    Raises:
        ArgumentError: as in `linear_attention`; also for more than one token.
        ArgumentTypeError: as in `linear_attention`.

    Example:
        >>> import numpy as np, attnx
        >>> state, x = None, np.ones((1, 1, 1), np.float32)
        >>> for token in range(3):
        ...     out, state = attnx.linear_attention_step(x, x, x, state, decay=0.5)
        >>> out.tolist(), state.S.tolist()
        ([[[1.75]]], [[[1.75]]])
    """
    options = Options(
        decay, log_decay, feature_map, normalize, state=state, return_state=True, layout=layout
    )
    lane = lane_of(q)
    q, k, v, call = calls.prepare(lane, q, k, v, options)
    if call.dims.Lq != 1:
        raise ArgumentError(
            f"q: expected one token, Lq=1, got Lq={call.dims.Lq}; for more write "
            "linear_attention(..., state=state, return_state=True)"
        )
    with lane.quiet():
        x = calls.inputs(
            call, calls.map_features(call, "q", q), calls.map_features(call, "k", k), v
        )
        answer: tuple[Any, LinearState] = _answer(call, x, *chunks.step(lane, x))
        return answer


def linear_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    log_decay: Any = None,
    feature_map: str | Callable[[Any], Any] | None = None,
    normalize: bool | None = None,
    causal: bool = True,
    chunk: int = 64,
    state: LinearState | None = None,
    return_state: bool = False,
    layout: str = "bhsd",
) -> tuple[Any, Callable[..., LinearGradients]]:
    """`linear_attention` and its pullback, for every framework, NumPy and CuPy included.

    The arguments are those of `linear_attention`; they count as constants to the framework's own
    differentiation and must still hold the same values when the pullback is called.

    Returns:
        (out, pullback), or ((out, state), pullback) with `return_state`.
        `pullback(d_out, d_state=None)` takes cotangents in the shapes and dtypes of out and of the
        state (a `LinearState`; only with `return_state`) and returns `LinearGradients`.

    Raises:
        ArgumentError: as in `linear_attention`; also from the pullback, for a wrong cotangent.
        ArgumentTypeError: as in `linear_attention`.
        UnsupportedError: feature_map is a function, and the framework differentiates none.

    Example:
        >>> import numpy as np, attnx
        >>> x = np.ones((1, 3, 1), np.float32)
        >>> out, pullback = attnx.linear_attention_vjp(x, x, x, decay=0.5)
        >>> pullback(np.ones_like(out)).q[0, :, 0].tolist()
        [1.0, 1.5, 1.75]
    """
    lane = lane_of(q)
    if callable(feature_map) and lane.vjp is None:
        reason = Reason(
            "feature_map",
            "a function",
            "None, 'elu'",
            "map q and k first, and pull back through it",
        )
        raise UnsupportedError(
            f"linear_attention_vjp: {lane.name} differentiates no function: {reason}",
            reasons=(reason,),
        )
    if isinstance(state, LinearState):
        state = LinearState(lane.detached(state.S), lane.detached(state.z))
    options = Options(
        lane.detached(decay), lane.detached(log_decay), feature_map, normalize, causal, chunk,
        state, return_state, layout,
    )  # fmt: skip
    given = (lane.detached(q), lane.detached(k), lane.detached(v))
    q, k, v, call = calls.prepare(lane, *given, options)
    with lane.quiet():
        x = calls.inputs(
            call, calls.map_features(call, "q", q), calls.map_features(call, "k", k), v
        )
        out, last = chunks.forward(lane, x, chunk) if causal else chunks.forward_all(lane, x)
        return _answer(call, x, out, last), pullback(call, given, x, out)


def _answer(call: Call, x: Inputs, out: Any, last: Any) -> Any:
    """What the caller gets: out, and the state if it is wanted."""
    out = calls.outward(call, out, x.spoilt)
    return (out, calls.unpack(call, calls.spoil(x, last))) if call.options.return_state else out
