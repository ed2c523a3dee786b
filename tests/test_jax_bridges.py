"""JAX's transforms around another framework's backend (S6.2, S6.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Lengths
from attnx.errors import ArgumentTypeError, UnsupportedError

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("torch", reason="torch is not installed")
jnp = jax.numpy

HOST = ["numpy", "torch"]
B, HQ, HK, L, D = 2, 4, 2, 6, 8


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64 bits, so that nothing but a mistake makes a difference.

    For the whole process: a callback may run in a thread that knows no context of this one.
    """
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def draw(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def arrays() -> list[Any]:
    shapes = (B, HQ, L, D), (B, HK, L, D), (B, HK, L, D)
    return [jnp.asarray(draw(*s, seed=n)) for n, s in enumerate(shapes)]


def jax_loss(backend: str | None) -> Callable[..., Any]:
    return lambda q, k, v, n: jnp.sin(
        attnx.attention(q, k, v, mask=Lengths(n) & Causal(), backend=backend)
    ).sum()


def same(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), one, other)


@pytest.mark.parametrize("backend", HOST)
def test_jaxs_transforms_see_through(backend: str) -> None:
    """grad, jit, vmap of both and over a mask, nested vmap, no entries, checkpoint and scan."""
    q, k, v = arrays()
    n = jnp.array([[2, 5], [6, 0], [9, -3]])  # clamped, since nobody can look
    qs = jnp.stack([q, q * 2, q - 1])
    far = jax_loss(backend)
    each = [jax.grad(far, (0, 1))(x, k, v, jnp.clip(c, 0, L)) for x, c in zip(qs, n, strict=True)]
    mapped = jax.vmap(jax.grad(far, (0, 1)), (0, None, None, 0))
    for run in (mapped, jax.jit(mapped)):
        same([[g[i] for g in run(qs, k, v, n)] for i in range(3)], [list(e) for e in each])
    nested = jax.vmap(jax.vmap(far, (0, None, None, None)), (None, None, None, 0))(qs, k, v, n)
    same(nested[2, 1], far(qs[1], k, v, jnp.clip(n[2], 0, L)))
    assert jax.vmap(far, (0, None, None, None))(qs[:0], k, v, n[0]).shape == (0,)
    same(jax.grad(jax.checkpoint(far))(q, k, v, n[0]), each[0][0])

    def step(c: Any, _: Any) -> Any:
        return c + attnx.attention(c, k, v, backend=backend), None

    scanned = jax.grad(lambda q: jax.lax.scan(step, q, length=2)[0].sum())(q)
    same(scanned, jax.grad(lambda q: step(step(q, 0)[0], 0)[0].sum())(q))


@pytest.mark.parametrize("backend", HOST)
def test_a_mask_alone_may_be_traced(backend: str) -> None:
    q, k, v = arrays()
    call = jax.jit(lambda n: attnx.attention(q, k, v, mask=Lengths(n), backend=backend))
    same(call(jnp.array([2, 5])), attnx.attention(q, k, v, mask=Lengths(jnp.array([2, 5]))))


@pytest.mark.parametrize("backend", HOST)
def test_concrete_arrays_under_a_transform_are_a_constant_of_it(backend: str) -> None:
    """Computed while the program is made, which calls nobody back."""
    q, k, v = arrays()
    want, probabilities = attnx.attention(q, k, v), attnx.attention_weights(q, k)

    def far(x: Any) -> tuple[Any, Any]:
        out = attnx.attention(q, k, v, backend=backend)
        weights = attnx.attention_weights(q, k, backend=backend)
        assert not isinstance(out, jax.core.Tracer)
        return x + out, x + weights

    staged = jax.make_jaxpr(far)(0.0)
    assert "callback" not in str(staged)
    same(jax.jit(far)(0.0), (want, probabilities))
    same(jax.lax.scan(lambda c, x: (c, far(x)[0]), 0, jnp.zeros(1))[1][0], want)
    same(jax.lax.cond(jnp.array(True), far, far, 0.0)[0], want)
    same(jax.grad(lambda x: far(x)[0].sum())(0.0), float(want.size))


@pytest.mark.parametrize("backend", HOST)
def test_concrete_arrays_that_a_transform_has_to_reshape_go_by_a_callback(backend: str) -> None:
    """JAX stages what is done to them: three axes, the other layout, lengths of all entries."""
    q, k, v = arrays()
    turned = [jnp.moveaxis(x, 1, 2) for x in (q, k, v)]
    calls: list[tuple[Any, Any]] = [
        ((q[0], k[0], v[0]), {}),
        (turned, {"layout": "bshd"}),
        ((q, k, v), {"mask": Lengths(jnp.array(3))}),
    ]
    far = jax.jit(lambda: [attnx.attention(*a, **o, backend=backend) for a, o in calls])
    same(far(), [attnx.attention(*a, **o) for a, o in calls])


@pytest.mark.parametrize("backend", HOST)
def test_a_traced_cotangent_of_a_concrete_call_is_refused(backend: str) -> None:
    q, k, v = arrays()
    out, pullback = attnx.attention_vjp(q, k, v, backend=backend)
    with pytest.raises(UnsupportedError, match=r"tracing=by jax .*outside the transform"):
        jax.jit(lambda d: pullback(d).q)(out)


@pytest.mark.parametrize("backend", HOST)
def test_what_jax_cannot_carry_over_raises(backend: str) -> None:
    """S6.5; forward mode is refused by JAX itself."""
    q, k, v = arrays()
    n = jnp.array([2, 5])
    far = jax_loss(backend)
    for run in (lambda f: f, jax.jit):
        with pytest.raises(UnsupportedError, match=f"backend '{backend}' .*of a gradient"):
            run(jax.grad(lambda q: jax.grad(far)(q, k, v, n).sum()))(q)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: far(q, k, v, n), (q,), (q,))
    with pytest.raises(UnsupportedError, match=r"tracing=by jax .*by jax's own means"):
        jax.jit(lambda q: attnx.attention_vjp(q, k, v, backend=backend)[0])(q)
    with pytest.raises(UnsupportedError, match="call attention_weights outside the transform"):
        jax.jit(lambda q: attnx.attention_weights(q, k, backend=backend))(q)
    with pytest.raises(ArgumentTypeError, match="multiply q by it"):
        jax.jit(lambda s: attnx.attention(q, k, v, scale=s, backend=backend))(0.5)


@pytest.mark.parametrize("backend", HOST)
def test_a_large_call_in_a_compiled_program_does_not_wait_for_itself(backend: str) -> None:
    """No JAX computation runs inside of a callback."""
    q = jnp.asarray(draw(2, 8, 512, 64, dtype="float32"))
    far = jax.jit(jax.grad(lambda q: attnx.attention(q * 2, q + 1, q, backend=backend).sum()))
    assert bool(jnp.isfinite(far(far(q))).all())


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("keys", [0, L], ids=["no keys", "keys"])
def test_half_precision_and_no_keys_travel(backend: str, keys: int) -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    k, v = k[:, :, :keys], v[:, :, :keys]
    grads = jax.jit(jax.grad(lambda *a: attnx.attention(*a, backend=backend).sum(), (0, 1, 2)))
    for got, x in zip(grads(q, k, v), (q, k, v), strict=True):
        assert (got.shape, got.dtype) == (x.shape, jnp.bfloat16)
        assert bool(jnp.isfinite(got.astype(jnp.float32)).all())


def test_the_explanation_names_the_callback() -> None:
    q, k, v = arrays()
    said: list[Any] = []
    jax.jit(lambda q: said.append(attnx.explain(q, k, v, backend="torch").exchange) or q)(q)
    assert said == [
        "jax to torch and back, DLPack where memory can be shared; by a callback that takes numpy "
        "arrays"
    ]


def test_a_backend_without_a_gradient_still_serves_where_none_is_wanted(
    loop: Callable[..., Any],
) -> None:
    """S8.2: it is refused as soon as one is, which no transform says before."""
    loop(gradient=False, lse=False)
    q, k, v = arrays()

    def far(q: Any) -> Any:
        return attnx.attention(q, k, v, backend="loop")

    same(jax.jit(far)(q), attnx.attention(q, k, v, backend="numpy"))
    with pytest.raises(UnsupportedError, match="gradient=given"):
        jax.jit(jax.grad(lambda q: far(q).sum()))(q)
