"""Keras, which fixes its backend when it is imported: one process for each.

`keras.ops.dot_product_attention` has no attention of its own: on PyTorch it calls SDPA, on JAX
`jax.nn.dot_product_attention`, and on NumPy it is the formula.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.workload import Arrays, Workload

from . import _jax, _torch
from ._shared import named, refuse, refuse_float64, refuse_scores, spelled, to_bshd

__all__ = ["IMPLEMENTATIONS"]


def make(backend: str, workload: Workload, arrays: Arrays) -> Ready:
    """The operation on one backend, in its own layout BTNH."""
    attend = _operation(backend)
    refuse(workload, softcap="has no softcap on a CPU", need_lse="returns no lse",
           dropout="has no dropout")  # fmt: skip
    refuse_float64(workload)
    return {"torch": _on_torch, "jax": _on_jax, "numpy": _on_numpy}[backend](
        attend, workload, arrays
    )


def _operation(backend: str) -> Any:
    """The function, once it is sure that this process runs Keras on that backend."""
    if os.environ.get("KERAS_BACKEND") != backend:
        raise NotApplicable(f"needs a process with KERAS_BACKEND={backend}")
    import keras

    if keras.backend.backend() != backend:
        raise NotApplicable(f"Keras runs on {keras.backend.backend()} in this process")
    return keras.ops.dot_product_attention


def _on_torch(attend: Any, workload: Workload, arrays: Arrays) -> Ready:
    """Its PyTorch takes a mask or a bias and not both, so the mask goes into the bias."""
    if workload.Dv != workload.D:
        refuse_scores(workload)  # no fused kernel takes the call, so it holds all scores
    causal, mask, bias = spelled(workload, arrays, apart=False)
    options = {"mask": _torch.tensor(mask), "bias": _torch.tensor(bias), "is_causal": causal}

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return attend(q, k, v, **options), None

    return _torch.ready(workload, arrays, forward, "SDPA", bshd=True)


def _on_jax(attend: Any, workload: Workload, arrays: Arrays) -> Ready:
    if workload.Dv != workload.D:
        raise NotApplicable("takes v of k's shape only")
    refuse_scores(workload)
    causal, mask, bias = spelled(workload, arrays, apart=True)

    def forward(q: Any, k: Any, v: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        return attend(q, k, v, is_causal=causal, **extra), None

    extra = _jax.native({"mask": mask, "bias": bias})
    return _jax.ready(workload, arrays, forward, extra, "jit, jax.nn", bshd=True)


def _on_numpy(attend: Any, workload: Workload, arrays: Arrays) -> Ready:
    refuse(workload, gradient="no gradients on NumPy")
    if workload.Hk not in (1, workload.Hq):
        raise NotApplicable("no grouped heads on NumPy")
    refuse_scores(workload)
    q, k, v = to_bshd(arrays.q), to_bshd(arrays.k), to_bshd(arrays.v)
    causal, mask, bias = spelled(workload, arrays, apart=True)
    options = {"mask": mask, "bias": bias, "is_causal": causal}

    def run() -> tuple[Any, ...]:
        return (attend(q, k, v, **options),)

    return Ready(run, partial(named, bshd=True), "einsum, softmax, einsum")


def _implementation(backend: str) -> Implementation:
    name = f"keras on {backend}"
    return Implementation(
        name,
        partial(make, backend),
        ("keras", backend),
        process=name,
        environment=(("KERAS_BACKEND", backend),),
    )


IMPLEMENTATIONS = tuple(_implementation(backend) for backend in ("torch", "jax", "numpy"))
