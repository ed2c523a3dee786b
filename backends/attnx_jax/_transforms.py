"""JAX's transforms in the contract's words, as the conformance suite applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnx.plugin import Transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TRANSFORMS", "vjp"]


def vjp(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Outputs and gradients; a cotangent of None counts as 0."""
    outputs, pull = jax.vjp(fn, *inputs)
    flat, tree = jax.tree_util.tree_flatten(outputs)
    given = [
        jnp.zeros_like(out) if ct is None else ct for out, ct in zip(flat, cotangents, strict=True)
    ]
    return outputs, pull(jax.tree_util.tree_unflatten(tree, given))


def _second(
    fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any],
    directions: Sequence[Any],
) -> Any:  # fmt: skip
    """By differentiating the pullback."""
    return vjp(lambda *arrays: tuple(vjp(fn, arrays, cotangents)[1]), inputs, directions)[1]


def _jvp(fn: Callable[..., Any], inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return jax.jvp(fn, tuple(inputs), tuple(tangents))


def _scan(fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    def step(carry: Any, entry: Any) -> Any:
        return carry, fn(*entry)

    return jax.lax.scan(step, None, tuple(arrays))[1]


TRANSFORMS = Transforms(
    compile=jax.jit,
    vmap=jax.vmap,
    vjp=vjp,
    second=_second,
    jvp=_jvp,
    checkpoint=jax.checkpoint,
    scan=_scan,
)
