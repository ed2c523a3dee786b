"""NumPy's arrays."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from attnx.plugin import Lane

__all__ = ["LANE", "NumpyLane"]

_ndarray = np.ndarray


class NumpyLane(Lane):
    """`numpy.ndarray`, with bfloat16 by ml_dtypes; masked arrays and matrices mean other things."""

    name = "numpy"
    xp = xp
    array_types = (np.ndarray,)
    refused_types = (np.ma.MaskedArray, np.matrix)

    def dtype_name(self, array: Any) -> str:
        """NumPy's own name; a byte order that is not the machine's is told apart."""
        return array.dtype.name if array.dtype.isnative else f"{array.dtype.name} (swapped bytes)"

    def fast_key(self, q: Any, k: Any, v: Any) -> Any:
        """The dtype, where the exact types and the dtypes agree."""
        dtype = q.dtype
        if (
            type(q) is type(k) is type(v) is _ndarray
            and (k.dtype is dtype or k.dtype == dtype)
            and (v.dtype is dtype or v.dtype == dtype)
        ):
            return dtype
        return None

    def integers(self, value: Any, like: Any) -> Any:
        """Integers as int64."""
        return np.asarray(value, dtype=np.int64)

    def write(self, buffer: Any, new: Any, rows: Any, real: Any, axis: int) -> Any:
        """In place."""
        if isinstance(rows, slice):
            buffer[(*(slice(None),) * axis, rows)] = new
            return buffer
        at = (np.arange(buffer.shape[0])[:, None], *(slice(None),) * (axis - 1), rows)
        values = np.moveaxis(new, axis, 1)
        if real is not None:
            values = np.where(np.reshape(real, (*real.shape, 1, 1)), values, buffer[at])
        buffer[at] = values
        return buffer

    def quiet(self) -> Any:
        """NumPy warns of NaN, inf and overflow; here they are answers (S5.3)."""
        return np.errstate(all="ignore")

    def to_numpy(self, array: Any) -> Any:
        """The array itself."""
        return array

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        """A copy."""
        return np.array(array)

    def adopt(self, exported: Any) -> Any:
        """By DLPack, which NumPy imports as a read-only view where the owner says so."""
        return exported if isinstance(exported, np.ndarray) else np.from_dlpack(exported)

    def own(self, array: Any) -> Any:
        """A copy: the memory is another framework's, and may be read-only."""
        return np.array(array)


LANE = NumpyLane()
