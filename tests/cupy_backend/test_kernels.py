"""The CUDA kernels do what the base class says, whatever the mask, the row and the block."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import array_api_compat.numpy as numpy_xp
import numpy as np
import pytest

from attnx.plugin import ArrayBackend
from attnx_cupy._kernels import SOURCE, Kernels
from attnx_cupy._lane import CupyLane

SIZES = [1, 31, 32, 33, 128, 129, 257, 1025]


def scores(length: int, dtype: type, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    s = (4 * rng.standard_normal((2, 3, 5, length))).astype(dtype)
    s[0, 1, 2] = -np.inf
    s[1, 2, 0, length // 2] = np.nan
    s[1, 2, 1, length // 3] = np.inf
    s[0, 0] *= 1e4
    return s


def masks(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    drawn = rng.random((2, 3, 5, length)) < 0.5
    drawn[1, 0] = False
    return {
        "none": None,
        "full": drawn,
        "grid": drawn[:1, :1],
        "keys": drawn[:, :1, :1],
        "heads": drawn[:1, :, :1, :1],
        "rows": drawn[:, :1, :, :1],
        "one": np.ones((1, 1, 1, 1), bool),
        "transposed": np.ascontiguousarray(drawn.swapaxes(-1, -2)).swapaxes(-1, -2),
        "strided": np.repeat(drawn, 2, axis=-1)[..., ::2],
        "reversed": drawn[..., ::-1],
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", SIZES)
def test_the_softmax_step_is_that_of_the_base_class(
    kernels: type[Kernels], host_lane: CupyLane, length: int, dtype: type
) -> None:
    base = ArrayBackend("base", host_lane)
    rng = np.random.default_rng(2)
    sinks = np.array([1, -np.inf, 3], dtype).reshape(1, 3, 1, 1)
    starts = {
        "first": (np.full((2, 3, 5, 1), -np.inf, dtype), np.zeros((2, 3, 5, 1), dtype)),
        "later": (rng.standard_normal((2, 3, 5, 1)).astype(dtype), np.full((2, 3, 5, 1), 2, dtype)),
        "sinks": (np.broadcast_to(sinks, (2, 3, 5, 1)), np.ones((2, 3, 5, 1), dtype)),
    }
    for name, shown in masks(length).items():
        for start, (m, total) in starts.items():
            s = scores(length, dtype)
            with np.errstate(all="ignore"):
                expected = list(base.softmax_step(s.copy(), shown, m, total))
                got = kernels(numpy_xp).softmax_step(s.copy(), shown, m, total)
            if shown is not None:  # of a NaN row, only what is visible matters
                expected[0] = np.where(shown, expected[0], 0)
            for part, a, b in zip(("p", "factor", "m", "total"), got, expected, strict=True):
                np.testing.assert_allclose(
                    a,
                    b,
                    rtol=2e-5 if dtype is np.float32 else 1e-13,
                    err_msg=f"{name} {start} {part}",
                )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", SIZES)
def test_the_gradient_step_is_that_of_the_base_class(
    kernels: type[Kernels], host_lane: CupyLane, length: int, dtype: type
) -> None:
    base = ArrayBackend("base", host_lane)
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((2, 3, 5, 1)).astype(dtype) for _ in range(3)]
    for name, shown in masks(length).items():
        for capped in (False, True):
            s = scores(length, dtype)
            dp = scores(length, dtype, seed=5)
            tanh = np.tanh(scores(length, dtype, seed=6)) if capped else None
            for rest in (None, rows[1]):
                arguments = (shown, rows[0], rest, rows[2])
                copies = [None if x is None else x.copy() for x in (s, dp, tanh)]
                with np.errstate(all="ignore"):
                    expected = base.gradient_step(s, dp, tanh, *arguments)
                    got = kernels(numpy_xp).gradient_step(*copies, *arguments)
                for part, a, b in zip(("p", "ds", "d_raw"), got, expected, strict=True):
                    np.testing.assert_allclose(
                        a, b, rtol=2e-5 if dtype is np.float32 else 1e-12,
                        err_msg=f"{name} capped={capped} {part}",
                    )  # fmt: skip


def test_the_kernels_take_operands_that_are_not_contiguous(kernels: type[Kernels]) -> None:
    s = scores(40, np.float64)
    m, total = np.full((2, 3, 5, 1), -np.inf), np.zeros((2, 3, 5, 1))
    with np.errstate(all="ignore"):
        straight = kernels(numpy_xp).softmax_step(s.copy(), None, m, total)
        turned = np.asfortranarray(s)
        for a, b in zip(
            kernels(numpy_xp).softmax_step(turned, None, m, total), straight, strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("some", ["< 7", ">= 7", "< 32", ">= 32"])
def test_a_barrier_that_not_every_thread_reaches_is_told_of(some: str, build: Any) -> None:
    """The header that plays CUDA must not hide what would hang a card."""
    source = f'extern "C" __global__ void bad(int n) {{ if (threadIdx.x {some}) __syncthreads(); }}'
    n = ctypes.c_int32(0)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(n))
    assert build(source, ["bad"]).launch_bad(3, 64, pointers) == 1


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_cuda_source_compiles(
    architecture: str, kernel_names: list[str], tmp_path: Path
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    source, binary = tmp_path / "kernels.cu", tmp_path / "kernels.cubin"
    source.write_text(SOURCE, "utf-8")
    subprocess.run(
        [nvcc, f"-arch={architecture}", "--cubin", "-Werror", "all-warnings", "-o", binary, source],
        check=True,
    )
    data = binary.read_bytes()
    for name in kernel_names:
        assert name.encode() in data


def test_the_cuda_source_needs_no_header() -> None:
    """NVRTC, which CuPy uses, has none."""
    assert "#include" not in SOURCE
