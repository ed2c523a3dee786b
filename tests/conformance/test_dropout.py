"""Dropout in the suite: who is asked for it, in what form, and what a refusal is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnx
from attnx.plugin import Dropout
from attnx_conformance import ConformanceError, check, diagnosis
from attnx_conformance.cases import find
from attnx_conformance.expectation import expectation
from attnx_conformance.faults import FAULTS
from attnx_conformance.judgement import judge
from attnx_conformance.oracle import reference
from attnx_conformance.probes import examine_probe
from attnx_conformance.probes import find as probe
from attnx_conformance.runner import examine
from attnx_conformance.subject import BackendSubject, FunctionSubject

HALF = find("dropout-half")


class Noted(BackendSubject):
    """A backend that notes the dropout of each call; `deaf`, and it never arrives."""

    def __init__(self, name: str, *, deaf: bool = False) -> None:
        super().__init__(name)
        self.deaf, self.given = deaf, list[Dropout]()

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.given.append(options["dropout"])
        return super().attention(q, k, v, **options | ({"dropout": None} if self.deaf else {}))


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attnx.attention(q, k, v, **options, backend="numpy")


def without(q: Any, k: Any, v: Any, *, dropout: Any = None) -> Any:
    return attention(q, k, v)


def test_a_backend_that_does_not_declare_it_must_refuse(no_dropout: Any) -> None:
    """Refused counts for it; computing without counts against it."""
    subject = Noted("numpy")
    assert not subject.capabilities.dropout
    assert examine(HALF, subject, "float32").verdict == "refused"
    deaf = Noted("numpy", deaf=True)
    got = examine(HALF, deaf, "float32")
    assert (got.verdict, got.detail) == ("wrongly-accepted", "undeclared and yet computed: dropout")


@pytest.mark.parametrize("name", ["dropout-p-zero", "dropout-p-less-than-a-lane"])
def test_a_dropout_that_drops_nothing_needs_no_declaration(no_dropout: Any, name: str) -> None:
    assert examine(find(name), Noted("numpy"), "float32").verdict == "passed"


def test_a_property_of_dropout_is_not_asked_of_who_lacks_it(no_dropout: Any) -> None:
    got = examine_probe(probe("dropout-in-shards"), Noted("numpy"), "float32")
    assert (got.verdict, got.detail) == ("not-applicable", "not declared: dropout")


def test_a_backend_gets_seeds_and_offsets_in_its_own_arrays() -> None:
    """Written in NumPy's, as the cases hold them, they would be of a foreign framework."""
    torch = pytest.importorskip("torch")
    subject = Noted("torch")
    got = examine(find("dropout-offset-in-arrays"), subject, "float32", gradients=None)
    assert got.verdict == "passed", got.detail
    given = subject.given[0]
    assert isinstance(given.seed, torch.Tensor)
    assert given.seed.tolist() == [9, 1]
    assert [int(x) for x in given.offset] == [2, 1, 7, 24]
    assert all(isinstance(x, torch.Tensor) for x in given.offset)


def test_a_function_gets_integers() -> None:
    """Whatever the case is written in; and it is asked only where it says that it takes them."""
    given: list[Dropout] = []

    def fn(q: Any, k: Any, v: Any, *, dropout: Any = None) -> Any:
        given.append(dropout)
        return attention(q, k, v, dropout=dropout)

    cases = ("dropout-half", "dropout-offset-in-arrays")
    report = check(fn, supports=("dropout", "gqa"), cases=cases)
    assert [result.verdict for result in report.results] == ["passed", "passed"]
    assert Dropout(0.5, 5) in given
    assert Dropout(0.5, 9 | 1 << 32, (2, 1, 7, 24)) in given
    assert all(isinstance(x, int) for d in given for x in (d.seed, *d.offset))

    asked = check(attention, supports=("gqa",), cases=cases, raises=False)
    assert {result.verdict for result in asked.results} == {"not-applicable"}


def test_a_function_that_ignores_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [(f.what, f.subject("bhsd")) for f in FAULTS if f.kind == "dropout"][::4]
    monkeypatch.setattr(diagnosis, "_faults", lambda layout: some)
    with pytest.raises(ConformanceError) as caught:
        check(without, supports=("dropout", "gqa"), cases=("dropout-half",))
    assert str(caught.value).startswith(
        "without: 1 of 1 trials went wrong\nfailed: dropout-half (S"
    )
    assert "as if: the option is dropped instead" in str(caught.value)


def test_a_function_must_be_able_to_take_it() -> None:
    with pytest.raises(attnx.errors.ArgumentError, match=r"fn\(q, k, v, dropout=\.\.\.\)"):
        FunctionSubject(lambda q, k, v: v, supports=("dropout",))


@pytest.mark.parametrize("name", ["dropout-half", "dropout-everything", "dropout-p-near-one"])
def test_the_yardstick_of_16_bits_drops_too(name: str) -> None:
    """The plain computation is within the bound, and exactly 0 where everything was dropped."""
    expected = expectation(find(name), "bfloat16", "bhsd", 0, "float32")
    for result in ("out", "dq", "dk", "dv"):
        found = expected.yardstick[result]
        got = judge(found, expected.truth(result), expected.limit(result))
        assert got.ok, (result, got.detail)
    nothing = ~expected.reference.terms.F.any(axis=-1)
    assert not expected.yardstick["out"][nothing].any()


def test_a_case_is_right_for_one_pattern_alone() -> None:
    """Another seed, or a neighbouring offset, is far beyond the bound: the elements are exact."""
    inputs = HALF.inputs("float32")
    expected = expectation(HALF, "float32", "bhsd", 0, "float32")
    for other in (Dropout(0.5, 6), Dropout(0.5, 5, (0, 0, 1, 0)), Dropout(0.5, 5, (0, 0, 0, 8))):
        found = reference(inputs.q, inputs.k, inputs.v, dropout=other).out
        assert judge(found, expected.truth("out"), expected.limit("out")).ratio > 1e3


def test_where_p_is_at_a_lane_the_lane_is_there() -> None:
    """So that a kernel that rounds p, or compares by >, differs in some element."""
    from attnx_conformance._dropout import dropout_factor

    for name in ("dropout-p-one-lane", "dropout-p-at-a-lane", "dropout-p-at-a-low-lane",
                 "dropout-p-at-a-high-lane"):  # fmt: skip
        dropout = find(name).options["dropout"]
        shape = find(name).make.shape.grid.flat
        above = Dropout((dropout.threshold + 1) / 65536, dropout.seed)
        below = Dropout((dropout.threshold - 1) / 65536, dropout.seed)
        kept, more, fewer = (np.count_nonzero(dropout_factor(d, shape)) for d in
                             (dropout, above, below))  # fmt: skip
        assert (fewer > kept) if name.endswith("one-lane") else (kept > more), name
