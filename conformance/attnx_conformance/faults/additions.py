"""Faults of bias, sinks and lse: broadcast wrongly, misplaced, clipped, cast down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

bias = of_kind("bias")
sinks = of_kind("sinks")
lse = of_kind("lse")

LOWEST = float(np.finfo(np.float32).min)


def _read(rule: Callable[[Call, Any], Any]) -> Any:
    """The bias is read in another way; its -inf hide as they should."""
    return lambda self, c, array: self.spread(c, rule(c, array).astype(c.high))


def _first(axis: int) -> Callable[[Call, Any], Any]:
    def rule(c: Call, array: Any) -> Any:
        if array.ndim < -axis or not array.shape[axis]:
            return array
        return np.take(array, [0], axis=axis)

    return rule


def _keys_as_rows(c: Call, array: Any) -> Any:
    """A square bias is read key by query."""
    return np.swapaxes(array, -1, -2) if array.shape[-1] == array.shape[-2] else array


def _batch_as_heads(c: Call, array: Any) -> Any:
    if array.ndim != 4 or array.shape[1] != 1 or array.shape[0] < 2:
        return array
    return np.swapaxes(np.take(array, np.arange(c.grid.Hq) % array.shape[0], axis=0), 0, 1)


def _key_heads(c: Call, array: Any) -> Any:
    """A head's bias is that of its group."""
    if array.ndim < 3 or array.shape[-3] == 1:
        return array
    return np.take(array, np.arange(c.grid.Hq) // c.g, axis=-3)


def _clipped(low: float) -> Callable[[Call, Any], Any]:
    return lambda c, array: np.maximum(array.astype(c.high), c.high(low))


def _dropped(when: Callable[[Call], bool]) -> Any:
    """Zeros in some calls."""
    return lambda self, c, array: Kernel.bias_of(self, c, array * (0 if when(c) else 1))


def _before_scale(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    return s + c.high(c.scale) * c.bias[:, :, rows, cols]


def _first_tile(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """The bias's pointer is not moved from tile to tile of keys."""
    return s + c.bias[:, :, rows, : cols.stop - cols.start]


def _first_row_tile(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """The bias's pointer is not moved from tile to tile of queries."""
    return s + c.bias[:, :, : rows.stop - rows.start, cols]


def _base_two(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """Scores are rescaled to base 2, and the lowest finite bias becomes -inf on the way."""
    log2e = c.high(1.4426950408889634)
    return ((s * log2e) + c.bias[:, :, rows, cols] * log2e) / log2e


def _low_hides(threshold: float) -> Any:
    def shown_by_bias(self: Kernel, c: Call, array: Any) -> Any:
        return self.spread(c, array.astype(np.float64) > threshold)

    return shown_by_bias


def _never_hides(value: float) -> dict[str, Any]:
    """-inf becomes a large negative number, and such rows stay live."""
    return {
        "shown_by_bias": lambda self, c, array: True,
        "bias_of": lambda self, c, array: self.spread(
            c, np.maximum(array.astype(c.high), c.high(value))
        ),
    }


def _hidden_nan(self: Kernel, c: Call, s: Any, rows: slice, cols: slice) -> Any:
    """The bias is added after the mask, so that NaN in a hidden bias is seen."""
    return Kernel.hide(self, c, s, rows, cols) + c.bias[:, :, rows, cols] if (
        c.bias is not None) else Kernel.hide(self, c, s, rows, cols)  # fmt: skip


def _cast(dtype: Any) -> Callable[[Call, Any], Any]:
    return lambda c, array: array.astype(c.low if dtype is None else dtype)


_BIAS = (
    bias("bias-dropped", "the bias is not added", bias_of=_dropped(lambda c: True)),
    bias("bias-dropped-with-mask", "a mask beside it wins",
         bias_of=_dropped(lambda c: c.mask is not None)),
    bias("bias-dropped-with-causal", "causal beside it wins",
         bias_of=_dropped(lambda c: c.causal is not False)),
    bias("bias-dropped-at-one-query", "a decoding step reads no bias",
         bias_of=_dropped(lambda c: c.grid.Lq == 1)),
    bias("bias-dropped-with-softcap", "lost on the route of capped scores",
         bias_of=_dropped(lambda c: c.softcap is not None)),
    bias("bias-first-head", "the first head's bias serves all", bias_of=_read(_first(-3))),
    bias("bias-first-entry", "the first entry's bias serves all", bias_of=_read(_first(-4))),
    bias("bias-first-row", "the first query's bias serves all", bias_of=_read(_first(-2))),
    bias("bias-transposed", "a square bias is read key by query", bias_of=_read(_keys_as_rows)),
    bias("bias-batch-as-heads", "(B, 1, Lq, Lk) is read as (1, H, Lq, Lk)",
         bias_of=_read(_batch_as_heads)),
    bias("bias-of-key-heads", "a head reads the bias of its group's number",
         bias_of=_read(_key_heads)),
    bias("bias-before-scale", "the bias is scaled too", add_bias=_before_scale),
    bias("bias-subtracted", "the sign of bias is lost",
         add_bias=lambda self, c, s, rows, cols: s - c.bias[:, :, rows, cols]),
    bias("bias-first-key-tile", "every tile of keys reads the first one's bias",
         add_bias=_first_tile),
    bias("bias-first-query-tile", "every tile of queries reads the first one's bias",
         add_bias=_first_row_tile),
    bias("bias-cast-down", "a float32 bias is rounded to the inputs' dtype",
         bias_of=_read(_cast(None))),
    bias("bias-cast-to-float16", "every bias is rounded to float16",
         bias_of=_read(_cast(np.float16))),
    bias("bias-clipped-at-1e4", "bias is clipped at -1e4", bias_of=_read(_clipped(-1e4))),
    bias("bias-clipped-at-100", "bias is clipped at -100", bias_of=_read(_clipped(-100.0))),
    bias("bias-clipped-above", "bias is clipped at 1000",
         bias_of=_read(lambda c, x: np.minimum(x.astype(c.high), c.high(1000)))),
    bias("bias-in-base-two", "rescaling to base 2 turns the lowest bias into -inf",
         add_bias=_base_two),
    bias("bias-lowest-hides", "finfo.min is read as -inf",
         shown_by_bias=_low_hides(LOWEST / 2)),
    bias("bias-minus-1e4-hides", "a bias of -1e4 or less is read as -inf",
         shown_by_bias=_low_hides(-1e4)),
    bias("bias-never-hides", "-inf becomes finfo.min: a row of it is uniform",
         **_never_hides(LOWEST)),
    bias("bias-never-hides-1e4", "-inf becomes -1e4", **_never_hides(-1e4)),
    bias("bias-over-mask", "the bias is added after the mask", hide=_hidden_nan,
         add_bias=lambda self, c, s, rows, cols: s),
)  # fmt: skip


def _added(when: Callable[[Kernel, Call, State], Any]) -> Any:
    """Sinks enter the denominator with another logit."""

    def add_sinks(self: Kernel, c: Call, state: State, rows: slice) -> State:
        if c.sinks is None:
            return state
        kept, c.sinks = c.sinks, when(self, c, state)
        made = Kernel.add_sinks(self, c, state, rows)
        c.sinks = kept
        return made

    return add_sinks


def _unshifted(self: Kernel, c: Call, state: State, rows: slice) -> State:
    """exp(sink) is added to a sum that is relative to the maximum."""
    if c.sinks is None:
        return state
    return state._replace(total=state.total + np.exp(c.sinks))


def _no_new_max(self: Kernel, c: Call, state: State, rows: slice) -> State:
    """The sink takes no part in the maximum: exp(sink - max) overflows."""
    if c.sinks is None:
        return state
    return state._replace(total=state.total + np.exp(c.sinks - self.safe(state.m)))


def _every_tile(self: Kernel, c: Call, state: State, rows: slice) -> State:
    """Each tile of keys adds the sink again."""
    if c.sinks is None:
        return state
    count = max(1, sum(1 for _ in self.key_blocks(c, rows)))
    m = np.maximum(state.m, c.sinks)
    total, acc = self.carry(c, state, m)
    return State(m, total + count * np.exp(c.sinks - m), acc)


def _not_in_lse(self: Kernel, c: Call, state: State, rows: slice) -> tuple[Any, Any]:
    _, total, acc = self.add_sinks(c, state, rows)
    out = self.normalise(c, total, acc)
    return self.fill(c, out, self.log_sum(c, state.m, state.total), rows)


def _value_of_one(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """The sink weighs in with the mean of the output, as a key of its own would."""
    return Kernel.normalise(self, c, total, acc) if c.sinks is None else acc / total + (
        1 / total) * c.high(0.1)  # fmt: skip


_SINKS = (
    sinks("sinks-dropped", "sinks are not added", add_sinks=lambda self, c, state, rows: state),
    sinks("sinks-dropped-with-mask", "a mask beside them wins",
          add_sinks=lambda self, c, state, rows: state if c.mask is not None
          else Kernel.add_sinks(self, c, state, rows)),
    sinks("sinks-dropped-at-one-query", "a decoding step has no sinks",
          add_sinks=lambda self, c, state, rows: state if c.grid.Lq == 1
          else Kernel.add_sinks(self, c, state, rows)),
    sinks("sinks-first-head", "the first head's sink serves all",
          sinks_of=lambda self, c, array: Kernel.sinks_of(self, c, array[:1].repeat(len(array)))),
    sinks("sinks-of-key-heads", "a head takes the sink of its group's number",
          sinks_of=lambda self, c, array: Kernel.sinks_of(self, c, array)[
              np.arange(c.grid.Hq) // c.g]),
    sinks("sinks-scaled", "sinks are multiplied by the scale",
          add_sinks=_added(lambda self, c, state: c.sinks * c.high(c.scale))),
    sinks("sinks-capped", "sinks pass the softcap",
          add_sinks=_added(lambda self, c, state: self.cap(c, c.sinks))),
    sinks("sinks-cast-down", "float32 sinks are rounded to the inputs' dtype",
          sinks_of=lambda self, c, array: Kernel.sinks_of(self, c, array.astype(c.low))),
    sinks("sinks-unshifted", "exp(sink) without the maximum", add_sinks=_unshifted),
    sinks("sinks-not-in-max", "a sink above every score overflows", add_sinks=_no_new_max),
    sinks("sinks-every-tile", "each tile of keys adds the sink again", add_sinks=_every_tile),
    sinks("sinks-not-in-lse", "lse leaves sinks out", finish=_not_in_lse),
    sinks("sinks-with-a-value", "a sink carries a value", normalise=_value_of_one),
)  # fmt: skip


def _given(rule: Callable[[Call, Any], Any]) -> Any:
    """lse is changed on its way out; the backward pass has the right one."""

    def give_lse(self: Kernel, c: Call, made: Any) -> Any:
        return Kernel.give_lse(self, c, rule(c, made).astype(made.dtype))

    return give_lse


def _only_returned(rule: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Another lse is returned; the backward pass has the right one."""

    def finish(self: Kernel, c: Call, state: State, rows: slice) -> tuple[Any, Any]:
        out, right = Kernel.finish(self, c, state, rows)
        m, total, _ = self.add_sinks(c, state, rows)
        wrong = self.fill(c, out, rule(self.safe(m), total)[..., 0], rows)[1]
        c.notes.setdefault("lse", np.zeros(c.grid.flat[:3], c.high))[:, :, rows] = wrong
        return out, right

    def give_lse(self: Kernel, c: Call, made: Any) -> Any:
        return Kernel.give_lse(self, c, c.notes.get("lse", made))

    return {"finish": finish, "give_lse": give_lse}


_LSE = (
    lse("lse-base-two", "lse is a logarithm to base 2",
        **_only_returned(lambda m, total: (np.log(total) + m) * 1.4426950408889634)),
    lse("lse-half-base-two", "the sum's logarithm is to base 2, the maximum is not",
        **_only_returned(lambda m, total: np.log2(total) + m)),
    lse("lse-max-alone", "lse is the maximum", **_only_returned(lambda m, total: m + 0 * total)),
    lse("lse-without-max", "lse is the logarithm of the shifted sum",
        **_only_returned(lambda m, total: np.log(total) + 0 * m)),
    lse("lse-of-the-sum", "the sum is returned without its logarithm",
        **_only_returned(lambda m, total: total * np.exp(m))),
    lse("lse-negative", "-lse, as some kernels keep it",
        **_only_returned(lambda m, total: -(np.log(total) + m))),
    lse("lse-cast-down", "lse passes through the inputs' dtype",
        give_lse=_given(lambda c, made: made.astype(c.low))),
    lse("lse-cast-to-float16", "lse passes through float16",
        give_lse=_given(lambda c, made: made.astype(np.float16))),
    lse("lse-clipped-below", "lse is kept above -20",
        give_lse=_given(lambda c, made: np.where(
            np.isneginf(made), made, np.maximum(made, -20.0)))),
    lse("lse-clipped-above", "lse is kept below 88",
        give_lse=_given(lambda c, made: np.minimum(made, 88.0))),
    lse("lse-with-an-epsilon", "log(sum + 1e-3)",
        **_only_returned(lambda m, total: np.log(total + 1e-3) + m)),
    lse("lse-of-raw-scores", "lse leaves the bias of the row out",
        give_lse=lambda self, c, made: Kernel.give_lse(self, c, made if c.bias is None else
            np.where(np.isfinite(made), made - np.nan_to_num(
                c.bias.max(axis=-1, initial=0.0), neginf=0.0, posinf=0.0), made))),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_BIAS, *_SINKS, *_LSE)
