"""A backend that cannot refuses with its reasons, and nothing falls back unless allowed (S8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, plugin
from attnx.errors import FallbackWarning, UnavailableBackend, UnknownBackend, UnsupportedError

Make = Callable[..., tuple[Any, Any, Any]]
Marked = Callable[..., Any]
Plug = Callable[..., None]
x = np.ones((1, 1, 3, 4), np.float32)
NO = plugin.Reason("softcap", "given", "none", "leave it out")


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    attnx.set_default_backend(None)


def who(**options: Any) -> float:
    """The mark of the backend that computed; about 1 when it was NumPy's own."""
    return float(attnx.attention(x, x, x, **options).flat[0])


# Refusals ---------------------------------------------------------------------------------------


def test_a_named_backend_that_cannot_refuses_with_reasons_and_alternatives(marked: Marked) -> None:
    """S8.2, S8.3: before anything is computed, and nobody else does it instead."""
    backend = marked("cannot", 2.0, (NO,), sinks=False)
    sinks = np.zeros(1, np.float32)
    for call in (attnx.attention, attnx.attention_vjp, attnx.plan):
        with pytest.raises(UnsupportedError) as caught:
            call(x, x, x, sinks=sinks, backend="cannot")
        error = caught.value
        assert (error.backend, error.reasons) == (
            "cannot",
            (NO, plugin.Reason("sinks", "given", "none")),
        )
        assert "numpy" in error.alternatives
        assert "cannot" not in error.alternatives
        names = ", ".join(map(repr, error.alternatives))
        assert str(error) == (
            "backend 'cannot' cannot do this call: softcap=given (has none); leave it out; "
            f"sinks=given (has none); {names} could (asked by backend=)"
        )
    assert backend.calls == []


def test_a_sequence_that_cannot_names_everyones_reasons(marked: Marked) -> None:
    marked("a", 2.0, (NO,))
    marked("b", 3.0, dtypes=frozenset({"float64"}))
    with (
        attnx.use_backend(["a", "b"]),
        pytest.raises(UnsupportedError, match="asked by use_backend") as caught,
    ):
        attnx.attention(x, x, x)
    assert caught.value.backend is None
    assert [reason.option for reason in caught.value.reasons] == ["softcap", "dtype"]
    assert "backend 'a' cannot do this call: softcap" in str(caught.value)
    assert "backend 'b' cannot do this call: dtype=float32 (has float64)" in str(caught.value)


def test_a_call_that_nobody_can_do_says_so(no_dropout: attnx.Dropout) -> None:
    """What no backend declares is refused, with nobody to turn to."""
    for call in (attnx.attention, attnx.attention_vjp, attnx.plan):
        with pytest.raises(UnsupportedError) as caught:
            call(x, x, x, dropout=no_dropout)
        assert caught.value.backend == "numpy"
        assert caught.value.alternatives == ()
        assert [reason.option for reason in caught.value.reasons] == ["dropout"]
        assert "; no installed backend could" in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "options", "option"),
    [
        ({"dtypes": frozenset({"float16"})}, {}, "dtype"), ({"devices": frozenset()}, {}, "device"),
        ({"masks": frozenset({"lengths"})}, {"causal": True}, "mask"),
        ({"masks": frozenset({"causal"})}, {"mask": Causal(q_pos=[0, 1, 2])}, "mask"),
        ({"masks": frozenset({"causal"})}, {"mask": ~Causal()}, "mask"),
        ({"max_head_size": 3}, {}, "head size"),
        ({"bias": False}, {"bias": np.zeros((3, 3), np.float32)}, "bias"),
        ({"softcap": False}, {"softcap": 3.0}, "softcap"),
        ({"sinks": False}, {"sinks": np.zeros(1, np.float32)}, "sinks"),
        ({"lse": False}, {"return_lse": True}, "return_lse"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_backend_does_not_declare_is_refused(
    declared: dict[str, Any], options: dict[str, Any], option: str, marked: Marked
) -> None:
    """One declaration, read by dispatch."""
    backend = marked("little", 2.0, **declared)
    with pytest.raises(UnsupportedError) as caught:
        attnx.attention(x, x, x, backend="little", **options)
    assert [reason.option for reason in caught.value.reasons] == [option]
    assert backend.calls == []


def test_grouped_heads_and_gradients_are_refused_where_they_are_not_declared(
    marked: Marked, make: Make
) -> None:
    marked("little", 2.0, gqa=False, gradient=False)
    q, k, v = make()
    with pytest.raises(UnsupportedError, match="grouped heads=given"):
        attnx.attention(q, k, v, backend="little")
    with pytest.raises(UnsupportedError, match=r"gradient=given \(has none\)"):
        attnx.attention_vjp(x, x, x, backend="little")
    assert who(backend="little") == 2.0
    marked("some", 2.0, bias_gradient=False, sinks_gradient=False)
    both = {"bias": np.zeros((3, 3), np.float32), "sinks": np.zeros(1, np.float32)}
    assert who(backend="some", **both) == 2.0
    with pytest.raises(UnsupportedError, match=r"bias gradient=given .* sinks gradient=given"):
        attnx.attention_vjp(x, x, x, backend="some", **both)


def test_a_wrong_name_says_who_asked() -> None:
    for source, call in (
        ("backend=", lambda: who(backend="nunpy")), ("backend=", lambda: who(backend=["nunpy"])),
        ("use_backend", lambda: inside("nunpy")), ("set_default_backend", lambda: default("nunpy")),
    ):  # fmt: skip
        with pytest.raises(UnknownBackend) as caught:
            call()
        assert str(caught.value).endswith(f"did you mean 'numpy'? (asked by {source})")


def inside(name: str) -> float:
    with attnx.use_backend(name, fallback="allow"):
        return who()


def default(name: str) -> float:
    attnx.set_default_backend(name)
    return who()


# Falling back -----------------------------------------------------------------------------------


def test_nothing_falls_back_unless_it_was_allowed(marked: Marked) -> None:
    marked("cannot", 2.0, (NO,))
    with attnx.use_backend("cannot"), pytest.raises(UnsupportedError):
        who()
    with attnx.use_backend("cannot", fallback="allow"):
        assert who() == 1.0
    with attnx.use_backend("cannot", fallback="raise"), pytest.raises(UnsupportedError):
        who()


@pytest.mark.parametrize("times", [1, 3])
def test_a_fallback_that_warns_does_so_at_every_call_where_it_stands(
    times: int, marked: Marked
) -> None:
    """A plan that is found again is no reason to be silent."""
    marked("cannot", 2.0, (NO,))
    with attnx.use_backend("cannot", fallback="warn"):
        for _ in range(times):
            with pytest.warns(FallbackWarning) as caught:
                assert who() == 1.0
            (warning,) = caught
            assert warning.filename == __file__
            assert str(warning.message) == (
                "numpy computes, because cannot: softcap=given (has none); leave it out"
            )
        with pytest.warns(FallbackWarning):
            attnx.attention_vjp(x, x, x)
        with pytest.warns(FallbackWarning):
            attnx.attention_weights(x, x)
        planned = attnx.plan(x, x, x)
    with pytest.warns(FallbackWarning):
        planned(x, x, x)


def test_a_fallback_reaches_backends_that_are_not_here(plug: Plug) -> None:
    spec = plugin.BackendSpec("absent", print, requires=("surely_no_such_module",))
    plug("absent", spec)
    with pytest.raises(UnavailableBackend, match="surely_no_such_module is not installed"):
        who(backend="absent")
    with attnx.use_backend("absent", fallback="allow"):
        assert who() == 1.0


def test_no_fallback_when_the_arrays_own_framework_cannot_either(
    marked: Marked, no_dropout: attnx.Dropout
) -> None:
    marked("cannot", 2.0, (NO,))
    with (
        attnx.use_backend("cannot", fallback="allow"),
        pytest.raises(UnsupportedError, match="backend 'cannot' cannot do this call"),
    ):
        who(dropout=no_dropout)
