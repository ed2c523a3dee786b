"""Decoding with a cache equals the full causal run, on every framework (S7)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_tree

import attnx
from attnx import Causal, Dense, KVCache, Lengths, Prefix, Starts, Window

if TYPE_CHECKING:
    from collections.abc import Callable

B, HQ, HK, L, D, DV, W = 3, 4, 2, 13, 8, 5, 4
NAN = float("nan")
FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.array, "torch": torch.tensor, "jax": jnp.asarray,
}  # fmt: skip
EAGER = ["numpy", "torch", pytest.param("jax", marks=pytest.mark.sweep)]


def arrays(batch: tuple[int, ...] = (B,), length: int = L) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(5)
    shapes = ((HQ, length, D), (HK, length, D), (HK, length, DV))
    q, k, v = (rng.standard_normal((*batch, *s), dtype="f4") for s in shapes)
    return q, k, v


def whole(q: Any, k: Any, v: Any, window: int | None = None) -> Any:
    mask = None if window is None else Window(window - 1, 0)
    return attnx.attention(q, k, v, causal=True, mask=mask)


def made(
    like: Any, window: int | None = None, batch: int | tuple[int, ...] = B, **given: Any
) -> KVCache:
    """A cache whose unwritten slots would be seen in any result."""
    capacity = L if window is None else 2 * window
    given = {"capacity": capacity, "like": like, "window": window, "fill": NAN} | given
    return KVCache.empty(batch, HK, D=D, Dv=DV, **given)


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def swapped(x: Any, layout: str) -> Any:
    return np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bshd" else x


# Decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[1] * L, [5, 1, 1, 4, 2]], ids=["tokens", "runs"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
@pytest.mark.parametrize("framework", EAGER)
def test_step_by_step_equals_the_whole(
    framework: str, window: int | None, layout: str, steps: list[int]
) -> None:
    """Some tokens at a time, with slots that are used again where there is a window."""
    convert, at, found = FRAMEWORKS[framework], 0, []
    q, k, v = arrays()
    cache = made(convert(q), window, layout=layout)
    for n in steps:
        now = [convert(swapped(x[:, :, at : at + n], layout)) for x in (q, k, v)]
        cache = cache.append(*now[1:])
        found.append(swapped(np.asarray(cache.attend(now[0])), layout))
        at += n
    close(np.concatenate(found, axis=2), whole(q, k, v, window))
    assert np.asarray(cache.lengths).tolist() == [L] * B


@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
@pytest.mark.parametrize("framework", EAGER)
def test_ragged_batches(framework: str, window: int | None) -> None:
    """Each sequence gets as many of the tokens as it has; the rest of the batch changes nothing."""
    convert, rng = FRAMEWORKS[framework], np.random.default_rng(1)
    inputs, ends, n = arrays(), np.array([L, 6, 0]), 4
    expected = whole(*inputs, window)
    cache, at = made(convert(inputs[0]), window), np.zeros(B, int)
    while (at < ends).any():
        counts = np.minimum(rng.integers(0, n + 1, B), ends - at)
        now = [np.full((B, x.shape[1], n, x.shape[3]), NAN, "f4") for x in inputs]
        for x, part in zip(inputs, now, strict=True):
            for b, m in enumerate(counts):
                part[b, :, :m] = x[b, :, at[b] : at[b] + m]
        q, k, v = map(convert, now)
        cache = cache.append(k, v, convert(counts))
        out = np.asarray(cache.attend(q, counts=convert(counts)))
        for b, m in enumerate(counts):
            close(out[b, :, :m], expected[b, :, at[b] : at[b] + m])
            assert (out[b, :, m:] == 0).all()
        at += counts
    assert np.asarray(cache.lengths).tolist() == ends.tolist()


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
def test_any_number_of_batch_axes(batch: tuple[int, ...], window: int | None) -> None:
    q, k, v = arrays(batch)
    cache, found = made(q, window, batch), []
    for i in range(L):
        now = (..., slice(i, i + 1), slice(None))
        cache = cache.append(k[now], v[now], np.ones(batch, int))
        found.append(cache.attend(q[now]))
    close(np.concatenate(found, axis=-2), whole(q, k, v, window))


@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
def test_a_prompt_in_chunks(window: int | None) -> None:
    """A rolling cache takes a prompt of any length; ragged counts go by chunk."""
    q, k, v = arrays()
    counts = np.array([L, 7, 0])
    out, cache = made(q, window).prefill(q, k, v, chunk=5, counts=counts)
    expected = whole(q, k, v, window)
    for b, n in enumerate(counts):
        close(out[b, :, :n], expected[b, :, :n])
        assert (out[b, :, n:] == 0).all()
    assert cache.lengths.tolist() == counts.tolist()


def test_attending_in_chunks_of_queries() -> None:
    q, k, v = arrays()
    cache = made(q).append(k, v)
    out, lse = cache.attend(q, chunk=4, return_lse=True)
    expected = attnx.attention(q, k, v, causal=True, return_lse=True)
    close(out, expected[0])
    close(lse, expected[1])


def turned(x: Any, positions: Any) -> Any:
    """Pairs of features turned by an angle that grows with the position."""
    angle = positions[:, None, :, None] * np.array([0.3, 0.1, 0.03, 0.01], "f4")
    one, other = x[..., :4], x[..., 4:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], -1).astype("f4")


@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
def test_positions_follow_the_keys(window: int | None) -> None:
    """Rotated before they are appended, keys keep their positions in whatever slot they are."""
    q, k, v = arrays()
    everywhere = np.broadcast_to(np.arange(L), (B, L))
    expected = whole(turned(q, everywhere), turned(k, everywhere), v, window)
    cache = made(q, window)
    for i in range(L):
        at = cache.positions(1)
        assert at.tolist() == [[i]] * B
        now = slice(i, i + 1)
        cache = cache.append(turned(k[:, :, now], at), v[:, :, now])
        close(cache.attend(turned(q[:, :, now], at)), expected[:, :, now])


def test_where_the_keys_are() -> None:
    q, k, v = arrays()
    cache = made(q, W, capacity=6)
    cache = cache.append(k[:, :, :3], v[:, :, :3], [3, 2, 0])
    assert cache.key_positions().tolist() == [
        [0, 1, 2, -1, -1, -1], [0, 1, -1, -1, -1, -1], [-1] * 6,
    ]  # fmt: skip
    for i in range(3, 8):
        cache = cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1], [1, 1, 0])
    assert cache.key_positions().tolist() == [[6, 7, 2, 3, 4, 5], [6, 1, 2, 3, 4, 5], [-1] * 6]


# One program for all steps ----------------------------------------------------------------------


def ragged_step(cache: KVCache, q: Any, k: Any, v: Any, counts: Any) -> tuple[Any, KVCache]:
    cache = cache.append(k, v, counts)
    return cache.attend(q, counts=counts), cache


def decode(step: Callable[..., Any], convert: Callable[[Any], Any], window: int | None) -> KVCache:
    """Decode to the end of a batch, of which one sequence ends before the others."""
    q, k, v = arrays()
    expected = whole(q, k, v, window)
    cache = made(convert(q), window)
    for i in range(L):
        counts = np.array([1, i < 5, 1])
        now = [convert(x[:, :, i : i + 1]) for x in (q, k, v)]
        out, cache = step(cache, *now, convert(counts.astype("i4")))
        close(out, np.where(counts[:, None, None, None] == 1, expected[:, :, i : i + 1], 0))
    return cache


@pytest.mark.parametrize(
    "window", [None, pytest.param(W, marks=pytest.mark.sweep)], ids=["all", "rolling"]
)
def test_jax_compiles_one_program_for_all_steps(window: int | None) -> None:
    """The cache is an argument that is donated, and a result.

    In a program nobody can say that a sequence is full: it becomes NaN, and no other one does.
    """
    traces = []

    def step(*given: Any) -> Any:
        traces.append(1)
        return ragged_step(*given)

    step_by_jit = jax.jit(step, donate_argnums=0)
    cache = decode(step_by_jit, jnp.asarray, window)
    q, k, v = (jnp.asarray(x[:, :, :1]) for x in arrays())
    out, cache = step_by_jit(cache, q, k, v, jnp.ones(B, "int32"))
    assert cache.lengths.tolist() == [L + 1, 6, L + 1]
    full = [window is None, False, window is None]
    assert np.isnan(out).all((1, 2, 3)).tolist() == np.isnan(out).any((1, 2, 3)).tolist() == full
    assert len(traces) == 1


@pytest.mark.parametrize(
    "window", [pytest.param(None, marks=pytest.mark.sweep), W], ids=["all", "rolling"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pytorch_compiles_one_program_for_all_steps(window: int | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(ragged_step, fullgraph=True, dynamic=False, backend=counter)
    decode(step, lambda x: torch.tensor(np.ascontiguousarray(x)), window)
    assert counter.frame_count == 1


def test_it_is_a_tree_of_arrays() -> None:
    """In JAX and PyTorch, the window and the layout being structure; it can be pickled too."""
    for convert, flatten in (
        (jnp.asarray, jax.tree.flatten),
        (torch.tensor, torch_tree.tree_flatten),
    ):
        cache = made(convert(arrays()[0]), W, layout="bshd")
        flat, structure = flatten(cache)
        assert [tuple(x.shape) for x in flat] == [(B, 8, HK, D), (B, 8, HK, DV), (B,)]
        unflatten = jax.tree.unflatten if convert is jnp.asarray else torch_tree.tree_unflatten
        again = unflatten(structure, flat) if convert is jnp.asarray else unflatten(flat, structure)
        assert (again.window, again.layout, again.k is cache.k) == (W, "bshd", True)
    copy = pickle.loads(pickle.dumps(made(arrays()[0], W)))
    assert (copy.window, copy.layout, copy.lengths.tolist()) == (W, "bhsd", [0] * B)


@pytest.mark.parametrize("window", [None, W], ids=["all", "rolling"])
def test_autograd_goes_through_the_cache(window: int | None) -> None:
    """While it records, the slots before stay as they were."""
    inputs = [torch.tensor(x, requires_grad=True) for x in arrays()]
    q, k, v = inputs
    cache, found = made(q, window), []
    for i in range(L):
        cache = cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        found.append(cache.attend(q[:, :, i : i + 1]))
    got = torch.autograd.grad(torch.cat(found, 2).square().sum(), inputs)
    expected = torch.autograd.grad(whole(q, k, v, window).square().sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# Writing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_slots_are_written_in_place(framework: str) -> None:
    q, k, v = map(FRAMEWORKS[framework], arrays())
    cache = made(q)
    later = cache.append(k[:, :, :2], v[:, :, :2])
    assert later.k is cache.k
    assert cache.lengths.tolist() == [0] * B


def test_bfloat16_stays_bfloat16() -> None:
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in arrays())
    cache = made(q).append(k, v)
    assert (cache.k.dtype, cache.attend(q).dtype) == (q.dtype, q.dtype)


def test_reorder_picks_sequences() -> None:
    """As beam search does; there may be more or fewer of them."""
    q, k, v = arrays()
    cache = made(q).append(k[:, :, :3], v[:, :, :3], [3, 1, 2])
    beams = cache.reorder([0, 0, 2, 1])
    assert beams.lengths.tolist() == [3, 3, 2, 1]
    close(beams.attend(q[[0, 0, 2, 1]][:, :, :1]), cache.attend(q[:, :, :1])[[0, 0, 2, 1]])
    again = beams.append(k[[0, 0, 2, 1]][:, :, 3:4], v[[0, 0, 2, 1]][:, :, 3:4])
    assert again.lengths.tolist() == [4, 4, 3, 2]
    assert cache.lengths.tolist() == [3, 1, 2]


def test_truncate_forgets_the_last_tokens() -> None:
    """As speculative decoding does with the tokens that were not accepted."""
    q, k, v = arrays()
    guessed = -v[:, :, 3:6]
    cache = made(q).append(k[:, :, :3], v[:, :, :3]).append(k[:, :, 3:6], guessed)
    cache = cache.truncate(np.array([3, 3, 3]))
    cache = cache.append(k[:, :, 3:4], v[:, :, 3:4])
    close(cache.attend(q[:, :, 3:4]), whole(q, k, v)[:, :, 3:4])
    traced = replace(cache, **{n: jnp.asarray(getattr(cache, n)) for n in cache._array_fields})
    clamped = jax.jit(lambda c: c.truncate(jnp.array([2, 9, -1])))(traced)
    assert clamped.lengths.tolist() == [2, 4, 0]


@pytest.mark.parametrize(
    "window", [None, pytest.param(W, marks=pytest.mark.sweep)], ids=["all", "rolling"]
)
def test_an_index_that_nobody_can_read_is_no_other_sequence(window: int | None) -> None:
    """It is NaN, also once tokens came and went; no namespace's wrapping or clamping shows."""
    q, k, v = (jnp.asarray(x[:, :, :1]) for x in arrays())

    def step(cache: KVCache, index: Any) -> Any:
        cache = cache.reorder(index).append(k, v)
        cache = cache if window else cache.truncate(jnp.ones(B, int))
        return cache.attend(q)

    out = jax.jit(step)(made(q, window).append(k, v), jnp.array([2, B, -1]))
    assert np.isnan(out).any((1, 2, 3)).tolist() == [False, True, True]


# Reading ----------------------------------------------------------------------------------------

SLOTS = np.random.default_rng(7).random((B, 1, 1, L)) > 0.3


@pytest.mark.parametrize(
    "given",
    [
        {"mask": Window(2, 0, "bottom_right")},
        {"mask": Starts([2, 0, 1]) & ~Prefix(1)},
        {"mask": Dense(SLOTS) | Causal(q_pos=np.full(2, 3))},
        {"mask": SLOTS, "bias": np.ones((1, HQ, 2, L), "f4"), "sinks": np.ones(HQ, "f4")},
        {"mask": Causal("bottom_right") | Prefix(9), "causal": False},
    ],
    ids=["window", "counts", "slots", "array", "prefix"],
)
def test_a_mask_of_the_callers_is_added(given: dict[str, Any]) -> None:
    q, k, v = arrays()
    ends = np.array([9, L, 4])
    cache = made(q).append(k, v, ends)
    got = cache.attend(q[:, :, :2], **given)
    mask = given["mask"] if isinstance(given["mask"], attnx.masks.Mask) else Dense(given["mask"])
    rest = {"causal": "bottom_right"} | given | {"mask": Lengths(ends) & mask}
    close(got, attnx.attention(q[:, :, :2], k, v, **rest))


def test_masks_of_a_rolling_cache() -> None:
    """Positions are asked for by name, slots by booleans."""
    q, k, v = arrays()
    cache = made(q, 6)
    for i in range(L):
        cache = cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    last = slice(L - 1, L)
    narrow = cache.attend(q[:, :, last], mask=Window(2, 0, "bottom_right") & Causal("bottom_right"))
    close(narrow, whole(q, k, v, 3)[:, :, last])
    even = (cache.key_positions() % 2 == 0)[:, None, None, :]
    got = cache.attend(q[:, :, last], mask=~Dense(even))
    odd = Dense((np.arange(L) % 2 == 1)[None])
    expected = attnx.attention(q, k, v, mask=odd & Window(5, 0), causal=True)
    close(got, expected[:, :, last])
