"""Rows that see nothing, by every cause, over poison; and sizes of zero (S3.7, S4.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window

from ._case import BASE, Case, Recipe, Shape, square
from ._edits import poison, scaled

__all__ = ["CASES"]

ONES = np.ones((9, 11), dtype=bool)
PAST = BASE._replace(batch=(1,), Hq=2, Hk=1, Lq=5, Lk=600, D=4, Dv=3)


def _without(*shape: int, at: Any) -> Any:
    mask = np.ones(shape, dtype=bool)
    mask[at] = False
    return mask


def _case(name: str, mask: Any, shape: Shape = BASE, *, ids: tuple[str, ...] = (),
          bias: Any = None, poisoned: bool = True, **options: Any) -> Case:  # fmt: skip
    edits = (poison(),) if poisoned else ()
    inputs = Recipe(shape, mask=mask, bias=bias, edits=edits, causal=options.get("causal", False))
    return Case(f"empty-{name}", ("S3.7", "S4.1"), "masks", inputs, options, ids=ids)


_ROWS = (
    _case("row", _without(9, 11, at=3), ids=("A1", "A8", "A11", "A17")),
    _case("row-of-many-heads", _without(1, 6, 9, 11, at=(0, 4, 3)), ids=("A1",)),
    _case("first-row", _without(9, 11, at=0), ids=("A1",)),
    _case("last-row", _without(9, 11, at=8), ids=("A1",)),
    _case("head", _without(1, 6, 1, 1, at=(0, 2)), ids=("A3",)),
    _case("group", _without(1, 6, 1, 1, at=(0, slice(0, 3))), ids=("A3",)),
    _case("batch-entry", _without(2, 1, 1, 11, at=1), ids=("A16", "J8")),
    _case("everything", ~ONES, ids=("A17",)),
    _case("everything-softcap", ~ONES, softcap=2.0),
    _case("padded-sample", _without(2, 1, 1, 11, at=(slice(None), 0, 0, slice(4, None))),
          ids=("A2", "A16")),
    _case("left-padding", Starts(np.array([3, 0])), square(9), causal=True, ids=("A13",)),
    _case("band-and-padding", Dense(_without(9, 9, at=(slice(None), slice(5, None))))
          & Window(1, 0), square(9), ids=("A2", "A4")),
    _case("causal-and-mask", _without(9, 9, at=(slice(None), slice(0, 4))), square(9),
          causal=True, ids=("A15",)),
    _case("bias", None, bias=lambda ctx: np.where(np.arange(9)[:, None] == 3, -np.inf, 0.0)
          * np.ones(11), ids=("A9", "A10")),
    _case("bias-batch", None, bias=lambda ctx: np.where(
        np.arange(2) == 1, -np.inf, 0.0)[:, None, None, None], ids=("A9",)),
    _case("causal-tall", None, BASE._replace(Lq=13, Lk=5), causal="bottom_right", ids=("C2",)),
    _case("lengths", Lengths(np.array([0, 11])), ids=("J2", "J8")),
    _case("lengths-all", Lengths(0), ids=("J2",)),
    _case("lengths-queries", Lengths(11, np.array([0, 4]))),
    _case("starts", Starts(np.array([11, 2]))),
    _case("window-past-the-end", Window(1, 0, "top_left"), BASE._replace(Lq=30)),
    _case("window-before-the-start", Window(1, 0, "bottom_right"), BASE._replace(Lq=30)),
    _case("segments", Segments(np.full(9, -1), np.full(11, -1))),
    _case("segments-strangers", Segments(np.arange(9) % 2, np.full(11, 7))),
    _case("prefix", Prefix(0)),
    _case("predicate", Predicate(lambda b, h, i, j: (i + 0 * j) > 4)),
    _case("complement", ~Lengths(11)),
    _case("intersection", Lengths(5) & Starts(5)),
    _case("lengths-bottom-right", Lengths(np.array([3, 9]), np.array([9, 5]))
          & Causal("bottom_right")),
    _case("one-query", _without(2, 1, 1, 33, at=1), BASE._replace(Lq=1, Lk=33)),
    _case("negative-scale", Starts(np.array([3, 0])), square(9), causal=True, scale=-1.0),
    _case("unpoisoned", _without(9, 11, at=3), poisoned=False, ids=("A1",)),
    # Leaks depend on the size of a block: some lie past 512 keys.
    _case("past-512", Dense(_without(5, 600, at=2)) & Lengths(530), PAST, ids=("B7",)),
    _case("past-512-lengths", Lengths(513), PAST, ids=("B7", "B8")),
    _case("past-512-starts", Starts(520), PAST),
    _case("past-512-hole", Dense(_without(1, 600, at=(0, slice(250, 540)))), PAST),
    _case("past-512-all", Lengths(0), PAST),
    _case("rows-past-512", Lengths(np.array([300]), np.array([515])) & Causal(),
          square(600, batch=(1,), Hq=2, Hk=1, D=4, Dv=3)),
)  # fmt: skip


def _sized(name: str, *, bias: Any = None, mask: Any = None, sinks: bool = False,
           ids: tuple[str, ...] = (), causal: bool | str = False,
           **sizes: Any) -> Case:  # fmt: skip
    inputs = Recipe(BASE._replace(**sizes), bias=bias, mask=mask, sinks=sinks, causal=causal)
    return Case(f"none-{name}", ("S1.1", "S1.2", "S3.7"), "masks", inputs, {"causal": causal},
                ids=ids)  # fmt: skip


_SIZES = (
    _sized("keys", Lk=0, ids=("J2",)),
    _sized("queries", Lq=0, ids=("J2",)),
    _sized("batch", batch=(0,)),
    _sized("batch-of-two-axes", batch=(2, 0)),
    _sized("queries-and-keys", Lq=0, Lk=0, causal=True),
    _sized("keys-one-head", batch=None, Hq=1, Hk=1, Lk=0),
    _sized("queries-one-head", batch=None, Hq=1, Hk=1, Lq=0),
    _sized("keys-bias", Lk=0, bias=lambda ctx: ctx.normal(1, 6, 9, 1)),
    _sized("queries-bias", Lq=0, bias=lambda ctx: ctx.normal(1, 1, 1, 11), sinks=True),
    _sized("batch-bias", batch=(0,), bias=lambda ctx: ctx.normal(1, 6, 1, 11), sinks=True),
    _sized("keys-causal", Lk=0, causal="bottom_right"),
    _sized("queries-causal", Lq=0, causal="top_left"),
    _sized("keys-lengths", Lk=0, mask=Lengths(np.array([0, 0]))),
    _sized("queries-window", Lq=0, mask=Window(1, 1, "bottom_right")),
    _sized("batch-lengths", batch=(0,), mask=Lengths(np.zeros(0, dtype=np.int64))),
    _sized("keys-mask", Lk=0, mask=np.ones((9, 0), dtype=bool)),
)

_ONE_KEY = (
    Case("one-visible-key", ("S7",), "masks",
         Recipe(BASE, mask=np.arange(9)[:, None] == np.arange(11) - 1, edits=(scaled(q=30.0),))),
)  # fmt: skip

CASES = (*_ROWS, *_SIZES, *_ONE_KEY)
