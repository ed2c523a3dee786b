"""The scalings that treat fast and slow pairs apart, with a ramp between: YaRN and Llama 3.1's.

A pair that turns often in the original length tells near tokens apart and must stay as it is; one
that never came round may be slowed by the whole factor.
"""

from __future__ import annotations

import math

from attnx._checks import check_integer
from attnx.errors import ArgumentError
from attnx.positions._numbers import real
from attnx.positions._scaling import TAU, Scaling, grown, optional, plain

__all__ = ["Llama3", "Yarn"]


class Yarn(Scaling):
    """YaRN (arXiv 2309.00071): fast pairs as they are, slow ones divided, a ramp between.

    Args:
        factor: as in `Linear`.
        original_length: the length that the model was first taught
            (`original_max_position_embeddings`).
        beta_fast: pairs with more turns than this in `original_length` stay as they are.
        beta_slow: pairs with fewer turns than this are divided by `factor`.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
        mscale: with `mscale_all_dim`, two weights of `log(factor)` whose quotient gives the
            attention factor, as DeepSeek's models have them; both or neither.
        mscale_all_dim: see `mscale`.
        attention_factor: what cos and sin are multiplied with; by default `0.1 log(factor) + 1`,
            or what `mscale` says, which it outranks. The attribute holds the number.

    Raises:
        ArgumentError: a number out of its range, or numbers that contradict each other.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Yarn
        >>> round(Yarn(4, 32768).attention_factor, 4)
        1.1386
    """

    __slots__ = (
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_length",
        "truncate",
    )
    _fields = (
        "factor",
        "original_length",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    )
    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    mscale: float | None
    mscale_all_dim: float | None

    def __init__(
        self,
        factor: float,
        original_length: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
    ) -> None:
        factor = real("Yarn: factor", factor, 1.0)
        fast = real("Yarn: beta_fast", beta_fast, 0.0, above=True)
        slow = real("Yarn: beta_slow", beta_slow, 0.0, above=True)
        if fast < slow:
            raise ArgumentError(
                f"Yarn: expected beta_fast >= beta_slow, got {beta_fast} and {beta_slow}"
            )
        if (mscale is None) != (mscale_all_dim is None):
            raise ArgumentError(
                "Yarn: expected mscale and mscale_all_dim or neither, got one; "
                "alone it would change nothing"
            )
        own = optional("Yarn: mscale", mscale)
        all_dim = optional("Yarn: mscale_all_dim", mscale_all_dim)
        times = optional("Yarn: attention_factor", attention_factor)
        if times is None:
            times = grown(factor, own or 1.0) / (grown(factor, all_dim) if all_dim else 1.0)
        self._set(
            factor=factor,
            original_length=check_integer("Yarn: original_length", original_length, 1),
            beta_fast=fast,
            beta_slow=slow,
            truncate=bool(truncate),
            mscale=own,
            mscale_all_dim=all_dim,
            attention_factor=times,
        )

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        low, high = (
            dim * math.log(self.original_length / (turns * TAU)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
        return tuple(
            [f * (1 - r) + f / self.factor * r for f, r in zip(plain(dim, base), ramp, strict=True)]
        )


class Llama3(Scaling):
    """Llama 3.1's scaling: long waves divided by `factor`, short ones as they are, a ramp between.

    Args:
        factor: as in `Linear`.
        original_length: the length that the model was first taught.
        low_freq_factor: waves longer than `original_length / low_freq_factor` are divided.
        high_freq_factor: waves shorter than `original_length / high_freq_factor` stay.

    Raises:
        ArgumentError: a number out of its range.
        ArgumentTypeError: something that is no number.

    Example:
        >>> from attnx.positions import Llama3
        >>> Llama3(8, 8192).frequencies(128, 500000.0)[0]
        1.0
    """

    __slots__ = ("factor", "high_freq_factor", "low_freq_factor", "original_length")
    _fields = ("factor", "original_length", "low_freq_factor", "high_freq_factor")
    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float

    def __init__(
        self,
        factor: float,
        original_length: int,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
    ) -> None:
        low = real("Llama3: low_freq_factor", low_freq_factor, 0.0, above=True)
        self._set(
            factor=real("Llama3: factor", factor, 1.0),
            original_length=check_integer("Llama3: original_length", original_length, 1),
            low_freq_factor=low,
            high_freq_factor=real("Llama3: high_freq_factor", high_freq_factor, low, above=True),
        )

    def frequencies(self, dim: int, base: float) -> tuple[float, ...]:
        """See `Scaling.frequencies`."""
        low, high = self.low_freq_factor, self.high_freq_factor
        made = []
        for f in plain(dim, base):
            kept = (self.original_length * f / TAU - low) / (high - low)
            kept = min(max(kept, 0.0), 1.0)
            made.append(f * kept + f / self.factor * (1 - kept))
        return tuple(made)
