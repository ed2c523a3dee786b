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
        with LANE.quiet():
            whole, k, v = _in_one_piece(q, k, v, call)
            if whole:
                return _small.forward(q, k, v, call)
        return _forward.forward(q, k, v, call)

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `attnx.plugin.Backend.backward`."""
        with LANE.quiet():
            if _small.fits(call) and _small.suits_backward(d_out, d_lse, call):
                whole, k0, v0 = _in_one_piece(q, k, v, call)
                if whole:
                    return _small.backward(q, k0, v0, out, d_out, d_lse, call)
        if self.steep(lse, call):
            return super().backward(q, k, v, out, lse, d_out, d_lse, call)
        return _backward.backward(q, k, v, out, lse, d_out, d_lse, call)


def _in_one_piece(q: Any, k: Any, v: Any, call: Call) -> tuple[bool, Any, Any]:
    """Whether a call is done in one piece; k and v, without unseen keys where those forbade it."""
    if _small.suits(q, k, v, call):
        return True, k, v
    if not (_small.fits(call) and _hidden.hides(call)):
        return False, k, v
    k, v = _hidden.cleaned(k, v, call)
    return _small.suits(q, k, v, call), k, v
