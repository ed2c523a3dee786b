"""CuPy's arrays.

CuPy launches a kernel on the current device, whatever device its arguments are on, so everything
that makes an array or computes with one first goes to the device of an array of the call (`on`).
Contents are never read for a check: that would wait for the device (S8.1).
"""

from __future__ import annotations

from typing import Any

import array_api_compat.cupy as xp
import cupy

from attnx.errors import ArgumentError
from attnx.plugin import Lane

__all__ = ["LANE", "CupyLane"]


class CupyLane(Lane):
    """`cupy.ndarray`, with bfloat16 by ml_dtypes."""

    name = "cupy"
    xp: Any = xp
    array_types = (cupy.ndarray,)

    def on(self, array: Any) -> Any:
        """A context in which the array's device is the current one."""
        return cupy.cuda.Device(array.device.id)

    def dtype_name(self, array: Any) -> str:
        """NumPy's own name; ml_dtypes' for bfloat16."""
        return str(array.dtype.name)

    def device(self, array: Any) -> str:
        """`"cuda:N"`."""
        return f"cuda:{array.device.id}"

    def readable(self, array: Any) -> bool:
        """Never: reading waits for the device."""
        return False

    def admit(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Refuse arrays of several devices: nothing is moved silently."""
        device = self.device(q)
        for name, array in (("k", k), ("v", v)):
            if self.device(array) != device:
                raise ArgumentError(
                    f"{name}: expected the device of q, {device}, got {self.device(array)}; "
                    "nothing is moved silently"
                )
        return q, k, v

    def fast_key(self, q: Any, k: Any, v: Any) -> Any:
        """Dtype and device, where all three share them; else the long way says what is wrong."""
        dtype, device = q.dtype, q.device.id
        same = k.dtype == v.dtype == dtype and k.device.id == v.device.id == device
        return ("cupy", dtype, device) if same else None

    def arange(self, start: int, stop: int, like: Any) -> Any:
        """Integers from start to stop."""
        with self.on(like):
            return self.xp.arange(start, stop)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, like: Any) -> Any:
        """A filled array."""
        with self.on(like):
            return self.xp.full(shape, value, dtype=dtype)

    def integers(self, value: Any, like: Any) -> Any:
        """Integers as int64."""
        with self.on(like):
            return self.xp.asarray(value, dtype=self.xp.int64)

    def floats(self, value: tuple[float, ...], dtype: Any, like: Any) -> Any:
        """Numbers on the device of `like`."""
        with self.on(like):
            return self.xp.asarray(value, dtype=dtype)

    def write(self, buffer: Any, new: Any, rows: Any, real: Any, axis: int) -> Any:
        """In place."""
        xp, before = self.xp, (slice(None),) * (axis - 1)
        with self.on(buffer):
            if isinstance(rows, slice):
                buffer[(slice(None), *before, rows)] = new
                return buffer
            at = (xp.arange(buffer.shape[0])[:, None], *before, rows)
            values = xp.moveaxis(new, axis, 1)
            if real is not None:
                values = xp.where(xp.reshape(real, (*real.shape, 1, 1)), values, buffer[at])
            buffer[at] = values
        return buffer

    def to_numpy(self, array: Any) -> Any:
        """A copy on the host, once the device is done with it."""
        return cupy.asnumpy(array)

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        """A copy on the device of `like`, else on the current one."""
        if like is None:
            return self.xp.asarray(array, copy=True)
        with self.on(like):
            return self.xp.asarray(array, copy=True)

    def wait(self, *arrays: Any) -> None:
        """Until the current stream of each array's device is done."""
        for array in arrays:
            with self.on(array):
                cupy.cuda.get_current_stream().synchronize()


LANE = CupyLane()
