"""A tile's class is never wrong: empty shows nothing, full shows all; and it pays where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict
import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx._call import Options, prepare
from attnx.tiling import EMPTY, FULL, PARTIAL, Grid, position_offset, tile_classes, visible

B, Hq = 2, 2
SIZES = [(1, 1, 1, 1), (7, 9, 2, 3), (8, 8, 4, 4), (5, 3, 8, 8), (6, 11, 1, 4), (9, 4, 3, 1)]
Random = Callable[..., Iterator[Any]]


def canonical(mask: Any, Lq: int, Lk: int) -> Any:
    q, k = np.zeros((B, Hq, Lq, 4), np.float32), np.zeros((B, Hq, Lk, 4), np.float32)
    return prepare(attnx.get_backend("numpy").lane, q, k, k, Options(mask=mask)).call.mask


def classes(mask: Any, Lq: int, Lk: int, q_size: int, k_size: int) -> Any:
    found = tile_classes(
        mask, np, np.arange, Lq=Lq, Lk=Lk, q_size=q_size, k_size=k_size
    )  # fmt: skip
    return np.broadcast_to(found, (B, Hq, *found.shape[2:]))


def exact(mask: Any, Lq: int, Lk: int, q_size: int, k_size: int) -> Any:
    """The class of each tile by looking at every pair."""
    axes = [slice(0, n) for n in (B, Hq, Lq, Lk)]
    pairs = visible(mask, Grid(np, np.arange, *axes, position_offset(mask, Lq, Lk)))
    pairs = np.broadcast_to(pairs, (B, Hq, Lq, Lk))
    rows, columns = -(-Lq // q_size), -(-Lk // k_size)
    found = np.empty((B, Hq, rows, columns), np.int8)
    for r in range(rows):
        for c in range(columns):
            tile = pairs[:, :, r * q_size : (r + 1) * q_size, c * k_size : (c + 1) * k_size]
            found[:, :, r, c] = np.where(
                tile.all((2, 3)), FULL, np.where(tile.any((2, 3)), PARTIAL, EMPTY)
            )
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_class_is_never_wrong(masks_at_random: Random, sizes: tuple[int, ...]) -> None:
    """Over trees of every kind of mask: only PARTIAL may stand where another class is true."""
    Lq, Lk, *_ = sizes
    for mask in masks_at_random(60, B, Hq, Lq, Lk):
        mask = canonical(mask, Lq, Lk)
        said, true = classes(mask, *sizes), exact(mask, *sizes)
        assert said.shape == true.shape
        assert np.all((said == true) | (said == PARTIAL)), repr(mask)


@pytest.mark.parametrize(
    "mask",
    [
        Causal("top_left"), Causal("bottom_right"), Window(2, 0, "top_left"),
        Window(1, 3, "bottom_right"), Window(None, 1, "top_left"), Lengths([4, 7], [3, 0]),
        Lengths(5), Starts([2, 6]), Prefix(3), ~Prefix(3),
        Causal("bottom_right") & Lengths([5, 8]), Dense(np.tri(7, 9, dtype=bool)),
        Segments([0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1]),
    ],
    ids=repr,
)  # fmt: skip
def test_an_empty_tile_of_a_structured_mask_is_seen_to_be_empty(mask: Any) -> None:
    """Work that a mask hides is not done: causal work is halved, padding costs nothing."""
    sizes = (7, 9, 2, 3)
    mask = canonical(mask, *sizes[:2])
    said, true = classes(mask, *sizes), exact(mask, *sizes)
    assert np.array_equal(said == EMPTY, true == EMPTY)


def test_a_full_tile_never_looks_at_the_mask() -> None:
    """Of 8 x 8 causal tiles 28 are full, 8 partial and 28 empty."""
    said = classes(canonical(Causal(), 64, 64), 64, 64, 8, 8)[0, 0]
    assert [int((said == kind).sum()) for kind in (FULL, PARTIAL, EMPTY)] == [28, 8, 28]


def test_what_nobody_can_know_is_partial() -> None:
    said = classes(canonical(Predicate(lambda b, h, i, j: i >= j), 4, 4), 4, 4, 2, 2)
    assert np.all(said == PARTIAL)


def test_the_plan_holds_one_byte_a_block_and_no_square_array() -> None:
    """At 2^20 queries and keys a dense mask would take a terabyte."""
    L = 1 << 20
    mask = (Causal("top_left") & Window(4096, 0, "top_left")) | Prefix(64)
    said = tile_classes(mask, np, np.arange, Lq=L, Lk=L, q_size=8192, k_size=8192)
    assert (said.shape, said.dtype) == ((1, 1, 128, 128), np.int8)


def test_classes_are_the_same_in_any_array_library(masks_at_random: Random) -> None:
    """The rules take their namespace from the caller."""
    xp = array_api_strict
    for mask in masks_at_random(40, B, Hq, 7, 9):
        mask = canonical(mask, 7, 9)
        if any(isinstance(node, Predicate) for node in attnx.masks.walk(mask)):
            continue
        moved = attnx.masks.map_leaves(
            mask, lambda node, name, leaf: leaf if isinstance(leaf, int) else xp.asarray(leaf)
        )
        sizes = {"Lq": 7, "Lk": 9, "q_size": 2, "k_size": 3}
        said = tile_classes(moved, xp, lambda a, b: xp.arange(a, b), **sizes)
        there = np.from_dlpack(said)
        here = tile_classes(mask, np, np.arange, **sizes)
        assert np.array_equal(there, here), repr(mask)
