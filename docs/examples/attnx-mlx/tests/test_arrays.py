"""Arrays keep their values and dtypes, on whatever way they come and go."""

from __future__ import annotations

from typing import Any

import attnx
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from attnx.plugin import lane

from attnx_mlx._namespace import NAMESPACE as xp

DTYPES = ["float16", "bfloat16", "float32", "float64", "bool", "int32", "uint32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_go_there_and_back(dtype: str) -> None:
    there = np.array([[0, 1, 3]]).astype(getattr(ml_dtypes, dtype, dtype))
    made = lane("mlx").from_numpy(there)
    assert lane("mlx").dtype_name(made) == dtype
    back = lane("mlx").to_numpy(made)
    assert (back.dtype, back.tolist()) == (there.dtype, there.tolist())
    assert lane("mlx").adopt(lane("mlx").export(made)).tolist() == there.tolist()


def test_float64_is_not_narrowed_by_dlpack() -> None:
    third = np.array([1 / 3])
    assert xp.from_dlpack(third).item() == 1 / 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_another_frameworks_backend_takes_and_gives_them(dtype: str) -> None:
    q = mx.ones((1, 2, 3, 4), dtype=getattr(mx, dtype))
    out = attnx.attention(q, q, q, backend="numpy")
    assert isinstance(out, mx.array)
    assert out.dtype == q.dtype


@pytest.mark.parametrize("name", ["exp", "sin", "cos", "tanh", "log"])
def test_functions_of_float64_are_computed_in_float64(name: str) -> None:
    x = np.linspace(0.1, 300.0, 1001)
    made = np.array(getattr(xp, name)(mx.array(x, dtype=mx.float64)))
    np.testing.assert_allclose(made, getattr(np, name)(x), rtol=1e-13, atol=1e-13)


def test_exp_of_minus_infinity_is_zero() -> None:
    x = mx.array([-mx.inf, 0.0], dtype=mx.float64)
    assert xp.exp(x).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("rows", [slice(1, 3), [[1, 2], [4, 0]]], ids=["a slice", "each its own"])
def test_rows_are_written(rows: Any) -> None:
    new = mx.ones((2, 2, 3))
    at = rows if isinstance(rows, slice) else mx.array(rows)
    made = np.array(lane("mlx").write(mx.zeros((2, 5, 3)), new, at, None, 1))
    expected = np.zeros((2, 5, 3))
    for entry in range(2):
        expected[entry, rows if isinstance(rows, slice) else rows[entry]] = 1
    assert made.tolist() == expected.tolist()
