"""`explain` computes nothing, shows every backend with its reasons, and is what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Lengths, plugin
from attnx.errors import ArgumentError, UnknownBackend

Marked = Callable[..., Any]
Plug = Callable[..., None]
x = np.ones((3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


def table(explanation: Any) -> dict[str, tuple[bool, tuple[Any, ...], str]]:
    return {c.name: (c.chosen, c.reasons, c.note) for c in explanation.candidates}


def test_every_registered_backend_stands_with_its_reasons(marked: Marked, plug: Plug) -> None:
    backend = marked("cannot", 2.0, (NO,))
    plug("absent", plugin.BackendSpec("absent", print, requires=("surely_no_such_module",)))
    said = attnx.explain(x, x, x)
    assert (said.choice, said.why, said.exchange) == ("numpy", "the arrays' own framework", None)
    assert said.route.startswith("blas")
    rows = table(said)
    assert next(iter(rows)) == "numpy"
    assert {info.name for info in attnx.backends()} == set(rows)
    assert rows["numpy"] == (True, (), said.route)
    assert rows["cannot"] == (False, (NO,), "")
    missing = "backend 'absent': surely_no_such_module is not installed"
    assert rows["absent"] == (
        False, (plugin.Reason("backend", "absent", "not available here", missing),), missing
    )  # fmt: skip
    assert backend.calls == []
    assert [name for name, row in rows.items() if row[0]] == ["numpy"]


def test_why_names_who_asked(marked: Marked) -> None:
    marked("a", 2.0)
    assert attnx.explain(x, x, x, backend="a")[:2] == ("a", "backend=")
    with attnx.use_backend("a"):
        assert attnx.explain(x, x, x)[:2] == ("a", "use_backend")
    attnx.set_default_backend("a")
    assert attnx.explain(x, x, x)[:2] == ("a", "set_default_backend")
    attnx.set_default_backend(None)


def test_a_call_that_nobody_can_do_is_shown_and_not_raised(
    marked: Marked, no_dropout: attnx.Dropout
) -> None:
    marked("cannot", 2.0, (NO,))
    said = attnx.explain(x, x, x, backend="cannot")
    assert (said.choice, said.route, said.exchange) == (None, None, None)
    rows = table(said)
    assert next(iter(rows)) == "cannot"
    assert rows["cannot"] == (False, (NO,), "")
    assert rows["numpy"][1] == ()
    dropped = attnx.explain(x, x, x, dropout=no_dropout)
    assert dropped.choice is None
    assert {reason.option for _, reasons, _ in table(dropped).values() for reason in reasons} >= {
        "dropout"
    }
    assert all(reasons for _, reasons, _ in table(dropped).values())


def test_a_sequence_shows_who_was_passed_over_and_who_only_could(marked: Marked) -> None:
    marked("a", 2.0, (NO,))
    marked("b", 3.0)
    rows = table(attnx.explain(x, x, x, backend=["a", "b", "numpy"]))
    assert list(rows)[:3] == ["a", "b", "numpy"]
    assert [rows[name][0] for name in ("a", "b", "numpy")] == [False, True, False]
    assert rows["numpy"][1] == ()


def test_a_gradient_is_asked_for_by_name(marked: Marked) -> None:
    marked("forward-only", 2.0, gradient=False)
    assert attnx.explain(x, x, x, backend="forward-only").choice == "forward-only"
    said = attnx.explain(x, x, x, backend="forward-only", gradient=True)
    assert said.choice is None
    assert table(said)["forward-only"][1] == (plugin.Reason("gradient", "given", "none"),)


def test_a_wrong_call_and_a_wrong_name_are_errors_here_too() -> None:
    with pytest.raises(ArgumentError, match=r"^Lengths\.kv: expected at most Lk=3, got 9$"):
        attnx.explain(x, x, x, mask=Lengths(9))
    with pytest.raises(UnknownBackend, match="no backend 'nunpy'"):
        attnx.explain(x, x, x, backend="nunpy")
    with pytest.raises(TypeError, match=r"explain\(\) got unexpected keyword arguments casual"):
        attnx.explain(x, x, x, casual=True)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"return_lse": True}, {"mask": Lengths(2)}, {"layout": "bshd"},
        {"backend": "numpy", "scale": -1.0}, {"softcap": 3.0, "bias": np.zeros((3, 3), np.float32)},
    ],
    ids=str,
)  # fmt: skip
def test_the_explanation_is_what_happens(options: dict[str, Any], plug: Plug) -> None:
    """Its route, choice and class are those of the plan that computes, and of `plan`."""
    plans: list[Any] = []
    plug("observer", attnx_planned=lambda plan, explanation: plans.append(plan))
    said = attnx.explain(x, x, x, **options)
    assert plans == []
    attnx.attention(x, x, x, **options)
    (plan,) = plans
    assert (plan.backend, plan.route, plan.cls) == (said.choice, said.route, said.call)
    bound = attnx.plan(x, x, x, **options)
    assert (bound.backend, bound.route, bound.reasons) == (said.choice, said.route, {})


def test_it_prints_as_a_table(marked: Marked) -> None:
    marked("cannot", 2.0, (NO,))
    lines = str(attnx.explain(x, x, x, backend=["cannot", "numpy"])).splitlines()
    assert lines[0].strip() == "numpy (backend=)"
    (row,) = [line for line in lines if "cannot" in line]
    assert "softcap=given (has none); leave it out" in row
    (row,) = [line for line in lines if "chosen" in line]
    assert "numpy" in row
    assert "blas" in row
    refused = str(attnx.explain(x, x, x, backend="cannot"))
    assert refused.splitlines()[0].strip() == "no backend can do this call (backend=)"
    from rich.console import Console

    Console(file=None, quiet=True).print(attnx.explain(x, x, x))


def test_a_bound_plan_computes_its_class_and_no_other(marked: Marked) -> None:
    plan = attnx.plan(x, x, x, causal=True)
    longer = np.ones((7, 4), np.float32)
    assert plan(longer, longer, longer).shape == (7, 4)
    for other, fields in (
        ({"causal": False}, "mask"), ({"return_lse": True}, "need_lse"),
        ({"scale": 0.5}, "scale_sign"),
        ({"softcap": 1.0, "assume_finite": True}, "softcap, assume_finite"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            plan(x, x, x, **other)
        assert str(caught.value) == (
            f"plan: the call differs in {fields} from the one it was made for; make a plan of its "
            "own"
        )
    with pytest.raises(ArgumentError, match="plan: the call differs in dtype from"):
        plan(*[x.astype(np.float64)] * 3)
    with pytest.raises(ArgumentError, match=r"^k: expected \(\*B, Hk, Lk, D\) with the head size"):
        plan(x, x[:, :2], x)


def test_a_bound_plan_of_a_gradient_gives_the_pullback() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 4), dtype=np.float32)
    plan = attnx.plan(q, k, v, gradient=True, causal=True, return_lse=True)
    (out, lse), pullback = plan(q, k, v)
    (same, _), expected = attnx.attention_vjp(q, k, v, causal=True, return_lse=True)
    assert np.array_equal(out, same)
    for one, other in zip(pullback(out, lse), expected(out, lse), strict=True):
        assert one is other is None or np.array_equal(one, other)


def test_a_bound_plan_keeps_its_backend_whatever_is_asked_later(marked: Marked) -> None:
    marked("a", 2.0)
    plan = attnx.plan(x, x, x)
    with attnx.use_backend("a"):
        assert plan(x, x, x)[0, 0] == 1.0
    assert attnx.plan(x, x, x, backend="a")(x, x, x)[0, 0] == 2.0
