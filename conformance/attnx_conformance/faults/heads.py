"""Faults of grouped heads, batches, layouts and memory: who is read as whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._fault import Fault, of_kind
from ._kernel import Kernel, T
from ._sight import Call

__all__ = ["FAULTS"]

groups = of_kind("heads")
layouts = of_kind("layout")


def _heads(rule: Callable[[Any, Call], Any]) -> Any:
    """Query heads read other key heads."""
    return lambda self, c: rule(np.arange(c.grid.Hq), c) % max(1, c.Hk)


def _backward_heads(self: Kernel, c: Call) -> Any:
    """Right in the forward pass; dk and dv are handed out by the other map."""
    return np.arange(c.grid.Hq) % c.Hk if c.backward else Kernel.heads(self, c)


def _changed(*names: str, by: Callable[[Call, Any], Any]) -> Any:
    """Some operands are read differently."""

    def load(self: Kernel, c: Call, name: str, array: Any) -> Any:
        array = Kernel.load(self, c, name, array)
        return by(c, array) if name in names else array

    return load


def _reshaped(c: Call, array: Any) -> Any:
    """The head and sequence axes are exchanged by a reshape, not by a transpose."""
    N, H, L, size = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(N, H, L, size)


def _first_entry(c: Call, array: Any) -> Any:
    return np.broadcast_to(array[:1], array.shape) if array.shape[0] else array


def _cut(multiple: int) -> Callable[[Call, Any], Any]:
    """Channels past the last whole vector are not read."""

    def by(c: Call, array: Any) -> Any:
        size = array.shape[-1]
        keep = size // multiple * multiple or size
        return np.where(np.arange(size) < keep, array, c.high(0))

    return by


def _mixed_batch(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """Of two batch axes, k and v flatten the second first."""
    made = Kernel.unpack(self, c, name, array)
    if name not in ("k", "v") or len(c.grid.batch) < 2:
        return made
    a, b = c.grid.batch[:2]
    order = np.arange(a * b).reshape(a, b).T.reshape(-1)
    return made[order]


def _value_tail(self: Kernel, c: Call, array: Any) -> Any:
    """Output channels past the last whole vector are not written."""
    keep = c.Dv // 4 * 4 or c.Dv
    if array.shape[-1] == c.Dv and array.ndim == 4 and c.Dv != c.D:
        array = np.where(np.arange(c.Dv) < keep, array, c.high(0))
    return Kernel.pack(self, c, array)


def _as_contiguous(array: Any) -> Any:
    """What a kernel reads that is handed a pointer and takes the array for contiguous."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    if array.flags.c_contiguous or not base.flags.c_contiguous or not array.size:
        return array
    flat = base.reshape(-1).view(array.dtype)
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return flat[(start // array.itemsize + np.arange(array.size)) % flat.size].reshape(array.shape)


def _strides_ignored(*names: str) -> Any:
    """Some operands are read as if contiguous."""

    def unpack(self: Kernel, c: Call, name: str, array: Any) -> Any:
        return Kernel.unpack(self, c, name, _as_contiguous(array) if name in names else array)

    return unpack


def _inner_stride(self: Kernel, c: Call, name: str, array: Any) -> Any:
    """Only the stride of the last axis is ignored: rows start where they should."""
    if array.ndim and array.strides[-1] not in (0, array.itemsize) and array.shape[-1] > 1:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        step = array.strides[-1] // array.itemsize
        if base.flags.c_contiguous and step == 2:
            whole = base.reshape(*array.shape[:-1], -1)
            array = whole[..., : array.shape[-1]]
    return Kernel.unpack(self, c, name, array)


def _bias_strides(self: Kernel, c: Call, bias: Any) -> Any:
    return Kernel.bias_of(self, c, _as_contiguous(bias))


def _mask_strides(self: Kernel, c: Call, mask: Any) -> Any:
    return self.spread(c, _as_contiguous(np.asarray(mask.array)))


def _stale_rows(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """The accumulator is not cleared between tiles of rows: each adds to the one before it."""
    old = c.notes.get("acc")
    c.notes["acc"] = acc
    return Kernel.normalise(
        self, c, total, acc if old is None or old.shape != acc.shape else acc + old
    )


def _stale_heads(self: Kernel, c: Call, total: Any, acc: Any) -> Any:
    """The accumulator is not cleared between heads: each adds to the one before it."""
    return Kernel.normalise(self, c, total, acc + np.roll(acc, 1, axis=1) * (acc.shape[1] > 1))


def _lse_layout(self: Kernel, c: Call, lse: Any) -> Any:
    """Out follows the layout, lse stays (B, H, L) in memory and is only named (B, L, H)."""
    shape = Kernel.pack(self, c, lse).shape
    return lse.reshape(shape)


def _out_layout(self: Kernel, c: Call, array: Any) -> Any:
    return array.reshape(Kernel.pack(self, c, array).shape)


def _scores_swapped(self: Kernel, c: Call, q: Any, k: Any) -> Any:
    """k · q for q · k, where the shape lets it pass."""
    s = Kernel.dot(self, c, q, k)
    return T(s) if s.shape[-1] == s.shape[-2] and not c.backward else s


FAULTS: tuple[Fault, ...] = (
    groups("heads-modulo", "query head h reads key head h % Hk", heads=_heads(lambda h, c: h)),
    groups("heads-first", "every query head reads key head 0", heads=_heads(lambda h, c: 0 * h)),
    groups("heads-groups-of-two", "groups are taken to be pairs",
           heads=_heads(lambda h, c: h // min(2, c.g))),
    groups("heads-reversed", "key heads are counted from the end",
           heads=_heads(lambda h, c: c.Hk - 1 - h // c.g)),
    groups("heads-by-key-count", "h // Hk for h // g", heads=_heads(lambda h, c: h // c.Hk)),
    groups("heads-modulo-in-backward", "dk and dv are summed by h % Hk", heads=_backward_heads),
    groups("batch-first-keys", "k and v of entry 0 serve all",
           load=_changed("k", "v", by=_first_entry)),
    groups("batch-values-of-the-first", "v of entry 0 serves all",
           load=_changed("v", by=_first_entry)),
    groups("batch-axes-mixed", "of two batch axes, k and v flatten the second first",
           unpack=_mixed_batch),
    layouts("layout-keys-reshaped", "k is reshaped where it should be transposed", layout="bshd",
            load=_changed("k", by=_reshaped)),
    layouts("layout-values-reshaped", "v is reshaped where it should be transposed", layout="bshd",
            load=_changed("v", by=_reshaped)),
    layouts("layout-cotangent-reshaped", "d_out is reshaped where it should be transposed",
            layout="bshd", load=_changed("d_out", by=_reshaped)),
    layouts("layout-output-reshaped", "results are named anew and not transposed", layout="bshd",
            pack=_out_layout),
    layouts("layout-lse-reshaped", "lse stays (B, H, L) under the name (B, L, H)", layout="bshd",
            give_lse=_lse_layout),
    layouts("layout-scores-transposed", "square scores are read key by query",
            dot=_scores_swapped),
    layouts("layout-d-tail-4", "channels of q past a multiple of 4 are not read",
            load=_changed("q", by=_cut(4))),
    layouts("layout-d-tail-8", "channels of k past a multiple of 8 are not read",
            load=_changed("k", by=_cut(8))),
    layouts("layout-dv-tail", "output channels past a multiple of 4 are not written",
            pack=_value_tail),
    *(
        layouts(f"strides-{name}-ignored", f"{name} is read as if contiguous",
                unpack=_strides_ignored(name))
        for name in ("q", "k", "v")
    ),
    layouts("strides-d-out-ignored", "d_out is read as if contiguous",
            unpack=_strides_ignored("d_out")),
    layouts("strides-inner-ignored", "the stride of the last axis is taken for 1",
            unpack=_inner_stride),
    layouts("strides-bias-ignored", "bias is read as if contiguous", bias_of=_bias_strides),
    layouts("strides-mask-ignored", "a boolean mask is read as if contiguous",
            dense_rule=_mask_strides),
    layouts("stale-accumulator-rows", "a tile of rows adds to the one before it",
            normalise=_stale_rows),
    layouts("stale-accumulator-heads", "each head adds to the one before it",
            normalise=_stale_heads),
)  # fmt: skip
