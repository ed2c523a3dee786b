"""What holds of a single row of weights and outputs, whatever the numbers are (S7)."""

from __future__ import annotations

import numpy as np

from ._kit import Kit
from ._probe import Probe

__all__ = ["PROBES"]


def _rows_of_P_sum_to_one(kit: Kit) -> None:
    """P is never negative, and the rows that see something sum to 1."""
    q, k, _ = kit.inputs()
    for options in ({}, {"causal": True}):
        if not kit.able(**options):
            continue
        P = kit.weights(q, k, **options)
        rounding = {"float64": 1e-15, "float32": 1e-6, "float16": 2.0**-11}.get(kit.dtype, 2.0**-8)
        kit.require((P >= 0).all(), "a weight is negative, or no number")
        off = float(np.abs(P.sum(axis=-1) - 1).max())
        kit.require(off <= kit.L * rounding, f"a row of P sums to 1 but for {off:.3g}")


def _outputs_lie_among_the_visible_values(kit: Kit) -> None:
    """out is between the least and the greatest visible value of each column."""
    q, k, v = kit.inputs()
    out = kit.call(q, k, v, causal=True)["out"].astype(np.float64)
    limits = kit.bounds(q, k, v, causal=True).out
    assert limits is not None
    values = np.repeat(v.astype(np.float64), kit.Hq // kit.Hk, axis=1)
    low, high = (f.accumulate(values, axis=2) for f in (np.minimum, np.maximum))
    inside = (out >= low - limits.limit) & (out <= high + limits.limit)
    where = np.unravel_index(int(np.argmin(inside)), inside.shape)
    kit.require(
        inside.all(),
        f"out at {tuple(map(int, where))} is {out[where]:.6g}, outside of the visible values "
        f"[{low[where]:.6g}, {high[where]:.6g}]",
    )


def _a_constant_moves_lse_alone(kit: Kit) -> None:
    """A constant added to a row's scores changes lse by itself and out nowhere."""
    q, k, v = kit.inputs()
    bias = np.linspace(-3, 5, kit.L)[:, None].astype(q.dtype)
    limits = kit.bounds(q, k, v, bias=bias)
    moved, plain = kit.call(q, k, v, bias=bias), kit.call(q, k, v)
    if "lse" in plain:
        plain["lse"] = plain["lse"].astype(np.float64) + bias[:, 0].astype(np.float64)
    kit.same(moved, plain, limits, what="with a constant added to each row's scores")


def _the_default_scale_keeps_unit_variance(kit: Kit) -> None:
    """Unit-variance q and k give scores of unit variance, whatever D is."""
    for size in (4, 64, 256):
        if kit.has.max_head_size is not None and size > kit.has.max_head_size:
            continue
        q, k = kit.draw(2, 1, 48, size), kit.draw(2, 1, 64, size)
        scores = np.log(np.maximum(kit.weights(q, k), 1e-30))
        found = float(scores.var(axis=-1, ddof=1).mean())
        kit.require(0.7 < found < 1.4, f"D={size}: scores of variance {found:.3g}, expected 1")


def _weights_make_the_output(kit: Kit) -> None:
    """`attention_weights` times v is out, heads grouped and masked alike."""
    q, k, v = kit.inputs()
    P = kit.weights(q, k, causal=True)
    out = kit.call(q, k, v, causal=True)["out"].astype(np.float64)
    limits = kit.bounds(q, k, v, causal=True)
    assert limits.out is not None
    values = np.repeat(v.astype(np.float64), kit.Hq // kit.Hk, axis=1)
    allowed = limits.out.limit + limits.weights.limit @ np.abs(values)
    ratio = float((np.abs(P @ values - out) / allowed).max())
    kit.require(ratio <= 1, f"P @ v is off out by {ratio:.3g} times what rounding allows")


PROBES = (
    Probe("rows-of-weights-sum-to-one", ("S7", "S2.5"), "forward", _rows_of_P_sum_to_one),
    Probe("outputs-among-visible-values", ("S7",), "forward",
          _outputs_lie_among_the_visible_values),
    Probe("constant-moves-lse-alone", ("S7", "S2"), "forward", _a_constant_moves_lse_alone,
          needs=("bias",)),
    Probe("default-scale-unit-variance", ("S7", "S1.2"), "forward",
          _the_default_scale_keeps_unit_variance),
    Probe("weights-make-the-output", ("S2.5", "S2"), "forward", _weights_make_the_output,
          needs=("weights",), ids=("A3", "A11")),
)  # fmt: skip
