"""Linear attention, which the field turned to, on the subject's arrays.

Its chunks, its steps and the recurrence that defines it are three ways to one answer. No backend
chooses here: the framework of the arrays computes, so what is examined is that framework's lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import attnx
from attnx_conformance.judgement import judge
from attnx_conformance.relatives import elu_features, linear_reference

from ._kit import Array, Kit
from ._probe import Probe
from .layers import backend

__all__ = ["PROBES"]

WIDE = ("float32", "float64")


def _calls(kit: Kit) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options of a call, and the same for the oracle; decays by call, head and step."""
    L, H = kit.L, kit.Hq
    heads = kit.rng.uniform(0.3, 1.0, H).astype(np.float32)
    steps = kit.rng.uniform(0.05, 1.0, (kit.B, H, L)).astype(np.float32)
    lane = kit.lane
    return {
        "plain": ({}, {}),
        "a decay": ({"decay": 0.75}, {"decay": 0.75}),
        "a decay of heads": ({"decay": lane.from_numpy(heads)}, {"decay": heads}),
        "a decay of steps": ({"decay": lane.from_numpy(steps)}, {"decay": steps}),
        "elu": (
            {"feature_map": "elu", "decay": 0.9},
            {"features": elu_features, "normalize": True, "decay": 0.9},
        ),
    }


def _right(kit: Kit, made: Any, expected: Array, bound: Any, what: str) -> None:
    judgement = judge(kit.numpy(made), expected, bound)
    kit.ratios[what] = judgement.ratio
    kit.require(judgement.ok, f"{what}: out {judgement.detail}")


def _chunks(kit: Kit) -> None:
    """Chunks of any size give the recurrence, and no later step reaches an earlier one."""
    backend(kit)
    q, k, v = kit.inputs()
    arrays = [kit.lane.from_numpy(x) for x in (q, k, v)]
    for name, (options, plain) in _calls(kit).items():
        expected = linear_reference(q, k, v, **plain, dtype=kit.dtype)
        for chunk in (1, 5, 64):
            made = attnx.linear_attention(*arrays, **options, chunk=chunk)
            _right(kit, made, expected.out, expected.bound, f"{name}, chunks of {chunk}")
    _poisoned(kit, q, k, v)


def _poisoned(kit: Kit, q: Array, k: Array, v: Array) -> None:
    """A value that is no number spoils no step before its own."""
    at = kit.L - 3
    expected = linear_reference(*(x[:, :, :at] for x in (q, k, v)), decay=0.75, dtype=kit.dtype)
    spoiled = v.copy()
    spoiled[:, :, at, 0], spoiled[:, :, at + 1, -1] = np.nan, np.inf
    arrays = [kit.lane.from_numpy(x) for x in (q, k, spoiled)]
    for chunk in (5, 64):
        made = attnx.linear_attention(*arrays, decay=0.75, chunk=chunk)[:, :, :at]
        _right(kit, made, expected.out, expected.bound, f"NaN at step {at}, chunks of {chunk}")


def _steps(kit: Kit) -> None:
    """A prompt by chunks, then token by token from its state."""
    backend(kit)
    q, k, v = kit.inputs()
    for name, (options, plain) in _calls(kit).items():
        expected = linear_reference(q, k, v, **plain, dtype=kit.dtype)
        given: dict[str, Any] = dict(options)
        steps: Any = options.get("decay")
        many = len(getattr(steps, "shape", ())) == 3

        def part(start: int, stop: int) -> list[Any]:
            return [kit.lane.from_numpy(x[:, :, start:stop].copy()) for x in (q, k, v)]

        if many:
            given["decay"] = steps[:, :, :11]
        made, state = attnx.linear_attention(*part(0, 11), **given, chunk=4, return_state=True)
        found = [kit.numpy(made)]
        for t in range(11, kit.L):
            if many:
                given["decay"] = steps[:, :, t : t + 1]
            q1, k1, v1 = part(t, t + 1)
            made, state = attnx.linear_attention_step(q1, k1, v1, state, **given)
            found.append(kit.numpy(made))
        out = kit.lane.from_numpy(np.concatenate(found, axis=2))
        _right(kit, out, expected.out, expected.bound, f"{name}, token by token")


def _pullback(kit: Kit) -> None:
    """Each gradient along a direction in which the recurrence's answer moves."""
    backend(kit)
    q, k, v = kit.inputs()
    for name, (options, plain) in _calls(kit).items():
        arrays = [kit.lane.from_numpy(x) for x in (q, k, v)]
        out, pullback = attnx.linear_attention_vjp(*arrays, **options, chunk=5)
        d_out = kit.draw(*out.shape)
        grads = pullback(kit.lane.from_numpy(d_out))
        for n, operand in enumerate("qkv"):
            u = kit.rng.standard_normal((q, k, v)[n].shape)
            ends = []
            for step in (1e-5, -1e-5):
                there = [x.astype(np.float64) for x in (q, k, v)]
                there[n] = there[n] + step * u
                ends.append(float((linear_reference(*there, **plain).out * d_out).sum()))
            told = (ends[0] - ends[1]) / 2e-5
            grad = kit.numpy(getattr(grads, operand)).astype(np.float64)
            said, size = float((grad * u).sum()), float(np.abs(grad * u).sum())
            allowed = (1e-4 if kit.dtype == "float32" else 1e-6) * (1 + size)
            kit.require(
                abs(said - told) <= allowed,
                f"{name}: the gradient of {operand} says {said:.6g} where out moves by {told:.6g}",
            )


def _probe(name: str, check: Callable[[Kit], None], clauses: str) -> Probe:
    return Probe(name, tuple(clauses.split()), "relatives", check, dtypes=WIDE)


PROBES = (
    _probe("linear-in-chunks", _chunks, "S7"),
    _probe("linear-token-by-token", _steps, "S7"),
    _probe("linear-pullback", _pullback, "S6.1"),
)
