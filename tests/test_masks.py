"""Mask objects: frozen trees that say what was asked, and refuse what makes no sense (S3.6)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window, masks
from attnx.errors import ArgumentError, ArgumentTypeError

IDS = np.arange(6)
EXAMPLES = [
    Causal(), Causal("top_left"), Causal("bottom_right"), Causal(q_pos=IDS), Causal(kv_pos=[0, 1]),
    Window(3, 0), Window(None, 2, "bottom_right"), Window(0, None, q_pos=IDS, kv_pos=IDS),
    Lengths(4), Lengths([3, 4], 2), Lengths(IDS), Starts(2), Prefix([1, 2]), Segments(IDS, IDS),
    Segments([[0, 1]], [[0, 1]]), Dense(np.ones((2, 2), bool)), Predicate(max),
    (Causal() | Prefix(2)) & ~Starts(1),
]  # fmt: skip
each_example = pytest.mark.parametrize("mask", EXAMPLES, ids=repr)


@each_example
def test_a_mask_is_frozen(mask: masks.Mask) -> None:
    with pytest.raises(AttributeError, match="a mask is frozen"):
        mask.structure = "other"
    with pytest.raises(AttributeError, match="a mask is frozen"):
        mask.anything = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="a mask is frozen"):
        del mask.structure


@each_example
def test_a_mask_survives_copying_and_pickling(mask: masks.Mask) -> None:
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(other) == repr(mask)
        assert other.structure == mask.structure
        assert hash(other) == hash(mask)
    assert copy.copy(mask) == mask


@each_example
def test_a_mask_has_no_truth_value(mask: masks.Mask) -> None:
    """`and` would drop one of two masks silently."""
    with pytest.raises(ArgumentTypeError, match="combine masks with & \\| ~, not and/or"):
        bool(mask)


@each_example
def test_map_leaves_rebuilds_the_same_tree(mask: masks.Mask) -> None:
    seen = []
    again = masks.map_leaves(mask, lambda node, field, leaf: seen.append(field) or leaf)
    assert again == mask
    assert again.structure == mask.structure
    assert seen == [field for _, field, _ in masks.leaves(mask)]


def test_leaves_may_be_replaced_by_anything_without_a_check() -> None:
    """A framework rebuilds masks from tracers and placeholders."""
    mask = Causal(q_pos=IDS) & Lengths(4)
    hollow = masks.map_leaves(mask, lambda *_: None)
    assert [leaf for *_, leaf in masks.leaves(hollow)] == []
    assert hollow.structure == mask.structure


def test_the_structure_leaves_numbers_and_arrays_out() -> None:
    """Decoding steps that differ in lengths alone share a plan."""
    assert Lengths(4).structure == Lengths(9).structure == Lengths(IDS).structure
    assert Window(1, 2).structure == Window(5, 6).structure
    assert Segments(IDS, IDS).structure == Segments([1], [2]).structure
    assert (Causal() & Lengths(1)).structure == (Causal() & Lengths([2, 3])).structure


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Causal(), Causal("top_left")), (Causal("top_left"), Causal("bottom_right")),
        (Causal(q_pos=IDS), Causal(kv_pos=IDS)), (Lengths(1), Lengths(1, 1)),
        (Lengths(1), Starts(1)), (Window(1, None), Window(None, 1)),
        (Window(1, 1), Window(1, None)),
        (Causal() & Prefix(1), Causal() | Prefix(1)), (~Causal(), Causal()),
        (~(Causal() & Prefix(1)), ~Causal() & Prefix(1)),
        ((Causal() & Prefix(1)) | Starts(1), Causal() & (Prefix(1) | Starts(1))),
    ],
    ids=repr,
)  # fmt: skip
def test_the_structure_tells_apart_what_a_plan_must(one: masks.Mask, other: masks.Mask) -> None:
    assert one.structure != other.structure
    assert one != other


def test_equality_is_by_structure_statics_and_the_same_leaves() -> None:
    assert Lengths([1, 2]) == Lengths([1, 2])
    assert Lengths(IDS) == Lengths(IDS)
    assert Lengths(IDS) != Lengths(IDS.copy())  # contents of arrays are never compared
    assert Window(1, 2) != Window(1, 3)
    assert Causal() & Prefix(1) == Causal() & Prefix(1)
    assert ~Causal() == ~Causal()
    assert Causal() != 3
    assert len({Causal(), Causal(), Lengths(3), Dense(np.ones((2, 2), bool))}) == 3


def test_chains_of_one_operator_are_flat() -> None:
    a, b, c = Causal(), Prefix(1), Starts(2)
    assert ((a & b) & c).parts == (a & (b & c)).parts == (a, b, c)
    assert ((a | b) | c).parts == (a, b, c)
    assert isinstance((a | b) & c, masks.And)


def test_a_mask_reads_as_it_is_written() -> None:
    mask = (Causal("bottom_right") | Prefix(2)) & ~Lengths([1, 2]) & Window(3, None)
    text = "(Causal('bottom_right') | Prefix(2)) & ~Lengths([1, 2]) & Window(3, None)"
    assert repr(mask) == text
    assert repr(eval(text, vars(masks))) == text
    assert repr(Segments(IDS, [0])) == "Segments(<int64 (6,)>, [0])"
    assert repr(Predicate(lambda b, h, i, j: i == j)) == "Predicate(<lambda>)"
    assert repr(~(Causal() | Prefix(1))) == "~(Causal() | Prefix(1))"


def test_integers_of_numpy_become_ints() -> None:
    assert Lengths(np.int32(3)).kv == Lengths(np.array(3)).kv == 3
    assert type(Window(np.uint8(2), 0).left) is int


def test_a_mask_beside_an_array_says_to_wrap_it() -> None:
    """On either side of the operator, and NumPy does not get in between."""
    array = np.ones((3, 3), bool)
    for combine in (
        lambda: Causal() & array, lambda: array & Causal(), lambda: Causal() | array,
        lambda: array | Causal(), lambda: masks.And([array, Causal()]), lambda: masks.Not(array),
    ):  # fmt: skip
        with pytest.raises(
            ArgumentTypeError, match=r"got ndarray; wrap a boolean array in attnx\.Dense"
        ):
            combine()
    for other in (None, True, 3):
        with pytest.raises(ArgumentTypeError, match="And: expected mask objects"):
            Causal() & other
    with pytest.raises(ArgumentError, match="Or: expected at least one mask, got none"):
        masks.Or([])
    assert masks.And(Causal()).parts == (Causal(),)


def value_error(make: Any, message: str) -> Any:
    return (make, ArgumentError, message)


def type_error(make: Any, message: str) -> Any:
    return (make, ArgumentTypeError, message)


ALIGN = "align: expected 'top_left', 'bottom_right' or None, got "
COUNT = "expected an integer or integers of shape *B, got "


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        value_error(lambda: Causal("topleft"), f"Causal: {ALIGN}'topleft'"),
        type_error(lambda: Causal(True), f"Causal: {ALIGN}True"),
        type_error(lambda: Causal(["top_left"]), f"Causal: {ALIGN}['top_left']"),
        type_error(
            lambda: Causal(IDS),
            f"Causal: {ALIGN}<int64 (6,)>; positions go by name: q_pos=, kv_pos=",
        ),
        value_error(
            lambda: Causal("top_left", q_pos=IDS),
            "Causal: align='top_left' beside explicit positions: the positions say it all, so "
            "leave align out",
        ),
        type_error(lambda: Causal(q_pos=3), "Causal: q_pos: expected an integer array, got int"),
        type_error(
            lambda: Causal(kv_pos=np.int64(3)),
            "Causal: kv_pos: expected an integer array, got int64",
        ),
        type_error(
            lambda: Causal(q_pos=[1.0]), "Causal: q_pos: expected integers, got 1.0 in the list"
        ),
        value_error(lambda: Window(1, 1, "bottom"), f"Window: {ALIGN}'bottom'"),
        value_error(
            lambda: Window(-1, 0),
            "Window: left: expected an integer >= 0 or None (no limit), got -1",
        ),
        value_error(
            lambda: Window(0, -2),
            "Window: right: expected an integer >= 0 or None (no limit), got -2",
        ),
        type_error(
            lambda: Window(1.0, 0), "Window: left: expected an integer or None, got float"
        ),
        type_error(lambda: Window(0, True), "Window: right: expected an integer or None, got bool"),
        type_error(
            lambda: Window(IDS, 0), "Window: left: expected an integer or None, got ndarray"
        ),
        type_error(
            lambda: Window(1, "top_left"), "Window: right: expected an integer or None, got str"
        ),
        value_error(lambda: Lengths(-1), "Lengths: kv: expected an integer >= 0, got -1"),
        value_error(lambda: Lengths(1, -1), "Lengths: q: expected an integer >= 0, got -1"),
        type_error(lambda: Lengths(1.5), f"Lengths: kv: {COUNT}float"),
        type_error(lambda: Lengths(True), f"Lengths: kv: {COUNT}bool"),
        type_error(lambda: Starts(np.True_), f"Starts: kv: {COUNT}bool"),
        type_error(lambda: Lengths(np.float32(1)), f"Lengths: kv: {COUNT}float32"),
        type_error(lambda: Lengths(None), f"Lengths: kv: {COUNT}NoneType"),
        type_error(lambda: Lengths("3"), f"Lengths: kv: {COUNT}str"),
        type_error(lambda: Lengths(range(2)), f"Lengths: kv: {COUNT}range"),
        type_error(
            lambda: Lengths([1, None]), "Lengths: kv: expected integers, got None in the list"
        ),
        type_error(
            lambda: Lengths([True]), "Lengths: kv: expected integers, got True in the list"
        ),
        value_error(lambda: Starts(-1), "Starts: kv: expected an integer >= 0, got -1"),
        type_error(lambda: Prefix(2.0), f"Prefix: n: {COUNT}float"),
        type_error(
            lambda: Segments(None, [1]),
            "Segments: expected integer ids for queries and keys, got None",
        ),
        type_error(
            lambda: Segments("ab", [1]), "Segments: q_ids: expected an integer array, got str"
        ),
        type_error(
            lambda: Dense([[True]]),
            "Dense: expected a boolean array, got list; make it an array of q's framework first",
        ),
        type_error(
            lambda: Dense(None),
            "Dense: expected a boolean array, got NoneType; make it an array of q's framework "
            "first",
        ),
        type_error(
            lambda: Dense(Causal()), "Dense: expected a boolean array, got the mask Causal()"
        ),
        type_error(
            lambda: Predicate(3),
            "Predicate: expected a function fn(b, h, i, j) -> bool array, got int",
        ),
    ],
)  # fmt: skip
def test_a_mask_that_makes_no_sense_says_what_was_expected(
    make: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == message
