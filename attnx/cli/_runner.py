"""Start one child process a backend and turn whatever becomes of it into a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnx.cli._exchange import load_arrays

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from attnx import BackendInfo

__all__ = ["Row", "run_backend"]


@dataclass
class Row:
    """One backend's line in the table of `attnx compare`.

    Attributes:
        status: "ran" until it is judged, then "agrees" or "disagrees"; or "refused" (it cannot do
            this call), "unavailable" (it cannot run here), "crashed".
        errors: the worst error of each result, as a multiple of its bound.
        details: for each result, where that is and what was expected.
        why: for a backend that did not run, or ran in part, or disagrees.
        log: after a crash, the traceback or what the process wrote last.
    """

    backend: str
    version: str | None = None
    status: str = "ran"
    route: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    forward_s: float | None = None
    forward_backward_s: float | None = None
    peak_bytes: int | None = None
    peak_method: str | None = None
    why: str | None = None
    reasons: list[dict[str, Any]] = field(default_factory=list)
    log: str | None = None


def run_backend(
    info: BackendInfo, folder: Path, timeout: float, *, wide: bool = False
) -> tuple[Row, dict[str, NDArray[Any]]]:
    """Run the request saved in `folder` on one backend; the row, and the arrays it computed.

    Args:
        info: the backend.
        folder: where the request lies.
        timeout: seconds until the child is ended.
        wide: whether the arrays are float64.
    """
    row = Row(info.name, info.version)
    if info.status != "available":
        row.status, row.why = "unavailable", info.reason or info.status
        return row, {}
    target = folder / info.name
    target.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", "attnx.cli._child", folder, info.name],
            env=_environment(wide),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        row.status, row.why = "crashed", f"no answer within {timeout:g} s"
        return row, {}
    return _read(row, target, done)


def _environment(wide: bool) -> dict[str, str]:
    """The parent's environment and import path; the backend is named, so no variable chooses it.

    JAX must be told of float64 before it starts, and nobody but this function starts the child.
    """
    told = {"JAX_ENABLE_X64": "1"} if wide else {}
    inherited = {name: text for name, text in os.environ.items() if name != "ATTNX_BACKEND"}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**told, **inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _read(
    row: Row, target: Path, done: subprocess.CompletedProcess[bytes]
) -> tuple[Row, dict[str, NDArray[Any]]]:
    try:
        record = json.loads((target / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        row.status, row.why = "crashed", _last_words(done)
        row.log = done.stderr.decode("utf-8", errors="replace")[-4000:]
        return row, {}
    row.status, row.why = record["status"], record.get("why")
    row.reasons, row.log = record.get("reasons", []), record.get("log")
    if row.status != "ran":
        return row, {}
    for name in ("route", "forward_s", "forward_backward_s", "peak_bytes", "peak_method"):
        setattr(row, name, record[name])
    if record["no_gradient"]:
        row.why = f"no gradients: {record['no_gradient']}"
    return row, load_arrays(target / "result.safetensors")[0]


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a process left no result: its signal, or the last line that it wrote."""
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return f"the process died of {name}"
    lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no message"
    return f"the process ended with status {done.returncode}: {last}"
