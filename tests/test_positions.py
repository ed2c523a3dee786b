"""Positions: the rotation against complex numbers, the angles against mpmath, by each framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch

import attnx
from attnx import positions
from attnx.positions import Llama3, Yarn

f32 = np.float32
STYLES = ["half", "interleaved"]
MAKE: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray,
    "strict": array_api_strict.asarray,
}  # fmt: skip
FAR = [0, 1, -7, 4095, 4096, 99999, 1000003, -1000003, 2**24]


@pytest.fixture(params=MAKE)
def calls(request: pytest.FixtureRequest, loop: Callable[..., Any]) -> Callable[..., Any]:
    """`calls(fn, *arrays)`: NumPy arrays made each framework's, called, and NumPy's again.

    JAX's function is compiled; array-api-strict's arrays belong to the lane of the tests.
    """
    if request.param == "strict":
        loop()
    make = MAKE[request.param]

    def calls(fn: Callable[..., Any], *arrays: Any) -> Any:
        got = (jax.jit(fn) if request.param == "jax" else fn)(*map(make, arrays))
        assert type(got) is type(make(arrays[0]))
        return numbers(got)

    return calls


def numbers(array: Any) -> Any:
    if type(array).__module__.startswith("array_api_strict"):
        return np.from_dlpack(array)
    return np.asarray(array.detach() if isinstance(array, torch.Tensor) else array)


def frequencies(dim: int, base: float = 10000.0) -> Any:
    return base ** (-2.0 * np.arange(dim // 2) / dim)


def turned(x: Any, angles: Any, style: str) -> Any:
    """The first numbers of x (…, L, D) as complex numbers, times exp(i angle)."""
    R = 2 * angles.shape[-1]
    part, rest = x[..., :R].astype(np.float64), x[..., R:]
    a, b = (part[..., ::2], part[..., 1::2]) if style == "interleaved" else np.split(part, 2, -1)
    z = (a + 1j * b) * np.exp(1j * angles)
    if style == "interleaved":
        made = np.stack([z.real, z.imag], -1).reshape(part.shape)
    else:
        made = np.concatenate([z.real, z.imag], -1)
    return np.concatenate([made, rest], -1)


def close(got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(numbers(got), wanted, rtol=tolerance, atol=tolerance)


# What is computed --------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_rope_turns_pairs_as_complex_numbers(
    style: str, calls: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Each framework, both styles."""
    x, p = rng.standard_normal((2, 3, 5, 8), f32), np.array([0, 1, 7, 40, 100003])
    got = calls(lambda x, p: attnx.rope(x, p, style=style), x, p)
    close(got, turned(x, p[:, None] * frequencies(8), style), 3e-6)
    assert got.dtype == f32


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_positions_may_differ_in_the_batch_in_either_layout(
    style: str, batch: tuple[int, ...], rng: np.random.Generator
) -> None:
    x, p = rng.standard_normal((*batch, 4, 5, 6)), rng.integers(0, 50, (*batch, 5))
    wanted = turned(x, p[..., None, :, None] * frequencies(6, 100.0), style)
    close(attnx.rope(x, p, style=style, base=100.0), wanted, 1e-12)
    swapped = attnx.rope(x.swapaxes(-2, -3), p, style=style, base=100.0, layout="bshd")
    np.testing.assert_array_equal(swapped.swapaxes(-2, -3), attnx.rope(x, p, style=style, base=100))
    one = attnx.rope(x, p[..., :1, :] if batch else p, style=style)
    row = p[..., :1, :] if batch else p
    close(one, turned(x, row[..., None, :, None] * frequencies(6), style), 1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_a_part_is_turned_and_the_rest_passes_bit_by_bit(
    style: str, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((5, 9)).astype(np.float16)
    x[2, 6:] = np.nan, np.inf, -0.0
    got = attnx.rope(x, range(5), style=style, rotary_dim=6)
    assert got[:, 6:].tobytes() == x[:, 6:].tobytes()
    wanted = turned(x[:, :6].astype(f32), np.arange(5)[:, None] * frequencies(6), style)
    close(got[:, :6], wanted, 1e-3)


def test_angles_are_exact_far_out(calls: Callable[..., Any]) -> None:
    """float32's product would be off by 0.02 at a million, and by 1 at 2**24."""
    with mpmath.workdps(40):
        w = [mpmath.mpf(10000) ** (mpmath.mpf(-2 * i) / 64) for i in range(32)]
        cos = np.array([[float(mpmath.cos(p * f)) for f in w] for p in FAR])
        sin = np.array([[float(mpmath.sin(p * f)) for f in w] for p in FAR])
    for which, wanted in enumerate((cos, sin)):
        got = calls(lambda p, which=which: positions.rope_table(p, 64)[which], np.array(FAR))
        assert np.abs(got - wanted).max() < 5e-7


def test_float64_has_float64_angles() -> None:
    p = np.array([3, 1000003])
    table = positions.rope_table(p, 64, dtype="float64")
    close(table.cos, np.cos(p[:, None] * frequencies(64)), 1e-9)
    x = np.ones((2, 64))
    np.testing.assert_array_equal(
        positions.rotate(x, *table, style="half"), attnx.rope(x, p, style="half")
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_are_rounded_once(dtype: Any, rng: np.random.Generator) -> None:
    """What is computed in float32 is the answer, rounded; a position of 16 bits plays no part."""
    x, p = rng.standard_normal((3, 4, 8)).astype(dtype), np.array([0, 999, 2049, 70001])
    for style in STYLES:
        got = attnx.rope(x, p, style=style)
        wanted = attnx.rope(x.astype(f32), p, style=style).astype(dtype)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.astype(f32), wanted.astype(f32))
    if dtype is np.float16:
        same = attnx.rope(torch.tensor(x), torch.tensor(p), style="half")
        np.testing.assert_array_equal(numbers(same), attnx.rope(x, p, style="half"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_positions_of_any_integer_type(dtype: str) -> None:
    """A small type must not overflow on the way."""
    p = np.array([0, 100, 127], dtype)
    got = positions.rope_table(p, 8)
    np.testing.assert_array_equal(got.cos, positions.rope_table(p.astype(np.int64), 8).cos)


def test_infinities_are_data(rng: np.random.Generator) -> None:
    """No warning, and only their own pair is touched."""
    x = rng.standard_normal((2, 8), f32)
    x[1, 0] = np.inf
    got = attnx.rope(x, [3, 4], style="half")
    assert np.isfinite(np.delete(got, [0, 4], 1)).all()
    assert not np.isfinite(got[1, [0, 4]]).any()
    assert np.isnan(attnx.sinusoidal(np.array([np.nan, np.inf]), 4)).all()


def test_nothing_is_modified_or_shared() -> None:
    """S1.4, also where nothing turns."""
    x, p = np.ones((3, 4), f32), np.zeros(3, int)
    x.flags.writeable = p.flags.writeable = False
    got = attnx.rope(x, p, style="half")
    np.testing.assert_array_equal(got, x)
    assert not np.shares_memory(got, x)


def test_sizes_of_0() -> None:
    assert attnx.rope(np.ones((2, 3, 0, 4), f32), [], style="half").shape == (2, 3, 0, 4)
    assert attnx.rope(np.ones((0, 3, 2, 4), f32), [1, 2], style="half").shape == (0, 3, 2, 4)


@pytest.mark.parametrize("style", STYLES)
def test_sinusoidal_is_the_papers(style: str, calls: Callable[..., Any]) -> None:
    p = np.array([[0, 1], [511, 100003]])
    angles = p[..., None] * frequencies(6)
    wanted = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(2, 2, 6)
    if style == "half":
        wanted = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    got = calls(lambda p: attnx.sinusoidal(p, 6, style=style), p)
    close(got, wanted)
    assert got.dtype == f32


def test_sinusoidal_of_floating_positions(calls: Callable[..., Any]) -> None:
    p = np.array([[-3.75, 1000000.5, 2.5]], f32)
    angles = p.astype(np.float64)[..., None] * frequencies(4, 50.0)
    wanted = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(1, 3, 4)
    close(calls(lambda p: attnx.sinusoidal(p, 4, base=50.0), p), wanted)
    for other in (p[0, 2], p.astype(np.float64), p[:, ::2].astype(np.float16)):
        got = attnx.sinusoidal(np.asarray(other), 4, base=50.0)
        assert got.dtype == f32
        close(got.reshape(-1, 4)[-1], wanted[0, 2])
    far = attnx.sinusoidal(np.array([2.0**31 - 1, -(2.0**31), 2.0**31, -3e9, 1e20]), 4)
    assert (
        np.isnan(far).any(-1).tolist() == np.isnan(far).all(-1).tolist() == [False] * 2 + [True] * 3
    )


# What positions mean -----------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, Yarn(4, 16), Llama3(8, 64)], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_scores_depend_on_differences_only(
    style: str, scaling: Any, rng: np.random.Generator
) -> None:
    q, k = rng.standard_normal((2, 4, 6, 16), f32)

    def scores(shift: int) -> Any:
        turn = {"style": style, "scaling": scaling}
        a, b = (attnx.rope(x, np.arange(6) + shift, **turn) for x in (q, k))
        return a @ b.swapaxes(-1, -2)

    for shift in (1, 1000, 1000000, -5):
        close(scores(shift), scores(0), 2e-5)


@pytest.mark.parametrize("style", STYLES)
def test_a_decode_step_with_turned_keys_is_the_row_of_the_full_run(
    style: str, rng: np.random.Generator
) -> None:
    """Positions follow keys: the cache holds turned keys, a step turns its own token alone."""
    q, k, v = rng.standard_normal((3, 2, 4, 7, 16), f32)
    whole = [attnx.rope(x, np.arange(7), style=style) for x in (q, k)]
    full = attnx.attention(*whole, v, causal=True)
    cache = k[:, :, :0]
    for n in range(7):
        step = slice(n, n + 1)
        turned_q, turned_k = (attnx.rope(x[:, :, step], [n], style=style) for x in (q, k))
        cache = np.concatenate([cache, turned_k], 2)
        got = attnx.attention(turned_q, cache, v[:, :, : n + 1], causal="bottom_right")
        close(got, full[:, :, step], 1e-5)


def test_a_weights_rows_in_order_give_the_same_scores_in_the_other_style(
    rng: np.random.Generator,
) -> None:
    """Also grouped and partial; there and back is where one began."""
    Hq, Hk, D, R = 4, 2, 10, 6
    x = rng.standard_normal((5, 12))
    weights = {H: rng.standard_normal((H * D, 12)) for H in (Hq, Hk)}

    def scores(style: str, rows: Callable[[int], Any]) -> Any:
        heads = []
        for H, weight in weights.items():
            made = (x @ weight[rows(H)].T).reshape(5, H, D).swapaxes(0, 1)
            heads.append(attnx.rope(made, range(5), style=style, rotary_dim=R))
        return heads[0] @ np.repeat(heads[1], Hq // Hk, 0).swapaxes(-1, -2)

    for source, target in (STYLES, STYLES[::-1]):
        words = {"source": source, "target": target, "rotary_dim": R}
        order = {H: list(positions.rope_permutation(D, heads=H, **words)) for H in (Hq, Hk)}
        close(scores(target, order.__getitem__), scores(source, lambda H: slice(None)), 1e-10)
        back = positions.rope_permutation(D, source=target, target=source, rotary_dim=R)
        assert [order[Hk][n] for n in back] == list(range(D))
    same = positions.rope_permutation(4, source="half", target="half", heads=2)
    assert same == tuple(range(8))


def test_alibi_slopes_of_the_paper() -> None:
    """Powers of two, and what stands between them."""
    assert attnx.alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert attnx.alibi_slopes(1) == (2.0**-8,)
    between = (*attnx.alibi_slopes(8), *attnx.alibi_slopes(16)[0:8:2])
    assert attnx.alibi_slopes(12) == between
    assert attnx.alibi_slopes(16)[0] == 2.0**-0.5


def test_alibi_slopes_as_arrays(calls: Callable[..., Any]) -> None:
    got = calls(lambda x: attnx.alibi_slopes(12, like=x), np.ones(1, f32))
    np.testing.assert_array_equal(got, np.array(attnx.alibi_slopes(12), f32))
    wide = attnx.alibi_slopes(12, like=np.ones(1))
    np.testing.assert_array_equal(wide, attnx.alibi_slopes(12))


# Frameworks --------------------------------------------------------------------------------------


def test_the_gradient_is_the_rotation_back(rng: np.random.Generator) -> None:
    """In torch, and in JAX under jit; both styles, part and all."""
    x, d = rng.standard_normal((2, 3, 4, 8), f32)
    p = np.array([1, 5, 900, 70001])
    for style, part in (("half", None), ("interleaved", 4)):
        options = {"style": style, "rotary_dim": part}
        wanted = attnx.rope(d, -p, **options)
        leaf = torch.tensor(x, requires_grad=True)
        out = attnx.rope(leaf, torch.tensor(p), **options)
        (gradient,) = torch.autograd.grad(out, leaf, torch.tensor(d))
        close(gradient, wanted)
        if part is None:

            @jax.jit
            def vjp(x: Any, p: Any, d: Any, options: Any = options) -> Any:
                return jax.vjp(lambda x: attnx.rope(x, p, **options), x)[1](d)[0]

            close(vjp(x, p, d), wanted, 3e-6)


def test_gradients_of_rope_table_and_sinusoidal_by_differences(rng: np.random.Generator) -> None:
    x = torch.tensor(rng.standard_normal((2, 3, 6)), requires_grad=True)
    p, table = torch.arange(3), positions.rope_table(torch.arange(3), 6, dtype="float64")
    assert torch.autograd.gradcheck(lambda x: attnx.rope(x, p, style="half"), x)
    leaves = [x, *(y.clone().requires_grad_() for y in table)]
    assert torch.autograd.gradcheck(
        lambda x, c, s: positions.rotate(x, c, s, style="interleaved"), leaves
    )
    t = torch.tensor([0.25, 4097.5], requires_grad=True)
    attnx.sinusoidal(t, 4).sum().backward()
    angles = numbers(t)[:, None] * frequencies(4)
    wanted = (np.cos(angles) - np.sin(angles)) @ frequencies(4)
    close(t.grad, wanted, 1e-5)


def test_vmap_over_positions_and_arrays(rng: np.random.Generator) -> None:
    x, p = rng.standard_normal((2, 3, 4, 8), f32), rng.integers(0, 99, (2, 4))

    def turn(x: Any, p: Any) -> Any:
        return attnx.rope(x, p, style="half", scaling=Llama3(8, 64))

    wanted = turn(x, p)
    close(torch.func.vmap(turn)(torch.tensor(x), torch.tensor(p)), wanted)
    close(jax.jit(jax.vmap(turn))(x, p), wanted)


BASE = 500000.0
COMPILED: dict[str, Callable[[Any, Any], Any]] = {
    "scaled": lambda x, p: attnx.rope(x, p, style="half", base=BASE, scaling=Llama3(8, 8192)),
    "plain": lambda x, p: attnx.rope(x, p, style="interleaved"),
    "made inside": lambda x, p: attnx.rope(x, p, style="half", scaling=Yarn(4, 4096)),
    "table": lambda x, p: positions.rotate(x, *positions.rope_table(p, 4), style="half"),
    "list": lambda x, p: attnx.rope(x[:, :, :2], [3, 4], style="half"),
    "sinusoidal": lambda x, p: x + attnx.sinusoidal(p, 8) + attnx.sinusoidal(p / 2, 8),
    "slopes": lambda x, p: x * attnx.alibi_slopes(4, like=x)[:, None, None],
}


def test_compiles_to_one_graph() -> None:
    """Sizes and floats are symbols; the frequencies are constants of the program."""
    torch._dynamo.reset()
    fn = torch.compile(COMPILED["scaled"], fullgraph=True, backend="eager", dynamic=True)
    x, p = torch.randn(2, 4, 5, 8), torch.arange(5)
    torch.testing.assert_close(fn(x, p), COMPILED["scaled"](x, p))


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", COMPILED)
def test_everything_compiles_with_any_length(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    call = COMPILED[name]
    fn = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for L in (3, 5, 9):
        x, p = torch.randn(2, 4, L, 8, requires_grad=True), torch.arange(L)
        got, wanted = fn(x, p), call(x, p)
        torch.testing.assert_close(got, wanted)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted)]
        torch.testing.assert_close(*gradients)
