"""What a cache refuses, before anything is written (S8.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from attnx import KVCache, Lengths, Prefix
from attnx.errors import ArgumentError, ArgumentTypeError, AttnxError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

B, HQ, HK, D, DV, W = 3, 4, 2, 8, 5, 4


def made(like: Any, window: int | None = None, **given: Any) -> KVCache:
    given = {"capacity": 8, "window": window} | given
    return KVCache.empty(B, HK, D=D, Dv=DV, like=like, **given)


def arrays(n: int) -> tuple[Any, Any, Any]:
    shapes = ((B, HQ, n, D), (B, HK, n, D), (B, HK, n, DV))
    q, k, v = (np.random.default_rng(5).standard_normal(s, dtype="f4") for s in shapes)
    return q, k, v


def filled(window: int | None = None) -> tuple[KVCache, Any, Any, Any]:
    q, k, v = arrays(2)
    return made(q, window).append(k, v), q, k, v


X = np.zeros((B, HK, 2, D), "f4")
BAD: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda c, q, k, v: c.append(k[:2], v[:2]), ArgumentError, r"k: expected \(\*B, Hk, n, D\)"),
    (lambda c, q, k, v: c.append(k, k), ArgumentError, r"v: expected \(\*B, Hk, n, Dv\)"),
    (lambda c, q, k, v: c.append(k, v[:, :, :1]), ArgumentError, "v: expected as many tokens"),
    (lambda c, q, k, v: c.append(k.astype("f8"), v), ArgumentTypeError, "dtype float32, got floa"),
    (lambda c, q, k, v: c.append(torch.tensor(k), v), ArgumentTypeError, "k: expected a numpy arr"),
    (lambda c, q, k, v: c.append(k, v, [1, 3, 0]), ArgumentError, r"counts: .*\[0, n=2\], got 3"),
    (lambda c, q, k, v: c.append(k, v, [1, 1]), ArgumentError, r"counts: .*\*B = \(3,\)"),
    (lambda c, q, k, v: c.append(k, v, 1), ArgumentTypeError, "counts: expected integers"),
    (lambda c, q, k, v: c.append(k, v, X[:, 0, 0, 0]), ArgumentTypeError, "counts: .*got float32"),
    (lambda c, q, k, v: c.append(k, v, [1.0, 2, 0]), ArgumentTypeError, r"counts\[0\]: .*float"),
    (lambda c, q, k, v: c.append(k, v, [1, "2", 0]), ArgumentTypeError, r"counts\[1\]: .*got str"),
    (lambda c, q, k, v: c.reorder([True]), ArgumentTypeError, r"indices\[0\]: .*got bool"),
    (lambda c, q, k, v: c.attend(q[..., :4]), ArgumentError, r"q: expected \(\*B, Hq, n, D\)"),
    (lambda c, q, k, v: c.attend(q, causal=True), ArgumentError, "causal: .*or False, got True"),
    (lambda c, q, k, v: c.attend(q, causal=q), ArgumentError, "causal: .*or False, got"),
    (lambda c, q, k, v: c.attend(q, layout="bshd"), ArgumentError, "layout: a cache has its own"),
    (lambda c, q, k, v: c.attend(q, mask=Lengths(2)), ArgumentError, "beside 2 Lengths"),
    (lambda c, q, k, v: c.reorder([3]), ArgumentError, r"indices: .*\[0, 3\), got 3"),
    (lambda c, q, k, v: c.reorder([[0]]), ArgumentError, "indices: expected integers of one axis"),
    (lambda c, q, k, v: c.truncate([3, 0, 0]), ArgumentError, r"lengths: .*got \[3, 0, 0\] beside"),
    (lambda c, q, k, v: c.prefill(q, k, v, chunk=0), ArgumentError, "chunk: .*at least 1"),
    (lambda c, q, k, v: c.prefill(q, k, v, chunk=1, bias=X), ArgumentError, "bias: .*no such opt"),
    (lambda c, q, k, v: c.prefill(q[:, :, :1], k, v, chunk=1), ArgumentError, "q: .*as many"),
]  # fmt: skip
BAD_ROLLING: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda c, q, k, v: c.attend(q, mask=Prefix(2)), ArgumentError, "Prefix.*slots are no posit"),
    (lambda c, q, k, v: c.attend(q, causal=False), ArgumentError, "causal: .*got False"),
    (lambda c, q, k, v: c.attend(q, causal=0), ArgumentError, "causal: .*got 0"),
    (lambda c, q, k, v: c.attend(q, bias=np.zeros((1, 8), "f4")), ArgumentError, "bias: in a rol"),
    (lambda c, q, k, v: c.attend(q, bias=1.0), ArgumentTypeError, "bias: expected a numpy array"),
    (lambda c, q, k, v: c.truncate([0, 0, 0]), UnsupportedError, "truncate: .*rolling cache"),
    (
        lambda c, q, k, v: c.append(*(np.repeat(x, 3, axis=2) for x in (k, v))),
        ArgumentError, r"k: .*window \+ 1 = 5 tokens at once, got 6.*window \+ n - 1 = 9",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("window", "call", "error", "message"),
    [*((None, *bad) for bad in BAD), *((W, *bad) for bad in BAD_ROLLING)],
    ids=[message for _, _, message in (*BAD, *BAD_ROLLING)],
)
def test_what_is_wrong_is_told(
    window: int | None, call: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(*filled(window))
    assert isinstance(caught.value, AttnxError)


def test_a_full_cache_is_told_before_anything_is_written() -> None:
    q, k, v = arrays(3)
    cache = made(q, capacity=4).append(k[:, :, :3], v[:, :, :3], [3, 1, 0])
    before = [x.copy() for x in (cache.k, cache.v)]
    with pytest.raises(ArgumentError, match=r"within the capacity 4, got a sequence.* have 5"):
        cache.append(k[:, :, :2], v[:, :, :2])
    np.testing.assert_array_equal(cache.k, before[0])
    np.testing.assert_array_equal(cache.v, before[1])
    assert cache.append(k[:, :, :2], v[:, :, :2], [1, 2, 2]).lengths.tolist() == [4, 3, 2]


EMPTY: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"capacity": 0}, ArgumentError, "capacity: expected an integer >= 1, got 0"),
    ({"capacity": 2.5}, ArgumentTypeError, "capacity: expected an integer, got float"),
    ({"capacity": 3, "window": 4}, ArgumentError, "capacity: expected at least the window, 4"),
    ({"window": 0, "capacity": 2}, ArgumentError, "window: expected an integer >= 1"),
    ({"layout": "sbhd"}, ArgumentError, "layout: expected 'bhsd' or 'bshd'"),
    ({"like": np.zeros(1, int)}, ArgumentTypeError, "like: expected one of float16"),
]


@pytest.mark.parametrize(("given", "error", "message"), EMPTY, ids=[m for _, _, m in EMPTY])
def test_a_cache_that_cannot_be(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**{"like": np.zeros(1, "f4")} | given)
