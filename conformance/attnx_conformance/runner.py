"""One case on one backend: run it, and say what that proves.

Nothing here knows a backend. What a backend must do and what it must refuse follows from its
`Capabilities` alone, so that a plugin adds no test code: what it declares must be right, and what
it does not declare must raise `UnsupportedError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import attnx
from attnx.errors import UnsupportedError
from attnx.plugin import Backend, mask_kinds

from ._marshal import Arguments, NotApplicableError, in_layout, marshal, same_bytes
from .cases import Case, Inputs
from .oracle import Reference, reference
from .plain import plain
from .tolerance import Bounds, bounds, judge

__all__ = ["Outcome", "run"]


@dataclass(frozen=True)
class Outcome:
    """What a run of a case showed.

    Attributes:
        verdict: "passed", "failed", "refused" (undeclared, and it said so), "wrongly-accepted"
            (undeclared, but computed), "not-applicable" or "crashed".
        detail: One line for a person; a traceback where it crashed.
        ratios: Error over bound of each result that was compared.
    """

    verdict: str
    detail: str = ""
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the verdict counts for the backend."""
        return self.verdict in ("passed", "refused", "not-applicable")


class _FaultError(Exception):
    """A result is not what the specification asks for."""


def run(
    case: Case,
    backend_name: str,
    dtype: str,
    *,
    seed: int = 0,
    layout: str = "bhsd",
    gradients: str | None = "vjp",
) -> Outcome:
    """Run a case on a registered backend, with arrays of that backend's framework.

    Args:
        case: The case.
        backend_name: As registered with attnx.
        dtype: Of q, k and v.
        seed: Of the inputs.
        layout: "bhsd" or "bshd".
        gradients: "vjp" through `attention_vjp`, "framework" through the framework's own
            differentiation, None for outputs alone.
    """
    backend = attnx.get_backend(backend_name)
    trial = _Trial(backend, case, dtype, layout, gradients)
    try:
        return trial.run(in_layout(case.inputs(dtype, seed), layout))
    except NotApplicableError as reason:
        return Outcome("not-applicable", str(reason))
    except _FaultError as fault:
        return Outcome("failed", str(fault), trial.ratios)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), trial.ratios)


class _Trial:
    def __init__(
        self, backend: Backend, case: Case, dtype: str, layout: str, gradients: str | None
    ) -> None:
        self.backend, self.lane, self.case = backend, backend.lane, case
        self.dtype, self.layout, self.gradients = dtype, layout, gradients
        self.ratios: dict[str, float] = {}
        self.yardstick: dict[str, Any] = {}

    def run(self, inputs: Inputs) -> Outcome:
        has = self.backend.capabilities
        if "isolation" in self.case.needs and has.isolation != "full":
            raise NotApplicableError(f"declares isolation={has.isolation!r}")
        if self.gradients == "framework" and self.lane.vjp is None:
            raise NotApplicableError(f"{self.lane.name} has no differentiation of its own")
        args = marshal(inputs, self.lane)
        before = args.snapshot(self.lane)
        lacks = self._lacks(inputs)
        if lacks:
            return self._refuses(lambda: self._attention(args), lacks)
        expected, limits = self._expect(inputs)
        self._forward(args, inputs, expected, limits)
        lacks = self._lacks_gradient(inputs)
        if self.gradients is not None and not lacks:
            self._backward(args, inputs, expected, limits)
        for name, old in before.items():
            new = np.asarray(self.lane.to_numpy(getattr(args, name)))
            self._require(same_bytes(new, old), f"{name} was written to (S1.4)")
        if self.gradients == "vjp" and lacks:
            return self._refuses(lambda: self._vjp(args, inputs), lacks)
        return Outcome("passed", "", self.ratios)

    # What the backend declares

    def _lacks(self, inputs: Inputs) -> list[str]:
        has, options = self.backend.capabilities, self.case.options
        wanted = {
            "gqa": _heads(inputs.q, self.layout) != _heads(inputs.k, self.layout),
            "bias": inputs.bias is not None,
            "softcap": options.get("softcap") is not None,
            "sinks": inputs.sinks is not None,
        }  # fmt: skip
        lacks = [name for name, asked in wanted.items() if asked and not getattr(has, name)]
        lacks += [] if self.dtype in has.dtypes else [self.dtype]
        lacks += sorted(_mask_kinds(inputs.mask, options.get("causal", False)) - has.masks)
        size = max(inputs.q.shape[-1], inputs.v.shape[-1])
        if has.max_head_size is not None and size > has.max_head_size:
            lacks.append("max_head_size")
        return lacks

    def _lacks_gradient(self, inputs: Inputs) -> list[str]:
        has = self.backend.capabilities
        wanted = {
            "gradient": True,
            "bias_gradient": inputs.bias is not None,
            "sinks_gradient": inputs.sinks is not None,
            "lse_gradient": inputs.d_lse is not None,
        }
        return [name for name, asked in wanted.items() if asked and not getattr(has, name)]

    def _refuses(self, call: Callable[[], Any], lacks: list[str]) -> Outcome:
        missing = ", ".join(lacks)
        try:
            call()
        except UnsupportedError as error:
            return Outcome("refused", str(error), self.ratios)
        return Outcome("wrongly-accepted", f"undeclared and yet computed: {missing}")

    # What it computes

    def _expect(self, inputs: Inputs) -> tuple[Reference, Bounds]:
        options = {k: v for k, v in self.case.options.items() if k != "assume_finite"}
        expected = reference(
            inputs.q, inputs.k, inputs.v, mask=inputs.mask, bias=inputs.bias, sinks=inputs.sinks,
            layout=self.layout, d_out=inputs.d_out, d_lse=inputs.d_lse, **options,
        )  # fmt: skip
        limits = bounds(
            expected,
            self.dtype,
            scores=self.backend.capabilities.scores,
            bias_dtype=None if inputs.bias is None else inputs.bias.dtype.name,
            sinks_dtype=None if inputs.sinks is None else inputs.sinks.dtype.name,
        )
        if self.dtype in _HALF:
            self.yardstick = plain(expected.terms, self.dtype)
            self.accumulated = bounds(expected, "float32")
        return expected, limits

    def _options(self, args: Arguments) -> dict[str, Any]:
        return {
            **args.options(), **self.case.options,
            "layout": self.layout, "backend": self.backend.name,
        }  # fmt: skip

    def _attention(self, args: Arguments, **more: Any) -> Any:
        return attnx.attention(args.q, args.k, args.v, **self._options(args), **more)

    def _forward(
        self, args: Arguments, inputs: Inputs, expected: Reference, limits: Bounds
    ) -> None:
        out = self._attention(args)
        self._check("out", out, expected, limits)
        for operand in (args.q, args.k, args.v):
            self._require(not self._shares(out, operand), "out shares memory with an input (S1.4)")
        if self.backend.capabilities.lse:
            out, lse = self._attention(args, return_lse=True)
            self._check("out", out, expected, limits)
            self._check("lse", lse, expected, limits)
        if self.backend.capabilities.deterministic:
            again = self.lane.to_numpy(self._attention(args, return_lse=True)[0])
            same = same_bytes(np.asarray(again), np.asarray(self.lane.to_numpy(out)))
            self._require(same, "two runs differ, though declared deterministic")
        if "weights" in self.case.compare:
            weights = attnx.attention_weights(args.q, args.k, **self._options(args))
            self._check("weights", weights, expected, limits)

    def _backward(
        self, args: Arguments, inputs: Inputs, expected: Reference, limits: Bounds
    ) -> None:
        gradient = self._vjp if self.gradients == "vjp" else self._own
        outputs, grads = gradient(args, inputs)
        self._check("out", outputs[0], expected, limits)
        if len(outputs) > 1:
            self._check("lse", outputs[1], expected, limits)
        dtypes = {"bias": inputs.bias, "sinks": inputs.sinks}
        for name, grad in grads.items():
            like = dtypes.get(name)
            dtype = self.dtype if like is None else like.dtype.name
            self._check(f"d{name}", grad, expected, limits, dtype)

    def _vjp(self, args: Arguments, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with_lse = inputs.d_lse is not None
        made, pullback = attnx.attention_vjp(
            args.q, args.k, args.v, return_lse=with_lse, **self._options(args)
        )
        grads = pullback(args.d_out, args.d_lse) if with_lse else pullback(args.d_out)
        for name in ("bias", "sinks"):
            absent = getattr(args, name) is None
            self._require((getattr(grads, name) is None) == absent, f"gradient of {name} (S6.1)")
        given = {name: grad for name, grad in grads._asdict().items() if grad is not None}
        return (made if with_lse else (made,)), given

    def _own(self, args: Arguments, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with_lse = inputs.d_lse is not None
        names = [
            name for name in ("q", "k", "v", "bias", "sinks") if getattr(args, name) is not None
        ]
        rest = {name: x for name, x in self._options(args).items() if name not in names}

        def fn(*arrays: Any) -> tuple[Any, ...]:
            given = dict(zip(names, arrays, strict=True))
            made = attnx.attention(**given, **rest, return_lse=with_lse)
            return tuple(made) if with_lse else (made,)

        cotangents = (args.d_out, args.d_lse) if with_lse else (args.d_out,)
        differentiate = self.lane.vjp
        if differentiate is None:
            raise NotApplicableError(f"{self.lane.name} has no differentiation of its own")
        made, grads = differentiate(fn, [getattr(args, name) for name in names], cotangents)
        return tuple(made), dict(zip(names, grads, strict=True))

    # What is checked

    def _check(
        self, name: str, array: Any, expected: Reference, limits: Bounds, dtype: str | None = None
    ) -> None:
        self._require(self.lane.owns(array), f"{name} is a {type(array).__name__} (S1.5)")
        if dtype is None:
            dtype = self.dtype
            if name == "lse":
                dtype = "float64" if dtype == "float64" else "float32"
        got = self.lane.dtype_name(array)
        self._require(got == dtype, f"{name} is {got}, expected {dtype} (S5.1, S2.2, S2.4)")
        if name not in self.case.compare:
            return
        actual = np.asarray(self.lane.to_numpy(array))
        truth = getattr(expected, name)
        judgement = judge(actual, truth, getattr(limits, name))
        self.ratios[name] = max(self.ratios.get(name, 0.0), judgement.ratio)
        self._require(judgement.ok, f"{name} {judgement.detail}")
        if name in self.yardstick and name != "lse":
            self._require_as_good(name, actual, truth)

    def _require_as_good(self, name: str, actual: Any, truth: Any) -> None:
        """Condition (c): a 16-bit result is at most twice as far off as the plain computation."""
        rounding = _HALF[self.dtype]
        own, plainly = (
            np.where(np.isfinite(x), x, np.nan)
            for x in (actual.astype(np.float64), self.yardstick[name].astype(np.float64))
        )
        use = np.isfinite(own) & np.isfinite(plainly) & np.isfinite(truth)
        if not use.any():
            return
        error, allowed = (_rms(x[use] - truth[use]) for x in (own, plainly))
        allowed *= 2.0 * (1.0 + 3.0 / np.sqrt(_sample(plainly[use] - truth[use])))
        allowed += rounding * _rms(truth[use]) + _FLOOR[self.dtype]
        # The accumulator's own errors are (a)'s to judge: (c) is about the 16-bit roundings.
        allowed += _rms(getattr(self.accumulated, name).limit[use])
        told = f"{name} RMS error {error:.3g}, the plain computation allows {allowed:.3g}"
        self._require(error <= allowed, told)

    def _shares(self, a: Any, b: Any) -> bool:
        first, second = (np.asarray(self.lane.to_numpy(x)) for x in (a, b))
        return bool(first.size and second.size and np.may_share_memory(first, second))

    def _require(self, fact: bool, otherwise: str) -> None:
        if not fact:
            raise _FaultError(otherwise)


_HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_FLOOR = {"float16": 2.0**-24, "bfloat16": 2.0**-126}


def _sample(errors: Any) -> float:
    """How many elements an RMS really averages over: one, where one error outweighs the rest.

    Two samples of n independent roundings differ in RMS by a factor of 1 + 3 / sqrt(n) now and
    then, which an array of three elements, or one with a single large row, shows at once.
    """
    squares = np.square(errors / max(np.abs(errors).max(initial=0.0), 1e-300))
    total = float(squares.sum())
    return max(1.0, total * total / max(float(np.square(squares).sum()), 1e-300))


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _heads(array: Any, layout: str) -> int:
    return 1 if array.ndim == 2 else int(array.shape[-3 if layout == "bhsd" else -2])


def _mask_kinds(mask: Any, causal: bool | str) -> set[str]:
    kinds = set(_declared(mask))
    return kinds | {"causal"} if causal is not False else kinds


def _declared(mask: Any) -> Iterator[str]:
    if isinstance(mask, np.ndarray):
        yield "dense"
    elif mask is not None:
        yield from mask_kinds(mask.structure)
