"""ALiBi (S2.7): a bias of slopes, the same as the array that it stands for, which is never made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnx
from attnx import Alibi, Causal, Dropout, Lengths, Window
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError

Make = Callable[..., tuple[Any, Any, Any]]
f32 = np.float32
SLOPES = np.array([0.5, 0.25, 0.3, 0.0625], f32)
FRAMEWORKS: dict[str, Any] = {"torch": torch.tensor, "jax": jnp.asarray}


def spelled(Lq: int, Lk: int, shift: Any = 0, slopes: Any = SLOPES) -> Any:
    """The array that an `Alibi` stands for, (1 or B, Hq, Lq, Lk)."""
    p = np.arange(Lq)[:, None] + np.reshape(shift, (-1, 1, 1, 1))
    return -np.abs(p - np.arange(Lk)).astype(f32) * slopes[:, None, None]


def everything(q: Any, k: Any, v: Any, **options: Any) -> list[Any]:
    """out, lse, dq, dk and dv, by NumPy."""
    made, pullback = attnx.attention_vjp(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(5)
    cotangents = [rng.standard_normal(x.shape).astype(x.dtype) for x in made]
    return [*made, *pullback(*cotangents)[:3]]


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": "bottom_right"},
    "softcap and sinks": {"softcap": 1.5, "sinks": np.linspace(-1, 1, 4, dtype=f32)},
    "dropout": {"dropout": Dropout(0.3, 11)},
    "a window": {"mask": Window(5, 2, "bottom_right")},
    "a scale": {"scale": -0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("Lk", [11, 1300], ids=["in one piece", "in tiles"])
def test_it_is_the_array_that_it_stands_for(options: dict[str, Any], Lk: int, make: Make) -> None:
    """To the bit on NumPy, gradients included; the bias itself has none."""
    q, k, v = make(Lq=9 if Lk < 100 else 270, Lk=Lk)
    Lq = q.shape[2]
    found = everything(q, k, v, bias=Alibi(SLOPES, "bottom_right"), **options)
    expected = everything(q, k, v, bias=spelled(Lq, Lk, Lk - Lq), **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    _, pullback = attnx.attention_vjp(q, k, v, bias=Alibi(SLOPES, "bottom_right"))
    assert pullback(np.ones_like(found[0])).bias is None


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_layout_moves_no_distance(layout: str, make: Make) -> None:
    q, k, v = make(Lk=9, layout=layout)
    found = attnx.attention(q, k, v, bias=Alibi(SLOPES, "top_left"), layout=layout)
    expected = attnx.attention(q, k, v, bias=spelled(6, 9), layout=layout)
    np.testing.assert_array_equal(found, expected)


def test_decoding_equals_the_full_run(make: Make) -> None:
    """S7: one query before the cache stands at its last key."""
    q, k, v = make(Lq=20, Lk=20)
    whole = attnx.attention(q, k, v, bias=Alibi(SLOPES), causal=True)
    for n in (1, 13, 20):
        step = attnx.attention(
            q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], bias=Alibi(SLOPES, "bottom_right")
        )
        np.testing.assert_allclose(step[:, :, 0], whole[:, :, n - 1], rtol=2e-5, atol=2e-6)


def test_lengths_move_bottom_right(make: Make) -> None:
    """S3.5: with the lengths of the call's `Lengths`, for each batch entry."""
    q, k, v = make(Lk=9)
    mask = Lengths(np.array([9, 5]), np.array([6, 2])) & Causal("bottom_right")
    found = attnx.attention(q, k, v, bias=Alibi(SLOPES, "bottom_right"), mask=mask)
    expected = attnx.attention(q, k, v, bias=spelled(6, 9, np.array([3, 3])), mask=mask)
    np.testing.assert_array_equal(found, expected)
    mask = Lengths(np.array([9, 4]))
    found = attnx.attention(q, k, v, bias=Alibi(SLOPES, "bottom_right"), mask=mask)
    expected = attnx.attention(q, k, v, bias=spelled(6, 9, np.array([3, -2])), mask=mask)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("first", [0, 2**24 + 1, 2**40 + 1], ids=str)
def test_far_positions_lose_no_digit(first: int, make: Make) -> None:
    """A distance is an integer until it meets its slope."""
    q, k, v = make(Lq=6, Lk=6)
    pos = np.arange(6) + first
    found = attnx.attention(q, k, v, bias=Alibi(SLOPES, q_pos=pos, kv_pos=pos))
    np.testing.assert_array_equal(found, attnx.attention(q, k, v, bias=spelled(6, 6)))


@pytest.mark.parametrize("heads", [8, 6], ids="{} heads".format)
def test_it_is_the_alibi_of_bloom(heads: int) -> None:
    """Transformers adds slope * j, which differs from -slope * (i - j) by a constant a row (S7)."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 2, heads, 33, 8, generator=generator)
    theirs = bloom.build_alibi_tensor(torch.ones(2, 33, dtype=torch.long), heads, torch.float32)
    expected = attnx.attention(q, k, v, bias=theirs.view(2, heads, 1, 33), causal=True)
    slopes = attnx.alibi_slopes(heads)
    found = attnx.attention(q, k, v, bias=Alibi(slopes), causal=True)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_no_array_of_all_pairs_is_made(gradient: bool) -> None:
    """With L = 3000, all that is held at a time is far less than one L x L array of float32."""
    L = 3000
    q = np.random.default_rng(3).standard_normal((1, 2, L, 4)).astype(f32)
    alibi = Alibi(SLOPES[:2])
    tracemalloc.start()
    if gradient:
        out, pullback = attnx.attention_vjp(q, q, q, bias=alibi, causal=True)
        pullback(out)
    else:
        attnx.attention(q, q, q, bias=alibi, causal=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * L * L / 2


# Frameworks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_says_the_same(framework: str, make: Make) -> None:
    """Arrays of slopes and numbers, lengths in arrays, and gradients by the framework's own."""
    q, k, v = make(Lk=9)
    ends = np.array([9, 5])
    expected, pullback = attnx.attention_vjp(
        q, k, v, bias=Alibi(SLOPES, "bottom_right"), mask=Lengths(ends)
    )
    array = FRAMEWORKS[framework]
    x, y, z, slopes, kv = (array(a) for a in (q, k, v, SLOPES, ends))

    def loss(x: Any, y: Any, z: Any, alibi: Any) -> tuple[Any, Any]:
        out = attnx.attention(x, y, z, bias=alibi, mask=Lengths(kv))
        return out.sum(), out

    given = Alibi(slopes, "bottom_right")
    if framework == "torch":
        leaves = [a.requires_grad_() for a in (x, y, z)]
        total, out = loss(*leaves, given)
        grads = torch.autograd.grad(total, leaves)
        numbers = loss(*leaves, Alibi(SLOPES.tolist(), "bottom_right"))[1]
        assert torch.equal(numbers, out)
    else:
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        grads, out = step(x, y, z, given)
    np.testing.assert_allclose(out.tolist(), expected, rtol=2e-5, atol=2e-6)
    for one, other in zip(grads, pullback(np.ones_like(expected)), strict=False):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-4, atol=2e-5)


def test_pytorch_compiles_and_maps_it(make: Make) -> None:
    """`torch.compile` in one graph, with explicit positions too; vmap over slopes and positions."""
    q, k, v = (torch.tensor(a) for a in make(Lk=9))
    slopes, pos = torch.tensor(SLOPES), torch.arange(6) * 2

    def call(slopes: Any, pos: Any) -> Any:
        placed = Alibi(slopes, q_pos=pos)
        moved = Alibi(slopes, "bottom_right")
        first = attnx.attention(q, k, v, bias=placed, mask=Causal("bottom_right"))
        return first, attnx.attention(q, k, v, bias=moved, dropout=Dropout(0.3, 5))

    eager = call(slopes, pos)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(slopes, pos)
    mapped = torch.func.vmap(call)(torch.stack([slopes, 2 * slopes]), torch.stack([pos, pos + 1]))
    for one, other, many in zip(compiled, eager, mapped, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(many[0], other, rtol=2e-5, atol=2e-6)
    trees = torch.func.vmap(lambda alibi: attnx.attention(q, k, v, bias=alibi))(
        Alibi(torch.stack([slopes, 2 * slopes]), "bottom_right")
    )
    torch.testing.assert_close(trees[1], attnx.attention(
        q, k, v, bias=Alibi(2 * slopes, "bottom_right")
    ), rtol=2e-5, atol=2e-6)  # fmt: skip


def test_a_compiled_program_takes_slopes_that_are_symbols(make: Make) -> None:
    """Python's numbers may change from call to call, and one that is not finite is still told."""
    q, k, v = (torch.tensor(a) for a in make())

    def call(slopes: list[float]) -> Any:
        return attnx.attention(q, k, v, bias=Alibi(slopes), causal=True)

    program = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for slopes in ([0.5, 0.25, 0.3, 0.1], [0.75, 0.25, 0.4, 0.2]):
        torch.testing.assert_close(program(slopes), call(slopes))
    with pytest.raises(Exception, match=r"expected finite numbers|Observed exception"):
        program([0.75, 0.25, 0.4, np.inf])


def test_jax_maps_it(make: Make) -> None:
    """As an argument of jit and vmap, its arrays are leaves."""
    q, k, v = (jnp.asarray(a) for a in make(Lk=9))
    both = Alibi(jnp.stack([SLOPES, 2 * SLOPES]), "bottom_right")
    mapped = jax.jit(jax.vmap(lambda alibi: attnx.attention(q, k, v, bias=alibi)))(both)
    for n, factor in enumerate((1, 2)):
        expected = attnx.attention(*map(np.asarray, (q, k, v)), bias=spelled(6, 9, 3) * f32(factor))
        np.testing.assert_allclose(mapped[n], expected, rtol=2e-5, atol=2e-6)
    assert len(jax.tree_util.tree_leaves(both)) == 1
    assert jax.tree_util.tree_structure(both) == jax.tree_util.tree_structure(
        Alibi(jnp.ones(4), "bottom_right")
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_frameworks_backend_gets_it(framework: str, make: Make) -> None:
    """The exchange converts its arrays; so does the bridge that carries gradients."""
    arrays = make(Lk=9)
    expected, pullback = attnx.attention_vjp(*arrays, bias=Alibi(SLOPES, "bottom_right"))
    dq = pullback(np.ones_like(expected)).q
    array = FRAMEWORKS[framework]
    q, k, v, slopes = (array(a) for a in (*arrays, SLOPES))

    def loss(q: Any) -> Any:
        alibi = Alibi(slopes, "bottom_right")
        return attnx.attention(q, k, v, bias=alibi, backend="numpy").sum()

    grad = torch.func.grad if framework == "torch" else jax.grad
    np.testing.assert_array_equal(np.asarray(grad(loss)(q)), dq)


def test_slopes_have_no_gradient_and_say_so(make: Make) -> None:
    """Never a zero in its place: not by autograd, `torch.func`, JAX or another's backend."""
    arrays = make()
    q, k, v = (torch.tensor(a) for a in arrays)
    learned = torch.tensor(SLOPES, requires_grad=True)
    told = "the slopes of an Alibi have no gradient: detach them"
    with pytest.raises(UnsupportedError, match=told):
        attnx.attention(q, k, v, bias=Alibi(learned))
    with pytest.raises(UnsupportedError, match="attention_weights has no gradient"):
        attnx.attention_weights(q, k, bias=Alibi(learned))
    out, _ = attnx.attention_vjp(q, k, v, bias=Alibi(learned))
    assert not out.requires_grad

    def loss(slopes: Any, backend: Any = None) -> Any:
        return attnx.attention(q, k, v, bias=Alibi(slopes), backend=backend).sum()

    with pytest.raises(UnsupportedError, match=told):
        torch.func.grad(loss)(torch.tensor(SLOPES))
    slopes = torch.tensor(np.stack([SLOPES, SLOPES]))
    with pytest.raises(UnsupportedError, match="detach the slopes"):
        torch.func.grad(
            lambda s: torch.func.vmap(lambda one: loss(one, "numpy"))(s).sum()
        )(slopes)  # fmt: skip
    q, k, v = (jnp.asarray(a) for a in arrays)
    for backend in (None, "numpy"):
        with pytest.raises(UnsupportedError, match=told):
            jax.grad(jax.jit(partial(loss, backend=backend)))(jnp.asarray(SLOPES))


def test_a_compiled_program_refuses_a_gradient_of_slopes(make: Make) -> None:
    q, k, v = (torch.tensor(a) for a in make())
    learned = torch.tensor(SLOPES, requires_grad=True)
    program = torch.compile(
        lambda slopes: attnx.attention(q, k, v, bias=Alibi(slopes)), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="the slopes of an Alibi have no gradient"):
        program(learned)


# What is wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "kind", "message"),
    [
        (lambda: Alibi(0.5), ArgumentTypeError, "a sequence of Hq numbers, one a query head, got"),
        (lambda: Alibi(f32(0.5)), ArgumentTypeError, "got float32"),
        (lambda: Alibi([0.5, "x"]), ArgumentTypeError, "expected numbers, got 'x' in the list"),
        (lambda: Alibi([True]), ArgumentTypeError, "expected numbers, got True in the list"),
        (lambda: Alibi([np.inf]), ArgumentError, "expected finite numbers, got inf"),
        (lambda: Alibi([0.5], "centre"), ArgumentError, "Alibi: align: expected 'top_left'"),
        (lambda: Alibi([0.5], "top_left", q_pos=[1]), ArgumentError, "beside explicit positions"),
        (lambda: Alibi([0.5], q_pos=1.5), ArgumentTypeError, "Alibi: q_pos: expected an integer"),
    ],
    ids=["a number", "a scalar", "text", "a boolean", "infinite", "align", "both", "q_pos"],
)  # fmt: skip
def test_what_is_wrong_by_itself(make_it: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_it()


@pytest.mark.parametrize(
    ("alibi", "options", "kind", "message"),
    [
        (Alibi(SLOPES), {}, ArgumentError,
         r"bias: Alibi\(.*\): expected Lq == Lk, got Lq=6 and Lk=9; write Alibi\(slopes, 'top_"),
        (Alibi(SLOPES, kv_pos=np.arange(9)), {}, ArgumentError, "expected q_pos beside kv_pos"),
        (Alibi(SLOPES[:2], "top_left"), {}, ArgumentError,
         r"Alibi.slopes: expected shape \(Hq,\) = \(4,\), one slope a query head, got \(2,\)"),
        (Alibi([0.5], "top_left"), {}, ArgumentError, r"got \(1,\)"),
        (Alibi(SLOPES[:, None], "top_left"), {}, ArgumentError, r"got \(4, 1\)"),
        (Alibi(SLOPES.astype(np.float64), "top_left"), {}, ArgumentTypeError,
         "Alibi.slopes: expected float32 beside float32"),
        (Alibi(SLOPES > 0, "top_left"), {}, ArgumentTypeError, "Alibi.slopes: expected float32"),
        (Alibi(torch.tensor(SLOPES), "top_left"), {}, ArgumentTypeError,
         "Alibi.slopes: expected an array of q's framework, numpy"),
        (Alibi(SLOPES, q_pos=np.arange(5)), {}, ArgumentError, r"Alibi.q_pos: expected integers"),
        (Alibi(SLOPES, q_pos=np.ones(6)), {}, ArgumentTypeError, "Alibi.q_pos: expected integers"),
        (Alibi(SLOPES, "bottom_right"), {"mask": Lengths(3) & Lengths(4)}, ArgumentError,
         "bias: bottom_right beside 2 Lengths has no single meaning"),
        (Alibi(SLOPES, "bottom_right"), {"mask": ~Lengths(3)}, ArgumentError,
         "bias: bottom_right beside a Lengths under"),
    ],
    ids=["open", "keys alone", "few slopes", "one slope", "two axes", "double", "boolean",
         "another framework", "other queries", "fractions", "two lengths", "lengths below"],
)  # fmt: skip
def test_what_is_wrong_in_a_call(
    alibi: Alibi, options: dict[str, Any], kind: type[Exception], message: str, make: Make
) -> None:
    q, k, v = make(Lk=9)
    with pytest.raises(kind, match=message):
        attnx.attention(q, k, v, bias=alibi, **options)


def test_a_backend_that_does_not_declare_it_is_not_asked(
    make: Make, marked: Callable[..., Any]
) -> None:
    """S8.2: a plugin that was written before there were any never sees one."""
    backend = marked("older", 7.0)
    q, k, v = make()
    with pytest.raises(UnsupportedError, match=r"bias=Alibi \(has arrays\)"):
        attnx.attention(q, k, v, bias=Alibi(SLOPES), backend="older")
    assert backend.calls == []


def test_it_compares_by_value_and_shows_itself() -> None:
    """As masks do: arrays by identity, numbers by value."""
    alibi = Alibi(SLOPES, "bottom_right")
    assert alibi == Alibi(SLOPES, "bottom_right")
    assert alibi != Alibi(SLOPES.copy(), "bottom_right")
    assert Alibi([1, 2]) == Alibi((1.0, 2.0))
    assert hash(Alibi([1, 2])) == hash(Alibi((1.0, 2.0)))
    assert Alibi([1, 2]) != Alibi([1, 2], "top_left")
    assert alibi != SLOPES.tolist()
    assert repr(alibi) == "Alibi(<float32 (4,)>, 'bottom_right')"
    assert repr(Alibi([1], q_pos=[0, 1])) == "Alibi([1.0], q_pos=[0, 1])"
