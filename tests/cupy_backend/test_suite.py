"""The suite's cases on the CuPy backend over NumPy, emulated and by the CUDA source."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attnx_conformance.cases import CASES, Case
from attnx_conformance.runner import run
from attnx_cupy._backend import CupyBackend

LONG = re.compile(r"long|[1-9]\d\d|1025|2049|correlated|^many-(?!heads)")
QUICK = [case for case in CASES if not LONG.search(case.name)]


def passes(case: Case, dtype: str, **options: Any) -> None:
    outcome = run(case, "cupy-host", dtype, **options)
    assert outcome.ok, outcome.detail


# The array code is the base class's, which its own tests ask of other thirds.
@pytest.mark.parametrize("case", QUICK[1::3], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds(case: Case, emulated: CupyBackend) -> None:
    passes(case, "float32" if "float32" in case.dtypes else case.dtypes[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("case", QUICK[::14], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds_in_other_dtypes_and_small_tiles(
    case: Case, dtype: str, tiled: CupyBackend
) -> None:
    if dtype in case.dtypes:
        passes(case, dtype, layout="bshd")


@pytest.mark.parametrize("case", QUICK[::12], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds_by_the_cuda_source(case: Case, compiled: CupyBackend) -> None:
    passes(case, "float64" if "float64" in case.dtypes else case.dtypes[0])
    if "float32" in case.dtypes:
        passes(case, "float32")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_holds_in_every_dtype(case: Case, dtype: str, emulated: CupyBackend) -> None:
    if dtype in case.dtypes:
        passes(case, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_holds_by_the_cuda_source(case: Case, compiled: CupyBackend) -> None:
    if "float32" in case.dtypes:
        passes(case, "float32")
