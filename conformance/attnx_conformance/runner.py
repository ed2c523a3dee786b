"""One case on one subject: run it, and say what that proves.

Nothing here knows a backend. What a subject must do and what it must refuse follows from its
`Capabilities` alone: what it declares must be right, and what it does not declare must raise
`UnsupportedError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnx.errors import UnsupportedError
from attnx.plugin import Alibi, Dropout, Gradients, mask_kinds

from ._marshal import (
    Arguments,
    NotApplicableError,
    adapted,
    in_layout,
    marshal,
    marshal_options,
    same_bytes,
)
from .cases import Case, Inputs
from .expectation import Expectation, expectation
from .judgement import judge
from .results import OK
from .subject import BackendSubject, Subject
from .tolerance import more_than_noise

__all__ = ["Outcome", "drops", "examine", "lacking_of", "run"]


@dataclass(frozen=True)
class Outcome:
    """What a run of a case showed.

    Attributes:
        verdict: "passed", "failed", "refused" (undeclared, and it said so), "wrongly-accepted"
            (undeclared, but computed), "not-applicable" or "crashed".
        detail: One line for a person; a traceback where it crashed.
        ratios: Error over bound of each result that was compared.
        results: What was compared, as NumPy arrays, by name: "out", "lse", "dq" and so on.
        wrong: The name of the result that is wrong, or "".
    """

    verdict: str
    detail: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict, repr=False)
    wrong: str = ""

    @property
    def ok(self) -> bool:
        """Whether the verdict counts for the backend."""
        return self.verdict in OK


class _FaultError(Exception):
    """A result, perhaps a named one, is not what the specification asks for."""

    def __init__(self, message: str, wrong: str = "") -> None:
        super().__init__(message)
        self.wrong = wrong


def lacking_of(case: Case, subject: Subject) -> frozenset[str]:
    """What a case's inputs leave out for a subject; a case about that very thing stays whole."""
    has, lacks = subject.capabilities, set()
    if not has.gqa and "S1.3" not in case.clauses:
        lacks.add("gqa")
    if not has.lse_gradient and "lse" not in case.name:
        lacks.add("lse_gradient")
    if has.isolation == "none":
        lacks.add("isolation")
    return frozenset(lacks)


def run(
    case: Case,
    backend_name: str,
    dtype: str,
    *,
    seed: int = 0,
    layout: str = "bhsd",
    gradients: str | None = "vjp",
) -> Outcome:
    """`examine` for a registered backend, by its name."""
    subject = BackendSubject(backend_name)
    return examine(case, subject, dtype, seed=seed, layout=layout, gradients=gradients)


def examine(
    case: Case,
    subject: Subject,
    dtype: str,
    *,
    seed: int = 0,
    layout: str = "bhsd",
    gradients: str | None = "vjp",
    lacks: frozenset[str] | None = None,
) -> Outcome:
    """Run a case on a subject, with arrays of the subject's framework.

    Args:
        case: The case.
        subject: What is examined.
        dtype: Of q, k and v.
        seed: Of the inputs.
        layout: "bhsd" or "bshd".
        gradients: "vjp" through an explicit pullback, "framework" through the framework's own
            differentiation, None for outputs alone.
        lacks: What the inputs leave out (see `adapted`); by default what the subject lacks.
    """
    trial = _Trial(subject, case, dtype, layout, gradients, lacks)
    try:
        return trial.run(seed)
    except NotApplicableError as reason:
        return Outcome("not-applicable", str(reason))
    except _FaultError as fault:
        return Outcome("failed", str(fault), trial.ratios, trial.results, fault.wrong)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), trial.ratios)


class _Trial:
    def __init__(
        self, subject: Subject, case: Case, dtype: str, layout: str, gradients: str | None,
        lacks: frozenset[str] | None,
    ) -> None:  # fmt: skip
        self.subject, self.lane, self.case = subject, subject.lane, case
        self.dtype, self.layout, self.gradients = dtype, layout, gradients
        self.given: dict[str, Any] = {}
        self.ratios: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self.lacks = lacking_of(case, subject) if lacks is None else lacks

    def run(self, seed: int) -> Outcome:
        has = self.subject.capabilities
        given = self.case.inputs(self.dtype, seed)
        inputs = in_layout(adapted(given, self.lacks), self.layout)
        if self.layout not in self.subject.layouts and inputs.q.ndim > 2:
            raise NotApplicableError(f"it takes {' and '.join(self.subject.layouts)} alone")
        if "isolation" in self.case.needs and has.isolation == "unseen":
            raise NotApplicableError(f"declares isolation={has.isolation!r}")
        if self.gradients is not None and self.gradients not in self.subject.ways:
            if self.subject.refuses:
                raise NotApplicableError(f"{self.lane.name} has no differentiation of its own")
            self.gradients = None
        args = marshal(inputs, self.lane)
        self.given = marshal_options(self.case.options, self.lane)
        before = args.snapshot(self.lane)
        lacks = self._lacks(inputs)
        if lacks:
            return self._refuses(lambda: self._attention(args), lacks)
        expected = expectation(self.case, self.dtype, self.layout, seed, has.scores, self.lacks)
        self._forward(args, expected)
        lacks = self._lacks_gradient(inputs)
        if self.gradients is not None and not lacks:
            self._backward(args, inputs, expected)
        for name, array in args.arrays(self.lane):
            new, old = np.asarray(self.lane.to_numpy(array)), before[name]
            self._require(same_bytes(new, old), f"{name} was written to (S1.4)")
        told = ""
        if self.gradients == "vjp" and lacks:
            refused = self._refuses(lambda: self._vjp(args, inputs), lacks)
            if not refused.ok or self.case.profile == "gradients":
                return refused
            told = f"outputs alone; refused: {refused.detail}"
        return Outcome("passed", told, self.ratios, self.results)

    # What the subject declares

    def _lacks(self, inputs: Inputs) -> list[str]:
        has, options = self.subject.capabilities, self.case.options
        said = isinstance(inputs.bias, Alibi)
        wanted = {
            "gqa": _heads(inputs.q, self.layout) != _heads(inputs.k, self.layout),
            "bias": inputs.bias is not None and not said,
            "alibi": said,
            "softcap": options.get("softcap") is not None,
            "sinks": inputs.sinks is not None,
            "dropout": drops(options.get("dropout")), "scale": options.get("scale") is not None,
        }  # fmt: skip
        lacks = [name for name, asked in wanted.items() if asked and not getattr(has, name)]
        lacks += [] if self.dtype in has.dtypes else [self.dtype]
        lacks += sorted(_mask_kinds(inputs.mask, options.get("causal", False)) - has.masks)
        size = max(inputs.q.shape[-1], inputs.v.shape[-1])
        if has.max_head_size is not None and size > has.max_head_size:
            lacks.append("max_head_size")
        return lacks

    def _lacks_gradient(self, inputs: Inputs) -> list[str]:
        has = self.subject.capabilities
        wanted = {
            "gradient": True,
            "bias_gradient": not isinstance(inputs.bias, (Alibi, type(None))),
            "sinks_gradient": inputs.sinks is not None,
            "lse_gradient": inputs.d_lse is not None,
        }
        return [name for name, asked in wanted.items() if asked and not getattr(has, name)]

    def _refuses(self, call: Callable[[], Any], lacks: list[str]) -> Outcome:
        missing = ", ".join(lacks)
        if not self.subject.refuses:
            raise NotApplicableError(f"not supported: {missing}")
        try:
            call()
        except UnsupportedError as error:
            return Outcome("refused", str(error), self.ratios)
        return Outcome("wrongly-accepted", f"undeclared and yet computed: {missing}")

    # What it computes

    def _options(self, args: Arguments) -> dict[str, Any]:
        return {**args.options(), **self.given, "layout": self.layout}

    def _attention(self, args: Arguments, **more: Any) -> Any:
        return self.subject.attention(args.q, args.k, args.v, **self._options(args), **more)

    def _forward(self, args: Arguments, expected: Expectation) -> None:
        for _ in range(2):  # the second time by the plan that was kept, and perhaps a shortcut
            out = self._attention(args)
            self._check("out", out, expected)
        for operand in (args.q, args.k, args.v):
            self._require(not self._shares(out, operand), "out shares memory with an input (S1.4)")
        if self.subject.capabilities.lse:
            out, lse = self._pair(self._attention(args, return_lse=True))
            self._check("out", out, expected)
            self._check("lse", lse, expected)
        if self.subject.capabilities.deterministic:
            again = self.lane.to_numpy(self._attention(args, return_lse=True)[0])
            same = same_bytes(np.asarray(again), np.asarray(self.lane.to_numpy(out)))
            self._require(same, "two runs differ, though declared deterministic")
        if "weights" in self.case.compare and self.subject.has_weights:
            options = {n: x for n, x in self._options(args).items() if n != "dropout"}  # S2.5
            weights = self.subject.attention_weights(args.q, args.k, **options)
            self._check("weights", weights, expected)

    def _pair(self, made: Any) -> Any:
        right = isinstance(made, (tuple, list)) and len(made) == 2
        told = f"return_lse=True gave a {type(made).__name__}, expected a pair (out, lse) (S2.2)"
        self._require(right, told)
        return made

    def _backward(self, args: Arguments, inputs: Inputs, expected: Expectation) -> None:
        gradient = self._vjp if self.gradients == "vjp" else self._own
        outputs, grads = gradient(args, inputs)
        self._check("out", outputs[0], expected)
        if len(outputs) > 1:
            self._check("lse", outputs[1], expected)
        dtypes = {"bias": inputs.bias, "sinks": inputs.sinks}
        for name, grad in grads.items():
            like = dtypes.get(name)
            dtype = self.dtype if like is None else like.dtype.name
            self._check(f"d{name}", grad, expected, dtype)

    def _vjp(self, args: Arguments, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with_lse = inputs.d_lse is not None
        options = self._options(args) | ({"return_lse": True} if with_lse else {})
        made, pullback = self.subject.attention_vjp(args.q, args.k, args.v, **options)
        grads = pullback(args.d_out, args.d_lse) if with_lse else pullback(args.d_out)
        if not isinstance(grads, Gradients):
            kind = type(grads).__name__
            expected = "attnx.plugin.Gradients(q, k, v, bias, sinks)"
            raise _FaultError(f"the pullback gave a {kind}, expected {expected} (S6.1)")
        for name, grad in grads._asdict().items():
            absent = isinstance(getattr(args, name), (Alibi, type(None)))
            told = "is given for what was not there" if absent else "is missing"
            self._require((grad is None) == absent, f"the gradient of {name} {told} (S6.1)")
        given = {name: grad for name, grad in grads._asdict().items() if grad is not None}
        return (made if with_lse else (made,)), given

    def _own(self, args: Arguments, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with_lse = inputs.d_lse is not None
        names = [
            name for name in ("q", "k", "v", "bias", "sinks")
            if not isinstance(getattr(args, name), (Alibi, type(None)))
        ]  # fmt: skip
        rest = {name: x for name, x in self._options(args).items() if name not in names}
        lse = {"return_lse": True} if with_lse else {}

        def fn(*arrays: Any) -> tuple[Any, ...]:
            given = dict(zip(names, arrays, strict=True))
            q, k, v = (given.pop(name) for name in ("q", "k", "v"))
            made = self.subject.attention(q, k, v, **given, **rest, **lse)
            return tuple(made) if with_lse else (made,)

        cotangents = (args.d_out, args.d_lse) if with_lse else (args.d_out,)
        differentiate = self.lane.vjp
        if differentiate is None:
            raise NotApplicableError(f"{self.lane.name} has no differentiation of its own")
        made, grads = differentiate(fn, [getattr(args, name) for name in names], cotangents)
        return tuple(made), dict(zip(names, grads, strict=True))

    # What is checked

    def _check(
        self, name: str, array: Any, expected: Expectation, dtype: str | None = None
    ) -> None:
        told = f"{name} is a {type(array).__name__}, expected an array of {self.lane.name} (S1.5)"
        self._require(self.lane.owns(array), told)
        if dtype is None:
            dtype = self.dtype
            if name == "lse":
                dtype = "float64" if dtype == "float64" else "float32"
        got = self.lane.dtype_name(array)
        self._require(got == dtype, f"{name} is {got}, expected {dtype} (S5.1, S2.2, S2.4)")
        if name not in self.case.compare:
            return
        actual = np.asarray(self.lane.to_numpy(array))
        self.results[name] = actual
        judgement = judge(actual, expected.truth(name), expected.limit(name))
        self.ratios[name] = max(self.ratios.get(name, 0.0), judgement.ratio)
        wrong = "" if judgement.ok else judgement.detail
        wrong = wrong or more_than_noise(judgement, dtype)
        wrong = wrong or expected.worse_than_plain(name, actual)
        if wrong:
            raise _FaultError(f"{name} {wrong}", name)

    def _shares(self, a: Any, b: Any) -> bool:
        first, second = (np.asarray(self.lane.to_numpy(x)) for x in (a, b))
        return bool(first.size and second.size and np.may_share_memory(first, second))

    def _require(self, fact: bool, otherwise: str) -> None:
        if not fact:
            raise _FaultError(otherwise)


def drops(dropout: Dropout | None) -> bool:
    """Whether it drops anything: below a lane's worth of p, as with p = 0, it is no dropout."""
    return dropout is not None and dropout.threshold > 0


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
