"""A run: which trials it holds, and that nothing in the code under examination can derail it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import attnx
from attnx.errors import ArgumentError, UnavailableBackend
from attnx.plugin import ArrayBackend, BackendSpec, hookimpl
from attnx_conformance import _pool
from attnx_conformance.results import Result
from attnx_conformance.subject import (
    BackendSubject,
    FunctionSubject,
    Subject,
    function_spec,
    resolve,
)
from attnx_conformance.suite import Selection, examine_all, trials


def function(name: str, *supports: str, isolation: str = "none") -> Subject:
    return resolve(
        function_spec(
            f"tests.conformance.kernels:{name}", framework="numpy", layouts=("bhsd",),
            dtypes=("float32",), supports=supports, isolation=isolation,
        )
    )  # fmt: skip


def ran(subject: Subject, *cases: str, timeout: float = 60.0, jobs: int = 1) -> dict[str, Result]:
    found: dict[str, Result] = {}
    planned = trials(subject, Selection(cases=cases))
    examine_all(
        subject, planned, jobs=jobs, timeout=timeout, on_result=lambda r: found.update({r.case: r})
    )
    return found


def test_levels_hold_more_and_more() -> None:
    """Every case once, a sample of them, or all there is to vary."""
    subject = BackendSubject("numpy")
    quick, standard, full = (
        trials(subject, Selection(level)) for level in ("quick", "standard", "full")
    )
    names = [trial.item.name for trial in standard]
    assert len(names) == len(set(names)) > 800
    assert {t.item.name for t in quick} < set(names) == {t.item.name for t in full}
    assert len(quick) < len(standard) / 3 < len(full) / 12
    for level in (quick, standard):
        counts = Counter(trial.dtype for trial in level if trial.item.is_case)
        assert len(counts) == 4
        assert min(counts.values()) > len(level) / 8
        assert {trial.layout for trial in level} == {"bhsd", "bshd"}
    assert {t.item.profile for t in quick} == {t.item.profile for t in standard}


def test_every_class_meets_every_dtype() -> None:
    """Each kind of case, by the first word of its name, comes in each dtype where it is common."""
    seen: dict[str, set[str]] = {}
    for trial in trials(BackendSubject("numpy"), Selection()):
        seen.setdefault(trial.item.name.split("-")[0], set()).add(trial.dtype)
    for word in ("causal", "window", "lengths", "bool", "bias", "gradient", "segments", "sinks"):
        assert len(seen[word]) == 4, word


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(cases=("causall",)), "no case 'causall'; did you mean causal"),
        (Selection(profiles=("mask",)), "no profile 'mask'; did you mean masks?"),
        (Selection(level="all"), "no level 'all'"), (Selection(dtypes=("fp16",)), "no dtype"),
        (Selection(layouts=("sbhd",)), "did you mean bshd, bhsd"),
        (Selection(ways=("jvp",)), "did you mean vjp"),
        (Selection(cases=("zzz-*",)), "no case 'zzz-.*'"),
    ],
    ids=["case", "profile", "level", "dtype", "layout", "way", "pattern"],
)  # fmt: skip
def test_an_unknown_name_lists_the_near_ones(selection: Selection, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        trials(BackendSubject("numpy"), selection)


def test_a_backend_is_examined_in_workers_and_its_work_is_witnessed() -> None:
    subject, found = BackendSubject("numpy"), []
    planned = trials(
        subject, Selection(cases=("self", "causal", "gradient-ones"), dtypes=("float16",))
    )
    route: dict[str, Any] = {}
    examine_all(subject, planned, jobs=2, on_result=found.append, on_route=route.update)
    assert [r.verdict for r in found] == ["passed"] * 3
    assert all(r.ratios["out"] > 0 for r in found)
    assert {"apply", "forward", "backward", "weights"} <= set(route["calls"])
    assert route["ledger"]["dtype"] == ["float16"]
    assert "causal[top_left]" in route["ledger"]["mask"]


def test_workers_take_turns_and_what_each_saw_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a framework compiled stay mapped into memory as long as a process lives."""
    started: list[object] = []

    class Counted(_pool._Worker):
        def __init__(self, *given: Any) -> None:
            started.append(self)
            super().__init__(*given)

    monkeypatch.setattr(_pool, "_Worker", Counted)
    monkeypatch.setattr(_pool, "TOUR", 2)
    found: list[Result] = []
    route: dict[str, Any] = {}
    subject = BackendSubject("numpy")
    planned = trials(subject, Selection(cases=("self", "cross", "one-key"), layouts=("bhsd",)))
    examine_all(subject, planned, jobs=1, on_result=found.append, on_route=route.update)
    assert [r.verdict for r in found] == ["passed"] * len(planned)
    assert len(started) == -(-len(planned) // 2)
    assert route["calls"]["apply"] >= len(planned)


def test_a_crash_is_a_verdict_on_its_case_and_the_run_goes_on() -> None:
    found = ran(function("crashes"), "one-key", "self", "cross")
    assert found["one-key"].verdict == "crashed"
    assert found["one-key"].detail == "the process was killed by SIGSEGV"
    assert found["self"].verdict == found["cross"].verdict == "passed"


def test_an_exit_is_a_crash() -> None:
    found = ran(function("exits"), "self", "cross")
    assert {r.detail for r in found.values()} == {"the process ended with status 7"}


def test_a_hang_is_a_crash_and_the_run_goes_on() -> None:
    found = ran(function("hangs"), "one-key", "self", timeout=3.0)
    assert found["one-key"].verdict == "crashed"
    assert found["one-key"].detail == "no answer in 3 s"
    assert found["self"].verdict == "passed"


def test_what_it_prints_is_no_answer() -> None:
    assert ran(function("noisy"), "self")["self"].verdict == "passed"


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("raises", "crashed", "ZeroDivisionError: in the kernel"),
        ("wrong_dtype", "failed", "out is float64, expected float32"),
        ("wrong_shape", "failed", "out shape (2, 3, 9), expected (2, 3, 9, 8)"),
        ("gives_a_list", "failed", "out is a list, expected an array of numpy (S1.5)"),
    ],
)
def test_a_wrong_result_is_told_what_was_expected(name: str, verdict: str, said: str) -> None:
    result = ran(function(name), "self")["self"]
    assert result.verdict == verdict
    assert said in result.detail


def test_what_it_reads_is_not_what_it_is_asked() -> None:
    """Tasks do not come by the standard input of the code under examination."""
    assert ran(function("reads"), "self", "cross")["cross"].verdict == "passed"


def test_the_last_words_of_a_crash_are_kept() -> None:
    """And the profile of nothing is no success."""
    told = ran(function("aborts"), "self")["self"]
    assert told.verdict == "crashed"
    assert told.detail.splitlines() == ["the process ended with status 3", "an assertion failed"]


def test_a_subject_may_stand_in_a_module() -> None:
    subject = resolve("function:tests.conformance.kernels:SUBJECT")
    assert ran(subject, "self")["self"].verdict == "passed"
    assert subject.target == "--function tests.conformance.kernels:SUBJECT"


def test_an_empty_selection_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"nothing to run for numpy: .* low-precision alone"):
        trials(BackendSubject("numpy"), Selection(profiles=("masks",), dtypes=("float16",)))


def test_a_run_that_is_left_ends_its_workers() -> None:
    """An interrupt in the middle leaves no process behind."""
    subject, seen = function("hangs"), []

    def stop(result: Result) -> None:
        seen.append(result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine_all(
            subject, trials(subject, Selection(cases=("self", "one-key"))), on_result=stop,
            timeout=600.0,
        )  # fmt: skip
    assert [r.case for r in seen] == ["self"]


def test_a_run_that_is_left_tells_the_route_so_far() -> None:
    subject, route = BackendSubject("numpy"), {}

    def stop(result: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine_all(
            subject, trials(subject, Selection(cases=("self", "causal-65"))), on_result=stop,
            on_route=route.update,
        )  # fmt: skip
    assert route["calls"]["apply"] > 0


def test_a_worker_that_cannot_start_is_an_error_and_not_a_verdict() -> None:
    subject = FunctionSubject(lambda q, k, v: v, spec="function:tests.conformance.kernels:nobody")
    with pytest.raises(UnavailableBackend, match="nobody"):
        examine_all(subject, trials(subject, Selection(cases=("self",))))


class Handing(ArrayBackend):
    """A backend that lets another do its work."""

    def __init__(self) -> None:
        numpy = attnx.get_backend("numpy")
        super().__init__("handing", numpy.lane, numpy.capabilities)


def test_a_backend_that_is_never_reached_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1.5, and the proof of route: the name in the call is not trusted."""
    from attnx_conformance._worker import trial

    class Plugin:
        @hookimpl
        def attnx_backends(self) -> list[BackendSpec]:
            return [BackendSpec("handing", Handing, framework="numpy")]

    attnx.register(Plugin(), "handing")
    try:
        subject = BackendSubject("handing")
        right = subject.attention
        with subject.watched() as witness:
            assert (
                trial(subject, witness, "self", "float32", "bhsd", None, 0)["verdict"] == "passed"
            )
        monkeypatch.setattr(attnx, "attention", lambda *a, backend, **o: right_numpy(*a, **o))
        monkeypatch.setattr(attnx, "attention_weights", lambda *a, backend, **o: weights(*a, **o))
        with subject.watched() as witness:
            told = trial(subject, witness, "self", "float32", "bhsd", None, 0)
        assert right is not None
        assert told["verdict"] == "failed"
        assert "nothing reached the backend 'handing'" in told["detail"]
    finally:
        attnx.unregister("handing")


right_attention, right_weights = attnx.attention, attnx.attention_weights


def right_numpy(*arrays: Any, **options: Any) -> Any:
    return right_attention(*arrays, **options, backend="numpy")


def weights(*arrays: Any, **options: Any) -> Any:
    return right_weights(*arrays, **options, backend="numpy")
