"""What the tests of the core share: inputs, the right answers, and plugins registered by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import settings

import attnx
from attnx import plugin
from attnx._registry import registry
from attnx_conformance.oracle import Reference, reference
from attnx_conformance.tolerance import bounds, judge

# The same examples every time, so that a change is judged by itself; `deep` finds new ones.
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

Array = np.ndarray[Any, Any]
NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_torch() -> None:
    """Two threads on tensors this small only wait for each other, tests side by side above all."""
    torch.set_num_threads(1)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every test."""
    return np.random.default_rng(20)


def as_dtype(array: Array, dtype: str) -> Array:
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.fixture
def make(rng: np.random.Generator) -> Callable[..., tuple[Array, Array, Array]]:
    """`make(B=(2,), Hq=4, …)` gives q, k and v of those sizes."""

    def make(
        B: tuple[int, ...] = (2,), Hq: int = 4, Hk: int = 2, Lq: int = 6, Lk: int = 6, D: int = 8,
        Dv: int = 5, dtype: str = "float32", layout: str = "bhsd", rank: int | None = None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        shapes = [(*B, Hq, Lq, D), (*B, Hk, Lk, D), (*B, Hk, Lk, Dv)]
        arrays = [as_dtype(rng.standard_normal(shape), dtype) for shape in shapes]
        if rank == 2:
            arrays = [array[0, 0] for array in arrays]
        elif layout == "bshd":
            arrays = [np.ascontiguousarray(np.swapaxes(array, -3, -2)) for array in arrays]
        return arrays[0], arrays[1], arrays[2]

    return make


@pytest.fixture
def agree(rng: np.random.Generator) -> Callable[..., Reference]:
    """`agree(q, k, v, **options)`: out, lse and every gradient lie within the bound (S5.4)."""

    def agree(
        q: Array, k: Array, v: Array, *, d_out: Any = None, d_lse: Any = None, backend: Any = None,
        **options: Any,
    ) -> Reference:  # fmt: skip
        dtype = q.dtype.name
        (out, lse), pullback = attnx.attention_vjp(
            q, k, v, return_lse=True, backend=backend, **options
        )
        if d_out is None:
            d_out = rng.standard_normal(out.shape).astype(out.dtype)
        if d_lse is None:
            d_lse = rng.standard_normal(lse.shape).astype(lse.dtype)
        grads = pullback(d_out, d_lse)
        plain = {name: option for name, option in options.items() if name != "assume_finite"}
        expected = reference(q, k, v, d_out=d_out, d_lse=d_lse, **plain)
        dtypes = {
            f"{name}_dtype": None if plain.get(name) is None else plain[name].dtype.name
            for name in ("bias", "sinks")
        }
        limits = bounds(expected, dtype, **dtypes)
        alone = attnx.attention(q, k, v, return_lse=True, backend=backend, **options)
        for name, got in [("out", out), ("lse", lse), ("out", alone[0]), ("lse", alone[1])]:
            verdict = judge(got, getattr(expected, name), getattr(limits, name))
            assert verdict.ok, f"{name}: {verdict.detail}"
        assert out.dtype == q.dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        inputs = (q, k, v, options.get("bias"), options.get("sinks"))
        for name, got, given in zip(NAMES, grads, inputs, strict=True):
            if given is None:
                assert got is None, name
                continue
            assert (got.shape, got.dtype) == (given.shape, given.dtype), name
            verdict = judge(got, getattr(expected, name), getattr(limits, name))
            assert verdict.ok, f"{name}: {verdict.detail}"
        return expected

    return agree


class Marked(plugin.Backend):
    """A backend on NumPy's arrays whose answer is one number: the answer tells who gave it."""

    def __init__(
        self, name: str, mark: float, reasons: tuple[plugin.Reason, ...] = (), **declared: Any
    ) -> None:
        self.name, self.mark, self.given = name, mark, reasons
        self.lane = attnx.get_backend("numpy").lane
        self.capabilities = plugin.Capabilities(
            **({"dtypes": frozenset({"float32", "float64"})} | declared)
        )
        self.calls: list[plugin.Call] = []

    def reasons(self, cls: plugin.CallClass) -> tuple[plugin.Reason, ...]:
        return (*self.given, *super().reasons(cls))

    def forward(self, q: Any, k: Any, v: Any, call: plugin.Call) -> tuple[Any, Any]:
        self.calls.append(call)
        shape = (call.B, call.Hq, call.Lq)
        return np.full((*shape, call.Dv), self.mark, q.dtype), np.zeros(shape, np.float32)


class Hooks:
    """A plugin made of the hooks it is given."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, hook in hooks.items():
            setattr(self, name, plugin.hookimpl(hook))


def spec_of(backend: plugin.Backend, **fields: Any) -> plugin.BackendSpec:
    given = {"name": backend.name, "framework": backend.lane.name, "load": lambda: backend}
    return plugin.BackendSpec(**(given | fields))


@pytest.fixture
def plug() -> Iterator[Callable[..., None]]:
    """`plug("name", backend, …, attnx_rank=…)`: registered until the test ends."""
    names: list[str] = []

    def plug(name: str, *given: Any, **hooks: Callable[..., Any]) -> None:
        specs = [spec_of(g) if isinstance(g, plugin.Backend) else g for g in given]
        if specs:
            hooks["attnx_backends"] = lambda: specs
        names.append(name)
        attnx.register(Hooks(**hooks), name)

    yield plug
    for name in names:
        if registry.manager.has_plugin(name):
            attnx.unregister(name)


@pytest.fixture
def marked(plug: Callable[..., None]) -> Callable[..., Marked]:
    """`marked("name", 7.0)`: a registered backend whose every answer is 7."""

    def marked(
        name: str, mark: float, reasons: tuple[plugin.Reason, ...] = (), **declared: Any
    ) -> Marked:
        backend = Marked(name, mark, reasons, **declared)
        plug(name, backend)
        return backend

    return marked


@pytest.fixture
def no_dropout(monkeypatch: pytest.MonkeyPatch) -> Iterator[attnx.Dropout]:
    """A dropout that no backend declares while the test runs."""
    for info in attnx.backends():
        if info.status == "available":
            backend = attnx.get_backend(info.name)
            lacking = backend.capabilities._replace(dropout=False)
            monkeypatch.setattr(backend, "capabilities", lacking)
    for forget in registry.on_change:
        forget()
    yield attnx.Dropout(0.1, 0)
    for forget in registry.on_change:
        forget()


class LoopLane(plugin.Lane):
    """array-api-strict as a framework of its own, with devices that a test may pretend."""

    name = "loop"
    xp = array_api_strict
    array_types = (type(array_api_strict.zeros(1)),)

    def __init__(self, device: str = "cpu") -> None:
        self.where = device
        self.log: list[str] = []

    def device(self, array: Any) -> str:
        return self.where

    def adopt(self, exported: Any) -> Any:
        self.log.append("adopt")
        # DLPack has no read-only arrays, and what comes may be one.
        if isinstance(exported, np.ndarray) and not exported.flags.writeable:
            exported = exported.copy()
        return super().adopt(exported)

    def wait(self, *arrays: Any) -> None:
        self.log.append("wait")

    def to_numpy(self, array: Any) -> Any:
        self.log.append("to_numpy")
        return np.from_dlpack(array)

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        self.log.append("from_numpy")
        return self.xp.asarray(array.copy())


class Loop(plugin.ArrayBackend):
    """The array kernel in the loop lane, on a device of its own if asked."""

    lane: LoopLane

    def __init__(self, device: str = "cpu", **declared: Any) -> None:
        floats = frozenset({"float32", "float64"})
        kind = frozenset({device.split(":")[0]})
        declared = {"dtypes": floats, "devices": kind} | declared
        super().__init__("loop", LoopLane(device), plugin.Capabilities(**declared))

    def devices(self) -> tuple[str, ...]:
        return (self.lane.where,)


@pytest.fixture
def loop(plug: Callable[..., None]) -> Callable[..., Loop]:
    """`loop()`: another framework's backend, registered with its lane until the test ends."""

    def loop(device: str = "cpu", **declared: Any) -> Loop:
        backend = Loop(device, **declared)
        types = ("array_api_strict._array_object.Array",)
        plug("loop", spec_of(backend, array_types=types, lane=lambda: backend.lane))
        return backend

    return loop


@pytest.fixture
def python() -> Callable[..., str]:
    """`python(code, ATTNX_BACKEND="numpy")`: what a fresh interpreter prints."""

    def python(code: str, *, fails: bool = False, path: str = "", **variables: str) -> str:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ATTNX_")}
        if path:
            kept["PYTHONPATH"] = os.pathsep.join([path, kept.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=kept | variables, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return python


def lay_out(project: Path, folder: Path) -> None:
    """What `pip install` of a pure project leaves in a folder: its modules and its metadata."""
    settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
    about, wheel = settings["project"], settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in wheel.get("packages", ()):
        shutil.copytree(project / path, folder / Path(path).name)
    for path in wheel.get("only-include", ()):
        shutil.copy(project / path, folder)
    name, version = about["name"], about["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8"
    )
    points = [f"{key} = {value}" for key, value in about["entry-points"]["attnx"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[attnx]", *points, ""]), "utf-8")


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with docs/examples/attnx-echo as it is installed."""
    folder = tmp_path_factory.mktemp("echo")
    lay_out(Path(__file__).parents[1] / "docs" / "examples" / "attnx-echo", folder)
    return folder


def random_leaf(rng: np.random.Generator, B: int, Hq: int, Lq: int, Lk: int, align: str) -> Any:
    """One mask without parts; `align` is what its positions may use."""
    which = int(rng.integers(10))
    counts = rng.integers(0, Lk + 1, B)
    positions = {"q_pos": rng.integers(-2, Lk + 2, (B, Lq)), "kv_pos": rng.integers(0, Lk, Lk)}
    sizes = [None if rng.random() < 0.3 else int(rng.integers(0, Lk + 1)) for _ in range(2)]
    if which in (0, 1):
        return attnx.Causal(align)
    if which in (2, 3):
        return attnx.Window(sizes[0], sizes[1], align)
    if which == 4:
        return attnx.Window(sizes[0], sizes[1], **positions)
    if which == 5:
        return attnx.Starts(counts)
    if which == 6:
        return attnx.Prefix(int(counts[0]))
    if which == 7:
        ids = rng.integers(-1, 3, (B, Lq)), np.sort(rng.integers(-1, 3, Lk))
        return attnx.Segments(*ids)
    if which == 8:
        full = (B, Hq, Lq, Lk)
        shape = tuple(n if rng.random() < 0.6 else 1 for n in full)
        return attnx.Dense(rng.random(shape) < 0.7)
    step = int(rng.integers(1, 4))
    return attnx.Predicate(lambda b, h, i, j: (b + h + i - j) % step == 0)


def random_mask(rng: np.random.Generator, B: int, Hq: int, Lq: int, Lk: int) -> Any:
    """A tree of masks; with `bottom_right` at most one Lengths, in the top-level chain (S3.5)."""
    align = "top_left" if rng.random() < 0.5 else "bottom_right"

    def tree(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return random_leaf(rng, B, Hq, Lq, Lk, align)
        one, other = tree(depth - 1), tree(depth - 1)
        return (one & other, one | other, ~one)[int(rng.integers(3))]

    mask = tree(2)
    if rng.random() < 0.5:
        q = rng.integers(0, Lq + 1, B) if rng.random() < 0.5 else None
        mask = mask & attnx.Lengths(rng.integers(0, Lk + 1, B), q)
    return mask


@pytest.fixture
def masks_at_random(rng: np.random.Generator) -> Callable[..., Iterator[Any]]:
    """`masks_at_random(count, B, Hq, Lq, Lk)` yields trees over every kind of mask."""

    def masks_at_random(count: int, *sizes: int) -> Iterator[Any]:
        for _ in range(count):
            yield random_mask(rng, *sizes)

    return masks_at_random
