"""PyTorch's differentiation and `torch.func` around another framework's backend (S6.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import Lengths
from attnx.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="jax is not installed")
forward_ad = torch.autograd.forward_ad

FAR = ["numpy", "jax"]
B, HQ, HK, L, D = 2, 4, 2, 6, 8

# PyTorch's own decompositions for forward AD are scripted when they are first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64 bits, so that nothing but a mistake makes a difference."""
    with jax.enable_x64(True):
        yield


def draw(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def tensors(dtype: Any = torch.float64) -> list[Any]:
    shapes = (B, HQ, L, D), (B, HK, L, D), (B, HK, L, D)
    return [torch.tensor(draw(*s, seed=n)).to(dtype) for n, s in enumerate(shapes)]


def loss(backend: str | None, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: attnx.attention(q, k, v, backend=backend, **options).sin().sum()


@pytest.mark.parametrize("backend", FAR)
def test_torch_func_sees_through(backend: str) -> None:
    """grad, vjp, vmap over either and of either, an operand that is not mapped, and no entries."""
    q, k, v = tensors()
    far = loss(backend, causal=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = torch.autograd.grad(loss(None, causal=True)(*leaves), leaves)
    for got, wanted in zip(torch.func.grad(far, argnums=(0, 1, 2))(q, k, v), whole, strict=True):
        torch.testing.assert_close(got, wanted)
    each = torch.func.vmap(torch.func.grad(far), in_dims=(0, 2, 0))(q, k.permute(1, 2, 0, 3), v)
    torch.testing.assert_close(each, whole[0])
    shared = torch.func.vmap(far, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared, torch.stack([far(x, k[0], v[0]) for x in q]))
    out, pull = torch.func.vjp(lambda q: attnx.attention(q, k, v, backend=backend), q)
    pulled = torch.func.vmap(pull)(torch.stack([out, out * 2]))[0]
    torch.testing.assert_close(pulled[1], pulled[0] * 2)
    none = torch.func.vmap(lambda q: attnx.attention(q, k[0], v[0], backend=backend))(q[:0])
    assert none.shape == (0, HQ, L, D)


def test_torch_func_maps_over_the_arrays_of_a_mask_and_sinks() -> None:
    q, k, v = (x[0] for x in tensors())
    lengths, sinks = torch.tensor([2, 0, 6]), torch.tensor(draw(3, HQ))

    def call(n: Any, s: Any) -> Any:
        return attnx.attention(q, k, v, mask=Lengths(n), sinks=s, backend="numpy")

    each = torch.stack([call(n, s) for n, s in zip(lengths, sinks, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(lengths, sinks), each)


def test_only_what_needs_a_gradient_gets_one_and_no_grad_records_nothing() -> None:
    q, k, v = tensors()
    k.requires_grad_()
    out = attnx.attention(q, k, v, backend="numpy")
    out.sum().backward()
    assert (q.grad, v.grad) == (None, None)
    assert k.grad is not None
    with torch.no_grad():
        assert not attnx.attention(q, k, v, backend="numpy").requires_grad


def test_a_plan_kept_for_a_plain_call_never_serves_a_recorded_one() -> None:
    q, k, v = tensors()
    for _ in range(2):
        assert not attnx.attention(q, k, v, backend="numpy").requires_grad
        for which in range(3):
            given = [x.clone().requires_grad_(n == which) for n, x in enumerate((q, k, v))]
            attnx.attention(*given, backend="numpy").sum().backward()
            assert given[which].grad is not None


@pytest.mark.parametrize("backend", FAR)
def test_what_torch_cannot_carry_over_raises(backend: str) -> None:
    """S6.5: second derivatives, forward mode and batches of cotangents are never a wrong number."""
    q, k, v = tensors()
    far, x = loss(backend), q.clone().requires_grad_()
    (first,) = torch.autograd.grad(far(x, k, v), x, create_graph=True)
    refused = {
        "of a gradient": lambda: torch.autograd.grad(first.sum(), x),
        r"of a gradient ": lambda: torch.func.grad(
            lambda q: torch.func.grad(far)(q, k, v).sum()
        )(q),
        "a dual number": lambda: torch.func.jvp(far, (q, k, v), (q, k, v)),
        "a dual number ": lambda: torch.func.hessian(far)(q, k, v),
        "of a batch of cotangents": lambda: torch.autograd.grad(
            attnx.attention(x, k, v, backend=backend), x, torch.stack([q, q]), is_grads_batched=True
        ),
    }  # fmt: skip
    for message, call in refused.items():
        with pytest.raises(UnsupportedError, match=f"backend '{backend}' .*{message}"):
            call()
    with forward_ad.dual_level():  # nothing requires a gradient, and a tangent must not get lost
        with pytest.raises(UnsupportedError, match="forward mode=a dual number"):
            far(q, forward_ad.make_dual(k, k), v)
        far(q, k, v)


def test_a_second_derivative_through_any_one_operand_raises() -> None:
    """A path that leads through q alone, or through the cotangent, does not vanish."""
    for which in range(4):
        given = [*tensors(), torch.tensor(draw(B, HQ, L, D))]
        given[which].requires_grad_()
        extra = given[0].clone().requires_grad_()
        out = attnx.attention(extra + given[0], given[1], given[2], backend="numpy")
        (first,) = torch.autograd.grad(out, extra, given[3], create_graph=True)
        with pytest.raises(UnsupportedError, match="of a gradient"):
            torch.autograd.grad(first.sum(), given[which])


def test_a_write_between_forward_and_backward_is_seen() -> None:
    q, k, v = tensors()
    lengths = torch.tensor([2, 5])
    for victim in (k, lengths):
        x = q.clone().requires_grad_()
        out = attnx.attention(x, k, v, mask=Lengths(lengths), backend="numpy")
        victim += 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_an_answer_and_its_gradients_share_no_memory_with_another_framework() -> None:
    """JAX's arrays are immutable, and NumPy's view of them is read-only: copies come back."""
    q, k, v = (x.requires_grad_() for x in tensors())
    kept = [x.detach().clone() for x in (q, k, v)]
    out = attnx.attention(q, k, v, backend="jax")
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for made in (out.detach(), *grads):
        made += 1
    for x, before in zip((q, k, v), kept, strict=True):
        assert torch.equal(x.detach(), before)


def test_the_caller_may_write_as_soon_as_the_answer_is_there() -> None:
    """JAX computes asynchronously, on memory that it shares."""
    q, k, v = (torch.tensor(draw(1, 8, 256, 64, seed=n)) for n in range(3))
    expected = attnx.attention(q, k, v)
    for _ in range(3):
        given = [x.clone() for x in (q, k, v)]
        given[0].requires_grad_()
        out = attnx.attention(*given, backend="jax")
        for x in given:
            x.detach().zero_()
        torch.testing.assert_close(out.detach(), expected)


@pytest.mark.parametrize("backend", FAR)
@pytest.mark.parametrize("start", range(3))
def test_any_alignment_and_strides_travel(backend: str, start: int) -> None:
    """JAX shares memory at 64 bytes alone, and no strides, such as an expanded cotangent's."""
    q, k, v = tensors()
    odd = torch.zeros(q.numel() + start, dtype=q.dtype)[start:].view_as(q).copy_(q)
    x = odd.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    attnx.attention(x, k, v.expand(B, HK, L, D), backend=backend).sum().backward()
    y = q.clone().requires_grad_()
    attnx.attention(y, k, v).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("backend", FAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast_give_gradients_in_the_originals_dtype(
    backend: str, dtype: Any
) -> None:
    half = [x.requires_grad_() for x in tensors(dtype)]
    attnx.attention(*half, backend=backend).sum().backward()
    assert {x.grad.dtype for x in half} == {dtype}
    single = [x.requires_grad_() for x in tensors(torch.float32)]
    with torch.autocast("cpu", dtype):
        out = attnx.attention(*single, backend=backend)
    assert out.dtype is dtype
    out.sum().backward()
    for x, y in zip(single, half, strict=True):
        assert x.grad.dtype is torch.float32
        torch.testing.assert_close(x.grad, y.grad.float(), rtol=0.05, atol=0.05)


def test_checkpointing_runs_the_other_backend_again() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    far = loss("numpy")
    again = torch.utils.checkpoint.checkpoint(far, q, k, v, use_reentrant=False)
    for got, wanted in zip(
        torch.autograd.grad(again, (q, k, v)), torch.autograd.grad(far(q, k, v), (q, k, v)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, wanted)


def test_recorded_float64_is_refused_where_jax_has_no_64_bits() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    with jax.enable_x64(False), pytest.raises(UnsupportedError, match="jax_enable_x64"):
        attnx.attention(q, k, v, backend="jax")


def test_a_backend_without_a_gradient_still_serves_where_none_is_wanted(
    loop: Callable[..., Any],
) -> None:
    """S8.2: it is refused as soon as one is, also by a transform that cannot be asked before."""
    loop(gradient=False, lse=False)
    q, k, v = tensors()
    far = torch.func.vmap(lambda q, k, v: attnx.attention(q, k, v, backend="loop"))
    torch.testing.assert_close(far(q, k, v), attnx.attention(q, k, v))
    with pytest.raises(UnsupportedError, match="gradient=given"):
        torch.func.grad(lambda q: attnx.attention(q, k, v, backend="loop").sum())(q)
    with pytest.raises(UnsupportedError, match="gradient=given"):
        attnx.attention(q.requires_grad_(), k, v, backend="loop")
