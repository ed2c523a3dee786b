"""Pullbacks and merging: what stands around a backend's own forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._checks import FLOATING, check_cotangent
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx.plugin import Gradients, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx._call import Options, Prepared
    from attnx._dispatch import Plan
    from attnx.plugin import Lane

__all__ = ["merge", "pullback", "refuse_recording"]


def refuse_recording(lane: Lane, what: str, *arrays: Any) -> None:
    """A function without a gradient must not look like a constant to the framework."""
    if lane.wants_gradient(*arrays):
        reason = Reason("gradient", f"recorded by {lane.name}", "none", "detach the inputs")
        raise UnsupportedError(f"{what} has no gradient: {reason}", reasons=(reason,))


def pullback(
    lane: Lane,
    plan: Plan,
    ready: Prepared,
    options: Options,
    given: tuple[Any, Any, Any],
    answer: tuple[Any, Any],
) -> Callable[..., Gradients]:
    """The function from cotangents to gradients, for one answer (S6.1).

    Gradients take the dtypes of `given`, the caller's q, k and v: under autocast the call's differ.
    """
    call, dims, xp = ready.call, ready.dims, lane.xp
    # The answer belongs to the caller (S1.5), who may write into it before asking for gradients.
    out, lse = (xp.asarray(x, copy=True) for x in answer)

    def pull(d_out: Any = None, d_lse: Any = None) -> Gradients:
        """Gradients for cotangents in the shapes of out and lse; None counts as 0."""
        if d_lse is not None and not options.return_lse:
            raise ArgumentError("d_lse: lse was not returned; pass return_lse=True to use it")
        d_out = _cotangent(lane, "d_out", d_out, out, ready)
        d_lse = _cotangent(lane, "d_lse", d_lse, lse, ready)
        if d_out is None:
            d_out = xp.zeros_like(out)
        arrays = (ready.q, ready.k, ready.v, out, lse, d_out, d_lse)
        grads = plan.backward(arrays, call)
        dq, dk, dv = (
            xp.astype(dims.outward(xp, grad), x.dtype, copy=False)
            for grad, x in zip(grads[:3], given, strict=True)
        )
        return Gradients(
            dq,
            dk,
            dv,
            None if call.bias is None else _as_given(xp, grads.bias, options.bias, ready),
            grads.sinks,
        )

    return pull


def _cotangent(lane: Lane, name: str, given: Any, answer: Any, ready: Prepared) -> Any:
    """A cotangent brought to the backend's shape, once it fits what it belongs to."""
    if given is None:
        return None
    expected = tuple(ready.dims.outward(lane.xp, answer).shape)
    check_cotangent(lane, name, given, expected, lane.dtype_name(answer))
    return ready.dims.inward_rows(lane.xp, lane.detached(given))


def _as_given(xp: Any, gradient: Any, bias: Any, ready: Prepared) -> Any:
    """The gradient of a bias in the bias's own shape: a partly broadcast *B was expanded."""
    shape = tuple(bias.shape)
    batch = shape[:-3]
    if len(shape) > 4 and any(n != 1 for n in batch) and batch != ready.dims.batch:
        gradient = xp.reshape(gradient, (*ready.dims.batch, *gradient.shape[1:]))
        axes = tuple(a for a, n in enumerate(batch) if n == 1 and ready.dims.batch[a] != 1)
        gradient = xp.astype(xp.sum(gradient, axis=axes, keepdims=True), bias.dtype)
    return xp.reshape(gradient, shape)


def merge(lane: Lane, parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """See `attnx.merge`; only differentiable operations stand here, and -inf never meets -inf."""
    _check_parts(lane, parts)
    with lane.quiet():
        return _joined(lane, parts)


def _joined(lane: Lane, parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    xp = lane.xp
    lses = xp.stack([lse for _, lse in parts])
    top = xp.max(lane.detached(lses), axis=0)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    weights = xp.exp(lses - top[None, ...])
    total = xp.sum(weights, axis=0)
    some = total != 0
    safe = xp.where(some, total, xp.ones_like(total))
    outs = [xp.astype(out, lses.dtype) for out, _ in parts]
    joined = xp.zeros_like(outs[0])
    for index, out in enumerate(outs):
        weight = (weights[index, ...] / safe)[..., None]
        empty = lses[index, ...] == -xp.inf
        joined = joined + xp.where(empty[..., None], xp.zeros_like(out), out) * weight
    lse = xp.where(some, top + xp.log(safe), xp.full_like(top, -xp.inf))
    return xp.astype(joined, parts[0][0].dtype), lse


def _check_parts(lane: Lane, parts: Sequence[tuple[Any, Any]]) -> None:
    first_out, first_lse = parts[0]
    if lane.owns(first_out) and lane.dtype_name(first_out) not in FLOATING:
        raise ArgumentTypeError(
            f"parts[0].out: expected one of {', '.join(FLOATING)}, got {lane.dtype_name(first_out)}"
        )
    wide = "float64" if lane.dtype_name(first_out) == "float64" else "float32"
    for index, (out, lse) in enumerate(parts):
        for name, array, first in (("out", out, first_out), ("lse", lse, first_lse)):
            where = f"parts[{index}].{name}"
            if not lane.owns(array):
                raise ArgumentTypeError(
                    f"{where}: expected a {lane.name} array, got {type(array).__name__}"
                )
            if name == "lse" and lane.dtype_name(array) != wide:
                raise ArgumentTypeError(
                    f"{where}: expected {wide} beside out in {lane.dtype_name(first_out)}, "
                    f"got {lane.dtype_name(array)}"
                )
            if tuple(array.shape) != tuple(first.shape):
                raise ArgumentError(
                    f"{where}: expected the shape of parts[0].{name}, {tuple(first.shape)}, "
                    f"got {tuple(array.shape)}"
                )
            if lane.dtype_name(array) != lane.dtype_name(first):
                raise ArgumentTypeError(
                    f"{where}: expected the dtype of parts[0].{name}, {lane.dtype_name(first)}, "
                    f"got {lane.dtype_name(array)}"
                )
    if tuple(first_out.shape[:-1]) != tuple(first_lse.shape):
        raise ArgumentError(
            f"parts[0].lse: expected out's shape without its last axis, "
            f"{tuple(first_out.shape[:-1])}, got {tuple(first_lse.shape)}"
        )
