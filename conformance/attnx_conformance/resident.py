"""Peak resident memory of one call, above what the warm process already holds.

The baseline is taken after a warm-up on the same call, so that code, compiled kernels and thread
pools are not counted; what the allocator kept from the warm-up is first given back to the system,
or the second run would reuse it unseen and appear to cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["peak_above"]

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # glibc's mallopt: blocks above this go back to the system when freed


def peak_above(work: Callable[[], object]) -> tuple[int | None, str]:
    """Return the peak in bytes that `work` adds to the resident set, and how it was measured.

    The methods: `"VmHWM"` (the kernel's own high-water mark, reset before the run), `"sampled"`
    (a thread that looks every half millisecond and can miss a short peak), `"maxrss"` (the growth
    of the process's all-time peak, so a lower limit after a warm-up).
    """
    _release()
    if _reset_high_water():
        before = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before), "VmHWM"
    if STATUS.exists():
        return _sampled(work), "sampled"
    return _maxrss(work)


def _release() -> None:
    """Return freed memory to the system; only glibc needs (and offers) it."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # musl has neither function
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
        libc.malloc_trim(0)


def _reset_high_water() -> bool:
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:  # not Linux, or a sandbox that does not let a process reset its mark
        return False
    return 0 < _status("VmHWM") <= _status("VmRSS") + (1 << 20)


def _status(name: str) -> int:
    for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _sampled(work: Callable[[], object]) -> int:
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


def _maxrss(work: Callable[[], object]) -> tuple[int | None, str]:
    if sys.platform == "win32":
        work()
        return None, "not measured on this system"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit, "maxrss"
