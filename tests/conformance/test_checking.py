"""`check`: the suite for one function, in one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.conformance.kernels import ignores_its_mask, naive, raises, top_left

import attnx
from attnx.errors import ArgumentError
from attnx_conformance import ConformanceError, check


def test_a_right_function_gives_a_report() -> None:
    report = check(naive, supports=("causal", "mask", "scale"), isolation="none", level="quick")
    assert report.complete or report.footer == {"route": {}}
    assert len(report.results) > 100
    assert all(result.ok for result in report.results)
    assert sum(result.verdict == "passed" for result in report.results) > 40


def test_the_error_says_what_is_wrong_and_holds_every_result() -> None:
    with pytest.raises(ConformanceError) as caught:
        check(
            top_left, supports=("causal", "mask", "scale"), isolation="none",
            cases=("causal-bottom-right-wide", "causal-65"),
        )  # fmt: skip
    told = str(caught.value)
    assert told.startswith(
        "top_left: 1 of 2 trials went wrong\nfailed: causal-bottom-right-wide (S3.5"
    )
    assert "as if: " in told
    assert len(caught.value.report.results) == 2
    assert isinstance(caught.value, AssertionError)


def test_without_raising_the_report_says_it() -> None:
    report = check(
        ignores_its_mask, supports=("mask",), isolation="none", cases=("bool-full",), raises=False
    )
    (result,) = report.results
    assert result.verdict == "failed"
    assert "dropped" in result.detail.splitlines()[-1]
    assert result.command == "cases=('bool-full',), dtypes=('float32',), seed=0"


def test_what_is_not_supported_is_not_asked() -> None:
    """Neither counted for it nor held against it."""
    cases = ("bias-full", "sinks", "softcap", "causal-65", "lengths")
    report = check(naive, cases=cases, raises=False)
    assert {result.verdict for result in report.results} == {"not-applicable"}


def test_where_nothing_applies_nothing_is_shown() -> None:
    """An empty promise must not look kept."""
    with pytest.raises(ConformanceError, match="naive: none of 2 trials applies to what it supp"):
        check(naive, cases=("bias-full", "sinks"))


def test_a_function_may_bring_its_own_pullback() -> None:
    """And one without lse is still asked for the gradients of its output."""
    scale = {"causal", "mask", "bias", "scale", "softcap", "gqa", "gradients"}

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attnx.attention(q, k, v, **options, backend="numpy")

    def vjp(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attnx.attention_vjp(q, k, v, **options, backend="numpy")

    report = check(
        attention, supports=scale, vjp=vjp, cases=("gradient-full*", "grouped", "causal-65")
    )
    assert {result.verdict for result in report.results} == {"passed"}
    assert all("dk" in result.ratios for result in report.results)

    def unreduced(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, pullback = vjp(q, k, v, **options)

        def wrong(d_out: Any, d_lse: Any = None) -> Any:
            grads = pullback(d_out, d_lse)
            return grads._replace(k=np.zeros_like(grads.k))

        return out, wrong

    with pytest.raises(ConformanceError, match=r"failed: grouped \(.*: dk at \("):
        check(attention, supports=scale, vjp=unreduced, cases=("grouped",))


@pytest.mark.parametrize("missing", ["q", "k", "v"])
def test_a_pullback_that_leaves_a_gradient_out_is_told(missing: str) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return attnx.attention(q, k, v, backend="numpy")

    def vjp(q: Any, k: Any, v: Any) -> Any:
        out, pullback = attnx.attention_vjp(q, k, v, backend="numpy")
        return out, lambda d_out, d_lse=None: pullback(d_out)._replace(**{missing: None})

    with pytest.raises(ConformanceError, match=f"the gradient of {missing} is missing"):
        check(attention, supports="gradients", vjp=vjp, cases="self")


def test_a_pullback_of_another_form_is_told_what_was_expected() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return attnx.attention(q, k, v, backend="numpy")

    def vjp(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v), lambda d_out, d_lse=None: (q, k, v)

    with pytest.raises(ConformanceError, match=r"gave a tuple, expected attnx.plugin.Gradients\("):
        check(attention, supports=("gradients",), vjp=vjp, cases=("self",))


def test_a_kernel_without_isolation_meets_no_poison() -> None:
    """A right kernel that multiplies by 0 is accused of nothing; its masks are still checked."""
    torch = pytest.importorskip("torch")

    def attention(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    cases = ("gradient-lengths-257", "live-*", "bias-hides-all")
    report = check(
        attention, framework="torch", supports=("mask", "gradients"), isolation="none", cases=cases
    )
    counts = Counter(result.verdict for result in report.results)
    assert set(counts) == {"passed", "not-applicable"}
    assert counts["passed"] > 12


def test_gradients_by_the_functions_own_framework() -> None:
    torch = pytest.importorskip("torch")

    def attention(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    report = check(
        attention, framework="torch", supports=("causal_top_left", "gradients"), isolation="none",
        cases=("causal-65", "causal-bottom-right-wide"),
    )  # fmt: skip
    verdicts = {result.case: result.verdict for result in report.results}
    assert verdicts == {"causal-65": "passed", "causal-bottom-right-wide": "not-applicable"}
    assert "dq" in report.results[0].ratios


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (raises, {"supports": ("scale",)}, r"fn\(q, k, v, scale=\.\.\.\), got raises\(q"),
        (naive, {"supports": ("lse",)}, r"fn\(q, k, v, return_lse=\.\.\.\)"),
        (naive, {"supports": ("causality",)}, "supports: unknown causality; known: alibi, bias, "),
        (naive, {"dtypes": ("fp8",)}, "dtypes: expected some of .*, got fp8"),
        (naive, {"layout": "BHSD"}, "layout: expected some of bhsd, bshd, got BHSD"),
        (naive, {"supports": ("gradients",)}, "numpy has no differentiation of its own"),
        (naive, {"vjp": naive}, 'vjp: add "gradients" to supports'),
        (naive, {"profiles": "low-precision"}, "nothing to run for naive"),
        (naive, {"level": "all"}, "no level"),
        (naive, {"isolation": "half"}, "isolation: expected full, unseen or none, got 'half'"),
    ],
    ids=["keyword", "lse", "feature", "dtype", "layout", "no-gradient", "vjp", "nothing", "level",
         "isolation"],
)  # fmt: skip
def test_wrong_use_is_told_before_anything_runs(
    fn: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        check(fn, **options)


def test_masks_come_as_arrays_that_say_what_the_objects_say() -> None:
    """Lengths move causal's alignment, which a function cannot know: it gets both as one array."""
    seen: list[dict[str, Any]] = []

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        return naive(q, k, v, **options)

    check(spy, supports=("causal", "mask", "scale"), isolation="none", cases=("lengths-bottom*",))
    assert seen
    assert all(set(options) == {"mask"} and options["mask"].dtype == bool for options in seen)
