"""Plain functions, right and wrong, for the tests of the suite; workers import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from attnx_conformance.subject import FunctionSubject

__all__ = [
    "SUBJECT", "aborts", "crashes", "exits", "gives_a_list", "hangs", "ignores_its_mask", "naive",
    "noisy", "raises", "reads", "top_left", "wrong_dtype", "wrong_shape",
]  # fmt: skip


def naive(
    q: Any, k: Any, v: Any, *, causal: Any = False, mask: Any = None, scale: Any = None
) -> Any:
    """Right, apart from what it never heard of: NaN in hidden values, groups, lse."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q @ k.swapaxes(-1, -2)).astype(np.float32) * np.float32(scale)
    Lq, Lk = s.shape[-2:]
    if causal:
        offset = Lk - Lq if causal == "bottom_right" else 0
        s = np.where(np.tri(Lq, Lk, offset, dtype=bool), s, -np.inf)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(axis=-1, keepdims=True)
    return ((p / np.where(total > 0, total, 1)) @ v).astype(q.dtype)


def top_left(q: Any, k: Any, v: Any, *, causal: Any = False, **options: Any) -> Any:
    """Wrong: causal is aligned top-left, whatever is asked."""
    return naive(q, k, v, causal=bool(causal), **options)


def ignores_its_mask(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Wrong."""
    return naive(q, k, v)


def crashes(q: Any, k: Any, v: Any) -> Any:
    """A segmentation fault, for one key alone."""
    if k.shape[-2] == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return naive(q, k, v)


def exits(q: Any, k: Any, v: Any) -> Any:
    """Ends the process."""
    os._exit(7)


def hangs(q: Any, k: Any, v: Any) -> Any:
    """Never comes back, for one key alone."""
    while k.shape[-2] == 1:
        time.sleep(1)
    return naive(q, k, v)


def noisy(q: Any, k: Any, v: Any) -> Any:
    """Prints what looks like an answer."""
    print('{"verdict": "failed", "detail": "printed", "ratios": {}}')
    os.write(1, b'{"verdict": "failed"}\n')
    sys.stderr.write("noise\n")
    return naive(q, k, v)


def reads(q: Any, k: Any, v: Any) -> Any:
    """Looks at its standard input."""
    sys.stdin.read()
    return naive(q, k, v)


def aborts(q: Any, k: Any, v: Any) -> Any:
    """Says why, and ends the process."""
    os.write(2, b"an assertion failed\n")
    os._exit(3)


def raises(q: Any, k: Any, v: Any) -> Any:
    """Has a bug."""
    raise ZeroDivisionError("in the kernel")


def wrong_dtype(q: Any, k: Any, v: Any) -> Any:
    """Gives float64."""
    return naive(q, k, v).astype(np.float64)


def wrong_shape(q: Any, k: Any, v: Any) -> Any:
    """Forgets the last axis."""
    return naive(q, k, v)[..., 0]


def gives_a_list(q: Any, k: Any, v: Any) -> Any:
    """Gives no array."""
    return naive(q, k, v).tolist()


SUBJECT = FunctionSubject(naive, isolation="none")
