"""A handful of small calls for each backend: whether what it declares is so.

The suite proves a backend in minutes; this finds in seconds the option that does not work here and
now. Cases of the suite that ask for many options at once are tried first, because a call may have
to be compiled. What such a case needs is read off its inputs; where one fails, each of its options
is tried alone, so that the record names it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import attnx
from attnx import Record
from attnx._registry import registry
from attnx.plugin import MASK_KINDS, Alibi, CallClass, mask_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from attnx.plugin import Capabilities
    from attnx_conformance.cases import Case
    from attnx_conformance.runner import Outcome

__all__ = ["ask_hooks", "try_backend"]

PLAIN = "self"
BROAD = (
    "gradient-sinks-sum", "gradient-out-alone-bias", "dropout-half", "triple-softcap",
    "triple-segments-causal-starts", "and-or-not", "bool-2d-nan", "blocks", "not-predicate",
    "window-positions", "alibi-top-left",
)  # fmt: skip
"""Cases that ask for much; a backend is tried on those of which it declares everything."""

SINGLE = {
    "lse": "cross", "gqa": "grouped", "bias": "bias-2d", "alibi": "alibi-top-left",
    "scale": "scale-negative", "softcap": "softcap", "sinks": "sinks", "dropout": "dropout-half",
    "lengths": "lengths", "window": "window-left", "dense": "bool-2d", "causal": "causal",
    "starts": "starts", "prefix": "prefix", "segments": "segments", "blocks": "blocks",
    "predicate": "predicate", "positions": "window-positions", "or": "or-windows",
    "not": "not-lengths", "isolation": "lengths-nan", "gradient": "gradient-out-alone",
    "lse_gradient": "gradient-lse-alone", "bias_gradient": "gradient-out-alone-bias",
    "sinks_gradient": "gradient-sinks-sum-out-alone",
}  # fmt: skip
"""By option: the case that asks for it and for little else, of which all stands further up."""

COMPARED = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
NEEDLESS = frozenset({"gqa", "lse", "lse_gradient"})
"""What the suite leaves out of a case's inputs for a backend that does not declare it."""


def ask_hooks(backends: Iterable[str]) -> None:
    """Ask plugins for their cases and an order; the registry keeps a record of one that raises."""
    names = list(backends)
    for _, ask in attnx.implementations("attnx_conformance_cases"):
        for name in names:
            try:
                list(ask(backend=name))
            except Exception:
                break
    for _, ask in attnx.implementations("attnx_rank"):
        for framework in sorted({attnx.get_backend(name).lane.name for name in names}):
            cls = CallClass(framework, "cpu", "float32", 8, 8, grouped=False, square=True)
            candidates = registry.native(framework)
            with suppress(Exception):
                ask(call=cls, candidates=candidates, explaining=True)


def try_backend(name: str) -> tuple[Record, ...]:
    """What a backend declares and does not do: a record each."""
    try:
        return tuple(_trials(name))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included
        registry.fail_backend(name, "a small call ended the trial", error)
        return ()


def _trials(name: str) -> Iterator[Record]:
    trial = _Backend(name)
    elsewhere = trial.elsewhere()
    if elsewhere:
        info = registry.info(name)
        yield Record(
            name, "warning", f"not tried: {elsewhere}", "try it with arrays that lie there",
            info.distribution, registry.owner(name),
        )  # fmt: skip
        return
    plain = trial.run(PLAIN, trial.first)
    if not plain.ok:
        # reasons() and route() come before the call, and are recorded where they raise.
        if not any(r.subject == name and r.status == "failed" for r in registry.records):
            yield trial.record("a plain call fails", plain, PLAIN, trial.first)
        return
    yield from trial.dtypes()
    yield from trial.options()


class _Backend:
    def __init__(self, name: str) -> None:
        from attnx_conformance.cases import DTYPES

        self.name = name
        self.has: Capabilities = attnx.get_backend(name).capabilities
        declared = [dtype for dtype in DTYPES if dtype in self.has.dtypes]
        self.first = "float32" if "float32" in declared or not declared else declared[0]
        self.others = [dtype for dtype in declared if dtype != self.first]

    def elsewhere(self) -> str:
        """Where it computes, if arrays that are made here do not lie there; else ""."""
        import numpy as np

        lane = attnx.get_backend(self.name).lane
        here = lane.device(lane.from_numpy(np.zeros(1, np.float32))).split(":")[0]
        devices = self.has.devices
        if here in devices:
            return ""
        return (
            f"it computes on {', '.join(sorted(devices))}, and {lane.name} makes arrays on {here}"
        )

    def declared(self) -> frozenset[str]:
        """Every option that is declared and has a case."""
        found = {option for option in SINGLE if getattr(self.has, option, False) is True}
        found |= self.has.masks & MASK_KINDS
        found |= {"isolation"} if self.has.isolation == "full" else set()
        without = {"bias": "bias_gradient", "sinks": "sinks_gradient", "lse": "lse_gradient"}
        found -= {gradient for option, gradient in without.items() if option not in found}
        if "gradient" not in found:
            found -= set(without.values())
        return frozenset(found)

    def run(
        self, case: str, dtype: str, *, lse: bool = True, lacks: AbstractSet[str] = frozenset()
    ) -> Outcome:
        """One case; its forward, and its gradient where the case is about gradients.

        Args:
            case: its name.
            dtype: of q, k and v.
            lse: whether lse is asked for as well.
            lacks: what is left out of its inputs, beside what the backend does not declare.
        """
        from attnx_conformance.cases import find
        from attnx_conformance.runner import examine, lacking_of
        from attnx_conformance.subject import BackendSubject

        subject = BackendSubject(self.name)
        # One program less to compile, where one is compiled for each call that differs.
        subject.capabilities = self.has._replace(deterministic=False, lse=self.has.lse and lse)
        found = replace(find(case), compare=COMPARED)
        lacking = lacking_of(found, subject) | lacks
        way = "vjp" if _gradient(found) else None
        return examine(found, subject, dtype, gradients=way, lacks=lacking)

    def dtypes(self) -> Iterator[Record]:
        """A plain call in each dtype."""
        for dtype in self.others:
            found = self.run(PLAIN, dtype, lse=False)
            if not found.ok:
                yield self.record(f"declares the dtype {dtype}, but", found, PLAIN, dtype)

    def options(self) -> Iterator[Record]:
        """Many options at once, and then those by themselves of which nothing is known yet."""
        from attnx_conformance.cases import find

        declared, left, together = self.declared(), set(self.declared()), []
        for case in BROAD:
            needs = _needs(find(case), self.first)
            if needs & left and needs - NEEDLESS <= declared:
                found = self.run(case, self.first, lse="lse" in left)
                if found.ok:
                    left -= needs
                else:
                    together.append((case, needs, found))
        broken: set[str] = set()
        for option, case in SINGLE.items():
            needs = _needs(find(case), self.first) - NEEDLESS
            # What is known to be broken cannot tell of anything else.
            if option in left and needs <= declared and not needs & broken:
                found = self.run(case, self.first, lacks=broken & NEEDLESS)
                if not found.ok:
                    broken.add(option)
                    kind = f"the mask {option}" if option in MASK_KINDS else option
                    yield self.record(f"declares {kind}, but", found, case, self.first)
        for case, needs, found in together:
            if not needs & broken:
                options = ", ".join(sorted(needs & declared))
                yield self.record(f"declares {options}, but together", found, case, self.first)

    def record(self, claim: str, found: Outcome, case: str, dtype: str) -> Record:
        """The record of a trial that failed."""
        info = registry.info(self.name)
        lines = [line for line in found.detail.strip().splitlines() if line.strip()]
        crashed = found.verdict == "crashed" and len(lines) > 1
        told = lines[-1].strip() if lines else found.verdict
        shown = f"attnx conformance {self.name} --case {case} --dtype {dtype} shows it"
        leave = "leave it out of Capabilities, or " if "but" in claim else ""
        remedy = f"{leave}repair it; {shown}"
        detail = f"{claim} {told}" if "but" in claim else f"{claim}: {told}"
        return Record(
            self.name, "failed", detail, remedy,
            info.distribution, registry.owner(self.name), None, found.detail if crashed else "",
        )  # fmt: skip


def _gradient(case: Case) -> bool:
    return case.profile == "gradients"


def _needs(case: Case, dtype: str) -> frozenset[str]:
    """The options that a case asks for."""
    given, options = case.inputs(dtype), case.options
    needs = set(mask_kinds(getattr(given.mask, "structure", None)))
    needs |= {"dense"} if given.mask is not None and not hasattr(given.mask, "structure") else set()
    needs |= {"causal"} if options.get("causal", False) is not False else set()
    needs |= {"softcap"} if options.get("softcap") is not None else set()
    needs |= {"scale"} if options.get("scale") is not None else set()
    needs |= {"dropout"} if options.get("dropout") is not None else set()
    needs |= {"sinks"} if given.sinks is not None else set()
    needs |= {"isolation"} if "isolation" in case.needs else set()
    needs |= {"gqa"} if given.q.ndim > 2 and given.q.shape[-3] != given.k.shape[-3] else set()
    if given.bias is not None:
        needs |= {"alibi"} if isinstance(given.bias, Alibi) else {"bias"}
    if _gradient(case):
        needs |= {f"{option}_gradient" for option in ("bias", "sinks") if option in needs}
        needs |= {"gradient"} | ({"lse_gradient"} if given.d_lse is not None else set())
    return frozenset(needs | {"lse"})
