"""The suite for somebody with one kernel function, or a backend object, and no plugin.

Example:
    >>> import numpy as np
    >>> from attnx_conformance import check
    >>> def kernel(q, k, v, *, mask=None, scale=None):
    ...     s = np.where(mask, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    ...     p = np.exp(s - s.max(axis=-1, keepdims=True))
    ...     return p / p.sum(axis=-1, keepdims=True) @ v
    >>> check(kernel, supports=("mask", "scale"), cases=("self",), dtypes=("float64",))
    Traceback (most recent call last):
        ...
    attnx_conformance.checking.ConformanceError: kernel: 1 of 1 trials went wrong
    crashed: self (S1.1, S2; float64, bhsd): TypeError: ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attnx
from attnx.errors import ArgumentError, UnavailableBackend, UnknownBackend
from attnx.plugin import Backend, BackendSpec, hookimpl

from ._pool import result_of
from ._worker import trial as examine
from .diagnosis import Diagnosis
from .results import Report, Result, unproven, versions
from .subject import BackendSubject, FunctionSubject, Subject, several
from .suite import Selection, Trial, trials

__all__ = ["ConformanceError", "check"]

TOLD = 12
"""Failures that an error tells one by one."""


class ConformanceError(AssertionError):
    """A function is not what it is said to be.

    Attributes:
        report: every result.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def check(
    fn: Callable[..., Any] | Backend,
    *,
    layout: str = "bhsd",
    dtypes: Iterable[str] = (),
    supports: Collection[str] = (),
    framework: str = "numpy",
    vjp: Callable[..., Any] | None = None,
    isolation: str = "full",
    level: str = "standard",
    profiles: Iterable[str] = (),
    cases: Iterable[str] = (),
    seed: int = 0,
    raises: bool = True,
) -> Report:
    """Check a plain function against the specification, in this process; or a backend object.

    Args:
        fn: `fn(q, k, v, **options) -> out`, or `(out, lse)` with `return_lse=True`. It gets only
            the options that `supports` names. Or a `Backend`, such as `plugin.from_function`
            makes, which says itself what it supports: `layout`, `supports`, `framework`, `vjp` and
            `isolation` are then not for it.
        layout: "bhsd" or "bshd", of its arrays.
        dtypes: those that it takes, by default float32; of a backend all that it declares.
        supports: some of "causal", "causal_top_left", "causal_bottom_right", "mask", "bias",
            "scale", "softcap", "sinks", "alibi" (it gets an `attnx.Alibi` as bias), "dropout" (it
            gets an `attnx.Dropout` of integers), "lse", "gqa", "gradients" and "memory" (it grows
            with L alone); "compile", "vmap", "forward_mode" and "higher_order", transforms of its
            framework that it may be seen through; see `FunctionSubject`.
        framework: the name of a registered backend whose arrays it takes.
        vjp: its own pullback maker, as `attnx.attention_vjp`; else the framework differentiates.
        isolation: "full" where a NaN in a position that a row does not see never reaches the row;
            "unseen" where that holds for positions that no row sees; "none".
        level: "quick", "standard" or "full".
        profiles: only these.
        cases: only these names or patterns.
        seed: of every input.
        raises: raise when something is wrong, rather than only say so in the report.

    Returns:
        Every result; `attnx_conformance.html.write` makes a page of it.

    Raises:
        ConformanceError: something that it is said to support is not right, or nothing of what
            is asked for applies to it.
        ArgumentError: an argument is wrong, or the function cannot be called so.
    """
    if isinstance(fn, Backend):
        asked = {"layout": layout != "bhsd", "supports": bool(supports), "vjp": vjp is not None,
                 "framework": framework != "numpy", "isolation": isolation != "full"}  # fmt: skip
        for name in (name for name, given in asked.items() if given):
            raise ArgumentError(f"{name}: expected it of a function alone; a backend declares it")
        with _registered(fn) as subject:
            report = _examined(subject, several(dtypes), level, profiles, cases, seed)
    else:
        subject = FunctionSubject(
            fn, layout=layout, dtypes=several(dtypes) or ("float32",), supports=supports,
            framework=framework, vjp=vjp, isolation=isolation,
        )  # fmt: skip
        report = _examined(subject, (), level, profiles, cases, seed)
    results = report.results
    wrong = [result for result in results if not result.ok]
    if raises and unproven(results):
        told = f"{subject.name}: none of {len(results)} trials applies to what it supports"
        raise ConformanceError(told, report)
    if wrong and raises:
        raise ConformanceError(_told(subject.name, wrong, len(results)), report)
    return report


def _examined(
    subject: Subject, dtypes: tuple[str, ...], level: str, profiles: Iterable[str],
    cases: Iterable[str], seed: int,
) -> Report:  # fmt: skip
    """Every trial, in this process."""
    dtypes = dtypes or tuple(subject.capabilities.dtypes)
    chosen = Selection(level, several(profiles), several(cases), dtypes, (), seed)
    planned = trials(subject, chosen)
    diagnosis = Diagnosis()
    with subject.watched() as witness:
        results = tuple(_run(subject, trial, witness, diagnosis) for trial in planned)
        route = {} if witness is None else witness.notes()
    header = {"subjects": [subject.name], "seed": seed, "level": level, "versions": versions()}
    header |= {"planned": len(planned), "sample": chosen.sample([subject])}
    return Report(header, results, {"route": route})


@contextmanager
def _registered(backend: Backend) -> Iterator[Subject]:
    """A backend object as a registered one, by its name, for as long as it is examined."""
    known: Any = None
    with suppress(UnknownBackend, UnavailableBackend):
        known = attnx.get_backend(backend.name)
    if known is backend:
        yield BackendSubject(backend.name)
        return

    class Plugin:
        @hookimpl
        def attnx_backends(self) -> list[BackendSpec]:
            framework = backend.lane.name
            return [BackendSpec(backend.name, load=lambda: backend, framework=framework)]

    name = f"attnx-conformance-check-{backend.name}"
    attnx.register(Plugin(), name)
    try:
        subject = BackendSubject(backend.name)
        subject.spec = subject.target = ""  # no other process can make it
        yield subject
    finally:
        attnx.unregister(name)


def _run(subject: Subject, trial: Trial, witness: Any, diagnosis: Diagnosis) -> Result:
    task = trial.task
    answer = examine(subject, witness, *task[:5], diagnosis)
    return result_of(task, subject.name, subject.target, answer)


def _told(name: str, wrong: list[Result], count: int) -> str:
    lines = [f"{name}: {len(wrong)} of {count} trials went wrong"]
    for result in wrong[:TOLD]:
        detail = result.detail.strip().splitlines()
        said = detail[-1] if result.verdict == "crashed" and detail else "; ".join(detail)
        where = f"{', '.join(result.clauses)}; {result.dtype}, {result.layout}"
        lines.append(f"{result.verdict}: {result.case} ({where}): {said}")
    if len(wrong) > TOLD:
        lines.append(f"... and {len(wrong) - TOLD} more in .report")
    return "\n".join(lines)
