"""`prefer`: an order for some calls or all, which never overrides who was asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnx
from attnx import plugin
from attnx.errors import ArgumentError, ArgumentTypeError, AttnxWarning, UnsupportedError
from attnx.policies import named, prefer

Marked = Callable[..., Any]
Plug = Callable[..., None]
x = np.ones((1, 1, 3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


@pytest.fixture
def policy() -> Iterator[Callable[..., None]]:
    """`policy(prefer(…))`: registered as "mine" until the test ends, or `policy(None)`."""
    held = []

    def policy(plugin: Any) -> None:
        if held:
            attnx.unregister(held.pop())
        if plugin is not None:
            attnx.register(plugin, "mine")
            held.append("mine")

    yield policy
    policy(None)


def who(q: Any = x, **options: Any) -> float:
    return float(attnx.attention(q, q, q, **options).flat[0])


def test_the_first_that_can_computes_and_a_name_is_above_it(
    marked: Marked, policy: Callable[..., None]
) -> None:
    marked("a", 2.0, (NO,))
    marked("b", 3.0)
    assert who() == 1.0
    policy(prefer("a", "b"))
    assert who() == 3.0
    assert who(backend="numpy") == 1.0
    with attnx.use_backend("numpy"):
        assert who() == 1.0
    policy(None)
    assert who() == 1.0


def test_where_none_of_them_can_the_arrays_own_framework_does(
    marked: Marked, policy: Callable[..., None]
) -> None:
    marked("a", 2.0, (NO,))
    policy(prefer("a"))
    assert who() == 1.0
    said = attnx.explain(x, x, x)
    assert (said.choice, said.why) == ("numpy", "the plugin 'mine': prefer('a')")
    assert [c.name for c in said.candidates][:2] == ["a", "numpy"]


def test_a_refusal_names_the_policy(policy: Callable[..., None], no_dropout: attnx.Dropout) -> None:
    policy(prefer("numpy"))
    with pytest.raises(UnsupportedError, match=r"\(asked by the plugin 'mine': prefer\('numpy'\)"):
        who(dropout=no_dropout)


def test_another_frameworks_backend_is_named_and_so_allowed(policy: Callable[..., None]) -> None:
    policy(prefer("torch"))
    said = attnx.explain(x, x, x)
    assert said.choice == "torch"
    assert str(said.exchange).startswith("numpy to torch and back")
    assert isinstance(attnx.attention(x, x, x), np.ndarray)


@pytest.mark.parametrize(
    ("fields", "options", "applies"),
    [
        ({"dtype": "float32"}, {}, True),
        ({"dtype": "float64"}, {}, False),
        ({"dtype": {"float64", "float32"}}, {}, True),
        ({"device": "cpu", "D": 4}, {}, True),
        ({"device": "cuda"}, {}, False),
        ({"D": [8, 16]}, {}, False),
        ({"mask": True}, {"causal": True}, True),
        ({"mask": False}, {"causal": True}, False),
        ({"mask": "causal[top_left]"}, {"causal": True}, True),
        ({"mask": "causal"}, {"causal": True}, True),
        ({"mask": "window"}, {"causal": True}, False),
        ({"mask": "causal"}, {}, False),
        ({"bias": True}, {"bias": np.zeros((3, 3), np.float32)}, True),
        ({"gradient": True}, {}, False),
        ({"softcap": False, "need_lse": True}, {"return_lse": True}, True),
        ({"when": lambda call: call.square and call.Dv == 4}, {}, True),
        ({"when": lambda call: call.grouped}, {}, False),
    ],
    ids=[
        "dtype",
        "other dtype",
        "set of dtypes",
        "device and D",
        "other device",
        "list of D",
        "mask",
        "no mask",
        "structure",
        "kind of mask",
        "other kind of mask",
        "kind and no mask",
        "bias",
        "gradient",
        "two flags",
        "when",
        "when not",
    ],
)
def test_filters_say_for_which_classes_it_holds(
    fields: dict[str, Any], options: dict[str, Any], applies: bool, marked: Marked,
    policy: Callable[..., None],
) -> None:  # fmt: skip
    marked("a", 2.0)
    policy(prefer("a", **fields))
    said = attnx.explain(x, x, x, **options)
    assert said.choice == ("a" if applies else "numpy")
    assert repr(prefer("a", **fields)) in str(said) or not applies or "when" in fields


def test_a_device_of_one_kind_matches_each_of_them() -> None:
    cls = attnx.explain(x, x, x).call._replace(device="cuda:1")
    assert prefer("torch", device="cuda").attnx_rank(cls, []) is not None
    assert prefer("torch", device="cuda:0").attnx_rank(cls, []) is None


def test_when_is_asked_once_a_class(marked: Marked, policy: Callable[..., None]) -> None:
    marked("a", 2.0)
    asked: list[Any] = []
    policy(prefer("a", when=lambda call: bool(asked.append(call)) or True))
    for _ in range(3):
        assert who() == 2.0
    assert len(asked) == 1


def test_a_when_that_raises_is_told_of_and_passed_over(
    marked: Marked, policy: Callable[..., None]
) -> None:
    marked("a", 2.0)
    policy(prefer("a", when=lambda call: 1 / 0 > 0))
    with pytest.warns(AttnxWarning, match="attnx_rank of 'mine' failed: ZeroDivisionError"):
        assert who() == 1.0


def test_an_unknown_name_is_told_of_once_and_passed_over(
    marked: Marked, policy: Callable[..., None]
) -> None:
    """It may be a plugin that is not installed on this machine; `doctor` cannot know."""
    marked("a", 2.0)
    policy(prefer("nunpy", "a"))
    said = "prefer: no backend 'nunpy' is registered, so it is passed over; did you mean 'numpy'?"
    with pytest.warns(AttnxWarning) as caught:
        assert who() == 2.0
    assert [str(w.message) for w in caught] == [said]
    assert caught[0].filename == __file__
    assert who(x.astype(np.float64)) == 2.0


def test_a_name_registered_later_counts(marked: Marked, policy: Callable[..., None]) -> None:
    policy(prefer("late"))
    with pytest.warns(AttnxWarning, match="no backend 'late'"):
        assert who() == 1.0
    marked("late", 2.0)
    assert who() == 2.0


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: prefer(), ArgumentError, "prefer: expected at least one name"),
        (lambda: prefer("a", "a"), ArgumentError, "prefer: expected each name once"),
        (lambda: prefer(["a"]), ArgumentTypeError, "got list; write the names one by one"),  # type: ignore[arg-type]
        (lambda: prefer("a", when=3), ArgumentTypeError, "prefer: when: expected a function"),  # type: ignore[arg-type]
        (lambda: prefer("a", Lq=128), ArgumentError, "a call's class has no 'Lq'; it has"),
        (lambda: prefer("a", min_length=1), ArgumentError, "serves calls of all lengths: pass"),
        (lambda: prefer("a", dtype=np.float32), ArgumentTypeError, "prefer: dtype: expected str"),
        (lambda: prefer("a", D={"64"}), ArgumentTypeError, "prefer: D: expected int, or a set"),
        (lambda: prefer("a", traced=1), ArgumentTypeError, "prefer: traced: expected bool"),
        (lambda: named("prefer"), ArgumentError, "ATTNX_POLICY: expected 'fastest', 'fastest:NAME"),
        (lambda: named("fastest:"), ArgumentError, "got 'fastest:'"),
        (lambda: named("slowest"), ArgumentError, "got 'slowest'"),
    ],
    ids=[
        "nobody", "twice", "list", "when", "Lq", "min_length", "dtype", "D", "flag", "bare",
        "colon", "word",
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_at_once(make: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make()


def test_a_setting_names_a_policy() -> None:
    assert repr(named(" prefer: torch , numpy")) == "prefer('torch', 'numpy')"
    assert repr(named("fastest")) == "fastest()"
    assert repr(named("fastest:jax,numpy")) == "fastest('jax', 'numpy')"


def test_the_environment_chooses_and_code_is_above_it(python: Callable[..., str]) -> None:
    code = (
        "import sys, attnx, numpy as np\n"
        "assert 'attnx.policies' not in sys.modules and 'pluggy' not in sys.modules\n"
        "x = np.ones((3, 4), np.float32)\n"
        "print(attnx.explain(x, x, x).why)\n"
        "attnx.register(attnx.policies.prefer('numpy', dtype='float32'))\n"
        "print(attnx.explain(x, x, x).why, attnx.explain(x, x, x, backend='numpy').why)\n"
        "assert 'platformdirs' not in sys.modules\n"
    )
    assert python(code, ATTNX_POLICY="prefer:numpy", ATTNX_PLUGINS="numpy").splitlines() == [
        "the plugin 'ATTNX_POLICY': prefer('numpy')",
        "the plugin 'prefer': prefer('numpy', dtype='float32') backend=",
    ]


def test_a_wrong_setting_raises_at_every_call(python: Callable[..., str]) -> None:
    code = (
        "import attnx, numpy as np\n"
        "x = np.ones((3, 4), np.float32)\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        attnx.attention(x, x, x)\n"
        "    except attnx.errors.ArgumentError as error:\n"
        "        print(error)\n"
    )
    said = python(code, ATTNX_POLICY="best", ATTNX_PLUGINS="numpy").splitlines()
    assert len(said) == 2
    assert said[0].endswith("or 'prefer:NAME,NAME', got 'best'")


# Compiled programs --------------------------------------------------------------------------------


def test_a_program_of_jax_is_compiled_anew_when_a_policy_comes_or_goes(
    plug: Plug, policy: Callable[..., None]
) -> None:
    q = jnp.ones((1, 1, 3, 4))
    chosen: list[str] = []
    plug("observer", attnx_planned=lambda plan: chosen.append(plan.backend))
    program = jax.jit(lambda q: attnx.attention(q, q, q))
    program(q)
    program(q)
    assert chosen == ["jax"]
    policy(prefer("numpy"))
    assert program(q).shape == q.shape
    assert chosen == ["jax", "numpy"]
    policy(None)
    program(q)
    assert chosen == ["jax", "numpy", "jax"]


def test_a_program_of_torch_is_compiled_anew_by_policies_and_not_by_observers(
    plug: Plug, policy: Callable[..., None]
) -> None:
    q = torch.ones((1, 1, 3, 4))
    chosen: list[str] = []
    programs: list[Any] = []
    plug("observer", attnx_planned=lambda plan: chosen.append(plan.backend))

    def count(graph: Any, inputs: Any) -> Any:
        programs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    program = torch.compile(lambda q: attnx.attention(q, q, q), backend=count, fullgraph=True)
    program(q)
    assert (set(chosen), len(programs)) == ({"torch"}, 1)
    plug("another", attnx_planned=lambda plan: None)
    program(q)
    assert len(programs) == 1
    policy(prefer("numpy"))
    program(q)
    assert (chosen[-1], len(programs)) == ("numpy", 2)
    policy(None)
    program(q)
    assert (chosen[-1], len(programs)) == ("torch", 3)
