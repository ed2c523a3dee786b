"""Dropout as arithmetic: what is dropped depends on the seed and the place, and no more (S9).

The weights themselves show it: where the values are the columns of 1, the output is P as it met
them, and 0 where an element was dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import attnx
from attnx.plugin import Dropout
from attnx_conformance.plain import numpy_dtype

from ._kit import Answer, Array, Kit, piece
from ._probe import Probe

__all__ = ["PROBES"]

SEED = 0x9E3779B9_00000005
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def _size(kit: Kit, wanted: int) -> int:
    """A head size that the subject takes."""
    return min(wanted, kit.has.max_head_size or wanted)


def _ones(kit: Kit, B: int, H: int, Lk: int) -> Array:
    """Values that are the columns of 1, `(B, H, Lk, Lk)`."""
    one = np.eye(Lk, dtype=numpy_dtype(kit.dtype))
    return np.ascontiguousarray(np.broadcast_to(one, (B, H, Lk, Lk)))


def _pattern(kit: Kit, dropout: Dropout, B: int, H: int, L: int) -> Any:
    """What P is scaled by, `(B, H, L, L)`; all weights are alike, and the heads share keys."""
    Hk = 1 if kit.has.gqa else H
    q, k = (np.zeros((B, n, L, kit.D), numpy_dtype(kit.dtype)) for n in (H, Hk))
    out = kit.call(q, k, _ones(kit, B, Hk, L), lse=False, dropout=dropout)["out"]
    return out.astype(np.float64) * L


# A shard drops what the whole drops there


def _shards(kit: Kit) -> Iterator[tuple[str, tuple[int, int, int, int], Any, Any]]:
    """Halves along batch, heads and queries: offset, where they stand, and their key heads."""
    every = slice(None)
    for first, last in ((0, 1), (1, kit.B)):
        yield "batch", (first, 0, 0, 0), (slice(first, last),), (slice(first, last),)
    g = kit.Hq // kit.Hk
    for first, last in ((0, kit.Hk // 2), (kit.Hk // 2, kit.Hk)):
        heads, keys = slice(first * g, last * g), slice(first, last)
        yield "heads", (0, first * g, 0, 0), (every, heads), (every, keys)
    for first, last in ((0, 7), (7, kit.L)):
        yield "queries", (0, 0, first, 0), (every, every, slice(first, last)), (every,)


def _in_shards(kit: Kit) -> None:
    """Halves along batch, heads and queries, told where they stand, are the whole."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    offset = (2, 1, 5, 8)
    whole_options = {"dropout": Dropout(0.4, SEED, offset)} | d
    whole = kit.call(q, k, v, **whole_options)
    limits = kit.bounds(q, k, v, **whole_options)
    for axis, shift, rows, keys in _shards(kit):
        own = tuple(np.add(offset, shift).tolist())
        cut = {name: x[rows] for name, x in d.items()}
        part = kit.call(q[rows], k[keys], v[keys], dropout=Dropout(0.4, SEED, own), **cut)
        what = f"a shard of the {axis} at {max(shift)}"
        kit.same(part, piece(whole, rows), limits, what=what, at=rows)
        if axis != "queries":  # dk and dv are sums over queries
            kit.same(part, piece(whole, keys, ("dk", "dv")), limits, what=what, at=keys)


def _in_parts(kit: Kit) -> None:
    """Parts over disjoint keys, told where they stand, merge to the whole."""
    q, k, v = kit.inputs()
    whole = kit.call(q, k, v, dropout=Dropout(0.4, SEED))
    limits = kit.bounds(q, k, v, dropout=Dropout(0.4, SEED))
    parts = []
    for first, last in ((0, 8), (8, 16), (16, kit.L)):
        keys = slice(None), slice(None), slice(first, last)
        dropout = Dropout(0.4, SEED, (0, 0, 0, first))
        args, given = kit.arguments(q, k[keys], v[keys], dropout=dropout)
        parts.append(kit.subject.attention(args.q, args.k, args.v, **given, return_lse=True))
    made = kit.back(dict(zip(("out", "lse"), attnx.merge(parts), strict=True)))
    kit.same(made, whole, limits, what="parts of the keys")


# The backward pass drops what the forward pass drops


def _backward_agrees(kit: Kit) -> None:
    """dv of one-hot cotangents is 0 exactly where the output of one-hot values is."""
    B, H, L = 2, 3, _size(kit, 72)
    ones = _ones(kit, B, H, L)
    # Halved, so that no weight is 0 in 16 bits.
    q, k = ((kit.draw(B, H, L, kit.D) / 2).astype(ones.dtype) for _ in range(2))
    for way in kit.subject.ways:
        made = kit.call(q, k, ones, way=way, dropout=Dropout(0.3, SEED), d_out=ones)
        forward, backward = made["out"] != 0, np.swapaxes(made["dv"] != 0, -1, -2)
        wrong = np.argwhere(forward != backward)
        kit.require(not forward.all(), f"by {way}: nothing was dropped")
        kit.require(
            not wrong.size,
            f"by {way}: {len(wrong)} of {forward.size} elements are dropped in one direction "
            f"alone, the first at {tuple(wrong[0].tolist()) if wrong.size else ()}",
        )


# A seed is a pattern


def _seed_is_a_pattern(kit: Kit) -> None:
    """The same again for a seed, another one for another; no two rows of a call have one."""
    B, H, L = 2, 3, _size(kit, 40)

    def kept(seed: Any) -> Any:
        return _pattern(kit, Dropout(0.5, seed), B, H, L) != 0

    first = kept(SEED)
    kit.require((first == kept(SEED)).all(), "the same seed drops other elements the second time")
    words = np.array([SEED % 2**32, SEED >> 32], np.uint32)
    kit.require((first == kept(words)).all(), "a seed in two words is not that of the integer")
    others = ((SEED + 1, "its neighbour"), (SEED ^ 1 << 32, "one of another high word"))
    for seed, what in others:
        kit.require((first != kept(seed)).any(), f"a seed and {what} drop the same elements")
    seen: dict[bytes, tuple[int, ...]] = {}
    for at in np.ndindex(B, H, L):
        other = seen.setdefault(first[at].tobytes(), at)
        kit.require(other == at, f"the rows (b, h, i) = {other} and {at} drop the same elements")


def _rate_is_p(kit: Kit) -> None:
    """So many are dropped as p says, and the others are scaled by what was cut off of p."""
    L = _size(kit, 128)
    B, H = 2, -(-(1 << 15) // L**2)
    for p in (0.1, 0.5):
        t = math.floor(p * 65536)
        gains = _pattern(kit, Dropout(p, SEED), B, H, L)
        dropped, n, rate = int((gains == 0).sum()), gains.size, t / 65536
        away = abs(dropped - n * rate) / math.sqrt(n * rate * (1 - rate))
        kit.require(
            away <= 5,
            f"p={p}: {dropped} of {n} elements are dropped, {away:.1f} standard deviations from "
            f"{n * rate:.0f}",
        )
        gain = 65536 / (65536 - t)
        off = float(np.abs(gains[gains != 0] / gain - 1).max())
        kit.require(
            off <= 4 * EPS[kit.dtype],
            f"p={p}: what is kept is scaled by {gain * (1 + off):.7g} or {gain * (1 - off):.7g}, "
            f"expected {gain:.7g}",
        )


# It is asked for


def _never_by_itself(kit: Kit) -> None:
    """A call without it drops nothing, whatever was called before; with p = 0 neither."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    dropped: Answer = {}
    for round_ in range(2):
        plain = kit.call(q, k, v, **d)
        kit.right(plain, q, k, v, what="a call without dropout", **d)
        none = kit.call(q, k, v, dropout=Dropout(0.0, SEED), **d)
        kit.right(none, q, k, v, what="a call with p = 0", **d)
        with_dropout = {"dropout": Dropout(0.5, SEED)} | d
        again = kit.call(q, k, v, **with_dropout)
        kit.right(again, q, k, v, what="a call with dropout", **with_dropout)
        dropped = again if not round_ else dropped
        limits = kit.bounds(q, k, v, **with_dropout)
        kit.same(again, dropped, limits, what="the same call, later")


PROBES = (
    Probe("dropout-in-shards", ("S9",), "forward", _in_shards, needs=("dropout",), ids=("M4",)),
    Probe("dropout-in-parts", ("S9", "S2.6"), "forward", _in_parts, needs=("dropout", "lse")),
    Probe("dropout-in-both-directions", ("S9", "S6.1"), "gradients", _backward_agrees,
          needs=("dropout", "gradient")),
    Probe("dropout-of-a-seed", ("S9",), "forward", _seed_is_a_pattern, needs=("dropout",),
          ids=("M4",)),
    Probe("dropout-at-its-rate", ("S9",), "forward", _rate_is_p, needs=("dropout",),
          ids=("M3",)),
    Probe("dropout-never-by-itself", ("S9",), "forward", _never_by_itself, needs=("dropout",),
          ids=("M1",)),
)  # fmt: skip
