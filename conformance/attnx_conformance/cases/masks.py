"""Every mask, alone and combined, each as it is, beside a spike, beside NaN, and over poison.

A plain random input hides most mask faults in the rounding of a 16-bit sum. So every mask here
makes four cases: `name` itself; `name-spike`, where a value of 1e4 stands beside an edge;
`name-nan`, where NaN does, and must reach exactly the rows that see it (S4.2); and `name-poison`,
where all that is unseen holds NaN (S4.1, S3.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnx.masks import (
    BlockMask,
    Causal,
    Dense,
    Lengths,
    Predicate,
    Prefix,
    Segments,
    Starts,
    Window,
)

from ._case import BASE, Case, Context, Recipe, Shape, square
from ._edits import poison, spike

__all__ = ["CASES"]

SQUARE = square(9)
ONE = BASE._replace(batch=(1,), Hq=2, Hk=1, D=4, Dv=3)
FIVE = square(70, batch=(5,), Hq=2, Hk=1, D=4, Dv=3)
LONG = square(600, batch=(2,), Hq=1, Hk=1, D=4, Dv=3)


def _layout(*shape: int) -> Any:
    """A random layout of blocks, the same every time."""
    return np.random.default_rng(shape).random(shape) < 0.5


@dataclass(frozen=True)
class Spec:
    """A mask and the call it stands in."""

    name: str
    mask: Any
    shape: Shape = SQUARE
    options: Mapping[str, Any] = field(default_factory=dict)
    clauses: tuple[str, ...] = ("S3.6",)
    ids: tuple[str, ...] = ()


def _random(*axes: int, keep: float = 0.6) -> Any:
    """A random boolean mask with the axes of `(*B, Hq, Lq, Lk)` that are 1 in `axes` cut to 1."""

    def draw(ctx: Context) -> Any:
        full = ctx.shape.grid.full
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(full))
        return ctx.rng.random(shape) < keep

    return draw


def _plain(ctx: Context) -> Any:
    return ctx.rng.random((ctx.shape.Lq, ctx.shape.Lk)) < 0.6


def _ids(length: int, documents: int, seed: int) -> Any:
    cuts = np.sort(np.random.default_rng(seed).choice(length, documents - 1, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right")


BOOLEAN = (
    Spec("bool-2d", _plain, BASE, clauses=("S3.2", "S3.3"), ids=("D1", "D2")),
    Spec("bool-full", _random(), BASE, clauses=("S3.2", "S3.3")),
    Spec("bool-keys", _random(1, 2), BASE, clauses=("S3.3",), ids=("D12", "D16", "D17")),
    Spec("bool-heads", _random(0, 2), BASE, clauses=("S3.3",), ids=("A3",)),
    Spec("bool-heads-only", _random(0, 2, 3), BASE, clauses=("S3.3", "S3.7"), ids=("A3", "D11")),
    Spec("bool-batch", _random(1), BASE, clauses=("S3.3",), ids=("D10", "D21")),
    Spec("bool-queries", _random(0, 1, 3), BASE, clauses=("S3.3", "S3.7"), ids=("D12", "D17")),
    Spec("bool-of-one", _random(0, 1, 2, 3, keep=1.0), BASE, clauses=("S3.3",), ids=("I8",)),
    Spec("bool-no-batch", _random(), BASE._replace(batch=()), clauses=("S3.3",)),
    Spec("bool-one-head", _random(), BASE._replace(batch=None, Hq=1, Hk=1), clauses=("S3.3",)),
    Spec("bool-two-batch-axes", _random(1, 2), BASE._replace(batch=(2, 3)), clauses=("S3.3",)),
    Spec("bool-batch-as-heads", _random(1), BASE._replace(Hq=2, Hk=2), ids=("D13",)),
    Spec("bool-heads-as-batch", _random(0), BASE._replace(Hq=2, Hk=2), ids=("D13",)),
    Spec("bool-one-query", _random(), BASE._replace(Lq=1, Lk=33), clauses=("S3.2",)),
    Spec("bool-sparse", _random(keep=0.08), SQUARE, clauses=("S3.7",), ids=("A1", "A17")),
    Spec("bool-long", _random(), LONG, clauses=("S3.2",)),
    Spec("bool-causal", _random(1, 2), SQUARE, {"causal": True}, ("S3.1",), ("A15", "C17")),
    Spec("bool-all", np.ones((9, 11), bool), BASE, clauses=("S3.2",)),
    Spec("bool-identity", np.eye(9, dtype=bool), clauses=("S3.2",), ids=("F3",)),
    Spec("bool-softcap", _random(), BASE, {"softcap": 2.0}, ("S2.1",)),
)

CAUSAL = (
    Spec("causal", None, SQUARE, {"causal": True}, ("S3.5",), ("C13", "C14", "B6")),
    Spec("causal-65", None, square(65), {"causal": True}, ("S3.5",), ("C11",)),
    Spec("causal-600", None, LONG, {"causal": True}, ("S3.5",)),
    Spec("causal-object", Causal(), SQUARE, clauses=("S3.5",)),
    Spec("causal-top-left-wide", None, BASE._replace(Lq=5, Lk=13), {"causal": "top_left"},
         ("S3.5",), ("C1", "C4", "C6", "C12")),
    Spec("causal-top-left-tall", None, BASE._replace(Lq=13, Lk=5), {"causal": "top_left"},
         ("S3.5",), ("C2",)),
    Spec("causal-bottom-right-wide", None, BASE._replace(Lq=5, Lk=13), {"causal": "bottom_right"},
         ("S3.5",), ("C2", "C8", "C12")),
    Spec("causal-bottom-right-tall", None, BASE._replace(Lq=13, Lk=5), {"causal": "bottom_right"},
         ("S3.5", "S3.7"), ("C2",)),
    Spec("causal-bottom-right-long", None, ONE._replace(Lq=300, Lk=557),
         {"causal": "bottom_right"}, ("S3.5",)),
    Spec("causal-top-left-long", None, ONE._replace(Lq=557, Lk=300), {"causal": "top_left"},
         ("S3.5",)),
    Spec("causal-decode-step", None, BASE._replace(Lq=1, Lk=33), {"causal": "bottom_right"},
         ("S3.5",), ("C1", "C7", "G11")),
    Spec("causal-first-step", None, BASE._replace(Lq=1, Lk=33), {"causal": "top_left"},
         ("S3.5",), ("C1",)),
    Spec("causal-objects", Causal("bottom_right"), BASE, clauses=("S3.5",)),
    Spec("causal-zero-scale", None, SQUARE, {"causal": True, "scale": 0.0}, ("S2", "S3.5")),
    Spec("causal-negative-scale", None, SQUARE, {"causal": True, "scale": -0.5}, ("S2", "S3.5")),
    Spec("causal-softcap", None, square(33), {"causal": True, "softcap": 1.5}, ("S2", "S3.5")),
    Spec("causal-positions", Causal(q_pos=np.array([4, 0, 10, 2, 2, 7, 1, 9, 5])), BASE,
         clauses=("S3.5",)),
    Spec("causal-paged",
         Causal(q_pos=np.array([[3, 4, 5], [7, 8, 9]]),
                kv_pos=np.array([[4, 5, 6, 7, 0, 1, 2, 3], [8, 9, 0, 1, 2, 3, 4, 5]])),
         BASE._replace(Lq=3, Lk=8), clauses=("S3.5",), ids=("B8",)),
    Spec("causal-one-head", None, square(9, batch=None, Hq=1, Hk=1), {"causal": True}, ("S3.5",)),
    Spec("causal-no-batch", None, square(9, batch=()), {"causal": True}, ("S3.5",)),
)  # fmt: skip

LENGTHS = (
    Spec("lengths", Lengths(np.array([4, 11])), BASE, ids=("A16", "B7", "D15")),
    Spec("lengths-with-zero", Lengths(np.array([0, 7])), BASE, clauses=("S3.6", "S3.7"),
         ids=("J2", "J8")),
    Spec("lengths-scalar", Lengths(7), BASE),
    Spec("lengths-edges", Lengths(np.array([63, 64, 65, 0, 70])), FIVE, ids=("B8",)),
    Spec("lengths-long", Lengths(np.array([255, 513])), LONG, ids=("B7",)),
    Spec("lengths-long-full", Lengths(np.array([512, 599])), LONG),
    Spec("lengths-of-queries", Lengths(np.array([4, 9]), np.array([6, 1])), BASE, ids=("B12",)),
    Spec("lengths-one-query", Lengths(np.array([1, 20])), BASE._replace(Lq=1, Lk=33), ids=("C7",)),
    Spec("lengths-causal", Lengths(np.array([5, 9])), SQUARE, {"causal": True}, ("S3.5",)),
    Spec("lengths-causal-long", Lengths(np.array([257, 600])), LONG, {"causal": True}, ("S3.5",)),
    Spec("lengths-bottom-right", Lengths(np.array([5, 11]), np.array([3, 9])), BASE,
         {"causal": "bottom_right"}, ("S3.5",)),
    Spec("lengths-bottom-right-keys", Lengths(np.array([5, 11])) & Causal("bottom_right"), BASE,
         clauses=("S3.5", "S3.7")),
    Spec("lengths-decode", Lengths(np.array([17, 33])), BASE._replace(Lq=1, Lk=33),
         {"causal": "bottom_right"}, ("S3.5",), ("C7", "C8")),
    Spec("lengths-two-batch-axes", Lengths(np.array([[4, 0, 11], [1, 10, 5]])),
         BASE._replace(batch=(2, 3))),
    Spec("lengths-softcap", Lengths(np.array([4, 10])), BASE, {"softcap": 2.0}),
    Spec("lengths-twice", Lengths(np.array([4, 10])) & Lengths(8), BASE),
    Spec("starts", Starts(np.array([3, 0])), BASE, ids=("A13",)),
    Spec("starts-causal", Starts(np.array([3, 0])), SQUARE, {"causal": True},
         ("S3.5", "S3.7"), ("A13",)),
    Spec("starts-bottom-right", Starts(np.array([3, 8])) & Causal("bottom_right"), BASE,
         clauses=("S3.5",)),
    Spec("starts-edges", Starts(np.array([63, 64, 65, 70, 1])), FIVE, clauses=("S3.6", "S3.7")),
    Spec("starts-long", Starts(np.array([256, 511])), LONG, {"causal": True}),
    Spec("starts-and-lengths", Starts(np.array([2, 0])) & Lengths(np.array([9, 4])), BASE),
)  # fmt: skip

WINDOWS = (
    Spec("window-left", Window(2, 0), ids=("F1", "F2", "F3", "F12")),
    Spec("window-right", Window(0, 2), ids=("F8",)),
    Spec("window-both", Window(1, 2), ids=("F4",)),
    Spec("window-self", Window(0, 0), ids=("F3", "F9")),
    Spec("window-open-left", Window(None, 1)),
    Spec("window-open-right", Window(3, None)),
    Spec("window-wider-than-keys", Window(40, 40)),
    Spec("window-causal", Window(2, 5), SQUARE, {"causal": True}, ids=("F2", "F7")),
    Spec("window-mask", Dense(np.arange(81).reshape(9, 9) % 4 != 1) & Window(3, 1)),
    Spec("window-lengths", Window(3, 0) & Lengths(np.array([4, 8])), clauses=("S3.6", "S3.7")),
    Spec("window-lengths-bottom-right",
         Window(2, 0, "bottom_right") & Lengths(np.array([6, 11]), np.array([9, 4])), BASE,
         clauses=("S3.5", "S3.7")),
    Spec("window-bottom-right", Window(2, 0, "bottom_right"), BASE, clauses=("S3.5",)),
    Spec("window-bottom-right-tall", Window(2, 1, "bottom_right"), BASE._replace(Lq=14),
         clauses=("S3.5", "S3.7")),
    Spec("window-top-left-tall", Window(2, 1, "top_left"), BASE._replace(Lq=20),
         clauses=("S3.5", "S3.7")),
    Spec("window-decode", Window(7, 0, "bottom_right"), BASE._replace(Lq=1, Lk=33),
         clauses=("S3.5",)),
    Spec("window-long", Window(100, 0), LONG, ids=("F1", "F9")),
    Spec("window-long-both", Window(255, 257), LONG),
    Spec("window-softcap", Window(2, 0), SQUARE, {"softcap": 1.5}),
    Spec("window-positions",
         Window(2, 0, q_pos=np.array([5, 9, 0]), kv_pos=np.array([9, 3, 4, 5, 8, 0, 1])),
         BASE._replace(Lq=3, Lk=7), clauses=("S3.5",)),
)  # fmt: skip

STRUCTURED = (
    Spec("segments", Segments(_ids(9, 3, 0), _ids(9, 3, 0))),
    Spec("segments-cross", Segments(np.array([0, 0, 1, 1, 2, -1, 4, 0, 2]),
                                    np.array([0, 1, 1, 2, 2, -1, -1, 0, 5, 5, 2])), BASE,
         clauses=("S3.6", "S3.7")),
    Spec("segments-batched", Segments(np.stack([_ids(9, 3, 1), _ids(9, 2, 2)]),
                                      np.stack([_ids(11, 3, 3), _ids(11, 4, 4)])), BASE),
    Spec("segments-causal", Segments(_ids(33, 5, 5), _ids(33, 5, 5)), square(33),
         {"causal": True}),
    Spec("segments-long", Segments(_ids(600, 6, 6), _ids(600, 6, 6)), LONG, {"causal": True}),
    Spec("blocks", BlockMask(_layout(3, 6), (3, 2)), BASE, clauses=("S3.6", "S3.7")),
    Spec("blocks-of-heads", BlockMask(_layout(2, 6, 5, 4), (2, 3)), BASE,
         clauses=("S3.6", "S3.7")),
    Spec("blocks-causal", BlockMask(_layout(17, 9), (2, 4)), square(33), {"causal": True},
         clauses=("S3.1", "S3.6", "S3.7")),
    Spec("blocks-of-a-row", BlockMask(_layout(1, 1, 1, 5), (4, 7)) | Prefix(1), square(33)),
    Spec("blocks-hidden", ~BlockMask(_layout(2, 1, 3, 4), (3, 3)) & Lengths(np.array([7, 10])),
         BASE, clauses=("S3.6", "S3.7")),
    Spec("blocks-long", BlockMask(_layout(10, 10), 64), LONG),
    Spec("prefix", Prefix(np.array([3, 11])), BASE),
    Spec("prefix-of-none", Prefix(np.array([0, 4])), BASE, clauses=("S3.6", "S3.7")),
    Spec("prefix-causal", Causal() | Prefix(4)),
    Spec("prefix-model", (Causal() | Prefix(np.array([2, 5]))) & Lengths(np.array([8, 6]))),
    Spec("prefix-model-long", (Causal() | Prefix(np.array([300, 513]))) & Lengths(590), LONG),
    Spec("predicate", Predicate(lambda b, h, i, j: (i + 2 * j + h + b) % 3 != 0), BASE),
    Spec("predicate-stride", Predicate(lambda b, h, i, j: (i - j) % 4 == 0), square(65),
         {"causal": True}),
    Spec("predicate-batch", Predicate(lambda b, h, i, j: (j + b) % 4 != h % 4),
         BASE._replace(batch=(2, 3))),
    Spec("predicate-long", Predicate(lambda b, h, i, j: (i // 7 + j // 11) % 2 == 0), LONG),
    Spec("not-causal", ~Causal(), clauses=("S3.6", "S3.7"), ids=("C17",)),
    Spec("not-lengths", ~Lengths(np.array([4, 11])), BASE, clauses=("S3.6", "S3.7")),
    Spec("not-window", ~Window(1, 1, "bottom_right"), BASE),
    Spec("not-predicate", ~Predicate(lambda b, h, i, j: (i + j) % 2 == 0), BASE),
    Spec("not-not", ~~Starts(np.array([2, 6])), BASE),
    Spec("or-dense", Dense(np.eye(9, 11, dtype=bool)) | Prefix(2), BASE),
    Spec("or-windows", Window(1, 0, "bottom_right") | Window(0, 0, "top_left"), BASE),
    Spec("and-or-not", (Window(4, 0) | Prefix(1)) & ~Segments(_ids(9, 3, 7), _ids(9, 2, 8))),
)  # fmt: skip

# Of three constraints, each binds alone for some pair.
TRIPLES = (
    Spec("triple-causal-window-lengths", Causal() & Window(4, None) & Lengths(np.array([6, 9]))),
    Spec("triple-segments-causal-starts",
         Segments(_ids(9, 3, 9), _ids(9, 3, 9)) & Causal() & Starts(np.array([1, 0])),
         clauses=("S3.6", "S3.7")),
    Spec("triple-dense-lengths-causal", Dense(np.arange(99).reshape(9, 11) % 5 != 2)
         & Lengths(np.array([7, 11])), BASE, {"causal": "bottom_right"}, ("S3.1", "S3.7")),
    Spec("triple-prefix-window-starts",
         (Prefix(np.array([3, 5])) | Window(2, 2)) & Starts(np.array([1, 2]))),
    Spec("triple-or", Window(1, 0) | Prefix(2) | ~Starts(np.array([1, 3]))),
    Spec("triple-long", Causal() & Window(300, None) & Lengths(np.array([257, 580])), LONG,
         clauses=("S3.6", "S3.7")),
    Spec("triple-softcap", Causal() & Window(4, None) & Lengths(np.array([6, 9])), SQUARE,
         {"softcap": 1.0}),
)  # fmt: skip

SPECS = (*BOOLEAN, *CAUSAL, *LENGTHS, *WINDOWS, *STRUCTURED, *TRIPLES)


def _cases(spec: Spec) -> Iterator[Case]:
    causal = spec.options.get("causal", False)

    def case(suffix: str, clauses: tuple[str, ...], *edits: Any, **more: Any) -> Case:
        inputs = Recipe(spec.shape, mask=spec.mask, causal=causal, edits=edits)
        return Case(spec.name + suffix, clauses, "masks", inputs, spec.options, **more)

    yield case("", spec.clauses, ids=spec.ids)
    yield case("-spike", spec.clauses, spike(1e4), ids=spec.ids)
    yield case("-nan", ("S4.2",), spike(np.nan), needs=("isolation",), ids=("B6", "B10"))
    yield case("-poison", ("S4.1", "S3.7"), poison(), ids=("B1", "B3", "B4", "B5", "A21"))


CASES = tuple(case for spec in SPECS for case in _cases(spec))
