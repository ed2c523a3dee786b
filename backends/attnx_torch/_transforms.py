"""PyTorch's transforms in the contract's words, as the conformance suite applies them.

Programs are compiled without Inductor: what attnx answers for is what Dynamo and AOTAutograd read,
and that a graph compiles to the right machine code is PyTorch's own matter, which takes a C++
compiler and seconds for each.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from attnx.plugin import Transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["TRANSFORMS"]


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamo keeps programs by code object and gives up after some: another function that was made
    # by the same line must not count.
    torch.compiler.reset()
    made: Callable[..., Any] = torch.compile(fn, fullgraph=True, backend="aot_eager")
    return made


def _vjp(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    made: Any = torch.func.vjp(fn, *inputs)
    outputs, pull = made
    many = isinstance(outputs, tuple)
    given = [
        torch.zeros_like(y) if dy is None else dy
        for y, dy in zip(outputs if many else (outputs,), cotangents, strict=True)
    ]
    return outputs, pull(tuple(given) if many else given[0])


def _second(
    fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any],
    directions: Sequence[Any],
) -> Any:  # fmt: skip
    """By a graph of the backward, as a gradient penalty has it."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = fn(*leaves)
        made = outputs if isinstance(outputs, tuple) else (outputs,)
        first = torch.autograd.grad(made, leaves, cotangents, create_graph=True)
        return torch.autograd.grad(first, leaves, directions, materialize_grads=True)


def _jvp(fn: Callable[..., Any], inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    with warnings.catch_warnings():  # PyTorch scripts its own decompositions at the first use
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        return torch.func.jvp(fn, tuple(inputs), tuple(tangents))


def _checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fn)
    def again(*arrays: Any) -> Any:
        return checkpoint(fn, *arrays, use_reentrant=False)

    return again


def _autocast(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", getattr(torch, dtype))


TRANSFORMS = Transforms(
    compile=_compile,
    vmap=torch.func.vmap,
    vjp=_vjp,
    second=_second,
    jvp=_jvp,
    checkpoint=_checkpoint,
    autocast=_autocast,
)
