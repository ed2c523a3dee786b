"""MLX's transforms in the contract's words, as the conformance suite applies them.

MLX knows trees of lists, tuples and dicts. A mask or an `Alibi` is handed over as its arrays, and
put together again inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attnx.masks import Mask, leaves, map_leaves
from attnx.plugin import Alibi, Transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["TRANSFORMS", "vjp"]


def _arrays(argument: Any) -> list[Any]:
    """The arrays of an argument: itself, or those in a mask or an `Alibi`."""
    if isinstance(argument, Alibi):
        return list(argument.arrays)
    if not isinstance(argument, Mask):
        return [argument]
    return [leaf for _, _, leaf in leaves(argument) if isinstance(leaf, mx.array)]


def _filled(argument: Any, arrays: Iterator[Any]) -> Any:
    """The argument with other arrays."""
    if isinstance(argument, Alibi):
        return argument.map_arrays(lambda _: next(arrays))
    if not isinstance(argument, Mask):
        return next(arrays)
    return map_leaves(
        argument, lambda _node, _field, x: next(arrays) if isinstance(x, mx.array) else x
    )


def _on_arrays(fn: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """The same function, of the arrays of these arguments in one row."""

    def flat(*arrays: Any) -> Any:
        left = iter(arrays)
        return fn(*[_filled(argument, left) for argument in arguments])

    return flat


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    programs: dict[Any, Any] = {}

    def compiled(*arguments: Any) -> Any:
        key = tuple(getattr(x, "structure", getattr(x, "align", None)) for x in arguments)
        if key not in programs:
            programs[key] = mx.compile(_on_arrays(fn, arguments))
        return programs[key](*(x for argument in arguments for x in _arrays(argument)))

    return compiled


def _vmap(fn: Callable[..., Any], in_axes: Sequence[Any]) -> Callable[..., Any]:
    def mapped(*arguments: Any) -> Any:
        found = [_arrays(argument) for argument in arguments]
        axes = [axis for axis, x in zip(in_axes, found, strict=True) for _ in x]
        flat = [x for arrays in found for x in arrays]
        return mx.vmap(_on_arrays(fn, arguments), in_axes=tuple(axes))(*flat)

    return mapped


def vjp(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Outputs and gradients; a cotangent of None counts as 0."""
    single = False

    def listed(*arrays: Any) -> tuple[Any, ...]:
        nonlocal single
        made = fn(*arrays)
        single = isinstance(made, mx.array)
        return (made,) if single else tuple(made)

    given = list(cotangents)
    if any(x is None for x in given):
        outputs = listed(*inputs)
        given = [mx.zeros_like(y) if x is None else x for x, y in zip(given, outputs, strict=True)]
    made, gradients = mx.vjp(listed, list(inputs), given)
    return (made[0] if single else tuple(made)), gradients


def _second(
    fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any],
    directions: Sequence[Any],
) -> Any:  # fmt: skip
    """By differentiating the pullback."""
    return vjp(lambda *arrays: tuple(vjp(fn, arrays, cotangents)[1]), inputs, directions)[1]


def _jvp(fn: Callable[..., Any], inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return mx.jvp(fn, list(inputs), list(tangents))


TRANSFORMS = Transforms(
    compile=_compile, vmap=_vmap, vjp=vjp, second=_second, jvp=_jvp, checkpoint=mx.checkpoint
)
