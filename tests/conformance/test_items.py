"""What can be run by its name: our cases, ONNX's, and those that plugins have of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.kernels import naive

import attnx
from attnx.errors import ArgumentError
from attnx.plugin import hookimpl
from attnx_conformance import _items, onnx_cases
from attnx_conformance.cases import Case, Recipe
from attnx_conformance.cases._edits import scaled
from attnx_conformance.deviations import load
from attnx_conformance.results import Report, profiles
from attnx_conformance.subject import BackendSubject, FunctionSubject
from attnx_conformance.suite import Selection, trials

OWN = Case(
    "mine-large-queries", ("S5.3",), "numerics", Recipe(edits=(scaled(q=30.0),)), {"scale": 0.5}
)
NUMPY = BackendSubject("numpy")


class Plugin:
    """One that has cases for the NumPy backend."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    @hookimpl
    def attnx_conformance_cases(self, backend: str) -> Any:
        return self.answer() if backend == "numpy" else []


@pytest.fixture
def plug() -> Iterator[Callable[[Callable[[], Any]], None]]:
    attnx.backends()

    def plug(answer: Callable[[], Any]) -> None:
        attnx.register(Plugin(answer), "with-cases")

    yield plug
    attnx.unregister("with-cases")


# A plugin's own cases ----------------------------------------------------------------------------


def test_a_plugins_cases_are_run_beside_ours_on_the_backend_they_are_for(plug: Any) -> None:
    plug(lambda: [OWN])
    names = {trial.item.name for trial in trials(NUMPY, Selection())}
    assert OWN.name in names
    assert {"self", "causal-65", "shares-no-memory"} & names
    (trial,) = trials(NUMPY, Selection(cases=("mine-*",)))
    assert trial.task.profile in ("numerics", "low-precision")
    got = trial.item.examine(NUMPY, "float32", "bhsd", "vjp", 0)
    assert got.verdict == "passed"
    assert got.ratios["dq"] > 0
    function = FunctionSubject(naive, supports=("mask", "scale"))
    assert OWN.name not in {trial.item.name for trial in trials(function, Selection())}


def test_a_near_name_and_a_deviation_may_be_a_plugins(plug: Any, tmp_path: Path) -> None:
    plug(lambda: [OWN])
    with pytest.raises(ArgumentError, match="did you mean mine-large-queries"):
        trials(NUMPY, Selection(cases=("mine-large-query",)))
    known = tmp_path / "known.toml"
    known.write_text('[[deviation]]\ncase = "mine-*"\nreason = "why"\nlink = "https://a.b"\n')
    assert load(known)[0].case == "mine-*"


def _raises() -> Any:
    raise OSError("its file is missing")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_raises, "'with-cases' failed: OSError: its file is missing"),
        (lambda: ["self"], "expected attnx_conformance.cases.Case, got str"),
        (lambda: [OWN, OWN], "the name 'mine-large-queries' is taken"),
        (lambda: [Case("self", (), "forward", Recipe())], "the name 'self' is taken"),
        (lambda: [Case("onnx-mine", (), "forward", Recipe())], "'onnx-mine' is taken"),
        (lambda: [Case("mine", (), "fast", Recipe())], "mine: no profile 'fast'"),
        (lambda: [Case("mine", (), "low-precision", Recipe())], "no profile 'low-precision'"),
    ],
    ids=["raises", "text", "twice", "ours", "onnx", "profile", "low"],
)
def test_a_plugin_that_gives_no_cases_of_its_own_is_an_error(
    plug: Any, answer: Callable[[], Any], said: str
) -> None:
    """Never fewer cases than there are: that would be a verdict too good."""
    plug(answer)
    with pytest.raises(ArgumentError) as caught:
        trials(NUMPY, Selection())
    assert said in str(caught.value)


def test_a_hook_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"hook: expected one of attnx_backends, .*, got 'x'"):
        attnx.implementations("x")


# ONNX's cases ------------------------------------------------------------------------------------


def test_onnx_cases_are_trials_of_a_profile_of_their_own() -> None:
    pytest.importorskip("onnx")
    found = trials(NUMPY, Selection(profiles=("onnx",)))
    assert len(found) == len(onnx_cases.cases()) == 93
    assert {trial.task.profile for trial in found} == {"onnx"}
    assert {trial.dtype for trial in found} >= {"float16", "float32"}
    assert {trial.layout for trial in found} == {"bhsd", "bshd"}
    low = trials(NUMPY, Selection(profiles=("low-precision",)))
    assert not any(trial.item.name.startswith("onnx-") for trial in low)
    (one,) = trials(NUMPY, Selection(cases=("onnx-4d-gqa",)))
    assert one.item.source.name == "test_attention_4d_gqa"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_an_onnx_case_runs_in_either_layout(layout: str) -> None:
    pytest.importorskip("onnx")
    for name in ("onnx-3d", "onnx-4d-gqa", "onnx-4d-with-past-and-present"):
        asked: list[str] = []

        def kernel(q: Any, k: Any, v: Any, *, asked: list[str] = asked, **options: Any) -> Any:
            asked.append(options["layout"])
            return attnx.attention(q, k, v, **options)

        features = ("causal", "mask", "bias", "scale", "softcap", "gqa", "lse")
        subject = FunctionSubject(kernel, layout=("bhsd", "bshd"), supports=features)
        assert _items.find(name).examine(subject, "float32", layout, None, 0).verdict == "passed"
        assert asked == [layout]


def test_without_onnx_a_run_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("install it")

    monkeypatch.setattr(onnx_cases, "cases", missing)
    _items._onnx.cache_clear()
    try:
        assert Selection().absent() == {"onnx": "install it"}
        assert Selection(profiles=("masks",)).absent() == Selection(cases=("self",)).absent() == {}
        assert not any(t.item.name.startswith("onnx-") for t in trials(NUMPY, Selection()))
        with pytest.raises(ArgumentError, match="onnx cannot be run here: install it"):
            trials(NUMPY, Selection(profiles=("onnx",)))
    finally:
        _items._onnx.cache_clear()


def test_no_onnx_case_is_generated_for_a_name_that_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked() -> Any:
        raise AssertionError("generated")

    monkeypatch.setattr(onnx_cases, "cases", asked)
    _items._onnx.cache_clear()
    try:
        assert len(trials(NUMPY, Selection(cases=("self", "causal-*")))) > 2
    finally:
        _items._onnx.cache_clear()


def test_a_report_has_the_profile(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from attnx_conformance.checking import check
    from attnx_conformance.html import write

    made: Report = check(
        lambda q, k, v, **options: attnx.attention(q, k, v, **options),
        supports=("causal", "mask", "scale", "softcap", "lse", "gqa", "bias"),
        cases=("onnx-4d*",),
    )
    ((_, counts),) = profiles(made.results).items()
    assert counts["onnx"]["passed"] > 20
    assert ">onnx</th>" in write(made, tmp_path / "page.html").read_text("utf-8")
    assert any("golden off the oracle by" in result.detail for result in made.results)
    assert np.isfinite(max(made.results[0].ratios.values()))
