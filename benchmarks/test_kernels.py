"""Single functions, for those who change a kernel: `pytest benchmarks`.

What a user pays is measured by `attnx bench`; this tells which step of a kernel a change has moved.
Compare two checkouts with `--benchmark-save` and `--benchmark-compare`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import attnx
from attnx.plugin import Call
from attnx_bench.workload import Workload

SIZES = {"small": 64, "middle": 512, "large": 2048}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": "top_left"}, "window": {"causal": "top_left", "window": 63},
    "padding": {"valid": 0.5},
}  # fmt: skip


def _prepared(backend: str, workload: Workload) -> tuple[Any, tuple[Any, ...], Call]:
    """A backend, its arrays, and the record of a call as the core would hand it over."""
    impl = attnx.get_backend(backend)
    arrays = workload.arrays()
    q, k, v, d_out = (impl.lane.from_numpy(x) for x in (arrays.q, arrays.k, arrays.v, arrays.d_out))
    kept: list[Call] = []

    class Keeper(type(impl)):  # type: ignore[misc]  # its class is known only when it is loaded
        def forward(self, q: Any, k: Any, v: Any, call: Call) -> Any:
            kept.append(call)
            return super().forward(q, k, v, call)

    keeper = object.__new__(Keeper)
    keeper.__dict__.update(impl.__dict__)
    attnx.attention_vjp(q, k, v, backend=keeper, **workload.structured)
    return impl, (q, k, v, d_out), kept[0]


@pytest.fixture(params=itertools.product(("numpy", "torch", "jax"), SIZES, FORMS), ids="-".join)
def kernel(request: pytest.FixtureRequest) -> Any:
    """What `_prepared` gives, for each backend, size and form."""
    backend, size, form = request.param
    pytest.importorskip(backend)
    return _prepared(backend, Workload(form, form, Lq=SIZES[size], Lk=SIZES[size], **FORMS[form]))


def test_forward(benchmark: Any, kernel: Any) -> None:
    impl, (q, k, v, _), call = kernel

    def run() -> None:
        impl.lane.wait(impl.forward(q, k, v, call)[0])

    benchmark(run)


def test_backward(benchmark: Any, kernel: Any) -> None:
    impl, (q, k, v, d_out), call = kernel
    out, lse = impl.forward(q, k, v, call)

    def run() -> None:
        impl.lane.wait(impl.backward(q, k, v, out, lse, d_out, None, call)[0])

    benchmark(run)


SIDES = (256, 512, 1024)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize(
    "shape", list(itertools.product(SIDES, SIDES)), ids=lambda shape: f"{shape[0]}x{shape[1]}"
)
def test_numpy_tiles(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], causal: bool
) -> None:
    """The evidence for the size of NumPy's tiles: rows by keys, at N 4096."""
    from attnx_numpy import _forward

    workload = Workload("tiles", "tiles", causal="top_left" if causal else False)
    impl, (q, k, v, _), call = _prepared("numpy", workload)
    count = _forward.block_sizes(call)[2]
    monkeypatch.setattr(_forward, "block_sizes", lambda call: (*shape, count))
    benchmark(lambda: impl.forward(q, k, v, call))


def test_the_plan_of_a_call(benchmark: Any) -> None:
    """The long way: checks, the class, the choice of a backend, without the kernel."""
    q = np.ones((1, 2, 4, 8), np.float32)
    benchmark(lambda: attnx.explain(q, q, q, causal=True, backend="numpy"))
