"""What stands around the operation, computed by the backend under examination.

Projections, positions and caches are array code that every framework shares, so these probes ask
whether they hold on the subject's arrays and through its backend. What the operation itself answers
is the other profiles' matter, and the bounds here are those of a few more sums: an error of a wrong
head, a wrong place or a lost part is of the size of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import attnx
from attnx.masks import Lengths, Window
from attnx_conformance.oracle import reference
from attnx_conformance.plain import numpy_dtype
from attnx_conformance.subject import BackendSubject

from ._kit import Array, Kit, moved
from ._probe import Probe

__all__ = ["PROBES"]

WIDE = ("float32", "float64")
SLACK = {"float32": 2e-5, "float64": 1e-12}
"""Of the greatest magnitude in an answer: hundreds of roundings, far below a wrong term."""


def close(kit: Kit, found: Any, expected: Array, what: str) -> None:
    """An answer of the subject's arrays is as expected, to a few hundred roundings."""
    actual = kit.numpy(found) if kit.lane.owns(found) else np.asarray(found)
    kit.require(actual.shape == expected.shape, f"{what}: shape {actual.shape}")
    off = float(np.abs(actual.astype(np.float64) - expected).max(initial=0.0))
    allowed = SLACK[kit.dtype] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    kit.ratios[what] = max(kit.ratios.get(what, 0.0), off / allowed)
    kit.require(off <= allowed, f"{what} is off by {off:.3g}, {allowed:.3g} allowed")


def backend(kit: Kit) -> dict[str, Any]:
    """The options that have the subject compute; functions have no name to be asked by."""
    if not isinstance(kit.subject, BackendSubject):
        kit.inapplicable("asked of backends")
    return {"backend": kit.subject.name}


def _weights(kit: Kit, E: int, Ec: int) -> dict[str, Array]:
    Hq, Hk, D, Dv = kit.Hq, kit.Hk, kit.D, kit.Dv
    shapes = {
        "wq": (E, Hq * D), "wk": (Ec, Hk * D), "wv": (Ec, Hk * Dv), "wo": (Hq * Dv, 7),
        "bq": (Hq * D,), "bk": (Hk * D,), "bv": (Hk * Dv,), "bo": (7,),
    }  # fmt: skip
    small = numpy_dtype(kit.dtype).type(0.3)
    return {name: kit.draw(*shape) * small for name, shape in shapes.items()}


def _expected(kit: Kit, x: Array, c: Array, w: dict[str, Array], **options: Any) -> Array:
    """By the oracle, on projections in float64."""
    wide = {name: a.astype(np.float64) for name, a in w.items()}
    x, c = x.astype(np.float64), c.astype(np.float64)

    def split(y: Array, heads: int) -> Array:
        return np.swapaxes(y.reshape(*y.shape[:-1], heads, -1), -3, -2)

    q = split(x @ wide["wq"] + wide["bq"], kit.Hq)
    k, v = (split(c @ wide["w" + n] + wide["b" + n], kit.Hk) for n in "kv")
    out = reference(q, k, v, **options).out
    assert out is not None
    flat = np.swapaxes(out, -3, -2).reshape(*x.shape[:-1], -1)
    return np.asarray(flat @ wide["wo"] + wide["bo"])


def _heads(kit: Kit) -> None:
    """Self and cross attention, with a mask, equal the oracle's on each head."""
    who = backend(kit)
    lane, (B, Lq, Lk) = kit.lane, (kit.B, 9, kit.L)
    x, c = kit.draw(B, Lq, 6), kit.draw(B, Lk, 5)
    shown = kit.rng.random((B, 1, Lq, Lk)) < 0.7
    several: tuple[Any, ...] = ((c, 5, {"mask": shown}), (None, 6, {"causal": True}), (c, 5, {}))
    for context, Ec, options in several:
        if not kit.able(**options):
            continue
        w = _weights(kit, 6, Ec)
        given: dict[str, Any] = {n: lane.from_numpy(a) if isinstance(a, np.ndarray) else a
                 for n, a in options.items()}  # fmt: skip
        made = attnx.multi_head_attention(
            lane.from_numpy(x), None if context is None else lane.from_numpy(context),
            weights=attnx.HeadWeights(**{n: lane.from_numpy(a) for n, a in w.items()}),
            num_heads=kit.Hq, num_kv_heads=kit.Hk, **given, **who,
        )  # fmt: skip
        expected = _expected(kit, x, x if context is None else c, w, **options)
        close(kit, made, expected, "self-attention" if context is None else "cross-attention")


def _heads_pullback(kit: Kit) -> None:
    """Each gradient, along a direction in which the oracle's answer moves."""
    who = backend(kit)
    lane = kit.lane
    x, c, w = kit.draw(kit.B, 5, 6), kit.draw(kit.B, 7, 5), _weights(kit, 6, 5)
    y, pullback = attnx.multi_head_attention_vjp(
        lane.from_numpy(x), lane.from_numpy(c), num_heads=kit.Hq, num_kv_heads=kit.Hk,
        weights=attnx.HeadWeights(**{n: lane.from_numpy(a) for n, a in w.items()}), **who,
    )  # fmt: skip
    d_y = kit.draw(*y.shape)
    grads = pullback(lane.from_numpy(d_y))
    found = {"x": grads.x, "context": grads.context, **grads.weights._asdict()}
    arrays = {"x": x, "context": c, **w}
    for name, grad in found.items():
        u = kit.rng.standard_normal(arrays[name].shape)
        ends = []
        for step in (1e-4, -1e-4):
            there = {n: a.astype(np.float64) for n, a in arrays.items()}
            there[name] = there[name] + step * u
            moved_x, moved_c = there.pop("x"), there.pop("context")
            ends.append(float((_expected(kit, moved_x, moved_c, there) * d_y).sum()))
        told, grad = (ends[0] - ends[1]) / 2e-4, kit.numpy(grad).astype(np.float64)
        allowed = (1e-4 if kit.dtype == "float32" else 1e-6) * (1 + float(np.abs(grad * u).sum()))
        kit.require(
            abs(float((grad * u).sum()) - told) <= allowed,
            f"the gradient of {name} says {float((grad * u).sum()):.6g} where y moves by "
            f"{told:.6g}",
        )


def _rotary(kit: Kit) -> None:
    """Scores depend on how far apart query and key stand, in either style, and lengths stay."""
    backend(kit)
    lane, L = kit.lane, kit.L
    x = kit.draw(kit.B, kit.Hq, L, kit.D)
    for style in ("half", "interleaved"):
        at = [
            kit.numpy(attnx.rope(lane.from_numpy(x), lane.from_numpy(places), style=style))
            for places in (np.arange(L), np.arange(L) + 1000, 2 * np.arange(L))
        ]
        first, later, apart = (y.astype(np.float64) for y in at)
        scores = first @ np.swapaxes(first, -1, -2)
        size = float(np.abs(scores).max()) * (60 if kit.dtype == "float32" else 1)
        off = float(np.abs(later @ np.swapaxes(later, -1, -2) - scores).max())
        kit.require(off <= SLACK[kit.dtype] * size, f"rope, {style}: scores moved by {off:.3g}")
        kit.require(
            float(np.abs(apart @ np.swapaxes(apart, -1, -2) - scores).max()) > 0.1,
            f"rope, {style}: twice the distance gives the same scores",
        )
        norms = np.abs((first**2).sum(-1) - (x.astype(np.float64) ** 2).sum(-1)).max()
        kit.require(norms <= SLACK[kit.dtype] * 100, f"rope, {style}: a length changed")


def _cached(kit: Kit) -> None:
    """Token by token over a cache whose free slots hold NaN, with and without a window."""
    who = backend(kit)
    lane, n = kit.lane, 7
    q, k, v = (x[:, :, :n] for x in kit.inputs())
    plain = lane.any_shape or kit.has.masks >= {"causal", "lengths"}  # else all slots are handed on
    windows = [None] * plain + [3] * (kit.has.masks >= {"window", "positions"})
    if not windows:
        kit.inapplicable("not declared: the masks of a cache")
    for window in windows:
        cache = attnx.KVCache.empty(
            kit.B, kit.Hk, n if window is None else window, kit.D, kit.Dv, window=window,
            like=lane.from_numpy(q), fill=float("nan"),
        )  # fmt: skip
        steps = []
        for t in range(n):
            one = (lane.from_numpy(x[:, :, t : t + 1]) for x in (q, k, v))
            token, *rest = one
            cache = cache.append(*rest)
            steps.append(kit.numpy(cache.attend(token, **who)))
        mask = None if window is None else Window(window - 1, 0)
        whole = reference(q, k, v, mask=mask, causal="top_left").out
        assert whole is not None
        close(kit, np.concatenate(steps, axis=2), whole, f"decoding with window {window}")


def _in_parts(kit: Kit) -> None:
    """Keys in slices that are merged, queries in chunks: each equals the whole call."""
    who = backend(kit)
    q, k, v = kit.inputs(Lq=9)
    several: dict[str, dict[str, Any]] = {
        "causal": {"causal": "bottom_right"},
        "lengths": {"mask": Lengths(np.array([kit.L, 0, 4])), "causal": "bottom_right"},
        "sinks": {"sinks": kit.draw(kit.Hq), "mask": Window(5, 2, "bottom_right")},
        "a mask": {"mask": kit.rng.random((kit.B, 1, 9, kit.L)) < 0.5},
    }
    for name, options in several.items():
        if not kit.able(**options):
            continue
        args, given = kit.arguments(q, k, v, **options)
        whole = reference(q, k, v, **options).out
        assert whole is not None
        for parts in (2, [3, 3, 11]):
            made = attnx.split_kv(args.q, args.k, args.v, parts=parts, **given, **who)
            close(kit, moved(kit.numpy(made), kit.layout), whole, f"{name}, keys in parts {parts}")
        given = {"causal": False, **given}  # a prompt is causal unless the call says otherwise
        made = attnx.prefill(args.q, args.k, args.v, chunk=4, **given, **who)
        close(kit, moved(kit.numpy(made), kit.layout), whole, f"{name}, queries by 4")


def _probe(name: str, check: Callable[[Kit], None], clauses: str, needs: str = "") -> Probe:
    return Probe(
        name, tuple(clauses.split()), "layers", check, needs=tuple(needs.split()), dtypes=WIDE
    )


PROBES = (
    _probe("heads-of-a-layer", _heads, "S2 S7", "gqa"),
    _probe("heads-pullback", _heads_pullback, "S6.1", "gradient gqa"),
    _probe("rotary-positions", _rotary, "S7"),
    _probe("tokens-from-a-cache", _cached, "S3.5 S4.1 S7"),
    _probe("call-in-parts", _in_parts, "S2.6 S3.5 S7"),
)  # fmt: skip
