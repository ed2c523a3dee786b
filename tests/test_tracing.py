"""Observers of plans: one line each in a log, or counts; plans and not calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import plugin, tracing
from attnx._registry import registry
from attnx.errors import ArgumentTypeError, FallbackWarning, UnsupportedError

Marked = Callable[..., Any]
x = np.ones((1, 1, 3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    """`log()`: the lines since the last look; `log_plans` stays registered until the test ends."""
    caplog.set_level(logging.DEBUG, "attnx.plans")
    attnx.register(tracing.log_plans(level=logging.DEBUG))

    def log() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        assert {record.levelno for record in caplog.records} <= {logging.DEBUG}
        caplog.clear()
        return lines

    yield log
    attnx.unregister("log_plans")


def test_each_new_plan_is_one_line(marked: Marked, log: Callable[[], list[str]]) -> None:
    marked("a", 2.0)
    for _ in range(3):
        attnx.attention(x, x, x, causal=True)
    (line,) = log()
    assert line.startswith("numpy float32 cpu D=4 mask=causal[top_left] -> numpy by blas tiles")
    assert line.endswith("(the arrays' own framework)")
    attnx.attention(x, x, x, backend="a", softcap=2.0, return_lse=True)
    assert log() == ["numpy float32 cpu D=4 softcap lse -> a by Marked (backend=)"]
    attnx.attention(x, x, x, backend="torch")
    (line,) = log()
    assert "-> torch by sdpa" in line
    assert "; numpy to torch and back" in line


def test_what_others_name_stays_on_the_line(
    marked: Marked, plug: Callable[..., None], log: Callable[[], list[str]]
) -> None:
    marked("a", 2.0)
    plug("mine", attnx_rank=lambda call, candidates: plugin.Ranking(["a"], "two\nlines"))
    attnx.attention(x, x, x)
    (line,) = log()
    assert line.endswith("(the plugin 'mine': two lines)")


def test_a_logger_that_is_switched_off_costs_no_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "plans of mine")
    written: list[Any] = []
    monkeypatch.setattr(tracing, "describe", written.append)
    attnx.register(tracing.log_plans(logging.getLogger("plans of mine")), "mine")
    attnx.attention(x, x, x)
    attnx.unregister("mine")
    assert (written, caplog.records) == ([], [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logger": 3}, "log_plans: logger: expected a name or a logging.Logger, got int"),
        ({"level": "INFO"}, "log_plans: level: expected an integer such as logging.INFO, got str"),
        ({"level": True}, "got bool"),
    ],
    ids=["logger", "level", "bool"],
)
def test_wrong_arguments_are_refused_at_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        tracing.log_plans(**given)


def test_a_class_in_short_leaves_out_the_usual() -> None:
    q, k, v = np.ones((1, 5, 4, 8)), np.ones((1, 7, 2, 8)), np.ones((1, 7, 2, 3))
    said = attnx.explain(
        q, k, v, layout="bshd", bias=np.zeros((5, 7)), gradient=True, assume_finite=True
    )  # fmt: skip
    assert tracing.short(said.call) == (
        "numpy float64 cpu D=8 Dv=3 grouped Lq!=Lk bshd gradient=vjp bias assume_finite"
    )


def test_plans_are_counted_by_who_and_how(marked: Marked) -> None:
    marked("cannot", 2.0, (NO,))
    with tracing.counting() as counts:
        for _ in range(3):
            attnx.attention(x, x, x)
            attnx.attention(x, x, x, backend=["cannot", "torch"])
            with attnx.use_backend("cannot", fallback="allow"):
                attnx.attention(x, x, x)
        with pytest.raises(UnsupportedError):
            attnx.attention(x, x, x, backend="cannot")
        found = counts.snapshot()
    assert found["plans"] == 3
    assert found["backends"] == {"numpy": 2, "torch": 1}
    assert found["exchanges"] == {"numpy to torch": 1}
    assert found["passed_over"] == {"cannot": 2}
    assert found["fallbacks"] == {"numpy": 1}
    assert found["whys"] == {
        "the arrays' own framework": 1, "backend=": 1, "fallback from use_backend": 1
    }  # fmt: skip
    assert sum(found["routes"].values()) == 3
    attnx.attention(x, x, x, softcap=2.0)
    assert counts.snapshot() == found
    counts.reset()
    assert counts.snapshot()["plans"] == 0
    assert counts.snapshot()["backends"] == {}
    assert found["plans"] == 3, "a snapshot does not change"


def test_what_was_planned_before_counts_when_it_is_used_again() -> None:
    attnx.attention(x, x, x)
    with tracing.counting() as outer, tracing.counting() as inner:
        attnx.attention(x, x, x)
    assert (outer.snapshot()["plans"], inner.snapshot()["plans"]) == (1, 1)


def test_counting_ends_with_its_block_whatever_happens() -> None:
    before = [name for name, _ in attnx.implementations("attnx_planned")]
    with pytest.raises(ZeroDivisionError), tracing.counting():
        raise ZeroDivisionError
    assert [name for name, _ in attnx.implementations("attnx_planned")] == before


def test_a_fallback_that_warns_is_a_fallback(marked: Marked) -> None:
    marked("cannot", 2.0, (NO,))
    allowed = attnx.use_backend("cannot", fallback="warn")
    with tracing.counting() as counts, allowed, pytest.warns(FallbackWarning):
        attnx.attention(x, x, x)
    assert counts.snapshot()["fallbacks"] == {"numpy": 1}


def test_counts_are_right_under_threads() -> None:
    counters = tracing.Counters()
    explanation = attnx.explain(x, x, x)
    plan = SimpleNamespace(backend="numpy", route="r", reasons={"a": ()})

    def work() -> None:
        for _ in range(500):
            counters.attnx_planned(plan, explanation)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = counters.snapshot()
    assert (found["plans"], found["passed_over"]) == (2000, {"a": 2000})


def test_observers_leave_compiled_programs_alone() -> None:
    before = registry.generation
    with tracing.counting():
        assert registry.generation == before
    assert registry.generation == before
