"""The MLX backend: `mx.fast` where it gives the answer of the spec, the array base class elsewhere.

MLX computes when an array is asked for. A look at the data (whether it is finite, whether lse is
steep) waits for it, so it is taken only where something is hidden, and under `mx.compile` and
`mx.vmap`, where there is nothing to look at, the careful way is taken instead.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from attnx.masks import leaves, map_leaves
from attnx.plugin import MASK_KINDS, ArrayBackend, Capabilities, Far, Reason
from attnx.tiling import PARTIAL

from attnx_mlx import _fused
from attnx_mlx._attend import attend, refusing
from attnx_mlx._lane import LANE, MlxLane

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.masks import Mask
    from attnx.plugin import Call, CallClass
    from attnx.tiling import Tile

__all__ = ["MlxBackend"]

EXACT = {"float32": 2.0**10, "float64": 2.0**39}
"""Up to which |lse| a probability taken from it is good to 2**-13."""
TILE = 1 << 19
"""Scores of a tile, over all heads: 2 MB in float32."""
FLOAT64 = Reason("dtype", "float64", "float64 on the CPU", "use mx.stream(mx.cpu)")


class MlxBackend(ArrayBackend):
    """Attention on MLX arrays, eager and under its transforms."""

    lane: MlxLane

    def __init__(self) -> None:
        super().__init__(
            "mlx",
            LANE,
            Capabilities(
                dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
                devices=frozenset(_devices()),
                native_masks=MASK_KINDS - {"dense", "predicate"},
                dropout=True,
                alibi=True,
                vmap=True,
                compile=True,
            ),
        )

    def devices(self) -> tuple[str, ...]:
        """The GPU first, where there is one, as MLX has it."""
        return _devices()

    def reasons(self, cls: CallClass) -> tuple[Reason, ...]:
        """Those of the declaration; Metal has no float64."""
        found = super().reasons(cls)
        return (FLOAT64, *found) if (cls.dtype, cls.device) == ("float64", "gpu") else found

    def route(self, cls: CallClass) -> str:
        """`mx.fast` for small calls of the classes that it serves, else tiles."""
        if not _fused.may_fit(cls):
            return "array tiles"
        return f"mx.fast up to {_fused.MOST_SCORES} scores, array tiles beyond"

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `attnx.plugin.Backend.forward`."""
        if _fused.fits(call) and not self.careful(call, q, k, v):
            arange = partial(self.lane.arange, like=q)
            return _fused.attend(q, k, v, call, arange, self.xp), None
        return super().forward(q, k, v, call)

    def apply(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """`forward`, with the gradient attached where a transform is looking."""
        if not call.cls.traced:
            return self.forward(q, k, v, call)
        far = Far(self.name, self._outside(self.forward), self._outside(self.backward))
        return attend(far, q, k, v, call)

    def _outside(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same, of constants where a call is large and only a gradient is taken.

        While `mx.grad` goes back, nothing that its thread computes is let go, tiles included. So
        another thread computes.
        """

        def outside(*arguments: Any) -> Any:
            *arrays, call = arguments
            bias, sinks, *rest = call.taken_apart()[1]
            given = [x for x in (*arrays, bias, sinks, *rest) if x is not None]
            small = call.B * call.Hq * call.Lq * call.Lk <= _fused.MOST_SCORES
            if small or not all(map(self.lane.known, given)):
                return run(*arguments)
            copied = self.lane.copied
            call = call._replace(cls=call.cls._replace(traced=False)).map_arrays(copied)
            mine = [None if x is None else copied(x) for x in arrays]
            return _elsewhere.submit(_computed, mx.default_device(), run, *mine, call).result()

        return outside

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """See `attnx.plugin.Backend.weights`; without a gradient, and it says so when asked."""
        if not call.cls.traced:
            return super().weights(q, k, call)
        bare, (bias, sinks, *rest) = call.taken_apart()
        first = (q, k, bias, sinks)

        def weights(*arrays: Any) -> tuple[Any]:
            left = iter(arrays)
            q, k, b, s = (None if x is None else next(left) for x in first)
            return (ArrayBackend.weights(self, q, k, bare.put_together(b, s, *left)),)

        reason = Reason("gradient", "of attention_weights", "none", "detach it: mx.stop_gradient")
        far = Far(self.name, self.forward, self.backward)
        arrays = [x for x in (*first, *rest) if x is not None]
        return refusing(weights, lambda: far.refuse(reason))(*arrays)[0]

    def dropout(self, call: Call, tile: Tile, like: Any) -> Any:
        """As in the base class; what is small and known already becomes a constant of a program.

        On the CPU `mx.compile` has a C++ compiler make each piece of a program, and the rounds of
        Philox are a hundred pieces.
        """
        found = super().dropout(call, tile, like)
        small = call.B * call.Hq * call.Lq * call.Lk <= _fused.MOST_SCORES
        if found is not None and call.cls.traced and small:
            self.lane.known(found)
        return found

    def block_sizes(self, call: Call) -> tuple[int, int]:
        """Smaller tiles than the base class's: an unfused chain of operations holds several."""
        size = 512
        while size > 64 and call.B * call.Hq * size * size > TILE:
            size //= 2
        return size, size

    def settle(self, call: Call, *arrays: Any) -> None:
        """Compute, where no transform looks: so memory grows with the length alone."""
        if not call.cls.traced:
            mx.eval(*arrays)

    # Looks at values, which are not always there -----------------------------------------------

    def finite(self, *arrays: Any) -> bool:
        """One look for all arrays; where none is possible, no."""
        found = mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in arrays]))
        return self.lane.known(found) and bool(found.item())

    def steep(self, lse: Any, call: Call) -> bool:
        """As in the base class; where no look is possible, yes."""
        limit = EXACT["float64" if call.dtype == "float64" else "float32"]
        found = mx.any((mx.abs(lse) > limit) & mx.isfinite(lse))
        return not self.lane.known(found) or bool(found.item())

    def tile_table(
        self, mask: Mask, call: Call, q_size: int, k_size: int, like: Any
    ) -> list[list[int]]:
        """By NumPy, from the few numbers that make a mask; all tiles, where those are not there."""
        arrays = [leaf for _, _, leaf in leaves(mask) if not isinstance(leaf, int)]
        if not all(map(self.lane.known, arrays)):
            return [[PARTIAL] * -(-call.Lk // k_size)] * -(-call.Lq // q_size)
        here = map_leaves(
            mask, lambda _node, _field, x: x if isinstance(x, int) else self.lane.to_numpy(x)
        )
        table = self.classify(here, call, q_size, k_size, np, np.arange)
        return cast("list[list[int]]", table.tolist())


def _computed(device: Any, run: Callable[..., Any], *arguments: Any) -> Any:
    """What a kernel gives, computed: an array belongs to the thread that made it until then."""
    with mx.stream(device):
        made = run(*arguments)
        mx.eval([x for x in made if x is not None])
    return made


_elsewhere = ThreadPoolExecutor(1, "attnx-mlx")


def _devices() -> tuple[str, ...]:
    return ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)
