"""Differentiation: `loss.backward()` gives what `attention_vjp` gives, or raises (S6).

Both functions use the old style of `torch.autograd.Function` (forward with ctx), which costs 9 µs a
call where the style with `setup_context` costs 40; it cannot serve `torch.func`, whose transforms
are refused before they get here.

SDPA is differentiated by its own backward: its graph is recorded inside `forward` and kept as a
saved tensor, so that it is freed, offloaded and checked for writes in place like any other. The
gradients are computed by a second function, whose own backward refuses: a derivative of a
derivative that autograd would take through the recomputed scores must not come out wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnx import masks
from attnx.errors import UnsupportedError
from attnx.plugin import Gradients, Reason
from attnx_torch import _sdpa
from attnx_torch._lane import is_batched, transformed
from attnx_torch._scores import finite

if TYPE_CHECKING:
    from attnx.plugin import Call
    from attnx_torch._backend import TorchBackend

__all__ = ["attend"]


def attend(
    backend: TorchBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[torch.Tensor, Any]:
    """out and lse (None unless needed), recorded by autograd."""
    out, lse = _Attention.apply(backend, call, q, k, v, call.bias, call.sinks)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: TorchBackend, call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any
    ) -> tuple[torch.Tensor, Any]:
        ctx.set_materialize_grads(False)
        ctx.backend = backend
        ctx.call, leaves = _without_arrays(call)
        if backend.by_sdpa(q, k, v, call):
            with torch.enable_grad():
                needs = zip((q, k, v), ctx.needs_input_grad[2:5], strict=True)
                inner = [x.detach().requires_grad_(needed) for x, needed in needs]
                graph = _sdpa.attend(inner[0], inner[1], inner[2], call)
            out, lse = graph.detach(), None
            ctx.save_for_backward(q, k, v, out, lse, bias, sinks, graph, *inner, *leaves)
        else:
            out, lse = backend.forward_tiles(q, k, v, call)
            ctx.save_for_backward(q, k, v, out, lse, bias, sinks, None, None, None, None, *leaves)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 7
        if transformed() or any(is_batched(d) for d in (d_out, d_lse) if d is not None):
            raise _refusal("of a batch of cotangents", "one at a time", "call backward in a loop")
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _Gradients.apply(ctx.backend, ctx.call, d_out, d_lse, *saved)
        else:
            grads = _gradients(ctx.backend, ctx.call, d_out, d_lse, saved)
        wanted = zip(grads, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grad if needed else None for grad, needed in wanted))


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: TorchBackend, call: Call, d_out: Any, d_lse: Any, *saved: Any
    ) -> tuple[Any, ...]:
        return tuple(_gradients(backend, call, d_out, d_lse, saved))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _refusal("of a gradient", "first order", "detach the first gradient")


def _refusal(got: str, supported: str, hint: str) -> UnsupportedError:
    reason = Reason("gradient", got, supported, hint)
    message = f"backend 'torch' cannot do this call: {reason}"
    return UnsupportedError(message, backend="torch", reasons=(reason,))


def _gradients(
    backend: TorchBackend, call: Call, d_out: Any, d_lse: Any, saved: tuple[Any, ...]
) -> Gradients:
    q, k, v, out, lse, bias, sinks, graph, *rest = saved
    inner, leaves = rest[:3], rest[3:]
    call = _with_arrays(call, bias, sinks, leaves)
    if graph is not None and _exact(d_out, call):
        return _sdpa_gradients(graph, inner, d_out)
    if lse is None:
        out, lse = backend.forward_tiles(q, k, v, call)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return backend.backward(q, k, v, out, lse, d_out, d_lse, call)


def _exact(d_out: torch.Tensor, call: Call) -> bool:
    """A NaN in a cotangent reaches every key of a masked SDPA call, seen or not."""
    whole = call.mask is None and call.bias is None
    return whole or call.assume_finite or d_out.device.type != "cpu" or finite(d_out)


def _sdpa_gradients(graph: torch.Tensor, inner: list[Any], d_out: torch.Tensor) -> Gradients:
    wanted = [x for x in inner if x.requires_grad]
    # The graph belongs to the outer node, which frees it; a second backward may still come.
    found = iter(torch.autograd.grad(graph, wanted, d_out, retain_graph=True))
    return Gradients(*(next(found) if x.requires_grad else None for x in inner))


def _without_arrays(call: Call) -> tuple[Call, list[torch.Tensor]]:
    """The call without its tensors, which autograd must hold to see writes in place."""
    mask = call.mask
    leaves = [] if mask is None else [x for _, _, x in masks.leaves(mask) if _is_tensor(x)]
    return call._replace(bias=None, sinks=None), leaves


def _with_arrays(call: Call, bias: Any, sinks: Any, leaves: list[torch.Tensor]) -> Call:
    mask, left = call.mask, iter(leaves)
    if mask is not None and leaves:
        mask = masks.map_leaves(mask, lambda _, __, x: next(left) if _is_tensor(x) else x)
    return call._replace(mask=mask, bias=bias, sinks=sinks)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)
