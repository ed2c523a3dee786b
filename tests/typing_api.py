"""The public API as a type checker sees it. Never run: `test_typing.py` and pyright read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np

import attnx
from attnx import Causal, Gradients, Lengths, Prefix, Window
from attnx.errors import ArgumentError, AttnxError, UnsupportedError
from attnx.masks import Mask
from attnx.plugin import ArrayBackend, Backend, BackendSpec, Capabilities, Lane, Reason, hookimpl

x = np.ones((1, 2, 3, 4), np.float32)


def masks_combine_to_masks() -> None:
    assert_type((Causal() | Prefix(2)) & Lengths(3), Mask)
    assert_type(~Window(left=1, right=None), Mask)


def calls_take_any_frameworks_arrays() -> None:
    options: dict[str, Any] = {"softcap": 30.0, "scale": None, "layout": "bhsd"}
    attnx.attention(x, x, x, causal="bottom_right", mask=Causal("top_left"), **options)
    attnx.attention(x, x, x, backend=("torch", attnx.get_backend("numpy")), return_lse=True)
    out, pullback = attnx.attention_vjp(x, x, x, causal=True)
    assert_type(pullback, Callable[..., Any])
    assert_type(attnx.merge([(out, out)]), tuple[Any, Any])


def gradients_are_a_named_tuple(grads: Gradients) -> None:
    q, k, v, bias, sinks = grads
    assert_type((q, k, v, bias, sinks), tuple[Any, Any, Any, Any, Any])


def explanations_say_who_and_why() -> None:
    explanation = attnx.explain(x, x, x, gradient=True, backend="numpy")
    assert_type(explanation.choice, str | None)
    assert_type(explanation.why, str)
    assert_type(explanation.route, str | None)
    for candidate in explanation.candidates:
        assert_type(candidate.reasons, tuple[Reason, ...])
    assert_type(attnx.plan(x, x, x).backend, str)


def what_is_installed_is_typed() -> None:
    for info in attnx.backends():
        assert_type(info.reason, str | None)
        assert_type(info.devices, tuple[str, ...])
    for record in attnx.doctor():
        assert_type(record.remedy, str)
    assert_type(attnx.get_backend("numpy"), Backend)


def errors_carry_reasons(error: UnsupportedError) -> None:
    caught: AttnxError = error
    also: ValueError = ArgumentError("")
    assert_type(error.reasons, tuple[Reason, ...])
    assert_type(error.alternatives, tuple[str, ...])
    del caught, also


class ExampleLane(Lane):
    name = "example"
    xp = np


class ExamplePlugin:
    """A plugin type-checks as its author writes it, decorators included."""

    @hookimpl
    def attnx_backends(self) -> list[BackendSpec]:
        capabilities = Capabilities(dtypes=frozenset({"float32"}))
        return [
            BackendSpec(
                name="example",
                load=lambda: ArrayBackend("example", ExampleLane(), capabilities),
                lane=ExampleLane,
            )
        ]


with attnx.use_backend(["jax", "numpy"], fallback="warn", transfer=True):
    attnx.set_default_backend(None)
