"""JAX arrays: masks as pytrees, the key of jit, 64-bit types, exchange, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx_conformance import oracle

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

B, H, L, D = 2, 2, 5, 4


@pytest.fixture
def backend() -> Any:
    return attnx.get_backend("jax")


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def qkv(length: int = L) -> tuple[Any, Any, Any]:
    return tuple(draw(B, H, length, D, seed=s) for s in range(3))  # type: ignore[return-value]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), tolerance, tolerance)


# Masks as pytrees ------------------------------------------------------------------------------

MASKS: dict[str, Callable[[], Any]] = {
    "causal": Causal,
    "positions": lambda: Causal(q_pos=jnp.arange(L) + 1),
    "window": lambda: Window(2, 0),
    "lengths": lambda: Lengths(jnp.array([2, 4]), jnp.array([3, 5])),
    "scalar": lambda: Lengths(3),
    "list": lambda: Lengths([2, 4]),
    "starts": lambda: Starts(jnp.array([1, 2])),
    "prefix": lambda: Causal() | Prefix(2),
    "segments": lambda: Segments(jnp.arange(L) // 2, jnp.arange(L) // 2),
    "dense": lambda: ~Dense(jnp.eye(L, dtype=bool)),
    "predicate": lambda: Predicate(lambda b, h, i, j: (i + j + h + b) % 2 == 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_goes_through_jit_as_an_argument(name: str, backend: Any) -> None:
    q, k, v = qkv()
    mask = MASKS[name]()
    call = jax.jit(lambda mask: attnx.attention(q, k, v, mask=mask))
    close(call(mask), attnx.attention(q, k, v, mask=mask))
    rebuilt = jax.tree_util.tree_map(lambda leaf: leaf, mask)
    assert rebuilt.structure == mask.structure


def test_a_mask_is_a_carry_of_scan() -> None:
    q, k, v = qkv()

    def step(mask: Any, _: Any) -> Any:
        out = attnx.attention(q, k, v, mask=mask)
        return jax.tree_util.tree_map(lambda n: n + 1, mask), out

    _, outs = jax.lax.scan(step, Lengths(jnp.array([1, 3])), None, length=2)
    close(outs[1], attnx.attention(q, k, v, mask=Lengths(jnp.array([2, 4]))))


def test_traced_lengths_are_clamped_and_concrete_ones_are_checked() -> None:
    q, k, v = qkv()
    call = jax.jit(lambda n: attnx.attention(q, k, v, mask=Lengths(n)))
    close(call(jnp.array([99, -5])), call(jnp.array([L, 0])))
    with pytest.raises(ArgumentError, match=r"Lengths\.kv: expected counts within"):
        attnx.attention(q, k, v, mask=Lengths(jnp.array([99, 1])))


def test_pytree_paths_name_a_masks_fields(backend: Any) -> None:
    paths, _ = jax.tree_util.tree_flatten_with_path(Lengths(jnp.array([1, 2])) & Causal())
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".parts[0].kv"]


BODY = """
q = jnp.ones((2, 2, 4, 8))
call = jax.jit(lambda q, mask: attnx.attention(q, q, q, mask=mask))
print(call(q, attnx.Lengths(jnp.array([2, 3])) & attnx.Causal()).shape)
"""


@pytest.mark.parametrize("imports", ["import attnx, jax", "import jax, attnx"])
def test_the_first_call_may_be_a_jit_with_a_mask_in_either_import_order(imports: str) -> None:
    assert python(f"{imports}\nimport jax.numpy as jnp\n{BODY}") == "(2, 2, 4, 8)"


def test_use_backend_is_part_of_jits_key() -> None:
    q, k, v = qkv()
    traces = []

    @jax.jit
    def call(q: Any) -> Any:
        traces.append(1)
        return attnx.attention(q, k, v)

    call(q)
    with attnx.use_backend("jax"):
        call(q)
        call(q)
    call(q)
    assert len(traces) == 2
    with attnx.use_backend("numpy"):
        call(q)
        call(q)
    call(q)
    assert len(traces) == 3


# 64 bits, and exchange -------------------------------------------------------------------------


def test_float64_is_refused_with_the_hint_while_x64_is_off() -> None:
    q = np.ones((B, H, L, D))
    with pytest.raises(UnsupportedError, match=r'update."jax_enable_x64", True'):
        attnx.attention(q, q, q, backend="jax")
    with pytest.raises(UnsupportedError, match="jax_enable_x64"):
        attnx.get_backend("jax").lane.from_numpy(q)
    with jax.enable_x64(True):
        wide = jnp.asarray(q)
        assert attnx.attention(wide, wide, wide).dtype == np.float64
    with pytest.raises(UnsupportedError, match="jax_enable_x64"):
        attnx.attention(wide, wide, wide)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_of_numpy_and_jax_trade_backends(dtype: Any) -> None:
    q, k, v = (np.asarray(x).astype(dtype) for x in qkv())
    mask = Lengths(np.array([2, 4])) & Causal()
    there = attnx.attention(q, k, v, mask=mask, backend="jax")
    assert isinstance(there, np.ndarray)
    assert there.dtype == dtype
    assert there.flags.writeable
    back = attnx.attention(
        *map(jnp.asarray, (q, k, v)), mask=Lengths(jnp.array([2, 4])) & Causal(), backend="numpy"
    )
    assert isinstance(back, jax.Array)
    close(back.astype(np.float32), there.astype(np.float32), 1e-2)


def test_other_frameworks_arrays_are_computed_by_jax_inside_a_trace() -> None:
    """They are concrete there too, and so is the answer; nothing of it is staged."""
    q, k, v = (np.asarray(x) for x in qkv())
    options: Any = {"mask": Lengths(np.array([2, 4])) & Causal(), "backend": "jax"}
    want = attnx.attention(q, k, v, **options)
    seen = []

    def look(x: Any) -> Any:
        seen.append(attnx.attention(q, k, v, **options))
        out, pullback = attnx.attention_vjp(q, k, v, **options)
        seen.append(out)
        return x + pullback(np.ones_like(out)).v

    close(jax.jit(look)(0.0), look(0.0))
    for got in seen:
        assert isinstance(got, np.ndarray)
        close(got, want)


FIRST_INSIDE_A_TRACE = """
import attnx, jax, jax.numpy as jnp
q = jnp.ones((1, 2, 4, 8))
jax.jit(lambda x: attnx.attention(x, x, x))(q)
lane = attnx.get_backend("jax").lane
print(lane.fast_key(q, q, q) is not None, jax.jit(lambda x: lane.fast_key(x, x, x) is None)(q))
"""


def test_a_lane_first_met_inside_a_trace_knows_concrete_arrays() -> None:
    assert python(FIRST_INSIDE_A_TRACE) == "True True"


def test_attention_vjp_goes_through_jax_for_numpy_arrays() -> None:
    q, k, v = (np.array(x)[:, :, ::-1] for x in qkv())
    out, pullback = attnx.attention_vjp(q, k, v, backend="jax")
    grads = pullback(np.ones_like(out))
    want = oracle.reference(q, k, v, d_out=np.ones_like(out))
    close(grads.q, want.dq)
    close(grads.v, want.dv)


def test_integers_beyond_32_bits_are_refused_and_never_wrapped() -> None:
    q = np.ones((B, H, L, D), np.float32)
    ids = np.arange(L) + 2**40
    with pytest.raises(ArgumentError, match=r"integers: .*fit 32 bits"):
        attnx.attention(q, q, q, mask=Segments(ids, ids), backend="jax")
    with pytest.raises(UnsupportedError, match=r"integers: uint32 .*convert them to int32"):
        jax.jit(lambda n: attnx.attention(*qkv(), mask=Lengths(n)))(jnp.array([1, 2], np.uint32))


def test_arrays_of_two_frameworks_in_one_call_are_a_type_error() -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentTypeError, match="different frameworks"):
        attnx.attention(q, np.asarray(k), v)


def test_a_result_never_shares_memory_with_an_input_or_another_framework(backend: Any) -> None:
    lane = backend.lane
    source = np.ones((64, 64), np.float32)
    owned = lane.own(lane.adopt(source))
    made = lane.from_numpy(source)
    source[:] = 7
    assert float(owned[0, 0]) == float(made[0, 0]) == 1.0
