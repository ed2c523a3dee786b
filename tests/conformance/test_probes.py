"""Probes pass on the backends that are here, and on plain functions that are right."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnx_conformance.cases import CASES, DTYPES
from attnx_conformance.oracle import reference
from attnx_conformance.outside import OUTSIDE
from attnx_conformance.probes import PROBES, Probe, examine_probe, find
from attnx_conformance.subject import FEATURES, BackendSubject, FunctionSubject

LINUX = sys.platform.startswith("linux")
ROWS = """
    A1 A2 A3 A4 A5 A8 A9 A10 A11 A12 A13 A14 A15 A16 A17 A18 A20 A21
    B1 B3 B4 B5 B6 B7 B8 B9 B10 B12 B14 C1 C2 C4 C6 C7 C8 C10 C11 C12 C13 C14 C15 C17 C18
    D1 D2 D3 D4 D5 D6 D7 D8 D10 D11 D12 D13 D14 D15 D16 D17 D19 D21 E1 E2 E3 E5 E6
    F1 F2 F3 F4 F7 F8 F9 F12 G2 G5 G7 G8 G9 G10 G11 G13 H1 H2 H5 I2 I3 I6 I7 I8 J2 J4 J6 J8
    K2 K3 K4 K5 L1 L2 L3 L5 L6 L7 L8 L9 L11 L12 M1 M3 M4 N1 N2 N3 N6 N7 N9 N10 N11 O1 O3 O5 O6
"""


def test_every_known_fault_is_covered_or_said_to_be_outside() -> None:
    """A row stands on a case or a probe, or among those that no call can show; never in both."""
    rows = set(ROWS.split())
    records = (*CASES, *PROBES)
    held = {identity for record in records for identity in record.ids}
    assert rows - held - set(OUTSIDE) == set()
    assert (held | set(OUTSIDE)) - rows == set()
    assert held & set(OUTSIDE) == set()


def test_records_are_well_formed() -> None:
    """Names speak and are unique among cases too; clauses and dtypes are known ones."""
    names = Counter(record.name for record in (*PROBES, *CASES))
    assert max(names.values()) == 1
    for probe in PROBES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", probe.name)
        assert all(re.fullmatch(r"S[1-9](\.\d)?", clause) for clause in probe.clauses)
        assert set(probe.dtypes) <= set(DTYPES)
    assert find("merge-two-parts").name == "merge-two-parts"
    with pytest.raises(KeyError):
        find("no-such-probe")


# Right subjects pass

UNDECLARED = {
    ("repeats-to-the-bit", "torch"), ("hidden-keys-change-no-bit", "torch"),
    ("repeats-to-the-bit", "jax"), ("hidden-keys-change-no-bit", "jax"),
    ("strides-past-31-bits", "jax"), ("differences-of-framework", "numpy"),
    ("scanned-calls", "torch"), ("undeclared-transforms-raise", "torch"),
    ("forward-mode", "jax"), ("second-derivatives", "jax"), ("autocast-of-inputs", "jax"),
}  # fmt: skip
# JAX compiles each call: a sixth of the probes run by default, the others in the sweep.
COMPILED = {
    "rows-of-weights-sum-to-one", "outputs-among-visible-values", "queries-independent",
    "decoding-from-fixed-cache", "merge-peaked-parts", "threads-share-inputs", "refuses-masks",
    "refuses-bias-and-sinks", "compiled-choice", "undeclared-transforms-raise",
}  # fmt: skip
# So do PyTorch's programs.
SLOW = {"compiled-calls", "compiled-gradients"}


def trials() -> Iterator[Any]:
    for backend in ("numpy", "torch", "jax"):
        missing = pytest.mark.skipif(find_spec(backend) is None, reason=f"{backend} is missing")
        for probe in PROBES:
            swept = probe.name not in COMPILED if backend == "jax" else probe.name in SLOW
            marks = [missing, *([pytest.mark.sweep] if swept else [])]
            wanted = (("float32", "bhsd"), ("bfloat16", "bshd"))[: 1 if backend == "jax" else 2]
            for dtype, layout in wanted:
                if dtype not in probe.dtypes and dtype == "bfloat16":
                    continue
                dtype = dtype if dtype in probe.dtypes else probe.dtypes[0]
                name = f"{probe.name}-{backend}-{dtype}"
                yield pytest.param(probe, backend, dtype, layout, marks=marks, id=name)


def wide_types(backend: str, dtype: str) -> AbstractContextManager[Any]:
    """JAX has float64 only where it is asked for."""
    if backend == "jax" and dtype == "float64":
        import jax

        return jax.enable_x64(True)
    return nullcontext()


@pytest.mark.parametrize(("probe", "backend", "dtype", "layout"), list(trials()))
def test_a_backend_has_the_property(probe: Probe, backend: str, dtype: str, layout: str) -> None:
    with wide_types(backend, dtype):
        got = examine_probe(probe, BackendSubject(backend), dtype, layout=layout)
    expected = "passed"
    numpy_alone = backend == "numpy" and probe.profile == "transforms"
    if numpy_alone or (probe.name, backend) in UNDECLARED:
        expected = "not-applicable"
    assert got.verdict == expected, got.detail


def oracle(q: Any, k: Any, v: Any, **options: Any) -> Any:
    options.pop("return_lse"), options.pop("assume_finite", None)
    made = reference(q, k, v, **options)
    return made.out.astype(q.dtype), made.lse.astype(np.float32)


def oracle_subject() -> FunctionSubject:
    """The oracle as a function: exact sums, no NaN that leaks, and the same bits every time."""

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        made = oracle(q, k, v, **options | {"return_lse": True})
        return made if options.get("return_lse") else made[0]

    subject = FunctionSubject(
        attention, dtypes=DTYPES, supports=FEATURES - {"gradients"}, isolation="full"
    )
    subject.capabilities = subject.capabilities._replace(deterministic=True)
    return subject


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_oracle_as_a_function_has_the_property(probe: Probe) -> None:
    """A plain function that is right raises no alarm, and is not asked what it lacks."""
    dtype = "float32" if "float32" in probe.dtypes else probe.dtypes[0]
    got = examine_probe(probe, oracle_subject(), dtype)
    unasked = probe.profile == "system" and not probe.name.startswith(("threads", "repeats", "str"))
    unasked |= probe.profile in ("transforms", "layers", "relatives")
    unasked |= not {"weights", "gradient"}.isdisjoint(probe.needs)
    assert got.verdict == ("not-applicable" if unasked else "passed"), got.detail


# What does not apply is said


def test_what_a_function_lacks_is_not_asked() -> None:
    """A function of no options answers what it can, and no probe crashes on it."""

    def plain(q: Any, k: Any, v: Any) -> Any:
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
        P = np.exp(s - s.max(axis=-1, keepdims=True))
        return (P / P.sum(axis=-1, keepdims=True)) @ v

    subject = FunctionSubject(plain)
    verdicts = {p.name: examine_probe(p, subject, "float32") for p in PROBES}
    assert {o.verdict for o in verdicts.values()} == {"passed", "not-applicable"}
    passed = {name for name, outcome in verdicts.items() if outcome.verdict == "passed"}
    assert passed >= {
        "rows-of-weights-sum-to-one", "tokens-have-no-positions", "batch-entries-independent",
        "heads-independent", "queries-independent", "threads-own-answers", "strides-past-31-bits",
    }  # fmt: skip


def test_a_dtype_or_layout_that_is_not_declared_is_not_asked() -> None:
    subject = FunctionSubject(lambda q, k, v: v, dtypes=("float32",))
    probe = find("tokens-have-no-positions")
    got = examine_probe(probe, subject, "float16")
    assert (got.verdict, got.detail) == ("not-applicable", "not declared: float16")
    got = examine_probe(probe, subject, "float32", layout="bshd")
    assert (got.verdict, got.detail) == ("not-applicable", "not declared: layout bshd")


def test_memory_of_what_another_process_cannot_find_is_not_measured() -> None:
    probe = find("memory-of-forward")
    for spec in ("", "function:no_such_module:attention", "backend:no-such-backend"):
        subject = FunctionSubject(lambda q, k, v: v, spec=spec, supports=("memory",))
        got = examine_probe(probe, subject, "float32")
        assert got.verdict == "not-applicable", got
        assert got.detail.startswith("it cannot be made again in another process")


def test_a_crash_is_no_fault_of_the_property() -> None:
    def breaks(q: Any, k: Any, v: Any) -> Any:
        raise ZeroDivisionError

    got = examine_probe(find("tokens-have-no-positions"), FunctionSubject(breaks), "float32")
    assert got.verdict == "crashed"
    assert "ZeroDivisionError" in got.detail


def test_far_rows_commit_no_memory() -> None:
    """Four gigabytes of addresses, and a few pages of memory."""
    if not LINUX:
        pytest.skip("reads /proc")

    def resident() -> int:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()

    import resource

    before = resident()
    got = examine_probe(find("strides-past-31-bits"), BackendSubject("numpy"), "float16")
    assert got.verdict == "passed", got
    assert resident() - before < 64 << 20
