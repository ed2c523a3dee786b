"""JAX's drop-in: its answers and gradients where it keeps its documentation, else that."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import attnx  # noqa: E402
from attnx.compat.jax import dot_product_attention  # noqa: E402
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError  # noqa: E402

B, T, S, N, K, H = 2, 3, 5, 4, 2, 8
Shape = tuple[int, ...]


def operands(rng: np.random.Generator) -> list[Any]:
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def close(mine: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for got, expected in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(expected, np.float32), tolerance, tolerance
        )


def same(*arrays: Any, tolerance: float = 1e-5, **options: Any) -> None:
    mine = dot_product_attention(*arrays, **options)
    close(mine, jax.nn.dot_product_attention(*arrays, **options), tolerance)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"return_residual": True},
    "scale": {"scale": -0.5},
    "causal": {"is_causal": True, "return_residual": True},
    "window": {"local_window_size": (2, 1)},
    "one window": {"local_window_size": 1},
    "causal window": {"local_window_size": (1, 3), "is_causal": True},
    "lengths": {
        "query_seq_lengths": np.array([2, 3], np.int32),
        "key_value_seq_lengths": np.array([3, 5], np.int32), "is_causal": True,
    },
    "query lengths": {"query_seq_lengths": np.array([0, 3], np.int32)},
    "key lengths": {"key_value_seq_lengths": np.array([3, 4], np.int32)},
    "xla": {"implementation": "xla"},
    "bias of integers": {"bias": np.arange(S)},
    "bias of float16": {"bias": np.linspace(-1, 1, S, dtype=np.float16)},
}  # fmt: skip


def test_signature_is_jaxs() -> None:
    mine = inspect.signature(dot_product_attention)
    theirs = inspect.signature(jax.nn.dot_product_attention)
    assert [(p.name, p.kind, p.default) for p in mine.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_each_option(rng: np.random.Generator, options: dict[str, Any]) -> None:
    same(*operands(rng), **options)


@pytest.mark.parametrize(
    "shape",
    [
        (N, T, S),
        *(
            pytest.param(shape, marks=pytest.mark.sweep)
            for shape in [(S,), (T, 1), (1, T, S), (B, 1, 1, S)]
        ),
    ],
    ids=str,
)
def test_masks_and_biases_broadcast(rng: np.random.Generator, shape: Shape) -> None:
    values = jnp.asarray(rng.standard_normal(shape, np.float32))
    same(*operands(rng), bias=values)
    if shape[-1] == S:
        same(*operands(rng), mask=(values > -0.5).at[..., 0].set(True))


def test_arrays_without_a_batch_and_of_numpy(rng: np.random.Generator) -> None:
    q, k, v = (np.asarray(x[0]) for x in operands(rng))
    same(q, k, v, return_residual=True, key_value_seq_lengths=np.array([3], np.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.sweep)])
def test_16_bits(rng: np.random.Generator, dtype: str) -> None:
    """The residual is of query's dtype, as JAX has it."""
    same(*(x.astype(dtype) for x in operands(rng)), tolerance=0.03, return_residual=True)


def test_gradients_are_jaxs_under_jit_too(rng: np.random.Generator) -> None:
    arrays = [*operands(rng), jnp.asarray(rng.standard_normal((1, N, T, S), np.float32))]

    def gradients(f: Callable[..., Any]) -> Any:
        def loss(*inputs: Any) -> Any:
            out, residual = f(*inputs, is_causal=True, return_residual=True)
            return jnp.sum(out * jnp.cos(out)) + jnp.sum(residual)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)

    close(gradients(dot_product_attention), gradients(jax.nn.dot_product_attention))


@pytest.mark.sweep
def test_options_together(rng: np.random.Generator) -> None:
    """Each pair that gives no argument twice, and no residual of rows that see nothing."""
    for one, other in itertools.combinations(OPTIONS.values(), 2):
        empty = {"query_seq_lengths", "return_residual"} <= set(one) | set(other)
        if not empty and not set(one) & set(other):
            same(*operands(rng), **one, **other)


# Where JAX leaves its documentation


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.sweep)], ids=str)
def test_what_a_mask_hides_changes_nothing(rng: np.random.Generator, bad: float) -> None:
    q, k, v = operands(rng)
    expected = jax.nn.dot_product_attention(q, k[:, :-1], v[:, :-1])
    k, v = k.at[:, -1].set(bad), v.at[:, -1].set(bad)
    close(dot_product_attention(q, k, v, mask=jnp.arange(S) < S - 1), expected)
    lengths = jnp.full(B, S - 1, jnp.int32)
    close(dot_product_attention(q, k, v, key_value_seq_lengths=lengths), expected)


def test_a_row_that_sees_nothing_is_0_and_its_residual_minus_inf(rng: np.random.Generator) -> None:
    """JAX gives the mean of the hidden values."""
    mask = jnp.ones((T, S), bool).at[1].set(False)
    out, residual = dot_product_attention(*operands(rng), mask=mask, return_residual=True)
    assert not out[:, 1].any()
    assert (residual[:, 1] == -jnp.inf).all()
    assert jnp.isfinite(residual[:, 0]).all()


# Refusals

REFUSED: dict[str, Any] = {
    "cudnn": ({"implementation": "cudnn"}, UnsupportedError, "implementation='cudnn'"),
    "unknown": ({"implementation": "flash"}, ArgumentError, "expected None, 'xla' or 'cudnn'"),
    "floating mask": ({"mask": np.ones((T, S))}, ArgumentTypeError, "mask: .* as bias="),
    "boolean bias": ({"bias": np.ones((T, S), bool)}, ArgumentTypeError, "bias: .* as mask="),
    "mask of a batch": (
        {"mask": np.ones((B, T, S), bool)}, ArgumentError,
        r"mask: .* \(B, N, T, S\) = \(2, 4, 3, 5\), got \(2, 3, 5\)",
    ),
    "lengths": (
        {"query_seq_lengths": np.array([1], np.int32)}, ArgumentError,
        r"query_seq_lengths: expected shape \(B,\) = \(2,\), got \(1,\)",
    ),
    "negative window": ({"local_window_size": (-1, 0)}, ArgumentError, "left: .* got -1"),
    "three windows": ({"local_window_size": (1, 2, 3)}, ArgumentError, "local_window_size"),
    "two axes": ({"query": np.ones((T, H))}, ArgumentError, r"query: .* \(B, T, N, H\)"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(
    rng: np.random.Generator, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays = dict(zip(("query", "key", "value"), operands(rng), strict=True))
    with pytest.raises(error, match=message):
        dot_product_attention(**(arrays | given))


def test_the_chosen_backend_computes_and_xla_names_jax(rng: np.random.Generator) -> None:
    """NumPy's answer in float32 differs in bits from JAX's, so who computed is asked of attnx."""
    q, k, v = operands(rng)
    expected = attnx.attention(q, k, v, layout="bshd", backend="numpy")
    with attnx.use_backend("numpy"):
        close(dot_product_attention(q, k, v), expected, 0)
        program = str(jax.make_jaxpr(dot_product_attention)(q, k, v))
        assert "callback" in program  # to the host, where NumPy is
        named = partial(dot_product_attention, implementation="xla")
        assert "callback" not in str(jax.make_jaxpr(named)(q, k, v))
