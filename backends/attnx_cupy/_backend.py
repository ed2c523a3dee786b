"""The CuPy backend: the array base class on large tiles, with its elementwise work fused.

Matrix products go to cuBLAS, and a tile holds all heads, so that each launch has enough to do. A
call waits for the device once for the look that isolation needs (not under `assume_finite`), once
for a mask whose contents are on the device, and in the backward once to see how large lse is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import array_api_compat.numpy as host_xp
import cupy
import numpy as np

from attnx.masks import leaves
from attnx.plugin import MASK_KINDS, ArrayBackend, Capabilities, Gradients, mask_kinds
from attnx_cupy._kernels import Kernels
from attnx_cupy._lane import LANE, CupyLane

if TYPE_CHECKING:
    from attnx.masks import Mask
    from attnx.plugin import Call, CallClass

__all__ = ["CupyBackend"]

TILE = 1 << 25
"""Scores in a tile, over all heads: 128 MB in float32. A call holds a handful of such arrays."""


class CupyBackend(ArrayBackend):
    """Blocked attention on CuPy arrays.

    Args:
        lane: speaks for the arrays.
        kernels: the fused steps; compiled by CuPy unless given.
    """

    lane: CupyLane

    def __init__(self, lane: CupyLane = LANE, kernels: Kernels | None = None) -> None:
        super().__init__(
            "cupy",
            lane,
            Capabilities(
                dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
                devices=frozenset({"cuda"}),
                native_masks=MASK_KINDS - {"dense", "predicate"},
                dropout=True,
                alibi=True,
            ),
        )
        self.kernels = kernels or Kernels(lane.xp)
        self._devices: tuple[str, ...] | None = None
        self._no_device = "no CUDA device"

    def devices(self) -> tuple[str, ...]:
        """Every CUDA device of this process; none where there is no driver or no card."""
        if self._devices is None:
            try:
                count = cupy.cuda.runtime.getDeviceCount()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                self._no_device = f"no CUDA device: {error}"
                count = 0
            self._devices = tuple(f"cuda:{n}" for n in range(count))
        return self._devices

    def no_device(self) -> str:
        """What the CUDA runtime says."""
        return self._no_device

    def version(self) -> str:
        """CuPy's version."""
        return str(cupy.__version__)

    def route(self, cls: CallClass) -> str:
        """One route serves every call."""
        upcast = ", upcast a tile at a time" if cls.dtype in ("float16", "bfloat16") else ""
        return f"cuBLAS tiles, fused softmax{upcast}"

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `attnx.plugin.Backend.forward`."""
        with self.lane.on(q):
            return super().forward(q, k, v, call)

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `attnx.plugin.Backend.backward`."""
        with self.lane.on(q):
            return super().backward(q, k, v, out, lse, d_out, d_lse, call)

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """See `attnx.plugin.Backend.weights`."""
        with self.lane.on(q):
            return super().weights(q, k, call)

    # What is faster here -----------------------------------------------------------------------

    def block_sizes(self, call: Call) -> tuple[int, int]:
        """Large square tiles, smaller where a mask's structure saves what a tile does not touch.

        A call of few rows (decoding) has long tiles instead.
        """
        kinds = mask_kinds(call.cls.mask)
        size = 4096 if not kinds else 1024 if kinds & {"window", "segments"} else 2048
        heads = max(1, call.B * call.Hq)
        while size > 128 and heads * size * size > TILE:
            size //= 2
        k_size = size
        while call.Lq < size and k_size < call.Lk and 2 * k_size * heads * max(1, call.Lq) <= TILE:
            k_size *= 2
        return size, k_size

    def tile_table(
        self, mask: Mask, call: Call, q_size: int, k_size: int, like: Any
    ) -> list[list[int]]:
        """A mask that holds numbers alone is classified on the host: the device need not wait."""
        if all(isinstance(leaf, int) for _, _, leaf in leaves(mask)):
            table = self.classify(mask, call, q_size, k_size, host_xp, np.arange)
            return cast("list[list[int]]", table.tolist())
        return super().tile_table(mask, call, q_size, k_size, like)

    def host(self, table: Any) -> list[list[int]]:
        """The whole table in one transfer."""
        return cast("list[list[int]]", self.lane.to_numpy(table).tolist())

    def finite(self, *arrays: Any) -> bool:
        """One answer for all arrays, so that the device is waited for once."""
        xp = self.xp
        return bool(xp.all(xp.stack([xp.all(xp.isfinite(array)) for array in arrays])))

    def softmax_step(self, s: Any, shown: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """In one kernel."""
        return self.kernels.softmax_step(s, shown, m, total)

    def gradient_step(
        self, s: Any, dp: Any, tanh: Any, shown: Any, shift: Any, rest: Any, flow: Any
    ) -> tuple[Any, Any, Any]:
        """In one kernel."""
        return self.kernels.gradient_step(s, dp, tanh, shown, shift, rest, flow)
