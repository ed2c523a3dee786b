"""attnx as the attention function of Flax's multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flax", minversion="0.12")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import attnx
from attnx.errors import ArgumentError, UnsupportedError
from attnx.integrations.flax import attention_fn, attention_fn_for

BACKENDS = ["jax", "numpy"]
MASK = nnx.make_attention_mask(jnp.asarray([[1] * 6, [1] * 4 + [0] * 2]), jnp.ones((2, 6)))
# A row that sees nothing is a mean in Flax; here each sees at least itself.
MASK = jnp.maximum(MASK, jnp.eye(6))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask of numbers": {"mask": MASK},
    "causal": {"is_causal": True},
    "mask and causal": {"mask": jnp.broadcast_to(MASK, (2, 4, 6, 6)), "is_causal": True},
}
RUNS = [
    pytest.param(b, c, marks=() if (b, c) == ("numpy", "mask and causal") else pytest.mark.sweep)
    for b in BACKENDS
    for c in CALLS
]


def layer(attention: Any = nnx.dot_product_attention, **options: Any) -> nnx.MultiHeadAttention:
    given = {"num_heads": 4, "in_features": 16, "decode": False, **options}
    return nnx.MultiHeadAttention(**given, attention_fn=attention, rngs=nnx.Rngs(7))


def inputs(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape, dtype=np.float32))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


@nnx.jit
def loss_and_gradients(model: nnx.MultiHeadAttention, x: jax.Array, call: Any) -> Any:
    def loss(model: nnx.MultiHeadAttention) -> jax.Array:
        return jnp.sum(jnp.sin(model(x, **call)))

    return nnx.value_and_grad(loss)(model)


@pytest.mark.parametrize(("backend", "call"), RUNS)
def test_outputs_and_gradients_are_flax_own(backend: str, call: str) -> None:
    """Under `nnx.jit` and `nnx.value_and_grad`, with grouped heads."""
    options = {"num_kv_heads": 2, "use_bias": False}
    x, given = inputs(2, 6, 16), dict(CALLS[call])
    causal = given.pop("is_causal", False)

    def run(attention: Callable[..., Any]) -> Any:
        def with_causal(*args: Any, is_causal: bool, **rest: Any) -> Any:
            return attention(*args, is_causal=causal, **rest)

        return loss_and_gradients(layer(with_causal, **options), x, given)

    value, gradients = run(attention_fn_for(backend))
    expected_value, expected = run(nnx.dot_product_attention)
    close(value, expected_value)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    jax.tree.map(close, gradients, expected)


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.sweep), "numpy"])
def test_decodes_with_flax_cache(backend: str) -> None:
    """A step sees the keys up to now, out of a cache that is longer."""
    x = inputs(2, 4, 16)
    outputs = []
    for attention in (attention_fn_for(backend), nnx.dot_product_attention):
        model = layer(attention, decode=True)
        model.init_cache((2, 5, 16))
        outputs.append(jnp.concatenate([model(x[:, i : i + 1]) for i in range(4)], axis=1))
    close(*outputs)


@pytest.mark.parametrize(
    "batch", [(2, 3), *(pytest.param(b, marks=pytest.mark.sweep) for b in [(), (2,)])], ids=str
)
def test_takes_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    """A bias that broadcasts from fewer axes goes along."""
    q, bias = inputs(*batch, 5, 4, 8), inputs(4, 5, 5)
    scores = np.einsum("...qhd,...khd->...hqk", q, q) / np.sqrt(8) + bias
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("...hqk,...khd->...qhd", weights, q)
    close(jax.jit(attention_fn)(q, q, q, bias=bias), expected)


def test_promotes_to_the_dtype_that_is_asked_for() -> None:
    q = inputs(1, 5, 4, 8)
    assert attention_fn(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(q.astype(jnp.bfloat16), q, q).dtype == jnp.float32


def test_dropout_draws_from_the_key() -> None:
    """Keep 3 elements of 4, scaled, and none when deterministic."""
    q, v = jnp.zeros((1, 64, 2, 4)), jnp.ones((1, 64, 2, 4))
    given = {"dropout_rate": 0.25, "broadcast_dropout": False}
    one, again, other = (
        attention_fn(q, q, v, dropout_rng=jax.random.key(n), **given) for n in (0, 0, 1)
    )
    assert (one == again).all()
    assert (one != other).any()
    assert abs(float(one.mean()) - 1) < 0.02
    seed = jax.random.bits(jax.random.key(0), (2,), jnp.uint32)
    expected = attnx.attention(q, q, v, layout="bshd", dropout=attnx.Dropout(0.25, seed))
    assert (one == expected).all()
    close(attention_fn(q, q, v, deterministic=True, **given), v)


def test_a_layer_trains_with_dropout_under_jit() -> None:
    model = layer(attention_fn, dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    value, gradients = loss_and_gradients(model, inputs(2, 6, 16), {})
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((value, gradients)))


REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (UnsupportedError, {"precision": jax.lax.Precision.HIGHEST}, "precision: .*float32"),
    (UnsupportedError, {"module": object()}, "module: .*sow_weights"),
    (UnsupportedError, {"dropout_rate": 0.5}, "broadcast_dropout=False"),
    (ArgumentError, {"dropout_rate": 0.5, "broadcast_dropout": False}, "dropout_rng: .*got None"),
]


@pytest.mark.parametrize(
    ("kind", "argument", "message"),
    REFUSED,
    ids=[next(iter(a)) for _, a, _ in REFUSED[:3]] + ["rng"],
)
def test_refuses_what_it_cannot_honour(
    kind: type[Exception], argument: dict[str, Any], message: str
) -> None:
    q = inputs(1, 5, 2, 4)
    with pytest.raises(kind, match=message):
        attention_fn(q, q, q, **argument)
