"""ONNX's own Attention node cases through `attnx.attention`: a witness that nobody here wrote.

All node cases of opsets 23 to 25, as the installed `onnx` package generates them. Each is said in
attnx's words, then three answers are held against each other: the subject's, the oracle's and
ONNX's golden. A fault in the adapter or in the oracle parts the last two, whatever the kernel.

What ONNX leaves open, or says otherwise than attnx, and what the adapter decided:

- Packed 3-D inputs `(B, L, H * D)` hold the heads of a token one after the other: they are split
  to `(B, L, H, D)`, layout "bshd". 4-D inputs are "bhsd". Past and present are always 4-D.
- The past comes before the new keys. `present_key` and `present_value` are inputs concatenated:
  attnx has no such output, so the adapter's own concatenation is compared with them bit by bit.
- `is_causal` is called bottom-right, but means j <= i + n with n keys before the queries: the
  length of the past, or `nonpad_kv_seqlen - Lq`, else 0. So it is "top_left" without a past,
  also where Lq != Lk; "bottom_right" beside `Lengths`, and where the past is Lk - Lq; and
  positions written out for a past beside cross attention. All opsets say the same since onnx
  1.23, which corrected the older goldens; so 1.23 is the oldest that is read. Windows stand alike.
- `nonpad_kv_seqlen` is `Lengths`. A negative n leaves the first rows empty.
- A boolean `attn_mask` is a mask, a floating one a bias. Of 1 axis it is one row for every query,
  of 3 axes `(Hq, Lq, Lk)`, as broadcasting reads them. One shorter than Lk hides the rest; so
  does one of length 1, where the text would let it broadcast and the reference does not. (No case
  can tell: each short mask comes with a `nonpad_kv_seqlen` that hides the same keys.)
- A row that sees nothing is 0 in attnx (S3.7). The goldens say so too since 1.23. Where one does
  not, the clause wins and the outcome's detail says so.
- Grouped heads are consecutive in both. `softcap = 0` means none. `scale` is what the node
  stores, a float32; ONNX multiplies q and k by its root, each rounded.
- `softmax_precision` asks for a type that attnx never goes below (float32, or float64 for float64
  inputs): nothing to translate, and the bound does not change by it. Only a coarser type than the
  inputs' would make a golden less exact, and then its precision is that type's.
- `qk_matmul_output`: mode 3 is `attention_weights`. attnx has no output for the scores of modes 0
  to 2, so these are computed by the adapter with the oracle: they prove the translation and not
  the subject, and the detail says so. (The text of mode 0 beside a softcap says raw scores, the
  reference gives capped ones; no case has both.)

What decides: the subject is within the suite's bound of the oracle; the golden is within its own
precision of the oracle; and the subject is within the looser of both of the golden. ONNX rounds
every step to the inputs' type, scale, scores, softmax and all. For float32 that is our bound; for
16-bit inputs it is some ten times looser. The detail says which was taken.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnx.errors import UnsupportedError
from attnx.masks import map_leaves
from attnx.plugin import Capabilities, mask_kinds

from ._errors import C, ForwardErrors
from ._marshal import NotApplicableError, same_bytes, view_of
from ._onnx_call import ATTRIBUTES, Call, OnnxCase, translate
from ._onnx_collect import INPUTS
from ._precision import Precision
from ._selection import any_of
from .judgement import Bound, judge
from .oracle import Reference, reference
from .runner import Outcome
from .subject import Subject
from .tolerance import Bounds, bounds

__all__ = ["OnnxCase", "cases", "check"]

Array = NDArray[Any]

OLDEST = (1, 23)
WEIGHTS = 3
"""The `qk_matmul_output_mode` that asks for probabilities; the lower ones ask for scores."""
_COARSE = {10: "float16", 16: "bfloat16"}  # of softmax_precision, in ONNX's numbers


@cache
def cases() -> tuple[OnnxCase, ...]:
    """Every case, generated once in a process of its own.

    Raises:
        ModuleNotFoundError: onnx is not installed, or is too old.
        RuntimeError: its generators failed.
    """
    _require_onnx()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cases.pickle")
        command = [sys.executable, "-m", "attnx_conformance._onnx_collect", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"onnx could not generate its cases:\n{done.stderr}")
        return tuple(OnnxCase(**record) for record in pickle.loads(path.read_bytes()))


def check(case: OnnxCase, subject: Subject, layout: str = "") -> Outcome:
    """Run a case on a subject; `Outcome.detail` tells what each result was compared with.

    Args:
        case: the case.
        subject: what is examined.
        layout: of the subject's arrays; the case's own when empty, if the subject takes it.
    """
    trial = _Trial(case, subject, layout)
    try:
        return trial.run()
    except NotApplicableError as reason:
        return Outcome("not-applicable", str(reason))
    except _FaultError as fault:
        return Outcome("failed", str(fault), trial.ratios)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), trial.ratios)


def _require_onnx() -> None:
    hint = "install it with: pip install 'attnx[onnx]'"
    try:
        found = metadata.version("onnx")
    except metadata.PackageNotFoundError:
        message = f"the ONNX cases are generated by the onnx package; {hint}"
        raise ModuleNotFoundError(message, name="onnx") from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        message = f"the ONNX cases need onnx 1.23 or later, got {found}; {hint}"
        raise ModuleNotFoundError(message, name="onnx")


class _FaultError(Exception):
    """Two of the three answers part."""


class _Trial:
    def __init__(self, case: OnnxCase, subject: Subject, layout: str) -> None:
        self.case, self.subject, self.lane, self.layout = case, subject, subject.lane, layout
        self.dtype = case.inputs["Q"].dtype.name
        self.ratios: dict[str, float] = {}
        self.notes: list[str] = []

    def run(self) -> Outcome:
        given = {*self.case.attributes, *self.case.inputs}
        if unknown := sorted(given - ATTRIBUTES - set(INPUTS)):
            raise NotApplicableError(f"the adapter does not know {', '.join(unknown)}")
        call = translate(self.case)
        if lacks := _lacks(call, self.dtype, self.subject.capabilities):
            return self._refuses(call, lacks)
        expected = call.expected()
        limits = bounds(expected, self.dtype, scores=self.subject.capabilities.scores)
        own = _own_precision(expected, self._coarsest())
        self._out(call, expected, limits, own)
        self._scores(call, expected, limits, own)
        self._present(call)
        return Outcome("passed", "; ".join(self.notes), self.ratios)

    def _refuses(self, call: Call, lacks: list[str]) -> Outcome:
        missing = ", ".join(lacks)
        if not self.subject.refuses:
            raise NotApplicableError(f"not supported: {missing}")
        try:
            self._ask(call)
        except UnsupportedError as error:
            return Outcome("refused", str(error))
        return Outcome("wrongly-accepted", f"undeclared and yet computed: {missing}")

    def _coarsest(self) -> str:
        """The type with the largest roundoff through which a golden went."""
        softmax = _COARSE.get(self.case.attributes.get("softmax_precision", 0), self.dtype)
        return max(self.dtype, softmax, key=lambda name: Precision.of(name).u_w)

    # What the subject computes

    def _ask(self, call: Call, *, weights: bool = False) -> Array:
        """The subject's answer in the layout of the call."""
        allowed = self.subject.layouts
        layout = self.layout or (call.layout if call.layout in allowed else allowed[0])
        q, k, v = (self._array(x) for x in call.in_layout(layout))
        options = {**self._options(call.options), "layout": layout}
        if weights:
            return self._taken("weights", self.subject.attention_weights(q, k, **options))
        out = self._taken("out", self.subject.attention(q, k, v, **options))
        return out if layout == call.layout else np.swapaxes(out, 1, 2)

    def _array(self, array: Array) -> Any:
        try:
            return view_of(array, None, self.lane)
        except UnsupportedError as error:  # the framework has no such type
            raise NotApplicableError(str(error)) from error

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(options)
        if "mask" in made:
            made["mask"] = map_leaves(made["mask"], lambda _node, _field, leaf: self._leaf(leaf))
        if "bias" in made:
            made["bias"] = self._array(made["bias"])
        return made

    def _leaf(self, leaf: Any) -> Any:
        return self._array(leaf) if isinstance(leaf, np.ndarray) else leaf

    def _taken(self, name: str, array: Any) -> Array:
        if not self.lane.owns(array):
            raise _FaultError(f"{name} is a {type(array).__name__} (S1.5)")
        got = self.lane.dtype_name(array)
        if got != self.dtype:
            raise _FaultError(f"{name} is {got}, expected {self.dtype} (S5.1)")
        return np.asarray(self.lane.to_numpy(array))

    # What is compared

    def _out(self, call: Call, expected: Reference, limits: Bounds, own: Bounds) -> None:
        if expected.out is None or limits.out is None or own.out is None:
            raise AssertionError("a call without v")
        golden = self.case.outputs["Y"].reshape(expected.out.shape)
        live = expected.terms.restore(expected.terms.live)[..., None]
        golden = self._settled("out", golden, live)
        self._golden("out", golden, expected.out, limits.out, own.out)
        self._answer("out", self._ask(call), golden, expected.out, limits.out, own.out)

    def _scores(self, call: Call, expected: Reference, limits: Bounds, own: Bounds) -> None:
        golden = self.case.outputs.get("qk_matmul_output")
        if golden is None:
            return
        mode = self.case.attributes.get("qk_matmul_output_mode", 0)
        if mode != WEIGHTS:
            name = f"scores (mode {mode})"
            truth, precision = _raw_scores(call, mode, self._coarsest())
            self._golden(name, golden.astype(np.float64), truth, precision, precision)
            self.notes.append(f"{name} computed by the adapter: attnx has no such output")
            return
        live = any_of(expected.visible, -1)[..., None]
        golden = self._settled("weights", golden, live)
        self._golden("weights", golden, expected.weights, limits.weights, own.weights)
        if not self.subject.has_weights:
            self.notes.append(f"weights not asked of {self.subject.name}: it gives none")
            return
        actual = self._ask(call, weights=True)
        truth = expected.weights
        self._answer("weights", actual, golden, truth, limits.weights, own.weights)

    def _settled(self, name: str, golden: Array, live: Array) -> Array:
        """The golden in float64, with 0 in rows that see nothing, whatever ONNX has there."""
        wrong = ~live & (golden != 0.0)
        if wrong.any():
            rows = int(wrong.any(axis=-1).sum())
            values = ", ".join(sorted({f"{x:.3g}" for x in golden[wrong].astype(np.float64)})[:3])
            told = f"{name}: golden has {values} in {rows} rows that see nothing"
            self.notes.append(f"{told}; attnx gives 0 (S3.7), which wins")
        return np.where(live, golden.astype(np.float64), 0.0)

    def _golden(
        self, name: str, golden: Array, truth: Array, limit: Bound, precision: Bound
    ) -> None:
        judgement = judge(golden, truth, _looser(limit, precision))
        if not judgement.ok:
            told = f"{name}: ONNX's golden and the oracle part"
            raise _FaultError(f"{told}: {judgement.detail}")
        ratio = judge(golden, truth, limit).ratio
        self.notes.append(f"{name}: golden off the oracle by {ratio:.2g} of our bound")

    def _answer(
        self, name: str, actual: Array, golden: Array, truth: Array, limit: Bound, precision: Bound
    ) -> None:
        judgement = judge(actual, truth, limit)
        self.ratios[name] = judgement.ratio
        if not judgement.ok:
            raise _FaultError(f"{name} {judgement.detail}")
        looser = _looser(limit, precision)
        judgement = judge(actual, golden, looser)
        self.ratios[f"{name} to golden"] = judgement.ratio
        by_golden = bool((looser.limit > limit.limit).any())
        which = f"the golden's precision ({self._coarsest()})" if by_golden else "our bound"
        if not judgement.ok:
            raise _FaultError(f"{name} beside the golden, within {which}: {judgement.detail}")
        self.notes.append(f"compared with it within the looser of two, {which}")

    def _present(self, call: Call) -> None:
        for name, array in (("present_key", call.k), ("present_value", call.v)):
            golden = self.case.outputs.get(name)
            if golden is None:
                continue
            made = array if call.layout == "bhsd" else np.swapaxes(array, 1, 2)
            if not same_bytes(made, golden):
                raise _FaultError(f"{name} is not the past and the new keys, in that order")
            self.notes.append(f"{name} concatenated by the adapter, the same bits")


def _lacks(call: Call, dtype: str, has: Capabilities) -> list[str]:
    options = call.options
    heads = 1 if call.layout == "bhsd" else 2
    kinds = {"causal"} if "causal" in options else set()
    kinds |= mask_kinds(options["mask"].structure) if "mask" in options else set()
    wanted = {
        "gqa": call.q.shape[heads] != call.k.shape[heads],
        "bias": "bias" in options,
        "softcap": "softcap" in options,
    }
    lacks = [name for name, asked in wanted.items() if asked and not getattr(has, name)]
    lacks += [] if dtype in has.dtypes else [dtype]
    lacks += sorted(kinds - has.masks)
    if has.max_head_size is not None and has.max_head_size < max(
        call.q.shape[-1], call.v.shape[-1]
    ):
        lacks.append("max_head_size")
    return lacks


def _coarseness(dtype: str) -> float:
    return max(1.0, Precision.of(dtype).u_w / Precision.of("float32").u_w)


def _own_precision(expected: Reference, dtype: str) -> Bounds:
    """What arithmetic that rounds every step to `dtype` may err.

    To first order a bound is proportional to the roundoff of the accumulator, so that of float32
    is scaled. The 16-bit bound itself has the underflow of float16 besides.
    """
    stored, single = bounds(expected, dtype), bounds(expected, "float32")
    if stored.out is None or single.out is None:
        raise AssertionError("a call without v")
    factor = _coarseness(dtype)
    return Bounds(
        lse=stored.lse,
        weights=_looser(stored.weights, single.weights, factor),
        out=_looser(stored.out, single.out, factor),
    )


def _looser(one: Bound, other: Bound, factor: float = 1.0) -> Bound:
    return Bound(np.maximum(one.limit, factor * other.limit), one.either, one.overflow)


def _raw_scores(call: Call, mode: int, dtype: str) -> tuple[Array, Bound]:
    """The scores that a mode asks for: those of the call without what comes after them."""
    later = {0: ("softcap", "bias", "mask", "causal"), 1: ("bias", "mask", "causal"), 2: ()}[mode]
    options = {name: value for name, value in call.options.items() if name not in later}
    terms = reference(call.q, call.k, call.v, layout=call.layout, **options).terms
    error = ForwardErrors(terms, Precision.of("float32"), rounded_scores=False).E
    limit = terms.restore_grid(C * _coarseness(dtype) * error)
    return terms.restore_grid(terms.s), Bound(limit, np.zeros(limit.shape, np.bool_))
