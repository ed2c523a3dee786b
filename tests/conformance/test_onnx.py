"""ONNX's own cases: on every backend, against the oracle, and against the adapter itself.

A witness is worth something only if it can say no: so wrong translations, wrong kernels and
doctored goldens must each be noticed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from attnx.masks import Lengths
from attnx_conformance import _onnx_call, onnx_cases
from attnx_conformance._onnx_call import translate
from attnx_conformance.onnx_cases import OnnxCase, check
from attnx_conformance.oracle import reference
from attnx_conformance.subject import BackendSubject, FunctionSubject, Subject

ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
EMPTY_ROWS = "test_attention_23_boolmask_fullymasked_row_nan_robustness"
PAST = "test_attention_4d_causal_with_past_and_present"
SCORES = "test_attention_4d_with_qk_matmul_bias"
WEIGHTS = "test_attention_4d_with_qk_matmul_softmax"

needs_onnx = pytest.mark.skipif(find_spec("onnx") is None, reason="onnx is not installed")


def framework(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


def named(name: str) -> OnnxCase:
    return next(case for case in onnx_cases.cases() if case.name == name)


def with_golden(case: OnnxCase, **outputs: Any) -> OnnxCase:
    return replace(case, outputs={**case.outputs, **outputs})


def problems(subject: Subject, cases: tuple[OnnxCase, ...]) -> dict[str, str]:
    outcomes = {case.name: check(case, subject) for case in cases}
    return {n: f"{o.verdict}: {o.detail}" for n, o in outcomes.items() if o.verdict != "passed"}


@needs_onnx
def test_there_are_93_cases_with_names_of_their_own() -> None:
    cases = onnx_cases.cases()
    assert len({case.name for case in cases}) == len(cases) == 93
    assert Counter(case.opset for case in cases) == {23: 69, 24: 13, 25: 11}
    assert sum("qk_matmul_output" in case.outputs for case in cases) == 18
    assert sum("present_key" in case.outputs for case in cases) == 21


@needs_onnx
def test_they_stand_in_every_way_that_onnx_has() -> None:
    """Else a wrong alignment could pass for want of a case."""
    calls = [translate(case) for case in onnx_cases.cases()]
    assert {call.layout for call in calls} == {"bhsd", "bshd"}
    assert {call.options.get("causal") for call in calls} == {None, "top_left", "bottom_right"}
    kinds = {part for call in calls for part in repr(call.options.get("mask")).split(" & ")}
    assert {kind.partition("(")[0] for kind in kinds} == {
        "None", "Causal", "Dense", "Lengths", "Window",
    }  # fmt: skip


@needs_onnx
@pytest.mark.parametrize("backend", ["numpy", pytest.param("torch", marks=framework("torch"))])
def test_every_case_passes(backend: str) -> None:
    assert problems(BackendSubject(backend), onnx_cases.cases()) == {}


@needs_onnx
@framework("jax")
def test_a_few_of_them_pass_on_jax() -> None:
    drawn = tuple(c for c in onnx_cases.cases() if zlib.crc32(c.name.encode()) % 18 == 0)
    assert len(drawn) > 3
    assert problems(BackendSubject("jax"), drawn) == {}


@needs_onnx
@pytest.mark.sweep
@framework("jax")
def test_every_case_passes_on_jax() -> None:
    assert problems(BackendSubject("jax"), onnx_cases.cases()) == {}


@needs_onnx
def test_the_oracle_is_within_eight_roundoffs_of_every_golden() -> None:
    """Without the suite's own bounds, so that neither can excuse the other."""
    off = {}
    for case in onnx_cases.cases():
        out = translate(case).expected().out
        assert out is not None
        golden = case.outputs["Y"].astype(np.float64).reshape(out.shape)
        allowed = 8 * ROUNDOFF[case.inputs["Q"].dtype.name] * np.abs(out)
        if (np.abs(golden - out) > allowed).any() or not np.isfinite(golden).all():
            off[case.name] = float(np.abs(golden - out).max())
    assert off == {}


def always(**stands: Any) -> Callable[..., dict[str, Any]]:
    return lambda case, Lq, Lk, past: stands


def split_by_size(array: Any, heads: int) -> Any:
    B, L, size = array.shape
    return array.reshape(B, L, size // heads, heads).swapaxes(-1, -2)


def joined_behind(past: Any, new: Any, layout: str) -> Any:
    moved = np.swapaxes(past, 1, 2) if layout == "bshd" else past
    return np.concatenate([new, moved], axis=1 if layout == "bshd" else 2)


def padded_as_batch(mask: Any, Lk: int) -> Any:
    return mask[:2, None] if mask.ndim == 3 else PADDED(mask, Lk)


PADDED = _onnx_call._padded

WRONG: dict[str, tuple[str, Any, str]] = {
    "always top-left": ("_alignment", always(align="top_left"), "nonpad"),
    "always bottom-right": ("_alignment", always(align="bottom_right"), "test_attention_4d_causal"),
    "heads split by size": ("_split", split_by_size, "test_attention_3d"),
    "past behind": ("_joined", joined_behind, "with_past"),
    "three axes read as a batch": ("_padded", padded_as_batch, "rank3_head_mask"),
    "lengths one short": ("Lengths", lambda kv: Lengths(kv - 1), "nonpad"),
    "right window dropped": (
        "Window", lambda left, right, **s: _onnx_call.Causal(**s), "bidirectional_window",
    ),
}  # fmt: skip


@needs_onnx
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_translation_parts_golden_and_oracle(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wrong, seen_by = WRONG[fault]
    monkeypatch.setattr(_onnx_call, name, wrong)
    found = problems(BackendSubject("numpy"), onnx_cases.cases())
    assert any(seen_by in case for case in found), found
    assert all(text.startswith(("failed: ", "crashed: ")) for text in found.values())


@pytest.mark.parametrize("kind", [np.bool_, np.float32])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4), (2, 3, 2, 4), (2, 1)])
def test_a_short_mask_hides_the_rest(kind: type, shape: tuple[int, ...]) -> None:
    """No case can tell: each has lengths that hide the same keys."""
    mask = np.ones(shape, kind)
    arrays = {name: np.zeros((2, 3, 2 if name == "Q" else 6, 8), np.float32) for name in "QKV"}
    case = OnnxCase("short", 24, {**arrays, "attn_mask": mask}, {}, {})
    visible = translate(case).expected().visible
    assert visible[..., : shape[-1]].all()
    assert not visible[..., shape[-1] :].any()


@needs_onnx
def test_a_wrong_kernel_is_not_the_oracles_fault() -> None:
    class Unscaled(BackendSubject):
        def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            return super().attention(q, k, v, **{"scale": 1.0, **options})

    outcome = check(named("test_attention_4d"), Unscaled("numpy"))
    assert outcome.verdict == "failed"
    assert outcome.detail.startswith("out at ")
    assert outcome.ratios["out"] > 1


@needs_onnx
def test_a_wrong_golden_is_told_apart_from_a_wrong_kernel() -> None:
    case = named("test_attention_4d")
    wrong = with_golden(case, Y=case.outputs["Y"] * np.float32(1 + 1e-5))
    outcome = check(wrong, BackendSubject("numpy"))
    assert outcome.verdict == "failed"
    assert outcome.detail.startswith("out: ONNX's golden and the oracle part: at ")


@needs_onnx
@pytest.mark.parametrize("value", [np.nan, 0.5])
def test_the_specification_wins_in_rows_that_see_nothing(value: float) -> None:
    """Goldens before onnx 1.23 had NaN there, other kernels the mean of v."""
    case = named(EMPTY_ROWS)
    golden = case.outputs["Y"].copy()
    golden[:, :, ~case.inputs["attn_mask"].any(axis=-1)] = value
    outcome = check(with_golden(case, Y=golden), BackendSubject("numpy"))
    assert outcome.verdict == "passed"
    told = f"out: golden has {value:.3g} in 2 rows that see nothing; attnx gives 0 (S3.7)"
    assert told in outcome.detail


@needs_onnx
def test_the_detail_says_which_of_two_was_the_looser() -> None:
    numpy = BackendSubject("numpy")
    ours = check(named("test_attention_4d"), numpy)
    theirs = check(named("test_attention_4d_fp16"), numpy)
    assert ours.detail.endswith("within the looser of two, our bound")
    assert theirs.detail.endswith("within the looser of two, the golden's precision (float16)")
    assert {"out", "out to golden"} == set(ours.ratios)


@needs_onnx
def test_a_coarse_softmax_makes_the_golden_less_exact_and_not_the_bound() -> None:
    case = named("test_attention_4d")
    off = with_golden(case, Y=case.outputs["Y"] * np.float32(1 + 2e-4))
    coarse = replace(off, attributes={"softmax_precision": 10})
    fine = replace(off, attributes={"softmax_precision": 11})
    outcome = check(coarse, BackendSubject("numpy"))
    assert outcome.verdict == "passed"
    assert outcome.ratios["out"] == check(case, BackendSubject("numpy")).ratios["out"]
    assert check(fine, BackendSubject("numpy")).verdict == "failed"


@needs_onnx
def test_scores_are_the_adapters_and_weights_the_subjects() -> None:
    numpy = BackendSubject("numpy")
    scores, weights = check(named(SCORES), numpy), check(named(WEIGHTS), numpy)
    assert "scores (mode 2) computed by the adapter: attnx has no such output" in scores.detail
    assert "weights" not in scores.ratios
    assert 0 < weights.ratios["weights"] <= 1


@needs_onnx
@pytest.mark.parametrize("output", ["qk_matmul_output", "present_key"])
def test_the_other_goldens_count(output: str) -> None:
    case = named("test_attention_4d_with_past_and_present_qk_matmul_bias")
    wrong = with_golden(case, **{output: np.nextafter(case.outputs[output] * 1.001, np.inf)})
    outcome = check(wrong, BackendSubject("numpy"))
    assert outcome.verdict == "failed"
    assert {"qk_matmul_output": "scores (mode 2)", "present_key": "present_key"}[
        output
    ] in outcome.detail


@needs_onnx
def test_what_the_adapter_does_not_know_is_not_run() -> None:
    case = replace(named(PAST), attributes={"is_causal": 1, "sinks_mode": 1})
    outcome = check(case, BackendSubject("numpy"))
    assert outcome.verdict == "not-applicable"
    assert "sinks_mode" in outcome.detail


@needs_onnx
def test_what_is_not_declared_must_be_refused() -> None:
    class Modest(BackendSubject):
        def __init__(self) -> None:
            super().__init__("numpy")
            self.capabilities = self.capabilities._replace(softcap=False)

    outcome = check(named("test_attention_4d_softcap"), Modest())
    assert outcome.verdict == "wrongly-accepted"
    assert outcome.detail == "undeclared and yet computed: softcap"


@needs_onnx
def test_a_plain_function_is_asked_what_it_supports() -> None:
    def oracle(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return np.asarray(reference(q, k, v, layout="bshd", **options).out, q.dtype)

    subject = FunctionSubject(oracle, layout="bshd", supports=("scale", "bias", "mask"))
    outcomes = {case.name: check(case, subject) for case in onnx_cases.cases()}
    assert {o.verdict for o in outcomes.values()} == {"passed", "not-applicable"}
    assert outcomes["test_attention_4d_causal"].verdict == "passed"
    assert outcomes["test_attention_4d_gqa"].detail == "not supported: gqa"
    assert "weights not asked of oracle: it gives none" in outcomes[WEIGHTS].detail


@pytest.mark.parametrize("found", [None, "1.19.0"])
def test_without_onnx_the_error_says_what_to_install(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(onnx_cases.metadata, "version", version)
    with pytest.raises(ModuleNotFoundError, match=r"onnx.*pip install 'attnx\[onnx\]'") as error:
        onnx_cases.cases.__wrapped__()
    assert error.value.name == "onnx"
    assert (found or "generated by") in str(error.value)
