"""The CuPy backend without a card: its class over NumPy, its kernels on this host.

The class runs whole with NumPy as its namespace, so every mask and gradient is judged. The CUDA
source itself computes there too: a host compiler builds it behind a header that plays CUDA's
launch model (`cuda_on_host.h`), and ctypes hands it the very arguments that CuPy would. What only
a card can show is in `tests/gpu`.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import array_api_compat.cupy as cupy_xp
import array_api_compat.numpy as numpy_xp
import cupy
import numpy as np
import pytest

import attnx
from attnx.errors import ArgumentError, UnsupportedError
from attnx.plugin import ArrayBackend, BackendSpec, hookimpl
from attnx_conformance.cases import CASES, Case, find
from attnx_conformance.runner import run
from attnx_cupy._backend import TILE, CupyBackend
from attnx_cupy._kernels import SOURCE, Kernels
from attnx_cupy._lane import LANE, CupyLane

ROOT = Path(__file__).resolve().parents[1]
KERNELS = [
    f"{step}_{kind}" for step in ("softmax_step", "gradient_step") for kind in ("float", "double")
]
LONG = re.compile(r"long|[1-9]\d\d|1025|2049|correlated|many-queries")
QUICK = [case for case in CASES if not LONG.search(case.name)]


# The backend on NumPy ---------------------------------------------------------------------------


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
        self.transfers = 0

    def on(self, array: Any) -> Any:
        return nullcontext()

    def to_numpy(self, array: Any) -> Any:
        self.transfers += 1
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


@cache
def host_library() -> Any:
    """The CUDA source, compiled for this host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the CUDA source for this host")
    folder = Path(TEMPORARY[0])
    launchers = "\n".join(f"HOST_LAUNCH({name})" for name in KERNELS)
    source = folder / "kernels.cpp"
    source.write_text(f'#include "cuda_on_host.h"\n{SOURCE}\n{launchers}\n', "utf-8")
    library = folder / "kernels.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC",
         "-I", str(ROOT / "tests"), "-o", str(library), str(source)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


TEMPORARY: list[Any] = []


@pytest.fixture(scope="session", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    TEMPORARY.append(tmp_path_factory.mktemp("cuda"))


class HostKernels(Kernels):
    """The CUDA kernels themselves, run by this host's processor."""

    most_blocks = 50  # so that a block has several rows to do

    def run(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        values = [self.value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        failed = getattr(host_library(), f"launch_{name}")(blocks, threads, pointers)
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


@pytest.fixture
def emulated() -> Iterator[HostBackend]:
    yield from registered(HostBackend(EmulatedKernels))


@pytest.fixture
def tiled() -> Iterator[HostBackend]:
    yield from registered(HostBackend(EmulatedKernels, tile=(8, 5)))


@pytest.fixture
def compiled() -> Iterator[HostBackend]:
    host_library()
    yield from registered(HostBackend(HostKernels, tile=(16, 40)))


def passes(case: Case, dtype: str, **options: Any) -> None:
    outcome = run(case, "cupy-host", dtype, **options)
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_case_of_the_suite_holds(case: Case, emulated: HostBackend) -> None:
    passes(case, "float32" if "float32" in case.dtypes else case.dtypes[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("case", QUICK[::9], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds_in_other_dtypes_and_small_tiles(
    case: Case, dtype: str, tiled: HostBackend
) -> None:
    if dtype in case.dtypes:
        passes(case, dtype, layout="bshd")


@pytest.mark.parametrize("case", QUICK[::8], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds_by_the_cuda_source(case: Case, compiled: HostBackend) -> None:
    passes(case, "float64" if "float64" in case.dtypes else case.dtypes[0])
    if "float32" in case.dtypes:
        passes(case, "float32")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_holds_by_the_cuda_source(case: Case, dtype: str, compiled: HostBackend) -> None:
    if dtype in case.dtypes:
        passes(case, dtype)


# The kernels ------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("kernels", [HostKernels, EmulatedKernels])
def test_the_softmax_step_is_that_of_the_base_class(
    kernels: type[Kernels], length: int, dtype: type
) -> None:
    base = ArrayBackend("base", HostLane())
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
@pytest.mark.parametrize("kernels", [HostKernels, EmulatedKernels])
def test_the_gradient_step_is_that_of_the_base_class(
    kernels: type[Kernels], length: int, dtype: type
) -> None:
    base = ArrayBackend("base", HostLane())
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


@pytest.mark.parametrize("kernels", [HostKernels, EmulatedKernels])
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


def test_a_barrier_that_not_every_thread_reaches_is_told_of(tmp_path: Path) -> None:
    """The header that plays CUDA must not hide what would hang a card."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the CUDA source for this host")
    (tmp_path / "bad.cpp").write_text(
        '#include "cuda_on_host.h"\n'
        'extern "C" __global__ void bad(float* x) { if (threadIdx.x < 7) __syncthreads(); }\n'
        "HOST_LAUNCH(bad)\n"
    )
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-I", str(ROOT / "tests")]
    subprocess.run([*command, "-o", tmp_path / "bad.so", tmp_path / "bad.cpp"], check=True)
    x = ctypes.c_void_p(0)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(x))
    assert ctypes.CDLL(str(tmp_path / "bad.so")).launch_bad(3, 32, pointers) == 1


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_cuda_source_compiles(architecture: str, tmp_path: Path) -> None:
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
    for name in KERNELS:
        assert name.encode() in data


def test_the_cuda_source_needs_no_header() -> None:
    """NVRTC, which CuPy uses, has none."""
    assert "#include" not in SOURCE


# What it asks of CuPy ---------------------------------------------------------------------------

FILES = [
    *sorted((ROOT / "backends" / "attnx_cupy").glob("*.py")),
    *(ROOT / "attnx" / f"{name}.py" for name in (
        "_array_backend", "_tile_ops", "_tile_sums", "tiling", "_visibility", "_gradients", "_call",
        "_checks", "_lane",
    )),
]  # fmt: skip


def chains(tree: ast.AST, is_root: Callable[[ast.AST], bool]) -> set[str]:
    """Every dotted name that starts at a root, the root left out."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute) and not is_root(node):
            names.insert(0, node.attr)
            node = node.value
        if names and is_root(node):
            found.add(".".join(names))
    return found


def is_cupy(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "cupy"


def is_namespace(node: ast.AST) -> bool:
    """`xp`, or anything's `.xp`."""
    if isinstance(node, ast.Name):
        return node.id == "xp"
    return isinstance(node, ast.Attribute) and node.attr == "xp"


def has(module: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_name_in_the_source_exists_in_the_installed_cupy(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    names = chains(tree, is_cupy)
    assert {n for n in names if not has(cupy, n)} == set()
    names = {n.split(".")[0] for n in chains(tree, is_namespace)}
    assert {n for n in names if not hasattr(cupy_xp, n)} == set()


def test_the_names_are_found() -> None:
    """The search itself: a file in which it must find something of each kind."""
    lane = ast.parse((ROOT / "backends" / "attnx_cupy" / "_lane.py").read_text("utf-8"))
    assert {"ndarray", "cuda.Device", "asnumpy"} <= chains(lane, is_cupy)
    base = ast.parse((ROOT / "attnx" / "_array_backend.py").read_text("utf-8"))
    assert {"where", "isfinite", "concat"} <= chains(base, is_namespace)


WIDE = """
    bias-everything prefix-model segments-batched starts-and-lengths window-positions bool-causal
    not-predicate lengths-bottom-right bool-of-one live-value-nan-bias softcap grouped
    live-cotangent-nan lengths-two-batch-axes sinks-no-keys
"""


def test_everything_asked_of_the_namespace_in_a_run_exists_in_the_installed_cupy(
    tiled: HostBackend,
) -> None:
    for name in WIDE.split():
        passes(find(name), "float32")
    recorder = tiled.lane.xp
    assert len(recorder.names) > 20
    assert {name for name in recorder.names if not hasattr(cupy_xp, name)} == set()
    for name, calls in recorder.calls.items():
        function = getattr(cupy_xp, name)
        try:
            signature = inspect.signature(function)
        except ValueError:  # a ufunc, which takes arrays alone
            assert {options for _, options in calls} == {()}, name
            continue
        for count, options in calls:
            signature.bind(*range(count), **dict.fromkeys(options))


class Probe(np.ndarray):
    """An array that notes which of its attributes Python code asks for."""

    asked: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")
        if caller.startswith("attnx"):
            Probe.asked.add(name)
        return super().__getattribute__(name)


def test_every_attribute_asked_of_an_array_in_a_run_exists_in_the_installed_cupy(
    tiled: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy_lane = attnx.get_backend("numpy").lane
    monkeypatch.setattr(numpy_lane, "readable", lambda array: False)
    for name in ("bias-everything", "segments-batched", "lengths-with-zero", "bool-causal"):
        case = find(name)
        inputs = case.inputs("float32")
        mask = inputs.mask
        if isinstance(mask, np.ndarray):
            mask = mask.view(Probe)
        elif mask is not None:
            mask = attnx.masks.map_leaves(
                mask, lambda _, __, leaf: leaf.view(Probe) if isinstance(leaf, np.ndarray) else leaf
            )
        given = {"bias": inputs.bias, "sinks": inputs.sinks}
        options = {n: None if x is None else x.view(Probe) for n, x in given.items()}
        arrays = [x.view(Probe) for x in (inputs.q, inputs.k, inputs.v)]
        out, pullback = attnx.attention_vjp(
            *arrays, mask=mask, **options, **case.options, backend="cupy-host"
        )
        pullback(out)
        attnx.attention_weights(*arrays[:2], mask=mask, **options, **case.options,
                                backend="cupy-host")  # fmt: skip
    assert {"shape", "dtype"} <= Probe.asked
    asked = {name for name in Probe.asked if not name.startswith("__")}  # NumPy's own protocols
    assert {name for name in asked if not hasattr(cupy.ndarray, name)} == set()


def test_cupy_has_the_loops_that_bfloat16_needs() -> None:
    """Elsewhere its arrays are only cast, sliced and made, which CuPy does for any dtype it has."""
    assert "E->?" in cupy.isfinite.types
    assert "EE->?" in cupy.not_equal.types


# Its lane and its declaration -------------------------------------------------------------------


class Device:
    def __init__(self, number: int) -> None:
        self.id = number


class Somewhere:
    def __init__(self, device: int) -> None:
        self.device = Device(device)


def test_the_lane_names_devices_and_never_reads_contents() -> None:
    array = Somewhere(3)
    assert LANE.device(array) == "cuda:3"
    assert not LANE.readable(array)
    assert LANE.fast_key(array, array, array) == 3
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


# Its choices ------------------------------------------------------------------------------------


def sizes(B: int, H: int, Lq: int, Lk: int, **options: Any) -> tuple[int, int]:
    """The tile of a call, from shapes alone."""
    q = np.broadcast_to(np.float32(0), (B, H, Lq, 8))
    k = np.broadcast_to(np.float32(0), (B, H, Lk, 8))
    seen: list[Any] = []

    class Asked(HostBackend):
        def forward(self, q: Any, k: Any, v: Any, call: Any) -> Any:
            seen.append(super().block_sizes(call))
            return np.zeros(q.shape, q.dtype), None

    attnx.attention(q, k, k, backend=Asked(EmulatedKernels), **options)
    return seen[0]


def test_tiles_are_large_and_bounded() -> None:
    assert sizes(1, 1, 32768, 32768) == (4096, 4096)
    assert sizes(1, 8, 8192, 8192) == (2048, 2048)
    for B, H in ((1, 1), (1, 8), (2, 16), (8, 32), (64, 32)):
        for Lq, Lk in ((32768, 32768), (4096, 4096), (1, 100000), (7, 512)):
            rows, keys = sizes(B, H, Lq, Lk)
            assert B * H * min(rows, Lq) * min(keys, Lk) <= max(TILE, B * H * 128 * 128)


def test_a_mask_with_structure_has_smaller_tiles_and_decoding_longer_ones() -> None:
    assert sizes(1, 1, 32768, 32768, causal=True) == (2048, 2048)
    assert sizes(1, 1, 32768, 32768, mask=attnx.Window(512, 0)) == (1024, 1024)
    assert sizes(1, 32, 1, 100000)[1] >= 100000


def test_a_mask_of_numbers_alone_never_waits_for_the_device(tiled: HostBackend) -> None:
    x = np.ones((2, 2, 20, 4), np.float32)
    attnx.attention(x, x, x, mask=attnx.Causal() & attnx.Lengths(17), backend="cupy-host")
    assert tiled.lane.transfers == 0
    attnx.attention(x, x, x, mask=attnx.Lengths(np.array([3, 17])), backend="cupy-host")
    assert tiled.lane.transfers == 1


def test_the_route_is_told() -> None:
    x = np.ones((2, 2, 3, 4), np.float16)
    plan = attnx.plan(x, x, x, backend=HostBackend(EmulatedKernels))
    assert plan.route == "cuBLAS tiles, fused softmax, upcast a tile at a time"
