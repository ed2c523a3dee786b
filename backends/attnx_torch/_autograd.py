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

from attnx.errors import UnsupportedError
from attnx.plugin import Gradients, Reason
from attnx_torch import _math, _sdpa
from attnx_torch._lane import is_batched, transformed
from attnx_torch._parts import Part, Sdpa
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
        ctx.call, (_, _, *leaves) = call.taken_apart()
        ctx.parts = backend.sdpa_parts(q, k, v, call)
        if ctx.parts is None:
            out, lse = backend.forward_lse(q, k, v, call)
            graphs: list[torch.Tensor] = []
        else:
            needs = ctx.needs_input_grad[2:5]
            out, graphs = _recorded(backend, ctx.parts, (q, k, v), needs, call)
            lse = None
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, *leaves, *graphs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 7
        if transformed() or any(is_batched(d) for d in (d_out, d_lse) if d is not None):
            raise _refusal("of a batch of cotangents", "one at a time", "call backward in a loop")
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _Gradients.apply(ctx.backend, ctx.call, ctx.parts, d_out, d_lse, *saved)
        else:
            grads = _gradients(ctx.backend, ctx.call, ctx.parts, d_out, d_lse, saved)
        wanted = zip(grads, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grad if needed else None for grad, needed in wanted))


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: TorchBackend, call: Call, parts: list[Part] | None, d_out: Any,
        d_lse: Any, *saved: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.call = backend, call
        q, k, v, _, _, bias, sinks, *rest = saved
        leaves = rest[: len(rest) - 4 * len(parts or ())]
        ctx.save_for_backward(d_out, d_lse, q, k, v, bias, sinks, *leaves)
        return tuple(_gradients(backend, call, parts, d_out, d_lse, saved))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        made = _second(ctx, cotangents, again=torch.is_grad_enabled())
        d_out, d_lse, dq, dk, dv, dbias, dsinks = made
        rest = len(ctx.needs_input_grad) - 12
        return None, None, None, d_out, d_lse, dq, dk, dv, None, None, dbias, dsinks, *[None] * rest


def _second(ctx: Any, cotangents: tuple[Any, ...], *, again: bool) -> list[Any]:
    """What reaches d_out, d_lse, q, k, v, bias and sinks from the gradients of the last five.

    The gradients are differentiated as the formula's own; `again` where a third derivative may be
    wanted.
    """
    saved = ctx.saved_tensors
    with torch.enable_grad(), ctx.backend.lane.quiet():
        # One tensor may have come as several arguments; each view is told apart.
        inputs: list[Any] = [None if x is None else x.view_as(x) for x in saved[:7]]
        d_out, d_lse, q, k, v, bias, sinks = inputs
        call = ctx.call.put_together(bias, sinks, *saved[7:])
        answer = _math.attend(ctx.backend.xp, q, k, v, call)
        given = [
            (y, dy) for y, dy in zip(answer, (d_out, d_lse), strict=True) if dy is not None
        ]  # fmt: skip
        wanted = [n for n, x in enumerate(inputs[2:]) if x is not None and x.requires_grad]
        first = torch.autograd.grad(
            [y for y, _ in given], [inputs[2 + n] for n in wanted], [dy for _, dy in given],
            create_graph=True, materialize_grads=True,
        )  # fmt: skip
        pairs = [
            (g, cotangents[n]) for n, g in zip(wanted, first, strict=True)
            if cotangents[n] is not None and g.requires_grad
        ]  # fmt: skip
        found: list[Any] = [None] * 7
        reached = [n for n, x in enumerate(inputs) if x is not None and x.requires_grad]
        if pairs and reached:
            made = torch.autograd.grad(
                [g for g, _ in pairs], [inputs[n] for n in reached], [dg for _, dg in pairs],
                create_graph=again, allow_unused=True,
            )  # fmt: skip
            for n, grad in zip(reached, made, strict=True):
                found[n] = grad
    return found


def _refusal(got: str, supported: str, hint: str) -> UnsupportedError:
    return UnsupportedError.because("torch", Reason("gradient", got, supported, hint))


def _recorded(
    backend: TorchBackend, parts: list[Part], arrays: tuple[Any, Any, Any],
    needs: tuple[bool, ...], call: Call,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """out, and for each part of SDPA its graph and its own leaves q, k and v."""
    sdpa = Sdpa(backend, call)
    given = _sdpa.operands(*arrays, call)  # of the dtype that SDPA shall have, under autocast too
    graphs: list[torch.Tensor] = []
    for part in parts:
        cuts = zip(part.cut(*given), needs, strict=True)
        inner = [x.detach().requires_grad_(needed) for x, needed in cuts]
        with torch.enable_grad(), backend.lane.quiet():
            graphs += (sdpa(part, *inner), *inner)
    outs = [graph.detach() for graph in graphs[::4]]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.to(arrays[0].dtype), graphs


def _gradients(
    backend: TorchBackend, call: Call, parts: list[Part] | None, d_out: Any, d_lse: Any,
    saved: tuple[Any, ...],
) -> Gradients:  # fmt: skip
    q, k, v, out, lse, bias, sinks, *rest = saved
    count = len(rest) - 4 * len(parts or ())
    leaves, graphs = rest[:count], rest[count:]
    call = call.put_together(bias, sinks, *leaves)
    if parts is not None and _exact(d_out, call):
        return _sdpa_gradients(parts, graphs, d_out, (q, k, v))
    if lse is None:
        out, lse = backend.forward_tiles(q, k, v, call)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return backend.backward(q, k, v, out, lse, d_out, d_lse, call)


def _exact(d_out: torch.Tensor, call: Call) -> bool:
    """A NaN in a cotangent reaches every key of a masked SDPA call, seen or not."""
    whole = call.mask is None and call.bias is None
    return whole or call.assume_finite or d_out.device.type != "cpu" or finite(d_out)


def _sdpa_gradients(
    parts: list[Part], graphs: list[Any], d_out: torch.Tensor, arrays: tuple[Any, Any, Any]
) -> Gradients:
    """The parts' gradients: a query stands in one part, keys and values may stand in several."""
    sums: list[Any] = [None, None, None]
    for n, part in enumerate(parts):
        graph, *inner = graphs[4 * n : 4 * n + 4]
        if not graph.requires_grad:  # it sees nothing
            continue
        wanted = [x for x in inner if x.requires_grad]
        d_part = d_out[:, :, part.i0 : part.i1].to(graph.dtype)
        # The graph belongs to the outer node, which frees it; a second backward may still come.
        found = iter(torch.autograd.grad(graph, wanted, d_part, retain_graph=True))
        for at, x in enumerate(inner):
            if not x.requires_grad:
                continue
            if len(parts) == 1 and x.shape == arrays[at].shape:
                sums[at] = next(found)
                continue
            if sums[at] is None:
                sums[at] = torch.zeros(arrays[at].shape, dtype=x.dtype, device=x.device)
            i, j = (part.i0, part.i1) if at == 0 else (part.j0, part.j1)
            sums[at][:, :, i:j] += next(found)
    for at, x in enumerate(arrays):
        if sums[at] is not None:
            sums[at] = sums[at].to(x.dtype)
        elif graphs[1 + at].requires_grad:
            sums[at] = torch.zeros_like(x)
    return Gradients(*sums)
