"""The child's side of a run: one subject, one trial at a time.

Standard output and error belong to the code under examination; answers go through a pipe of their
own, whose number is the second argument.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ._items import find
from .diagnosis import Diagnosis
from .subject import Subject, resolve

__all__ = ["main", "trial", "wide_types"]

_diagnosis = Diagnosis()


def main(arguments: list[str]) -> None:
    """Serve tasks until the parent says to finish, or goes away."""
    spec, number = arguments
    tasks = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the code under examination reads is not what is asked of it
    os.close(nothing)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with tasks, os.fdopen(int(number), "w", encoding="utf-8") as answers:

        def answer(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            subject = resolve(spec)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            return
        with subject.watched() as witness:
            answer({"ready": True})
            for line in tasks:
                message = json.loads(line)
                if "finish" in message:
                    break
                made = trial(subject, witness, *message["task"])
                answer(made if witness is None else made | {"route": witness.notes()})


def _end_with(parent: int) -> None:
    """A worker that hangs must not outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def trial(
    subject: Subject, witness: Any, case: str, dtype: str, layout: str, way: str | None, seed: int,
    diagnosis: Diagnosis = _diagnosis,
) -> dict[str, Any]:  # fmt: skip
    """One trial as a record of plain values."""
    start = time.perf_counter()
    item = find(case, subject)
    before = 0 if witness is None else witness.calls.total()
    with wide_types(subject, dtype):
        try:
            got = item.examine(subject, dtype, layout, way, seed)
            verdict, detail, ratios = got.verdict, got.detail, got.ratios
            detail += diagnosis.line(item.source, got, subject, dtype, layout, seed)
        except Exception:
            verdict, detail, ratios = "crashed", traceback.format_exc(), {}
    reached = witness is None or witness.calls.total() > before
    if verdict == "passed" and item.is_case and not reached:
        verdict = "failed"
        detail = f"nothing reached the backend {subject.name!r}: somebody else did the work"
    return {
        "verdict": verdict, "detail": detail, "ratios": ratios,
        "seconds": round(time.perf_counter() - start, 4),
    }  # fmt: skip


def wide_types(subject: Subject, dtype: str) -> AbstractContextManager[Any]:
    """JAX has float64 only where it is asked for."""
    if subject.lane.name == "jax" and dtype == "float64":
        import jax

        wide: AbstractContextManager[Any] = jax.enable_x64(True)
        return wide
    return nullcontext()


if __name__ == "__main__":
    faulthandler.disable()
    main(sys.argv[1:])
