"""Multi-head attention against the layers that people have, outputs and every gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attnx
from attnx import HeadWeights, Lengths
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.heads import Rotary
from attnx.positions import Yarn, rope_table

if TYPE_CHECKING:
    from collections.abc import Callable

B, LQ, LK, E, EC, HQ, HK = 2, 5, 7, 12, 10, 6, 2
D, DV, EO = 4, 3, 9


def arrays(seed: int = 0, dtype: Any = np.float64) -> tuple[Any, Any, HeadWeights]:
    """x, context and weights of which no two sizes agree."""
    rng = np.random.default_rng(seed)
    shapes = ((E, HQ * D), (EC, HK * D), (EC, HK * DV), (HQ * DV, EO))
    matrices = [rng.standard_normal(s).astype(dtype) / 4 for s in shapes]
    vectors = [rng.standard_normal(s[1]).astype(dtype) for s in shapes]
    x, c = rng.standard_normal((B, LQ, E)), rng.standard_normal((B, LK, EC))
    return x.astype(dtype), c.astype(dtype), HeadWeights(*matrices, *vectors)


def head_by_head(x: Any, c: Any, w: HeadWeights, **options: Any) -> Any:
    """The definition, one query head at a time."""
    found = []
    for h in range(HQ):
        g = h // (HQ // HK)
        q = x @ w.wq[:, h * D : h * D + D] + w.bq[h * D : h * D + D]
        k = c @ w.wk[:, g * D : g * D + D] + w.bk[g * D : g * D + D]
        v = c @ w.wv[:, g * DV : g * DV + DV] + w.bv[g * DV : g * DV + DV]
        found.append(attnx.attention(q[:, None], k[:, None], v[:, None], **options)[:, 0])
    return np.concatenate(found, axis=-1) @ w.wo + w.bo


OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": "bottom_right", "softcap": 2.0}, {"mask": Lengths([7, 0]), "scale": 0.3},
]  # fmt: skip
GIVEN = {"num_heads": HQ, "num_kv_heads": HK}


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "lengths"])
def test_heads_are_attention_side_by_side(options: dict[str, Any]) -> None:
    x, c, w = arrays()
    y = attnx.multi_head_attention(x, c, weights=w, **GIVEN, **options)
    assert y.shape == (B, LQ, EO)
    np.testing.assert_allclose(y, head_by_head(x, c, w, **options), rtol=1e-12, atol=1e-12)


def leaves(grads: attnx.HeadGradients) -> list[Any]:
    flat = [grads.x, grads.context, *grads.weights, grads.bias, grads.sinks]
    return [g for g in flat if g is not None]


def test_the_pullback_agrees_with_differences() -> None:
    """Every input, bias and sinks among them, along a random direction."""
    x, c, w = arrays()
    rng = np.random.default_rng(1)
    bias, sinks = rng.standard_normal((1, HQ, 1, LK)), rng.standard_normal(HQ)
    flat = [x, c, *w, bias, sinks]

    def call(parts: list[Any]) -> Any:
        x, c, *rest, bias, sinks = parts
        return attnx.multi_head_attention(
            x, c, weights=HeadWeights(*rest), **GIVEN, bias=bias, sinks=sinks
        )

    y, pullback = attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN, bias=bias, sinks=sinks)
    np.testing.assert_array_equal(y, call(flat))
    d_y = rng.standard_normal(y.shape)
    for n, grad in enumerate(leaves(pullback(d_y))):
        u = rng.standard_normal(flat[n].shape)
        ahead, behind = (
            (call([*flat[:n], flat[n] + s * 1e-6 * u, *flat[n + 1 :]]) * d_y).sum() for s in (1, -1)
        )
        assert (grad * u).sum() == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotary_positions_turn_queries_and_keys(style: str) -> None:
    """As turning them by hand, with gradients; a scaling that stretches them is pulled back too."""
    x, c, w = arrays()
    scaling = Yarn(4.0, 16)
    tables = [rope_table(np.arange(n), D, scaling=scaling, dtype="float64") for n in (LQ, LK)]
    rotary = Rotary(tables[0], style, tables[1])
    y, pullback = attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN, rotary=rotary)
    q = (x @ w.wq + w.bq).reshape(B, LQ, HQ, D)
    k, v = ((c @ m + b).reshape(B, LK, HK, -1) for m, b in ((w.wk, w.bk), (w.wv, w.bv)))
    given = {"style": style, "layout": "bshd", "scaling": scaling}
    q, k = attnx.rope(q, np.arange(LQ), **given), attnx.rope(k, np.arange(LK), **given)
    out = attnx.attention(q, k, v, layout="bshd").reshape(B, LQ, -1) @ w.wo + w.bo
    np.testing.assert_allclose(y, out, rtol=1e-12)
    d_y, u = (
        np.random.default_rng(n).standard_normal(s) for n, s in ((1, y.shape), (2, w.wk.shape))
    )
    ends = [
        (attnx.multi_head_attention(
            x, c, weights=w._replace(wk=w.wk + s * 1e-6 * u), **GIVEN, rotary=rotary
        ) * d_y).sum() for s in (1, -1)
    ]  # fmt: skip
    told = (pullback(d_y).weights.wk * u).sum()
    assert told == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
    with pytest.raises(ArgumentTypeError, match=r"rotary: expected attnx\.heads\.Rotary"):
        attnx.multi_head_attention(x, c, weights=w, **GIVEN, rotary=tables[0])


def test_without_a_context_x_has_all_of_its_gradient() -> None:
    """Also with one sequence alone, without biases, and after the answer was written to."""
    x, _, w = arrays()
    w = HeadWeights(w.wq, w.wq[:, : HK * D], w.wq[:, : HK * D], w.wq.T)
    y, pullback = attnx.multi_head_attention_vjp(x[0], weights=w, **GIVEN, causal=True)
    d_y = np.ones_like(y)
    two, pull = attnx.multi_head_attention_vjp(x[0], x[0], weights=w, **GIVEN, causal=True)
    np.testing.assert_array_equal(y, two)
    y[:] = 0
    alone, apart = pullback(d_y), pull(d_y)
    np.testing.assert_allclose(alone.x, apart.x + apart.context, rtol=1e-12)
    assert alone.context is None
    assert alone.weights.bq is None
    np.testing.assert_array_equal(alone.weights.wo, apart.weights.wo)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_dtype_stays_itself(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    x, c, w = arrays(dtype=kind)
    y, pullback = attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN)
    wide = arrays(dtype=np.float64)[2]._make(m.astype(np.float64) for m in w)
    exact = head_by_head(x.astype(np.float64), c.astype(np.float64), wide)
    assert {a.dtype for a in (y, *leaves(pullback(y)))} == {kind}
    unit = float(np.finfo(kind).eps) if dtype != "bfloat16" else 2.0**-7
    np.testing.assert_allclose(y.astype(np.float64), exact, atol=8 * unit * np.abs(exact).max())


# The layers that people have


def both(layer: Any, x: Any, c: Any, ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Outputs, and gradients of the inputs and of all parameters, by one backward each."""
    import torch

    found = []
    for call in (ours, theirs):
        layer.zero_grad(set_to_none=True)
        given = [a.clone().requires_grad_() for a in (x, c)]
        y = call(*given)
        y.square().sum().backward()
        found.append([y, *(a.grad for a in given), *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("apart", [True, False], ids=["kdim and vdim", "one projection"])
def test_it_is_torchs_layer(bias: bool, apart: bool) -> None:
    """Cross-attention with a padding mask, whose meaning is the opposite there."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    sizes = {"kdim": EC, "vdim": EC} if apart else {}
    layer = torch.nn.MultiheadAttention(
        E, 3, bias=bias, batch_first=True, dtype=torch.float64, **sizes
    )
    x, c = torch.randn(B, LQ, E).double(), torch.randn(B, LK, EC if apart else E).double()
    hidden = torch.arange(LK) >= torch.tensor([[7], [3]])

    def ours(x: Any, c: Any) -> Any:
        weights = HeadWeights.from_torch(layer)
        return attnx.multi_head_attention(x, c, weights=weights, num_heads=3, mask=Lengths([7, 3]))

    both(layer, x, c, ours, lambda x, c: layer(x, c, c, key_padding_mask=hidden)[0])


def test_it_is_flaxs_layer() -> None:
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(
        num_heads=2, in_features=E, qkv_features=8, out_features=EO, decode=False,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.query.bias[...] = jax.numpy.ones((2, 4))
    x, c = (a.astype(np.float32) for a in (arrays()[0], arrays(1)[0]))

    def ours(layer: Any, x: Any, c: Any) -> Any:
        weights = HeadWeights.from_flax(layer)
        return (attnx.multi_head_attention(x, c, weights=weights, num_heads=2) ** 2).sum()

    def theirs(layer: Any, x: Any, c: Any) -> Any:
        return (layer(x, c) ** 2).sum()

    made, wanted = (
        nnx.jit(nnx.value_and_grad(f, argnums=(0, 1, 2)))(layer, x, c) for f in (ours, theirs)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), made, wanted)


@pytest.mark.parametrize("biased", [True, False])
def test_it_is_kerass_layer(biased: bool) -> None:
    """By its definition over its kernels: `einsum` on each axis."""
    rng = np.random.default_rng(3)
    q, k, v, o = (rng.standard_normal(s) for s in ((E, 2, D), (EC, 2, D), (EC, 2, DV), (2, DV, EO)))
    vectors = [rng.standard_normal(s) * biased for s in ((2, D), (2, D), (2, DV), (EO,))]
    x, c, _ = arrays()
    flat = [a for pair in zip((q, k, v, o), vectors, strict=True) for a in pair]
    weights = HeadWeights.from_keras(flat if biased else [q, k, v, o])
    made = attnx.multi_head_attention(x, c, weights=weights, num_heads=2)
    heads = (
        np.einsum("ble,ehd->bhld", a, w) + b[:, None]
        for a, w, b in zip((x, c, c), (q, k, v), vectors[:3], strict=True)
    )
    out = attnx.attention(*heads)
    np.testing.assert_allclose(made, np.einsum("bhld,hde->ble", out, o) + vectors[3], rtol=1e-12)


KERAS = """
import keras, numpy as np, attnx
rng = np.random.default_rng(0)
x, c = (rng.standard_normal(s).astype("float32") for s in ((2, 5, 12), (2, 7, 10)))
layer = keras.layers.{layer}
expected = np.asarray(layer(x, c))
weights = attnx.HeadWeights.from_keras([np.asarray(w) for w in layer.get_weights()])
made = attnx.multi_head_attention(x, c, weights=weights, num_heads=6, num_kv_heads={shared})
np.testing.assert_allclose(made, expected, atol=1e-5)
"""


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
@pytest.mark.parametrize(
    ("layer", "shared"),
    [("MultiHeadAttention(6, 4)", 6), ("GroupQueryAttention(4, 6, 2)", 2)],
    ids=["heads", "shared heads"],
)
def test_it_is_a_built_keras_layer(layer: str, shared: int) -> None:
    """The layer itself, in a process of its own: Keras fixes its backend when it is imported."""
    code = KERAS.format(layer=layer, shared=shared)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "KERAS_BACKEND": "jax"}
    )


def test_layers_that_weights_cannot_tell_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ArgumentError, match="without add_bias_kv and add_zero_attn"):
            HeadWeights.from_torch(torch.nn.MultiheadAttention(E, 2, **options))
    for load in (HeadWeights.from_torch, HeadWeights.from_flax, HeadWeights.from_keras):
        with pytest.raises(ArgumentTypeError, match="layer: expected a"):
            load(object())
    with pytest.raises(ArgumentError, match="got 3 arrays; a layer must be built first"):
        HeadWeights.from_keras([1, 2, 3])


# Transforms, and the other frameworks' arrays


def test_a_compiled_layer_is_one_program() -> None:
    torch = pytest.importorskip("torch")
    x, c, w = arrays(dtype=np.float32)
    x, c, w = torch.from_numpy(x), torch.from_numpy(c), HeadWeights(*map(torch.from_numpy, w))

    def call(x: Any, c: Any, w: HeadWeights) -> Any:
        return attnx.multi_head_attention(x, c, weights=w, **GIVEN, causal="bottom_right")

    made = torch.compile(call, fullgraph=True, backend="aot_eager")(x, c, w)
    torch.testing.assert_close(made, call(x, c, w))


def test_the_pullback_knows_autocast() -> None:
    """As PyTorch's own differentiation, which ends in the dtype of x; NumPy's integers count."""
    torch = pytest.importorskip("torch")
    x, _, w = arrays(dtype=np.float32)
    x, w = torch.tensor(x, requires_grad=True), HeadWeights(*map(torch.tensor, w))
    w = w._replace(wk=w.wk.repeat(2, 1)[:E], wv=w.wv.repeat(2, 1)[:E])
    given = {"weights": w, "num_heads": np.int64(HQ), "num_kv_heads": HK, "causal": True}
    with torch.autocast("cpu", torch.bfloat16):
        y, pullback = attnx.multi_head_attention_vjp(x, **given)
        expected = torch.autograd.grad(attnx.multi_head_attention(x, **given).sum(), x)[0]
    found = pullback(torch.ones_like(y)).x
    assert y.dtype == found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-1)


def test_arrays_of_two_devices_are_told() -> None:
    torch = pytest.importorskip("torch")
    x, c, w = arrays()
    x, c, w = torch.tensor(x), torch.tensor(c), HeadWeights(*map(torch.tensor, w))
    with pytest.raises(ArgumentError, match=r"weights.wq: expected the device of x, cpu, got meta"):
        attnx.multi_head_attention(x, c, weights=w._replace(wq=w.wq.to("meta")), **GIVEN)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_frameworks_say_the_same(framework: str) -> None:
    pytest.importorskip(framework)
    lane = attnx.get_backend(framework).lane
    x, c, w = arrays(dtype=np.float32)
    y, pullback = attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN)
    ours = HeadWeights(*(lane.from_numpy(m) for m in w))
    given = lane.from_numpy(x), lane.from_numpy(c)
    made, pull = attnx.multi_head_attention_vjp(*given, weights=ours, **GIVEN)
    for a, b in zip((made, *leaves(pull(made))), (y, *leaves(pullback(y))), strict=True):
        np.testing.assert_allclose(lane.to_numpy(a), b, rtol=1e-4, atol=1e-4)


# Errors


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_heads": 0}, "num_heads: expected an integer >= 1, got 0"),
        ({"num_heads": 6.0}, "num_heads: expected an integer, got float"),
        ({"num_kv_heads": 4}, "num_kv_heads: expected a divisor of num_heads=6, got 4"),
        ({"wq": np.ones((E, 7))}, r"weights.wq: expected \(E, Hq \* D\) = \(12, 6 \* D\), got"),
        ({"wk": np.ones((EC, 6))}, r"weights.wk: expected \(10, 2 \* 4\) for 2 heads of wq's D=4"),
        ({"wo": np.ones((5, EO))}, r"weights.wo: expected \(Hq \* Dv, Eo\) = \(6 \* 3, Eo\)"),
        ({"bv": np.ones(5)}, r"weights.bv: expected \(6,\), got \(5,\)"),
        ({"wv": np.ones((EC, 6), np.float32)}, "weights.wv: expected x's dtype float64, got"),
        ({"wv": None}, "weights.wv: expected a plain numpy array like x, got NoneType"),
        ({"weights": ()}, r"weights: expected attnx.HeadWeights\(wq, wk, wv, wo\), got tuple"),
        ({"wo": np.ma.ones((18, EO))}, "weights.wo: expected a plain numpy array .* MaskedArray"),
        ({"x": np.ones(E)}, r"x: expected \(\*B, Lq, E\), got \(12,\)"),
        ({"x": np.ma.ones((B, LQ, E))}, "x: expected a plain numpy array of .* MaskedArray of fl"),
        ({"x": np.ones((B, LQ, E), int)}, "x: expected a plain numpy array of .* ndarray of int64"),
        ({"rotary": Rotary((1, 2), "half")}, "rotary.table: expected a table of .* got tuple"),  # type: ignore[arg-type]
        ({"context": np.ones((3, LK, EC))}, r"context: expected \(\*B, Lk, Ec\) with \*B = \(2,\)"),
    ],
    ids=[
        "heads",
        "a fraction",
        "shared heads",
        "wq",
        "wk",
        "wo",
        "bv",
        "dtype",
        "missing",
        "a tuple",
        "masked weights",
        "rank",
        "masked",
        "integers",
        "rotary",
        "batch",
    ],
)
def test_wrong_arguments_are_told(changes: dict[str, Any], told: str) -> None:
    x, c, w = arrays()
    given: dict[str, Any] = {"x": x, "context": c, "weights": w, **GIVEN}
    for name, value in changes.items():
        if name in HeadWeights._fields:
            given["weights"] = given["weights"]._replace(**{name: value})
        else:
            given[name] = value
    with pytest.raises((ArgumentError, ArgumentTypeError), match=told):
        attnx.multi_head_attention(**given)


def test_wrong_cotangents_and_options_are_told() -> None:
    x, c, w = arrays()
    y, pullback = attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN)
    with pytest.raises(ArgumentError, match=r"d_y: expected y's shape \(2, 5, 9\)"):
        pullback(y[:, :2])
    with pytest.raises(ArgumentTypeError, match="and dtype float64, got"):
        pullback(y.astype(np.float32))
    with pytest.raises(ArgumentTypeError, match="d_y: expected a numpy array like x, got list"):
        pullback([1.0])
    with pytest.raises(ArgumentTypeError, match="layout: multi_head_attention_vjp has no such"):
        attnx.multi_head_attention_vjp(x, c, weights=w, **GIVEN, layout="bshd")
