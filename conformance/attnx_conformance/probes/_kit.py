"""What a probe works with: calls on one subject, from NumPy arrays to NumPy arrays, and a judge.

A property ties two answers of one subject to each other, so neither is the truth: they may differ
by the sum of their two bounds. Arrays are always "bhsd" here; the layout under test is applied on
the way in and undone on the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from attnx.masks import Mask
from attnx.plugin import Alibi, mask_kinds
from attnx_conformance._marshal import (
    Arguments,
    NotApplicableError,
    marshal,
    marshal_options,
    same_bytes,
)
from attnx_conformance.cases import Inputs
from attnx_conformance.judgement import judge
from attnx_conformance.oracle import reference
from attnx_conformance.plain import numpy_dtype
from attnx_conformance.runner import drops
from attnx_conformance.subject import Subject
from attnx_conformance.tolerance import Bounds, bounds

__all__ = ["Answer", "Array", "FaultError", "Kit", "moved", "piece"]

Array = NDArray[Any]
Answer = dict[str, Array]
OPERANDS = ("mask", "bias", "sinks")


class FaultError(Exception):
    """A probe found what the specification does not allow; the message is one line."""


def moved(array: Array, layout: str) -> Array:
    """An array with its head and sequence axes as a layout has them; its own inverse."""
    return np.swapaxes(array, -3, -2) if layout == "bshd" and array.ndim > 2 else array


class Kit:
    """Calls on one subject in one dtype and layout.

    The sizes are those of `inputs`: no two axes are of one length, and three query heads share a
    key head where the subject has grouped heads at all.

    Attributes:
        ratios: the largest difference over its bound of each result that was compared.
    """

    B, Hq, L, D, Dv = 3, 6, 17, 8, 5

    def __init__(
        self, subject: Subject, dtype: str, rng: np.random.Generator, layout: str = "bhsd"
    ) -> None:
        self.subject, self.lane, self.dtype = subject, subject.lane, dtype
        self.rng, self.layout, self.has = rng, layout, subject.capabilities
        self.Hk = 2 if self.has.gqa else self.Hq
        self.ratios: dict[str, float] = {}

    # Inputs

    def draw(self, *shape: int, dtype: str = "") -> Array:
        """Standard normal values in the dtype under test."""
        return self.rng.standard_normal(shape).astype(numpy_dtype(dtype or self.dtype))

    def inputs(self, Lq: int = 0, Lk: int = 0, B: int = 0) -> tuple[Array, Array, Array]:
        """q, k and v."""
        B, Lq, Lk = B or self.B, Lq or self.L, Lk or self.L
        return (
            self.draw(B, self.Hq, Lq, self.D), self.draw(B, self.Hk, Lk, self.D),
            self.draw(B, self.Hk, Lk, self.Dv),
        )  # fmt: skip

    def cotangents(self, q: Array, v: Array) -> dict[str, Any]:
        """d_out, and d_lse where gradients flow through lse; none where there are no gradients."""
        if not (self.has.gradient and self.subject.ways):
            return {}
        given: dict[str, Any] = {"d_out": self.draw(*q.shape[:-1], v.shape[-1])}
        if self.has.lse and self.has.lse_gradient:
            given["d_lse"] = self.draw(
                *q.shape[:-1], dtype="float64" if self.dtype == "float64" else "float32"
            )
        return given

    def require(self, fact: object, otherwise: str) -> None:
        """The probe fails unless the fact holds."""
        if not fact:
            raise FaultError(otherwise)

    def inapplicable(self, reason: str) -> NoReturn:
        """The probe has nothing to ask of this subject."""
        raise NotApplicableError(reason)

    # Calls

    def call(
        self, q: Array, k: Array, v: Array, *, d_out: Any = None, d_lse: Any = None,
        way: str | None = None, lse: bool = True, **options: Any,
    ) -> Answer:  # fmt: skip
        """out, lse where the subject gives one, and with `d_out` the gradients by their names.

        Args:
            q: `(*B, Hq, Lq, D)`; k and v alike.
            k: alike.
            v: alike.
            d_out: a cotangent of out.
            d_lse: a cotangent of lse.
            way: "vjp" or "framework"; the first that the subject has.
            lse: whether lse is asked for.
            options: of `attnx.attention`.
        """
        args, given = self.arguments(q, k, v, d_out=d_out, d_lse=d_lse, **options)
        if d_out is None:
            return self.forward(args, given, lse and self.has.lse)
        way = way or self.subject.ways[0]
        made, grads = (self.vjp if way == "vjp" else self.own)(args, given)
        answer = {"out": made[0]} | ({"lse": made[1]} if len(made) > 1 else {})
        return self.back(answer | {f"d{n}": grad for n, grad in grads.items() if grad is not None})

    def arguments(
        self, q: Array, k: Array, v: Array, *, d_out: Any = None, d_lse: Any = None, **options: Any
    ) -> tuple[Arguments, dict[str, Any]]:
        """The arrays of the subject's framework, and its options.

        Raises:
            NotApplicableError: the subject declares that it cannot do the call.
        """
        lacks = self._lacks(options)
        if lacks:
            self.inapplicable(f"not declared: {', '.join(lacks)}")
        operands = {n: options.pop(n) for n in OPERANDS if options.get(n) is not None}
        if d_out is None:
            d_out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        q, k, v, d_out = (moved(x, self.layout) for x in (q, k, v, d_out))
        d_lse = None if d_lse is None else self._lse(d_lse)
        inputs = Inputs(q, k, v, d_out, d_lse, **operands)
        args = marshal(inputs, self.lane)
        options = marshal_options(options, self.lane)
        return args, {**args.options(), **options, "layout": self.layout}

    def numpy(self, array: Any) -> Array:
        """A result of the subject as a NumPy array."""
        return np.asarray(self.lane.to_numpy(array))

    def able(self, **options: Any) -> bool:
        """Whether the subject declares that it takes these options beside any q, k and v."""
        return not self._lacks(options)

    def forward(self, args: Arguments, given: dict[str, Any], lse: bool) -> Answer:
        """out and lse."""
        if not lse:
            return self.back({"out": self.subject.attention(args.q, args.k, args.v, **given)})
        made = self.subject.attention(args.q, args.k, args.v, **given, return_lse=True)
        return self.back({"out": made[0], "lse": made[1]})

    def vjp(self, args: Arguments, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The outputs, and gradients by the subject's own pullback; in its own arrays."""
        lse = {} if args.d_lse is None else {"return_lse": True}
        made, pullback = self.subject.attention_vjp(args.q, args.k, args.v, **given, **lse)
        grads = pullback(args.d_out, args.d_lse) if lse else pullback(args.d_out)
        return (made if lse else (made,)), grads._asdict()

    def own(self, args: Arguments, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The outputs, and gradients by the framework's differentiation; in its own arrays."""
        if self.lane.vjp is None:
            self.inapplicable(f"{self.lane.name} has no differentiation of its own")
        lse = {} if args.d_lse is None else {"return_lse": True}
        names = [n for n in ("q", "k", "v", "bias", "sinks") if getattr(args, n) is not None]
        rest = {n: x for n, x in given.items() if n not in names}

        def fn(*arrays: Any) -> tuple[Any, ...]:
            inner = dict(zip(names, arrays, strict=True))
            q, k, v = (inner.pop(n) for n in ("q", "k", "v"))
            made = self.subject.attention(q, k, v, **inner, **rest, **lse)
            return tuple(made) if lse else (made,)

        cotangents = (args.d_out, args.d_lse) if lse else (args.d_out,)
        made, grads = self.lane.vjp(fn, [getattr(args, n) for n in names], cotangents)
        return made, dict(zip(names, grads, strict=True))

    def back(self, answer: Mapping[str, Any]) -> Answer:
        """The subject's arrays as NumPy arrays in "bhsd"."""
        made = {name: self.numpy(array) for name, array in answer.items()}
        for name in ("out", "dq", "dk", "dv"):
            if name in made:
                made[name] = moved(made[name], self.layout)
        if "lse" in made:
            made["lse"] = self._lse(made["lse"])
        return made

    def _lse(self, array: Array) -> Array:
        return np.swapaxes(array, -1, -2) if self.layout == "bshd" and array.ndim > 1 else array

    def _lacks(self, options: Mapping[str, Any]) -> list[str]:
        asked = {n: options.get(n) is not None for n in ("bias", "softcap", "sinks")}
        asked["dropout"] = drops(options.get("dropout"))
        if isinstance(options.get("bias"), Alibi):
            asked |= {"bias": False, "alibi": True}
        lacks = [n for n, wanted in asked.items() if wanted and not getattr(self.has, n)]
        mask = options.get("mask")
        kinds = set(mask_kinds(mask.structure)) if isinstance(mask, Mask) else set()
        kinds |= {"dense"} if isinstance(mask, np.ndarray) else set()
        kinds |= {"causal"} if options.get("causal", False) is not False else set()
        return lacks + sorted(kinds - self.has.masks)

    # Judgement

    def weights(self, q: Array, k: Array, **options: Any) -> Array:
        """P: as the subject gives it, or as the output where values are the columns of 1."""
        if self.subject.has_weights:
            args, given = self.arguments(q, k, k, **options)
            made = self.subject.attention_weights(args.q, args.k, **given)
            return self.numpy(made).astype(np.float64)
        one = np.eye(k.shape[-2], dtype=k.dtype)
        values = np.broadcast_to(one, (*k.shape[:-1], k.shape[-2]))
        return self.call(q, k, values, lse=False, **options)["out"].astype(np.float64)

    def bounds(
        self, q: Array, k: Array, v: Array, *, d_out: Any = None, d_lse: Any = None, **options: Any
    ) -> Bounds:
        """How far each element of one answer may be from the truth."""
        expected = reference(q, k, v, d_out=d_out, d_lse=d_lse, **options)
        given = {n: options[n] for n in ("bias", "sinks") if n in options}
        dtypes = {f"{n}_dtype": x.dtype.name for n, x in given.items() if not isinstance(x, Alibi)}
        return bounds(expected, self.dtype, scores=self.has.scores, **dtypes)

    def right(
        self, answer: Answer, q: Array, k: Array, v: Array, *, what: str = "", **options: Any
    ) -> None:
        """The answer is that of the oracle, within its bound."""
        expected, limits = reference(q, k, v, **options), self.bounds(q, k, v, **options)
        for name, array in answer.items():
            self._judge(name, array, getattr(expected, name), getattr(limits, name), what)

    def same(
        self, ours: Answer, theirs: Answer, limits: Bounds, *, what: str = "", at: Any = ...
    ) -> None:
        """Two answers agree within the sum of their bounds.

        Args:
            ours: one answer.
            theirs: the other; results that it lacks are not compared.
            limits: of either.
            what: what is compared, for the detail.
            at: the part of `limits` that the two are.
        """
        for name in ours.keys() & theirs.keys():
            limit = getattr(limits, name)
            limit = replace(limit, limit=2 * limit.limit[at], either=limit.either[at])
            self._judge(name, ours[name], theirs[name].astype(np.float64), limit, what)

    def identical(self, ours: Answer, theirs: Answer, what: str) -> None:
        """Two answers have the same bits."""
        for name in ours:
            a, b = (np.ascontiguousarray(x[name]) for x in (ours, theirs))
            self.require(same_bytes(a, b), f"{what}: {name} differs in its bits")

    def _judge(self, name: str, actual: Array, expected: Any, limit: Any, what: str) -> None:
        judgement = judge(actual, expected, limit)
        self.ratios[name] = max(self.ratios.get(name, 0.0), judgement.ratio)
        self.require(judgement.ok, f"{what + ': ' if what else ''}{name} {judgement.detail}")


def piece(answer: Answer, at: Any, names: Iterable[str] = ("out", "lse", "dq")) -> Answer:
    """The part of an answer that some query rows are."""
    return {name: answer[name][at] for name in names if name in answer}
