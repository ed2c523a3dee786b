"""Worker processes: a segmentation fault, an endless loop or an exit is a verdict on one case.

Each worker is asked for one trial at a time, by a line on its standard input, and answers by a line
on a pipe of its own: what the code under examination prints cannot be taken for an answer. When a
worker dies or is silent too long, the trial that it had gets the verdict, and another takes its
place.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from attnx.errors import UnavailableBackend

from .results import Result

__all__ = ["Pool", "Task", "result_of"]

START = 300.0
"""Seconds that a worker may take to import its framework."""
LEAVE = 10.0
"""Seconds that it may take to end by itself."""
TOUR = 200
"""Trials after which another takes its place: programs that were compiled stay mapped into memory.
A trial on JAX adds some 150 maps, and Linux allows a process 65,530 of them by default.
"""


class Task(NamedTuple):
    """A trial by its names, and what its result has to carry."""

    case: str
    dtype: str
    layout: str
    way: str | None
    seed: int
    profile: str
    clauses: tuple[str, ...]
    ids: tuple[str, ...]


class Pool:
    """Runs tasks on one subject.

    Attributes:
        route: what the workers' witnesses saw: `{"calls": {...}, "ledger": {...}}`; of a worker
            that crashed or was stopped, up to its last answer.
    """

    def __init__(self, spec: str, target: str, jobs: int, timeout: float) -> None:
        self.target = target
        self.spec, self.jobs, self.timeout = spec, max(1, jobs), timeout
        self._calls: Counter[str] = Counter()
        self._ledger: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def route(self) -> dict[str, Any]:
        """The witnesses' notes, joined."""
        if not self._calls:
            return {}
        ledger = {axis: sorted(values) for axis, values in sorted(self._ledger.items())}
        return {"calls": dict(self._calls), "ledger": ledger}

    def run(self, tasks: Sequence[Task], subject: str) -> Generator[Result]:
        """Results as they come. Leaving the loop early, or an interrupt, ends every worker."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        jobs = min(self.jobs, len(tasks))
        shared = tempfile.TemporaryDirectory()
        environment = _environment(self.jobs, shared.name)
        threads = [
            threading.Thread(
                target=self._serve, args=(waiting, done, subject, environment), daemon=True
            )
            for _ in range(jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            while jobs:
                made = done.get()
                if made is None:
                    jobs -= 1
                elif isinstance(made, BaseException):
                    raise made
                else:
                    yield made
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            shared.cleanup()

    def _serve(self, waiting: Any, done: Any, subject: str, environment: dict[str, str]) -> None:
        worker: _Worker | None = None
        try:
            while not self._stop.is_set():
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    break
                if worker is None:
                    worker = _Worker(self.spec, environment, self._stop)
                answer = worker.ask(task, self.timeout)
                done.put(result_of(task, subject, self.target, answer))
                if worker.alive and worker.asked >= TOUR:
                    worker.finish()
                    worker.kill()
                if not worker.alive:
                    self._note(worker.route)
                    worker = None
            if worker is not None:
                worker.finish()
        except BaseException as error:
            done.put(error)
        finally:
            if worker is not None:
                self._note(worker.route)
                worker.kill()
            done.put(None)

    def _note(self, route: dict[str, Any]) -> None:
        with self._lock:
            self._calls.update(route.get("calls", {}))
            for axis, values in route.get("ledger", {}).items():
                self._ledger[axis].update(values)


def _environment(jobs: int, shared: str) -> dict[str, str]:
    """The caller's, with its cores shared out: OpenMP's threads spin, and would starve each other.

    A program that JAX compiled for one worker serves the others too; where the caller keeps such
    programs in a folder of his own, a second run compiles none. What the caller has chosen stays.
    """
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    return {
        "OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share,
        "JAX_COMPILATION_CACHE_DIR": shared,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
    }  # fmt: skip


def result_of(task: Task, subject: str, target: str, answer: dict[str, Any]) -> Result:
    """What a trial showed: its names, and the answer of `_worker.trial`."""
    return Result(
        subject=subject, case=task.case, profile=task.profile, clauses=task.clauses, ids=task.ids,
        dtype=task.dtype, layout=task.layout, way=task.way, seed=task.seed,
        verdict=answer["verdict"], detail=answer["detail"], ratios=answer.get("ratios", {}),
        seconds=answer.get("seconds", 0.0), target=target,
    )  # fmt: skip


class _Worker:
    """One process and the pipe on which it answers."""

    def __init__(self, spec: str, environment: dict[str, str], stop: threading.Event) -> None:
        self._stop = stop
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "attnx_conformance._worker", spec, str(write)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors,
                pass_fds=(write,), start_new_session=True, env=environment,
            )  # fmt: skip
        finally:
            os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._buffer, self._closed = b"", False
        self.alive = True
        self.asked = 0
        self.route: dict[str, Any] = {}
        ready = self._line(START)
        if ready is None:
            told = self._last_words() if self._closed else f"silent for {START:g} s"
            self.kill()
            raise UnavailableBackend(f"{spec}: a worker did not start: {told}")
        if "error" in ready:
            self.kill()
            raise UnavailableBackend(f"{spec}: {ready['error']}")

    def ask(self, task: Task, timeout: float) -> dict[str, Any]:
        """The answer to one task; a verdict of its own where there is none."""
        start = time.perf_counter()
        self.asked += 1
        try:
            self._send({"task": task[:5]})
            answer = self._line(timeout)
        except BrokenPipeError:
            answer, self._closed = None, True
        if answer is not None:
            self.route = answer.pop("route", {})
            return answer
        detail = self._last_words() if self._closed else f"no answer in {timeout:g} s"
        self.kill()
        seconds = time.perf_counter() - start
        return {"verdict": "crashed", "detail": detail, "seconds": seconds}

    def finish(self) -> None:
        """Let the process end by itself, so that what it does at its exit is done."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._send({"finish": True})
            self._process.wait(LEAVE)

    def kill(self) -> None:
        """End the process and whatever it started."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._selector.close()
        self._answers.close()
        self._errors.close()

    def _send(self, message: dict[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise BrokenPipeError
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()

    def _line(self, timeout: float) -> dict[str, Any] | None:
        """The next line, or None when the process ended, hung, or the run is being stopped."""
        until = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or self._stop.is_set():
                return None
            if self._selector.select(min(left, 0.5)):
                chunk = self._answers.read(1 << 16)
                if not chunk:
                    self._closed = True
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        made: dict[str, Any] = json.loads(line)
        return made

    def _last_words(self) -> str:
        code = self._process.wait()
        if code >= 0:
            told = f"the process ended with status {code}"
        else:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = str(-code)
            told = f"the process was killed by {name}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return "\n".join([told, *last])
