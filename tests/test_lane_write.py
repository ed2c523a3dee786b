"""`Lane.write`: every framework writes the same rows, in place or not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import array_api_compat.numpy as numpy_xp
import array_api_strict
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnx
from attnx_cupy._lane import CupyLane

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")
FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.array, "torch": torch.tensor, "jax": jnp.asarray,
}  # fmt: skip


class OnHost(CupyLane):
    """CuPy's lane with NumPy's arrays."""

    xp = numpy_xp

    def on(self, array: Any) -> Any:
        return nullcontext()

    def to_numpy(self, array: Any) -> Any:
        return array


@pytest.mark.parametrize(
    ("framework", "axis"),
    [
        pytest.param(name, axis, marks=pytest.mark.sweep if (name, axis) == ("jax", 1) else ())
        for name in ("numpy", "torch", "jax", "cupy", "array_api_strict")
        for axis in (1, 2)
    ],
)
def test_every_lane_writes_the_same(framework: str, axis: int, loop: Callable[..., Any]) -> None:
    """Rows of each entry at places of their own, without those that are not real."""
    rng = np.random.default_rng(2)
    others = {
        "array_api_strict": (loop().lane, array_api_strict.asarray),
        "cupy": (OnHost(), np.array),
    }
    lane, convert = others.get(framework) or (
        attnx.get_backend(framework).lane,
        FRAMEWORKS[framework],
    )
    shape = [2, 3, 3, 4]
    shape[axis] = 6
    buffer, rows = rng.standard_normal(shape), np.array([[5, 0, 1], [2, 3, 4]])
    shape[axis] = 3
    new, real = rng.standard_normal(shape), np.array([[True, True, False], [True, False, True]])
    new[0, :, 2] = NAN if axis == 2 else new[0, :, 2]
    for kept in (None, real):
        expected = np.moveaxis(buffer, axis, 1).copy()
        for b, i in np.ndindex(2, 3):
            if kept is None or kept[b, i]:
                expected[b, rows[b, i]] = np.moveaxis(new, axis, 1)[b, i]
        given = [convert(x.astype("f4")) for x in (buffer, new)]
        got = lane.write(*given, convert(rows), None if kept is None else convert(kept), axis)
        wanted = np.moveaxis(expected, 1, axis).astype("f4")
        np.testing.assert_array_equal(lane.to_numpy(got), wanted)
    if lane.any_shape:
        wanted = buffer.astype("f4")
        wanted[(slice(None),) * axis + (slice(1, 4),)] = new
        got = lane.write(*(convert(x.astype("f4")) for x in (buffer, new)), slice(1, 4), None, axis)
        np.testing.assert_array_equal(lane.to_numpy(got), wanted)
