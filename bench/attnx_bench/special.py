"""What is no workload: the overhead of a call, the import, and several callers at once."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import attnx
from attnx.plugin import Call

from .timing import interleaved

__all__ = ["Overhead", "concurrent", "imports", "overhead"]


class Overhead(NamedTuple):
    """µs at (1, 2, 4, 8), float32, `assume_finite=True`; the tenth percentile and the median.

    Attributes:
        kernel: the kernel called directly.
        call: what a call takes beyond it.
        look: what the look for NaN takes beyond that.
    """

    kernel: tuple[float, float]
    call: tuple[float, float]
    look: tuple[float, float]


def overhead(backend: str, rounds: int = 400) -> Overhead:
    """What a call takes beyond its kernel called directly; of JAX, both compiled."""
    operands = np.random.default_rng(0).standard_normal((3, 1, 2, 4, 8), dtype=np.float32)
    q, k, v = (attnx.get_backend(backend).lane.from_numpy(x) for x in operands)
    runs = _jax(q, k, v) if backend == "jax" else _eager(backend, q, k, v)
    with _one_thread(backend):
        took = _in_turn(runs, rounds)
    kernel, call, look = (took[name] for name in ("kernel", "call", "look"))
    return Overhead(kernel, _less(call, kernel), _less(look, call))


def _less(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] - b[0], a[1] - b[1]


def _eager(backend: str, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    attention = attnx.attention
    kernel = _sdpa(q, k, v) if backend == "torch" else _numpy_kernel(q, k, v)
    # Lambdas: a `partial` with keywords costs 1.5 µs more than the call written out.
    return {
        "kernel": kernel,
        "call": lambda: attention(q, k, v, assume_finite=True),
        "look": lambda: attention(q, k, v),
    }


def _sdpa(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import torch.nn.functional as F

    sdpa = F.scaled_dot_product_attention
    return lambda: sdpa(q, k, v)


def _numpy_kernel(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """The function that a plain call of these shapes ends in."""
    cls = attnx.explain(q, k, v, backend="numpy", assume_finite=True).call
    direct = attnx.get_backend("numpy").direct(cls)
    if direct is None:
        raise RuntimeError("the NumPy backend has no shortcut for a plain call")
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return lambda: direct(q, k, v, None, scores)


def _jax(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Inside jit nothing of attnx is left but the program; its kernel alone is jitted likewise."""
    import jax

    backend = attnx.get_backend("jax")
    cls = attnx.explain(q, k, v, backend="jax", assume_finite=True).call
    (B, Hq, Lq, D), (_, Hk, Lk, Dv) = q.shape, v.shape
    record = Call(cls, B, Hq, Hk, Lq, Lk, D, Dv, 1.0 / float(D) ** 0.5)
    jitted: dict[str, Callable[..., Any]] = {
        "kernel": jax.jit(lambda q, k, v: backend.forward(q, k, v, record)[0]),
        "call": jax.jit(partial(attnx.attention, assume_finite=True)),
        "look": jax.jit(attnx.attention),
    }
    return {name: partial(_waited, run, q, k, v) for name, run in jitted.items()}


def _waited(run: Callable[..., Any], *arrays: Any) -> None:
    run(*arrays).block_until_ready()


class _one_thread:
    """PyTorch on one thread: waking a second takes as long as the kernel, or twice as long."""

    def __init__(self, backend: str) -> None:
        self.backend, self.before = backend, 0

    def __enter__(self) -> None:
        if self.backend == "torch":
            import torch

            self.before = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self.backend == "torch":
            import torch

            torch.set_num_threads(self.before)


def _in_turn(
    runs: Mapping[str, Callable[[], Any]], rounds: int, count: int = 300
) -> dict[str, tuple[float, float]]:
    """µs a call of each: the tenth percentile and the median of many short rounds."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(count):
                run()
            taken[name].append((time.perf_counter() - start) / count * 1e6)
    return {
        name: (statistics.quantiles(values, n=10)[0], statistics.median(values))
        for name, values in taken.items()
    }


def imports() -> float:
    """Milliseconds of `import attnx` over bare Python, the median of many processes."""
    with tempfile.TemporaryDirectory() as cache:
        # An installed package has its bytecode; a checkout may forbid writing it.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        taken: dict[str, list[float]] = {"pass": [], "import attnx": []}
        for turn in range(32):
            for code, values in taken.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], check=True, env=env)
                if turn:  # the first one writes the bytecode
                    values.append(time.perf_counter() - start)
    bare, attnx_too = (statistics.median(values) for values in taken.values())
    return (attnx_too - bare) * 1e3


def concurrent(backend: str, callers: int = 4, N: int = 1024) -> float:
    """How much longer a call takes with several callers at once, by the time of one caller.

    As many calls are made in both: four callers who share two cores as well as one uses them both
    take 1.0.
    """
    operands = np.random.default_rng(0).standard_normal((3, 1, 8, N, 64), dtype=np.float32)
    lane = attnx.get_backend(backend).lane
    q, k, v = (lane.from_numpy(x) for x in operands)

    def call() -> None:
        lane.wait(attnx.attention(q, k, v))

    def one() -> None:
        for _ in range(callers):
            call()

    def many() -> None:
        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    took = interleaved({"one": one, "many": many}, budget=10.0)
    return took["many"].seconds / took["one"].seconds
