"""Attention in parts equals the whole, for every option, on every framework (S2.6, S7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnx
from attnx import (
    Alibi,
    BlockMask,
    Causal,
    Dense,
    Dropout,
    Lengths,
    Predicate,
    Prefix,
    Segments,
    Starts,
    Window,
)
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.masks import Mask, map_leaves
from attnx.parts import piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RNG = np.random.default_rng(3)
B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 7, 23, 8, 5
SIZES = [(LQ, LK), (1, 40), (23, 23), (23, 9), (0, 5)]


def arrays(Lq: int = LQ, Lk: int = LK, dtype: str = "float32") -> tuple[Any, Any, Any]:
    shapes = ((B, HQ, Lq, D), (B, HK, Lk, D), (B, HK, Lk, DV))
    q, k, v = (np.random.default_rng(Lk).standard_normal(s).astype(dtype) for s in shapes)
    return q, k, v


def stripes(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i * 3 + j + h + b) % 3 != 0


def options(Lq: int = LQ, Lk: int = LK) -> dict[str, dict[str, Any]]:
    """One call each for every kind of mask and option whose meaning depends on i or j."""
    ids = [RNG.integers(-1, 3, (B, L)) for L in (Lq, Lk)]
    bias = RNG.standard_normal((B, HQ, Lq, Lk)).astype("f4")
    dense = RNG.random((B, 1, Lq, Lk)) > 0.4
    some, few = np.array([Lk, Lk // 2]), np.array([Lk // 2, 0])
    return {
        "plain": {},
        "top_left": {"causal": "top_left"},
        "bottom_right": {"causal": "bottom_right", "sinks": np.ones(HQ, "f4")},
        "window": {"mask": Window(3, 1, "bottom_right")},
        "right": {"mask": Window(None, 2, "top_left") & Lengths(Lk - 1)},
        "lengths": {"mask": Lengths(few), "sinks": np.ones(HQ, "f4")},
        "ragged": {"mask": Lengths(some, np.array([Lq, Lq // 2])), "causal": "bottom_right"},
        "starts": {"mask": Starts(few) & Causal("bottom_right")},
        "prefix": {"mask": (Causal("bottom_right") | Prefix(some - 2)) & Lengths(some)},
        "segments": {"mask": Segments(*ids) & Causal("bottom_right")},
        "array": {"mask": dense},
        "keys": {"mask": Dense(dense[:, :, :1]), "bias": bias[:1, :, :1]},
        "tree": {"mask": ~(Window(2, 2, "top_left") | Predicate(stripes)) & Dense(dense)},
        "blocks": {"mask": BlockMask(RNG.random((1, HQ, -(-Lq // 4), -(-Lk // 6))) > 0.3, (4, 6))},
        "q_pos": {"mask": Causal(q_pos=RNG.integers(0, Lk, (B, Lq)))},
        "kv_pos": {"mask": Window(3, 3, q_pos=ids[0], kv_pos=RNG.integers(-3, 6, Lk))},
        "bias": {"bias": bias, "softcap": 2.0, "scale": -0.3},
        "alibi": {"bias": Alibi([0.5, 0.1, 0.0, 2.0], "bottom_right"), "mask": Lengths(some)},
        "dropout": {"dropout": Dropout(0.4, 7, (1, 2, 3, 8)), "causal": "bottom_right"},
        "windowed": {"dropout": Dropout(0.4, 7), "mask": Window(3, 0, "bottom_right")},
    }


OPTIONS = options()


def close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance
        )


def as_framework(convert: Callable[[Any], Any], given: dict[str, Any]) -> dict[str, Any]:
    """The same options with arrays of another framework."""

    def one(value: Any) -> Any:
        if isinstance(value, Mask):
            return map_leaves(value, lambda _, __, x: one(x))
        return convert(value) if isinstance(value, np.ndarray) else value

    return {name: one(value) for name, value in given.items()}


def cuts(name: str, Lk: int) -> list[Any]:
    """How to cut; beside dropout at multiples of 8. The last of the cuts make an empty part."""
    if "dropout" in OPTIONS[name]:
        return [1, 3, [Lk // 16 * 8], [0, 0, Lk // 8 * 8]]
    return [1, 3, Lk + 2, 1 << 40, [1, 1, Lk // 2]]


@pytest.mark.parametrize("name", OPTIONS)
def test_keys_in_parts_equal_the_whole(name: str) -> None:
    """Out and lse: one part, some, more than there are keys, and empty ones."""
    q, k, v = arrays()
    whole = attnx.attention(q, k, v, return_lse=True, **OPTIONS[name])
    for parts in cuts(name, LK):
        close(attnx.split_kv(q, k, v, parts=parts, return_lse=True, **OPTIONS[name]), whole)


@pytest.mark.parametrize("name", OPTIONS)
def test_queries_in_chunks_equal_the_whole(name: str) -> None:
    q, k, v = arrays()
    given = {"causal": False} | OPTIONS[name]
    whole = attnx.attention(q, k, v, return_lse=True, **given)
    for chunk in (3, 100):
        close(attnx.prefill(q, k, v, chunk=chunk, return_lse=True, **given), whole)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_size(name: str, sizes: tuple[int, int]) -> None:
    q, k, v = arrays(*sizes)
    given = {"causal": False} | options(*sizes)[name]
    whole = attnx.attention(q, k, v, return_lse=True, **given)
    for parts in (2, *cuts(name, sizes[1])):
        close(attnx.split_kv(q, k, v, parts=parts, return_lse=True, **given), whole)
    for chunk in (1, 4, 7):
        close(attnx.prefill(q, k, v, chunk=chunk, return_lse=True, **given), whole)


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.sweep)])
def test_random_trees_in_parts_of_both(
    masks_at_random: Callable[..., Iterator[Mask]], count: int
) -> None:
    """A grid of pieces, each computed by itself: keys are merged, rows stand behind each other."""
    q, k, v = arrays(6, 13)
    for mask in masks_at_random(count, B, HQ, 6, 13):
        rows = []
        for queries in ((0, 4), (4, 6)):
            found = []
            for keys in ((0, 5), (5, 13)):
                part, given = piece(q, k, v, queries=queries, keys=keys, mask=mask)
                found.append(attnx.attention(*part, **given | {"return_lse": True}))
            rows.append(attnx.merge(found))
        got = [np.concatenate([row[n] for row in rows], axis=2) for n in (0, 1)]
        close(got, attnx.attention(q, k, v, mask=mask, return_lse=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_every_layout_and_batch(
    make: Callable[..., tuple[Any, Any, Any]], batch: tuple[int, ...], layout: str
) -> None:
    q, k, v = make(B=batch, Lk=11, layout=layout)
    given = {
        "layout": layout, "causal": "bottom_right", "return_lse": True,
        "mask": Lengths(np.full(batch, 9)), "bias": np.ones((*(1,) * len(batch), 1, 1, 11), "f4"),
    }  # fmt: skip
    whole = attnx.attention(q, k, v, **given)
    close(attnx.split_kv(q, k, v, parts=3, **given), whole)
    close(attnx.prefill(q, k, v, chunk=4, **given), whole)


def test_two_axes(make: Callable[..., tuple[Any, Any, Any]]) -> None:
    q, k, v = make(rank=2, Lk=11)
    whole = attnx.attention(q, k, v, causal="bottom_right", return_lse=True)
    close(attnx.split_kv(q, k, v, parts=2, causal="bottom_right", return_lse=True), whole)
    close(attnx.prefill(q, k, v, chunk=4, return_lse=True), whole)


def test_no_keys_at_all() -> None:
    """S3.7: 0, and the sinks once."""
    q, k, v = arrays(3, 0)
    sinks = np.ones(HQ, "f4")
    for parts in (1, 2, [0, 0]):
        out, lse = attnx.split_kv(q, k, v, parts=parts, sinks=sinks, return_lse=True)
        assert (out == 0).all()
        assert (lse == 1).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_pytorch(name: str) -> None:
    q, k, v = map(torch.tensor, arrays())
    given = as_framework(torch.tensor, {"causal": False} | OPTIONS[name]) | {"return_lse": True}
    whole = attnx.attention(q, k, v, **given)
    close(attnx.split_kv(q, k, v, parts=2, **given), whole)
    close(attnx.prefill(q, k, v, chunk=4, **given), whole)


SPLIT, PREFILL = (attnx.split_kv, {"parts": 2}), (attnx.prefill, {"chunk": 4})
ON_JAX = [(way, name) for way in (SPLIT, PREFILL) for name in OPTIONS]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, n, marks=() if (way, n) == (SPLIT, "ragged") else pytest.mark.sweep)
        for way, n in ON_JAX
    ],
    ids=[f"{way[0].__name__}-{n}" for way, n in ON_JAX],
)
def test_jax_under_jit(way: Any, name: str) -> None:
    """Lengths, ids and masks are tracers there."""
    q, k, v = map(jnp.asarray, arrays())
    given = as_framework(jnp.asarray, {"causal": False} | OPTIONS[name])
    traced = {n: x for n, x in given.items() if n in ("mask", "sinks") or hasattr(x, "shape")}
    fixed = {n: x for n, x in given.items() if n not in traced} | {"return_lse": True}
    got = jax.jit(lambda q, k, v, traced: way[0](q, k, v, **way[1], **fixed, **traced))
    whole = attnx.attention(*arrays(), return_lse=True, **({"causal": False} | OPTIONS[name]))
    close(got(q, k, v, traced), whole)


@pytest.mark.parametrize("name", ["bottom_right", "prefix", "bias", "dropout"])
def test_gradients_in_parts_equal_those_of_the_whole(name: str) -> None:
    """Of q, k, v, bias and sinks, with lse in the loss."""
    given = as_framework(torch.tensor, {"causal": False} | OPTIONS[name])
    inputs = [torch.tensor(x, requires_grad=True) for x in arrays()]
    inputs += [given[n].requires_grad_() for n in ("bias", "sinks") if n in given]

    def gradients(call: Callable[..., Any], **extra: Any) -> Any:
        out, lse = call(*inputs[:3], return_lse=True, **extra, **given)
        finite = torch.where(lse.isfinite(), lse, 0.0)
        return torch.autograd.grad(out.square().sum() + finite.sum(), inputs)

    whole = gradients(attnx.attention)
    close(gradients(attnx.split_kv, parts=3), whole, 1e-4)
    close(gradients(attnx.prefill, chunk=4), whole, 1e-4)


def test_one_query_over_a_long_cache() -> None:
    """128k keys: what was summed in 16 parts agrees with one sum."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, L, 16), dtype="f4") for L in (1, 1 << 17, 1 << 17))
    given = {"causal": "bottom_right", "mask": Lengths([100_003])}
    whole = attnx.attention(q, k, v, return_lse=True, **given)
    close(attnx.split_kv(q, k, v, parts=16, return_lse=True, **given), whole, 1e-5)


def test_a_chunk_gets_only_the_keys_it_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def attention(q: Any, k: Any, v: Any, **given: Any) -> Any:
        seen.append((q.shape[2], k.shape[2]))
        return attnx.attention(q, k, v, **given)

    monkeypatch.setattr("attnx.parts.attention", attention)
    q, k, v = arrays(8, 20)
    attnx.prefill(q, k, v, chunk=4)
    attnx.prefill(q, k, v, chunk=4, mask=Window(2, 0, "bottom_right"))
    attnx.prefill(q, k, v, chunk=4, causal=False, mask=Prefix(3) | Window(None, 0, "top_left"))
    assert seen == [(4, 16), (4, 20), (4, 6), (4, 6), (4, 4), (4, 8)]


def test_a_diagonal_keeps_its_name_where_it_has_one() -> None:
    """A kernel may know the name; beside a Lengths it would mean another diagonal."""
    q, k, v = arrays(8, 8)
    kept = piece(q, k, v, queries=(4, 8), keys=(0, 8), causal=True)[1]["mask"]
    assert kept == Causal("bottom_right")
    assert piece(q, k, v, queries=(2, 4), keys=(2, 8), causal=True)[1]["mask"] == Causal("top_left")
    padded = piece(q, k, v, queries=(4, 8), causal=True, mask=Lengths(7))[1]["mask"]
    assert padded.parts[0].q_pos.tolist() == [4, 5, 6, 7]


@pytest.mark.sweep
def test_compiled_by_pytorch_in_one_graph() -> None:
    def call(q: Any, k: Any, v: Any, ends: Any) -> Any:
        given = {"mask": (Causal("bottom_right") | Prefix(2)) & Lengths(ends)}
        split = attnx.split_kv(q, k, v, parts=2, **given)
        return split, attnx.prefill(q, k, v, chunk=4, causal=False, **given)

    inputs = (*map(torch.tensor, arrays()), torch.tensor([20, 4]))
    made = torch.compile(call, fullgraph=True, backend="eager")
    close(made(*inputs), call(*inputs))


BAD: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda *x: attnx.split_kv(*x, parts=0), ArgumentError, "parts: expected at least one part"),
    (lambda *x: attnx.split_kv(*x, parts=[5, 3]), ArgumentError, r"cuts that rise.*got \[5, 3\]"),
    (lambda *x: attnx.split_kv(*x, parts=[99]), ArgumentError, r"within \[0, Lk=23\]"),
    (lambda *x: attnx.split_kv(*x, parts=2.0), ArgumentTypeError, "parts: expected an integer or"),
    (lambda *x: attnx.split_kv(*x, parts=[True]), ArgumentTypeError, r"parts\[0\].*got bool"),
    (lambda *x: attnx.split_kv(*x, parts=np.array([3, 5])), ArgumentTypeError, "or the keys at wh"),
    (lambda *x: piece(*x, keys=slice(2, 4)), ArgumentTypeError, r"keys: .*\(start, stop\), got sl"),
    (
        lambda *x: attnx.split_kv(*x, parts=[12], dropout=Dropout(0.1, 0)),
        ArgumentError, "multiple of 8 beside dropout.*got 12; cut at 8",
    ),
    (
        lambda *x: piece(*x, keys=(4, 8), dropout=Dropout(0.1, 0)),
        ArgumentError, "keys: expected to start at a multiple of 8",
    ),
    (lambda *x: piece(*x, queries=(3, 99)), ArgumentError, r"queries: .*<= 7, got \(3, 99\)"),
    (lambda *x: piece(*x, width=3), TypeError, "unexpected keyword arguments width"),
    (lambda *x: attnx.prefill(*x, chunk=0), ArgumentError, "chunk: .*at least 1, got 0"),
    (lambda *x: attnx.prefill(*x, chunk=None), ArgumentTypeError, "chunk: expected an integer"),
    (lambda *x: attnx.prefill(*x, chunk=2, causal=True), ArgumentError, "Lq == Lk"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_what_is_wrong_is_told(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*arrays())
