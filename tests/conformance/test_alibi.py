"""The suite on ALiBi (S2.7): the oracle's own reading, and what becomes of subjects without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import attnx
from attnx import Alibi, Causal, Lengths
from attnx_conformance import vectors
from attnx_conformance.cases import CASES, find
from attnx_conformance.faults import FAULTS
from attnx_conformance.oracle import reference
from attnx_conformance.runner import examine
from attnx_conformance.selftest import matrix, trials
from attnx_conformance.subject import BackendSubject, FunctionSubject

FEATURES = {"alibi", "mask", "scale", "gqa", "softcap", "sinks", "dropout", "lse"}
MINE = [case for case in CASES if case.name.startswith("alibi-") and case.scores <= 10_000]


def by_hand(i: int, j: int, slope: float) -> float:
    return -slope * abs(i - j)


def test_the_oracle_reads_it_by_its_fields() -> None:
    """Element by element, and the bias that it stands for has no gradient."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((1, 2, 3, 4)), rng.standard_normal((1, 2, 5, 4))
    slopes = np.array([0.5, 0.3])
    options = {"bias": Alibi(slopes, "bottom_right"), "mask": Lengths(4) & Causal("bottom_right")}
    found = reference(q, k, k, d_out=q, **options)
    for h in range(2):
        for i in range(3):
            row = [by_hand(i + 4 - 3, j, slopes[h]) for j in range(5)]
            assert found.terms.bias is not None
            np.testing.assert_allclose(found.terms.bias[0, h, i], row, rtol=0, atol=0)
    assert found.dbias is None
    spelled = reference(q, k, k, d_out=q, **(options | {"bias": found.terms.bias}))
    np.testing.assert_array_equal(found.out, spelled.out)
    np.testing.assert_array_equal(found.dq, spelled.dq)


@pytest.mark.parametrize("kind", ["causal", "lengths", "positions"])
def test_a_function_gets_the_object(kind: str) -> None:
    """With arrays of its own framework; without the feature it is not asked."""
    met: list[Any] = []

    def fn(q: Any, k: Any, v: Any, **options: Any) -> Any:
        met.append(options["bias"])
        return attnx.attention(q, k, v, **options)

    knows = FunctionSubject(fn, supports=FEATURES, isolation="full")
    outcome = examine(find(f"alibi-{kind}"), knows, "float32")
    if kind == "lengths":
        assert outcome.verdict == "not-applicable"
        assert "not told the lengths" in outcome.detail
        told = FunctionSubject(fn, supports={*FEATURES, "mask_objects"}, isolation="full")
        assert examine(find(f"alibi-{kind}"), told, "float32").verdict == "passed"
    else:
        assert outcome.verdict == "passed", outcome.detail
    assert all(isinstance(bias, Alibi) for bias in met)
    without = FunctionSubject(fn, supports={*FEATURES, "bias"} - {"alibi"}, isolation="full")
    outcome = examine(find(f"alibi-{kind}"), without, "float32")
    assert (outcome.verdict, outcome.detail) == ("not-applicable", "not supported: alibi")


def test_a_backend_without_it_must_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = attnx.get_backend("numpy")
    lacking = backend.capabilities._replace(alibi=False)
    monkeypatch.setattr(backend, "capabilities", lacking)
    attnx.register(object(), "forget")  # and every plan is made anew
    try:
        outcome = examine(find("alibi-decode"), BackendSubject("numpy"), "float32")
    finally:
        attnx.unregister("forget")
    assert outcome.verdict == "refused"
    assert "bias=Alibi (has arrays)" in outcome.detail


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.kind == "alibi"], ids=lambda fault: fault.name
)
def test_each_fault_is_caught_twice(fault: Any) -> None:
    """Among small cases in float32 alone."""
    caught = matrix([fault], trials(MINE, ("float32",)))[fault.name]
    assert len({catch.trial.case.name for catch in caught}) >= 2


def test_a_file_holds_the_array_that_it_stands_for(tmp_path: Path) -> None:
    """Whoever reads vectors need not know it: the bias is spelled out, and has no gradient."""
    path = vectors.export(tmp_path, [find("alibi-lengths")], ["float16"])
    entry = json.loads(path.read_text("utf-8"))["cases"][0]
    assert "dbias" not in entry["results"]
    bias = load_file(tmp_path / entry["file"])["bias"]
    assert (bias.shape, bias.dtype) == ((2, 6, 9, 70), np.float32)
    slopes = np.float16(2.0 ** -np.array([1.0, 2.0, 3.0, 5.0, 1.5, 4.0])).astype(np.float64)
    expected = [[by_hand(i + shift, 50, slopes[4]) for i in range(9)] for shift in (61, 37)]
    np.testing.assert_array_equal(bias[:, 4, :, 50], expected)
