"""What a mask shows on a grid of indices, against the suite's own reading of S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx._call import Options, prepare
from attnx._visibility import Grid, position_offset, visible
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx_conformance.oracle import reference

B, Hq, Lq, Lk = 2, 2, 7, 9
Random = Callable[..., Iterator[Any]]


def arrays(Lq: int = Lq, Lk: int = Lk) -> tuple[Any, Any]:
    return np.zeros((B, Hq, Lq, 4), np.float32), np.zeros((B, 1, Lk, 4), np.float32)


def canonical(mask: Any, Lq: int = Lq, Lk: int = Lk) -> Any:
    q, k = arrays(Lq, Lk)
    return prepare(attnx.get_backend("numpy").lane, q, k, k, Options(mask=mask)).call.mask


def shown(mask: Any, Lq: int = Lq, Lk: int = Lk) -> Any:
    """The whole (B, Hq, Lq, Lk) grid."""
    mask = canonical(mask, Lq, Lk)
    axes = [slice(0, n) for n in (B, Hq, Lq, Lk)]
    grid = Grid(np, np.arange, *axes, position_offset(mask, Lq, Lk))
    return np.broadcast_to(visible(mask, grid), (B, Hq, Lq, Lk))


def rows(mask: Any, Lq: int = Lq, Lk: int = Lk) -> list[list[int]]:
    """The keys that each query of the first batch entry and head sees."""
    return [np.flatnonzero(row).tolist() for row in shown(mask, Lq, Lk)[0, 0]]


def test_random_masks_show_what_the_suite_says(masks_at_random: Random) -> None:
    """S3.5 and S3.6, over trees of every kind of mask."""
    q, k = arrays()
    for mask in masks_at_random(150, B, Hq, Lq, Lk):
        np.testing.assert_array_equal(shown(mask), reference(q, k, mask=mask).visible, repr(mask))


def test_any_part_of_the_grid_is_cut_from_the_whole(
    masks_at_random: Random, rng: np.random.Generator
) -> None:
    """By slices and by arrays of indices, in any order: indices are absolute."""
    for mask in masks_at_random(60, B, Hq, Lq, Lk):
        whole, known = shown(mask), canonical(mask)
        offset = position_offset(known, Lq, Lk)
        part = (slice(1, 2), slice(0, 2), slice(2, 5), slice(3, 9))
        cut = visible(known, Grid(np, np.arange, *part, offset))
        assert np.array_equal(np.broadcast_to(cut, (1, 2, 3, 6)), whole[part])
        index = [rng.integers(0, n, 4) for n in (B, Hq, Lq, Lk)]
        cut = visible(known, Grid(np, np.arange, *index, offset))
        assert np.array_equal(np.broadcast_to(cut, (4,) * 4), whole[np.ix_(*index)])


def test_top_left_and_bottom_right_differ_by_where_the_queries_stand() -> None:
    """S3.5: position i, or i + n_k - n_q."""
    assert rows(Causal("top_left"), 2, 4) == [[0], [0, 1]]
    assert rows(Causal("bottom_right"), 2, 4) == [[0, 1, 2], [0, 1, 2, 3]]
    assert rows(Causal("bottom_right"), 4, 2) == [[], [], [0], [0, 1]]
    assert rows(Causal(), 3, 3) == [[0], [0, 1], [0, 1, 2]]


def test_bottom_right_counts_with_the_lengths_of_its_chain() -> None:
    """S3.5: n_k and n_q are those of the one Lengths, else Lk and Lq."""
    assert rows(Causal("bottom_right") & Lengths(3), 2, 5) == [[0, 1], [0, 1, 2]]
    assert rows(Causal("bottom_right") & Lengths(3, 1), 2, 5) == [[0, 1, 2], []]
    nested = (Causal("bottom_right") | Prefix(0)) & Lengths([3, 5])
    assert rows(nested, 2, 5) == [[0, 1], [0, 1, 2]]
    assert shown(nested, 2, 5)[1, 0].sum(axis=-1).tolist() == [4, 5]


def test_starts_never_move_a_position_and_causal_true_is_top_left_under_lengths() -> None:
    """S3.5."""
    assert rows(Causal("bottom_right") & Starts(1), 2, 3) == [[1], [1, 2]]
    assert rows(Causal() & Lengths(2), 3, 3) == [[0], [0, 1], [0, 1]]


def test_a_window_counts_both_ends_and_itself() -> None:
    """S3.6: p - left <= j <= p + right."""
    assert rows(Window(1, 0), 4, 4) == [[0], [0, 1], [1, 2], [2, 3]]
    assert rows(Window(0, 0), 3, 3) == [[0], [1], [2]]
    assert rows(Window(None, 0), 3, 3) == rows(Causal(), 3, 3)
    assert rows(Window(None, None), 2, 2) == [[0, 1], [0, 1]]
    assert rows(Window(0, None, "bottom_right"), 2, 3) == [[1, 2], [2]]
    assert rows(Window(2**63, 2**80), 2, 2) == [[0, 1], [0, 1]]


def test_explicit_positions_stand_for_indices() -> None:
    """S3.5: packed and paged decoding; queries and keys in any order."""
    assert rows(Causal(q_pos=[2, 0, -1], kv_pos=[1, 0, 2]), 3, 3) == [[0, 1, 2], [1], []]
    assert rows(Causal(q_pos=[3, 1]), 2, 5) == [[0, 1, 2, 3], [0, 1]]
    assert rows(Causal(kv_pos=[2, 1, 0]), 3, 3) == [[2], [1, 2], [0, 1, 2]]
    assert rows(Window(0, 1, q_pos=[5, 1], kv_pos=[6, 2, 5]), 2, 3) == [[0, 2], [1]]


def test_a_negative_segment_matches_nothing_and_a_complement_covers_the_padding() -> None:
    """S3.6."""
    assert rows(Segments([0, -1, 1], [-1, 0, 1]), 3, 3) == [[1], [], [2]]
    assert rows(~Segments([0, -1], [-1, 0]), 2, 2) == [[0], [0, 1]]
    assert rows(~Lengths(1, 1), 2, 2) == [[1], [0, 1]]


def test_a_predicate_sees_absolute_indices_of_the_flattened_batch() -> None:
    """S3.6: b is row-major over *B."""
    seen: set[int] = set()

    def fn(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen.update(b.ravel().tolist())
        return (b >= 0) & (h >= 0) & (i >= j)

    x = np.zeros((2, 3, 1, 4, 8), np.float32)
    attnx.attention(x, x, x, mask=Predicate(fn))
    assert seen == {0, 1, 2, 3, 4, 5}


def test_a_predicate_may_answer_with_one_boolean() -> None:
    assert rows(Predicate(lambda b, h, i, j: True), 2, 2) == [[0, 1], [0, 1]]
    assert rows(Predicate(lambda b, h, i, j: np.False_), 2, 2) == [[], []]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            np.zeros((1, 1, 2, 2), int), ArgumentTypeError,
            "Predicate: expected fn(b, h, i, j) to return a boolean array of the call's "
            "framework, got int64",
        ),
        (
            None, ArgumentTypeError,
            "Predicate: expected fn(b, h, i, j) to return a boolean array of the call's "
            "framework, got NoneType",
        ),
        (
            np.ones((2, 2), bool), ArgumentError,
            "Predicate: expected fn(b, h, i, j) to return what its arguments broadcast to, each "
            "axis of (2, 2, 2, 2) 1 or full, got shape (2, 2)",
        ),
        (
            np.ones((1, 1, 3, 2), bool), ArgumentError,
            "Predicate: expected fn(b, h, i, j) to return what its arguments broadcast to, each "
            "axis of (2, 2, 2, 2) 1 or full, got shape (1, 1, 3, 2)",
        ),
    ],
    ids=["integers", "None", "2 axes", "wrong axis"],
)  # fmt: skip
def test_a_predicate_with_a_wrong_answer_is_told(
    answer: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        shown(Predicate(lambda b, h, i, j: answer), 2, 2)
    assert str(caught.value) == message


def test_something_that_is_no_mask_is_refused() -> None:
    grid = Grid(np, np.arange, *[slice(0, 1)] * 4)
    with pytest.raises(ArgumentTypeError, match="mask: expected an attnx mask object, got int"):
        visible(3, grid)
