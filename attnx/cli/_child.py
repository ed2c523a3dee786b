"""One backend's share of `attnx compare`, in a process of its own.

A process a backend makes its peak memory its own, keeps frameworks from sharing thread pools, and
turns a crash, a segmentation fault included, into a row of the table. The result travels in files,
because a framework may print whatever it likes.

    python -m attnx.cli._child FOLDER BACKEND
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnx
from attnx.cli._exchange import save_arrays
from attnx.cli._records import reason_record
from attnx.cli._request import load_request
from attnx.errors import UnavailableBackend, UnknownBackend, UnsupportedError
from attnx_conformance.resident import peak_above

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from attnx.cli._request import Request
    from attnx.plugin import Lane

__all__ = ["main"]


def main(folder: Path, backend: str) -> None:
    """Run the request in `folder` on `backend`; write `result.json` and `result.safetensors`."""
    target = folder / backend
    try:
        record = run(load_request(folder), backend, target)
    except UnsupportedError as error:
        reasons = [reason_record(reason) for reason in error.reasons]
        record = {"status": "refused", "why": _line(error), "reasons": reasons}
    except (UnavailableBackend, UnknownBackend) as error:
        record = {"status": "unavailable", "why": _line(error)}
    except Exception as error:  # a fault of the backend is a row of the table, whatever its type
        why = f"{type(error).__name__}: {_line(error)}"
        record = {"status": "crashed", "why": why, "log": traceback.format_exc()}
    (target / "result.json").write_text(json.dumps(record), encoding="utf-8")


def run(request: Request, backend: str, target: Path) -> dict[str, Any]:
    """Compute, time and weigh one call; the arrays go to `target`, the figures are returned."""
    lane = attnx.get_backend(backend).lane
    (q, k, v), options = request.call(lambda array: _native(lane, array))
    options["backend"] = backend
    d_out = _native(lane, request.d_out())

    def forward() -> Any:
        return _ready(lane, attnx.attention(q, k, v, return_lse=True, **options))

    def both() -> Any:
        outputs, pullback = attnx.attention_vjp(q, k, v, return_lse=True, **options)
        return _ready(lane, (*outputs, *pullback(d_out)))

    out, lse = forward()
    found = {"out": out, "lse": lse}
    record: dict[str, Any] = {"status": "ran", "no_gradient": None, "forward_backward_s": None}
    try:
        found.update(zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), both(), strict=True))
    except UnsupportedError as error:
        record["no_gradient"] = _line(error)
    gradient = record["no_gradient"] is None
    arrays = {name: lane.to_numpy(a) for name, a in found.items() if a is not None}
    save_arrays(arrays, target / "result.safetensors")
    del out, lse, found, arrays
    record["route"] = attnx.explain(q, k, v, return_lse=True, gradient=gradient, **options).route
    record["forward_s"] = _median(forward, request.repeat)
    if gradient:
        record["forward_backward_s"] = _median(both, request.repeat)
    record["peak_bytes"], record["peak_method"] = peak_above(both if gradient else forward)
    return record


def _native(lane: Lane, array: NDArray[Any]) -> Any:
    """An array of the backend's framework; a framework that would change its dtype is refused."""
    made = lane.from_numpy(array)
    if array.dtype.kind not in "iu" and lane.dtype_name(made) != array.dtype.name:
        hint = "; set JAX_ENABLE_X64=1" if lane.name == "jax" else ""
        raise UnsupportedError(
            f"{lane.name} makes {lane.dtype_name(made)} of the input's {array.dtype.name}{hint}"
        )
    return made


def _ready(lane: Lane, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wait for arrays whose framework computes them later than it returns them."""
    lane.wait(*(array for array in arrays if array is not None))
    return arrays


def _median(work: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
