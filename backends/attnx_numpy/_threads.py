"""Worker threads over tiles, with NumPy's BLAS on one thread each while they run.

Tiles are small products, and a BLAS that starts its own threads under ours would make each of them
wait for all (2.5 times slower on two cores). The BLAS's count is one number for the whole process
where it is built on pthreads, so users of it are counted under a lock: the first one in saves and
lowers it, the last one out restores it, whatever happens in between. Builds on OpenMP keep a count
for each thread, so every worker lowers its own as well.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import threadpoolctl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Scratch", "run", "threads"]


def threads() -> int:
    """How many threads a call may use: the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


KEPT = 1 << 23
"""Bytes of scratch that a worker leaves for the next call; fresh memory costs as much as a pass."""


class Scratch:
    """One worker's reusable buffers; a tile then allocates nothing."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Any], Any] = {}

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __call__(self, name: str, shape: Sequence[int], dtype: Any) -> Any:
        """An uninitialised array of a shape, from the buffer of that name."""
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name, dtype] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)


class _Blas:
    """NumPy's BLAS libraries, and how many calls keep them on one thread."""

    def __init__(self) -> None:
        found = threadpoolctl.ThreadpoolController().lib_controllers
        blas = [c for c in found if c.user_api == "blas"]
        own = [c for c in blas if "numpy" in (c.filepath or "")]
        self.controllers = own or blas
        self.lock = threading.Lock()
        self.users = 0
        self.saved: list[int | None] = []

    def set(self, controller: Any, count: int) -> None:
        """Set a count even when another thread was the first ever to set one."""
        clear = getattr(controller, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)
        controller.set_num_threads(count)
        if clear is not None:
            clear(force=True)

    @contextmanager
    def single(self) -> Iterator[None]:
        """One BLAS thread while anybody is inside."""
        with self.lock:
            if self.users == 0:
                self.saved = [c.get_num_threads() for c in self.controllers]
                for controller, count in zip(self.controllers, self.saved, strict=True):
                    if count != 1:
                        self.set(controller, 1)
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    for controller, count in zip(self.controllers, self.saved, strict=True):
                        if count not in (1, None):
                            self.set(controller, count)

    def lower_own(self) -> None:
        """In a worker: lower the count of this thread alone, where there is one a thread."""
        for controller in self.controllers:
            if getattr(controller, "threading_layer", None) == "openmp":
                controller.set_num_threads(1)


class _Process:
    """What lives once a process, and must not outlive a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blas: _Blas | None = None
        self.pool: ThreadPoolExecutor | None = None
        self.spare: list[Scratch] = []

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Scratch that nobody else has until the end."""
        try:
            taken = self.spare.pop()
        except IndexError:
            taken = Scratch()
        try:
            yield taken
        finally:
            if len(self.spare) < threads() and taken.nbytes <= KEPT:
                self.spare.append(taken)

    def ready(self) -> tuple[_Blas, ThreadPoolExecutor]:
        with self.lock:
            if self.blas is None:
                self.blas = _Blas()
            if self.pool is None:
                blas = self.blas
                self.pool = ThreadPoolExecutor(
                    max(1, threads() - 1), "attnx", initializer=blas.lower_own
                )
            return self.blas, self.pool


_process = _Process()


def _after_fork() -> None:
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(job: Callable[[Any, Scratch], None], jobs: Iterable[Any], count: int) -> None:
    """Run `job(item, scratch)` for every item on up to `count` threads, this one included.

    Items are taken in order. The first exception stops the rest and is raised here. Workers that
    are busy with another call are not waited for: this thread then does their share.
    """
    items = iter(jobs)
    if count <= 1:
        with np.errstate(all="ignore"), _process.scratch() as scratch:
            for item in items:
                job(item, scratch)
        return
    blas, pool = _process.ready()
    queue = _Queue(items)
    with blas.single():
        helpers = [pool.submit(_work, job, queue) for _ in range(count - 1)]
        try:
            _work(job, queue)
        finally:
            queue.stop()
            started = [helper for helper in helpers if not helper.cancel()]
            failures = [f for f in (helper.exception() for helper in started) if f is not None]
        for failure in failures:
            raise failure


class _Queue:
    """Items handed out one by one to several threads."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._open = True

    def take(self) -> tuple[Any, ...]:
        """The next item in a tuple, or an empty one."""
        with self._lock:
            if not self._open:
                return ()
            for item in self._items:
                return (item,)
            return ()

    def stop(self) -> None:
        with self._lock:
            self._open = False


def _work(job: Callable[[Any, Scratch], None], queue: _Queue) -> None:
    try:  # each thread has an errstate of its own
        with np.errstate(all="ignore"), _process.scratch() as scratch:
            while taken := queue.take():
                job(taken[0], scratch)
    except BaseException:
        queue.stop()
        raise
