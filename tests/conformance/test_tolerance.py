"""The bound neither cries wolf nor sleeps, and the comparator lets no NaN hide anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnx_conformance.cases import CASES, Case, find
from attnx_conformance.judgement import Bound, judge
from attnx_conformance.oracle import Reference, Terms, reference
from attnx_conformance.plain import numpy_dtype, plain
from attnx_conformance.tolerance import MANY, SHARE, Bounds, bounds, more_than_noise, tells

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def expect(case: Case, dtype: str) -> tuple[Reference, Bounds]:
    """The reference of a case, and its bounds."""
    inputs = case.inputs(dtype)
    options = {name: value for name, value in case.options.items() if name != "assume_finite"}
    expected = reference(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, bias=inputs.bias, sinks=inputs.sinks,
        d_out=inputs.d_out, d_lse=inputs.d_lse, **options,
    )  # fmt: skip
    return expected, bounds(expected, dtype)


# Controls: correct kernels that order their sums differently


CONTROLS = (
    "self", "grouped", "causal-65", "softcap", "bias-everything", "sinks", "numbers-peaked",
    "numbers-300-both-ways", "numbers-300-random-signs", "numbers-all-very-negative",
    "numbers-ascending", "numbers-large-mean-values", "numbers-subnormal-values",
    "numbers-uniform-long-equal", "numbers-correlated", "numbers-negative-lse-192",
    "head-size-80", "edge-256x257", "bias-lowest-causal", "gradient-softcap-saturated",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", CONTROLS)
def test_the_plain_computation_is_within_the_bound(name: str, dtype: str) -> None:
    """What anybody's careful kernel gives passes, forward and backward, in every dtype."""
    expected, limits = expect(find(name), dtype)
    for result, array in plain(expected.terms, dtype).items():
        judgement = judge(array, getattr(expected, result), getattr(limits, result))
        assert judgement.ok, (result, judgement.detail)


def blocked(t: Terms, dtype: str, step: int, variant: str) -> tuple[np.ndarray, np.ndarray]:
    """A forward pass over blocks of keys in the accumulator's dtype, with an online softmax."""
    high = np.float64 if dtype == "float64" else np.float32
    q, k, v = (x.astype(high) for x in (t.q, t.k, t.v))
    log2e = high(np.log2(np.e)) if variant == "exp2" else high(1)
    exp = np.exp2 if variant == "exp2" else np.exp
    factor = high(t.scale) * log2e
    if variant == "scaled-queries":
        q, factor = q * factor, high(1)
    starts = range(0, k.shape[2], step)
    top = np.full((*q.shape[:-1], 1), -np.inf, high)
    total, acc = np.zeros_like(top), np.zeros(t.out.shape, high)
    with np.errstate(all="ignore"):
        for start in reversed(starts) if variant == "backwards" else starts:
            keys = slice(start, start + step)
            s = factor * (q @ np.swapaxes(k[:, :, keys], -1, -2))
            s = np.where(t.visible[..., keys], s, high(-np.inf))
            new = np.maximum(top, s.max(axis=-1, keepdims=True))
            shift = np.where(np.isfinite(new), new, 0)
            old = np.where(np.isfinite(top), exp(top - shift), 0)
            P = exp(s - shift)
            total, acc = total * old + P.sum(axis=-1, keepdims=True), acc * old + P @ v[:, :, keys]
            top = new
        lse = np.log(total) + top / log2e
        out = acc / np.where(total > 0, total, 1)
    return out.astype(numpy_dtype(dtype)), lse[..., 0]


@pytest.mark.parametrize("variant", ["plain", "exp2", "scaled-queries", "backwards"])
@pytest.mark.parametrize("step", [1, 64, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "name", ["numbers-ascending", "numbers-peaked-long", "causal-65", "numbers-300-long"]
)
def test_online_softmax_is_within_the_bound(name: str, dtype: str, step: int, variant: str) -> None:
    """Blocks, their order, base 2 and a scale folded into q are not faults."""
    expected, limits = expect(find(name), dtype)
    out, lse = blocked(expected.terms, dtype, step, variant)
    assert judge(out, expected.terms.restore(expected.terms.out), limits.out).ok
    assert judge(lse, expected.lse, limits.lse).ok


@pytest.mark.parametrize("length", [4096, 32768])
def test_a_sequential_sum_of_equal_addends_is_within_the_bound(length: int) -> None:
    """Rounding of equal addends is biased; the bound allows the worst addend, and little more."""
    worst = 0.0
    for score in np.random.default_rng(0).uniform(-3, 3, 40).astype(np.float32):
        q, k = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, length, 1), score)
        expected = reference(q, k, np.ones_like(k), scale=1.0)
        total = np.cumsum(np.exp(k[0, 0, :, 0]), dtype=np.float32)[-1]
        lse = np.log(total).reshape(1, 1, 1)
        judgement = judge(lse, expected.lse, bounds(expected, "float32").lse)
        worst = max(worst, judgement.ratio)
    assert 0.4 < worst < 1.0


# Faults


def with_terms(expected: Reference, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The plain computation on terms that an edit has made wrong."""
    t = expected.terms
    fields = {name: getattr(t, name) for name in t.__dataclass_fields__}
    edit(fields)
    return plain(Terms(**fields), "float32")


def _more(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        fields[name] = fields[name] * factor

    return edit


def _one_key_less(fields: dict[str, Any]) -> None:
    first = np.argmax(fields["visible"], axis=-1)[..., None]
    fields["visible"] = fields["visible"].copy()
    np.put_along_axis(fields["visible"], first, False, axis=-1)


FAULTS = [
    ("scale", _more("scale", 1.01), ("out", "lse", "dq", "dk", "dv")),
    ("softcap", _more("softcap", 1.01), ("out", "lse", "dq", "dk", "dv")),
    ("bias", _more("bias", 1.01), ("out", "lse", "dq", "dk", "dv", "dbias")),
    ("sinks", _more("sinks", 1.01), ("out", "lse", "dsinks")),
    ("values", _more("v", 1.01), ("out", "dq", "dk", "dbias")),
    ("out-cotangent", _more("d_out", 1.01), ("dq", "dk", "dv")),
    ("lse-cotangent", _more("d_lse", 1.01), ("dq", "dk", "dsinks")),
    ("one-key-less", _one_key_less, ("out", "lse", "dq", "dk", "dv", "dbias")),
]


@pytest.mark.parametrize(("name", "edit", "results"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_of_one_per_cent_is_seen_in_float32(
    name: str, edit: Callable[[dict[str, Any]], None], results: tuple[str, ...]
) -> None:
    """One per cent in any operand, or one key of 33, exceeds the bound of all it touches."""
    expected, limits = expect(find("bias-everything"), "float32")
    wrong = with_terms(expected, edit)
    for result in results:
        judgement = judge(wrong[result], getattr(expected, result), getattr(limits, result))
        assert judgement.ratio > 2.0, (result, judgement.detail)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_scale_of_one_over_D_is_seen_in_every_dtype(dtype: str) -> None:
    """The gravest of wrong scales never passes, in the tier of rounded scores either."""
    case = find("correlated")
    inputs = case.inputs(dtype)
    expected = reference(inputs.q, inputs.k, inputs.v)
    wrong = reference(inputs.q, inputs.k, inputs.v, scale=1 / inputs.q.shape[-1])
    for scores in ("float32", "input"):
        limits = bounds(expected, dtype, scores=scores)
        assert not judge(wrong.out.astype(numpy_dtype(dtype)), expected.out, limits.out).ok


def test_what_must_be_exact_has_no_slack() -> None:
    """Rows that see nothing and keys that nothing sees have a bound of 0 (S3.7, S6.4)."""
    expected, limits = expect(find("empty-lengths"), "bfloat16")
    assert not limits.out.limit[0].any()
    assert not limits.lse.limit[0].any()
    assert not limits.dk.limit[0].any()
    assert not limits.dq.limit[0].any()
    almost = np.asarray(expected.out, dtype=np.float32).copy()
    almost[0, 0, 0, 0] = 1e-38
    assert not judge(almost, expected.out, limits.out).ok
    wrong_kind = np.where(np.isneginf(expected.lse), np.nan, expected.lse)
    assert not judge(wrong_kind, expected.lse, limits.lse).ok


# The comparator


def limit(shape: tuple[int, ...], size: float = 1e-3, **more: Any) -> Bound:
    return Bound(np.full(shape, size), np.zeros(shape, dtype=bool), **more)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(0.3, np.nan), (np.nan, 0.3), (np.inf, 0.3), (0.3, -np.inf), (np.nan, 0.0)],
)
def test_non_finite_on_one_side_fails(actual: float, expected: float) -> None:
    """A18: a reference of NaN does not excuse a number, nor the reverse."""
    judgement = judge(np.array([1.0, actual]), np.array([1.0, expected]), limit((2,)))
    assert not judgement.ok
    assert judgement.ratio == np.inf
    assert judgement.where == (1,)
    assert judgement.mismatches == 1


@pytest.mark.parametrize(
    ("actual", "expected"), [(np.nan, np.nan), (np.inf, np.nan), (np.nan, -np.inf)]
)
def test_the_kind_of_a_non_finite_value_may_differ(actual: float, expected: float) -> None:
    """NaN and infinity stand for each other, but not where the bound is 0."""
    assert judge(np.array([actual]), np.array([expected]), limit((1,))).ok
    exact = judge(np.array([actual]), np.array([expected]), limit((1,), 0.0))
    assert exact.ok == (np.isnan(actual) and np.isnan(expected))


def test_overflow_is_accepted_where_the_bound_reaches_it() -> None:
    """65519 may come as infinity in float16, with its sign; 60000 may not."""
    expected, bound = np.array([65519.0]), limit((1,), 8.0, overflow=65520.0)
    assert judge(np.array([np.inf], np.float16), expected, bound).ok
    assert not judge(np.array([-np.inf], np.float16), expected, bound).ok
    assert not judge(np.array([np.inf], np.float16), np.array([60000.0]), bound).ok


def test_either_is_accepted_only_where_theory_leaves_it_open() -> None:
    """An open element may be finite or not; if finite on both sides it is still compared."""
    bound = Bound(np.array([1e-3, 1e-3]), np.array([True, False]))
    assert judge(np.array([np.nan, 1.0]), np.array([1.0, 1.0]), bound).ok
    assert judge(np.array([1.0, 1.0]), np.array([np.nan, 1.0]), bound).ok
    assert not judge(np.array([1.0, np.nan]), np.array([1.0, 1.0]), bound).ok
    assert not judge(np.array([2.0, 1.0]), np.array([1.0, 1.0]), bound).ok


def test_a_judgement_names_the_worst_element() -> None:
    """The ratio, its place and one line for a person."""
    judgement = judge(np.array([[1.0, 2.004]]), np.array([[1.0, 2.0]]), limit((1, 2)))
    assert not judgement.ok
    assert judgement.where == (0, 1)
    assert judgement.ratio == pytest.approx(4.0)
    assert judgement.detail.startswith("at (0, 1): got 2.004, expected 2, bound 0.001, ratio 4")


def test_shapes_must_agree() -> None:
    """Nothing is broadcast; an empty array of the right shape passes."""
    assert not judge(np.zeros((2, 1)), np.zeros((1, 2)), limit((1, 2))).ok
    assert judge(np.zeros((0, 3)), np.zeros((0, 3)), limit((0, 3))).ok


def test_a_bound_that_is_not_a_number_never_passes() -> None:
    """A flaw of the bound itself shows as a failure."""
    assert not judge(np.array([1.1]), np.array([1.0]), limit((1,), np.nan)).ok


# Noise


def test_an_error_in_many_values_is_told_from_noise() -> None:
    """Condition (b), within each bound: too much, or of one sign."""
    truth = np.linspace(1.0, 2.0, 2 * MANY)
    bound = limit(truth.shape)
    signs = np.where(np.arange(truth.size) % 2, 1.0, -1.0)
    for error, told in ((0.9 * signs, "RMS"), (0.19, "error is proportional"), (0.05 * signs, "")):
        found = judge(truth + 1e-3 * error, truth, bound)
        assert found.ok
        assert tells(found)
        wrong = more_than_noise(found, "float64")
        assert wrong.startswith(told)
        assert bool(wrong) == bool(told)


def test_few_values_tell_nothing_however_often_they_stand() -> None:
    truth = np.repeat(np.linspace(1.0, 2.0, MANY - 1), 9)
    found = judge(truth + 0.9e-3, truth, limit(truth.shape))
    assert found.distinct == MANY - 1
    assert more_than_noise(found, "float64") == ""


def test_one_value_in_many_rows_is_no_pattern() -> None:
    """A sink of 200 is one unit off in base 2, in each row of its head; 120 is not off at all."""
    expected, limits = expect(find("sinks-above-all"), "float64")
    log2e = 1 / np.log(2.0)
    wrong = expected.lse * log2e / log2e
    unit = np.spacing(200.0)
    assert (np.abs(wrong - 200.0)[:, :3] == unit).all()
    found = judge(wrong, expected.lse, limits.lse)
    assert found.ok
    assert found.distinct >= MANY
    assert found.rms_ratio > 0.2
    assert found.share > SHARE
    assert more_than_noise(found, "float64") == ""


def test_base_two_moves_a_whole_number_by_one_unit_at_most() -> None:
    """The evidence beside `SHARE`."""
    whole, log2e = np.arange(1.0, 401.0), 1 / np.log(2.0)
    off = np.abs(whole * log2e / log2e - whole) / np.spacing(whole)
    assert off.max() == 1.0
    assert (off > 0).mean() == pytest.approx(0.22, abs=0.005)
    assert (off[119], off[199]) == (0.0, 1.0)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_plain_computation_passes_wherever_everything_is_finite(dtype: str) -> None:
    """No case with finite inputs raises a false alarm, in any result."""
    alarms = []
    for case in CASES:
        if dtype not in case.dtypes:
            continue
        inputs = case.inputs(dtype)
        operands = (inputs.q, inputs.k, inputs.v, inputs.d_out, inputs.bias)
        if not all(x is None or np.isfinite(x.astype(np.float64)).all() for x in operands):
            continue
        expected, limits = expect(case, dtype)
        for result, array in plain(expected.terms, dtype).items():
            judgement = judge(array, getattr(expected, result), getattr(limits, result))
            if not judgement.ok:
                alarms.append((case.name, result, judgement.detail))
    assert not alarms
