"""The peak of a call's memory is what the call itself adds, once."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from attnx_conformance import resident

MB = 1_000_000


def _work() -> None:
    """Hold 64 MB at once."""
    first = np.ones(4 * MB)
    second = first + 1.0
    del first, second


def test_the_peak_of_a_warm_call_is_its_own() -> None:
    """A second run is weighed like the first, though the allocator has the memory already."""
    _work()
    peak, method = resident.peak_above(_work)
    if method == "maxrss":
        pytest.skip("this system cannot reset a process's peak: the figure is a lower limit")
    assert peak is not None
    assert 60 * MB < peak < 90 * MB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sampling_sees_a_peak_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the high-water mark cannot be reset, a thread looks."""
    status, looked = resident._status, threading.Semaphore(0)

    def told(name: str) -> int:
        found = status(name)
        looked.release()
        return found

    def held() -> None:
        block = np.ones(8 * MB)
        while looked.acquire(blocking=False):  # the looks so far may have come before the block
            pass
        looked.acquire(), looked.acquire()  # the first of these may have begun before it
        del block

    monkeypatch.setattr(resident, "_status", told)
    assert 60 * MB < resident._sampled(held) < 90 * MB


@pytest.mark.skipif(sys.platform == "win32", reason="getrusage is POSIX")
def test_the_last_resort_never_exceeds_the_truth_by_much() -> None:
    """`maxrss` grows only by what exceeds the process's all-time peak."""
    _work()
    peak, method = resident._maxrss(_work)
    assert method == "maxrss"
    assert peak is not None
    assert peak < 90 * MB
