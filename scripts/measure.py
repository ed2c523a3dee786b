"""Measure what docs/performance.md reports: overhead, import, memory and speed.

    python scripts/measure.py [overhead] [import] [memory] [speed]

Everything is measured side by side in one process and interleaved, medians of several; memory is
the peak resident set of a fresh process above its warm baseline (Linux). Run it on an idle machine.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import attnx
from attnx import _attention

ROUNDS = 15
PAUSE = 0.02


def seconds(run: Callable[[], Any], count: int) -> float:
    """Mean seconds a call over `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def interleaved(
    runs: dict[str, Callable[[], Any]], count: int, rounds: int = ROUNDS
) -> dict[str, float]:
    """Median seconds a call of each, taken in turn with the order rotated."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(seconds(runs[name], count))
    return {name: statistics.median(values) for name, values in taken.items()}


def quantiles(
    runs: dict[str, Callable[[], Any]], count: int = 300, rounds: int = 400
) -> dict[str, tuple[float, float]]:
    """µs a call of each, in turn: the median, and the tenth percentile, which neighbours spare."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run, count) * 1e6)
    return {
        name: (statistics.median(values), statistics.quantiles(values, n=10)[0])
        for name, values in taken.items()
    }


def _overhead(attention: Any, direct: Any, F: Any, q: Any, k: Any, v: Any) -> str:
    sdpa = F.scaled_dot_product_attention
    kernels: dict[str, Callable[[], Any]] = {
        "numpy": lambda: direct(q, k, v, None, 32),
        "torch": lambda: sdpa(q, k, v),
    }
    # Lambdas: a `partial` with keywords costs 1.5 µs more than the call written out.
    runs: dict[str, Callable[[], Any]] = {
        "kernel": kernels[type(q).__module__],
        "call": lambda: attention(q, k, v, assume_finite=True),
        "look": lambda: attention(q, k, v),
        "shape": lambda: q.shape,
    }
    took = quantiles(runs)
    lines = []
    for which, name in enumerate(("median", "tenth percentile")):
        kernel, call, look, shape = (took[x][which] for x in ("kernel", "call", "look", "shape"))
        lines.append(
            f"{name}: kernel {kernel:.1f}, overhead {call - kernel:.2f}, the look for NaN "
            f"{look - call:.1f}, one look at a shape {shape:.2f}"
        )
    return "; ".join(lines)


def overhead() -> None:
    """A call less its kernel called directly, at (1, 2, 4, 8), float32."""
    import torch
    import torch.nn.functional as F

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second one takes as long as the kernel, or twice as long
    print("overhead of a call over its kernel, µs, at (1, 2, 4, 8) float32")
    operands = np.random.default_rng(0).standard_normal((3, 1, 2, 4, 8), dtype=np.float32)
    attention = attnx.attention
    for name in ("numpy", "torch"):
        q, k, v = (attnx.get_backend(name).lane.from_numpy(x) for x in operands)
        for _ in range(2):  # the first call plans its class, the second keeps its shapes
            attention(q, k, v, assume_finite=True)
            attention(q, k, v)
        kept = ((x[0], *way) for x in _attention._exact.values() for way in x[3].values())
        direct = next(x[0] for x in kept if x[2].framework == name and x[2].assume_finite)
        print(f"  {name}: {_overhead(attention, direct, F, q, k, v)}")
    torch.set_num_threads(threads)


def imports() -> None:
    """`import attnx` over bare Python."""
    with tempfile.TemporaryDirectory() as cache:
        # An installed package has its bytecode; a checkout may forbid writing it.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        runs = {
            name: partial(subprocess.run, [sys.executable, "-c", code], check=True, env=env)
            for name, code in {"bare": "pass", "attnx": "import attnx"}.items()
        }
        for run in runs.values():
            run()
        took = interleaved(runs, 1, 41)
    print(f"import attnx over bare Python: {(took['attnx'] - took['bare']) * 1e3:.0f} ms")


MEMORY = """
import sys, numpy as np, attnx
name, N = sys.argv[1], int(sys.argv[2])
lane = attnx.get_backend(name).lane
def status(field):
    text = open("/proc/self/status").read()
    return int(text.split(field + ":")[1].split()[0]) / 1024
def run(q, k, v, g):
    out, pullback = attnx.attention_vjp(q, k, v, causal=True)
    grads = pullback(g)
    lane.wait(*grads[:3])
    return lane.to_numpy(grads.q).ravel()[0]
small = [lane.from_numpy(np.ones((1, 1, 2048, 64), np.float32)) for _ in range(4)]
run(*small)
big = np.random.default_rng(0).standard_normal((4, 1, 1, N, 64), dtype=np.float32)
arrays = [lane.from_numpy(x) for x in big]
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
run(*arrays)
print(status("VmHWM") - base)
"""


def memory() -> None:
    """Peak above the inputs at N 32768, one head, causal, forward and backward."""
    N = 32768
    print(f"peak memory above the inputs, N {N}, one head, causal, forward + backward")
    for name in ("numpy", "torch", "jax"):
        command = [sys.executable, "-c", MEMORY, name, str(N)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"  {name}: {peak:.0f} MB (the score matrix alone: {N * N * 4 / 1e6:.0f} MB)")


def finished(run: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Wait for an asynchronous answer."""
    return run(*arrays, **options).block_until_ready()


def after_a_pause(run: Callable[[], Any]) -> Any:
    """Let the threads of the one before stop spinning."""
    time.sleep(PAUSE)
    return run()


def speed() -> None:
    """Times at H8 D64, side by side with each framework's own attention."""
    import jax
    import torch
    import torch.nn.functional as F

    print("ms, B1 H8 D64 float32, forward; ratio is to torch SDPA's speed")
    for N in (256, 1024, 4096):
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, N, 64), dtype=np.float32)
        t = [torch.from_numpy(x) for x in (q, k, v)]
        j = [jax.numpy.asarray(x) for x in (q, k, v)]
        s = [x.swapaxes(1, 2) for x in j]
        peer = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")
        for causal in (False, True):
            runs: dict[str, Callable[[], Any]] = {
                "torch SDPA": partial(F.scaled_dot_product_attention, *t, is_causal=causal),
                "numpy": partial(attnx.attention, q, k, v, causal=causal),
                "torch": partial(attnx.attention, *t, causal=causal),
                "jax": partial(finished, attnx.attention, *j, causal=causal),
                "jax.nn": partial(finished, peer, *s, is_causal=causal),
            }
            for run in runs.values():
                run()
            paused = {name: partial(after_a_pause, run) for name, run in runs.items()}
            took = {n: x - PAUSE for n, x in interleaved(paused, 1, 9 if N < 4096 else 5).items()}
            base = took["torch SDPA"]
            row = ", ".join(f"{n} {x * 1e3:.1f} ({base / x:.2f})" for n, x in took.items())
            print(f"  N {N}{' causal' if causal else ''}: {row}")


if __name__ == "__main__":
    parts = {"overhead": overhead, "import": imports, "memory": memory, "speed": speed}
    chosen = sys.argv[1:] or list(parts)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    for part in chosen:
        parts[part]()
