"""The suite catches planted faults, and accuses no correct kernel.

The whole matrix is `attnx conformance --self-test`; here stands a sample of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnx_conformance import selftest
from attnx_conformance.cases import find as case
from attnx_conformance.faults import CONTROLS, FAULTS, Fault, find
from attnx_conformance.runner import examine
from attnx_conformance.selftest import alarms, matrix, trials
from attnx_conformance.subject import FunctionSubject, resolve

LOW = [fault for fault in FAULTS if fault.kind == "numerics"][::6]
# Tiles of 128 need cases that are too dear here.
SAMPLE = [f for f in FAULTS if f.kind != "numerics" and not f.name.endswith("-of-128")][::6]
SMALL = 10_000
PEACEFUL = (
    "grouped", "edge-127x129", "causal-bottom-right-wide", "lengths-with-zero-nan",
    "bias-everything", "sinks-empty-rows", "numbers-peaked", "numbers-300-both-ways",
    "live-key-infinite-causal", "gradient-softcap-everything", "none-keys", "one-head-2d",
    "dropout-everything-wide",
)  # fmt: skip


def small(*dtypes: str) -> Any:
    return [trial for trial in trials(dtypes=dtypes) if trial.case.scores <= SMALL]


def test_there_are_enough_faults() -> None:
    """At least 120, each with a name of its own, and ten correct variants."""
    names = [fault.name for fault in (*FAULTS, *CONTROLS)]
    assert len(FAULTS) >= 120
    assert len(CONTROLS) >= 10
    assert len(set(names)) == len(names)


def test_every_fault_changes_something() -> None:
    """None is a copy of the kernel, and each names methods that the kernel has."""
    for fault in FAULTS:
        assert fault.change, fault.name
        fault.kernel()
    changes = [tuple(sorted((n, id(x)) for n, x in fault.change.items())) for fault in FAULTS]
    assert len(set(changes)) == len(changes)


def test_a_change_of_no_method_is_an_error() -> None:
    """A fault that replaces nothing would pass every case, and look like a hole of the suite."""
    with pytest.raises(AttributeError, match="changes scaleof, which no kernel has"):
        Fault("typo", "scale", "", {"scaleof": None}).kernel()


@pytest.mark.parametrize("kind", sorted({fault.kind for fault in SAMPLE}))
def test_a_sample_is_caught_twice(kind: str) -> None:
    """Two different cases each, among small ones in one or two dtypes."""
    chosen = [fault for fault in SAMPLE if fault.kind == kind]
    for name, catches in matrix(chosen, small("float32", "bfloat16")).items():
        assert len({catch.trial.case.name for catch in catches}) >= 2, name


def test_a_sample_of_precision_faults_is_caught_twice() -> None:
    """These stand in some dtypes alone."""
    for name, catches in matrix(LOW, small("float16", "float64", "bfloat16", "float32")).items():
        assert len({catch.trial.case.name for catch in catches}) >= 2, name


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_correct_variant_is_not_accused(control: Fault) -> None:
    """Whatever its tiles, its order of sums and its rounding of weights."""
    among = trials([case(name) for name in PEACEFUL], ("float16", "float32"))
    raised = alarms([control], among)[control.name]
    assert [f"{catch.trial}: {catch.outcome.detail}" for catch in raised] == []


def test_a_crash_is_not_a_catch() -> None:
    """A fault that cannot run proves nothing."""

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        matrix([Fault("broken", "scale", "", {"scale_of": broken})], small("float32"))


def test_the_search_stops_when_a_fault_is_settled() -> None:
    """Two catches by default; every one of them when asked."""
    few = [trial for trial in small("float32") if trial.case.name.startswith("scale-")]
    fault = find("scale-given-ignored")
    assert len(matrix([fault], few)[fault.name]) == 2
    assert len(matrix([fault], few, stop=None)[fault.name]) > 2


@pytest.mark.parametrize("name", ["mask-dropped", "layout-keys-reshaped", "as-it-is"])
def test_a_subject_is_found_by_its_spec(name: str) -> None:
    """So that a worker process can make it again."""
    subject = find(name).subject()
    again = resolve(subject.spec)
    assert isinstance(again, FunctionSubject)
    assert (again.name, again.layouts) == (subject.name, subject.layouts)


def test_a_subject_takes_the_layout_asked_for() -> None:
    """The kernel knows both; a subject declares one."""
    subject = resolve(find("as-it-is").subject("bshd").spec)
    assert subject.layouts == ("bshd",)
    assert examine(case("grouped"), subject, "float32", layout="bshd").verdict == "passed"


def test_unknown_names() -> None:
    """Neither a fault nor an attribute."""
    import attnx_conformance.faults as module

    with pytest.raises(KeyError):
        find("no-such-fault")
    with pytest.raises(AttributeError, match="no planted fault is called no_such_fault"):
        _ = module.no_such_fault


def test_the_correct_kernel_leaves_its_inputs() -> None:
    """A control that wrote to its inputs would hide what the faults of conduct do."""
    q = np.ones((1, 2, 3, 4), np.float32)
    find("as-it-is").kernel().attention(q, q, q, causal=True)
    assert (q == 1).all()


def test_the_whole_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run in processes of their own, and none is lost."""
    some = FAULTS[:: len(FAULTS) // 3]
    monkeypatch.setattr(selftest, "FAULTS", some)
    monkeypatch.setattr(selftest, "CONTROLS", ())
    monkeypatch.setattr(selftest, "PART", 2)
    seen: list[tuple[int, int]] = []
    made = selftest.in_parts(2, on_part=lambda done, parts: seen.append((done, parts)))
    assert set(made.caught) == set(some)
    assert all(len(names) >= 2 for names in made.caught.values())
    assert made.ok
    assert seen == [(n + 1, -(-len(some) // 2)) for n in range(-(-len(some) // 2))]


def test_a_fault_that_is_missed_or_a_control_that_is_accused_is_no_success() -> None:
    fault = FAULTS[0]
    assert not selftest.SelfTest({fault: ("self",)}, {}).ok
    assert not selftest.SelfTest({fault: ("self", "self")}, {}).ok
    assert not selftest.SelfTest({fault: ("self", "cross")}, {"exp2": ("self float32",)}).ok
    assert selftest.SelfTest({fault: ("self", "cross")}, {"exp2": ()}).ok
