"""JAX's transforms around a backend of another framework (S6.2).

It is imported only when two frameworks meet. The compiled program calls the host
(`jax.pure_callback`), which hands out its operands and waits: no JAX computation may run in there,
so the other backend takes NumPy's arrays or makes its own of them. `custom_vjp` gives the gradient,
by a second callback, and both callbacks refuse to be differentiated themselves (S6.5).

A callback is a record that compares by value, so JAX finds what it compiled for an equal one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from attnx.errors import UnsupportedError
from attnx.plugin import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Call

__all__ = ["bridge"]

_HOLE: Any = object()  # stands in a call where an array was


class _Far(NamedTuple):
    """The other side: its functions take and give NumPy's arrays."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    name: str
    lacking: tuple[Reason, ...]

    def check(self, *reasons: Reason) -> None:
        """Say why not, as dispatch would."""
        if reasons:
            why = "; ".join(map(str, reasons))
            message = f"backend {self.name!r} cannot do this call: {why}"
            raise UnsupportedError(message, backend=self.name, reasons=reasons)


class _Operands(NamedTuple):
    """The arrays of a call beside q, k and v, each or None; a pytree."""

    bias: Any
    sinks: Any
    leaves: tuple[Any, ...]


class _Host(NamedTuple):
    """What a callback runs, `"forward"` or `"backward"`, for which call, and what it gives.

    Attributes:
        run: which function of the other side.
        far: the other side.
        bare: the call without its arrays.
        shapes: the results, without the axes that vmap adds.
    """

    run: str
    far: _Far
    bare: Call
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, arrays: tuple[Any, ...], x: _Operands) -> tuple[Any, ...]:
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

    def entry(self, arrays: tuple[Any, ...], x: _Operands) -> tuple[Any, ...]:
        """One call on the other side; only the results that are asked for."""
        left = iter(x.leaves)
        call = self.bare.map_arrays(lambda _: next(left))._replace(bias=x.bias, sinks=x.sinks)
        found = getattr(self.far, self.run)(*arrays, call)
        if self.run == "forward":
            return tuple(found[: len(self.shapes)])
        given = (*arrays[:3], x.bias, x.sinks)
        return tuple(grad for grad, a in zip(found, given, strict=True) if a is not None)


class _Static(NamedTuple):
    """What is compiled in."""

    far: _Far
    bare: Call


def bridge(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    name: str,
    lacking: tuple[Reason, ...],
) -> Callable[..., Any]:
    """See `Lane.bridge`."""
    far = _Far(forward, backward, name, lacking)

    def apply(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        leaves: list[Any] = []

        def take(leaf: Any) -> Any:
            leaves.append(leaf)
            return _HOLE

        bare = call._replace(bias=None, sinks=None).map_arrays(take)
        x = _Operands(call.bias, call.sinks, tuple(leaves))
        made = _attend(_Static(far, bare), q, k, v, x)
        return made[0], made[1] if call.need_lse else None

    return apply


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a derivative that raises; its first argument is static."""
    wrapped = jax.custom_vjp(function, nondiff_argnums=(0,))

    def run(static: _Static, *operands: Any) -> tuple[Any, None]:
        return function(static, *operands), None

    def refuse(static: _Static, _: None, cotangents: Any) -> Any:
        hint = "detach the first gradient with jax.lax.stop_gradient"
        static.far.check(Reason("gradient", "of a gradient", "first order", hint))

    wrapped.defvjp(run, refuse)
    return wrapped


def _called(
    run: str, static: _Static, arrays: tuple[Any, ...], x: _Operands, shapes: Sequence[Any]
) -> Any:
    host: Any = _Host(run, static.far, static.bare, tuple(shapes))
    # Axes of 1 for what vmap does not map: a copy for each entry would cost its memory.
    return jax.pure_callback(host, host.shapes, arrays, x, vmap_method="expand_dims")


@_constant
def _forward(static: _Static, q: Any, k: Any, v: Any, x: _Operands) -> Any:
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    shapes = (out, jax.ShapeDtypeStruct(q.shape[:-1], np.dtype(wide)))
    return _called("forward", static, (q, k, v), x, shapes[: 1 + static.bare.need_lse])


@_constant
def _backward(static: _Static, arrays: tuple[Any, ...], x: _Operands) -> Any:
    given = [a for a in (*arrays[:3], x.bias, x.sinks) if a is not None]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    return _called("backward", static, arrays, x, shapes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Any, k: Any, v: Any, x: _Operands) -> Any:
    return tuple(_forward(static, q, k, v, x))


def _attend_forward(static: _Static, q: Any, k: Any, v: Any, x: _Operands) -> tuple[Any, Any]:
    static.far.check(*static.far.lacking)
    out, lse = _forward(_recorded(static), q, k, v, x)
    return ((out, lse) if static.bare.need_lse else (out,)), (q, k, v, x, out, lse)


def _attend_backward(static: _Static, kept: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, x, out, lse = kept
    d_out, d_lse = cotangents if static.bare.need_lse else (*cotangents, None)
    made = iter(_backward(_recorded(static), (q, k, v, out, lse, d_out, d_lse), x))
    dq, dk, dv = next(made), next(made), next(made)
    bias, sinks = (None if a is None else next(made) for a in (x.bias, x.sinks))
    return dq, dk, dv, _Operands(bias, sinks, (None,) * len(x.leaves))


def _recorded(static: _Static) -> _Static:
    """The class of a call whose gradient is wanted, which has lse among its results."""
    cls = static.bare.cls._replace(gradient="framework", need_lse=True)
    return static._replace(bare=static.bare._replace(cls=cls))


_attend.defvjp(_attend_forward, _attend_backward)
