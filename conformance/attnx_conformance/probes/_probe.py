"""What a probe is: a property of a subject that no single call's inputs and outputs can show.

A case says what goes in, and the oracle what comes out. Some promises are of another kind: two
calls agree, eight threads do not meet, memory does not grow with the square, a wrong call is
refused before anything runs. Each is one function of a `Kit`, and every subject runs them all.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

from attnx_conformance._marshal import NotApplicableError
from attnx_conformance.cases import DTYPES
from attnx_conformance.runner import Outcome
from attnx_conformance.subject import Subject

from ._kit import FaultError, Kit

__all__ = ["Probe", "examine_probe"]


@dataclass(frozen=True, eq=False)
class Probe:
    """One property that every subject must have, as far as it declares what the property needs.

    Attributes:
        name: unique among probes and cases, with words joined by hyphens.
        clauses: the clauses of the specification that it guards.
        profile: as of a `Case`.
        check: raises where the property does not hold.
        needs: fields of `Capabilities` that must be set; "weights", "isolation" (full) and
            "framework" (the framework's own differentiation) and "memory" beside them.
        ids: faults of the wild that it would have caught (`O1`, `K4`).
        dtypes: those that it makes sense for.
    """

    name: str
    clauses: tuple[str, ...]
    profile: str
    check: Callable[[Kit], None]
    _: KW_ONLY
    needs: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES


def examine_probe(
    probe: Probe, subject: Subject, dtype: str, *, seed: int = 0, layout: str = "bhsd"
) -> Outcome:
    """Run a probe on a subject, with arrays of the subject's framework.

    Args:
        probe: the probe.
        subject: what is examined.
        dtype: of q, k and v.
        seed: of the inputs.
        layout: "bhsd" or "bshd".
    """
    name = zlib.crc32(probe.name.encode())
    rng = np.random.default_rng((seed, name, DTYPES.index(dtype)))
    kit = Kit(subject, dtype, rng, layout)
    try:
        _applies(probe, subject, dtype, layout)
        probe.check(kit)
    except NotApplicableError as reason:
        return Outcome("not-applicable", str(reason))
    except FaultError as fault:
        return Outcome("failed", str(fault), kit.ratios)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), kit.ratios)
    return Outcome("passed", "", kit.ratios)


def _applies(probe: Probe, subject: Subject, dtype: str, layout: str) -> None:
    has = subject.capabilities
    special = {
        "weights": subject.has_weights,
        "isolation": has.isolation == "full",
        "gradient": has.gradient and bool(subject.ways),
        "framework": "framework" in subject.ways,
        "memory": subject.linear_memory,
    }
    facts = {
        dtype: dtype in has.dtypes,
        f"layout {layout}": layout in subject.layouts,
    } | {need: special.get(need, getattr(has, need, False)) for need in probe.needs}
    lacks = [name for name, fact in facts.items() if not fact]
    if lacks:
        raise NotApplicableError(f"not declared: {', '.join(lacks)}")
    if dtype not in probe.dtypes:
        raise NotApplicableError(f"asked in {', '.join(probe.dtypes)} alone")
