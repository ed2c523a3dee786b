"""Linear attention's gradients on every framework, what compilers make of it, and its cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attnx import LinearState, linear_attention, linear_attention_step, linear_attention_vjp
from attnx_conformance.relatives import linear_reference

Array = np.ndarray[Any, Any]
Make = Callable[..., tuple[Array, Array, Array]]
Decays = Callable[..., dict[str, Any]]
Maps = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
DECAYS = ["none", "number", "heads", "steps"]


def slope(f: Callable[[Array], float], x: Array, direction: Array) -> float:
    """The derivative of f along a direction, by central differences of the fourth order."""
    h = 1e-3
    f1, f2, f3, f4 = (f(x + n * h * direction) for n in (1, -1, 2, -2))
    return (8 * (f1 - f2) - (f3 - f4)) / (12 * h)


@pytest.mark.parametrize("name", ["identity", "elu"])
@pytest.mark.parametrize("kind", DECAYS)
def test_the_pullback_is_the_derivative_of_the_recurrence(
    kind: str, name: str, make: Make, rng: np.random.Generator, decays: Decays, maps: Maps
) -> None:
    """Along random directions, of every input and through out and state alike."""
    q, k, v = make(B=(), Lq=7, Lk=7, dtype="float64")
    q, k = (np.where(np.abs(x) < 0.1, 0.5, x) for x in (q, k))  # elu has a corner of a kind at 0
    ours, theirs = maps(name)
    decay = decays(kind, q).get("decay")
    learnt = decay if isinstance(decay, np.ndarray) else None
    Hs = 4 if learnt is not None else 2
    S, z = rng.standard_normal((Hs, 8, 5)), rng.uniform(1, 2, (Hs, 8))
    divided = bool(theirs.get("normalize"))
    (out, _), pullback = linear_attention_vjp(
        q, k, v, decay=decay, chunk=3, return_state=True,
        state=LinearState(S, z if divided else None), **ours,
    )  # fmt: skip
    d, dS = rng.standard_normal(out.shape), rng.standard_normal((Hs, 8, 5))
    grads = pullback(d, LinearState(dS))

    def value(q: Any, k: Any, v: Any, decay: Any, S: Any, z: Any) -> float:
        S, z = np.repeat(S, 4 // Hs, axis=0), np.repeat(z, 4 // Hs, axis=0)
        decay = 1.0 if decay is None else decay
        made = linear_reference(q, k, v, decay=decay, S=S, z=z, **theirs)
        return float(np.sum(d * made.out) + np.sum(dS * made.S[:: 4 // Hs]))

    inputs = [q, k, v, decay, S, z]
    found = [grads.q, grads.k, grads.v, grads.decay, grads.state.S, grads.state.z]
    for index, grad in enumerate(found):
        if grad is None:
            assert (index == 3 and learnt is None) or (index == 5 and not divided)
            continue
        direction = rng.standard_normal(grad.shape)

        def along(x: Any, index: int = index) -> float:
            return value(*inputs[:index], x, *inputs[index + 1 :])

        expected = slope(along, inputs[index], direction)
        assert np.sum(grad * direction) == pytest.approx(expected, rel=1e-7, abs=1e-8), index


@pytest.mark.parametrize("name", ["identity", "elu"])
@pytest.mark.parametrize("kind", ["heads", "steps"])
def test_sums_of_gradients_are_kept_in_float32(
    kind: str, name: str, make: Make, decays: Decays, maps: Maps
) -> None:
    """For float16 arrays they are as good as float16 holds them, over long memories too."""
    q, k, v = make(Lq=150, Lk=150, dtype="float16")
    decay, ours = decays(kind, q, low=0.9)["decay"], maps(name)[0]
    out, pullback = linear_attention_vjp(q, k, v, decay=decay, **ours)
    d = np.linspace(-1, 1, out.size).reshape(out.shape).astype(np.float16)
    wide = [x.astype(np.float64) for x in (q, k, v, decay, d)]
    _, exact = linear_attention_vjp(*wide[:3], decay=wide[3], **ours)
    for got, expected in zip(pullback(d)[:4], exact(wide[4])[:4], strict=True):
        size = np.abs(expected).max()
        rounding = 2.0**-11 if got.dtype == np.float16 else 0
        assert np.all(np.abs(got - expected) <= rounding * np.abs(expected) + 2.0**-16 * size)


def tensors(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(x).requires_grad_() for x in arrays]


@pytest.mark.parametrize("name", ["identity", "elu", "a function"])
@pytest.mark.parametrize("kind", ["none", "heads", "steps"])
def test_pytorch_differentiates_it_to_the_same(
    kind: str, name: str, make: Make, decays: Decays, maps: Maps
) -> None:
    """By its own means, as the pullback says on PyTorch and on NumPy."""
    q, k, v = make(Lq=11, Lk=11, dtype="float64")
    ours = maps(name)[0]
    decay = decays(kind, q).get("decay")
    S = np.ones((2, 2 if decay is None else 4, 16 if name == "a function" else 8, 5))
    z = np.ones_like(S[..., 0]) if name != "identity" else None
    given = [x for x in (q, k, v, decay, S, z) if x is not None]
    leaves = tensors(*given)
    tq, tk, tv, *rest = leaves
    tdecay = rest.pop(0) if decay is not None else None
    options: dict[str, Any] = {"chunk": 4, "return_state": True, **ours}
    out, end = linear_attention(tq, tk, tv, decay=tdecay, state=LinearState(*rest), **options)
    d, d_end = torch.linspace(-1, 1, out.numel()).double().reshape(out.shape), end.S.detach()
    own = torch.autograd.grad([out, end.S], leaves, [d, d_end])
    (again, _), pullback = linear_attention_vjp(
        tq, tk, tv, decay=tdecay, state=LinearState(*rest), **options
    )
    assert not again.requires_grad
    grads = [pullback(d, LinearState(d_end))]
    if name != "a function":
        _, pullback = linear_attention_vjp(q, k, v, decay=decay, state=LinearState(S, z), **options)
        grads.append(pullback(d.numpy(), LinearState(d_end.numpy())))
    for found in grads:
        flat = [x for x in (*found[:4], *found.state) if x is not None]
        for one, other in zip(flat, own, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["identity", "elu"])
def test_values_that_are_no_numbers_poison_no_gradient_of_what_comes_before(
    name: str, make: Make, decays: Decays, maps: Maps
) -> None:
    """Where the loss leaves the spoilt steps out; the pullback, PyTorch and a JAX program alike."""
    q, k, v = make(Lq=9, Lk=9)
    decay = decays("steps", q)["decay"]
    v[..., 6:, :] = np.nan
    options: dict[str, Any] = {"chunk": 5, **maps(name)[0]}
    out, pullback = linear_attention_vjp(q, k, v, decay=decay, **options)
    d = np.ones_like(out)
    d[..., 6:, :] = 0
    found = [pullback(d)[:4]]
    leaves = tensors(q, k, v, decay)
    made = linear_attention(*leaves[:3], decay=leaves[3], **options)
    found.append(torch.autograd.grad(made, leaves, torch.from_numpy(d)))

    @jax.jit
    def gradients(*given: Any) -> Any:
        def f(q: Any, k: Any, v: Any, decay: Any) -> Any:
            return linear_attention(q, k, v, decay=decay, **options)

        return jax.vjp(f, *given)[1](jnp.asarray(d))

    found.append(gradients(q, k, v, decay))
    short = [x[..., :6, :] for x in (q, k, v)]
    _, pullback = linear_attention_vjp(*short, decay=decay[..., :6], **options)
    expected = pullback(d[..., :6, :])
    for grads in found:
        for n, (one, other) in enumerate(zip(grads, expected[:4], strict=True)):
            part = np.asarray(one)
            part = part[..., :6] if n == 3 else part[..., :6, :]
            np.testing.assert_allclose(part, other, rtol=1e-4, atol=1e-5)


def test_jax_differentiates_and_compiles_it(make: Make, decays: Decays) -> None:
    """In one program whose decays are traced, to NumPy's gradients."""
    q, k, v = make(Lq=8, Lk=8)
    decay = decays("steps", q)["decay"]
    start = LinearState(np.ones((2, 4, 8, 5), np.float32), np.ones((2, 4, 8), np.float32))
    options: dict[str, Any] = {"feature_map": "elu", "chunk": 4}
    out, pullback = linear_attention_vjp(q, k, v, decay=decay, state=start, **options)
    grads = pullback(out)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, decay: Any, state: Any, d: Any) -> Any:
        def f(q: Any, k: Any, v: Any, decay: Any, state: Any) -> Any:
            return linear_attention(q, k, v, decay=decay, state=state, **options)

        made, back = jax.vjp(f, q, k, v, decay, state)
        return made, back(d)

    made, own = gradients(*jax.tree.map(jnp.asarray, (q, k, v, decay, start, out)))
    np.testing.assert_allclose(made, out, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(tuple(grads)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_jax_programs_grow_with_the_logarithm_of_the_length() -> None:
    """Doubling L adds some operations, far fewer than it adds chunks."""

    def operations(L: int) -> int:
        x = jnp.zeros((1, L, 2), jnp.float32)
        jaxpr = jax.make_jaxpr(lambda x: linear_attention(x, x, x, decay=0.5, chunk=4))(x)
        return len(jaxpr.jaxpr.eqns)

    counts = [operations(4 * 2**n) for n in (4, 5, 6, 7)]
    steps = np.diff(counts)
    assert 0 < steps.min() == steps.max() < 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compiles_it_as_one_graph(make: Make, decays: Decays) -> None:
    """With gradients, to the eager numbers."""
    q, k, v = make(Lq=10, Lk=10)
    leaves = tensors(q, k, v, decays("steps", q)["decay"])

    def f(q: Any, k: Any, v: Any, decay: Any) -> Any:
        out, state = linear_attention(
            q, k, v, decay=decay, feature_map="elu", chunk=4, return_state=True
        )
        return out, linear_attention_step(
            q[..., :1, :], k[..., :1, :], v[..., :1, :], state, decay=decay[..., :1],
            feature_map="elu",
        )[0]  # fmt: skip

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    made, wanted = compiled(*leaves), f(*leaves)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)
    grads = (torch.autograd.grad([x.sum() for x in outs], leaves) for outs in (made, wanted))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", DECAYS)
def test_any_array_library_does(
    kind: str, make: Make, loop: Callable[..., Any], decays: Decays
) -> None:
    """array-api-strict has the standard's functions and no others."""
    loop()
    q, k, v = make(Lq=11, Lk=11, dtype="float64")
    xp = array_api_strict
    given = decays(kind, q)
    theirs = {n: x if isinstance(x, float) else xp.asarray(x) for n, x in given.items()}
    strict = [xp.asarray(x) for x in (q, k, v)]
    options: dict[str, Any] = {"chunk": 4, "feature_map": "elu", "return_state": True}
    (out, end), pullback = linear_attention_vjp(*strict, **theirs, **options)
    (wanted, last), back = linear_attention_vjp(q, k, v, **given, **options)
    np.testing.assert_allclose(np.from_dlpack(out), wanted, rtol=1e-12)
    grads, expected = pullback(out, end), back(wanted, last)
    for one, other in zip(grads[:4], expected[:4], strict=True):
        if other is not None:
            np.testing.assert_allclose(np.from_dlpack(one), other, rtol=1e-10, atol=1e-12)
    out, _ = linear_attention_step(
        *(x[..., :1, :] for x in strict), end, feature_map="elu",
        **{n: x[..., :1] if kind == "steps" else x for n, x in theirs.items()},
    )  # fmt: skip
    assert out.shape == (2, 4, 1, 5)


# Cost -------------------------------------------------------------------------------------------


def peak(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    run()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("kind", ["none", "steps"])
def test_memory_grows_with_the_length_and_not_its_square(
    kind: str, make: Make, decays: Decays
) -> None:
    """Forward and backward stay below one array of L x L, and twice the length costs twice."""
    peaks = []
    for L in (4096, 8192):
        q, k, v = make(B=(), Hq=1, Hk=1, Lq=L, Lk=L, D=4, Dv=4)
        given = decays(kind, q)

        def both(q: Any = q, k: Any = k, v: Any = v, given: Any = given) -> Any:
            out, pullback = linear_attention_vjp(q, k, v, **given)
            return pullback(out)

        both()
        peaks.append(peak(both))
    assert peaks[0] < 4096 * 4096 * 4 / 2
    assert 1.5 < peaks[1] / peaks[0] < 2.2


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compiles_no_program_for_each_length() -> None:
    """One for the first length and one for the others, while the chunks number 5 to 8."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: linear_attention(x, x, x, decay=0.5, chunk=4), fullgraph=True, backend=counter
    )
    for L in (22, 23, 26, 27, 30):
        x = torch.linspace(-1, 1, 3 * L).reshape(1, L, 3)
        torch.testing.assert_close(compiled(x), linear_attention(x, x, x, decay=0.5, chunk=4))
    assert counter.frame_count == 2
