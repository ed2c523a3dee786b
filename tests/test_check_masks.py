"""Every message about a mask (S3, S8.1): its kind, its shape, its leaves and its positions.

The messages are pinned, as those of `test_checks` are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Prefix, Segments, Starts, Window
from attnx._call import Options, prepare
from attnx.errors import ArgumentError, ArgumentTypeError

f32 = np.float32
q, k, v = (np.ones(shape, f32) for shape in [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 5)])
short = {"k": k[:, :, :4], "v": v[:, :, :4]}
six = np.arange(6)
CAUSAL = "causal: expected False, True, 'top_left' or 'bottom_right', got "
OWN_MEANING = (
    "has a meaning of its own that attention would drop; convert it to a plain numpy array first"
)


def masked(array: Any) -> Any:
    return np.ma.array(array)


def cases(kind: type[Exception], **named: tuple[dict[str, Any], str]) -> list[Any]:
    return [
        pytest.param(options, kind, message, id=name.replace("_", " "))
        for name, (options, message) in named.items()
    ]


TYPES = cases(
    ArgumentTypeError,
    mask_masked=({"mask": masked(np.ones((6, 6), bool))}, f"mask: MaskedArray {OWN_MEANING}"),
    leaf_masked=({"mask": Lengths(masked([1, 2]))}, f"Lengths.kv: MaskedArray {OWN_MEANING}"),
    mask_list=(
        {"mask": [[True]]},
        "mask: expected a boolean array or a mask object of attnx.masks, got list",
    ),
    mask_bool=(
        {"mask": True}, "mask: expected a boolean array or a mask object of attnx.masks, got bool"
    ),
    mask_numpy_bool=(
        {"mask": np.True_},
        "mask: expected a boolean array or a mask object of attnx.masks, got bool",
    ),
    mask_class=(
        {"mask": Causal}, "mask: expected a boolean array or a mask object of attnx.masks, got type"
    ),
    mask_text=(
        {"mask": "causal"},
        "mask: expected a boolean array or a mask object of attnx.masks, got str",
    ),
    mask_int=(
        {"mask": np.ones((6, 6), int)},
        "mask: expected a boolean array (True = visible), got int64; pass additive values as bias=",
    ),
    mask_float=(
        {"mask": Dense(np.ones((6, 6)))},
        "mask: expected a boolean array (True = visible), got float64; pass additive values as "
        "bias=",
    ),
    mask_objects=(
        {"mask": np.ones((6, 6), object)},
        "mask: expected a boolean array (True = visible), got object; compare it to get booleans",
    ),
    lengths_bool=(
        {"mask": Lengths(np.ones(2, bool))}, "Lengths.kv: expected integers, got bool"
    ),
    lengths_float=({"mask": Lengths(np.ones(2))}, "Lengths.kv: expected integers, got float64"),
    length_of_0_axes=(
        {"mask": Lengths(np.array(3.0))}, "Lengths.kv: expected integers, got float64"
    ),
    positions_float=(
        {"mask": Causal(q_pos=np.zeros(6))}, "Causal.q_pos: expected integers, got float64"
    ),
    ids_objects=(
        {"mask": Segments(np.zeros(6, object), six)},
        "Segments.q_ids: expected integers, got object",
    ),
    causal_1=({"causal": 1}, f"{CAUSAL}1"),
    causal_None=({"causal": None}, f"{CAUSAL}None"),
    causal_numpy_bool=({"causal": np.True_}, f"{CAUSAL}np.True_"),
    causal_list=({"causal": []}, f"{CAUSAL}[]"),
)  # fmt: skip

VALUES = cases(
    ArgumentError,
    mask_0_axes=(
        {"mask": np.array(True)},
        "mask: expected shape (Lq, Lk) = (6, 6) or (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 "
        "or full, got 0 axes ()",
    ),
    mask_1_axis=(
        {"mask": np.ones(6, bool)},
        "mask: expected shape (Lq, Lk) = (6, 6) or (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 "
        "or full, got 1 axes (6,); mask[None] is one row for every query",
    ),
    mask_3_axes=(
        {"mask": np.ones((2, 6, 6), bool)},
        "mask: expected shape (Lq, Lk) = (6, 6) or (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 "
        "or full, got 3 axes (2, 6, 6) (is it (B, Lq, Lk) or (Hq, Lq, Lk)?); mask[:, None] or "
        "mask[None] says which",
    ),
    mask_5_axes=(
        {"mask": np.ones((1, 2, 4, 6, 6), bool)},
        "mask: expected shape (Lq, Lk) = (6, 6) or (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 "
        "or full, got 5 axes (1, 2, 4, 6, 6)",
    ),
    padding_mask=(
        {"mask": np.ones((2, 6), bool)},
        "mask: expected shape (Lq, Lk) = (6, 6), each axis 1 or full, got (2, 6); for one row a "
        "batch entry write mask[:, None, None, :]",
    ),
    mask_of_key_heads=(
        {"mask": np.ones((2, 2, 6, 6), bool)},
        "mask: expected shape (*B, Hq, Lq, Lk) = (2, 4, 6, 6), each axis 1 or full, got "
        "(2, 2, 6, 6); the axes of a mask or a bias are the same in either layout",
    ),
    dense_shape=(
        {"mask": Causal() & Dense(np.ones((6, 5), bool))},
        "mask: expected shape (Lq, Lk) = (6, 6), each axis 1 or full, got (6, 5); the axes of a "
        "mask or a bias are the same in either layout",
    ),
    lengths_of_another_batch=(
        {"mask": Lengths([1, 2, 3])},
        "Lengths.kv: expected an integer or integers of shape *B = (2,), got shape (3,)",
    ),
    lengths_of_a_batch_of_1=(
        {"mask": Lengths([1])},
        "Lengths.kv: expected an integer or integers of shape *B = (2,), got shape (1,)",
    ),
    lengths_with_2_axes=(
        {"mask": Lengths(np.ones((2, 1), int))},
        "Lengths.kv: expected an integer or integers of shape *B = (2,), got shape (2, 1)",
    ),
    lengths_without_a_batch=(
        {"q": q[0], "k": k[0], "v": v[0], "mask": Lengths([3])},
        "Lengths.kv: expected an integer or integers of shape *B = (), got shape (1,)",
    ),
    lengths_ragged=(
        {"mask": Lengths([[1, 2], [3]])},
        "Lengths.kv: expected lists of one length, got [[1, 2], [3]]",
    ),
    positions_too_few=(
        {"mask": Causal(q_pos=[1, 2])},
        "Causal.q_pos: expected integers of shape (Lq,) = (6,) or (*B, Lq) = (2, 6), got (2,)",
    ),
    positions_of_another_batch=(
        {"mask": Window(1, 1, q_pos=six, kv_pos=np.zeros((3, 6), int))},
        "Window.kv_pos: expected integers of shape (Lk,) = (6,) or (*B, Lk) = (2, 6), got (3, 6)",
    ),
    ids_too_few=(
        {"mask": Segments(six, [])},
        "Segments.kv_ids: expected integers of shape (Lk,) = (6,) or (*B, Lk) = (2, 6), got (0,)",
    ),
    causal_text=(
        {"causal": "topleft"},
        "causal: expected False, True, 'top_left' or 'bottom_right', got 'topleft'",
    ),
    causal_not_square=(
        {**short, "causal": True},
        "causal=True: expected Lq == Lk, got Lq=6 and Lk=4; write causal='top_left' (query i "
        "stands at key i) or causal='bottom_right' (the last query stands at the last key)",
    ),
    Causal_not_square=(
        {**short, "mask": Causal() & Lengths(3)},
        "mask: Causal(): expected Lq == Lk, got Lq=6 and Lk=4; write Causal('top_left') (query i "
        "stands at key i) or Causal('bottom_right') (the last query stands at the last key)",
    ),
    Window_not_square=(
        {**short, "mask": ~(Window(1, None) | Prefix(1))},
        "mask: Window(1, None): expected Lq == Lk, got Lq=6 and Lk=4; write "
        "Window(1, None, 'top_left') (query i stands at key i) or "
        "Window(1, None, 'bottom_right') (the last query stands at the last key)",
    ),
    positions_of_keys_alone=(
        {**short, "mask": Causal(kv_pos=six[:4])},
        "mask: Causal(kv_pos=<int64 (4,)>): expected q_pos beside kv_pos where Lq != Lk, got Lq=6 "
        "and Lk=4; the positions of the queries follow from nothing else",
    ),
    two_lengths=(
        {"causal": "bottom_right", "mask": Lengths(3) & Lengths(4)},
        "mask: bottom_right beside 2 Lengths has no single meaning; give one Lengths, or explicit "
        "q_pos and kv_pos",
    ),
    lengths_under_or=(
        {"mask": Causal("bottom_right") & (Lengths(3) | Prefix(1))},
        "mask: bottom_right beside a Lengths under | or ~ has no meaning; put the Lengths into "
        "the top-level & chain, or give explicit q_pos and kv_pos",
    ),
    lengths_under_not=(
        {"mask": Window(1, 0, "bottom_right") & ~Lengths(3)},
        "mask: bottom_right beside a Lengths under | or ~ has no meaning; put the Lengths into "
        "the top-level & chain, or give explicit q_pos and kv_pos",
    ),
    length_above_L=({"mask": Lengths(7)}, "Lengths.kv: expected at most Lk=6, got 7"),
    start_above_L=({"mask": Starts(7)}, "Starts.kv: expected at most Lk=6, got 7"),
    prefix_above_L=({"mask": Prefix(7)}, "Prefix.n: expected at most Lk=6, got 7"),
    queries_above_L=({"mask": Lengths(3, 7)}, "Lengths.q: expected at most Lq=6, got 7"),
    lengths_above_L=(
        {"mask": Lengths([1, 7])}, "Lengths.kv: expected counts within [0, Lk=6], got 7"
    ),
    lengths_negative=(
        {"mask": Lengths(np.array([-1, 2]))},
        "Lengths.kv: expected counts within [0, Lk=6], got -1",
    ),
    query_lengths_above_L=(
        {"mask": Lengths([1, 2], [7, 1])}, "Lengths.q: expected counts within [0, Lq=6], got 7"
    ),
    starts_above_L=(
        {"mask": ~Starts([0, 9])}, "Starts.kv: expected counts within [0, Lk=6], got 9"
    ),
    lengths_beyond_int64=(
        {"mask": Lengths([2**70, 1])},
        "Lengths.kv: expected integers that fit into int64, got 1180591620717411303424",
    ),
    ids_beyond_int64=(
        {"mask": Segments(np.full(6, 2**63, np.uint64), six)},
        "Segments.q_ids: expected integers that fit into int64, got greater ones",
    ),
    ids_beyond_int64_in_another_byte_order=(
        {"mask": Segments(np.full(6, 2**63, np.dtype(np.uint64).newbyteorder("S")), six)},
        "Segments.q_ids: expected integers that fit into int64, got greater ones",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), [*TYPES, *VALUES])
def test_a_wrong_mask_is_told_before_anything_is_computed(
    options: dict[str, Any], kind: type[Exception], message: str, marked: Callable[..., Any]
) -> None:
    """S8.1, at every entry."""
    backend = marked("counting", 1.0)
    arrays = [options.get(name, given) for name, given in (("q", q), ("k", k), ("v", v))]
    rest = {name: value for name, value in options.items() if name not in ("q", "k", "v")}
    for call in (attnx.attention, attnx.attention_vjp, attnx.explain, attnx.plan):
        with pytest.raises(kind) as caught:
            call(*arrays, backend="counting", **rest)
        assert str(caught.value) == message, call.__name__
    with pytest.raises(kind):
        attnx.attention_weights(*arrays[:2], backend="counting", **rest)
    assert not backend.calls


class Unreadable:
    """A lane that may not look at values, as under a trace or on a device."""

    def __init__(self, lane: Any) -> None:
        self._lane = lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def readable(self, array: Any) -> bool:
        return False


def test_counts_that_cannot_be_read_are_clamped() -> None:
    """S8.1: to [0, L], before anything else."""
    lane: Any = Unreadable(attnx.get_backend("numpy").lane)
    mask = Lengths(np.array([-3, 99]), np.array([99, -3])) & Starts(np.array([7, -1]))
    found = prepare(lane, q, k, v, Options(mask=mask)).call.mask
    leaves = [leaf.tolist() for *_, leaf in attnx.masks.leaves(found)]
    assert leaves == [[0, 6], [6, 0], [6, 0]]
