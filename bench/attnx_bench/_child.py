"""What is measured in a process of its own: a peak of memory, or an implementation that needs it.

    python -m attnx_bench._child < request.json

The answer is the last line of the standard output, behind a mark, because a framework may print
whatever it likes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ask", "main"]

MARK = "attnx-bench:"


def ask(request: Mapping[str, Any], environment: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """The answer to a request from a fresh process.

    Raises:
        RuntimeError: the process ended without one; with its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", "attnx_bench._child"],
        input=json.dumps(request), capture_output=True, text=True, check=False,
        env={**os.environ, **dict(environment)},
    )  # fmt: skip
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    raise RuntimeError(last)


def main() -> None:
    """Answer the request on the standard input."""
    request = json.loads(sys.stdin.read())
    print(MARK + json.dumps(_answer(request)), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from .measure import peak_of, time_row
    from .peers import IMPLEMENTATIONS
    from .report import cell_record
    from .workload import Workload

    workload = Workload(**request["workload"])
    chosen = [i for i in IMPLEMENTATIONS if i.name in request["implementations"]]
    if request["what"] == "peak":
        return {"peak": peak_of(workload, chosen[0], request["seed"])}
    row = time_row(workload, chosen, seed=request["seed"], budget=request["budget"], own=True)
    return {"cells": [cell_record(cell) for cell in row.cells]}


if __name__ == "__main__":
    main()
