"""Expected answers for what stands beside attention: linear attention, step by step in float64.

Like the oracle this imports nothing of attnx and is written to be read. The answer is the
recurrence itself, one token at a time. The bound is made of the unrolled form, whose terms are
what a kernel adds up in one order or another.

Example:
    >>> import numpy as np
    >>> x = np.ones((1, 3, 1))
    >>> linear_reference(x, x, x, decay=0.5).out[0, :, 0]
    array([1.  , 1.5 , 1.75])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .judgement import Bound

__all__ = ["LinearReference", "elu_features", "linear_reference"]

Floats = NDArray[np.float64]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {
    "float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074,
}  # fmt: skip
OPERATIONS = 16
"""Roundings of a term besides those of its sums: the feature map, exp, products, the quotient."""


@dataclass(frozen=True)
class LinearReference:
    """The exact answer, and how far a kernel with sums in float32 or better may lie from it.

    Attributes:
        out: `(*B, Hq, L, Dv)`.
        S: `(*B, Hq, D, Dv)`, the state after the last step; one a query head, whoever shares keys.
        z: `(*B, Hq, D)`, the sum of the decayed features of keys.
        bound: for out in the dtype that was asked for.
        state_bound: for S in float32, or float64 where that was asked for.
    """

    out: Floats
    S: Floats
    z: Floats
    bound: Bound
    state_bound: Bound


def elu_features(x: Floats) -> Floats:
    """elu(x) + 1."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = 1.0,
    features: Callable[[Floats], Floats] | None = None,
    normalize: bool = False,
    S: Any = None,
    z: Any = None,
    dtype: str = "float64",
) -> LinearReference:
    """Causal linear attention by its recurrence.

    Args:
        q: `(*B, Hq, L, D)`.
        k: `(*B, Hk, L, D)`; query head h uses key head h // (Hq // Hk).
        v: `(*B, Hk, L, Dv)`.
        decay: a number, `(Hq,)`, or `(*B, Hq, L)`.
        features: the feature map; None for the identity.
        normalize: divide by the features' own sum; 0 where that is 0.
        S: the state to start from, as in `LinearReference`, or None for 0.
        z: alike.
        dtype: of the arrays that a kernel gets and gives.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    g = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, g, axis=-3), np.repeat(v, g, axis=-3)
    if features is not None:
        q, k = features(q), features(k)
    d = np.asarray(decay).astype(np.float64)
    d = np.broadcast_to(d[:, None] if d.ndim == 1 else d, q.shape[:-1])
    S = np.zeros((*q.shape[:-2], q.shape[-1], v.shape[-1])) if S is None else S.astype(np.float64)
    z = np.zeros((*q.shape[:-2], q.shape[-1])) if z is None else z.astype(np.float64)
    limits = _limits(q, k, v, d, S, z, dtype)

    out, divisor = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(q.shape[:-1])
    for t in range(q.shape[-2]):
        S = d[..., t, None, None] * S + k[..., t, :, None] * v[..., t, None, :]
        z = d[..., t, None] * z + k[..., t, :]
        out[..., t, :] = np.einsum("...d,...de->...e", q[..., t, :], S)
        divisor[..., t] = np.einsum("...d,...d->...", q[..., t, :], z)
    limit = limits[0]
    if normalize:
        with np.errstate(all="ignore"):
            out = np.where(divisor[..., None] != 0, out / divisor[..., None], 0.0)
            limit = (limit + np.abs(out) * limits[1][..., None]) / np.abs(divisor[..., None])
    limit = limit + UNIT[dtype] * np.abs(out) + SMALLEST[dtype]
    return LinearReference(out, S, z, _bound(limit), _bound(limits[2]))


def _bound(limit: Floats) -> Bound:
    return Bound(limit, np.zeros(limit.shape, bool))


def _limits(
    q: Floats, k: Floats, v: Floats, d: Floats, S: Floats, z: Floats, dtype: str
) -> tuple[Floats, Floats, Floats]:
    """The largest errors of the sum, the divisor and the last state.

    A term is rounded once for each addition it may go through and a few times more, and an exponent
    of a decay of size s is off by some units of s.
    """
    L, D = q.shape[-2:]
    unit = UNIT["float64" if dtype == "float64" else "float32"]
    steps = np.concatenate([np.zeros((*d.shape[:-1], 1)), np.cumsum(np.log(d), axis=-1)], axis=-1)
    ends = steps[..., 1:]
    q, k, v, S, z = (np.abs(x) for x in (q, k, v, S, z))

    def weighed(spans: Floats) -> Floats:
        """e^-span, times the roundings of a term across that span."""
        return np.asarray(np.exp(-spans) * unit * (D + L + OPERATIONS * (1 + spans)))

    pairs = np.tril(ends[..., None, :] - ends[..., :, None])
    weights = np.tril(weighed(pairs)) * (q @ np.swapaxes(k, -1, -2))
    start = weighed(-ends)[..., None] * q
    to_end = weighed(ends - ends[..., -1:])[..., None] * k if L else k
    last = weighed(-steps[..., -1:])[..., None] * S
    return (
        weights @ v + start @ S,
        weights.sum(-1) + np.einsum("...id,...d->...i", start, z),
        np.swapaxes(to_end, -1, -2) @ v + last,
    )
