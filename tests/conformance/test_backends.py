"""The cases on every backend that runs here, and properties found by search.

By default it is the suite's quick sample; of JAX's, which compile, a part. `-m sweep` runs
every case in every dtype, layout and way to gradients.
"""

from __future__ import annotations

import os
import zlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnx import _visibility
from attnx.masks import Causal, Lengths, Prefix, Segments, Starts, Window
from attnx_conformance._worker import wide_types
from attnx_conformance.cases import DTYPES, Case, find
from attnx_conformance.cases._case import Recipe, Shape
from attnx_conformance.cases._edits import poison, scaled, spike
from attnx_conformance.results import Result
from attnx_conformance.runner import examine, run
from attnx_conformance.subject import BackendSubject
from attnx_conformance.suite import Selection, Trial, examine_all, trials

LAYOUTS = ("bhsd", "bshd")
FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax"}
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            find_spec(framework) is None, reason=f"{framework} is not installed"
        ),
    )
    for name, framework in FRAMEWORKS.items()
]


# A search on JAX compiles a kernel an example.
SEARCHED = [
    pytest.param(*p.values, marks=[*p.marks, pytest.mark.sweep]) if p.values == ("jax",) else p
    for p in BACKENDS
]


def ways(backend: str) -> tuple[str, ...]:
    """How a backend's gradients can be asked for."""
    return ("vjp",) if backend == "numpy" else ("vjp", "framework")


def default_selection() -> list[Any]:
    """The quick sample on each backend."""
    chosen = []
    for parameter in BACKENDS:
        backend = str(parameter.values[0])
        if parameter.marks and find_spec(FRAMEWORKS[backend]) is None:
            continue
        for trial in trials(BackendSubject(backend), Selection("quick")):
            pick = zlib.crc32(trial.item.name.encode())
            if trial.item.is_case and (backend != "jax" or (pick >> 20) % 32 == 0):
                name = f"{trial.item.name}-{backend}"
                chosen.append(pytest.param(trial, backend, marks=parameter.marks, id=name))
    return chosen


@pytest.mark.parametrize(("trial", "backend"), default_selection())
def test_case(trial: Trial, backend: str) -> None:
    """A case passes, or is refused as declared."""
    subject = BackendSubject(backend)
    with wide_types(subject, trial.dtype):
        got = trial.item.examine(subject, trial.dtype, trial.layout, trial.way, trial.seed)
    assert got.ok, f"{trial.dtype} {trial.layout} {trial.way}: {got.verdict}: {got.detail}"


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_cases(backend: str, dtype: str) -> None:
    """The whole product: every case, layout and way to gradients, in worker processes."""
    faults: list[str] = []
    subject = BackendSubject(backend)

    def note(result: Result) -> None:
        if not result.ok:
            faults.append(f"{result.command}: {result.detail}")

    planned = trials(subject, Selection("full", dtypes=(dtype,)))
    examine_all(subject, planned, jobs=os.cpu_count() or 1, on_result=note)
    assert not faults, "\n".join(faults)


def test_a_fault_in_the_masks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle does not read attnx's own visibility, so a fault there cannot move both sides."""
    right = _visibility._query_position
    case = find("window-left")
    assert run(case, "numpy", "float32").verdict == "passed"
    monkeypatch.setattr(_visibility, "_query_position", lambda *args: right(*args) + 1)
    assert run(case, "numpy", "float32").verdict == "failed"


# Properties found by search


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    g, Hk = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    Lq = draw(st.integers(1, 40))
    return Shape(
        batch=(draw(st.integers(1, 3)),),
        Hq=g * Hk,
        Hk=Hk,
        Lq=Lq,
        Lk=draw(st.one_of(st.just(Lq), st.integers(1, 40))),
        D=draw(st.integers(1, 9)),
        Dv=draw(st.integers(1, 9)),
    )


@st.composite
def masks(draw: st.DrawFn, shape: Shape) -> Any:
    """A tree of mask objects of depth at most two."""
    B = shape.batch[0]

    def counts(top: int) -> Any:
        return np.array(draw(st.lists(st.integers(0, top), min_size=B, max_size=B)), dtype=np.int64)

    def leaf() -> Any:
        kind = draw(st.integers(0, 6))
        align = draw(st.sampled_from(("top_left", "bottom_right")))
        side = st.one_of(st.none(), st.integers(0, 9))
        if kind == 0:
            return Causal(align)
        if kind == 1:
            return Window(draw(side), draw(side), align)
        if kind == 2:
            return Starts(counts(shape.Lk))
        if kind == 3:
            return Prefix(counts(shape.Lk))
        if kind == 4:
            ids = st.integers(-1, 2)
            q_ids = draw(st.lists(ids, min_size=shape.Lq, max_size=shape.Lq))
            kv_ids = draw(st.lists(ids, min_size=shape.Lk, max_size=shape.Lk))
            return Segments(np.array(q_ids), np.array(kv_ids))
        if kind == 5:
            return ~Prefix(counts(shape.Lk))
        return Causal(align) | Prefix(counts(shape.Lk))

    tree = leaf()
    for _ in range(draw(st.integers(0, 2))):
        tree = tree & leaf() if draw(st.booleans()) else tree | leaf()
    return tree & Lengths(counts(shape.Lk)) if draw(st.booleans()) else tree


@st.composite
def searched(draw: st.DrawFn) -> tuple[Case, int]:
    """A case that nobody wrote, and a seed for its numbers."""
    shape = draw(shapes())
    mask = draw(st.one_of(st.none(), masks(shape)))
    bias_axes = draw(st.one_of(st.none(), st.sets(st.integers(0, 3))))
    edits = {
        "none": (), "poison": (poison(),), "spike": (spike(1e4),), "peaked": (scaled(q=12.0),),
    }[draw(st.sampled_from(("none", "poison", "spike", "peaked")))]  # fmt: skip

    def bias(ctx: Any) -> Any:
        full = ctx.shape.grid.full
        return ctx.normal(*(1 if axis in bias_axes else n for axis, n in enumerate(full)))

    inputs = Recipe(
        shape, mask=mask, bias=None if bias_axes is None else bias, sinks=draw(st.booleans()),
        d_lse=draw(st.booleans()), edits=edits,
    )  # fmt: skip
    options = {
        "scale": draw(st.sampled_from((None, None, 0.5, -0.5, 0.0))),
        "softcap": draw(st.sampled_from((None, None, 2.0))),
    }
    case = Case("searched", ("S1", "S2", "S3"), "masks", inputs, options)
    return case, draw(st.integers(0, 1 << 16))


@pytest.mark.parametrize("backend", SEARCHED)
@given(found=searched(), pick=st.integers(0, 1 << 10))
def test_searched_calls(backend: str, found: tuple[Case, int], pick: int) -> None:
    """Any mix of shape, mask, bias, sinks, scale and cap agrees with the oracle."""
    case, seed = found
    dtype, layout = DTYPES[pick % 4], LAYOUTS[(pick >> 2) % 2]
    way = ways(backend)[(pick >> 3) % len(ways(backend))]
    subject = BackendSubject(backend)
    with wide_types(subject, dtype):
        got = examine(case, subject, dtype, seed=seed, layout=layout, gradients=way)
    assert got.ok, f"{dtype} {layout} {way}: {got.verdict}: {got.detail}"
