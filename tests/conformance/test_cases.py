"""The cases as a body of data: complete, well formed, and each able to tell something."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from attnx_conformance.cases import CASES, DTYPES, Case, find
from attnx_conformance.cases._case import BASE
from attnx_conformance.oracle import reference

PROFILES = {"forward", "masks", "gradients", "numerics", "system"}
OPTIONS = {"causal", "scale", "softcap", "dropout", "assume_finite"}
CLAUSES = {
    "S1.1", "S1.2", "S1.3", "S1.4", "S1.6", "S2", "S2.1", "S2.2", "S2.3", "S2.4", "S2.7", "S3.1",
    "S3.2", "S3.3", "S3.4", "S3.5", "S3.6", "S3.7", "S4.1", "S4.2", "S4.3", "S4.4", "S5.2", "S5.3",
    "S5.4", "S6.1", "S6.3", "S6.4", "S7", "S9",
}  # fmt: skip


def test_names_are_unique_and_speak() -> None:
    """A name is words joined by hyphens, and finds its case."""
    assert max(Counter(case.name for case in CASES).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", case.name) for case in CASES)
    assert find("causal-600").name == "causal-600"
    with pytest.raises(KeyError):
        find("no-such-case")


def test_every_clause_has_a_case() -> None:
    """Each clause that one call can show stands on at least two cases."""
    counts = Counter(clause for case in CASES for clause in case.clauses)
    assert set(counts) <= CLAUSES | {"S5.1"}
    assert {clause for clause in CLAUSES if counts[clause] < 1} == set()


def test_records_are_well_formed() -> None:
    """Profiles, dtypes and options are of the known ones."""
    for case in CASES:
        assert case.profile in PROFILES, case.name
        assert case.dtypes, case.name
        assert set(case.dtypes) <= set(DTYPES), case.name
        assert set(case.options) <= OPTIONS, case.name
        assert set(case.needs) <= {"isolation"}, case.name


def test_sizes_differ_so_that_nothing_agrees_by_accident() -> None:
    """The base call has no two axes of one size, and three query heads a key head of two."""
    sizes = (*BASE.batch, BASE.Hq, BASE.Lq, BASE.Lk, BASE.D, BASE.Dv)
    assert len(set(sizes)) == len(sizes)
    assert BASE.Hq // BASE.Hk not in (BASE.Hk, 1)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_inputs_are_seeded(case: Case) -> None:
    """The same seed gives the same bytes, in the dtype asked for; another seed other ones."""
    dtype = case.dtypes[0]
    first, again, other = case.inputs(dtype), case.inputs(dtype), case.inputs(dtype, seed=1)
    assert first.q.dtype.name == first.k.dtype.name == first.v.dtype.name == dtype
    for name in ("q", "k", "v", "d_out"):
        assert getattr(first, name).tobytes() == getattr(again, name).tobytes()
    # Where nothing is visible all is poison, and no number is left to differ.
    drawn = [getattr(first, name).astype(np.float64) for name in ("q", "k", "v", "d_out")]
    if any(np.isfinite(array).any() for array in drawn):
        assert any(
            getattr(first, name).tobytes() != getattr(other, name).tobytes()
            for name in ("q", "k", "v", "d_out")
        )


def unseen_by_name(suffix: str) -> list[Case]:
    return [case for case in CASES if case.name.endswith(suffix)]


@pytest.mark.parametrize("case", unseen_by_name("-poison"), ids=lambda case: case.name)
def test_poison_never_shows_in_what_is_expected(case: Case) -> None:
    """Poison lies where nothing sees it: every expected value is finite, or an empty row's lse."""
    inputs = case.inputs("float32")
    expected = reference(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, bias=inputs.bias, d_out=inputs.d_out,
        d_lse=inputs.d_lse, **case.options,
    )  # fmt: skip
    for name in ("out", "weights", "dq", "dk", "dv"):
        assert np.isfinite(getattr(expected, name)).all(), name
    assert not np.isnan(expected.lse).any()


def test_spikes_stand_beside_edges() -> None:
    """A NaN is seen by some rows of its head and hidden from others, in nearly all cases."""
    telling = 0
    cases = [case for case in unseen_by_name("-nan") if "isolation" in case.needs]
    for case in cases:
        inputs = case.inputs("float32")
        options = {k: v for k, v in case.options.items() if k == "causal"}
        expected = reference(inputs.q, inputs.k, inputs.v, mask=inputs.mask, **options)
        bad = np.isnan(expected.out)
        telling += bool(bad.any() and not bad.all())
    assert telling > 0.8 * len(cases)
