"""Linear attention: every wrong call is told before anything is computed, with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnx import LinearState, linear_attention, linear_attention_step, linear_attention_vjp
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError

Make = Callable[..., tuple[Any, Any, Any]]
f32 = np.float32
Hq, L, D, Dv = 4, 6, 8, 5
STATE = LinearState(np.zeros((2, 2, D, Dv), f32))

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "decay above 1": (
        {"decay": 1.5}, ArgumentError, r"decay: expected a number in \(0, 1\], got 1.5",
    ),
    "decay 0": ({"decay": 0.0}, ArgumentError, r"decay: expected a number in \(0, 1\], got 0.0"),
    "decay NaN": ({"decay": np.nan}, ArgumentError, "decay: expected a number"),
    "log_decay above 0": (
        {"log_decay": 0.1}, ArgumentError, "log_decay: expected a number <= 0, got 0.1",
    ),
    "both decays": (
        {"decay": 0.5, "log_decay": -1.0}, ArgumentError, "decay: given beside log_decay",
    ),
    "decay True": (
        {"decay": True}, ArgumentTypeError,
        "decay: expected a numpy array like q or a number, got builtins.bool",
    ),
    "a decay's array of 0": (
        {"decay": np.array([0.5, 1, 0, 1], f32)}, ArgumentError,
        r"decay: expected values in \(0, 1\], got values from 0.0 to 1.0; a step that forgets all "
        "is log_decay=-inf",
    ),
    "a log decay's array above 0": (
        {"log_decay": np.array([-1, 0, 2, 0], f32)}, ArgumentError,
        "log_decay: expected values <= 0, got values from -1.0 to 2.0",
    ),
    "decay of another framework": (
        {"decay": torch.ones(4)}, ArgumentTypeError,
        "decay: expected a numpy array like q or a number, got torch.Tensor",
    ),
    "decay in float64": (
        {"decay": np.ones(4)}, ArgumentTypeError,
        "decay: expected float32 here, got float64; nothing is cast silently",
    ),
    "decay a key head": (
        {"decay": np.ones(2, f32)}, ArgumentError,
        r"decay: expected one value a query head, \(Hq,\) = \(4,\), or one a step, "
        r"\(\*B, Hq, L\) = \(2, 4, 6\), got \(2,\)",
    ),
    "decay in the other layout": (
        {"decay": np.ones((2, 6, 4), f32)}, ArgumentError, r"= \(2, 4, 6\), got \(2, 6, 4\)",
    ),
    "decay without axes": (
        {"decay": np.array(0.5, f32)}, ArgumentError,
        r"got \(\); for one learnt number write decay\[None\] and repeat it for each head",
    ),
    "decay without an order": (
        {"decay": 0.5, "causal": False}, ArgumentError,
        "decay: needs an order, and causal=False has none",
    ),
    "causal by name": (
        {"causal": "top_left"}, ArgumentTypeError, "causal: expected True or False, got 'top_left'",
    ),
    "normalize 1": (
        {"normalize": 1}, ArgumentTypeError,
        "normalize: expected True or False, or None for the feature map's own choice, got 1",
    ),
    "chunk 0": ({"chunk": 0}, ArgumentError, "chunk: expected a number of steps >= 1, got 0"),
    "chunk 8.0": ({"chunk": 8.0}, ArgumentTypeError, "chunk: expected a Python integer, got 8.0"),
    "an unknown map": (
        {"feature_map": "relu"}, ArgumentError,
        "feature_map: expected None, 'elu' or a function of one array, got 'relu'",
    ),
    "a map's type": ({"feature_map": 3}, ArgumentTypeError, "feature_map: .*got 3"),
    "a map that drops rows": (
        {"feature_map": lambda x: x[..., :1, :]}, ArgumentError,
        r"feature_map: expected numpy features \(…, D'\) for each row of q, .* got \(2, 4, 1, 8\)",
    ),
    "a map to complex numbers": (
        {"feature_map": lambda x: x * 1j}, ArgumentTypeError,
        "feature_map: expected floating features, got complex64; nothing is cast silently",
    ),
    "a map without features": (
        {"feature_map": lambda x: x[..., :0]}, ArgumentError,
        "feature_map: expected as many features of k as of q, at least 1, got 0 and 0",
    ),
    "the layout": ({"layout": "hbsd"}, ArgumentError, "layout: expected 'bhsd' or 'bshd'"),
    "a bare state": (
        {"state": STATE.S}, ArgumentTypeError,
        "state: expected the LinearState of an earlier call, got ndarray",
    ),
    "a state of query heads": (
        {"state": LinearState(np.zeros((2, 4, D, Dv), f32))}, ArgumentError,
        r"state.S: expected \(\*B, Hs, D, Dv\) = \(2, 2, 8, 5\), got \(2, 4, 8, 5\); Hs is Hq "
        "where the decays are an array, else Hk",
    ),
    "a state of key heads": (
        {"state": STATE, "decay": np.ones(4, f32)}, ArgumentError, r"= \(2, 4, 8, 5\), got",
    ),
    "a state in float64": (
        {"state": LinearState(np.zeros((2, 2, D, Dv)))}, ArgumentTypeError,
        "state.S: expected float32 here, got float64",
    ),
    "a state without divisors": (
        {"state": STATE, "normalize": True}, ArgumentError,
        "state.z: expected an array with normalize=True, the state has none",
    ),
    "a state with divisors": (
        {"state": LinearState(STATE.S, STATE.S[..., 0])}, ArgumentError,
        "state.z: expected None with normalize=False, the state has one",
    ),
    "a state of other features": (
        {"state": STATE, "feature_map": lambda x: x[..., :3]}, ArgumentError,
        r"state.S: expected .* = \(2, 2, 3, 5\), got \(2, 2, 8, 5\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_says_what_was_expected(name: str, make: Make) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        linear_attention(*make(), **options)


def test_shapes_and_dtypes_are_those_of_attention(make: Make) -> None:
    q, k, v = make()
    with pytest.raises(ArgumentError, match="causal: expected as many queries as keys, got Lq=6"):
        linear_attention(q, k[..., :3, :], v[..., :3, :])
    with pytest.raises(ArgumentError, match=r"k: expected .* head size D of q, 8, got 7"):
        linear_attention(q, k[..., :7], v)
    with pytest.raises(ArgumentTypeError, match="v: expected the dtype of q, float32, got float64"):
        linear_attention(q, k, v.astype(np.float64))
    with pytest.raises(ArgumentTypeError, match="k: expected an array of q's framework"):
        linear_attention(q, torch.from_numpy(k), v)
    with pytest.raises(ArgumentError, match=r"decay: .* \(L,\) = \(6,\), got \(4,\)"):
        linear_attention(q[0, 0], k[0, 0], v[0, 0], decay=np.ones(4, f32))


def test_nothing_is_computed_for_a_wrong_call(make: Make) -> None:
    """A feature map that must not run is not run."""

    def never(x: Any) -> Any:
        raise AssertionError("the feature map ran")

    for options in ({"decay": 2.0}, {"chunk": 0}, {"state": STATE.S}, {"normalize": "yes"}):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            linear_attention(*make(), feature_map=never, **options)


def test_a_step_is_one_token(make: Make) -> None:
    with pytest.raises(ArgumentError, match=r"q: expected one token, Lq=1, got Lq=6; for more"):
        linear_attention_step(*make(), None)


def test_numpy_cannot_differentiate_a_function(make: Make) -> None:
    with pytest.raises(UnsupportedError, match="numpy differentiates no function") as caught:
        linear_attention_vjp(*make(), feature_map=np.abs)
    assert caught.value.reasons[0].option == "feature_map"


COTANGENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shape": (
        {"d_out": np.ones((2, 4, 6, 8), f32)}, ArgumentError,
        r"d_out: expected the shape of out, \(2, 4, 6, 5\), got \(2, 4, 6, 8\)",
    ),
    "dtype": (
        {"d_out": np.ones((2, 4, 6, 5))}, ArgumentTypeError,
        "d_out: expected the dtype of out, float32, got float64",
    ),
    "framework": (
        {"d_out": torch.ones(2, 4, 6, 5)}, ArgumentTypeError,
        "d_out: expected a numpy array like q, got Tensor",
    ),
    "bare state": (
        {"d_state": STATE.S}, ArgumentTypeError, "d_state: expected a LinearState, like the state",
    ),
    "state's shape": (
        {"d_state": LinearState(STATE.S[..., :3])}, ArgumentError,
        r"d_state.S: expected the shape of state.S, \(2, 2, 8, 5\), got \(2, 2, 8, 3\)",
    ),
    "divisors": (
        {"d_state": LinearState(STATE.S, STATE.S[..., 0])}, ArgumentError,
        "d_state.z: expected None, for a state without z",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COTANGENTS)
def test_a_wrong_cotangent_says_what_was_expected(name: str, make: Make) -> None:
    given, error, message = COTANGENTS[name]
    _, pullback = linear_attention_vjp(*make(), return_state=True)
    with pytest.raises(error, match=message):
        pullback(**given)


def test_a_cotangent_of_a_state_that_nobody_got_is_refused(make: Make) -> None:
    _, pullback = linear_attention_vjp(*make())
    with pytest.raises(ArgumentError, match="pass return_state=True to use it"):
        pullback(None, STATE)
