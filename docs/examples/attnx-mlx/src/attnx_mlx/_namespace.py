"""MLX in array-API terms: its own names, and the few that it lacks or means otherwise.

float64 needs care, though MLX has it on the CPU. `mx.array` makes float32 of NumPy's float64 unless
it is told a dtype. And `exp`, `sin` and `cos` of float64 are computed in single precision (an error
of 7e-8 in `exp`), while `power` and `tan` are not; so those are made of these.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["NAMESPACE", "from_host"]

E = mx.array(np.e, dtype=mx.float64)


def from_host(array: Any) -> Any:
    """A copy of a NumPy array, in its own dtype."""
    return mx.array(array, dtype=mx.float64 if array.dtype == np.float64 else None)


class _Namespace:
    """`mlx.core`, and what is not there by its name in the standard."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, "bool_" if name == "bool" else name)

    def astype(self, x: Any, dtype: Any, *, copy: bool = True) -> Any:
        """The array in a dtype."""
        return x if x.dtype == dtype and not copy else x.astype(dtype)

    def asarray(self, value: Any, dtype: Any = None, *, copy: bool | None = None) -> Any:
        """An array of numbers or of an array, in its own dtype."""
        if isinstance(value, np.ndarray):
            made = from_host(value)
            return made if dtype is None else made.astype(dtype)
        if dtype is None and not copy and isinstance(value, mx.array):
            return value
        return mx.array(value) if dtype is None else mx.array(value, dtype=dtype)

    def from_dlpack(self, x: Any) -> Any:
        """A copy; NumPy reads what MLX would turn into float32."""
        if str(x.dtype).endswith("float64"):
            return from_host(np.from_dlpack(x))
        return mx.from_dlpack(x, copy=True)

    def cumulative_sum(
        self, x: Any, *, axis: int, dtype: Any = None, include_initial: bool = False
    ) -> Any:
        """The running sum, and a 0 before it where that is asked for."""
        total = mx.cumsum(x, axis=axis, dtype=dtype)
        if not include_initial:
            return total
        shape = list(total.shape)
        shape[axis] = 1
        return mx.concatenate([mx.zeros(shape, dtype=total.dtype), total], axis=axis)

    def exp(self, x: Any) -> Any:
        """In the precision of its dtype."""
        return mx.power(E, x) if x.dtype == mx.float64 else mx.exp(x)

    def sin(self, x: Any) -> Any:
        """In the precision of its dtype."""
        if x.dtype != mx.float64:
            return mx.sin(x)
        half = mx.tan(x / 2)
        return 2 * half / (1 + half * half)

    def cos(self, x: Any) -> Any:
        """In the precision of its dtype."""
        if x.dtype != mx.float64:
            return mx.cos(x)
        half = mx.tan(x / 2)
        return (1 - half * half) / (1 + half * half)


NAMESPACE: Any = _Namespace()
