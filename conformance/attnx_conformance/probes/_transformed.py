"""A call as a function of its arrays, which is what a framework's transforms want.

Scalars are part of the function; q, k, v, bias, sinks and the mask are its arguments, so that none
of their values may be built into a program or stay behind when an axis is mapped. So is an `Alibi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Mask, map_leaves
from attnx.plugin import Alibi, Dropout
from attnx_conformance.plain import numpy_dtype

from ._kit import Answer, Array, Kit

__all__ = ["Call", "calls", "slanted", "stacked"]

OPERANDS = ("q", "k", "v", "bias", "sinks")


class Call:
    """One call of a subject, with arrays of its framework.

    Attributes:
        inputs: q, k and v as NumPy arrays.
        options: all others of the call, and its cotangents, for the oracle.
        names: of the arguments that have gradients.
        arrays: those arguments.
        rest: the arguments that have none, after those: an `Alibi`, and the mask.
        cotangents: of the outputs, None where there is none.
    """

    def __init__(
        self, kit: Kit, inputs: tuple[Array, Array, Array], options: dict[str, Any], *,
        gradients: bool = False,
    ) -> None:  # fmt: skip
        given = kit.cotangents(inputs[0], inputs[2]) if gradients else {}
        self.kit, self.inputs, self.options = kit, inputs, {**options, **given}
        args, rest = kit.arguments(*inputs, **self.options)
        given = {n: getattr(args, n) for n in (*OPERANDS, "mask")}
        still = {n: x for n, x in given.items() if n == "mask" or isinstance(x, Alibi)}
        self.names = [n for n, x in given.items() if x is not None and n not in still]
        self.arrays = [given[n] for n in self.names]
        self._others = [n for n, x in still.items() if x is not None]
        self.rest = tuple([given[n] for n in self._others])
        self._scalars = {n: x for n, x in rest.items() if n not in given}
        self.has_lse = bool(kit.has.lse and (kit.has.lse_gradient or not gradients))
        self.cotangents: tuple[Any, ...] = (args.d_out, args.d_lse)[: 1 + self.has_lse]

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """out, and lse where the subject gives it, of other arrays in the places of its own."""
        given = dict(zip((*self.names, *self._others), arrays, strict=True))
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        if not self.has_lse:
            return (self.kit.subject.attention(q, k, v, **given, **self._scalars),)
        made = self.kit.subject.attention(q, k, v, **given, **self._scalars, return_lse=True)
        return made[0], made[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the call is called with."""
        return (*self.arrays, *self.rest)

    def on(self, *arrays: Any) -> tuple[Any, ...]:
        """The same with this mask and `Alibi`: a function of what has gradients."""
        return self(*arrays, *self.rest)

    def outputs(self, made: Sequence[Any]) -> Answer:
        """What the function gave, by names, as NumPy arrays in "bhsd"."""
        return self.kit.back(dict(zip(("out", "lse"), made, strict=False)))

    def answer(self, made: Sequence[Any], gradients: Sequence[Any]) -> Answer:
        """The same with the gradients."""
        named = {f"d{name}": x for name, x in zip(self.names, gradients, strict=True)}
        return self.outputs(made) | self.kit.back(named)

    def right(self, answer: Answer, what: str) -> None:
        """An answer is the oracle's, within its bound."""
        self.kit.right(answer, *self.inputs, what=what, **self.options)


def calls(kit: Kit, *, gradients: bool = False) -> Iterator[tuple[str, Call]]:
    """A call of every kind that the subject declares, of new numbers each time.

    Args:
        kit: of the subject.
        gradients: whether gradients are asked for, as far as they are declared.
    """
    L = kit.L
    shown = kit.rng.random((kit.B, 1, L, L)) < 0.6
    shown[:, :, 2] = False
    ends = kit.rng.permutation(np.array([0, L // 3, L]))
    kinds: dict[str, dict[str, Any]] = {
        "a plain call": {},
        "causal": {"causal": True},
        "a mask": {"mask": shown},
        "mask objects": {"mask": Causal() & Lengths(ends)},
        "options": _options(kit, L, gradients),
        "dropout": {"dropout": Dropout(0.3, int(kit.rng.integers(1 << 40))), "causal": True},
    }
    for name, options in kinds.items():
        objects = isinstance(options.get("mask"), Mask)
        undeclared = "dropout" in options and not kit.has.dropout
        if undeclared or not kit.able(**options) or (objects and not kit.subject.mask_objects):
            continue
        yield name, Call(kit, kit.inputs(), options, gradients=gradients)


def slanted(kit: Kit, *, gradients: bool = False) -> tuple[Call, Call] | None:
    """Two calls with an `Alibi`, of other numbers and other slopes; None where there is none."""

    def one() -> Call:
        slopes = kit.rng.uniform(0.05, 1.0, kit.Hq).astype(numpy_dtype(kit.dtype))
        options = {"bias": Alibi(slopes, "bottom_right"), "causal": True}
        return Call(kit, kit.inputs(), options, gradients=gradients)

    able = kit.able(bias=Alibi((1.0,) * kit.Hq), causal=True)
    return (one(), one()) if able else None


def _options(kit: Kit, L: int, gradients: bool) -> dict[str, Any]:
    """Bias, sinks and softcap, as far as they are declared."""
    has, options = kit.has, dict[str, Any]()
    if has.bias and (has.bias_gradient or not gradients):
        options["bias"] = kit.draw(1, kit.Hq, 1, L)
    if has.sinks and (has.sinks_gradient or not gradients):
        options["sinks"] = kit.draw(kit.Hq)
    return options | ({"softcap": 1.5} if has.softcap else {})


def stacked(kit: Kit, first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of two calls as one, with an axis more in front."""
    return tuple(_pair(kit.lane.xp.stack, a, b) for a, b in zip(first, second, strict=True))


def _pair(stack: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, Alibi):
        others = iter(b.arrays)
        return a.map_arrays(lambda array: stack((array, next(others))))
    if not isinstance(a, Mask):
        return stack((a, b))
    leaves: list[Any] = []

    def keep(_node: Any, _field: str, leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_leaves(b, keep)
    left = iter(leaves)
    return map_leaves(a, lambda _node, _field, leaf: stack((leaf, next(left))))
