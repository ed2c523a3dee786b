"""What may be moved, split or changed elsewhere without effect: keys, queries, heads, entries (S7).

Answers are compared with their gradients, where the subject has any.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnx.masks import Lengths

from ._kit import Answer, Kit, piece
from ._probe import Probe

__all__ = ["PROBES"]


def _extras(kit: Kit) -> dict[str, Any]:
    """A dense mask and a full bias, as far as the subject takes them; no row is empty."""
    seen = kit.rng.random((kit.L, kit.L)) < 0.7
    seen[:, 3] = True
    extras: dict[str, Any] = {"mask": seen} if "dense" in kit.has.masks else {}
    if kit.has.bias:
        extras["bias"] = kit.draw(1, kit.Hq, kit.L, kit.L)
    return extras


def _ordered(answer: Answer, **orders: tuple[int, Any]) -> Answer:
    """An answer with some results permuted along an axis."""
    return {
        name: np.take(array, orders[name][1], axis=orders[name][0]) if name in orders else array
        for name, array in answer.items()
    }


def _keys_have_no_order(kit: Kit) -> None:
    """Permuting keys with their values, mask and bias changes nothing."""
    q, k, v = kit.inputs()
    extras, d = _extras(kit), kit.cotangents(q, v)
    order = kit.rng.permutation(kit.L)
    there = {name: array[..., order] for name, array in extras.items()}
    made = kit.call(q, k[:, :, order], v[:, :, order], **there, **d)
    base = _ordered(
        kit.call(q, k, v, **extras, **d), dk=(2, order), dv=(2, order), dbias=(3, order)
    )
    limits = kit.bounds(q, k[:, :, order], v[:, :, order], **there, **d)
    kit.same(made, base, limits, what="keys in another order")


def _queries_have_no_order(kit: Kit) -> None:
    """Permuting queries permutes rows."""
    q, k, v = kit.inputs()
    extras, d = _extras(kit), kit.cotangents(q, v)
    order = kit.rng.permutation(kit.L)
    there = {name: array[..., order, :] for name, array in extras.items()}
    moved_d = {name: array[:, :, order] for name, array in d.items()}
    made = kit.call(q[:, :, order], k, v, **there, **moved_d)
    base = _ordered(
        kit.call(q, k, v, **extras, **d),
        out=(2, order), lse=(2, order), dq=(2, order), dbias=(2, order),
    )  # fmt: skip
    limits = kit.bounds(q[:, :, order], k, v, **there, **moved_d)
    kit.same(made, base, limits, what="queries in another order")


def _queries_come_in_chunks(kit: Kit) -> None:
    """A run over all queries is the runs over chunks of them, and over one alone."""
    q, k, v = kit.inputs()
    extras = _extras(kit)
    whole, limits = kit.call(q, k, v, **extras), kit.bounds(q, k, v, **extras)
    for chunk in (slice(0, 5), slice(5, 6), slice(6, kit.L)):
        part = {name: array[..., chunk, :] for name, array in extras.items()}
        at = (slice(None), slice(None), chunk)
        made = kit.call(q[at], k, v, **part)
        kit.same(made, piece(whole, at), limits, at=at, what=f"queries {chunk.start}:{chunk.stop}")


def _queries_do_not_see_each_other(kit: Kit) -> None:
    """Changing the other queries changes nothing in a row."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    other = kit.draw(*q.shape) * q.dtype.type(3)
    other[:, :, 4] = q[:, :, 4]
    at = (slice(None), slice(None), slice(4, 5))
    ours, theirs = kit.call(q, k, v, **d), kit.call(other, k, v, **d)
    _unchanged(
        kit, piece(ours, at), piece(theirs, at), kit.bounds(q, k, v, **d), at, "other queries"
    )


def _tokens_have_no_positions(kit: Kit) -> None:
    """Without a mask, permuting tokens permutes the result."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    order = kit.rng.permutation(kit.L)
    moved = [x[:, :, order] for x in (q, k, v)]
    moved_d = {name: array[:, :, order] for name, array in d.items()}
    base = _ordered(
        kit.call(q, k, v, **d), **dict.fromkeys(("out", "lse", "dq", "dk", "dv"), (2, order))
    )
    limits = kit.bounds(*moved, **moved_d)
    kit.same(kit.call(*moved, **moved_d), base, limits, what="tokens in another order")


def _batch_entries_are_independent(kit: Kit) -> None:
    """An entry gives the same alone, and whatever stands in the other entries."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    whole = kit.call(q, k, v, **d)
    one = slice(1, 2)
    entry = {name: array[one] for name, array in whole.items()}
    alone_d = {name: array[one] for name, array in d.items()}
    limits = kit.bounds(q[one], k[one], v[one], **alone_d)
    alone = kit.call(q[one], k[one], v[one], **alone_d)
    kit.same(alone, entry, limits, what="entry 1 alone")
    changed = [np.where(np.arange(kit.B)[:, None, None, None] == 1, x, 5 * x) for x in (q, k, v)]
    other = kit.call(*(x.astype(q.dtype) for x in changed), **d)
    _unchanged(kit, entry, {n: x[one] for n, x in other.items()}, limits, ..., "other entries")


def _lengths_belong_to_their_entry(kit: Kit) -> None:
    """A padded entry gives the same alone, cut to its length."""
    q, k, v = kit.inputs()
    lengths = np.array([kit.L, 4, 9])
    whole = kit.call(q, k, v, mask=Lengths(lengths))
    for b, n in enumerate(lengths.tolist()):
        cut = q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]
        theirs = {name: array[b : b + 1] for name, array in whole.items()}
        kit.same(kit.call(*cut), theirs, kit.bounds(*cut), what=f"entry {b} cut to its length {n}")


def _heads_are_independent(kit: Kit) -> None:
    """Changing the other groups of heads changes nothing in a group."""
    q, k, v = kit.inputs()
    d, g = kit.cotangents(q, v), kit.Hq // kit.Hk
    kv, own = slice(1, 2), slice(g, 2 * g)
    changed = []
    for x, heads in ((q, own), (k, kv), (v, kv)):
        other = (kit.draw(*x.shape) * x.dtype.type(3)).astype(x.dtype)
        other[:, heads] = x[:, heads]
        changed.append(other)
    spans = dict.fromkeys(("dk", "dv"), kv)
    pick = {n: (slice(None), spans.get(n, own)) for n in ("out", "lse", "dq", "dk", "dv")}
    ours, theirs = kit.call(q, k, v, **d), kit.call(*changed, **d)
    limits = kit.bounds(q, k, v, **d)
    for name, array in ours.items():
        at = pick[name]
        one, other = {name: array[at]}, {name: theirs[name][at]}
        _unchanged(kit, one, other, limits, at, "other heads")


def _unchanged(kit: Kit, ours: Answer, theirs: Answer, limits: Any, at: Any, what: str) -> None:
    """Nothing that the answers depend on has changed: equal, to the bit where that is declared."""
    if kit.has.deterministic:
        kit.identical(ours, theirs, f"with {what} changed")
    kit.same(ours, theirs, limits, at=at, what=f"with {what} changed")


def _padded(kit: Kit, filling: float) -> None:
    """Keys that lengths hide give what no keys there give, and what zeros there give."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    cut, limits = kit.call(q, k, v, **d), kit.bounds(q, k, v, **d)
    made = []
    for value in (0.0, filling):
        padded = [np.pad(x, ((0, 0), (0, 0), (0, 7), (0, 0))) for x in (k, v)]
        for x in padded:
            x[:, :, kit.L :] = value
        answer = kit.call(q, *padded, mask=Lengths(kit.L), **d)
        for name in ("dk", "dv"):
            if name in answer:
                rest = answer[name][:, :, kit.L :].astype(np.float64)
                kit.require(not rest.any(), f"padding of {value}: {name} of a hidden key is not 0")
                answer[name] = answer[name][:, :, : kit.L]
        kit.same(answer, cut, limits, what=f"padded with {value}")
        made.append(answer)
    kit.same(made[0], made[1], limits, what=f"padded with {filling} and with 0")


def _padding_has_no_effect(kit: Kit) -> None:
    """Whatever finite values stand in hidden keys."""
    _padded(kit, 1e4)


def _poisoned_padding_has_no_effect(kit: Kit) -> None:
    """NaN in hidden keys and values too (S4.1)."""
    _padded(kit, np.nan)


def _hidden_keys_change_no_bit(kit: Kit) -> None:
    """To the bit, where that is declared: small calls and calls of several tiles (S4.1)."""
    for length in (kit.L, 300):
        q, k, v = kit.inputs(length, length + 7, B=1)
        d, made = kit.cotangents(q, v), []
        for value in (0.0, 7.0, np.nan):
            k, v = k.copy(), v.copy()
            k[:, :, length:] = v[:, :, length:] = value
            made.append(kit.call(q, k, v, mask=Lengths(length), **d))
        for value, answer in zip((7.0, np.nan), made[1:], strict=True):
            kit.identical(answer, made[0], f"{length} keys, hidden ones hold {value} and not 0")


PROBES = (
    Probe("keys-have-no-order", ("S7",), "masks", _keys_have_no_order),
    Probe("queries-have-no-order", ("S7",), "masks", _queries_have_no_order),
    Probe("queries-in-chunks", ("S7",), "masks", _queries_come_in_chunks),
    Probe("queries-independent", ("S7",), "forward", _queries_do_not_see_each_other),
    Probe("tokens-have-no-positions", ("S7",), "forward", _tokens_have_no_positions),
    Probe("batch-entries-independent", ("S7",), "forward", _batch_entries_are_independent,
          ids=("L8",)),
    Probe("lengths-cut-entries", ("S7", "S3.6"), "masks", _lengths_belong_to_their_entry,
          ids=("D15", "L8")),
    Probe("heads-independent", ("S1.3", "S7"), "forward", _heads_are_independent),
    Probe("padding-has-no-effect", ("S4.1", "S2.1"), "masks", _padding_has_no_effect,
          ids=("B14",)),
    Probe("poisoned-padding-has-no-effect", ("S4.1",), "masks", _poisoned_padding_has_no_effect,
          needs=("isolation",), ids=("B1", "B7", "B8")),
    Probe("hidden-keys-change-no-bit", ("S4.1",), "masks", _hidden_keys_change_no_bit,
          needs=("isolation", "deterministic")),
)  # fmt: skip
