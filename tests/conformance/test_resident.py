"""The peak of a call's memory is what the call itself adds, once.

Measured in a process of its own: in one that has run a thousand tests, other threads let memory go
and the system takes idle pages back, while a test looks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from attnx_conformance import resident

MB = 1_000_000

PROGRAM = """
import json
import numpy as np
from attnx_conformance import resident

def work():
    first = np.ones(4_000_000)  # 64 MB at once
    second = first + 1.0
    del first, second

work()
print(json.dumps({"peak": resident.peak_above(work), "maxrss": resident._maxrss(work)}))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int | None, str]]:
    """What a fresh process says of a call that holds 64 MB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int | None, str]] = json.loads(done.stdout)
    return found


def test_the_peak_of_a_warm_call_is_its_own(
    measured: dict[str, tuple[int | None, str]],
) -> None:
    """A second run is weighed like the first, though the allocator has the memory already."""
    peak, method = measured["peak"]
    if method == "maxrss":
        pytest.skip("this system cannot reset a process's peak: the figure is a lower limit")
    assert peak is not None
    assert 60 * MB < peak < 90 * MB


@pytest.mark.skipif(sys.platform == "win32", reason="getrusage is POSIX")
def test_the_last_resort_never_exceeds_the_truth_by_much(
    measured: dict[str, tuple[int | None, str]],
) -> None:
    """`maxrss` grows only by what exceeds the process's all-time peak."""
    peak, method = measured["maxrss"]
    assert method == "maxrss"
    assert peak is not None
    assert peak < 90 * MB


def test_sampling_sees_a_peak_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the high-water mark cannot be reset, a thread looks."""
    held, looked = [100], threading.Semaphore(0)

    def status(name: str) -> int:
        assert name == "VmRSS"
        looked.release()
        return held[0]

    def work() -> None:
        for size in (140, 164, 110):
            held[0] = size
            while looked.acquire(blocking=False):  # looks that came before
                pass
            looked.acquire(), looked.acquire()  # the first of these may have begun before

    monkeypatch.setattr(resident, "_status", status)
    assert resident._sampled(work) == 64
