"""The PyTorch backend: which of its routes computes a call.

A plan depends on a call's class; the route may also depend on sizes and on a look at the data, so
`route` names the first choice and what else may serve. Every route gives the spec's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnx.plugin import MASK_KINDS, ArrayBackend, Capabilities
from attnx.tiling import mask_blocks
from attnx_torch import _autograd, _math, _scores, _sdpa, _tiles
from attnx_torch._lane import LANE

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass, Gradients
    from attnx_torch._parts import Part

__all__ = ["TorchBackend"]

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
    devices=frozenset({"cpu", "cuda"}),
    native_masks=MASK_KINDS - {"dense", "predicate"},
    dropout=True,
    alibi=True,
    higher_order=True,
    forward_mode=True,
    vmap=True,
    compile=True,
)


class TorchBackend(ArrayBackend):
    """SDPA where it is exact, tiles elsewhere, the careful array tiles where poison was met."""

    def __init__(self) -> None:
        super().__init__("torch", LANE, CAPABILITIES)

    def devices(self) -> tuple[str, ...]:
        """The host, and what CUDA reports."""
        return ("cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count())))

    def version(self) -> str:
        """PyTorch's version."""
        return str(torch.__version__)

    def route(self, cls: CallClass) -> str:
        """The first choice, and what else may serve."""
        if cls.traced:
            return "the formula over all scores (isolation: unseen keys alone)"
        if _sdpa.may_serve(cls):
            if cls.device != "cpu":
                return "sdpa (isolation: unseen keys alone; no look at a device's data)"
            return "sdpa" if cls.assume_finite else "sdpa; array tiles where a value is not finite"
        tiles = "tiles" if cls.assume_finite else "tiles; array tiles where a value is not finite"
        if _sdpa.may_mask(cls):
            return f"sdpa over the keys that each block of queries sees, else {tiles}"
        return tiles

    # The hooks of the base class ----------------------------------------------------------------

    def block_sizes(self, call: Call) -> tuple[int, int]:
        """Tiles of about half a million scores over all heads; few queries get many keys.

        Dropout makes many passes over a tile, and each must be worth the start of its threads.
        """
        heads = max(1, call.B * call.Hq)
        rows, scores = 512, 1 << 19 if call.dropout is None else 1 << 22
        while rows > 64 and heads * rows * rows > scores:
            rows //= 2
        keys = rows
        while keys < 8192 and heads * min(rows, call.Lq) * keys < scores:
            keys *= 2
        blocks = mask_blocks(call.mask)
        if blocks is None:
            return rows, keys
        return min(rows, max(64, blocks[0])), min(keys, max(64, blocks[1]))

    def host(self, table: torch.Tensor) -> list[list[int]]:
        """A small matrix as Python lists."""
        listed: list[list[int]] = table.tolist()
        return listed

    def finite(self, *arrays: Any) -> bool:
        """Whether all values are finite."""
        return _scores.finite(*arrays)

    # What a call runs ---------------------------------------------------------------------------

    def apply(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """`forward`, recorded by autograd where it is watching; the formula under a transform."""
        if call.cls.traced:
            with self.lane.quiet():
                return _math.attend(self.xp, q, k, v, call)
        try:
            if call.cls.gradient is None:
                return self.forward(q, k, v, call)
            return _autograd.attend(self, q, k, v, call)
        except RuntimeError:
            LANE.admit(q, k, v)  # what PyTorch refuses of them is told as S8.1 says
            raise

    def direct(self, cls: CallClass) -> Callable[..., Any] | None:
        """SDPA without a decision left to take, where it serves the class."""
        slow = cls.dtype == "float16" and cls.device == "cpu"
        if cls.gradient is None and not slow and _sdpa.may_serve(cls):
            return _sdpa.direct(cls)
        return None

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `Backend.forward`."""
        parts = self.sdpa_parts(q, k, v, call)
        if parts is not None:
            with self.lane.quiet():
                return _sdpa.attend(self, parts, q, k, v, call), None
        return self.forward_lse(q, k, v, call)

    def sdpa_parts(self, q: Any, k: Any, v: Any, call: Call) -> list[Part] | None:
        """The parts in which SDPA computes this call, or None where tiles do."""
        if not (_sdpa.may_serve(call.cls) or _sdpa.may_mask(call.cls)):
            return None
        with torch.no_grad():
            return _sdpa.parts(self, q, k, v, call)

    def forward_lse(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """out and lse, the fastest way."""
        with torch.no_grad(), self.lane.quiet():
            found = _sdpa.attend_lse(q, k, v, call) if call.need_lse else None
        return found or self.forward_tiles(q, k, v, call)

    def forward_tiles(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """out and lse by tiles."""
        with torch.no_grad(), self.lane.quiet():
            return _tiles.forward(self, q, k, v, call) or super().forward(q, k, v, call)

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `Backend.backward`."""
        arrays = (q, k, v, out, lse, d_out, d_lse)
        with torch.no_grad(), self.lane.quiet():
            return _tiles.backward(self, *arrays, call) or super().backward(*arrays, call)

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """See `ArrayBackend.weights`, which needs lse."""
        return super().weights(q, k, call._replace(cls=call.cls._replace(need_lse=True)))
