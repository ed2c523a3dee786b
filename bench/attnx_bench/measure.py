"""The rows of a report: implementations checked on a workload, then timed in turn."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from ._child import ask
from .implementation import Implementation, NotApplicable, Ready
from .report import Cell, Row, cell_of
from .timing import interleaved
from .truth import Truth, error_of, truth
from .workload import Arrays, Workload
from .workloads import find

__all__ = ["OWN_BASELINES", "peak_of", "time_row"]

OWN_BASELINES = {
    "keras on torch": "torch SDPA", "keras on jax": "jax.nn", "keras on numpy": "numpy naive",
}  # fmt: skip
"""By an implementation with a process of its own: what it is timed against there and here."""
OURS = "attnx "
"""How the names of our own backends begin."""


def time_row(
    workload: Workload, implementations: Sequence[Implementation], *, seed: int = 0,
    budget: float = 20.0, own: bool = False, on_cell: Callable[[str], None] = lambda name: None,
) -> Row:  # fmt: skip
    """One workload on some implementations.

    Args:
        workload: what is timed.
        implementations: those asked for.
        seed: of the operands.
        budget: seconds for the rounds in this process.
        own: whether this is the process that an implementation asked for.
        on_cell: called with the name of each implementation before it is first run.
    """
    with _types(workload):
        here = [i for i in implementations if own or not i.process]
        timed, beside = _timed(workload, here, seed, budget, on_cell)
        cells = {cell.implementation: cell for cell in timed}
        for each in implementations:
            if each.name not in cells:
                on_cell(each.name)
                cells[each.name] = _elsewhere(workload, each, cells, seed, budget)
    in_order = tuple(cells[i.name] for i in implementations)
    about = workload.describe()
    return Row(workload.name, workload.title, about, workload.flops, in_order, beside)


def _types(workload: Workload) -> AbstractContextManager[Any]:
    """JAX has float64 only where it is asked for."""
    if workload.dtype != "float64" or find_spec("jax") is None:
        return nullcontext()
    import jax

    wide: AbstractContextManager[Any] = jax.enable_x64(True)
    return wide


def _timed(
    workload: Workload, implementations: Iterable[Implementation], seed: int, budget: float,
    on_cell: Callable[[str], None],
) -> tuple[list[Cell], dict[str, dict[str, float]]]:  # fmt: skip
    """The cells, and the seconds of the workloads that our backends run beside this one."""
    ready: dict[tuple[str, str], Ready] = {}
    cells: dict[str, Cell] = {}
    chosen = list(implementations)
    for name in (workload.name, *workload.beside):
        other = workload if name == workload.name else find(name).with_(dtype=workload.dtype)
        arrays = other.arrays(seed)
        right = truth(other, arrays)
        for each in chosen:
            if other is not workload and not each.name.startswith(OURS):
                continue
            on_cell(each.name)
            cell, made = _checked(other, each, arrays, right)
            if other is workload:
                cells[each.name] = cell
            if made is not None and cell.status == "ran":
                ready[name, each.name] = made
            gc.collect()
    took = interleaved({key: made.run for key, made in ready.items()}, budget=budget)
    beside: dict[str, dict[str, float]] = {}
    for (name, implementation), taken in took.items():
        if name != workload.name:
            beside.setdefault(name, {})[implementation] = taken.seconds
            continue
        cells[implementation] = dataclasses.replace(
            cells[implementation],
            seconds=taken.seconds, spread=taken.spread, rounds=taken.rounds,
        )  # fmt: skip
    return list(cells.values()), beside


def _checked(
    workload: Workload, each: Implementation, arrays: Arrays, right: Truth
) -> tuple[Cell, Ready | None]:
    """What it is worth before it is timed: a cell without a time, and the way to run it."""
    blank = Cell(workload.name, each.name, "ran")
    missing = [name for name in each.requires if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed"
        return dataclasses.replace(blank, status="missing", why=why), None
    try:
        made = each.make(workload, arrays)
        results = made.results(made.run())
        error = error_of(results, right, workload) if made.compared else 0.0
    except NotApplicable as reason:
        return dataclasses.replace(blank, status="not-applicable", why=str(reason)), None
    except Exception as fault:  # a fault of what is measured is a cell of the table
        why = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
        return dataclasses.replace(blank, status="crashed", why=why), None
    if not error <= 1.0:
        why = f"off by {error:.3g} times what is allowed"
        return dataclasses.replace(blank, status="wrong", why=why, error=error, how=made.how), None
    known = error if made.compared else None
    return dataclasses.replace(blank, error=known, how=made.how), made


def _elsewhere(
    workload: Workload, each: Implementation, cells: dict[str, Cell], seed: int, budget: float
) -> Cell:
    """A cell from a process of its own, on the scale of this one by a baseline that both time."""
    blank = Cell(workload.name, each.name, "crashed")
    missing = [name for name in each.requires if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed"
        return dataclasses.replace(blank, status="missing", why=why)
    baseline = OWN_BASELINES[each.name]
    request = {
        "what": "time", "workload": record_of(workload), "seed": seed, "budget": budget / 3,
        "implementations": [each.name, baseline],
    }  # fmt: skip
    try:
        answer = [cell_of(record) for record in ask(request, each.environment)["cells"]]
    except RuntimeError as fault:
        return dataclasses.replace(blank, why=str(fault)[:300])
    found = {cell.implementation: cell for cell in answer}
    cell, there, here = found[each.name], found[baseline].seconds, _seconds(cells, baseline)
    if cell.seconds is None:
        return cell
    if there is None or here is None:
        told = f"{cell.how}; in a process of its own, as timed there"
        return dataclasses.replace(cell, how=told)
    told = f"{cell.how}; in a process of its own, where {baseline} took {there / here:.2f} of here"
    return dataclasses.replace(cell, seconds=cell.seconds * here / there, how=told)


def _seconds(cells: dict[str, Cell], name: str) -> float | None:
    return cells[name].seconds if name in cells else None


def record_of(workload: Workload) -> dict[str, Any]:
    """A workload as plain values, from which another process makes it again."""
    fields = (f.name for f in dataclasses.fields(workload) if f.name != "_memo")
    return {name: getattr(workload, name) for name in fields}


def peak_of(workload: Workload, each: Implementation, seed: int = 0) -> int | None:
    """Peak memory of a run above the operands, in this process, which should be fresh.

    It is the second run: code, compiled programs and thread pools are then there.
    """
    from attnx_conformance.resident import peak_above

    made = each.make(workload, workload.arrays(seed))
    made.run()
    peak, _ = peak_above(made.run)
    return peak
