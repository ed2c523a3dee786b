"""Each probe can fail: a fault for every property, told in one line that says what is wrong."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import attnx
from attnx.errors import ArgumentError
from attnx.masks import Lengths
from attnx.plugin import Dropout
from attnx_conformance import faults
from attnx_conformance.cases import DTYPES
from attnx_conformance.probes import PROBES, Probe, examine_probe, find
from attnx_conformance.subject import FEATURES, BackendSubject, FunctionSubject, Subject, resolve

LINUX = sys.platform.startswith("linux")
DTYPE_OF = {"differences-of-pullback": "float64", "differences-of-framework": "float64"}


class Own(FunctionSubject):
    """Attention by the NumPy backend as a plain function, with a hand in each of its parts.

    `Own(before=...)` changes the arguments, `after=` the answer, `grads=` the gradients and
    `weights=` the weights.
    """

    has_weights: ClassVar[bool] = True

    def __init__(
        self, before: Any = None, after: Any = None, grads: Any = None, weights: Any = None,
    ) -> None:  # fmt: skip
        self.before = before or (lambda q, k, v, o: (q, k, v, o))
        self.after = after or (lambda out, lse, q, k, v, o: (out, lse))
        self.grads, self.change = grads or (lambda g: g), weights or (lambda q, k, o: {})
        run = functools.partial(attnx.attention, backend="numpy")

        def fn(q: Any, k: Any, v: Any, **o: Any) -> Any:
            a, b, c, given = self.before(q, k, v, dict(o))
            made = self.after(*run(a, b, c, **{**given, "return_lse": True}), q, k, v, o)
            return made if o.get("return_lse") else made[0]

        def vjp(q: Any, k: Any, v: Any, **o: Any) -> Any:
            a, b, c, given = self.before(q, k, v, dict(o))
            made, pullback = attnx.attention_vjp(
                a, b, c, **{**given, "return_lse": True}, backend="numpy"
            )
            made = self.after(*made, q, k, v, o)

            def pull(d_out: Any, d_lse: Any = None) -> Any:
                return self.grads(pullback(d_out, d_lse))

            return (made if o.get("return_lse") else made[0]), pull

        supports = FEATURES - {"causal_top_left", "causal_bottom_right"}
        super().__init__(
            fn, name="own", layout=("bhsd", "bshd"), dtypes=DTYPES, supports=supports, vjp=vjp,
            isolation="full",
        )  # fmt: skip
        self.capabilities = self.capabilities._replace(deterministic=True)

    def attention_weights(self, q: Any, k: Any, **options: Any) -> Any:
        factor = self.change(q, k, options)
        factor, options = factor.get("factor", 1), options | factor.get("options", {})
        return attnx.attention_weights(q, k, **options, backend="numpy") * q.dtype.type(factor)


APART = ("refuses", "route", "memory", "differences-of-framework", "hidden-keys")
APART_TOO = ("transforms", "layers", "relatives")
ASKED = [p for p in PROBES if not p.name.startswith(APART) and p.profile not in APART_TOO]


@pytest.mark.parametrize("probe", ASKED, ids=lambda probe: probe.name)
def test_without_a_fault_nothing_is_told(probe: Probe) -> None:
    """So what a fault below breaks is broken by the fault alone."""
    got = examine_probe(probe, Own(), DTYPE_OF.get(probe.name, "float32"))
    assert got.verdict == "passed", got.detail


def where(axis: int, array: Any, step: float) -> Any:
    """Factors that grow along an axis."""
    shape = [1] * array.ndim
    shape[axis] = -1
    return (1 + step * np.arange(array.shape[axis]).reshape(shape)).astype(array.dtype)


def drops(name: str, when: Callable[[Any, dict[str, Any]], bool] = lambda q, o: True) -> Any:
    def before(q: Any, k: Any, v: Any, o: dict[str, Any]) -> Any:
        return q, k, v, {n: x for n, x in o.items() if n != name} if when(q, o) else o

    return before


def base_two(out: Any, lse: Any, *rest: Any) -> Any:
    return out, lse / np.log(2).astype(lse.dtype)


def top_left(q: Any, k: Any, v: Any, o: dict[str, Any]) -> Any:
    return q, k, v, o | ({"causal": "top_left"} if o.get("causal") == "bottom_right" else {})


def blind(out: Any, lse: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
    """NaN of any key reaches every row."""
    return out + (0 * k.sum()).astype(out.dtype), lse


def loud(out: Any, lse: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
    """A rounding more where any key is large, hidden or not."""
    return out * out.dtype.type(1 + 2.0**-22 * float(np.nan_to_num(k).max() > 5)), lse


class Buffer:
    """One buffer for all threads."""

    def __init__(self) -> None:
        self.q: Any = None

    def __call__(self, q: Any, k: Any, v: Any, o: dict[str, Any]) -> Any:
        self.q = q
        time.sleep(0.002)
        return (self.q if self.q.shape == q.shape else q), k, v, o


class InPlace:
    """Keys are scaled where they lie, and restored."""

    def __call__(self, q: Any, k: Any, v: Any, o: dict[str, Any]) -> Any:
        k *= 2
        time.sleep(0.002)
        scaled = k.copy()
        k /= 2
        return q, scaled / 2, v, o


class Noise:
    """An answer that differs by a rounding, every time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, out: Any, lse: Any, *rest: Any) -> Any:
        self.count += 1
        return out * out.dtype.type(1 + 2.0**-22 * self.count), lse


def wraps(q: Any, k: Any, v: Any, o: dict[str, Any]) -> Any:
    """An index of 32 bits: what lies beyond is read elsewhere."""
    rows = np.arange(k.shape[-2]) * (abs(k.strides[-2]) // k.itemsize)
    return q, np.where((rows < 2**31)[:, None], k, k[..., :1, :]), v, o


def planted(name: str) -> Callable[[], Subject]:
    """The suite's own kernel with a fault in it."""
    return lambda: faults.find(name).subject()


def tells(part: str) -> Any:
    """Gradients with one of them wrong."""
    return lambda g: g._replace(**{part: getattr(g, part) * 0.999})


FAULTS: dict[str, Callable[[], Subject]] = {
    "rows-of-weights-sum-to-one": lambda: Own(weights=lambda q, k, o: {"factor": 1.01}),
    "outputs-among-visible-values": lambda: Own(after=lambda out, lse, *_: (3 * out, lse)),
    "constant-moves-lse-alone": lambda: Own(
        after=lambda out, lse, q, k, v, o: (out, lse + 0.01 * ("bias" in o))
    ),
    "default-scale-unit-variance": lambda: Own(
        weights=lambda q, k, o: {"options": {"scale": 1 / q.shape[-1]}}
    ),
    "weights-make-the-output": lambda: Own(
        weights=lambda q, k, o: {"options": {"causal": False}}
    ),
    "keys-have-no-order": lambda: Own(lambda q, k, v, o: (q, k, v * where(-2, v, 0.01), o)),
    "queries-have-no-order": lambda: Own(lambda q, k, v, o: (q * where(-2, q, 0.01), k, v, o)),
    "queries-in-chunks": lambda: Own(lambda q, k, v, o: (q * where(-2, q, 0.01), k, v, o)),
    "queries-independent": lambda: Own(
        after=lambda out, lse, *_: (out + 0.01 * out.mean(axis=-2, keepdims=True), lse)
    ),
    "tokens-have-no-positions": lambda: Own(
        lambda q, k, v, o: (q, k, v, o | {"causal": True})
    ),
    "batch-entries-independent": lambda: Own(
        lambda q, k, v, o: (q + 0.01 * q.mean(axis=0), k, v, o)
    ),
    "lengths-cut-entries": lambda: Own(drops("mask")),
    "heads-independent": lambda: Own(
        lambda q, k, v, o: (q, k + 0.01 * k.mean(axis=1, keepdims=True), v, o)
    ),
    "padding-has-no-effect": lambda: Own(drops("mask")),
    "poisoned-padding-has-no-effect": lambda: Own(after=blind),
    "hidden-keys-change-no-bit": lambda: Own(after=loud),
    "causal-prefix-gives-prefix": lambda: Own(drops("causal")),
    "decoding-equals-full-run": lambda: Own(top_left),
    "decoding-from-fixed-cache": lambda: Own(drops("mask", lambda q, o: q.shape[-2] == 1)),
    "grouped-equals-repeated": lambda: Own(
        lambda q, k, v, o: (q, np.roll(k, 1, axis=1) if k.shape[1] == 2 else k, v, o)
    ),
    "spellings-of-causal": lambda: Own(
        drops("mask", lambda q, o: isinstance(o.get("mask"), np.ndarray))
    ),
    "every-path-gives-one-answer": lambda: Own(drops("mask", lambda q, o: "return_lse" in o)),
    "future-has-no-effect": lambda: Own(drops("causal", lambda q, o: q.ndim > 4)),
    "layers-of-padding-stay-finite": lambda: Own(
        after=lambda out, lse, *_: (np.where(np.isneginf(lse)[..., None], np.nan, out), lse)
    ),
    **{f"merge-{kind}-parts": lambda: Own(after=base_two)
       for kind in ("two", "three", "five", "masked", "peaked")},
    "merge-empty-parts": lambda: Own(
        after=lambda out, lse, *_: (out, np.maximum(lse, lse.dtype.type(-1e30)))
    ),
    "differences-of-pullback": lambda: Own(grads=tells("sinks")),
    "repeats-to-the-bit": lambda: Own(after=Noise()),
    "threads-own-answers": lambda: Own(Buffer()),
    "threads-share-inputs": lambda: Own(InPlace()),
    "strides-past-31-bits": lambda: Own(wraps),
    "dropout-in-shards": planted("dropout-offset-of-sequence"),
    "dropout-in-parts": planted("dropout-offset-in-counters"),
    "dropout-in-both-directions": planted("dropout-backward-next"),
    "dropout-of-a-seed": planted("dropout-heads-of-keys"),
    "dropout-at-its-rate": planted("dropout-scaled-by-p"),
    "dropout-never-by-itself": lambda: Own(
        lambda q, k, v, o: (q, k, v, {"dropout": Dropout(0.1, 0)} | o)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_breaks_the_property(name: str) -> None:
    """The probe tells a fault that its property forbids, in one line."""
    got = examine_probe(find(name), FAULTS[name](), DTYPE_OF.get(name, "float32"))
    assert got.verdict == "failed", got
    assert got.detail
    assert "\n" not in got.detail


class Lax(BackendSubject):
    """The NumPy backend behind a caller who mends wrong calls, or forgets to look."""

    def __init__(self, mend: Callable[[Any, dict[str, Any]], Any]) -> None:
        super().__init__("numpy")
        self.mend = mend

    def _mended(self, call: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        (q, k, v), options = self.mend((q, k, v), dict(options))
        return call(q, k, v, **options)

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return self._mended(super().attention, q, k, v, options)

    def attention_vjp(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return self._mended(super().attention_vjp, q, k, v, options)


def casts(arrays: Any, o: dict[str, Any]) -> Any:
    return [np.asarray(x, np.float32) for x in arrays], o


def broadcasts(arrays: Any, o: dict[str, Any]) -> Any:
    q, k, v = arrays
    wide = [np.repeat(x, 2, axis=0) if x.ndim == 4 and len(x) == 1 else x for x in (k, v)]
    return (q, *wide), o


def numbers(arrays: Any, o: dict[str, Any]) -> Any:
    return arrays, o | {n: float(o[n]) for n in ("scale", "softcap") if o.get(n) is True}


def clamps(arrays: Any, o: dict[str, Any]) -> Any:
    mask = o.get("mask")
    if isinstance(mask, Lengths) and isinstance(mask.kv, int):
        o["mask"] = Lengths(min(mask.kv, 5))
    return arrays, o


def adds(arrays: Any, o: dict[str, Any]) -> Any:
    if isinstance(o.get("bias"), np.ndarray) and o["bias"].dtype == bool:
        o["bias"] = o["bias"].astype(np.float32)
    return arrays, o


def ignores(arrays: Any, o: dict[str, Any]) -> Any:
    return arrays, {n: x for n, x in o.items() if n not in ("casual", "attn_mask", "dropout_p")}


def computes(arrays: Any, o: dict[str, Any]) -> Any:
    """Something is computed before anybody looks."""
    right = np.ones((1, 1, 2, 4), np.float32)
    attnx.attention(right, right, right, backend="numpy")
    return arrays, o


def mumbles(arrays: Any, o: dict[str, Any]) -> Any:
    if o.get("softcap") == 0:
        raise ArgumentError("bad argument")
    return arrays, o


def raises_anything(arrays: Any, o: dict[str, Any]) -> Any:
    if arrays[0].dtype == bool:
        raise RuntimeError("no kernel for bool")
    return arrays, o


WRONG = [
    ("refuses-shapes", broadcasts, "computed, not refused"),
    ("refuses-dtypes", casts, "computed, not refused"),
    ("refuses-dtypes", raises_anything, "not an AttnxError"),
    ("refuses-scalars", numbers, "computed, not refused"),
    ("refuses-scalars", mumbles, "not of softcap"),
    ("refuses-masks", clamps, "computed, not refused"),
    ("refuses-masks", computes, "after something was computed"),
    ("refuses-bias-and-sinks", adds, "computed, not refused"),
    ("refuses-unknown-options", ignores, "was ignored"),
]


@pytest.mark.parametrize(("name", "mend", "detail"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_use_that_passes_is_told(name: str, mend: Any, detail: str) -> None:
    got = examine_probe(find(name), Lax(mend), "float32")
    assert got.verdict == "failed", got
    assert detail in got.detail


def test_a_call_that_never_arrives_is_told() -> None:
    """Another kernel did the work under the backend's name."""

    class Elsewhere(BackendSubject):
        def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
            return out, np.zeros(q.shape[:-1], np.float32)

    got = examine_probe(find("route-is-its-own"), Elsewhere("numpy"), "float32")
    assert got.verdict == "failed"
    assert got.detail == "a plain call never reached numpy (S8.3)"


def test_a_gradient_that_the_framework_loses_is_told() -> None:
    """A key that was detached has a gradient of 0."""
    pytest.importorskip("torch")

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attnx.attention(q, k.detach(), v, **options, backend="torch")

    subject = FunctionSubject(
        attention, framework="torch", layout=("bhsd", "bshd"), dtypes=DTYPES, supports=FEATURES
    )
    got = examine_probe(find("differences-of-framework"), subject, "float64")
    assert got.verdict == "failed"
    assert got.detail.startswith("dk by framework")


HUNGRY = '''
"""Attention that keeps its scores."""
import numpy as np
from attnx.plugin import Gradients
from attnx_conformance.subject import FunctionSubject

def attention(q, k, v, mask=None):
    scores = np.ones((*q.shape[:-1], k.shape[-2]), q.dtype)
    return v * scores[..., :1]

def vjp(q, k, v, **options):
    return attention(q, k, v, **options), lambda d_out, d_lse=None: Gradients(q, k, v)

subject = FunctionSubject(
    attention, supports=("mask", "gqa", "gradients", "memory"), vjp=vjp,
    spec="function:{name}:subject",
)
'''


@pytest.mark.skipif(not LINUX, reason="memory is measured on Linux")
def test_a_matrix_of_scores_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, which finds the function by its name."""
    (tmp_path / "hungry_kernel.py").write_text(HUNGRY.replace("{name}", "hungry_kernel"))
    monkeypatch.syspath_prepend(tmp_path)
    subject = resolve("function:hungry_kernel:subject")
    for name in ("memory-of-forward", "memory-of-backward", "memory-of-a-shared-mask"):
        got = examine_probe(find(name), subject, "float32")
        assert got.verdict == "failed", got
        assert "MB" in got.detail


def test_every_probe_has_been_seen_to_fail() -> None:
    """A probe that cannot fail is a defect; some profiles have a module of their own."""
    seen = {*FAULTS, *(name for name, _, _ in WRONG), "route-is-its-own"}
    seen |= {"differences-of-framework"}
    seen |= {f"memory-of-{what}" for what in ("forward", "backward", "a-shared-mask")}
    asked = {probe.name for probe in PROBES if probe.profile not in APART_TOO}
    assert asked - seen == set()
