"""MLX's arrays: lazy, without a device of their own, and bound to the thread that makes them.

Which array a transform is looking at, MLX does not say; but it refuses to start the computation of
such an array (`mx.async_eval`), and of no other, so that is what is asked. Elsewhere the question
only starts what would be computed anyway, and waits for nothing.

`mx.compile` keeps a program for each default stream. A stream for each chosen backend therefore
makes the choice a part of its key, as `use_backend` needs it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import ml_dtypes
import mlx.core as mx
import numpy as np
from attnx.plugin import Lane, Transforms

from attnx_mlx._namespace import NAMESPACE, from_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Far

__all__ = ["LANE", "MlxLane"]


class MlxLane(Lane):
    """`mlx.core.array`."""

    name = "mlx"
    host = "numpy"
    xp: Any = NAMESPACE
    array_types = (mx.array,)

    def __init__(self) -> None:
        self._local = threading.local()

    def device(self, array: Any) -> str:
        """The device on which operations run now: memory is one, and arrays are on none."""
        return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"

    def traced(self, array: Any) -> bool:
        """Whether a gradient, `mx.compile` or `mx.vmap` looks at it."""
        try:
            mx.async_eval(array)
        except ValueError:
            return True
        return False

    def known(self, array: Any) -> bool:
        """Whether its contents can be had: also while a gradient is taken, but not in a program."""
        try:
            mx.eval(array)
        except ValueError:
            return False
        return True

    def fast_key(self, q: Any, k: Any, v: Any) -> Any:
        """The dtype and the device, where no transform looks."""
        dtype = q.dtype
        if k.dtype != dtype or v.dtype != dtype:
            return None
        try:
            mx.async_eval(q, k, v)
        except ValueError:
            return None
        return "mlx", dtype, self.device(q)

    def detached(self, array: Any) -> Any:
        """Constant to `mx.grad` and forward mode."""
        return mx.stop_gradient(array) if self.owns(array) else array

    def constant(self, array: Any, refuse: Callable[[], NoReturn]) -> Any:
        """MLX finds out when it differentiates, so the refusal is the values' derivative."""
        if not self.traced(array):
            return array
        from attnx_mlx._attend import refusing

        return refusing(lambda x: (x,), refuse)(array)[0]

    def arange(self, start: int, stop: int, like: Any) -> Any:
        """int64, in which dropout's words have room."""
        return mx.arange(start, stop, dtype=mx.int64)

    def write(self, buffer: Any, new: Any, rows: Any, real: Any, axis: int) -> Any:
        """A new array, into which MLX may move the buffer's memory."""
        if isinstance(rows, slice):
            start = mx.array([rows.start])
            return mx.slice_update(buffer, new.astype(buffer.dtype), start, (axis,))
        shape = [1] * buffer.ndim
        shape[0], shape[axis] = rows.shape
        at = mx.broadcast_to(rows.reshape(shape), new.shape)
        if real is not None:
            new = mx.where(real.reshape(shape), new, mx.take_along_axis(buffer, at, axis=axis))
        return mx.put_along_axis(buffer, at, new, axis)

    def to_numpy(self, array: Any) -> Any:
        """MLX's own memory; bfloat16 by ml_dtypes."""
        if array.dtype == mx.bfloat16:
            return np.asarray(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.asarray(array)

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        """A copy."""
        return from_host(np.ascontiguousarray(array).reshape(np.shape(array)))

    def copied(self, array: Any) -> Any:
        """The same values, which no transform looks at; only for what is known."""
        return self.from_numpy(self.to_numpy(array))

    def export(self, array: Any) -> Any:
        """DLPack; NumPy has no bfloat16 by DLPack, so that goes as a NumPy view."""
        return self.to_numpy(array) if array.dtype == mx.bfloat16 else array

    def adopt(self, exported: Any) -> Any:
        """A copy: MLX shares no memory with others."""
        if isinstance(exported, np.ndarray):
            return self.from_numpy(exported)
        return NAMESPACE.from_dlpack(exported)

    def wait(self, *arrays: Any) -> None:
        """MLX computes when it is asked to."""
        mx.eval(*arrays)

    def bridge(self, far: Far) -> Callable[..., Any]:
        """`mx.custom_function` around another framework's backend; see `Lane.bridge`."""
        from attnx_mlx._bridge import bridge

        return bridge(far)

    def vjp(
        self, fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Any, Any]:
        """By `mx.vjp`; a cotangent of None counts as 0."""
        from attnx_mlx._transforms import vjp

        outputs, gradients = vjp(fn, inputs, cotangents)
        return outputs, gradients

    def transforms(self) -> Transforms:
        """MLX's own."""
        from attnx_mlx._transforms import TRANSFORMS

        return TRANSFORMS

    def follow(self, choice: Any, default: Any) -> None:
        """A default stream for each choice, in this thread, so that a program is made for each."""
        local, device = self._local, mx.default_device()
        streams = local.__dict__.setdefault("streams", {})
        before = local.__dict__.setdefault("before", {})
        asked = choice, default
        if asked == (None, None):
            if device in before:
                mx.set_default_stream(before.pop(device))
            return
        before.setdefault(device, mx.default_stream(device))
        if (asked, device) not in streams:
            streams[asked, device] = mx.new_stream(device)
        mx.set_default_stream(streams[asked, device])


LANE = MlxLane()
