"""Gradients of PyTorch and JAX through another framework's backend are the formula's (S6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Causal, Dropout, Lengths, Predicate, Prefix, Segments, Starts
from attnx_conformance.oracle import reference

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

PAIRS = [("torch", "numpy"), ("torch", "jax"), ("jax", "numpy"), ("jax", "torch")]
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
B, HQ, HK, L, D = 2, 4, 2, 6, 8


def draw(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {
        "causal": True, "softcap": 2.0, "scale": -0.7, "bias": draw(1, HQ, 1, L),
        "sinks": draw(HQ), "mask": Lengths(np.array([2, 5])),
    },
    "bias with broadcast axes": {"bias": draw(2, 1, 6, 1)},
    "bias of two axes that hides": {"bias": np.where(np.tri(L) > 0, draw(L, L), -np.inf)},
    "tree of arrays": {
        "mask": (Causal() | Prefix(np.array([1, 2]))) & ~Starts(np.array([6, 5])),
        "sinks": draw(HQ, seed=3),
    },
    "segments": {"mask": Segments(np.arange(L) // 2, np.array([0, 0, 1, 1, 2, -1]))},
    "dense": {"mask": draw(1, 1, L, L) > 0},
    "predicate": {"mask": Predicate(lambda b, h, i, j: (i + j + b + h) % 2 == 0)},
    "dropout": {"dropout": Dropout(0.3, np.array([5, 7], np.uint32))},
    "bshd": {"layout": "bshd", "causal": True},
    "2-D": {"rank": 2, "causal": True},
    "3-D": {"B": (), "sinks": draw(HQ)},
    "5-D": {"B": (2, 3), "mask": Lengths(np.arange(6).reshape(2, 3)), "bias": draw(2, 1, 1, 6, 6)},
}  # fmt: skip
SINGLE = ("all at once", "segments")
DEFAULT = (("all at once", "float32"), ("segments", "float64"), ("5-D", "float64"))
"""What runs without `-m sweep`; a compiler takes a second for each."""


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64 bits, so that nothing but a mistake makes a difference; for callbacks' threads too."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def put(framework: str, array: Any) -> Any:
    """A copy in a framework."""
    return torch.tensor(array) if framework == "torch" else jnp.asarray(array)


def put_all(framework: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with their arrays in a framework."""

    def option(value: Any) -> Any:
        if isinstance(value, attnx.masks.Mask):
            return attnx.masks.map_leaves(value, lambda _, __, x: option(x))
        if isinstance(value, Dropout):
            return Dropout(value.p, option(value.seed))
        return put(framework, value) if isinstance(value, np.ndarray) else value

    return {name: option(value) for name, value in options.items()}


def inputs(case: dict[str, Any], dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """q, k, v, bias and sinks where given, and the other options, in NumPy."""
    options = dict(case)
    batch, rank = options.pop("B", (B,)), options.pop("rank", None)
    arrays = [
        draw(*batch, heads, L, size, seed=n)
        for n, (heads, size) in enumerate([(HQ, D), (HK, D), (HK, 5)])
    ]
    if rank == 2:
        arrays = [array[0, 0] for array in arrays]
    if options.get("layout") == "bshd":
        arrays = [np.swapaxes(array, -3, -2).copy() for array in arrays]
    arrays += [options.pop(name, None) for name in ("bias", "sinks")]
    return [None if a is None else a.astype(dtype) for a in arrays], options


def by_torch(backend: str, arrays: list[Any], options: dict[str, Any], d: list[Any]) -> list[Any]:
    q, k, v, bias, sinks = (None if a is None else put("torch", a).requires_grad_() for a in arrays)
    out, lse = attnx.attention(
        q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=backend,
        **put_all("torch", options),
    )  # fmt: skip
    torch.autograd.backward([out, lse], [put("torch", x) for x in d])
    return [
        out.detach(),
        lse.detach(),
        *(None if x is None else x.grad for x in (q, k, v, bias, sinks)),
    ]


def by_jax(backend: str, arrays: list[Any], options: dict[str, Any], d: list[Any]) -> list[Any]:
    options = put_all("jax", options)

    @jax.jit
    def run(arrays: list[Any], d: list[Any]) -> Any:
        def call(arrays: list[Any]) -> Any:
            q, k, v, bias, sinks = arrays
            return attnx.attention(
                q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=backend, **options
            )

        answer, pull = jax.vjp(call, arrays)
        return answer, pull(tuple(d))[0]

    given = [None if a is None else put("jax", a) for a in arrays]
    answer, grads = run(given, [put("jax", x) for x in d])
    return [*answer, *grads]


RUNS = [
    pytest.param(
        framework,
        backend,
        name,
        dtype,
        id=f"{framework} to {backend}, {name}, {dtype}",
        marks=() if (name, dtype) in DEFAULT else pytest.mark.sweep,
    )
    for framework, backend in PAIRS
    for name in CASES
    for dtype in ("float32", "float64")
    if (dtype == "float64" or name in SINGLE)
    and (backend != "jax" or (name, dtype) in [("all at once", "float32"), ("5-D", "float64")])
]


@pytest.mark.parametrize(("framework", "backend", "name", "dtype"), RUNS)
def test_every_gradient_is_the_formulas(
    framework: str, backend: str, name: str, dtype: str
) -> None:
    """S6.2, also when another framework's backend did the work; lse, bias and sinks included."""
    arrays, options = inputs(CASES[name], dtype)
    q, k, v, bias, sinks = arrays
    shape = (*q.shape[:-1], v.shape[-1])
    d = [draw(*shape, seed=9).astype(dtype), draw(*shape[:-1], seed=8).astype(dtype)]
    expected = reference(q, k, v, bias=bias, sinks=sinks, d_out=d[0], d_lse=d[1], **options)
    found = (by_torch if framework == "torch" else by_jax)(backend, arrays, options, d)
    for what, got in zip(NAMES, found, strict=True):
        if got is None:
            continue
        assert str(got.dtype).endswith(dtype), what
        tolerance = 1e-10 if dtype == "float64" else 2e-4
        np.testing.assert_allclose(
            np.asarray(got), getattr(expected, what), rtol=tolerance, atol=tolerance, err_msg=what
        )
    given = [None if a is None else a.shape for a in arrays]
    assert [None if x is None else tuple(x.shape) for x in found[2:]] == given
