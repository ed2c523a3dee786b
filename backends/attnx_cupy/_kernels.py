"""The elementwise work of a tile as two CUDA kernels.

Between the matrix products a tile needs a dozen passes over its scores when every operation is a
kernel of its own. Here the forward's are one kernel (mask, maximum, exponential, sum) and the
backward's another (mask, probability, gradient before and after the softcap), each of which
overwrites its operands.

A row is one block's work. A mask is read where it lies: strides of 0 stand for its broadcast axes.
The source is plain C++ without a header, so that NVRTC, nvcc and (for a test without a card) any
host compiler take it.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

__all__ = ["SOURCE", "Kernels"]

_HELPERS = r"""
typedef long long i64;

// Where row `row` of a tile (B, heads, n, length) starts in a mask with these strides.
__device__ i64 mask_row(i64 row, i64 heads, i64 n, i64 sb, i64 sh, i64 si) {
    return row / (heads * n) * sb + row / n % heads * sh + row % n * si;
}
"""

_KERNELS = r"""
// NaN wins, as in the array API.
__device__ REAL greater_REAL(REAL a, REAL b) { return a > b || a != a ? a : b; }

// The maximum (or sum) of x over a block of whole warps, in every thread.
__device__ REAL over_block_REAL(REAL x, bool sum) {
    __shared__ REAL warps[32];
    for (int step = 16; step > 0; step /= 2) {
        REAL other = __shfl_xor_sync(0xffffffffu, x, step);
        x = sum ? x + other : greater_REAL(x, other);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < (int)blockDim.x / 32; ++w)
        x = sum ? x + warps[w] : greater_REAL(x, warps[w]);
    __syncthreads();  // before the next use of `warps`
    return x;
}

// s becomes exp(s - new maximum), 0 where hidden. m and total are the row's maximum and sum so far.
extern "C" __global__ void softmax_step_REAL(
    REAL* s, const REAL* m, const REAL* total, REAL* factor, REAL* new_m, REAL* new_total,
    i64 rows, i64 length, const unsigned char* shown, int masked,
    i64 heads, i64 n, i64 sb, i64 sh, i64 si, i64 sj)
{
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        REAL* line = s + row * length;
        const unsigned char* see = shown + (masked ? mask_row(row, heads, n, sb, sh, si) : 0);
        REAL top = m[row];
        for (i64 j = threadIdx.x; j < length; j += blockDim.x)
            if (!masked || see[j * sj]) top = greater_REAL(top, line[j]);
        top = over_block_REAL(top, false);
        REAL shift = isinf(top) && top < 0 ? 0 : top;  // -inf - -inf is not wanted
        REAL sum = 0;
        for (i64 j = threadIdx.x; j < length; j += blockDim.x) {
            REAL p = !masked || see[j * sj] ? exp(line[j] - shift) : 0;
            line[j] = p;
            sum += p;
        }
        sum = over_block_REAL(sum, true);
        if (threadIdx.x == 0) {
            REAL f = exp(m[row] - shift);
            factor[row] = f;
            new_m[row] = top;
            new_total[row] = total[row] * f + sum;
        }
    }
}

// s becomes P, dp the gradient of the scores, and tanh that before the softcap; 0 where hidden.
// lse is shift + rest, flow is delta - d_lse.
extern "C" __global__ void gradient_step_REAL(
    REAL* s, REAL* dp, REAL* tanh, int capped,
    const REAL* shift, const REAL* rest, const REAL* flow,
    i64 rows, i64 length, const unsigned char* shown, int masked,
    i64 heads, i64 n, i64 sb, i64 sh, i64 si, i64 sj)
{
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const unsigned char* see = shown + (masked ? mask_row(row, heads, n, sb, sh, si) : 0);
        REAL top = shift[row], log_sum = rest[row], drain = flow[row];
        for (i64 j = threadIdx.x; j < length; j += blockDim.x) {
            i64 at = row * length + j;
            bool seen = !masked || see[j * sj];
            REAL below = s[at] - top;
            REAL p = seen ? exp((below > 0 ? 0 : below) - log_sum) : 0;
            REAL ds = seen ? p * (dp[at] - drain) : 0;
            s[at] = p;
            dp[at] = ds;
            if (capped) tanh[at] = seen ? ds * (1 - tanh[at] * tanh[at]) : 0;
        }
    }
}
"""

SOURCE = _HELPERS + _KERNELS.replace("REAL", "float") + _KERNELS.replace("REAL", "double")
"""CUDA C++ with `softmax_step_` and `gradient_step_`, each for `float` and `double`."""


class Kernels:
    """The two kernels, compiled by CuPy at their first use on a device.

    Args:
        xp: the array namespace.
    """

    most_blocks = 2**31 - 1

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self._compiled: dict[str, Any] = {}

    def softmax_step(self, s: Any, shown: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """See `ArrayBackend.softmax_step`; s is overwritten."""
        xp = self.xp
        s, m, total = (xp.ascontiguousarray(x) for x in (s, m, total))
        factor, new_m, new_total = xp.empty_like(m), xp.empty_like(m), xp.empty_like(m)
        self._launch("softmax_step", s, shown, (s, m, total, factor, new_m, new_total))
        return s, factor, new_m, new_total

    def gradient_step(
        self, s: Any, dp: Any, tanh: Any, shown: Any, shift: Any, rest: Any, flow: Any
    ) -> tuple[Any, Any, Any]:
        """See `ArrayBackend.gradient_step`; s, dp and tanh are overwritten."""
        xp = self.xp
        rest = xp.zeros_like(shift) if rest is None else rest
        s, dp, shift, rest, flow = (xp.ascontiguousarray(x) for x in (s, dp, shift, rest, flow))
        capped = tanh is not None
        slope = xp.ascontiguousarray(tanh) if capped else s  # not read unless capped
        arguments = (s, dp, slope, np.int32(capped), shift, rest, flow)
        self._launch("gradient_step", s, shown, arguments)
        return s, dp, slope if capped else dp

    def _launch(self, name: str, s: Any, shown: Any, arguments: tuple[Any, ...]) -> None:
        """A block a row; the size of s and the place of the mask follow the arguments."""
        _, heads, n, length = s.shape
        rows = math.prod(s.shape[:3])
        masked = shown is not None
        mask = self.xp.broadcast_to(shown, s.shape) if masked else s  # not read unless masked
        strides = mask.strides if masked else (0, 0, 0, 0)
        sizes = [np.int64(x) for x in (heads, n, *strides)]
        kind = "double" if s.dtype == self.xp.float64 else "float"
        threads = 32 if length <= 128 else 128 if length <= 1024 else 256
        self.run(
            f"{name}_{kind}", min(rows, self.most_blocks), threads,
            (*arguments, np.int64(rows), np.int64(length), mask, np.int32(masked), *sizes),
        )  # fmt: skip

    def run(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Launch on the current device and stream."""
        kernel = self._compiled.get(name)
        if kernel is None:
            kernel = self._compiled[name] = cupy.RawKernel(SOURCE, name)
        kernel((blocks,), (threads,), arguments)
