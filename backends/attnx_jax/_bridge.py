"""JAX's transforms around a backend of another framework (S6.2).

It is imported only when two frameworks meet. The compiled program calls the host
(`jax.pure_callback`), which hands out its operands and waits: no JAX computation may run in there,
so the other backend takes NumPy's arrays or makes its own of them. `custom_vjp` gives the gradient,
by a second callback, and both callbacks refuse to be differentiated themselves (S6.5).

A callback is a record that compares by value, so JAX finds what it compiled for an equal one.

Functions that compute on JAX's own arrays need no callback (`attach`): they are traced where the
callback would stand, under the same `custom_vjp`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from attnx.plugin import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Call, Far

    Operands = tuple[Any, ...]  # the arrays beside q, k and v: bias, sinks, each or None, the rest

__all__ = ["attach", "bridge"]


class _Host(NamedTuple):
    """What a callback runs, `"forward"` or `"backward"`, for which call, and what it gives.

    Attributes:
        run: which function of the other side.
        far: the other side.
        bare: the call without its arrays.
        shapes: the results, without the axes that vmap adds.
    """

    run: str
    far: Far
    bare: Call
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, arrays: tuple[Any, ...], x: Operands) -> tuple[Any, ...]:
        """Every entry of the axes that vmap put in front: 1 for what is not mapped."""
        flat, tree = jax.tree_util.tree_flatten((arrays, x))
        flat = [np.asarray(array) for array in flat]
        lead = np.broadcast_shapes(*(a.shape[: flat[0].ndim - 4] for a in flat))
        if not lead:
            return self.entry(*jax.tree_util.tree_unflatten(tree, flat))
        made = tuple(np.empty((*lead, *shape.shape), shape.dtype) for shape in self.shapes)
        for at in np.ndindex(lead):
            one = [a[tuple(min(i, n - 1) for i, n in zip(at, a.shape, strict=False))] for a in flat]
            entry = self.entry(*jax.tree_util.tree_unflatten(tree, one))
            for whole, part in zip(made, entry, strict=True):
                whole[at] = part
        return made

    def entry(self, arrays: tuple[Any, ...], x: Operands) -> tuple[Any, ...]:
        """One call on the other side; only the results that are asked for."""
        found = getattr(self.far, self.run)(*arrays, self.bare.put_together(*x))
        if self.run == "forward":
            return tuple(found[: len(self.shapes)])
        given = (*arrays[:3], *x[:2])
        return tuple(grad for grad, a in zip(found, given, strict=True) if a is not None)


class _Static(NamedTuple):
    """What is compiled in; `here` where the functions are JAX's own."""

    far: Far
    bare: Call
    here: bool


def bridge(far: Far) -> Callable[..., Any]:
    """See `Lane.bridge`."""
    return _around(far, here=False)


def attach(far: Far) -> Callable[..., Any]:
    """See `Lane.attach`."""
    return _around(far, here=True)


def _around(far: Far, *, here: bool) -> Callable[..., Any]:
    def apply(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        bare, x = call.taken_apart()
        made = _attend(_Static(far, bare, here), q, k, v, x)
        return made[0], made[1] if call.need_lse else None

    return apply


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a derivative that raises; its first argument is static."""
    wrapped = jax.custom_vjp(function, nondiff_argnums=(0,))

    def run(static: _Static, *operands: Any) -> tuple[Any, None]:
        return function(static, *operands), None

    def refuse(static: _Static, _: None, cotangents: Any) -> Any:
        hint = "detach the first gradient with jax.lax.stop_gradient"
        static.far.refuse(Reason("gradient", "of a gradient", "first order", hint))

    wrapped.defvjp(run, refuse)
    return wrapped


def _called(
    run: str, static: _Static, arrays: tuple[Any, ...], x: Operands, shapes: Sequence[Any]
) -> Any:
    host: Any = _Host(run, static.far, static.bare, tuple(shapes))
    if static.here:
        return host.entry(arrays, x)
    # Axes of 1 for what vmap does not map: a copy for each entry would cost its memory.
    return jax.pure_callback(host, host.shapes, arrays, x, vmap_method="expand_dims")


@_constant
def _forward(static: _Static, q: Any, k: Any, v: Any, x: Operands) -> Any:
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    shapes = (out, jax.ShapeDtypeStruct(q.shape[:-1], np.dtype(wide)))
    return _called("forward", static, (q, k, v), x, shapes[: 1 + static.bare.need_lse])


@_constant
def _backward(static: _Static, arrays: tuple[Any, ...], x: Operands) -> Any:
    given = [a for a in (*arrays[:3], *x[:2]) if a is not None]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    return _called("backward", static, arrays, x, shapes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Any, k: Any, v: Any, x: Operands) -> Any:
    return tuple(_forward(static, q, k, v, x))


def _attend_forward(static: _Static, q: Any, k: Any, v: Any, x: Operands) -> tuple[Any, Any]:
    if static.far.lacking:
        static.far.refuse(*static.far.lacking)
    out, lse = _forward(_recorded(static), q, k, v, x)
    return ((out, lse) if static.bare.need_lse else (out,)), (q, k, v, x, out, lse)


def _attend_backward(static: _Static, kept: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, x, out, lse = kept
    d_out, d_lse = cotangents if static.bare.need_lse else (*cotangents, None)
    made = iter(_backward(_recorded(static), (q, k, v, out, lse, d_out, d_lse), x))
    dq, dk, dv = next(made), next(made), next(made)
    bias, sinks = (None if a is None else next(made) for a in x[:2])
    return dq, dk, dv, (bias, sinks, *[None] * len(x[2:]))


def _recorded(static: _Static) -> _Static:
    """The class of a call whose gradient is wanted, which has lse among its results."""
    cls = static.bare.cls._replace(gradient="framework", need_lse=True)
    return static._replace(bare=static.bare._replace(cls=cls))


_attend.defvjp(_attend_forward, _attend_backward)
