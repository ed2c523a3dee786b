"""Faults of conduct: writing to inputs, returning them, forgetting to clear, dropping options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, State
from ._sight import Call

__all__ = ["FAULTS"]

fault = of_kind("behaviour")
dtypes = of_kind("dtypes")


def _writes(name: str, rule: Callable[[Call, Any], Any]) -> Any:
    """An operand is changed in place once it has been read."""

    def clean(self: Kernel, c: Call) -> None:
        array = c.arrays.get(name)
        if array is not None and array.flags.writeable:
            array[...] = rule(c, array)

    return clean


def _writes_cotangent(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """Empty rows of d_out are zeroed in place."""
    made = Kernel.cotangents(self, c, d_out, d_lse)
    if d_out.flags.writeable:
        d_out *= d_out.dtype.type(0.5)
    return made


def _zeroes_keys(self: Kernel, c: Call) -> None:
    """Unseen values are zeroed in the caller's own array."""
    seen = c.visible.reshape(c.grid.N, c.Hk, c.g * c.grid.Lq, c.grid.Lk).any(axis=2)
    v = c.arrays["v"]
    if c.grid.rank == 4 and c.layout == "bhsd" and v.flags.writeable:
        v[~seen] = 0


def _dropped(name: str, beside: Callable[[dict[str, Any]], bool]) -> Any:
    """An option is dropped without a word where another stands beside it."""

    def options(self: Kernel, given: dict[str, Any]) -> dict[str, Any]:
        if given.get(name) is not None and beside(given):
            given[name] = False if name == "causal" else None
        return given

    return options


def _alias(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """With one key that every query sees, the output is a view of v."""
    v = c.arrays["v"]
    alone = c.grid.Lk == 1 and bool(c.visible.all()) and c.sinks is None
    return v if name == "out" and alone and v.shape == array.shape else Kernel.give(
        self, c, name, array)  # fmt: skip


def _into_query(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """The output is written into q's memory where it fits."""
    made, q = Kernel.give(self, c, name, array), c.arrays["q"]
    if name != "out" or q.shape != made.shape or not q.flags.writeable:
        return made
    q[...] = made
    return q


def _typed(rule: Callable[[Call, str], Any], *names: str) -> Any:
    """Some results come in another dtype."""

    def give(self: Kernel, c: Call, name: str, array: Any) -> Any:
        made = Kernel.give(self, c, name, array)
        return made.astype(rule(c, name)) if name in names else made

    return give


def _second_call(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """A workspace is cleared when it is made, not when it is used again."""
    made = Kernel.normalise(self, c, total, acc)
    key, space = acc.shape, _space(self)
    made = made + space.get(key, 0)
    space[key] = acc
    return made


def _space(self: Kernel) -> dict[Any, Any]:
    kept: dict[Any, Any] = self.__dict__.setdefault("workspace", {})
    return kept


def _race(self: Kernel, c: Call, state: State, rows: slice, cols: slice) -> State:
    """Two threads write the same sum now and then: every third tile is lost."""
    count = _space(self).get("count", 0) + 1
    _space(self)["count"] = count
    return state if count % 3 == 0 else Kernel.step(self, c, state, rows, cols)


def _atomic(self: Kernel, c: Call, sums: dict[str, Any], name: str, at: slice, part: Any) -> None:
    """Atomic sums of dq lose a tile now and then."""
    count = _space(self).get("adds", 0) + 1
    _space(self)["adds"] = count
    if name != "dq" or count % 7:
        Kernel.add(self, c, sums, name, at, part)


def _cached(self: Kernel, c: Call) -> Any:
    """Visibility is cached by shapes alone: a second mask of the same shape gets the first's."""
    space, key = _space(self), ("seen", c.grid, type(c.mask).__name__)
    return space.setdefault(key, Kernel.visible(self, c))


def _squeezed(self: Kernel, c: Call, array: Any) -> Any:
    """Axes of size 1 are lost."""
    made = Kernel.pack(self, c, array)
    return np.squeeze(made, axis=-2) if made.ndim > 2 and made.shape[-2] == 1 else made


FAULTS: tuple[Fault, ...] = (
    fault("writes-q", "q is scaled in place",
          clean=_writes("q", lambda c, x: x * x.dtype.type(c.scale))),
    fault("writes-k", "NaN in k is replaced in place",
          clean=_writes("k", lambda c, x: x + x.dtype.type(1))),
    fault("writes-v", "unseen values are zeroed in place", clean=_zeroes_keys),
    fault("writes-bias", "bias is rescaled to base 2 in place",
          clean=_writes("bias", lambda c, x: x * x.dtype.type(1.4427))),
    fault("writes-sinks", "sinks are exponentiated in place",
          clean=_writes("sinks", lambda c, x: np.exp(x))),
    fault("writes-d-out", "d_out is scaled in place", cotangents=_writes_cotangent),
    fault("writes-output-into-q", "q's memory holds the output", give=_into_query),
    fault("returns-v", "with a single key the output is v itself", give=_alias),
    fault("workspace-not-cleared", "the second call of a shape adds to the first",
          normalise=_second_call),
    fault("race-in-forward", "every third tile is lost, in another place each time", step=_race),
    fault("race-in-backward", "atomic sums of dq lose a tile now and then", add=_atomic),
    fault("mask-cached-by-shape", "a second mask of the same shape gets the first one's",
          visible=_cached),
    dtypes("out-in-float32", "out is not cast back", give=_typed(lambda c, n: np.float32, "out")),
    dtypes("out-in-float16", "out is always float16", give=_typed(lambda c, n: np.float16, "out")),
    dtypes("lse-in-input-dtype", "lse comes in the inputs' dtype",
          give_lse=lambda self, c, lse: Kernel.give_lse(self, c, lse).astype(c.low)),
    dtypes("lse-always-float64", "lse comes in float64",
          give_lse=lambda self, c, lse: Kernel.give_lse(self, c, lse).astype(np.float64)),
    dtypes("gradients-in-float32", "gradients are not cast back",
          give=_typed(lambda c, n: np.float32, "dq", "dk", "dv")),
    dtypes("dbias-in-input-dtype", "dbias comes in q's dtype",
          give=_typed(lambda c, n: c.low, "dbias")),
    fault("drops-bias-beside-sinks", "bias is dropped beside sinks",
          options=_dropped("bias", lambda o: o.get("sinks") is not None)),
    fault("drops-sinks-beside-bias", "sinks are dropped beside bias",
          options=_dropped("sinks", lambda o: o.get("bias") is not None)),
    fault("drops-softcap-beside-bias", "softcap is dropped beside bias",
          options=_dropped("softcap", lambda o: o.get("bias") is not None)),
    fault("drops-scale-beside-softcap", "scale is dropped beside softcap",
          options=_dropped("scale", lambda o: o.get("softcap") is not None)),
    fault("drops-sinks-beside-causal", "sinks are dropped beside causal",
          options=_dropped("sinks", lambda o: o.get("causal", False) is not False)),
    fault("squeezes-one-query", "an axis of size 1 is lost", pack=_squeezed),
)  # fmt: skip
