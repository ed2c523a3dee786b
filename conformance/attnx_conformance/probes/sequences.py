"""What holds of tokens in a row: prefixes, decoding, the future, and one answer on every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnx.masks import Causal, Lengths, Starts

from ._kit import Answer, Kit, piece
from ._probe import Probe

__all__ = ["PROBES"]


def _until(stop: int) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), slice(0, stop)


def _a_causal_prefix_gives_a_prefix(kit: Kit) -> None:
    """The first tokens do not know whether others follow."""
    q, k, v = kit.inputs()
    whole = kit.call(q, k, v, causal="top_left")
    for stop in (1, 10):
        short = [x[_until(stop)] for x in (q, k, v)]
        limits = kit.bounds(*short, causal="top_left")
        made = kit.call(*short, causal="top_left")
        kit.same(made, piece(whole, _until(stop)), limits, what=f"the first {stop} tokens")


def _decoding_equals_the_full_run(kit: Kit) -> None:
    """Step by step over a growing cache."""
    _decode(kit, lambda q, k, v, step: kit.call(
        q, k[_until(step + 1)], v[_until(step + 1)], causal="bottom_right"
    ))  # fmt: skip


def _decoding_from_a_fixed_cache_equals_the_full_run(kit: Kit) -> None:
    """Step by step over a cache of fixed size, with lengths; what is not yet written is garbage."""

    def step_of(q: Any, k: Any, v: Any, step: int) -> Answer:
        k, v = k.copy(), v.copy()
        k[:, :, step + 1 :], v[:, :, step + 1 :] = 99, -99
        return kit.call(q, k, v, mask=Lengths(step + 1), causal="bottom_right")

    _decode(kit, step_of)


def _decode(kit: Kit, step_of: Any) -> None:
    q, k, v = kit.inputs()
    whole, limits = kit.call(q, k, v, causal=True), kit.bounds(q, k, v, causal=True)
    for step in (0, 1, 8, kit.L - 1):
        at = slice(None), slice(None), slice(step, step + 1)
        made = step_of(q[at], k, v, step)
        kit.same(made, piece(whole, at), limits, at=at, what=f"step {step}")


def _grouped_heads_equal_repeated_heads(kit: Kit) -> None:
    """Sharing keys among three heads is giving each a copy, and gradients are summed (S6.3)."""
    q, k, v = kit.inputs()
    d, g = kit.cotangents(q, v), kit.Hq // kit.Hk
    copied = kit.call(q, np.repeat(k, g, axis=1), np.repeat(v, g, axis=1), causal=True, **d)
    for name in ("dk", "dv"):
        if name in copied:
            grad = copied[name].astype(np.float64)
            copied[name] = grad.reshape(kit.B, kit.Hk, g, *grad.shape[2:]).sum(axis=2)
    limits = kit.bounds(q, k, v, causal=True, **d)
    kit.same(kit.call(q, k, v, causal=True, **d), copied, limits, what="heads repeated")


def _three_spellings_of_causal(kit: Kit) -> None:
    """The option, the mask object and the array are one mask (S3.1, S3.5)."""
    q, k, v = kit.inputs()
    base, limits = kit.call(q, k, v, causal=True), kit.bounds(q, k, v, causal=True)
    spellings: dict[str, dict[str, Any]] = {
        "Causal()": {"mask": Causal()},
        "an array": {"mask": np.tri(kit.L, dtype=bool)},
        "'top_left'": {"causal": "top_left"},
        "'bottom_right'": {"causal": "bottom_right"},
    }
    for name, options in spellings.items():
        kit.same(kit.call(q, k, v, **options), base, limits, what=f"causal spelt as {name}")


def _paths(kit: Kit, q: Any, k: Any, v: Any, d: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """out by every way that a call can take, with the part that stands in entry 0, head 0."""
    yield "as it is", kit.call(q, k, v, lse=False, **options)["out"]
    yield "with lse", kit.call(q, k, v, **options)["out"]
    for way in kit.subject.ways if d else ():
        yield f"with gradients by {way}", kit.call(q, k, v, way=way, **d, **options)["out"]
    axes = q[None], k[None], v[None]
    yield "with two batch axes", kit.call(*axes, lse=False, **options)["out"][0]
    yield (
        "by weights",
        kit.weights(q, k, **options) @ np.repeat(v.astype(np.float64), kit.Hq // kit.Hk, axis=1),
    )


def _every_path_gives_one_answer(kit: Kit) -> None:
    """Asking for lse, gradients, weights or another rank never changes what is masked (S3.1)."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    several: list[dict[str, Any]] = [
        {"causal": True},
        {"mask": kit.rng.random((kit.L, kit.L)) < 0.6},
    ]
    for options in several:
        if not kit.able(**options):
            continue
        limits = kit.bounds(q, k, v, **options)
        assert limits.out is not None
        values = np.repeat(np.abs(v.astype(np.float64)), kit.Hq // kit.Hk, axis=1)
        slack = limits.out.limit + limits.weights.limit @ values
        made = list(_paths(kit, q, k, v, d, **options))
        for name, out in made[1:]:
            off = np.abs(out.astype(np.float64) - made[0][1].astype(np.float64))
            kit.require(
                bool((off <= 2 * slack).all()),
                f"{next(iter(options))}, {name}: out differs by {float(off.max()):.3g} from a "
                "plain call's",
            )


def _the_future_has_no_effect(kit: Kit) -> None:
    """Changing later tokens changes nothing in earlier rows, on any path."""
    q, k, v = kit.inputs()
    d, t = kit.cotangents(q, v), 7
    later_k, later_v = k.copy(), v.copy()
    for x in (later_k, later_v):
        x[:, :, t:] = 50 * kit.draw(*x[:, :, t:].shape)
    limit = kit.bounds(q, k, v, causal=True)
    assert limit.out is not None
    values = np.repeat(np.abs(v.astype(np.float64)), kit.Hq // kit.Hk, axis=1)
    slack = (limit.out.limit + limit.weights.limit @ values)[_until(t)]
    before = dict(_paths(kit, q, k, v, d, causal=True))
    for name, out in _paths(kit, q, later_k, later_v, d, causal=True):
        off = np.abs(out.astype(np.float64) - before[name].astype(np.float64))[_until(t)]
        kit.require(
            bool((off <= 2 * slack).all()),
            f"{name}: tokens from {t} on move earlier rows by {float(off.max()):.3g}",
        )


def _calls_in_a_row_stay_finite(kit: Kit) -> None:
    """Rows of padding see nothing, and give 0; no NaN of theirs reaches the next layer's rows."""
    q, k, v = kit.inputs()
    pad = np.array([5, 0, 11])
    v = np.ascontiguousarray(np.repeat(v, kit.Hq // kit.Hk, axis=1))
    for layer in range(3):
        made = kit.call(q, k, v[:, : kit.Hk], mask=Starts(pad), causal=True)
        out = made["out"]
        kit.require(np.isfinite(out).all(), f"layer {layer}: a row of padding is not finite")
        for b, n in enumerate(pad.tolist()):
            kit.require(not out[b, :, :n].any(), f"layer {layer}: padding of entry {b} is not 0")
        v = out


PROBES = (
    Probe("causal-prefix-gives-prefix", ("S7",), "masks", _a_causal_prefix_gives_a_prefix,
          ids=("C11",)),
    Probe("decoding-equals-full-run", ("S7", "S3.5"), "masks", _decoding_equals_the_full_run,
          ids=("C1", "C2")),
    Probe("decoding-from-fixed-cache", ("S7", "S3.5"), "masks",
          _decoding_from_a_fixed_cache_equals_the_full_run, ids=("C7", "C8")),
    Probe("grouped-equals-repeated", ("S7", "S1.3"), "forward",
          _grouped_heads_equal_repeated_heads, needs=("gqa",), ids=("E1", "E6")),
    Probe("spellings-of-causal", ("S3.1", "S3.5"), "masks", _three_spellings_of_causal),
    Probe("every-path-gives-one-answer", ("S3.1", "S7"), "masks", _every_path_gives_one_answer,
          ids=("A11", "C10", "C17", "D14")),
    Probe("future-has-no-effect", ("S4.1", "S7"), "masks", _the_future_has_no_effect,
          ids=("C10", "C11", "C13", "C14")),
    Probe("layers-of-padding-stay-finite", ("S3.7",), "masks", _calls_in_a_row_stay_finite,
          ids=("A13", "B9")),
)  # fmt: skip
