"""What the suite cannot ask: which kernel computes, and what MLX's transforms see."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attnx
import mlx.core as mx
import numpy as np
import pytest
from attnx import Causal, Dense, Lengths, Window
from attnx.errors import UnsupportedError

from attnx_mlx import _fused


def arrays(Lq: int = 9, Lk: int = 9, B: int = 2) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((B, 4, Lq, 8), (B, 2, Lk, 8), (B, 2, Lk, 5))
    return [mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What went into `mx.fast`: the keywords of each call."""
    seen: list[Any] = []
    real = mx.fast.scaled_dot_product_attention

    def counted(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return real(*given, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    return seen


HIDDEN = np.tri(9, dtype=bool)[None, None]

FAST = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": -0.5},
    "window": {"mask": Window(2, 0)},
    "lengths": {"mask": Causal() & Lengths(mx.array([9, 4]))},
    "dense": {"mask": mx.array(HIDDEN)},
    "bias": {"bias": mx.array(np.where(HIDDEN, 0.5, -np.inf).astype(np.float32))},
    "sinks": {"sinks": mx.array([0.0, 1.0, -2.0, 30.0])},
}
TILES = {
    "lse": {"return_lse": True},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout": attnx.Dropout(0.5, 7)},
    "alibi": {"bias": attnx.Alibi((1.0, 0.5, 0.25, 0.125))},
    "huge scale": {"scale": 1e30},
}


@pytest.mark.parametrize("options", FAST.values(), ids=FAST)
def test_mx_fast_computes_what_it_can(options: dict[str, Any], fused: list[Any]) -> None:
    attnx.attention(*arrays(), **options)
    assert len(fused) == 1
    assert attnx.explain(*arrays(), **options).route.startswith("mx.fast")


@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_mx_fast_is_not_asked_for_the_rest(options: dict[str, Any], fused: list[Any]) -> None:
    attnx.attention(*arrays(), **options)
    assert fused == []
    if options != TILES["huge scale"]:  # a value, which no route knows
        assert attnx.explain(*arrays(), **options).route == "array tiles"


def test_causal_is_named_to_mx_fast_only_where_it_means_the_same(fused: list[Any]) -> None:
    attnx.attention(*arrays(), causal=True)
    attnx.attention(*arrays(5, 9), causal="bottom_right")
    attnx.attention(*arrays(5, 9), causal="top_left")
    attnx.attention(*arrays(9, 5), causal="bottom_right")
    assert [options["mask"] == "causal" for options in fused[:2]] == [True, True]
    assert all(isinstance(options["mask"], mx.array) for options in fused[2:])


def test_nan_in_a_hidden_value_keeps_a_call_from_mx_fast(fused: list[Any]) -> None:
    q, k, v = arrays()
    v[:, :, 8] = mx.nan
    assert not mx.any(mx.isnan(attnx.attention(q, k, v, causal=True)[:, :, :8])).item()
    assert fused == []


def test_large_calls_and_float64_go_by_tiles(fused: list[Any]) -> None:
    attnx.attention(*arrays(1024, 1024, 1))
    doubles = [mx.array(np.array(x, np.float64), dtype=mx.float64) for x in arrays()]
    assert attnx.attention(*doubles).dtype == mx.float64
    assert fused == []
    assert _fused.MOST_SCORES < 4 * 1024 * 1024


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
def test_mx_grad_gives_what_the_pullback_gives(options: dict[str, Any]) -> None:
    q, k, v = arrays()
    out, pullback = attnx.attention_vjp(q, k, v, **options)
    pulled = pullback(mx.ones_like(out))
    found = mx.grad(lambda *x: attnx.attention(*x, **options).sum(), argnums=(0, 1, 2))(q, k, v)
    for ours, theirs in zip(found, pulled[:3], strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5).item()


def test_gradients_flow_through_another_frameworks_backend() -> None:
    q, k, v = arrays()

    def loss(backend: str) -> Any:
        return mx.grad(lambda q: attnx.attention(q, k, v, causal=True, backend=backend).sum())(q)

    assert mx.allclose(loss("numpy"), loss("mlx"), atol=1e-5).item()


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap], ids=["compile", "vmap"])
def test_a_program_refuses_another_frameworks_backend(transform: Any) -> None:
    given = [x[None] for x in arrays()]
    with pytest.raises(UnsupportedError, match="call it outside of them"):
        transform(lambda *x: attnx.attention(*x, backend="numpy"))(*given)


def test_a_program_is_made_for_each_chosen_backend() -> None:
    given = arrays()
    program = mx.compile(lambda *x: attnx.attention(*x))
    program(*given)
    with attnx.use_backend("numpy"), pytest.raises(UnsupportedError):
        program(*given)
    assert program(*given).shape == (2, 4, 9, 5)


def test_forward_mode_and_second_derivatives_are_refused() -> None:
    q, k, v = arrays()
    one = mx.ones_like(q)
    with pytest.raises(UnsupportedError, match="in forward mode"):
        mx.jvp(lambda q: attnx.attention(q, k, v), [q], [one])
    inner = mx.grad(lambda q: attnx.attention(q, k, v).square().sum())
    with pytest.raises(UnsupportedError, match="of a gradient"):
        mx.grad(lambda q: inner(q).sum())(q)


def test_weights_are_no_constant_to_a_gradient() -> None:
    q, k, _ = arrays()
    with pytest.raises(UnsupportedError, match="attention_weights"):
        mx.grad(lambda q: attnx.attention_weights(q, k).sum())(q)


def test_masks_are_seen_through_a_program_with_lengths_that_are_arguments() -> None:
    q, k, v = arrays()
    program = mx.compile(lambda n: attnx.attention(q, k, v, mask=Lengths(n)))
    for lengths in ([9, 4], [1, 7]):
        n = mx.array(lengths)
        assert mx.allclose(program(n), attnx.attention(q, k, v, mask=Lengths(n)), atol=1e-5).item()
    shown = mx.array(HIDDEN)
    dense = mx.compile(lambda shown: attnx.attention(q, k, v, mask=Dense(shown)))(shown)
    assert mx.allclose(dense, attnx.attention(q, k, v, mask=shown), atol=1e-5).item()


def test_discovery_imports_no_mlx() -> None:
    code = "import attnx_mlx, sys; attnx_mlx.attnx_backends(); assert 'mlx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_of_gradients_grows_with_the_length_alone() -> None:
    peaks = []
    for length in (2048, 4096):
        q = mx.zeros((1, 1, length, 16))
        mx.eval(q)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda q: attnx.attention(q, q, q).sum())(q))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < min(2.2 * peaks[0], 4096 * 4096)


def test_slopes_are_mapped() -> None:
    q, k, v = arrays()
    slopes = mx.array([[1.0, 0.5, 0.25, 0.1], [0.0, 2.0, 0.3, 0.7]])
    made = mx.vmap(lambda s: attnx.attention(q, k, v, bias=attnx.Alibi(s)))(slopes)
    for n in range(2):
        expected = attnx.attention(q, k, v, bias=attnx.Alibi(slopes[n]))
        assert mx.allclose(made[n], expected, atol=1e-5).item()
