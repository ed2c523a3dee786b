"""attnx on its backends, called as its users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attnx
from attnx.errors import UnsupportedError
from attnx.masks import map_leaves
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.workload import Arrays, Workload

from . import _jax, _torch
from ._shared import named

if TYPE_CHECKING:
    from attnx.plugin import Lane

__all__ = ["IMPLEMENTATIONS"]


def make_numpy(workload: Workload, arrays: Arrays) -> Ready:
    """NumPy has no differentiation of its own, so gradients come by the pullback."""
    lane = attnx.get_backend("numpy").lane
    q, k, v, d_out = (lane.from_numpy(a) for a in (arrays.q, arrays.k, arrays.v, arrays.d_out))
    options = _options(workload, arrays, lane)

    def forward() -> tuple[Any, ...]:
        return _pair(attnx.attention(q, k, v, **options))

    def both() -> tuple[Any, ...]:
        outputs, pullback = attnx.attention_vjp(q, k, v, **options)
        return *_pair(outputs), *pullback(d_out)[:3]

    run = both if workload.gradient else forward
    return Ready(run, named, _route((q, k, v), options, gradient=workload.gradient))


def make_torch(workload: Workload, arrays: Arrays) -> Ready:
    """Gradients by autograd, as a user trains."""
    lane = attnx.get_backend("torch").lane
    options = _options(workload, arrays, lane)
    operands = [lane.from_numpy(array) for array in (arrays.q, arrays.k, arrays.v)]

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return _pair(attnx.attention(q, k, v, **options))

    recorded = [x.requires_grad_(workload.gradient) for x in operands]
    return _torch.ready(workload, arrays, forward, _route(recorded, options))


def make_jax(workload: Workload, arrays: Arrays) -> Ready:
    """Under `jax.jit`, with mask and bias as arguments, so that they are no constants of it."""
    lane = attnx.get_backend("jax").lane
    options = _options(workload, arrays, lane)
    operands = [lane.from_numpy(array) for array in (arrays.q, arrays.k, arrays.v)]
    how = _route(operands, options, gradient=workload.gradient)
    extra: dict[str, Any] = {n: options.pop(n) for n in ("mask", "bias") if n in options}

    def forward(q: Any, k: Any, v: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        return _pair(attnx.attention(q, k, v, **options, **extra))

    return _jax.ready(workload, arrays, forward, extra, f"jit, {how}")


def _options(workload: Workload, arrays: Arrays, lane: Lane) -> dict[str, Any]:
    """The keywords of the call, with only those that the workload asks for."""
    options = {"backend": lane.name, **workload.structured}
    if "mask" in options:
        options["mask"] = map_leaves(options["mask"], lambda node, name, a: lane.from_numpy(a))
    if arrays.bias is not None:
        options["bias"] = lane.from_numpy(arrays.bias)
    if workload.softcap is not None:
        options["softcap"] = workload.softcap
    if workload.dropped is not None:
        options["dropout"] = workload.dropped
    if workload.need_lse:
        options["return_lse"] = True
    if workload.finite:
        options["assume_finite"] = True
    return options


def _route(operands: Any, options: dict[str, Any], *, gradient: bool = False) -> str:
    """The kernel route that the backend takes, or `NotApplicable` with its own reason."""
    try:
        found = attnx.explain(*operands, gradient=gradient, **options)
    except UnsupportedError as error:
        raise NotApplicable(str(error).splitlines()[0]) from None
    if found.choice is None:
        asked = next(one for one in found.candidates if one.name == options["backend"])
        raise NotApplicable("; ".join(map(str, asked.reasons)))
    return found.route or ""


def _pair(outputs: Any) -> tuple[Any, Any]:
    """(out, lse), with None where lse was not asked for."""
    return outputs if isinstance(outputs, tuple) else (outputs, None)


IMPLEMENTATIONS = (
    Implementation("attnx numpy", make_numpy),
    Implementation("attnx torch", make_torch, ("torch",)),
    Implementation("attnx jax", make_jax, ("jax",)),
)
