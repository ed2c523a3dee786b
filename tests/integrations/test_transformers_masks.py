"""The masks that attnx makes for transformers: their structure says what the booleans say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

import torch
from torch import Tensor
from transformers import masking_utils

import attnx
from attnx.errors import UnsupportedError
from attnx.integrations._visibility_mask import VisibilityMask, mask
from attnx.masks import Segments

PATTERNS: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "wide window": masking_utils.sliding_window_causal_mask_function(9),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
}
PLACES = [
    pytest.param((6, 6, 0, 0), id="square"),
    pytest.param((3, 8, 5, 0), id="cached"),
    pytest.param((1, 8, 7, 0), id="one token"),
    pytest.param((1, 4, 9, 6), id="one token, sliding cache"),
    pytest.param((3, 5, 9, 7), id="sliding cache"),
    pytest.param((3, 8, 0, 0), id="empty static cache"),
    pytest.param((2, 8, 3, 0), id="room at the end"),
]
PADDING = ["none", "real", "left", "right", "holes"]


def padding_mask(kind: str, length: int) -> Tensor | None:
    if kind == "none":
        return None
    real = torch.ones(2, length, dtype=torch.bool)
    if kind == "left":
        real[0, :2] = False
    elif kind == "right":
        real[1, length - 2 :] = False
    elif kind == "holes":
        real[:, ::3] = False
    return real


def seen(found: VisibilityMask, Lq: int, Lk: int) -> Tensor:
    """What attention sees through the options of a mask."""
    weights = attnx.attention_weights(
        torch.zeros(2, 1, Lq, 4), torch.zeros(2, 1, Lk, 4), **found.options
    )
    return weights > 0


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_options_and_booleans_are_those_of_sdpa(
    pattern: str, place: tuple[int, int, int, int], padding: str
) -> None:
    Lq, Lk, q_offset, kv_offset = place
    asked: dict[str, Any] = {
        "batch_size": 2, "q_length": Lq, "kv_length": Lk, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": PATTERNS[pattern],
        "attention_mask": padding_mask(padding, q_offset + Lq),
    }  # fmt: skip
    expected = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    found = mask(**asked)
    assert isinstance(found, VisibilityMask)
    assert not isinstance(found.options["mask"], Tensor), "it should keep its structure"
    assert torch.equal(seen(found, Lq, Lk), expected)
    assert found.shape == expected.shape
    assert torch.equal(found[..., 1:].logical_not().logical_not() + 0, expected[..., 1:] + 0)


OTHERS: dict[str, dict[str, Any]] = {
    "chunks": {"mask_function": masking_utils.chunked_causal_mask_function(2, torch.zeros(2))},
    "a function of the model's own": {"mask_function": lambda b, h, i, j: (i + j) % 2 == 0},
    "its values are wanted": {"allow_is_causal_skip": False},
    "a static cache": {"q_offset": torch.tensor(0)},
    "joined with another": {
        "mask_function": masking_utils.or_masks(
            masking_utils.causal_mask_function, lambda b, h, i, j: j < 2
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("what", list(OTHERS))
def test_other_patterns_are_dense(what: str) -> None:
    asked: dict[str, Any] = {"batch_size": 2, "q_length": 6, "kv_length": 6, **OTHERS[what]}
    found = mask(**asked)
    assert isinstance(found, VisibilityMask)
    assert isinstance(found.options["mask"], Tensor)
    expected = masking_utils.sdpa_mask(**{**asked, "allow_is_causal_skip": False})
    assert torch.equal(seen(found, 6, 6), expected)


def test_padding_holds_no_square_array() -> None:
    found = mask(1, 2000, 2000, attention_mask=torch.arange(2000)[None] > 7)
    assert isinstance(found, VisibilityMask)
    segments = found.options["mask"]
    assert isinstance(segments, Segments)
    assert segments.q_ids.numel() == segments.kv_ids.numel() == 2000


def test_a_mask_that_a_model_has_cut_is_still_one() -> None:
    """Slices, moves and joins keep the booleans and the guard."""
    cut = mask(1, 4, 4)[:, :, 1:].to("cpu").contiguous()
    assert isinstance(cut, VisibilityMask)
    assert cut.options["mask"].tolist()[0][0] == [[j <= i for j in range(4)] for i in (1, 2, 3)]


def test_selects_numbers_and_makes_none() -> None:
    found, scores = mask(1, 3, 3), torch.ones(1, 2, 3, 3)
    lowest = torch.finfo(torch.float32).min
    chosen = torch.where(found, scores, lowest)
    assert chosen[0, 0].tolist() == [[1, lowest, lowest], [1, 1, lowest], [1, 1, 1]]
    for misused in (
        lambda: scores + found,
        lambda: scores.clone().add_(found),
        lambda: scores * found,
        lambda: found.float(),
    ):
        with pytest.raises(UnsupportedError, match="outside transformers' attention interface"):
            misused()
