"""PyTorch's differentiation around a backend of another framework (S6.2).

It is imported only when two frameworks meet. The work leaves PyTorch, so autograd sees one node
with the other backend's own backward. There are two of it: the old style of
`torch.autograd.Function` costs 9 µs a call where the one with `setup_context` costs 40, but only
the latter serves the transforms of `torch.func`. A batch of vmap is computed one entry at a time.

The gradients are computed by a second function, whose own backward refuses, so that a derivative of
a derivative is an error and never a path that is silently missing (S6.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attnx.plugin import Reason
from attnx_torch._lane import is_batched, transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Call, Far

__all__ = ["bridge"]


def bridge(far: Far) -> Callable[..., Any]:
    """See `Lane.bridge`."""

    def apply(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[Any, Any]:
        bare, tensors = call.taken_apart()
        if not call.cls.traced:
            out, lse = _Recorded.apply(far, bare, q, k, v, *tensors)
            return out, lse
        if not transformed():
            far.refuse(_forward_mode())
        if not far.lacking:  # which transform is looking cannot be told, so it may want a gradient
            bare = bare._replace(cls=call.cls._replace(gradient="framework"))
        out, lse = _Transformed.apply(far, bare, q, k, v, *tensors)
        return out, lse

    return apply


def _forward_mode() -> Reason:
    return Reason(
        "forward mode", "a dual number", "none", "use reverse mode, or detach the tangent"
    )


def _attend(far: Far, bare: Call, tensors: Sequence[Any]) -> tuple[Any, Any]:
    q, k, v, *others = tensors
    out, lse = far.forward(q, k, v, bare.put_together(*others))
    # torch.func takes tensors alone; nobody reads lse where it was not asked for.
    return out, out.new_empty(0) if lse is None else lse


def _gradients(far: Far, bare: Call, d_out: Any, d_lse: Any, saved: Sequence[Any]) -> Any:
    """The gradients of those of q, k, v, bias and sinks that are given."""
    q, k, v, *others, out, lse = saved
    made = far.backward(q, k, v, out, lse, d_out, d_lse, bare.put_together(*others))
    return tuple(x for x, given in zip(made, saved, strict=False) if given is not None)


def _differentiate(ctx: Any, function: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    """The backward of either function, by `function` where somebody may differentiate it again."""
    saved = ctx.saved_tensors
    nothing = (None,) * len(saved)  # far, bare and all inputs: as many as inputs, out and lse
    if d_out is None and d_lse is None:
        return nothing
    if any(is_batched(d) for d in (d_out, d_lse) if d is not None):
        _refuse_batch(ctx.far)
    if ctx.far.lacking:
        ctx.far.refuse(*ctx.far.lacking)
    if any(ctx.needs_input_grad[7:]):  # a vmap inside the transform hid that from the checks
        ctx.far.refuse(Reason("gradient", "of slopes", "none", "detach the slopes of the Alibi"))
    if d_out is None:
        d_out = torch.zeros_like(saved[-2])
    if torch.is_grad_enabled() or transformed():
        made = iter(function.apply(ctx.far, ctx.bare, d_out, d_lse, *saved))
    else:
        made = iter(_gradients(ctx.far, ctx.bare, d_out, d_lse, saved))
    found = [None if x is None else next(made) for x in saved[:5]]
    wanted = zip(found, ctx.needs_input_grad[2:7], strict=True)
    grads = [x if needed else None for x, needed in wanted]
    return (None, None, *grads, *nothing[7:])


def _refuse_batch(far: Far) -> NoReturn:
    hint = "call backward in a loop, or use torch.func.vjp with torch.func.vmap"
    far.refuse(Reason("gradient", "of a batch of cotangents", "one at a time", hint))


class _Twice(torch.autograd.Function):
    """What both functions of gradients share: they have no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        hint = "detach the first gradient"
        ctx.far.refuse(Reason("gradient", "of a gradient", "first order", hint))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        ctx.far.refuse(_forward_mode())


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, far: Far, bare: Call, *tensors: Any) -> tuple[Any, Any]:
        ctx.set_materialize_grads(False)
        ctx.far, ctx.bare = far, bare
        out, lse = _attend(far, bare, tensors)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        if transformed():
            _refuse_batch(ctx.far)
        return _differentiate(ctx, _RecordedGradients, d_out, d_lse)


class _RecordedGradients(_Twice):
    @staticmethod
    def forward(ctx: Any, far: Far, bare: Call, d_out: Any, d_lse: Any, *saved: Any) -> Any:
        ctx.far = far
        return _gradients(far, bare, d_out, d_lse, saved)


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(far: Far, bare: Call, *tensors: Any) -> tuple[Any, Any]:
        return _attend(far, bare, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.set_materialize_grads(False)
        ctx.far, ctx.bare, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        return _differentiate(ctx, _TransformedGradients, d_out, d_lse)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        ctx.far.refuse(_forward_mode())

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], far: Far, bare: Call, *tensors: Any) -> Any:
        return _each(_Transformed, info, in_dims, far, bare, *tensors)


class _TransformedGradients(_Twice):
    @staticmethod
    def forward(far: Far, bare: Call, d_out: Any, d_lse: Any, *saved: Any) -> Any:
        return _gradients(far, bare, d_out, d_lse, saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.far = inputs[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], far: Far, bare: Call, *tensors: Any) -> Any:
        return _each(_TransformedGradients, info, in_dims, far, bare, *tensors)


def _each(
    function: Any, info: Any, in_dims: tuple[Any, ...], far: Far, bare: Call, *tensors: Any
) -> tuple[Any, Any]:
    """A batch of vmap, entry by entry."""
    size = info.batch_size

    def entry(n: int) -> Any:
        pairs = zip(tensors, in_dims[2:], strict=True)
        return function.apply(far, bare, *(_entry(x, axis, n, size) for x, axis in pairs))

    rows = [entry(n) for n in range(max(size, 1))]
    made = tuple(torch.stack(row)[:size] for row in zip(*rows, strict=True))
    return made, (0,) * len(made)


def _entry(x: Any, axis: int | None, n: int, size: int) -> Any:
    if x is None or axis is None:
        return x
    if size:
        return x.select(axis, n)
    return x.new_zeros([m for at, m in enumerate(x.shape) if at != axis])  # for its shapes alone
