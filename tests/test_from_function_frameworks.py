"""A wrapped function under the differentiation and the transforms of frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.wrapped import CALLS, EMPTY_ROW, EVERY, close, kernels, made

import attnx
from attnx import plugin
from attnx.errors import PluginError, UnsupportedError


def test_a_function_without_a_gradient_has_none(make: Any) -> None:
    """Neither by a pullback, nor recorded, nor under a transform."""
    q, k, v = make()
    with pytest.raises(UnsupportedError, match="gradient=given"):
        attnx.attention_vjp(q, k, v, backend=made(own=False))
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match="gradient=given"):
        attnx.attention(*tensors, backend=made("torch", own=False))
    forward_only = made("jax", own=False)
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    close(attnx.attention(*arrays, backend=forward_only), attnx.attention(q, k, v))
    with pytest.raises(UnsupportedError, match="gradient=given"):
        jax.grad(lambda q: attnx.attention(q, *arrays[1:], backend=forward_only).sum())(arrays[0])


def test_a_gradient_of_lse_that_is_not_given_is_refused(make: Any) -> None:
    """A function that the framework differentiates need not know lse; then nobody gets it."""
    kernel, _ = kernels("torch")
    mine = plugin.from_function(
        kernel, name="mine", framework="torch", supports=("gqa", "scale", "gradients")
    )
    q, k, v = map(torch.from_numpy, make())
    with pytest.raises(UnsupportedError, match="return_lse=given"):
        attnx.attention_vjp(q, k, v, return_lse=True, backend=mine)
    out, pull = attnx.attention_vjp(q, k, v, backend=mine)
    assert pull(torch.ones_like(out)).q.shape == q.shape


def test_torch_compiles_what_it_differentiates_itself(make: Any) -> None:
    """The program's operation calls the function, where nothing is recorded by itself."""
    mine = made("torch", own=False, supports=(*EVERY, "gradients"))

    class Plugin:
        @plugin.hookimpl
        def attnx_backends(self) -> list[plugin.BackendSpec]:
            return [plugin.BackendSpec("recorded", lambda: mine, framework="torch")]

    q, k, v = map(torch.from_numpy, make(Lq=5, Lk=9))
    attnx.register(Plugin(), "recorded-plugin")
    try:
        program = torch.compile(
            lambda q: attnx.attention(q, k, v, backend="recorded"), backend="eager", fullgraph=True
        )
        grads = []
        for fn in (program, lambda q: attnx.attention(q, k, v)):
            leaf = q.clone().requires_grad_()
            fn(leaf).pow(2).sum().backward()
            grads.append(leaf.grad)
        close(*grads)
    finally:
        attnx.unregister("recorded-plugin")


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 3), (3, 0)])
def test_torch_records_an_answer_without_keys_or_rows(Lq: int, Lk: int) -> None:
    """The function is not called, and every gradient is 0 (S1.2)."""
    mine = made("torch", own=False, supports=(*EVERY, "gradients"))
    q, k = (torch.ones(1, 4, n, 8, requires_grad=True) for n in (Lq, Lk))
    sinks = torch.zeros(4, requires_grad=True)
    out, lse = attnx.attention(q, k, k, sinks=sinks, return_lse=True, backend=mine)
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any()
    assert not k.grad.any()
    assert sinks.grad.tolist() == [float(Lq)] * 4


@pytest.mark.parametrize("own", [True, False], ids=["backward", "differentiated"])
@pytest.mark.parametrize(
    "options", [CALLS["the same, with sinks"], CALLS["bias"]], ids=["mask", "bias"]
)
def test_torch_records_it(make: Any, options: dict[str, Any], own: bool) -> None:
    """`backward()` gives the library's numbers, by the given backward or through the function."""
    more = {} if own else {"supports": (*EVERY, "gradients")}
    grads, arrays = [], make(Lq=5, Lk=9)
    for backend in (made("torch", own=own, **more), "torch"):
        given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
        leaves = [
            *tensors,
            *(x.requires_grad_() for n, x in given.items() if n in ("bias", "sinks")),
        ]
        out, lse = attnx.attention(*tensors, **given, return_lse=True, backend=backend)
        loss = (out * out).sum() + torch.where(lse.isfinite(), lse, 0).sin().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for got, expected in zip(*grads, strict=True):
        close(got, expected)


def test_torch_func_goes_around_a_backward(make: Any) -> None:
    """`torch.func` never looks into the functions, which get plain tensors."""
    q, k, v = map(torch.from_numpy, make())

    def loss(backend: Any) -> Any:
        return lambda q: attnx.attention(q, k, v, backend=backend).square().sum()

    close(*(torch.func.grad(loss(b))(q) for b in (made("torch"), "torch")))
    with pytest.raises(UnsupportedError, match="of a gradient"):
        torch.func.grad(lambda q: torch.func.grad(loss(made("torch")))(q).sum())(q)


def test_torch_is_told_when_nothing_was_recorded(make: Any) -> None:
    """A function that leaves autograd must not look like a constant."""

    def leaves(q: Any, k: Any, v: Any, *, scale: float) -> Any:
        return torch.softmax(q.detach() @ k.detach().mT * scale, -1) @ v.detach()

    mine = plugin.from_function(
        leaves, name="mine", framework="torch", supports=("scale", "gradients")
    )
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in make(Hk=4))
    with pytest.raises(PluginError, match="declares gradients, but torch has recorded none"):
        attnx.attention(q, k, v, backend=mine)
    _, pull = attnx.attention_vjp(q, k, v, backend=mine)
    with pytest.raises(PluginError, match="recorded none"):
        pull(torch.ones(2, 4, 6, 5))


@pytest.mark.parametrize("own", [True, False], ids=["backward", "differentiated"])
def test_jax_traces_it(make: Any, own: bool) -> None:
    """Under jit, grad and vmap, with a mask in which a row sees nothing."""
    mine = made("jax", own=own, **({} if own else {"supports": (*EVERY, "gradients")}))
    q, k, v = make(Lq=5, Lk=9)
    out, pull = attnx.attention_vjp(q, k, v, mask=EMPTY_ROW)

    def attend(q: Any) -> Any:
        return attnx.attention(
            q, jnp.asarray(k), jnp.asarray(v), mask=jnp.asarray(EMPTY_ROW), backend=mine
        )

    def loss(q: Any) -> Any:
        return (attend(q) ** 2).sum()

    close(jax.jit(jax.grad(loss))(jnp.asarray(q)), pull(2 * out).q)
    close(jax.jit(jax.vmap(attend))(jnp.stack([q, q])), np.stack([out, out]))


def test_arrays_of_another_framework_reach_it(make: Any) -> None:
    """NumPy's function serves PyTorch's tensors, gradients included."""
    tensors = [torch.from_numpy(x).requires_grad_() for x in make()]
    grads = [
        torch.autograd.grad(attnx.attention(*tensors, backend=b).square().sum(), tensors)
        for b in (made(), "torch")
    ]
    for got, expected in zip(*grads, strict=True):
        close(got, expected)


@pytest.mark.sweep
def test_torch_compiles_a_call_of_it(make: Any) -> None:
    """By its registered name, as one operation of the program, gradients included."""

    class Plugin:
        @plugin.hookimpl
        def attnx_backends(self) -> list[plugin.BackendSpec]:
            return [plugin.BackendSpec("wrapped", load=lambda: made("torch"), framework="torch")]

    q, k, v = (torch.from_numpy(x).requires_grad_() for x in make())
    attnx.register(Plugin(), "wrapped-plugin")
    try:
        run = torch.compile(
            lambda q: attnx.attention(q, k, v, causal=True, backend="wrapped").square().sum(),
            backend="aot_eager", fullgraph=True,
        )  # fmt: skip
        got = torch.autograd.grad(run(q), q)
    finally:
        attnx.unregister("wrapped-plugin")
    want = torch.autograd.grad(attnx.attention(q, k, v, causal=True).square().sum(), q)
    close(got[0], want[0])
