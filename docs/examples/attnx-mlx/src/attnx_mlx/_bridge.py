"""MLX's gradients around a backend of another framework (S6.2).

Under `mx.grad` and its like arrays can be read, so the other side takes NumPy's, or makes its own
of them. In a program (`mx.compile`) and under `mx.vmap` there is nothing to read, and MLX calls
nobody out of a program: there the call is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnx.errors import UnsupportedError
from attnx.plugin import Far, Gradients, Reason

from attnx_mlx._attend import attend
from attnx_mlx._lane import LANE

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call

__all__ = ["bridge"]


def bridge(far: Far) -> Callable[..., Any]:
    """See `Lane.bridge`."""

    def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, ...]:
        read = partial(_read, far)
        made = far.forward(read(q), read(k), read(v), call.map_arrays(read))
        return tuple(map(_made, made))

    def backward(*arguments: Any) -> Gradients:
        *arrays, call = arguments
        read = partial(_read, far)
        return Gradients(*map(_made, far.backward(*map(read, arrays), call.map_arrays(read))))

    return partial(attend, far._replace(forward=forward, backward=backward))


def _made(array: Any) -> Any:
    return None if array is None else LANE.from_numpy(array)


def _read(far: Far, array: Any) -> Any:
    if array is None:
        return None
    if not LANE.known(array):
        reason = Reason(
            "tracing", "by mx.compile or mx.vmap", "concrete arrays", "call it outside of them"
        )
        raise UnsupportedError.because(far.name, reason)
    return LANE.to_numpy(array)
