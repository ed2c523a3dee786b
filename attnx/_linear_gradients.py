"""The pullback of a linear attention: around `_linear_chunks.backward`, the way in backwards.

The sums are taken again from the inputs, so that between the answer and its gradient nothing is
kept but the inputs and, where out is divided, the divisors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _linear_chunks as chunks
from attnx._checks import check_cotangent
from attnx._linear_call import Call, LinearState, divisor, pack, unpack
from attnx._linear_decay import Varying
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._linear_chunks import Inputs

__all__ = ["LinearGradients", "pullback"]


class LinearGradients(NamedTuple):
    """The gradients of a linear attention, each in its input's shape and dtype.

    Attributes:
        q: of q.
        k: of k.
        v: of v.
        decay: of decay or log_decay, whichever came as an array; else None.
        state: of the state, a `LinearState`; None where none was given.
    """

    q: Any
    k: Any
    v: Any
    decay: Any = None
    state: Any = None


def pullback(
    call: Call, given: tuple[Any, Any, Any], x: Inputs, out: Any
) -> Callable[..., LinearGradients]:
    """The function from cotangents to gradients.

    Args:
        call: the call.
        given: the caller's q, k and v.
        x: what the sums were taken of.
        out: the answer to it; only its last column is read again, where it is a divisor.
    """
    lane = call.lane

    def pull(d_out: Any = None, d_state: Any = None) -> LinearGradients:
        """Gradients for cotangents in the shapes of out and of the state; None counts as 0."""
        _check_cotangents(call, d_out, d_state)
        with lane.quiet():
            d = _d_out(call, out, d_out)
            d_last = _d_state(call, x, d_state)
            if call.options.causal:
                grads = chunks.backward(lane, x, d, d_last, call.options.chunk)
            else:
                grads = chunks.backward_all(lane, x, d, d_last)
            return _outward(call, given, x, grads)

    return pull


def _check_cotangents(call: Call, d_out: Any, d_state: Any) -> None:
    dims = call.dims
    rows: tuple[int, ...] = (dims.Hq, dims.Lq) if dims.layout == "bhsd" else (dims.Lq, dims.Hq)
    rows = (*dims.batch, *rows) if dims.rank > 2 else (dims.Lq,)
    check_cotangent(call.lane, "d_out", d_out, (*rows, dims.Dv), call.dtype)
    if d_state is None:
        return
    if not call.options.return_state:
        raise ArgumentError("d_state: the state was not returned; pass return_state=True to use it")
    if not isinstance(d_state, LinearState):
        raise ArgumentTypeError(
            f"d_state: expected a LinearState, like the state, got {type(d_state).__name__}"
        )


def _d_out(call: Call, out: Any, d_out: Any) -> Any:
    """The cotangent of the undivided answer."""
    xp, dims = call.lane.xp, call.dims
    if d_out is None:
        return xp.zeros_like(out)
    d = dims.inward_rows(xp, call.lane.detached(d_out))
    d = xp.reshape(xp.astype(d, out.dtype, copy=False), (*out.shape[:-1], dims.Dv))
    if not call.normalize:
        return d
    some, z = divisor(call, out)
    d = xp.where(some, d / z, xp.zeros_like(d))
    d_z = -xp.sum(d * (out[..., :-1] / z), axis=-1, keepdims=True)
    return xp.concat([d, d_z], axis=-1)


def _d_state(call: Call, x: Inputs, d_state: Any) -> Any:
    """The cotangent of the last state, checked against what it belongs to."""
    if d_state is None:
        return call.lane.xp.zeros_like(x.state)
    like = unpack(call, x.state)
    zeros = call.lane.xp.zeros_like
    parts: list[Any] = []
    for name, part, array in (("S", d_state.S, like.S), ("z", d_state.z, like.z)):
        if array is None:
            if part is not None:
                raise ArgumentError("d_state.z: expected None, for a state without z")
            parts.append(None)
            continue
        check_cotangent(call.lane, f"d_state.{name}", part, tuple(array.shape), call.wide)
        parts.append(zeros(array) if part is None else call.lane.detached(part))
    return call.lane.xp.reshape(pack(call, *parts), x.state.shape)


def _outward(
    call: Call, given: tuple[Any, Any, Any], x: Inputs, grads: chunks.Grads
) -> LinearGradients:
    xp, dims = call.lane.xp, call.dims
    dq = xp.reshape(grads.q, (dims.B, dims.Hq, dims.Lq, grads.q.shape[-1]))
    dk, dv = grads.k[:, :, 0, ...], grads.v[:, :, 0, ...]
    if call.normalize:
        dv = dv[..., :-1]
    dq, dk, dv = (dims.outward(xp, grad) for grad in (dq, dk, dv))
    if x.spoilt is not None:  # what is no number was not summed
        dv = xp.where(xp.isfinite(given[2]), dv, xp.zeros_like(dv))
    dq, dk = _through_map(call, given[0], dq), _through_map(call, given[1], dk)
    dq, dk, dv = (
        xp.astype(grad, y.dtype, copy=False) for grad, y in zip((dq, dk, dv), given, strict=True)
    )
    state = None if call.options.state is None else unpack(call, grads.state)
    return LinearGradients(dq, dk, dv, _d_decay(call, grads.decay), state)


def _through_map(call: Call, x: Any, d: Any) -> Any:
    """The gradient of q or k from that of its features."""
    xp, phi = call.lane.xp, call.options.feature_map
    if phi is None:
        return d
    x = xp.astype(x, d.dtype, copy=False)
    if callable(phi):
        vjp = call.lane.vjp
        assert vjp is not None  # refused before
        return vjp(phi, (x,), (d,))[1][0]
    return xp.where(x > 0, d, d * xp.exp(xp.minimum(x, xp.zeros_like(x))))


def _d_decay(call: Call, d_log: Any) -> Any:
    """The gradient of decay or log_decay, as it was given."""
    if d_log is None:
        return None
    xp, dims, options = call.lane.xp, call.dims, call.options
    name = "decay" if options.log_decay is None else "log_decay"
    array = getattr(options, name)
    if isinstance(call.decay, Varying):
        d_log = xp.reshape(d_log, (dims.B, dims.Hq, dims.Lq))
        d_log = dims.outward(xp, d_log)
    d_log = xp.reshape(d_log, array.shape)
    if name == "decay":
        d_log = d_log / xp.astype(array, d_log.dtype, copy=False)
    return xp.astype(d_log, array.dtype, copy=False)
