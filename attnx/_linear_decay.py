"""How fast a linear attention forgets, as the factors of one chunk, and the gradients of those.

Everything is a power of e whose exponent is a sum of log decays over a span of steps, at most 0, so
nothing overflows. Each sum is taken over its own span and is never the difference of two running
sums: a step that forgets all (-inf) stays usable, and a long memory beside a short one stays exact.
A decay that is the same at every step needs no sum at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attnx._lane import Lane

__all__ = ["Factors", "Steady", "Varying", "reduce_to", "running_sum"]

LEAST = -1e30
"""Stands for the log of 0 where it is multiplied: 0 times -inf would be NaN."""


class Factors(NamedTuple):
    """What a chunk of n steps multiplies with; also the gradients of the four exponents.

    Axes before the last are (B, Hk, g, N), each 1 where it is the same for all.

    Attributes:
        weights: (…, n, n), from step j to step i >= j; what stands above the diagonal is not used.
        into: (…, n), from before the chunk to step i.
        onto: (…, n), from step j to the end of the chunk.
        gate: (…), over the whole chunk.
    """

    weights: Any
    into: Any
    onto: Any
    gate: Any


class Steady(NamedTuple):
    """One decay a head for every step.

    Attributes:
        log: (1, Hk, g, 1), or (1, 1, 1, 1) for all heads.
        learnt: whether it came as an array, whose gradient is of use.
    """

    log: Any
    learnt: bool = True

    def part(self, start: int, stop: int) -> Steady:
        """The decays of some of the steps."""
        return self

    def factors(self, lane: Lane, N: int, n: int) -> Factors:
        """The factors of every chunk of n steps."""
        xp = lane.xp
        log = xp.maximum(self.log, xp.full_like(self.log, LEAST))
        apart, i = self._steps(lane, n)
        return Factors(
            xp.exp(apart * log[..., None, None]),
            xp.exp((i + 1) * log[..., None]),
            xp.exp((n - 1 - i) * log[..., None]),
            xp.exp(n * log),
        )

    def gradient(self, lane: Lane, d: Factors) -> Any:
        """The gradient of `log`, from those of the exponents."""
        xp, n = lane.xp, d.into.shape[-1]
        apart, i = self._steps(lane, n)
        total = xp.sum(apart * d.weights, axis=(-2, -1)) + n * d.gate
        total = total + xp.sum((i + 1) * d.into + (n - 1 - i) * d.onto, axis=-1)
        return reduce_to(xp, total, self.log.shape)

    def _steps(self, lane: Lane, n: int) -> tuple[Any, Any]:
        """How far i lies after j, (n, n), and the steps i, (n,)."""
        xp = lane.xp
        i = xp.astype(lane.arange(0, n, like=self.log), self.log.dtype)
        return xp.tril(i[:, None] - i[None, :]), i


class Varying(NamedTuple):
    """A decay for each step.

    Attributes:
        log: (B, Hk, g, L).
        learnt: as in `Steady`.
    """

    log: Any
    learnt: bool = True

    def part(self, start: int, stop: int) -> Varying:
        """The decays of some of the steps."""
        return Varying(self.log[..., start:stop])

    def factors(self, lane: Lane, N: int, n: int) -> Factors:
        """The factors of N chunks of n steps."""
        xp = lane.xp
        log = xp.reshape(self.log, (*self.log.shape[:-1], N, n))
        spread = xp.broadcast_to(log[..., None], (*log.shape, n))
        spans = running_sum(xp, xp.tril(spread, k=-1), axis=-2)
        into = xp.exp(running_sum(xp, log, axis=-1))
        return Factors(xp.exp(spans), into, xp.exp(spans[..., -1, :]), into[..., -1])

    def gradient(self, lane: Lane, d: Factors) -> Any:
        """The gradient of `log`, from those of the exponents."""
        xp = lane.xp
        later = _reverse_sum(xp, d.weights, axis=-2)
        grad = xp.sum(xp.tril(later, k=-1), axis=-1)
        grad = grad + _reverse_sum(xp, d.into, axis=-1) + d.gate[..., None]
        grad = grad + running_sum(xp, d.onto, axis=-1) - d.onto
        return xp.reshape(grad, self.log.shape)


def running_sum(xp: Any, x: Any, axis: int) -> Any:
    """The sums of the entries up to each.

    Libraries had `cumsum` before the standard had `cumulative_sum`, for which array-api-compat
    looks up a namespace by type; a compiler that reads Python cannot follow it there.
    """
    short = getattr(xp, "cumsum", None)
    return xp.cumulative_sum(x, axis=axis) if short is None else short(x, axis=axis)


def _reverse_sum(xp: Any, x: Any, axis: int) -> Any:
    """Entry t becomes the sum of the entries from t on."""
    return xp.flip(running_sum(xp, xp.flip(x, axis=axis), axis=axis), axis=axis)


def reduce_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes that were broadcast from size 1."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return xp.sum(x, axis=axes, keepdims=True) if axes else x
