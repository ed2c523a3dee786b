"""The machine and the versions beside the figures, and what its cores can do at best."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["about", "exp_time", "sgemm_peak"]

PACKAGES = ("attnx", "numpy", "torch", "jax", "jaxlib", "keras", "onnxruntime", "cupy")
SIDE = 2048


def about(*, peak: bool = True) -> dict[str, Any]:
    """Processor, cores, thread settings, versions and the sgemm peak.

    Args:
        peak: whether to measure what bounds the figures, which takes a second or two.
    """
    found: dict[str, Any] = {
        "cpu": _processor(), "cores": os.cpu_count() or 1, "system": platform.system(),
        "python": platform.python_version(), "threads": _threads(), "versions": _versions(),
    }  # fmt: skip
    if peak:
        found["sgemm_gflops"] = round(sgemm_peak() / 1e9, 1)
        found["exp_ns"] = round(exp_time() * 1e9, 3)
    return found


def sgemm_peak() -> float:
    """Floating-point operations a second of NumPy's product of two large float32 matrices.

    The median of the faster half: a bound that nothing here beats, not what a neighbour left.
    """
    a = np.ones((SIDE, SIDE), np.float32)
    out = np.empty_like(a)
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        np.matmul(a, a, out=out)
        taken.append(time.perf_counter() - start)
    return 2.0 * SIDE**3 / statistics.median(sorted(taken)[:4])


def exp_time() -> float:
    """Seconds that NumPy takes for one float32 exponential, on one core, in its cache.

    Like the peak, the median of the faster half.
    """
    x = np.linspace(-8, 8, 1 << 15, dtype=np.float32)
    out = np.empty_like(x)
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        np.exp(x, out=out)
        taken.append(time.perf_counter() - start)
    return statistics.median(sorted(taken)[:100]) / x.size


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _threads() -> dict[str, str]:
    """The settings of thread pools that the caller has made, and OpenBLAS's own count."""
    from threadpoolctl import threadpool_info

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    found = {name: os.environ[name] for name in names if name in os.environ}
    for pool in threadpool_info():
        found[str(pool["internal_api"])] = str(pool["num_threads"])
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
