"""The implementations that are timed: attnx, and what its users would call without it.

No framework is imported here; each is imported when an implementation makes a workload ready, so
that a process holds only what it times.
"""

from __future__ import annotations

from attnx_bench.implementation import Implementation

from . import _attnx, _jax, _keras, _numpy, _onnxruntime, _torch

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_attnx.IMPLEMENTATIONS,
    *_numpy.IMPLEMENTATIONS,
    *_torch.IMPLEMENTATIONS,
    *_jax.IMPLEMENTATIONS,
    *_keras.IMPLEMENTATIONS,
    *_onnxruntime.IMPLEMENTATIONS,
)
