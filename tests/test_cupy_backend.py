"""The CuPy backend's declaration and choices: its lane, its devices, its tiles, its route.

That it computes the right thing is shown in `tests/cupy_backend`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import array_api_compat.numpy as numpy_xp
import cupy
import numpy as np
import pytest

import attnx
from attnx.errors import ArgumentError, UnsupportedError
from attnx.plugin import Call, CallClass
from attnx_cupy._backend import TILE, CupyBackend
from attnx_cupy._lane import LANE, CupyLane


class HostLane(CupyLane):
    """CuPy's lane with NumPy's arrays."""

    name = "numpy"
    xp = numpy_xp

    def on(self, array: Any) -> Any:
        return nullcontext()

    def to_numpy(self, array: Any) -> Any:
        raise AssertionError("a transfer from the device")


class Device:
    def __init__(self, number: int) -> None:
        self.id = number


class Somewhere:
    def __init__(self, device: int, dtype: str = "float32") -> None:
        self.device, self.dtype = Device(device), np.dtype(dtype)


def test_the_lane_names_devices_and_never_reads_contents() -> None:
    array = Somewhere(3)
    assert LANE.device(array) == "cuda:3"
    assert not LANE.readable(array)
    assert LANE.fast_key(array, array, array) == ("cupy", np.dtype("float32"), 3)
    assert LANE.fast_key(array, array, Somewhere(3, "float64")) is None
    assert LANE.fast_key(array, array, Somewhere(0)) is None


def test_arrays_of_two_devices_are_refused_by_name() -> None:
    a, b = Somewhere(0), Somewhere(1)
    assert LANE.admit(a, a, a) == (a, a, a)
    with pytest.raises(ArgumentError, match=r"v: expected the device of q, cuda:0, got cuda:1"):
        LANE.admit(a, a, b)


def test_the_lane_makes_arrays_and_integers() -> None:
    lane = HostLane()
    x = np.ones(3, np.float32)
    assert lane.full((2, 1), 7.0, np.float32, like=x).tolist() == [[7.0], [7.0]]
    assert lane.arange(2, 5, like=x).tolist() == [2, 3, 4]
    assert lane.integers(((1, 2), (3, 4)), x).dtype == np.int64
    copy = lane.from_numpy(x, like=x)
    assert copy is not x
    assert not np.shares_memory(copy, x)
    assert lane.dtype_name(x) == "float32"


def no_driver() -> int:
    raise cupy.cuda.runtime.CUDARuntimeError(35)


def test_without_a_device_it_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = attnx.get_backend("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
    monkeypatch.setattr(backend, "_devices", None)
    info = next(info for info in attnx.backends() if info.name == "cupy")
    assert info.status == "unavailable"
    assert info.devices == ()
    assert info.version == cupy.__version__
    assert info.capabilities is not None
    assert info.reason is not None
    assert info.reason.startswith("installed, but no CUDA device: cudaErrorInsufficientDriver")


def test_without_a_device_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
    monkeypatch.setattr(attnx.get_backend("cupy"), "_devices", None)
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(
        UnsupportedError, match=r"'cupy' cannot do this call: .*no CUDA device: cuda"
    ):
        attnx.attention(x, x, x, backend="cupy")
    with (
        attnx.use_backend("cupy", transfer=True),
        pytest.raises(UnsupportedError, match="no CUDA device"),
    ):
        attnx.attention(x, x, x)
    explanation = attnx.explain(x, x, x, backend="cupy")
    assert explanation.choice is None
    assert "no CUDA device" in str(explanation)


def test_a_driver_without_a_card_is_no_device_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    backend = CupyBackend()
    assert backend.devices() == ()
    assert backend.no_device() == "no CUDA device"


def test_devices_are_listed_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 2)
    assert CupyBackend().devices() == ("cuda:0", "cuda:1")


def call(B: int, H: int, Lq: int, Lk: int, mask: Any = None) -> Call:
    structure = None if mask is None else mask.structure
    cls = CallClass("cupy", "cuda:0", "float32", 8, 8, False, Lq == Lk, mask=structure)
    return Call(cls, B, H, H, Lq, Lk, 8, 8, 1.0, mask=mask)


def sizes(B: int, H: int, Lq: int, Lk: int, mask: Any = None) -> tuple[int, int]:
    return CupyBackend().block_sizes(call(B, H, Lq, Lk, mask))


def test_tiles_are_large_and_bounded() -> None:
    assert sizes(1, 1, 32768, 32768) == (4096, 4096)
    assert sizes(1, 8, 8192, 8192) == (2048, 2048)
    for B, H in ((1, 1), (1, 8), (2, 16), (8, 32), (64, 32)):
        for Lq, Lk in ((32768, 32768), (4096, 4096), (1, 100000), (7, 512)):
            rows, keys = sizes(B, H, Lq, Lk)
            assert B * H * min(rows, Lq) * min(keys, Lk) <= max(TILE, B * H * 128 * 128)


def test_a_mask_with_structure_has_smaller_tiles_and_decoding_longer_ones() -> None:
    assert sizes(1, 1, 32768, 32768, attnx.Causal("top_left")) == (2048, 2048)
    assert sizes(1, 1, 32768, 32768, attnx.Window(512, 0, "top_left")) == (1024, 1024)
    assert sizes(1, 32, 1, 100000)[1] >= 100000


def test_a_mask_of_numbers_alone_is_classified_without_the_device() -> None:
    backend = CupyBackend(HostLane())
    numbers = attnx.Causal("top_left") & attnx.Lengths(17)
    on_device = attnx.Lengths(np.array([3, 17]))
    like = np.ones(1, np.float32)
    table = backend.tile_table(numbers, call(2, 1, 20, 20, numbers), 10, 10, like)
    assert table == [[1, 0], [2, 1]]
    with pytest.raises(AssertionError, match="a transfer"):
        backend.tile_table(on_device, call(2, 1, 20, 20, on_device), 10, 10, like)


def test_the_route_is_told() -> None:
    cls = call(1, 1, 3, 4).cls
    assert CupyBackend().route(cls) == "cuBLAS tiles, fused softmax"
    half = cls._replace(dtype="bfloat16")
    assert CupyBackend().route(half) == "cuBLAS tiles, fused softmax, upcast a tile at a time"
