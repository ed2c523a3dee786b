"""Dropout (S9): which elements are dropped, the same ones everywhere, and what becomes of them."""

from __future__ import annotations

import re
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from randomgen import Philox

import attnx
from attnx import Dropout
from attnx._dropout import Drop, kept, philox
from attnx.errors import ArgumentError, ArgumentTypeError

WORD = 0xFFFFFFFF
SEED = 0xDEADBEEF_87654321
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip
FRAMEWORKS: dict[str, Any] = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}


def independent(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """The block by randomgen, which counts up before it draws."""
    before = (sum(word << 32 * n for n, word in enumerate(counter)) - 1) % (1 << 128)
    generator = Philox(counter=before, key=key[0] | key[1] << 32, number=4, width=32)
    return [int(word) for word in generator.random_raw(4)]


def lane(seed: int, b: int, h: int, i: int, j: int) -> int:
    words = independent((j // 8 & WORD, i, h, b), (seed & WORD, seed >> 32))
    return words[j % 8 // 2] >> 16 * (j % 2) & 0xFFFF


def seen(dropout: Dropout | None, shape: tuple[int, ...], **options: Any) -> Any:
    """dropout(P) itself, by values that are the identity; (B, H, Lq, Lk) by NumPy."""
    B, H, Lq, Lk = shape
    q = np.zeros((B, H, Lq, 1), np.float32)
    k = np.zeros((B, H, Lk, 1), np.float32)
    v = np.broadcast_to(np.eye(Lk, dtype=np.float32), (B, H, Lk, Lk))
    return attnx.attention(q, k, v, dropout=dropout, **options)


@pytest.mark.parametrize(("counter", "key", "block"), ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers_of_philox(counter: Any, key: Any, block: Any) -> None:
    assert independent(counter, key) == list(block)
    found = philox(np, tuple(np.array([word]) for word in counter), key)
    assert [int(word[0]) for word in found] == list(block)


def test_philox_equals_an_independent_one_over_random_counters_and_keys() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (6, 50))
    found = philox(np, tuple(words[:4]), (words[4], words[5]))
    for n, column in enumerate(words.T.tolist()):
        assert [int(w[n]) for w in found] == independent(tuple(column[:4]), tuple(column[4:]))


def test_each_element_reads_the_lane_that_the_specification_names() -> None:
    """Kept where lane >= floor(p * 65536), with the offsets added, and scaled."""
    p, offset = 0.3, (2, 5, 1 << 20, 24)
    threshold = int(p * 65536)
    found = seen(Dropout(p, SEED, offset), (2, 2, 3, 19)) * 19
    for b, h, i, j in np.ndindex(found.shape):
        drawn = lane(SEED, b + 2, h + 5, i + (1 << 20), j + 24)
        expected = 65536 / (65536 - threshold) if drawn >= threshold else 0.0
        assert found[b, h, i, j] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("as_words", [False, True], ids=["seed", "words"])
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_every_framework_drops_the_same_elements(name: str, as_words: bool) -> None:
    make = FRAMEWORKS[name]
    words: Any = np.array([SEED & WORD, SEED >> 32], np.uint32)
    shape, offset = (2, 3, 70, 77), (1, 2, 3, 8)
    q, k = (make(np.zeros((2, 3, n, 1), np.float32)) for n in (70, 77))
    v = make(np.ascontiguousarray(np.broadcast_to(np.eye(77, dtype=np.float32), (2, 3, 77, 77))))
    dropout = Dropout(0.5, make(words) if as_words else SEED, offset)
    found = np.asarray(attnx.attention(q, k, v, dropout=dropout)) > 0
    ranges = tuple(slice(0, n) for n in shape)
    expected = kept(np, np.arange, Drop(32768, SEED, offset), ranges)
    assert (found == expected).all()


def test_an_array_library_of_the_standard_drops_the_same_elements() -> None:
    ranges = (slice(1, 2), slice(0, 3), slice(4, 9), slice(5, 30))
    found, expected = (
        kept(xp, xp.arange, Drop(20000, SEED, (0, 1, 2, 8)), ranges)
        for xp in (array_api_strict, np)
    )
    assert (np.asarray(found) == expected).all()


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_a_shard_drops_what_the_whole_drops_there(name: str) -> None:
    """Offsets say where a shard stands, across tiles of any size."""
    rng = np.random.default_rng(1)
    make = FRAMEWORKS[name]
    q, k, v = rng.standard_normal((3, 2, 2, 600, 8), dtype=np.float32)
    whole = np.asarray(attnx.attention(*map(make, (q, k, v)), dropout=Dropout(0.4, 3)))
    part = make(q[1:, 1:, 77:300]), make(k[1:, 1:]), make(v[1:, 1:])
    found = np.asarray(attnx.attention(*part, dropout=Dropout(0.4, 3, (1, 1, 77, 0))))
    np.testing.assert_allclose(found, whole[1:, 1:, 77:300], rtol=2e-5, atol=2e-6)


def test_shards_of_keys_merge_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 2, 64, 8))
    whole = attnx.attention(q, k, v, dropout=Dropout(0.4, 3))
    parts = [
        attnx.attention(
            q, k[:, :, j], v[:, :, j], return_lse=True, dropout=Dropout(0.4, 3, (0, 0, 0, j.start))
        )
        for j in (slice(0, 24), slice(24, 64))
    ]
    np.testing.assert_allclose(attnx.merge(parts)[0], whole, atol=1e-14)


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_lse_and_weights_are_those_without_dropout(name: str) -> None:
    x = FRAMEWORKS[name](np.random.default_rng(3).standard_normal((1, 2, 9, 4), dtype=np.float32))
    _, plain = attnx.attention(x, x, x, return_lse=True)
    _, dropped = attnx.attention(x, x, x, return_lse=True, dropout=Dropout(0.5, 1))
    np.testing.assert_allclose(np.asarray(dropped), np.asarray(plain), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 2.0}, {"sinks": True}, {"bias": True}],
    ids=["plain", "causal", "softcap", "sinks", "bias"],
)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_gradients_are_the_slope_of_the_loss(name: str, options: dict[str, Any]) -> None:
    """Central differences in float64, with the elements of the forward dropped."""
    rng = np.random.default_rng(4)
    make = FRAMEWORKS[name]
    q, d = rng.standard_normal((2, 1, 4, 37, 5))
    k, v = rng.standard_normal((2, 1, 2, 37, 5))
    inputs = {"q": q, "k": k, "v": v}
    if options.get("sinks"):
        inputs["sinks"] = rng.standard_normal(4)
    if options.get("bias"):
        inputs["bias"] = rng.standard_normal((1, 4, 37, 37))
    rest = {n: x for n, x in options.items() if n not in inputs}
    dropout = Dropout(0.3, SEED, (0, 1, 2, 8))

    def vjp(given: dict[str, Any]) -> Any:
        arrays = {n: make(x) for n, x in given.items()}
        return attnx.attention_vjp(**arrays, dropout=dropout, **rest)

    gradients = vjp(inputs)[1](make(d))
    for at, x in inputs.items():
        step = rng.standard_normal(x.shape) * 1e-6
        up, down = (np.asarray(vjp({**inputs, at: x + s})[0]) for s in (step, -step))
        slope = ((up - down) * d).sum() / 2
        assert slope == pytest.approx((np.asarray(getattr(gradients, at)) * step).sum(), rel=1e-5)


def test_torch_and_jax_differentiate_it_by_their_own_means() -> None:
    rng = np.random.default_rng(5)
    q, k, v, d = rng.standard_normal((4, 1, 2, 40, 8), dtype=np.float32)
    dropout = Dropout(0.3, SEED)
    expected = attnx.attention_vjp(q, k, v, dropout=dropout)[1](d)[:3]
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    attnx.attention(*leaves, dropout=dropout).backward(torch.tensor(d))

    def loss(q: Any, k: Any, v: Any, dropout: Dropout) -> Any:
        return (attnx.attention(q, k, v, dropout=dropout) * d).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)), dropout)
    for x, y, z in zip(expected, leaves, found, strict=True):
        np.testing.assert_allclose(y.grad, x, atol=2e-6)
        np.testing.assert_allclose(z, x, atol=2e-6)


def test_a_seed_written_over_before_the_backward_is_noticed() -> None:
    """Other elements would be dropped: autograd refuses instead."""
    seed = torch.tensor(np.array([1, 2], np.uint32))
    x = torch.ones(1, 1, 3, 4, requires_grad=True)
    out = attnx.attention(x, x, x, dropout=Dropout(0.5, seed)).sum()
    seed.copy_(torch.tensor(np.array([3, 4], np.uint32)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_jax_maps_and_traces_the_seed() -> None:
    x = np.random.default_rng(6).standard_normal((1, 2, 9, 4), dtype=np.float32)
    seeds = np.array([[0, 0], [WORD, 1], [5, WORD]], np.uint32)

    def one(seed: Any) -> Any:
        return attnx.attention(*[jnp.asarray(x)] * 3, dropout=Dropout(0.5, seed))

    found = jax.jit(jax.vmap(one))(seeds)
    for seed, out in zip(seeds.tolist(), found, strict=True):
        expected = attnx.attention(x, x, x, dropout=Dropout(0.5, seed[0] | seed[1] << 32))
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_another_frameworks_backend_gets_the_seed() -> None:
    x = np.random.default_rng(7).standard_normal((1, 2, 9, 4), dtype=np.float32)
    dropout = Dropout(0.5, np.array([WORD, 1 << 31], np.uint32))
    expected = attnx.attention(x, x, x, dropout=dropout)
    for backend in ("torch", "jax"):
        found = attnx.attention(x, x, x, dropout=dropout, backend=backend)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("p", [0, 0.0, 1e-5], ids=["zero", "0.0", "below one in 65536"])
def test_what_drops_nothing_is_no_dropout(p: float) -> None:
    x = np.random.default_rng(8).standard_normal((1, 2, 9, 4), dtype=np.float32)
    assert (attnx.attention(x, x, x, dropout=Dropout(p, 1)) == attnx.attention(x, x, x)).all()
    assert not attnx.explain(x, x, x, dropout=Dropout(p, 1)).call.dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_p_in_every_row_head_and_seed(p: float) -> None:
    """Chi-square over lines of kept counts, within six deviations of what chance gives."""
    shape = (4, 4, 64, 64)
    ranges = tuple(slice(0, n) for n in shape)
    drop = Drop(int(p * 65536), SEED, (0, 0, 0, 0))
    keep = kept(np, np.arange, drop, ranges)
    rate = 1 - drop.threshold / 65536
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        counts = keep.sum(axis=axes)
        n = keep.size / counts.size
        chi = ((counts - n * rate) ** 2 / (n * rate * (1 - rate))).sum()
        assert abs(chi - counts.size) < 6 * (2 * counts.size) ** 0.5


@pytest.mark.parametrize("shift", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 8)])
def test_neighbours_are_independent(shift: tuple[int, int, int, int]) -> None:
    """Batch entries, heads, rows, blocks of keys and seeds agree no more than chance has them."""
    ranges = tuple(slice(0, n) for n in (2, 2, 128, 128))
    one = kept(np, np.arange, Drop(32768, SEED, (0, 0, 0, 0)), ranges)
    for drop in (Drop(32768, SEED, shift), Drop(32768, SEED + 1, (0, 0, 0, 0))):
        agreed = (one == kept(np, np.arange, drop, ranges)).mean()
        assert abs(agreed - 0.5) < 6 * 0.5 / one.size**0.5


WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "p of one": ((1.0, 0), ArgumentError, "0 <= p < 1, got p=1.0"),
    "p below": ((-0.1, 0), ArgumentError, "0 <= p < 1"),
    "p not a number": ((float("nan"), 0), ArgumentError, "0 <= p < 1, got p=nan"),
    "boolean p": ((True, 0), ArgumentTypeError, "p as a Python or NumPy scalar, got bool"),
    "array p": ((np.ones(2), 0), ArgumentTypeError, "p as a Python or NumPy scalar, got ndarray"),
    "negative seed": ((0.1, -1), ArgumentError, "0 <= seed < 2\\*\\*64, got seed=-1"),
    "wide seed": ((0.1, 1 << 64), ArgumentError, "0 <= seed < 2\\*\\*64"),
    "boolean seed": ((0.1, False), ArgumentTypeError, "seed as an integer .*got bool"),
    "float seed": ((0.1, 1.0), ArgumentTypeError, "seed as an integer .*got float"),
    "signed seed": ((0.1, np.zeros(2, np.int32)), ArgumentError, "an array of int32"),
    "seed of one word": ((0.1, np.zeros(1, np.uint32)), ArgumentError, "of shape \\(1,\\)"),
    "three offsets": ((0.1, 0, (0, 0, 0)), ArgumentError, "offset as four integers"),
    "negative offset": ((0.1, 0, (0, 0, -1, 0)), ArgumentError, "the offset of i .*got -1"),
    "float offset": ((0.1, 0, (0.0, 0, 0, 0)), ArgumentTypeError, "the offset of b as an integer"),
    "offset within a block": ((0.1, 0, (0, 0, 0, 4)), ArgumentError, "a multiple of 8"),
}


SHIFTS = {"negative offset": (2, -1), "offset within a block": (3, 4), "wide offset": (0, 1 << 32)}


@pytest.mark.parametrize("wrong", list(SHIFTS))
def test_a_wrong_offset_that_can_be_read_is_told_as_an_integer_is(wrong: str) -> None:
    axis, number = SHIFTS[wrong]
    with pytest.raises(ArgumentError) as told:
        Dropout(0.5, 3, tuple(number if n == axis else 0 for n in range(4)))
    for make, q in ((np.array, np.ones((1, 1, 3, 4))), (torch.tensor, torch.ones(1, 1, 3, 4))):
        offset = tuple(make(number) if n == axis else 0 for n in range(4))
        with pytest.raises(ArgumentError, match=re.escape(str(told.value))):
            attnx.attention(q, q, q, dropout=Dropout(0.5, 3, offset))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8"])
def test_offsets_may_be_arrays_of_any_integers(dtype: str) -> None:
    """In PyTorch's tiles, in its formula, and in NumPy."""
    x = np.random.default_rng(6).standard_normal((2, 2, 9, 4), dtype=np.float32)
    expected = attnx.attention(x, x, x, dropout=Dropout(0.5, 3, (1, 2, 3, 16)))
    for name in ("numpy", "torch"):
        y = FRAMEWORKS[name](x)
        offset = tuple(FRAMEWORKS[name](np.array(n, dtype)) for n in (1, 2, 3, 16))

        def call(y: Any, offset: Any = offset) -> Any:
            return attnx.attention(y, y, y, dropout=Dropout(0.5, 3, offset))

        found = [call(y)]
        if name == "torch":
            found.append(torch.func.vmap(call)(y[None])[0])
        for out in found:
            np.testing.assert_allclose(np.asarray(out), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 2, 3, 4), (2, 2, 0, 4)], ids=str)
def test_nothing_is_dropped_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    """An empty batch, or no rows, has an empty answer and empty gradients (S1.1)."""
    x = FRAMEWORKS[name](np.zeros(shape, np.float32))
    out, pullback = attnx.attention_vjp(x, x, x, dropout=Dropout(0.5, 1))
    assert out.shape == x.shape
    assert all(g.shape == x.shape for g in pullback(out)[:3])
    if name == "torch":
        x.requires_grad_()
        attnx.attention(x, x, x, dropout=Dropout(0.5, 1)).sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("wrong", list(WRONG))
def test_wrong_dropouts_are_told(wrong: str) -> None:
    arguments, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        Dropout(*arguments)


def test_a_bare_probability_and_a_seed_of_another_framework_are_told() -> None:
    x = np.ones((1, 1, 3, 4), np.float32)
    with pytest.raises(ArgumentTypeError, match=r"expected attnx.Dropout\(p, seed\), got float"):
        attnx.attention(x, x, x, dropout=0.1)
    seed = torch.tensor(np.array([1, 2], np.uint32))
    with pytest.raises(ArgumentTypeError, match="seed as an integer or an array of q's framework"):
        attnx.attention(x, x, x, dropout=Dropout(0.1, seed))


def test_a_dropout_is_frozen_and_compares_by_its_numbers() -> None:
    one = Dropout(0.1, 5)
    assert one == Dropout(0.1, np.int64(5))
    assert hash(one) == hash(Dropout(0.1, 5))
    assert one not in (Dropout(0.2, 5), Dropout(0.1, 6), Dropout(0.1, 5, (0, 0, 0, 8)))
    with pytest.raises(AttributeError):
        one.p = 0.2  # type: ignore[misc]
