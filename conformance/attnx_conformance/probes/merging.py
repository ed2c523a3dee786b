"""Parts over disjoint keys join to the whole (S2.6): a proof of lse that no comparison of it gives.

A kernel whose lse is in base 2, of another shape, or without its maximum passes many tests of its
output, and breaks here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import attnx

from ._kit import Answer, Array, Kit
from ._probe import Probe

__all__ = ["PROBES"]


def _joined(kit: Kit, q: Array, k: Array, v: Array, cuts: Any, **options: Any) -> Answer:
    """`attnx.merge` of the subject's answers over `k[cuts[n]:cuts[n + 1]]`."""
    mask, parts = options.pop("mask", None), []
    for first, last in pairwise(cuts):
        more = {} if mask is None else {"mask": np.ascontiguousarray(mask[..., first:last])}
        keys = slice(None), slice(None), slice(first, last)
        args, given = kit.arguments(q, k[keys], v[keys], **more, **options)
        parts.append(kit.subject.attention(args.q, args.k, args.v, **given, return_lse=True))
    orders = [parts, parts[::-1]]
    made = [dict(zip(("out", "lse"), attnx.merge(order), strict=True)) for order in orders]
    first_way, second_way = (kit.back(answer) for answer in made)
    limits = kit.bounds(q, k, v, **options, **({} if mask is None else {"mask": mask}))
    kit.same(first_way, second_way, limits, what="parts in the other order")
    return first_way


def _parts(kit: Kit, n: int) -> None:
    q, k, v = kit.inputs()
    cuts = {2: (0, 14, kit.L), 3: (0, 6, 6, kit.L), 5: (0, 1, 4, 4, 11, kit.L)}[n]
    whole, limits = kit.call(q, k, v), kit.bounds(q, k, v)
    kit.same(_joined(kit, q, k, v, cuts), whole, limits, what=f"{n} parts")


def _two_parts(kit: Kit) -> None:
    _parts(kit, 2)


def _three_parts(kit: Kit) -> None:
    """One of them without keys."""
    _parts(kit, 3)


def _five_parts(kit: Kit) -> None:
    """One of them without keys."""
    _parts(kit, 5)


def _masked_parts(kit: Kit) -> None:
    """Rows that see nothing of one part, and a row that sees nothing at all."""
    q, k, v = kit.inputs()
    mask = kit.rng.random((kit.L, kit.L)) < 0.6
    mask[2], mask[3, :6], mask[4, 6:] = False, False, False
    mask[3, 9] = mask[4, 0] = True
    whole, limits = kit.call(q, k, v, mask=mask), kit.bounds(q, k, v, mask=mask)
    made = _joined(kit, q, k, v, (0, 6, 12, kit.L), mask=mask)
    kit.same(made, whole, limits, what="masked parts")
    kit.require(np.isneginf(made["lse"][:, :, 2]).all(), "lse of a row without keys is not -inf")


def _peaked_parts(kit: Kit) -> None:
    """One part outweighs the others by far: only its lse says so."""
    q, k, v = kit.inputs()
    k = k.copy()
    k[:, :, 8] = (4 * k[:, :, 8]).astype(k.dtype)
    q = (3 * q).astype(q.dtype)
    made = _joined(kit, q, k, v, (0, 6, 11, kit.L))
    kit.same(made, kit.call(q, k, v), kit.bounds(q, k, v), what="a peaked part")


def _empty_parts(kit: Kit) -> None:
    """Where every part is empty, out is 0 and lse is -inf."""
    q, k, v = kit.inputs(Lk=4)
    none = np.zeros((kit.L, 4), dtype=bool)
    made = _joined(kit, q, k, v, (0, 2, 4), mask=none)
    kit.require(not made["out"].any(), "out of empty parts is not 0")
    kit.require(np.isneginf(made["lse"]).all(), "lse of empty parts is not -inf")


PROBES = (
    Probe("merge-two-parts", ("S2.6", "S7"), "forward", _two_parts, needs=("lse",),
          ids=("H1", "H2")),
    Probe("merge-three-parts", ("S2.6", "S7"), "forward", _three_parts, needs=("lse",),
          ids=("H1", "J2")),
    Probe("merge-five-parts", ("S2.6", "S7"), "forward", _five_parts, needs=("lse",)),
    Probe("merge-masked-parts", ("S2.6", "S3.7"), "masks", _masked_parts, needs=("lse",)),
    Probe("merge-peaked-parts", ("S2.6", "S5.3"), "numerics", _peaked_parts, needs=("lse",),
          ids=("H1",)),
    Probe("merge-empty-parts", ("S2.6", "S3.7"), "masks", _empty_parts, needs=("lse",)),
)  # fmt: skip
