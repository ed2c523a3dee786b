"""The CuPy backend over NumPy, and its CUDA kernels on this host.

The class runs whole with NumPy as its namespace, so every mask and gradient is judged without a
card. The CUDA source itself computes there too: a host compiler builds it behind a header that
plays CUDA's launch model (`cuda_on_host.h`), and ctypes hands it the very arguments that CuPy
would. What only a card can show is in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import array_api_compat.numpy as numpy_xp
import numpy as np
import pytest

import attnx
from attnx.plugin import BackendSpec, hookimpl
from attnx_cupy._backend import CupyBackend
from attnx_cupy._kernels import SOURCE, Kernels
from attnx_cupy._lane import CupyLane

HERE = Path(__file__).resolve().parent
KERNELS = [
    f"{step}_step_{kind}" for step in ("softmax", "gradient") for kind in ("float", "double")
]


class Recorder:
    """A namespace that notes what is asked of it, and how it is called."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self.names: set[str] = set()
        self.calls: dict[str, set[tuple[int, tuple[str, ...]]]] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._xp, name)
        self.names.add(name)
        if not callable(value) or isinstance(value, type):
            return value

        def called(*args: Any, **options: Any) -> Any:
            self.calls.setdefault(name, set()).add((len(args), tuple(sorted(options))))
            return value(*args, **options)

        return called


class HostLane(CupyLane):
    """CuPy's lane with NumPy's arrays."""

    name = "numpy"
    array_types = (np.ndarray,)

    def __init__(self) -> None:
        self.xp = Recorder(numpy_xp)

    def on(self, array: Any) -> Any:
        return nullcontext()

    def to_numpy(self, array: Any) -> Any:
        return np.array(array)

    def quiet(self) -> Any:
        return np.errstate(all="ignore")


class EmulatedKernels(Kernels):
    """The kernels' contract in NumPy."""

    def run(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        *arrays, rows, length, mask, masked, heads, n, _, _, _, _ = arguments
        s = arrays[0]
        assert s.shape[1:] == (heads, n, length)
        assert s.size == rows * length
        assert all(x.flags.c_contiguous for x in arrays if isinstance(x, np.ndarray))
        shown = mask if masked else np.ones(s.shape, bool)
        self.softmax(shown, *arrays) if name.startswith("softmax") else self.gradient(
            shown, *arrays
        )

    def softmax(
        self, shown: Any, s: Any, m: Any, total: Any, factor: Any, new: Any, sums: Any
    ) -> None:
        new[...] = np.maximum(m, np.where(shown, s, -np.inf).max(axis=-1, keepdims=True))
        shift = np.where(new == -np.inf, 0, new)
        s[...] = np.where(shown, np.exp(s - shift), 0)
        factor[...] = np.exp(m - shift)
        sums[...] = total * factor + s.sum(axis=-1, keepdims=True)

    def gradient(
        self, shown: Any, s: Any, dp: Any, tanh: Any, capped: Any, shift: Any, rest: Any, flow: Any
    ) -> None:
        s[...] = np.where(shown, np.exp(np.minimum(s - shift, 0) - rest), 0)
        dp[...] = np.where(shown, s * (dp - flow), 0)
        if capped:
            tanh[...] = np.where(shown, dp * (1 - tanh * tanh), 0)


class HostKernels(Kernels):
    """The CUDA kernels themselves, run by this host's processor."""

    library: Any = None
    most_blocks = 7  # so that a block has several rows to do

    def run(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        values = [self.value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        failed = getattr(self.library, f"launch_{name}")(blocks, threads, pointers)
        assert not failed, f"{name}: the threads of block {failed - 1} part at a barrier"

    def value(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return ctypes.c_void_p(x.ctypes.data)
        return {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64}[type(x)](int(x))


class HostBackend(CupyBackend):
    """The backend over NumPy, where the registry can give it NumPy's arrays."""

    def __init__(self, kernels: type[Kernels], tile: tuple[int, int] | None = None) -> None:
        lane = HostLane()
        super().__init__(lane, kernels(numpy_xp))
        self.capabilities = self.capabilities._replace(devices=frozenset({"cpu"}))
        self.tile = tile

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def block_sizes(self, call: Any) -> tuple[int, int]:
        return self.tile or super().block_sizes(call)


class Plugin:
    def __init__(self, backend: HostBackend) -> None:
        self.backend = backend

    @hookimpl
    def attnx_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name="cupy-host", framework="numpy", load=lambda: self.backend)]


def registered(backend: HostBackend) -> Iterator[HostBackend]:
    attnx.register(Plugin(backend), "cupy-host")
    yield backend
    attnx.unregister("cupy-host")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiles CUDA source with kernels of these names for this host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the CUDA source for this host")

    def build(source: str, names: list[str]) -> Any:
        folder = tmp_path_factory.mktemp("cuda")
        launchers = "\n".join(f"HOST_LAUNCH({name})" for name in names)
        (folder / "kernels.cpp").write_text(
            f'#include "cuda_on_host.h"\n{source}\n{launchers}\n', "utf-8"
        )
        options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
        command = [
            compiler,
            *options,
            "-I",
            HERE,
            "-o",
            folder / "kernels.so",
            folder / "kernels.cpp",
        ]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(folder / "kernels.so"))

    return build


@pytest.fixture(scope="session")
def host_kernels(build: Any) -> type[Kernels]:
    """The kernels of the CUDA source."""
    HostKernels.library = build(SOURCE, KERNELS)
    return HostKernels


@pytest.fixture(params=["cuda source", "emulated"])
def kernels(request: pytest.FixtureRequest) -> type[Kernels]:
    """Both ways to have the kernels without a card."""
    if request.param == "emulated":
        return EmulatedKernels
    return request.getfixturevalue("host_kernels")


@pytest.fixture
def kernel_names() -> list[str]:
    """The kernels that the source must define."""
    return KERNELS


@pytest.fixture
def host_lane() -> CupyLane:
    """CuPy's lane with NumPy's arrays."""
    return HostLane()


@pytest.fixture
def emulated() -> Iterator[HostBackend]:
    """By the emulated kernels."""
    yield from registered(HostBackend(EmulatedKernels))


@pytest.fixture
def tiled() -> Iterator[HostBackend]:
    """By the emulated kernels, in tiles so small that every case has many."""
    yield from registered(HostBackend(EmulatedKernels, tile=(8, 5)))


@pytest.fixture
def compiled(host_kernels: type[Kernels]) -> Iterator[HostBackend]:
    """By the CUDA source."""
    yield from registered(HostBackend(host_kernels, tile=(16, 40)))
