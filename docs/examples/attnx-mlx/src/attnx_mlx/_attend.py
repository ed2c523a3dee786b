"""A gradient attached to a pair of kernels, for MLX's transforms.

`mx.custom_function` has a rule for each transform, and its own default where one is left out, which
would differentiate the kernel's operations: that keeps every tile, and gives NaN where a hidden
score overflows. So every rule is given. Kernels refuse to be differentiated themselves: a second
derivative, and forward mode, are errors and never wrong numbers (S6.5).

A mapped axis is a loop over its entries: what a call holds beside q, k and v (ids, the counters of
dropout) belongs to one entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
from attnx.errors import UnsupportedError
from attnx.plugin import Far, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Call

__all__ = ["attend", "refusing"]


def refusing(fn: Callable[..., tuple[Any, ...]], refuse: Callable[[], NoReturn]) -> Any:
    """The same function of arrays, whose derivatives raise."""
    held = mx.custom_function(fn)
    held.vjp(lambda *_: refuse())
    held.jvp(lambda *_: refuse())
    held.vmap(_looped(held))
    return held


def _looped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of `mx.vmap` for a function of arrays that gives a tuple of them: a loop."""

    def rule(inputs: Any, axes: Any) -> tuple[Any, Any]:
        if isinstance(axes, int):  # of one argument
            inputs, axes = (inputs if isinstance(inputs, tuple) else (inputs,)), (axes,)
        pairs = list(zip(inputs, axes, strict=True))
        count = next(x.shape[axis] for x, axis in pairs if axis is not None)
        moved = [x if axis is None else mx.moveaxis(x, axis, 0) for x, axis in pairs]
        entries = [
            fn(*(x if axis is None else x[n] for x, (_, axis) in zip(moved, pairs, strict=True)))
            for n in range(count)
        ]
        made = tuple(mx.stack(list(results)) for results in zip(*entries, strict=True))
        return made, (0,) * len(made)

    return rule


def attend(far: Far, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """`far.forward` with the gradient of `far.backward`, under whatever transform is looking.

    Args:
        far: the two functions, whose arrays are MLX's, and the name that a refusal bears.
        q: as in `Backend.forward`.
        k: alike.
        v: alike.
        call: alike.
    """
    bare, (bias, sinks, *rest) = call.taken_apart()
    given = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    names = [name for name, array in given.items() if array is not None]
    arrays = (*(given[name] for name in names), *rest)
    made = _function(far, bare, names)(*arrays)
    return made[0], made[1] if call.need_lse else None


def _function(far: Far, bare: Call, names: Sequence[str]) -> Any:
    def whole(arrays: Sequence[Any]) -> tuple[Any, Any, Any, Call]:
        given = dict(zip(names, arrays, strict=False))
        rest = arrays[len(names) :]
        call = bare.put_together(given.get("bias"), given.get("sinks"), *rest)
        return given["q"], given["k"], given["v"], call

    def forward(*arrays: Any) -> tuple[Any, ...]:
        out, lse = far.forward(*whole(arrays))
        return (out, lse) if bare.need_lse else (out,)

    def backward(out: Any, lse: Any, d_out: Any, d_lse: Any, *arrays: Any) -> tuple[Any, ...]:
        q, k, v, call = whole(arrays)
        grads = far.backward(q, k, v, out, lse, d_out, d_lse, call)
        return tuple(getattr(grads, name) for name in names)

    def with_lse(*arrays: Any) -> tuple[Any, ...]:
        q, k, v, call = whole(arrays)
        out, lse = far.forward(q, k, v, call._replace(cls=call.cls._replace(need_lse=True)))
        return out, lse

    def pull(arrays: Any, cotangents: Any, outputs: Any) -> tuple[Any, ...]:
        if far.lacking:
            far.refuse(*far.lacking)
        if bare.need_lse:
            out, lse, d_lse = outputs[0], outputs[1], cotangents[1]
        else:
            out, lse = refusing(with_lse, _second(far))(*arrays)
            d_lse = mx.zeros_like(lse)
        grads = refusing(backward, _second(far))(out, lse, cotangents[0], d_lse, *arrays)
        return *grads, *(mx.zeros_like(x) for x in arrays[len(names) :])

    held = mx.custom_function(forward)
    held.vjp(pull)
    held.jvp(lambda *_: _forward_mode(far))
    held.vmap(_looped(held))
    return held


def _second(far: Far) -> Callable[[], NoReturn]:
    hint = "detach the first gradient with mx.stop_gradient"
    return lambda: far.refuse(Reason("gradient", "of a gradient", "first order", hint))


def _forward_mode(far: Far) -> NoReturn:
    raise UnsupportedError.because(
        far.name, Reason("gradient", "in forward mode", "reverse mode", "use mx.vjp")
    )
