"""Gradients of other frameworks through the CuPy backend, with NumPy's arrays for CuPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Lengths
from attnx_cupy._backend import CupyBackend

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")


def draw(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_a_gradient_flows_through_cupy(
    emulated: CupyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From PyTorch's tape and from JAX's trace, as their own backends give it."""
    monkeypatch.setattr(emulated.lane, "wait", lambda *_: None)  # there is no stream to wait for
    q, k, bias = draw(2, 4, 6, 8), draw(2, 2, 6, 8), draw(1, 4, 1, 6)

    def by_torch(backend: str | None) -> list[Any]:
        given = [torch.tensor(x, requires_grad=True) for x in (q, k, bias)]
        out = attnx.attention(
            given[0], given[1], given[1], bias=given[2], mask=Lengths(torch.tensor([2, 5])),
            backend=backend,
        )  # fmt: skip
        out.sin().sum().backward()
        return [x.grad.numpy() for x in given]

    def by_jax(q: Any, k: Any, bias: Any, n: Any) -> Any:
        out = attnx.attention(q, k, k, bias=bias, mask=Lengths(n), backend=emulated)
        return jax.numpy.sin(out).sum()

    found = jax.jit(jax.grad(by_jax, (0, 1, 2)))(q, k, bias, np.array([2, 5]))
    expected = by_torch(None)
    for grads in (found, by_torch("cupy-host")):
        for got, wanted in zip(grads, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
