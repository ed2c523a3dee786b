"""Who computes a call: asked for in one order, refused with reasons, and never by a wrong plan."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Lengths, Window, plugin
from attnx.errors import (
    AttnxWarning,
    UnknownBackend,
    UnsupportedError,
)
from attnx_conformance.oracle import Reference

Make = Callable[..., tuple[Any, Any, Any]]
Marked = Callable[..., Any]
Plug = Callable[..., None]
Agree = Callable[..., Reference]
x = np.ones((1, 1, 3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    attnx.set_default_backend(None)


def who(**options: Any) -> float:
    """The mark of the backend that computed; about 1 when it was NumPy's own."""
    return float(attnx.attention(x, x, x, **options).flat[0])


def everywhere(**options: Any) -> set[float]:
    """The mark from every way to compute: they may not differ."""
    plan = attnx.plan(x, x, x, **options)
    (_, _), pullback = attnx.attention_vjp(x, x, x, return_lse=True, **options)
    assert callable(pullback)
    return {
        who(**options), who(**options), float(plan(x, x, x).flat[0]),
        float(attnx.attention_vjp(x, x, x, **options)[0].flat[0]),
    }  # fmt: skip


# The order of precedence ------------------------------------------------------------------------


def test_the_argument_the_context_the_default_then_the_arrays_own(marked: Marked) -> None:
    """Design section 3; the same for calls that take the fast path."""
    for name, mark in (("a", 2.0), ("b", 3.0), ("c", 4.0)):
        marked(name, mark)
    assert everywhere() == {1.0}
    attnx.set_default_backend("a")
    assert everywhere() == {2.0}
    with attnx.use_backend("b"):
        assert everywhere() == {3.0}
        assert everywhere(backend="c") == {4.0}
        with attnx.use_backend(None):
            assert everywhere() == {1.0}
        assert everywhere() == {3.0}
    assert everywhere() == {2.0}
    assert everywhere(backend="numpy") == {1.0}
    attnx.set_default_backend(None)
    assert everywhere() == {1.0}


def test_a_sequence_is_tried_in_order(marked: Marked) -> None:
    marked("cannot", 2.0, (NO,))
    able = marked("can", 3.0)
    assert everywhere(backend=["cannot", "can", "numpy"]) == {3.0}
    assert everywhere(backend=("numpy", "can")) == {1.0}
    assert everywhere(backend=["cannot", able]) == {3.0}
    attnx.set_default_backend(["cannot", "can"])
    assert everywhere() == {3.0}
    with attnx.use_backend(["cannot", "numpy"]):
        assert everywhere() == {1.0}
    assert attnx.plan(x, x, x, backend=["cannot", "can"]).reasons == {"cannot": (NO,)}


def test_threads_compute_with_their_own_choice(marked: Marked) -> None:
    marked("a", 2.0)
    marked("b", 3.0)
    seen: dict[str, set[float]] = {"a": set(), "b": set(), "none": set()}

    def work(name: str) -> None:
        for _ in range(50):
            if name == "none":
                seen[name].add(who())
            else:
                with attnx.use_backend(name):
                    seen[name].add(who())

    with attnx.use_backend("a"):
        threads = [threading.Thread(target=work, args=(name,)) for name in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"a": {2.0}, "b": {3.0}, "none": {1.0}}


def test_tasks_compute_with_their_own_choice(marked: Marked) -> None:
    marked("a", 2.0)
    marked("b", 3.0)

    async def task(name: str) -> set[float]:
        found = set()
        with attnx.use_backend(name):
            for _ in range(10):
                found.add(who())
                await asyncio.sleep(0)
        return found

    async def main() -> list[Any]:
        with attnx.use_backend("a"):
            inherited = asyncio.create_task(asyncio.to_thread(who))
            return [*await asyncio.gather(task("a"), task("b"), task("numpy")), await inherited]

    assert asyncio.run(main()) == [{2.0}, {3.0}, {1.0}, 2.0]


# Plans ------------------------------------------------------------------------------------------


def test_a_plan_never_serves_a_call_it_is_wrong_for(make: Make, agree: Agree) -> None:
    """Pairs that differ in one thing a plan may depend on, in either order, against the oracle."""
    f32, f64 = np.float32, np.float64
    rng = np.random.default_rng(1)
    wide = {"dtype": "float64"}
    bias = rng.standard_normal((6, 6))
    pairs: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {"scale": 1.0}, {"scale": -1.0}), ({}, {"scale": 1.0}, {"scale": 0.0}),
        ({}, {"scale": -1}, {"scale": 1}),
        ({}, {"causal": True, "scale": 1.0}, {"causal": True, "scale": -1.0}),
        (wide, {"bias": bias.astype(f32)}, {"bias": bias}),
        ({}, {"bias": bias.astype(f32)}, {"bias": bias[:1].astype(f32)}),
        ({}, {"bias": bias[:, :1].astype(f32)}, {"bias": bias[:1].astype(f32)}),
        ({}, {"causal": "top_left"}, {"causal": "bottom_right"}), ({}, {}, {"causal": True}),
        ({}, {"mask": Window(1, None)}, {"mask": Window(None, 1)}),
        ({}, {"mask": Window(1, 1)}, {"mask": Window(1, 1, "bottom_right") & Lengths(3)}),
        ({}, {"mask": Lengths(3)}, {"mask": Lengths([3, 5], 2)}),
        ({}, {"mask": Causal() | Lengths(3)}, {"mask": Causal() & Lengths(3)}),
        ({}, {"sinks": np.ones(4, f32)}, {}),
        (wide, {"sinks": np.ones(4, f32)}, {"sinks": np.ones(4, f64)}),
        ({}, {"softcap": 2.0}, {}), ({}, {"assume_finite": True}, {}),
    ]  # fmt: skip
    for shape, one, other in pairs:
        q, k, v = make(**shape)
        for options in (one, other, one, other):
            agree(q, k, v, **options)


def test_shapes_that_share_a_class_and_those_that_do_not(make: Make, agree: Agree) -> None:
    """Lq == Lk decides what causal=True means; D, Dv and the grouping are part of the class."""
    for shape in (
        {}, {"Lk": 9}, {"Lq": 3, "Lk": 3}, {"D": 3}, {"Dv": 9}, {"Hk": 4}, {"Hk": 1}, {"B": (3,)},
        {"dtype": "float64"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"B": ()}, {"rank": 2},
    ):  # fmt: skip
        q, k, v = make(**shape)
        for options in ({"causal": "bottom_right"}, {"causal": "top_left"}):
            agree(q, k, v, **options)


def test_the_two_layouts_never_share_an_answer(make: Make, agree: Agree) -> None:
    q, k, v = make(Hq=6, Hk=6, Lq=6, Lk=6)
    for layout in ("bhsd", "bshd", "bhsd", "bshd"):
        agree(q, k, v, layout=layout, causal=True)


def test_true_is_not_1_and_false_is_not_0() -> None:
    """Equal and of equal hash: a key must tell them apart."""
    for name in ("causal", "return_lse", "assume_finite"):
        attnx.attention(x, x, x, **{name: True})
        attnx.attention(x, x, x, **{name: False})
        for wrong in (1, 0, 1.0, np.True_):
            with pytest.raises(TypeError, match=name):
                attnx.attention(x, x, x, **{name: wrong})


def test_lse_comes_exactly_when_it_is_asked_for() -> None:
    for wanted in (False, True, False, True):
        answer = attnx.attention(x, x, x, return_lse=wanted)
        assert isinstance(answer, tuple) == wanted


def test_plans_with_and_without_a_gradient_are_apart(marked: Marked) -> None:
    marked("forward-only", 2.0, gradient=False)
    for _ in range(2):
        assert who(backend="forward-only") == 2.0
        with pytest.raises(UnsupportedError, match="gradient"):
            attnx.attention_vjp(x, x, x, backend="forward-only")


def test_a_plan_is_made_once_a_class(plug: Plug) -> None:
    """Neither lengths nor batch nor values make a new one: decoding never plans."""
    plans: list[Any] = []
    plug("observer", attnx_planned=lambda plan, explanation: plans.append(plan))
    keys = np.ones((2, 1, 9, 4), np.float32)
    for length in range(1, 9):
        attnx.attention(keys[:, :, :1], keys, keys, mask=Lengths(length), causal="bottom_right")
        attnx.attention(keys[:1, :, :1], keys[:1, :, :length], keys[:1, :, :length])
    assert [plan.cls.mask for plan in plans] == [
        "(causal[bottom_right]&lengths[kv])", None, None
    ]  # a step of one query and one key is square  # fmt: skip


# Hooks ------------------------------------------------------------------------------------------


def test_a_plugin_may_rank_the_candidates(marked: Marked, plug: Plug) -> None:
    marked("third", 2.0)
    asked: list[Any] = []

    def rank(call: plugin.CallClass, candidates: list[str]) -> list[str] | None:
        asked.append((call.dtype, list(candidates)))
        return ["third", "numpy"] if call.dtype == "float32" else None

    plug("policy", attnx_rank=rank)
    assert who() == 2.0
    assert asked == [("float32", ["numpy", "third"])]
    wide = x.astype(np.float64)
    assert attnx.attention(wide, wide, wide).flat[0] == 1.0
    assert attnx.explain(x, x, x).choice == "third"
    attnx.unregister("policy")
    assert who() == 1.0


def test_a_ranking_never_overrides_a_request_and_skips_who_cannot(
    marked: Marked, plug: Plug
) -> None:
    marked("third", 2.0, (NO,))
    marked("fourth", 3.0)
    plug("policy", attnx_rank=lambda call, candidates: ["nobody", "third", "fourth"])
    assert who() == 3.0
    assert who(backend="numpy") == 1.0


def test_a_ranking_of_nobody_refuses(plug: Plug) -> None:
    plug("policy", attnx_rank=lambda call, candidates: [])
    with pytest.raises(UnsupportedError, match=r"no backend for numpy arrays; .*'numpy'.* could"):
        who()


def test_a_ranking_that_changes_its_argument_changes_nothing(marked: Marked, plug: Plug) -> None:
    marked("third", 2.0)
    plug("policy", attnx_rank=lambda call, candidates: candidates.clear())
    assert who() == 1.0


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (lambda call, candidates: 1 / 0, "attnx_rank of 'policy' failed: ZeroDivisionError: "),
        (lambda call, candidates: "third", "attnx_rank of 'policy' gave 'third', not a list"),
        (lambda call, candidates: [3], r"attnx_rank of 'policy' gave \[3\], not a list of names"),
        (lambda call, candidates: 3, "attnx_rank of 'policy' gave 3, not a list of names"),
    ],
    ids=["raises", "text", "numbers", "number"],
)
def test_a_ranking_that_fails_is_told_of_and_hides_no_other(
    rank: Any, said: str, marked: Marked, plug: Plug
) -> None:
    marked("third", 2.0)
    plug("good", attnx_rank=lambda call, candidates: ["third"])
    plug("policy", attnx_rank=rank)
    with pytest.warns(AttnxWarning, match=said) as caught:
        assert who() == 2.0
    assert caught[0].filename == __file__


def test_observers_see_each_plan_once_and_none_hides_another(plug: Plug) -> None:
    """An observer that raises is told of, and the call goes on."""
    seen: list[Any] = []

    def broken(plan: Any, explanation: Any) -> None:
        raise OSError("disk full")

    plug("one", attnx_planned=lambda plan, explanation: seen.append((plan, explanation)))
    plug("broken", attnx_planned=broken)
    plug("few arguments", attnx_planned=lambda plan: seen.append(plan))
    with pytest.warns(AttnxWarning, match="attnx_planned of 'broken' failed: OSError: disk full"):
        assert who() == 1.0
    (few, (plan, explanation)) = seen
    assert few is plan
    assert (plan.backend, explanation.choice) == ("numpy", "numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert who() == 1.0
    assert len(seen) == 2


def test_a_plan_that_was_made_while_its_backend_left_is_not_kept(
    marked: Marked, plug: Plug
) -> None:
    """As when another thread takes it out at that moment."""
    marked("brief", 2.0)

    def leave(plan: Any, explanation: Any) -> None:
        if plan.backend == "brief":
            attnx.unregister("brief")

    plug("observer", attnx_planned=leave)
    assert who(backend="brief") == 2.0
    for _ in range(2):
        with pytest.raises(UnknownBackend):
            who(backend="brief")


def test_ctrl_c_in_a_hook_is_not_swallowed(plug: Plug) -> None:
    def interrupt(plan: Any, explanation: Any) -> None:
        raise KeyboardInterrupt

    plug("observer", attnx_planned=interrupt)
    with pytest.raises(KeyboardInterrupt):
        who()
