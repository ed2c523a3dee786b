"""What only a card can show, in one script of under eight minutes.

    pip install -e '.[cuda13,conformance]'      # cuda12 for an older driver
    pip install torch                           # a CUDA build; its checks are skipped without one
    python tests/gpu/run_gpu.py > gpu.json

It prints one JSON document: the card, each check with its verdict, and the figures. The exit
status is 1 when a check failed, 2 without a card. Nothing here is collected by pytest's own search;
`pytest tests/gpu/run_gpu.py` runs the checks one by one. The rest of the CuPy backend is tested
without a card, in `tests/cupy_backend`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import cupy
import numpy as np
import pytest

import attnx
from attnx.plugin import ArrayBackend, BackendSpec, hookimpl
from attnx_conformance.cases import CASES
from attnx_conformance.runner import run
from attnx_cupy._lane import LANE

pytestmark = pytest.mark.gpu

DEADLINE = time.monotonic() + 420.0
"""Cases and figures stop here; what was left out is said."""

DTYPES = ("float32", "float16", "bfloat16", "float64")


def torch_with_cuda() -> Any:
    """The torch module, if it finds a card."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch finds no CUDA device")
    return torch


# The suite --------------------------------------------------------------------------------------


def run_cases(backend: str, dtype: str, step: int) -> str:
    """Every `step`-th case; what was counted, in words."""
    verdicts: Counter[str] = Counter()
    failures = []
    for case in CASES[::step]:
        if dtype not in case.dtypes:
            continue
        if time.monotonic() > DEADLINE:
            verdicts["out of time"] += 1
            continue
        outcome = run(case, backend, dtype)
        verdicts[outcome.verdict] += 1
        if not outcome.ok:
            failures.append(f"{case.name}: {outcome.verdict}: {outcome.detail[-300:]}")
    assert not failures, "\n".join(failures[:20])
    return str(dict(verdicts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_holds_the_suite(dtype: str) -> str:
    return run_cases("cupy", dtype, 1 if dtype == "float32" else 4)


class TorchOnCuda:
    """The torch backend with a lane that puts the suite's inputs on the card."""

    @hookimpl
    def attnx_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name="torch-cuda", framework="torch", load=self.load)]

    def load(self) -> Any:
        from attnx_torch._backend import TorchBackend
        from attnx_torch._lane import TorchLane

        class CudaLane(TorchLane):
            def from_numpy(self, array: Any, like: Any = None) -> Any:
                return super().from_numpy(array, like).cuda()

            def to_numpy(self, array: Any) -> Any:
                return super().to_numpy(array.detach().cpu())

        backend = TorchBackend()
        backend.lane = CudaLane()
        # On a card it promises what is unseen by all, and does not look at the data for more.
        backend.capabilities = backend.capabilities._replace(isolation="unseen")
        return backend


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_holds_the_suite_on_a_card(dtype: str) -> str:
    torch_with_cuda()
    attnx.register(TorchOnCuda(), "torch-cuda")
    try:
        return run_cases("torch-cuda", dtype, 2 if dtype == "float32" else 8)
    finally:
        attnx.unregister("torch-cuda")


# The kernels, the streams and the exchange ------------------------------------------------------


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """A CuPy array that NumPy drew, the same on any machine."""
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, 33, 1000, 5000])
def test_the_fused_steps_are_those_of_the_base_class(dtype: str, length: int) -> None:
    backend, base = attnx.get_backend("cupy"), ArrayBackend("base", LANE)
    s, dp = (normal(2, 3, 5, length, dtype=dtype, seed=n) for n in range(2))
    s[0, 1, 2], s[1, 2, 0, length // 2] = -cupy.inf, cupy.nan
    m, total = cupy.full((2, 3, 5, 1), -cupy.inf, dtype), cupy.zeros((2, 3, 5, 1), dtype)
    rows = normal(2, 3, 5, 1, dtype=dtype, seed=2)
    drawn = normal(2, 3, 5, length, seed=3) > 0
    for shown in (None, drawn, drawn[:, :1, :1], drawn[:1, :, :, :1], drawn[..., ::-1]):
        for got, expected in (
            (
                backend.softmax_step(s.copy(), shown, m, total),
                base.softmax_step(s.copy(), shown, m, total),
            ),
            (
                backend.gradient_step(s.copy(), dp.copy(), dp.copy(), shown, rows, rows, rows),
                base.gradient_step(s.copy(), dp.copy(), dp.copy(), shown, rows, rows, rows),
            ),
        ):
            for a, b in zip(got, expected, strict=True):
                if shown is not None and a.shape[-1] == length > 1:
                    a, b = cupy.where(shown, a, 0), cupy.where(shown, b, 0)
                np.testing.assert_allclose(
                    cupy.asnumpy(a), cupy.asnumpy(b), rtol=1e-4 if dtype == "float32" else 1e-12,
                    atol=1e-6 if dtype == "float32" else 1e-14,
                )  # fmt: skip


def test_a_tile_past_two_to_the_31_is_indexed_right() -> str:
    rows, length = 65537, 32771
    if cupy.cuda.runtime.memGetInfo()[0] < 20 << 30:
        pytest.skip("less than 20 GB free")
    s = cupy.zeros((1, 1, rows, length), np.float32)
    s[0, 0, -1, -1] = 3.0
    m, total = (
        cupy.full((1, 1, rows, 1), -cupy.inf, np.float32),
        cupy.zeros((1, 1, rows, 1), np.float32),
    )
    p, _, new, sums = attnx.get_backend("cupy").softmax_step(s, None, m, total)
    assert float(new[0, 0, -1, 0]) == 3.0
    assert abs(float(sums[0, 0, -1, 0]) - (1 + (length - 1) * np.exp(-3.0))) < 1.0
    assert float(p[0, 0, -1, -1]) == 1.0
    assert float(sums[0, 0, 0, 0]) == length
    del s, p
    cupy.get_default_memory_pool().free_all_blocks()
    return f"{rows * length} scores"


def test_it_computes_on_the_current_stream() -> None:
    q = normal(1, 4, 700, 32)
    expected = attnx.attention(q, q, q, causal=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        again = attnx.attention(q, q, q, causal=True)
        stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(again), cupy.asnumpy(expected))


def test_it_computes_on_the_arrays_own_device() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one card only")
    with cupy.cuda.Device(1):
        q = normal(1, 2, 300, 16)
        lengths = cupy.asarray([200])
    out, pullback = attnx.attention_vjp(q, q, q, mask=attnx.Lengths(200) & attnx.Causal())
    assert out.device.id == 1
    assert pullback(out).q.device.id == 1
    with cupy.cuda.Device(1):
        assert attnx.attention(q, q, q, mask=attnx.Lengths(lengths)).device.id == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_cupy_share_memory(dtype: str) -> None:
    torch = torch_with_cuda()
    torch_lane = attnx.get_backend("torch").lane
    tensor = torch.randn(2, 3, 50, 16, device="cuda").to(getattr(torch, dtype))
    array = LANE.adopt(torch_lane.export(tensor))
    assert array.data.ptr == tensor.data_ptr()
    assert torch_lane.adopt(LANE.export(array)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_computes_for_the_other(dtype: str) -> None:
    torch = torch_with_cuda()
    q = torch.randn(2, 4, 130, 16, device="cuda").to(getattr(torch, dtype))
    lengths = torch.tensor([130, 57], device="cuda")
    options = {"mask": attnx.Lengths(lengths) & attnx.Causal(), "softcap": 5.0}
    ours, pull = attnx.attention_vjp(q, q, q, **options)
    theirs, foreign_pull = attnx.attention_vjp(q, q, q, **options, backend="cupy")
    assert theirs.device == q.device
    tolerance = {"float32": 1e-4, "float64": 1e-10, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    for a, b in ((ours, theirs), *zip(pull(ours)[:3], foreign_pull(ours)[:3], strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    array = LANE.adopt(attnx.get_backend("torch").lane.export(q))
    assert isinstance(attnx.attention(array, array, array, backend="torch"), cupy.ndarray)


def test_arrays_move_between_the_host_and_a_card_on_request_alone() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 40, 8)).astype(np.float32)
    with pytest.raises(attnx.errors.UnsupportedError, match="transfer=True"):
        attnx.attention(x, x, x, backend="cupy")
    with attnx.use_backend("cupy", transfer=True):
        moved = attnx.attention(x, x, x, causal=True)
    assert type(moved) is np.ndarray
    np.testing.assert_allclose(moved, attnx.attention(x, x, x, causal=True), atol=1e-5)


# Figures ----------------------------------------------------------------------------------------

SHAPES = ((1, 8, 1024, 64), (1, 8, 4096, 64), (4, 16, 2048, 128), (1, 1, 16384, 64))
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"mask": attnx.Window(512, 0)})


def milliseconds(compute: Callable[[], Any]) -> float:
    """The median of some runs, each waited for."""
    times = []
    for n in range(9):
        cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        compute()
        cupy.cuda.runtime.deviceSynchronize()
        if n > 1:  # compilation and the memory pool
            times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times), 3)


def both_ways(q: Any, **options: Any) -> None:
    out, pullback = attnx.attention_vjp(q, q, q, **options)
    pullback(out)


def times() -> Iterator[dict[str, Any]]:
    """Milliseconds of attnx on CuPy, and of torch's SDPA where there is one."""
    try:
        torch: Any = torch_with_cuda()
    except pytest.skip.Exception:
        torch = None
    for shape, dtype, options in product(SHAPES, ("float32", "float16"), OPTIONS):
        if time.monotonic() > DEADLINE:
            return
        q = normal(*shape, dtype=dtype)
        figure = {"shape": shape, "dtype": dtype, "options": str(options)}
        figure["forward_ms"] = milliseconds(partial(attnx.attention, q, q, q, **options))
        figure["both_ms"] = milliseconds(partial(both_ways, q, **options))
        if torch is not None and "mask" not in options:
            figure |= sdpa_times(torch, torch.from_dlpack(q), bool(options))
        yield figure


def sdpa_times(torch: Any, t: Any, causal: bool) -> dict[str, float]:
    attend = torch.nn.functional.scaled_dot_product_attention
    leaf = t.detach().requires_grad_()

    def both() -> None:
        out = attend(leaf, leaf, leaf, is_causal=causal)
        out.backward(out.detach())

    return {
        "torch_forward_ms": milliseconds(lambda: attend(t, t, t, is_causal=causal)),
        "torch_both_ms": milliseconds(both),
    }


def memory() -> dict[str, Any]:
    """Megabytes above the inputs at 32,768 tokens, one head: what a fresh pool grew to."""
    figures: dict[str, Any] = {"tokens": 32768, "heads": 1, "D": 64, "dtype": "float32"}
    for name, compute in (
        ("forward_mb", lambda q: attnx.attention(q, q, q, causal=True)),
        ("both_mb", lambda q: both_ways(q, causal=True)),
    ):
        pool = cupy.cuda.MemoryPool()
        q = normal(1, 1, 32768, 64)
        with cupy.cuda.using_allocator(pool.malloc):
            compute(q)
        figures[name] = round(pool.total_bytes() / 1e6, 1)
    return figures


# The script -------------------------------------------------------------------------------------


def checks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every check by name, the cheap ones first."""
    for dtype, length in product(("float32", "float64"), (1, 33, 1000, 5000)):
        check = partial(test_the_fused_steps_are_those_of_the_base_class, dtype, length)
        yield f"fused steps {dtype} {length}", check
    yield "tile past 2**31", test_a_tile_past_two_to_the_31_is_indexed_right
    yield "stream", test_it_computes_on_the_current_stream
    yield "second device", test_it_computes_on_the_arrays_own_device
    yield "transfer", test_arrays_move_between_the_host_and_a_card_on_request_alone
    for dtype in DTYPES:
        yield f"shared memory {dtype}", partial(test_torch_and_cupy_share_memory, dtype)
        yield f"exchange {dtype}", partial(test_each_computes_for_the_other, dtype)
    for dtype in DTYPES:
        yield f"suite cupy {dtype}", partial(test_cupy_holds_the_suite, dtype)
        yield f"suite torch {dtype}", partial(test_torch_holds_the_suite_on_a_card, dtype)


def outcome(check: Callable[[], Any]) -> dict[str, Any]:
    """The verdict of a check, however it ends."""
    start = time.perf_counter()
    try:
        verdict, detail = "passed", check() or ""
    except pytest.skip.Exception as reason:
        verdict, detail = "skipped", str(reason)
    except Exception as error:
        verdict, detail = "failed", f"{type(error).__name__}: {error}"
    return {"verdict": verdict, "detail": detail, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    """Run everything and print the document."""
    devices = attnx.get_backend("cupy").devices()
    if not devices:
        print(attnx.get_backend("cupy").no_device(), file=sys.stderr)
        return 2
    card = cupy.cuda.runtime.getDeviceProperties(0)
    report: dict[str, Any] = {
        "card": card["name"].decode(),
        "memory_gb": round(card["totalGlobalMem"] / 1e9, 1),
        "devices": len(devices),
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
    }
    # The cheap checks, the figures and the suite share the time in this order.
    every = dict(checks())
    suite = [name for name in every if name.startswith("suite")]
    report["checks"] = {name: outcome(every[name]) for name in every if name not in suite}
    report["times"] = list(times())
    report["memory"] = memory()
    report["checks"] |= {name: outcome(every[name]) for name in suite}
    failed = [name for name, found in report["checks"].items() if found["verdict"] == "failed"]
    report["failed"] = failed
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
