"""How much memory calls add to a process of their own: `python -m ... SPEC DTYPE LAYOUT`.

Peaks belong to a process, so they are measured in one that does nothing else. Each call is run once
before it is weighed, so that code, threads and compiled kernels are not counted, and what the
allocator kept from that is given back to the system first, or the second run would seem free.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnx.errors import AttnxError
from attnx_conformance.subject import Subject, resolve

from ._kit import Kit
from .memory import HEADS, LENGTHS, NOT_FOUND, WIDE

__all__ = ["main", "peak_of"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MMAP_THRESHOLD = -3  # glibc's mallopt: blocks above this go back to the system when freed


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that `work` adds at its peak to the resident memory of this process, once warm."""
    work()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # musl has neither function
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, 128 * 1024)
        libc.malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
        before = _status("VmRSS")
        if 0 < _status("VmHWM") <= before + (1 << 20):
            work()
            return max(0, _status("VmHWM") - before)
    return _sampled(work)


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _sampled(work: Callable[[], object]) -> int:
    """Where the high-water mark cannot be reset, a thread looks."""
    before = peak = _status("VmRSS")
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _status("VmRSS"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        work()
        peak = max(peak, _status("VmRSS"))
    finally:
        done.set()
        watcher.join()
    return peak - before


def _works(subject: Subject, dtype: str, layout: str) -> Iterator[tuple[str, Callable[[], object]]]:
    kit = Kit(subject, dtype, np.random.default_rng(0), layout)
    gradients = subject.capabilities.gradient and bool(subject.ways)
    for length in LENGTHS:
        q, k, v = (kit.draw(1, 1, length, 32) for _ in range(3))
        args, given = kit.arguments(q, k, v)
        yield f"forward {length}", _forward(kit, args, given)
        if gradients:
            yield f"backward {length}", _backward(kit, args, given)
    if "dense" in subject.capabilities.masks:
        q, k, v = (kit.draw(1, HEADS, WIDE, 8) for _ in range(3))
        mask = kit.rng.random((WIDE, WIDE)) < 0.5
        args, given = kit.arguments(q, k, v, mask=mask)
        yield "mask", _forward(kit, args, given)


def _forward(kit: Kit, args: Any, given: dict[str, Any]) -> Callable[[], object]:
    def work() -> None:
        kit.lane.wait(kit.subject.attention(args.q, args.k, args.v, **given))

    return work


def _backward(kit: Kit, args: Any, given: dict[str, Any]) -> Callable[[], object]:
    gradient = kit.vjp if kit.subject.ways[0] == "vjp" else kit.own

    def work() -> None:
        made, grads = gradient(args, given)
        kit.lane.wait(made[0], *(x for x in grads.values() if x is not None))

    return work


def main(spec: str, dtype: str, layout: str) -> None:
    """Print the peaks as one line of JSON."""
    try:
        subject = resolve(spec)
    except (AttnxError, ImportError, AttributeError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_FOUND)
    found = {name: peak_of(work) for name, work in _works(subject, dtype, layout)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
