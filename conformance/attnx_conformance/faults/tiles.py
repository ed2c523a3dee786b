"""Faults at the edges of tiles, once more with tiles of 128: the size is the kernel's own.

A suite whose cases are all small sees only the tiles that small kernels have.
"""

from __future__ import annotations

from dataclasses import replace

from . import additions, backward, causal, heads, isolation, lengths, masks, softmax
from ._fault import Fault

__all__ = ["FAULTS"]

_AT_EDGES = (
    "softmax-tail-skipped", "softmax-query-tail-skipped", "softmax-tail-twice",
    "softmax-first-tile-twice", "softmax-every-second-tile", "softmax-first-max",
    "softmax-output-not-rescaled", "softmax-sum-not-rescaled", "softmax-nothing-rescaled",
    "softmax-rescale-skipped", "softmax-last-unnormalised", "softmax-mean-of-tiles",
    "softmax-splits-evenly", "softmax-empty-split",
    "causal-skips-by-the-diagonal", "causal-masks-one-tile", "causal-last-tile-lost",
    "mask-first-tile", "predicate-in-its-tile", "window-tile-too-few",
    "bias-first-key-tile", "bias-first-query-tile", "sinks-every-tile",
    "backward-tile-lost", "backward-dq-tile-lost", "backward-dq-overwritten",
    "backward-dk-overwritten", "backward-dv-overwritten", "backward-always-causal",
    "backward-last-rows-lost", "stale-accumulator-rows", "leak-past-256", "leak-past-512",
)  # fmt: skip
_ALL = (additions, backward, causal, heads, isolation, lengths, masks, softmax)


def _wide(fault: Fault) -> Fault:
    change = {**fault.change, "block_q": 128, "block_k": 128}
    return replace(
        fault, name=f"{fault.name}-of-128", what=f"{fault.what} (tiles of 128)", change=change
    )


FAULTS: tuple[Fault, ...] = tuple(
    _wide(fault) for module in _ALL for fault in module.FAULTS if fault.name in _AT_EDGES
)
