"""A case's NumPy inputs as the arrays of a framework, in the layout and memory order asked for.

The oracle and the backend get the same numbers; only here do they part. Layout and views are
applied to the framework's own arrays, because a conversion would straighten them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnx.errors import UnsupportedError
from attnx.masks import Mask, map_leaves
from attnx.plugin import Alibi, Dropout, Lane

from .cases import Inputs

__all__ = [
    "Arguments",
    "NotApplicableError",
    "adapted",
    "in_layout",
    "marshal",
    "marshal_options",
    "plain_dropout",
    "same_bytes",
    "view_of",
]

Array = NDArray[Any]
OPERANDS = ("q", "k", "v", "d_out", "d_lse", "bias", "sinks")


class NotApplicableError(Exception):
    """A case asks for something that a framework's arrays cannot be."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call as a framework's arrays; None where a case has none."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    d_lse: Any
    mask: Any
    bias: Any
    sinks: Any

    def options(self) -> dict[str, Any]:
        """Those that `attention` takes by keyword."""
        given = {"mask": self.mask, "bias": self.bias, "sinks": self.sinks}
        return {name: value for name, value in given.items() if value is not None}

    def snapshot(self, lane: Lane) -> dict[str, Array]:
        """A copy of the contents of every operand, to see later that none was written to.

        The arrays of a mask, its own or those in a mask object, stand under `mask`, `mask.1` and so
        on; those of an `Alibi` alike.
        """
        return {name: np.array(lane.to_numpy(array)) for name, array in self.arrays(lane)}

    def arrays(self, lane: Lane) -> list[tuple[str, Any]]:
        """Every array of the call, by name."""
        found = [(field.name, getattr(self, field.name)) for field in fields(self)]
        given = [(name, x) for name, x in found if x is not None and name not in ("mask", "bias")]
        parts = self.bias.arrays if isinstance(self.bias, Alibi) else (self.bias,)
        given += [(f"bias.{n}" if n else "bias", x) for n, x in enumerate(parts) if x is not None]
        leaves: list[Any] = []

        def keep(_node: Any, _field: str, leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        if isinstance(self.mask, Mask):
            map_leaves(self.mask, keep)
        elif self.mask is not None:
            leaves.append(self.mask)
        owned = [leaf for leaf in leaves if lane.owns(leaf)]
        return given + [(f"mask.{n}" if n else "mask", leaf) for n, leaf in enumerate(owned)]


def in_layout(inputs: Inputs, layout: str) -> Inputs:
    """The same inputs with operands in a layout; the cases hold them in "bhsd"."""
    if layout == "bhsd" or inputs.q.ndim == 2:
        return inputs
    moved = {name: np.swapaxes(getattr(inputs, name), -3, -2) for name in ("q", "k", "v", "d_out")}
    if inputs.d_lse is not None:
        moved["d_lse"] = np.swapaxes(inputs.d_lse, -1, -2)
    return replace(inputs, **moved)


def adapted(inputs: Inputs, lacks: frozenset[str]) -> Inputs:
    """The same inputs, in bhsd, for a subject that lacks "gqa", "lse_gradient" or "isolation".

    Most cases have groups, a cotangent of lse and poison in hidden positions beside what they are
    about. For one who declares none of it, every head gets keys of its own, lse stays without a
    cotangent, and 0 stands where the poison was.
    """
    if "isolation" in lacks:
        d_lse = None if inputs.d_lse is None else _harmless(inputs.d_lse)
        inputs = replace(
            inputs, q=_harmless(inputs.q), k=_harmless(inputs.k), v=_harmless(inputs.v),
            d_out=_harmless(inputs.d_out), d_lse=d_lse,
        )  # fmt: skip
    if "gqa" in lacks and inputs.q.ndim > 2:
        g = inputs.q.shape[-3] // max(1, inputs.k.shape[-3])
        k, v = (np.repeat(x, g, axis=-3) for x in (inputs.k, inputs.v))
        inputs = replace(inputs, k=k, v=v)
    return replace(inputs, d_lse=None) if "lse_gradient" in lacks else inputs


def _harmless(array: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(array.astype(np.float64)) < 1e30, array, array.dtype.type(0))


def marshal(inputs: Inputs, lane: Lane) -> Arguments:
    """The inputs as arrays of a lane's framework.

    Raises:
        NotApplicableError: The framework has no such dtype or no such view.
    """
    made: dict[str, Any] = {}
    for name in (*OPERANDS, "mask"):
        value = getattr(inputs, name)
        if isinstance(value, Alibi):
            made[name] = value.map_arrays(lane.from_numpy)
        elif isinstance(value, Mask):
            made[name] = map_leaves(value, lambda _node, _field, leaf: _leaf(leaf, lane))
        elif value is None:
            made[name] = None
        else:
            try:
                made[name] = view_of(value, inputs.views.get(name), lane)
            except UnsupportedError as error:  # JAX without 64-bit types, say
                raise NotApplicableError(str(error)) from error
            if lane.dtype_name(made[name]) not in (value.dtype.name, "bool"):
                raise NotApplicableError(f"{lane.name} makes {value.dtype} {made[name].dtype}")
    return Arguments(**made)


def marshal_options(options: Mapping[str, Any], lane: Lane) -> dict[str, Any]:
    """Scalar options, with a dropout whose NumPy arrays are a lane's own."""
    made = dict(options)
    if isinstance(made.get("dropout"), Dropout):
        made["dropout"] = _each(made["dropout"], lane.from_numpy)
    return made


def plain_dropout(dropout: Dropout, to_numpy: Callable[[Any], Any] = np.asarray) -> Dropout:
    """The same numbers as integers, in place of arrays."""

    def number(array: Any) -> int:
        words = np.atleast_1d(np.asarray(to_numpy(array)))
        return sum(int(word) << 32 * place for place, word in enumerate(words))

    return _each(dropout, number)


def _each(dropout: Dropout, fn: Callable[[Any], Any]) -> Dropout:
    """With `fn(array)` in place of each array."""
    seed, *offset = (x if isinstance(x, int) else fn(x) for x in (dropout.seed, *dropout.offset))
    b, h, i, j = offset
    return Dropout(dropout.p, seed, (b, h, i, j))


def _leaf(leaf: Any, lane: Lane) -> Any:
    return lane.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def view_of(array: Array, kind: str | None, lane: Lane) -> Any:
    """A framework's array with these contents that lies in memory as `kind` says."""
    if kind is None:
        return lane.from_numpy(np.ascontiguousarray(array))
    base, view = _VIEWS[kind](array, lane)
    made = lane.from_numpy(np.ascontiguousarray(base))
    if not hasattr(made, "strides") and not hasattr(made, "stride"):
        raise NotApplicableError(f"arrays of {lane.name} have no strides")
    try:
        return view(made)
    except ValueError as error:  # PyTorch has no negative strides
        raise NotApplicableError(f"arrays of {lane.name} have no {kind} view: {error}") from error


View = tuple[Array, Callable[[Any], Any]]


def _transposed(array: Array, lane: Lane) -> View:
    return np.swapaxes(array, -1, -2), lambda base: base.swapaxes(-1, -2)


def _offset(array: Array, lane: Lane) -> View:
    size = array.shape[-1]
    base = np.full((*array.shape[:-1], size + 5), 77, dtype=array.dtype)
    base[..., 3 : 3 + size] = array
    return base, lambda made: made[..., 3 : 3 + size]


def _reversed(array: Array, lane: Lane) -> View:
    return array[..., ::-1, :], lambda base: base[..., ::-1, :]


def _inner(array: Array, lane: Lane) -> View:
    base = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77, dtype=array.dtype)
    base[..., ::2] = array
    return base, lambda made: made[..., ::2]


def _expanded(array: Array, lane: Lane) -> View:
    return array[:1], lambda base: lane.xp.broadcast_to(base, array.shape)


_VIEWS: Mapping[str, Callable[[Array, Lane], View]] = {
    "transposed": _transposed,
    "offset": _offset,
    "reversed": _reversed,
    "inner": _inner,
    "expanded": _expanded,
}


def same_bytes(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bits, NaN payloads and signs of zero included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
