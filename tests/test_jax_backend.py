"""JAX: transforms, gradients, tiles, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Lengths
from attnx.errors import UnsupportedError
from attnx_conformance import oracle
from attnx_conformance.cases import find
from attnx_conformance.runner import run

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

B, H, L, D = 2, 2, 5, 4


@pytest.fixture
def backend() -> Any:
    return attnx.get_backend("jax")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, backend: Any) -> Iterator[None]:
    """Tiles of 8 x 8, a head at a time, so that small calls walk every loop."""
    from attnx_jax import _tiles

    monkeypatch.setattr(_tiles, "SIDE", 8)
    monkeypatch.setattr(_tiles, "SCORES", 64)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_tiles_are_chosen_from_the_shapes() -> None:
    """A few queries take their keys whole, or copy few at a time; no tile is ragged needlessly."""
    from attnx_jax._tiles import sizes

    def chosen(Hk: int, Lq: int, Lk: int, mask: Any = None) -> Any:
        q, k = (jax.ShapeDtypeStruct((1, h, n, 128), "float32") for h, n in ((8, Lq), (Hk, Lk)))
        return sizes(q, k, k, mask)

    step = chosen(8, 1, 9000)
    assert (step.nk, step.hc) == (1, 8)
    assert chosen(8, 1, 1 << 20).nk == 1
    padded = chosen(8, 1, 9000, Lengths(5))
    assert padded.nk > 1
    assert padded.hc * padded.bk * 128 <= 1 << 20
    assert (chosen(8, 4095, 4095).bq, chosen(8, 4095, 4095).bk) == (819, 819)
    assert chosen(8, 4096, 4096).bk == 1024
    assert chosen(8, 4099, 4099).bk % 16 == 0


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def qkv(length: int = L) -> tuple[Any, Any, Any]:
    return tuple(draw(B, H, length, D, seed=s) for s in range(3))  # type: ignore[return-value]


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), tolerance, tolerance)


# Transforms ------------------------------------------------------------------------------------


def test_grad_under_jit_gives_the_reference_with_bias_sinks_and_lse() -> None:
    q, k, v = qkv()
    bias, sinks = draw(1, H, 1, L, seed=3), draw(H, seed=4)
    d_out, d_lse = draw(B, H, L, D, seed=5), draw(B, H, L, seed=6)

    def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        out, lse = attnx.attention(
            q, k, v, causal=True, bias=bias, sinks=sinks, softcap=3.0, return_lse=True
        )
        return (out * d_out).sum() + (lse * d_lse).sum()

    got = jax.jit(jax.grad(loss, argnums=range(5)))(q, k, v, bias, sinks)
    want = oracle.reference(
        *map(np.asarray, (q, k, v)), causal=True, bias=np.asarray(bias), softcap=3.0,
        sinks=np.asarray(sinks), d_out=np.asarray(d_out), d_lse=np.asarray(d_lse),
    )  # fmt: skip
    for made, name in zip(got, ("dq", "dk", "dv", "dbias", "dsinks"), strict=True):
        close(made, getattr(want, name))


def test_value_and_grad_eager_equals_attention_vjp() -> None:
    q, k, v = qkv()
    out, pullback = attnx.attention_vjp(q, k, v)
    value, grads = jax.value_and_grad(
        lambda q, k, v: attnx.attention(q, k, v).sum(), argnums=(0, 1, 2)
    )(q, k, v)
    close(value, out.sum())
    for made, want in zip(grads, pullback(jnp.ones_like(out)), strict=False):
        close(made, want)


def test_a_gradient_of_lse_alone_leaves_v_without_one() -> None:
    q, k, v = qkv()
    dv = jax.grad(lambda v: attnx.attention(q, k, v, return_lse=True)[1].sum())(v)
    assert not np.any(np.asarray(dv))


def test_vmap_over_arrays_and_over_a_masks_leaves() -> None:
    q, k, v = (x[:, None] for x in qkv())
    lengths = jnp.array([2, 4])

    @jax.jit
    def one(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attnx.attention(q, k, v, mask=mask)

    got = jax.vmap(one)(q, k, v, Lengths(lengths) & Causal())
    want = attnx.attention(q[:, 0], k[:, 0], v[:, 0], mask=Lengths(lengths) & Causal())
    close(got[:, 0], want)
    grads = jax.jit(jax.vmap(jax.grad(lambda *a: one(*a).sum())))(q, k, v, Lengths(lengths))
    alone = jax.jit(jax.grad(lambda q: one(q, k[1], v[1], Lengths(4)).sum()))(q[1])
    close(grads[1], alone)


def test_vmap_keeps_branches_and_loops_over_tiles(small_tiles: None) -> None:
    q = draw(3, H, 20, D)

    def call(q: Any, n: Any) -> Any:
        return attnx.attention(q, q, q, mask=Lengths(n) & Causal())

    program = str(jax.make_jaxpr(jax.vmap(call))(q, jnp.array([1, 12, 20])))
    assert program.count("cond[") == 3  # the look for NaN, and the kinds of tiles on either path


def test_checkpoint_recomputes_to_the_same_gradient() -> None:
    q, k, v = qkv()

    def loss(q: Any) -> Any:
        return attnx.attention(q, k, v, causal=True).sum()

    close(jax.jit(jax.grad(jax.checkpoint(loss)))(q), jax.jit(jax.grad(loss))(q))


def test_a_second_derivative_and_forward_mode_raise() -> None:
    q, k, v = qkv()

    def loss(q: Any) -> Any:
        return (attnx.attention(q, k, v) ** 2).sum()

    with pytest.raises(UnsupportedError, match="higher order"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (q,), (q,))


def test_weights_compute_under_jit_and_refuse_a_gradient() -> None:
    q, k, _ = qkv()
    mask = Lengths(jnp.array([0, 3]))
    weights = jax.jit(lambda q: attnx.attention_weights(q, k, mask=mask))(q)
    close(weights.sum(-1)[1], np.ones((H, L)))
    assert not np.any(np.asarray(weights[0]))
    with pytest.raises(UnsupportedError, match="attention_weights"):
        jax.grad(lambda q: attnx.attention_weights(q, k).sum())(q)


def test_the_gradient_stops_at_attention_vjp() -> None:
    q, k, v = qkv()
    dq = jax.grad(lambda q: attnx.attention_vjp(q, k, v)[0].sum())(q)
    assert not np.any(np.asarray(dq))


def test_lengths_scale_and_softcap_do_not_compile_again(backend: Any) -> None:
    from attnx_jax._backend import _forward_kernel as kernel

    q, k, v = qkv()
    kernel.clear_cache()
    for length, scale, softcap in ((2, 0.5, 2.0), (3, -1.0, 7.0), (4, 0.0, 1.0)):
        attnx.attention(q, k, v, mask=Lengths(length), scale=scale, softcap=softcap)
    attnx.attention(q, k, v, mask=Lengths(5), scale=2.0, softcap=1.5)
    assert kernel._cache_size() == 1


def test_a_jitted_call_traces_once_for_all_lengths() -> None:
    q, k, v = qkv()
    traces = []

    @jax.jit
    def call(q: Any, mask: Any) -> Any:
        traces.append(mask.structure)
        return attnx.attention(q, k, v, mask=mask)

    for lengths in ([1, 2], [5, 0], [3, 3]):
        call(q, Lengths(jnp.array(lengths)) & Causal())
    assert traces == ["(lengths[kv]&causal[square])"]


def test_shard_map_takes_a_call_as_it_is() -> None:
    from jax.sharding import PartitionSpec

    q, k, v = qkv(20)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, "x")
    call = jax.shard_map(
        lambda q, k, v: attnx.attention(q, k, v, causal=True),
        mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec,
    )  # fmt: skip
    close(jax.jit(call)(q, k, v), attnx.attention(q, k, v, causal=True))


# Tiles -----------------------------------------------------------------------------------------

CASES = [
    "causal-bottom-right-tall-nan", "bool-full-poison", "window-lengths-bottom-right",
    "segments-batched-nan", "prefix-model", "not-lengths", "predicate-batch", "bias-heads-and-keys",
    "sinks-empty-rows", "bias-everything", "live-value-infinite-both-ways",
    "gradient-bias-sum-masked", "two-batch-axes", "causal-paged",
]  # fmt: skip
# A last block of one row and one key: jaxlib 0.10.2 compiled its kind wrongly.
FEW = ["grouped", "live-cotangent-nan-causal"]


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.sweep) for name in CASES)]
)
def test_many_tiles_and_loops_give_the_reference(name: str, small_tiles: None) -> None:
    case = find(name)
    outcome = run(case, "jax", "float32", gradients="framework")
    assert outcome.ok, outcome.detail


def test_the_programs_memory_grows_with_length_and_not_its_square() -> None:
    q = jax.ShapeDtypeStruct((1, 1, 32768, 64), np.float32)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attnx.attention(q, k, v, causal=True).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6


# Isolation -------------------------------------------------------------------------------------


def test_nan_in_one_value_reaches_only_the_rows_that_see_it_under_jit() -> None:
    q, k, v = qkv()
    bad = v.at[0, 0, 3, 1].set(jnp.nan)
    call = jax.jit(lambda q, k, v: attnx.attention(q, k, v, causal=True))
    broken = np.isnan(np.asarray(call(q, k, bad)))
    assert np.argwhere(broken).tolist() == [[0, 0, 3, 1], [0, 0, 4, 1]]
    close(np.where(broken, 0, call(q, k, bad)), np.where(broken, 0, call(q, k, v)))


def test_unseen_keys_may_hold_anything_in_the_gradient_too() -> None:
    q, k, v = qkv()
    mask = Lengths(jnp.array([3, L]))

    @jax.jit
    def grads(k: Any, v: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return attnx.attention(*arrays, mask=mask).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    hide = (jnp.arange(L) >= 3)[:, None] & (jnp.arange(B) == 0)[:, None, None, None]
    poisoned = grads(jnp.where(hide, jnp.inf, k), jnp.where(hide, jnp.nan, v))
    for got, want in zip(poisoned, grads(k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert not np.any(np.asarray(poisoned[1][0, :, 3:]))


def test_float64_stays_float64_throughout() -> None:
    q, k, v, d_out = (np.random.default_rng(s).standard_normal((B, H, L, D)) for s in range(4))
    want = oracle.reference(q, k, v, causal=True, d_out=d_out)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in (q, k, v)]
        (out, lse), pull = attnx.attention_vjp(*arrays, causal=True, return_lse=True)
        grads = pull(jnp.asarray(d_out))
    assert {x.dtype.name for x in (out, lse, *grads[:3])} == {"float64"}
    for got, name in zip((out, lse, *grads[:3]), ("out", "lse", "dq", "dk", "dv"), strict=True):
        close(got, getattr(want, name), 1e-12)


def test_explain_and_backends_say_what_jax_can_do(backend: Any) -> None:
    q, k, v = qkv()
    found = attnx.explain(q, k, v, causal=True)
    assert found.choice == "jax"
    assert found.route == "blocked tiles under custom_vjp"
    assert backend.devices() == ("cpu",)
    assert backend.capabilities.compile
    assert backend.version() == jax.__version__
