"""`fastest`: measured once a class on this machine, never where nothing may be computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnx
from attnx import plugin
from attnx._attention import plan_for
from attnx._choice import NOBODY, Choice
from attnx._dispatch import make_plan
from attnx.errors import ArgumentError, ArgumentTypeError, AttnxWarning
from attnx.policies import Measured, fastest
from attnx.policies import _fastest as module
from attnx.policies._timing import interleaved

Marked = Callable[..., Any]
Plug = Callable[..., None]
Ranked = Callable[..., Any]
x = np.ones((1, 1, 3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


def who(q: Any = x, **options: Any) -> float:
    return float(attnx.attention(q, q, q, **options).flat[0])


def notes(**options: Any) -> dict[str, str]:
    """What `explain` says of each beside its route."""
    found = attnx.explain(x, x, x, **options).candidates
    return {c.name: c.note.split("; ")[-1] for c in found}


def test_the_quickest_computes_and_is_measured_once_a_class(
    marked: Marked, ranked: Ranked, plug: Plug
) -> None:
    """At each length, whatever else is asked later; the plans for it are no user's."""
    marked("a", 2.0)
    marked("b", 3.0)
    seen: list[str] = []
    plug("observer", attnx_planned=lambda plan: seen.append(plan.backend))
    policy = ranked("numpy", "a", "b", numpy=3.0, a=2.0, b=1.0)
    for _ in range(3):
        assert who() == 3.0
    assert policy.told.asked == [["a", "b", "numpy"]] * 2
    assert seen == ["b"]
    assert who(backend="a") == 2.0
    assert who(causal=True) == 3.0
    assert len(policy.told.asked) == 4


def test_the_geometric_mean_over_the_lengths_decides() -> None:
    assert Measured("1", (1e-3, 4.0)).mean < Measured("1", (1.0, 1.0)).mean
    assert Measured("1", (), "RuntimeError").mean == float("inf")


def test_what_is_kept_serves_the_next_process(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0)
    ranked("numpy", "a", numpy=2.0, a=1.0)
    assert who() == 2.0
    again = ranked("numpy", "a", numpy=1.0, a=2.0)
    assert who() == 2.0
    assert again.told.asked == []


def test_a_new_candidate_is_measured_beside_the_others(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0)
    marked("b", 3.0)
    ranked("numpy", "a", numpy=2.0, a=1.0)
    assert who() == 2.0
    more = ranked("numpy", "a", "b", numpy=2.0, a=1.0, b=0.5)
    assert who() == 3.0
    assert more.told.asked == [["a", "b", "numpy"]] * 2


def test_a_new_version_is_measured_again(
    marked: Marked, ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked("a", 2.0)
    ranked("numpy", "a", numpy=2.0, a=1.0)
    assert who() == 2.0
    version = module.version
    monkeypatch.setattr(module, "version", lambda name: f"{version(name)}{name == 'a'}")
    again = ranked("numpy", "a", numpy=1.0, a=2.0)
    assert who() == 1.0
    assert len(again.told.asked) == 2


def test_without_names_the_arrays_own_framework_is_measured(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0)
    policy = ranked(numpy=2.0, a=1.0)
    assert who() == 2.0
    assert policy.told.asked[0] == ["a", "numpy"]


def test_explain_shows_what_is_known_and_measures_nothing(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0)
    policy = ranked("numpy", "a", numpy=3e-3, a=1.5e-3)
    said = attnx.explain(x, x, x)
    assert said.choice == "numpy"
    assert said.why == (
        "the plugin 'fastest': not measured yet; the first such call does, or `attnx tune`"
    )
    assert notes()["a"] == "not measured yet"
    assert policy.told.asked == []
    who()
    said = attnx.explain(x, x, x)
    assert (said.choice, said.why) == ("a", "the plugin 'fastest': measured on this machine")
    assert notes()["a"] == "1.5 ms at 16, 1.5 ms at 32 (measured, fastest)"
    assert notes()["numpy"] == "3 ms at 16, 3 ms at 32 (measured, 2x)"
    assert "1.5 ms at 16" in str(said)


def test_a_candidate_that_fails_while_it_is_measured_is_last_and_noted(
    marked: Marked, ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = marked("a", 2.0)

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(backend, "forward", fail)
    ranked("a", "numpy", numpy=3.0)
    assert who() == 1.0
    assert notes()["a"] == "failed while it was measured: MemoryError: no room"


def test_the_arrays_own_framework_is_before_those_that_failed(
    marked: Marked, ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was no candidate: who failed would fail the caller too."""

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room")

    for name in ("a", "b"):
        monkeypatch.setattr(marked(name, 2.0), "forward", fail)
    ranked("a", "b")
    assert who() == 1.0
    assert attnx.explain(x, x, x).choice == "numpy"


def test_a_length_without_room_is_no_error(marked: Marked, tmp_path: Path) -> None:
    marked("a", 2.0)
    policy = fastest("numpy", "a", lengths=(1 << 50,), folder=tmp_path)
    call = attnx.explain(x, x, x).call
    assert policy.tune(call) == {}
    assert "Unable to allocate" in policy.lacking(call)


def test_who_cannot_do_a_class_is_not_measured(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0, (NO,))
    marked("b", 3.0)
    policy = ranked("a", "b", "numpy", b=1.0, numpy=2.0)
    assert who() == 3.0
    assert policy.told.asked[0] == ["b", "numpy"]


def test_one_candidate_alone_is_chosen_unmeasured_and_nobody_is_the_owner(
    marked: Marked, ranked: Ranked
) -> None:
    marked("a", 2.0)
    marked("b", 3.0, (NO,))
    marked("c", 4.0, (NO,))
    assert (ranked("b", "a").told.asked, who()) == ([], 2.0)
    assert attnx.explain(x, x, x).choice == "numpy", "nobody knows before the call"
    assert (ranked("b", "c").told.asked, who()) == ([], 1.0)
    with pytest.warns(AttnxWarning, match="fastest: no backend 'absent' is registered"):
        assert (ranked("absent", "a").told.asked, who()) == ([], 2.0)
    assert attnx.explain(x, x, x).choice == "a"


def test_under_a_transform_what_is_known_is_used_and_nothing_is_measured(
    marked: Marked, ranked: Ranked
) -> None:
    marked("a", 2.0)
    policy = ranked("numpy", "a", numpy=2.0, a=1.0)
    cls = attnx.explain(x, x, x).call
    traced = cls._replace(traced=True)

    def rank(call: plugin.CallClass) -> Any:
        return policy.attnx_rank(call, ["numpy", "a"], False)

    ranking = rank(traced)
    assert (ranking.order, policy.told.asked) == (["numpy"], [])
    assert ranking.why == "not measured, and under a transform nothing is"
    assert plan_for(NOBODY, traced).backend == "numpy"
    who()
    assert rank(traced).order == ["a", "numpy"]
    assert plan_for(NOBODY, traced).backend == "a"
    # A compiler that reads Python tells no head size: 1 stands for it.
    unknown = rank(traced._replace(D=1, Dv=1))
    assert unknown.order == ["a", "numpy"]
    assert unknown.why == "measured at the head sizes that were met"
    policy.told.seconds = {"numpy": 1.0, "a": 2.0}
    policy.tune(cls._replace(D=8, Dv=8))
    assert rank(traced._replace(D=1, Dv=1)).order == ["numpy"], "the sizes do not agree"
    assert rank(traced).order == ["a", "numpy"]


def test_while_it_measures_nobody_measures(marked: Marked, ranked: Ranked) -> None:
    """A backend that calls attention itself gets the order without a policy."""
    marked("a", 2.0)
    inside: list[float] = []

    def measure(runs: Any) -> dict[str, float]:
        inside.append(who(causal=True))
        return dict.fromkeys(runs, 1.0)

    ranked("a", "numpy", measure=measure)
    assert who() == 2.0
    assert inside == [1.0, 1.0]


def test_threads_that_meet_a_class_at_once_measure_it_once(marked: Marked, ranked: Ranked) -> None:
    marked("a", 2.0)
    policy = ranked("numpy", "a", numpy=2.0, a=1.0)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(who())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2.0] * 4
    assert len(policy.told.asked) == 2


def test_a_backend_whose_threads_ask_while_it_is_measured_hangs_nobody(
    marked: Marked, ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread gets the order without a policy, when it has waited long enough."""
    monkeypatch.setattr(module, "WAIT", 0.01)
    inside: list[float] = []

    def measure(runs: Any) -> dict[str, float]:
        thread = threading.Thread(target=lambda: inside.append(who()))
        thread.start()
        thread.join()
        return {"numpy": 2.0, "a": 1.0}

    marked("a", 2.0)
    ranked("numpy", "a", measure=measure)
    with pytest.warns(AttnxWarning, match="another thread has been measuring"):
        assert who() == 2.0
    assert inside == [1.0, 1.0]
    assert who() == 2.0, "the plan of that thread was made anew"


def test_ctrl_c_while_it_measures_ends_the_call_and_keeps_nothing(
    marked: Marked, tmp_path: Path, ranked: Ranked
) -> None:
    marked("a", 2.0)
    times = iter([KeyboardInterrupt, None, None])

    def measure(runs: Any) -> dict[str, float]:
        raised = next(times)
        if raised is not None:
            raise raised
        return {"numpy": 2.0, "a": 1.0}

    ranked("a", "numpy", measure=measure)
    with pytest.raises(KeyboardInterrupt):
        who()
    assert list(tmp_path.rglob("*.json")) == []
    assert who() == 2.0


@pytest.mark.parametrize("seconds", [None, float("nan"), float("inf"), -1.0, "1"])
def test_a_measurement_without_times_is_told_of_and_hides_nobody(
    seconds: Any, marked: Marked, ranked: Ranked, tmp_path: Path
) -> None:
    marked("a", 2.0)
    ranked("a", "numpy", measure=lambda runs: {"numpy": 1.0, "a": seconds})
    with pytest.warns(AttnxWarning, match=f"measure: expected seconds of 'a', got {seconds!r}"):
        assert who() == 1.0
    assert list(tmp_path.rglob("*.json")) == []


def test_a_class_that_cannot_be_made_is_told_of_and_not_tried_again(
    marked: Marked, ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked("a", 2.0)
    tried: list[int] = []

    def make(*arguments: Any) -> Any:
        tried.append(1)
        raise module.CannotBeMade("no such device")

    monkeypatch.setattr(module, "make", make)
    ranked("numpy", "a")
    assert who() == 1.0
    assert who() == 1.0
    said = attnx.explain(x, x, x)
    assert said.why == "the plugin 'fastest': cannot be measured: no such device"
    assert len(tried) == 1


@pytest.mark.parametrize("gradient", [None, "vjp", "framework"])
def test_what_is_timed_has_the_gradient_of_the_class(
    gradient: str | None, tmp_path: Path, plug: Plug
) -> None:
    """By its own framework and by another's, to the end."""
    counted = {"forward": 0, "backward": 0}

    class Counted(plugin.ArrayBackend):
        def forward(self, *arguments: Any) -> Any:
            counted["forward"] += 1
            return super().forward(*arguments)

        def backward(self, *arguments: Any) -> Any:
            counted["backward"] += 1
            return super().backward(*arguments)

    plug("counted", Counted("counted", plugin.lane("numpy")))
    q = torch.ones((1, 1, 4, 8), requires_grad=gradient == "framework")
    cls = attnx.explain(q, q, q, gradient=gradient == "vjp").call
    assert cls.gradient == gradient
    measure = lambda runs: {name: run() or 1.0 for name, run in runs.items()}  # noqa: E731
    policy = fastest("torch", "counted", folder=tmp_path, lengths=(16,), measure=measure)
    found = policy.tune(cls)
    assert {name: kept.failure for name, kept in found.items()} == {"torch": "", "counted": ""}
    assert counted["forward"] == 2  # one to warm up
    assert counted["backward"] == (0 if gradient is None else 2)
    assert policy.known(cls) == found


def test_a_plan_for_a_measurement_is_seen_by_no_observer(plug: Plug) -> None:
    seen: list[Any] = []
    plug("observer", attnx_planned=lambda plan: seen.append(plan))
    make_plan(Choice(("numpy",), "me"), attnx.explain(x, x, x).call, observed=False)
    assert seen == []


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"lengths": ()}, ArgumentError, "lengths: expected integers >= 16, each once"),
        ({"lengths": (8,)}, ArgumentError, r"got \(8,\)"),
        ({"lengths": (16, 16)}, ArgumentError, "each once"),
        ({"lengths": 128}, ArgumentTypeError, "lengths: expected integers, got 128"),
        ({"lengths": (64.0,)}, ArgumentTypeError, "lengths: expected integers"),
        ({"measure": 3}, ArgumentTypeError, "measure: expected a function of runs, got int"),
        ({"folder": 3}, ArgumentTypeError, "folder: expected a path, got 3"),
        ({"folder": ""}, ArgumentTypeError, "folder: expected a path, got ''"),
    ],
    ids=["none", "short", "twice", "number", "float", "measure", "folder", "empty folder"],
)
def test_wrong_arguments_are_refused_at_once(given: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=f"^fastest: .*{said}"):
        fastest(**given)


def test_they_take_turns_and_the_first_place_moves_on() -> None:
    """So that what disturbs one disturbs all; slow ones take fewer rounds."""
    order: list[str] = []
    time = [0.0]

    def run(name: str, seconds: float) -> Callable[[], None]:
        def ran() -> None:
            order.append(name)
            time[0] += seconds

        return ran

    runs = {"a": run("a", 1.0), "b": run("b", 3.0)}
    assert interleaved(runs, clock=lambda: time[0]) == {"a": 1.0, "b": 3.0}
    assert order == [*"aabb", *"ba", *"ab"]
    order.clear()
    assert interleaved({"a": run("a", 8.0)}, clock=lambda: time[0]) == {"a": 8.0}
    assert order == [*"aaa"]
    order.clear()
    quick = {"a": run("a", 1e-4), "b": run("b", 2e-4)}
    found = interleaved(quick, clock=lambda: time[0])
    assert found == pytest.approx({"a": 1e-4, "b": 2e-4})
    assert (order.count("a"), order[:8]) == (40, [*"aaaabbbb"])
