"""Visibility by blocks: what it shows, what tiles know of it, and how it is refused."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnx
from attnx import BlockMask, Causal, Dense
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.tiling import EMPTY, FULL, PARTIAL, Grid, tile_classes, visible

RNG = np.random.default_rng(0)
LAYOUT = RNG.random((2, 4, 5, 5)) < 0.5
Q, K, V = (RNG.standard_normal((2, 4, 33, 8)).astype(np.float32) for _ in range(3))


def pairs(layout: Any, block: tuple[int, int], Lq: int, Lk: int) -> Any:
    """By the definition; axes of size 1 stand for all blocks."""
    rows, keys = np.arange(Lq) // block[0], np.arange(Lk) // block[1]
    rows = rows if layout.shape[-2] > 1 else 0 * rows
    return layout[..., rows[:, None], keys if layout.shape[-1] > 1 else 0 * keys]


@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    flat=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 99),
)  # fmt: skip
def test_pairs_and_tiles_follow_the_layout(
    lengths: tuple[int, int], block: tuple[int, int], tile: tuple[int, int],
    flat: tuple[bool, bool], seed: int,
) -> None:  # fmt: skip
    """Empty and full tiles are told exactly: a tile is partial only where it holds both."""
    (Lq, Lk), (rows, columns) = lengths, (-(-n // b) for n, b in zip(lengths, block, strict=True))
    shape = (1, 1, 1 if flat[0] else rows, 1 if flat[1] else columns)
    mask = BlockMask(np.random.default_rng(seed).random(shape) < 0.5, block)
    expected = pairs(mask.layout, block, Lq, Lk)[0, 0]
    grid = Grid(xp, np.arange, slice(0, 1), slice(0, 1), slice(0, Lq), slice(0, Lk))
    found = np.broadcast_to(visible(mask, grid)[0, 0], (Lq, Lk))
    np.testing.assert_array_equal(found, expected)
    classes = tile_classes(
        mask, xp, np.arange, Lq=Lq, Lk=Lk, q_size=tile[0], k_size=tile[1]
    )[0, 0]  # fmt: skip
    for (a, b), kind in np.ndenumerate(classes):
        part = expected[a * tile[0] :, b * tile[1] :][: tile[0], : tile[1]]
        assert kind == (FULL if part.all() else PARTIAL if part.any() else EMPTY)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_call_sees_the_blocks_that_are_shown(framework: str) -> None:
    pytest.importorskip(framework)
    lane = attnx.get_backend(framework).lane
    arrays = [lane.from_numpy(x) for x in (Q, K, V)]
    out = attnx.attention(*arrays, mask=BlockMask(lane.from_numpy(LAYOUT), (7, 8)) & Causal())
    same = attnx.attention(Q, K, V, mask=Dense(pairs(LAYOUT, (7, 8), 33, 33)) & Causal())
    np.testing.assert_allclose(lane.to_numpy(out), same, atol=2e-6)


def test_a_layout_is_an_argument_of_a_program() -> None:
    """The array may be traced, and another one needs no other program."""
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(x) for x in (Q, K, V)]
    program = jax.jit(lambda layout: attnx.attention(*arrays, mask=BlockMask(layout, (7, 8))))
    for layout in (LAYOUT, ~LAYOUT):
        same = attnx.attention(Q, K, V, mask=pairs(layout, (7, 8), 33, 33))
        np.testing.assert_allclose(program(layout), same, atol=2e-6)
    assert program._cache_size() == 1


def test_torch_compiles_it_as_one_program() -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in (Q, K, V)]
    program = torch.compile(
        lambda layout: attnx.attention(*arrays, mask=BlockMask(layout, (7, 8))),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    layout = torch.from_numpy(LAYOUT)
    same = attnx.attention(*arrays, mask=BlockMask(layout, (7, 8)))
    torch.testing.assert_close(program(layout), same)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BlockMask([[True]], 4), "BlockMask: layout: expected a boolean array, got list"),
        (lambda: BlockMask(LAYOUT, 0), "BlockMask: block: expected integers >= 1, got 0"),
        (lambda: BlockMask(LAYOUT, (4, 4, 4)), r"expected a size or \(q_block, kv_block\), got"),
        (lambda: BlockMask(LAYOUT, 4.0), "BlockMask: block: expected an integer or .*, got 4.0"),
        (lambda: BlockMask(LAYOUT, (4, None)), r"expected an integer or .*, got \(4, None\)"),
        (lambda: BlockMask(LAYOUT, -1), "BlockMask: block: expected integers >= 1, got -1"),
        (lambda: call(BlockMask(LAYOUT, 4)), r"BlockMask.layout: expected \(9, 9\) blocks of 4"),
        (
            lambda: call(BlockMask(1.0 * LAYOUT, 7)),
            "BlockMask.layout: expected a boolean array .*, got float64; write layout != 0",
        ),
        (
            lambda: call(BlockMask(LAYOUT[:, :3], 7)),
            r"or \(\*B, Hq, query blocks, key blocks\) = \(2, 4, 5, 5\), .* got shape \(2, 3,",
        ),
        (lambda: call(BlockMask(LAYOUT[0], 7)), r"\(5, 5\) blocks of 7 .* got shape \(4, 5, 5\)"),
    ],
    ids=[
        "list",
        "zero",
        "three sizes",
        "float",
        "no limit",
        "negative",
        "count",
        "dtype",
        "heads",
        "three axes",
    ],
)
def test_wrong_layouts_are_told(make: Any, told: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=told):
        make()


def test_a_mask_without_values_is_refused() -> None:
    """A tensor on meta, beside ones that have values, would be taken for memory."""
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in (Q, K, V)]
    empty = torch.ones(5, 5, dtype=torch.bool, device="meta")
    with pytest.raises(ArgumentError, match=r"BlockMask.layout: .* device of q, cpu, got meta"):
        attnx.attention(*arrays, mask=BlockMask(empty, 7))
    with pytest.raises(ArgumentError, match="mask: expected the device of q, cpu, got meta"):
        attnx.attention(*arrays, mask=torch.ones(33, 33, dtype=torch.bool, device="meta"))


def call(mask: Any) -> Any:
    return attnx.attention(Q, K, V, mask=mask)
