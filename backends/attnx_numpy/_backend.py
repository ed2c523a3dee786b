"""The NumPy backend: its declaration, and the way to the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx.plugin import MASK_KINDS, ArrayBackend, Capabilities, Gradients
from attnx_numpy import _backward, _forward, _hidden, _small
from attnx_numpy._lane import LANE

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass

__all__ = ["NumpyBackend"]


class NumpyBackend(ArrayBackend):
    """Blocked attention on NumPy's BLAS, with worker threads over tiles."""

    def __init__(self) -> None:
        super().__init__(
            "numpy",
            LANE,
            Capabilities(
                dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
                native_masks=MASK_KINDS - {"dense", "predicate"},
                dropout=True,
                alibi=True,
                deterministic=True,
            ),
        )

    def route(self, cls: CallClass) -> str:
        """Tiles on BLAS; small calls in one piece."""
        upcast = ", upcast a tile at a time" if cls.dtype in ("float16", "bfloat16") else ""
        return f"blas tiles{upcast}; small calls in one piece"

    def direct(self, cls: CallClass) -> Callable[..., Any] | None:
        """The plainest of small calls, without a record of the call."""
        return _small.direct(cls)

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `attnx.plugin.Backend.forward`."""
        if _small.fits(call):
            with LANE.quiet():
                found = _small.forward(q, k, v, call)
                if found is None and _hidden.hides(call):
                    found = _small.forward(q, *_hidden.cleaned(k, v, call), call)
            if found is not None:
                return found
        return _forward.forward(q, k, v, call)

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `attnx.plugin.Backend.backward`."""
        if _small.fits(call):
            with LANE.quiet():
                found = _small.backward(q, k, v, out, d_out, d_lse, call)
                if found is None and _hidden.hides(call):
                    keys = _hidden.cleaned(k, v, call)
                    found = _small.backward(q, *keys, out, d_out, d_lse, call)
            if found is not None:
                return found
        if self.steep(lse, call):
            return super().backward(q, k, v, out, lse, d_out, d_lse, call)
        return _backward.backward(q, k, v, out, lse, d_out, d_lse, call)
