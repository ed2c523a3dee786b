"""PyTorch's tensors as attnx sees them: exchange, autocast, and the tensors that are refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch

import attnx
from attnx import _attention
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx.masks import Lengths
from attnx_torch._lane import LANE

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def succeeds(program: str) -> None:
    """In a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 7, 4, generator=rng).to(dtype) for _ in range(3)]


# Exchange ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_survives_numpy_and_back(dtype: str) -> None:
    x = tensors(getattr(torch, dtype))[0].transpose(1, 2)
    array = LANE.to_numpy(x)
    assert array.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert np.shares_memory(array, LANE.to_numpy(x))
    back = LANE.from_numpy(array)
    assert torch.equal(back, x)
    assert not np.shares_memory(LANE.to_numpy(back), array)


def test_pending_operations_are_done_before_a_tensor_leaves() -> None:
    x = torch.view_as_complex(torch.randn(3, 2)).conj().imag
    assert x.is_neg()
    assert LANE.to_numpy(x).tolist() == x.tolist()
    assert LANE.export(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]


def test_no_array_of_numpy_ends_the_process_or_is_written_to() -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    frozen = base.copy()
    frozen.flags.writeable = False
    odd = np.zeros(6, dtype=[("a", "i1"), ("b", "<f4")])["b"]
    swapped = base.astype(">f4")
    for array in (base[::-1], base[:, ::-1], frozen, np.broadcast_to(base, (2, 3, 4)), odd,
                  swapped, base[:0]):  # fmt: skip
        assert np.array_equal(LANE.to_numpy(LANE.adopt(array)), array)
    LANE.adopt(frozen).fill_(9)
    assert np.array_equal(frozen, base)
    assert np.shares_memory(LANE.to_numpy(LANE.adopt(base)), base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_computes_for_torch(dtype: str) -> None:
    q, k, v = tensors(getattr(torch, dtype))
    bias, mask = torch.randn(7, 7).to(q.dtype), torch.ones(7, 7, dtype=torch.bool).tril()
    out, lse = attnx.attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend="numpy")
    assert type(out) is type(lse) is torch.Tensor
    own, own_lse = attnx.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    assert out.dtype is own.dtype
    torch.testing.assert_close(out, own)
    torch.testing.assert_close(lse, own_lse)
    out.add_(1)  # the caller's own memory
    grads = attnx.attention_vjp(q, k, v, backend="numpy", mask=Lengths((3, 5)))[1](own)
    alike = attnx.attention_vjp(q, k, v, mask=Lengths((3, 5)))[1](own)
    torch.testing.assert_close(grads.k, alike.k, rtol=0.05 if q.itemsize == 2 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_computes_for_numpy(dtype: str) -> None:
    q, k, v = (LANE.to_numpy(x)[:, :, ::-1] for x in tensors(getattr(torch, dtype)))
    with attnx.use_backend("torch"):
        out, pullback = attnx.attention_vjp(q, k, v, causal=True)
        assert attnx.explain(q, k, v).choice == "torch"
        again = attnx.attention(q, k, v, causal=True)
    assert type(out) is np.ndarray
    assert out.dtype == q.dtype
    assert out.flags.writeable
    np.testing.assert_allclose(again.astype(float), out.astype(float), atol=0.02)
    assert pullback(out).v.dtype == v.dtype


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_does_not_get_lost_in_another_framework(which: int) -> None:
    arrays = tensors()
    arrays[which].requires_grad_()
    bias = torch.zeros(7, 7, requires_grad=True)
    (there,) = torch.autograd.grad(attnx.attention(*arrays, backend="numpy").sum(), arrays[which])
    (here,) = torch.autograd.grad(attnx.attention(*arrays).sum(), arrays[which])
    torch.testing.assert_close(there, here)
    assert attnx.attention(*tensors(), bias=bias, backend="numpy").requires_grad
    with torch.no_grad():
        assert not attnx.attention(*arrays, backend="numpy").requires_grad


def test_weights_refuse_while_a_gradient_is_recorded() -> None:
    q, k, _ = tensors()
    expected = torch.softmax(q @ k.mT / 2, -1)
    torch.testing.assert_close(attnx.attention_weights(q, k), expected)
    with pytest.raises(UnsupportedError, match="attention_weights has no gradient"):
        attnx.attention_weights(q.requires_grad_(), k)


def test_merge_is_differentiable() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    halves = [(k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:])]
    parts = [attnx.attention(q, a, b, return_lse=True) for a, b in halves]
    joined = torch.autograd.grad(attnx.merge(parts)[0].square().sum(), (q, k, v))
    whole = torch.autograd.grad(attnx.attention(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(joined, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Autocast ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"bias": torch.linspace(-1, 1, 49).reshape(7, 7)}],
    ids=["plain", "softcap", "bias"],
)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_casts_the_operands_and_nothing_else(
    target: torch.dtype, options: dict[str, Any]
) -> None:
    """S5.1: the answer is that of the cast operands; scores stay in float32 (S5.2)."""
    q, k, v = tensors()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", target):
        out = attnx.attention(*leaves, **options)
        out.float().square().sum().backward()
        mixed = attnx.attention(leaves[0], k.to(target), v, **options)
    cast = [x.to(target).requires_grad_() for x in (q, k, v)]
    plain = attnx.attention(*cast, **options)
    plain.float().square().sum().backward()
    assert out.dtype is target
    assert torch.equal(out, plain)
    assert torch.equal(mixed, plain)
    for x, y in zip(leaves, cast, strict=True):
        assert x.grad is not None
        assert x.grad.dtype is torch.float32
        assert y.grad is not None
        torch.testing.assert_close(x.grad, y.grad.float())


def test_autocast_leaves_float64_and_plans_alone() -> None:
    q, k, v = tensors(torch.float64)
    before = attnx.attention(q, k, v)
    narrow = tensors()
    attnx.attention(*narrow)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attnx.attention(q, k, v), before)
        assert attnx.attention(*narrow).dtype is torch.bfloat16
        assert attnx.attention_vjp(*narrow)[0].dtype is torch.bfloat16
    assert attnx.attention(*narrow).dtype is torch.float32


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"assume_finite": True}, {"assume_finite": True, "causal": True},
        {"assume_finite": True, "scale": 0.3}, {"assume_finite": True, "return_lse": True},
    ],
    ids=["look", "finite", "causal", "scale", "lse"],
)  # fmt: skip
def test_a_plan_kept_before_autocast_answers_as_one_made_under_it(
    target: torch.dtype, options: dict[str, Any]
) -> None:
    """SDPA casts by itself; every other kept plan must not be applied."""
    arrays = tensors()
    for _ in range(2):
        plain = attnx.attention(*arrays, **options)
    with torch.autocast("cpu", target):
        kept = attnx.attention(*arrays, **options)
    cast = attnx.attention(*(x.to(target) for x in arrays), **options)
    if "return_lse" in options:
        (plain, _), (kept, lse), (cast, wanted) = plain, kept, cast
        assert torch.equal(lse, wanted)
    assert plain.dtype is torch.float32
    assert kept.dtype is target
    assert torch.equal(kept, cast)


def test_a_value_that_a_cast_makes_infinite_is_isolated_under_autocast() -> None:
    """Finite in float32 and not in float16: the look must see what SDPA would get."""
    q, k, v = tensors()
    v[..., -1, :] = 1e6
    for _ in range(2):
        attnx.attention(q, k, v, causal=True)
    with torch.autocast("cpu", torch.float16):
        kept = attnx.attention(q, k, v, causal=True)
    assert kept[..., :-1, :].isfinite().all()
    assert torch.equal(kept, attnx.attention(q.half(), k.half(), v.half(), causal=True))


# What a kept plan must not serve ------------------------------------------------------------------

KEPT: list[dict[str, Any]] = [
    {}, {"assume_finite": True}, {"assume_finite": True, "causal": True}, {"return_lse": True},
    {"assume_finite": True, "scale": -0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", KEPT, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_plan_kept_without_a_gradient_records_the_gradient_of_any_operand(
    options: dict[str, Any], which: tuple[int, ...]
) -> None:
    """The key leaves the gradient to the shortcut, which must see it in each of q, k and v."""
    arrays = tensors()
    wanted = attnx.attention_vjp(*arrays, **options)
    for _ in range(2):
        attnx.attention(*arrays, **options)
    leaves = [x.clone().requires_grad_(i in which) for i, x in enumerate(arrays)]
    for _ in range(2):  # as planned, and as kept
        out = attnx.attention(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        cotangent = torch.ones_like(out)
        got = torch.autograd.grad(out, [leaves[i] for i in which], cotangent)
        grads = wanted[1](cotangent)
        for i, dx in zip(which, got, strict=True):
            torch.testing.assert_close(dx, (grads.q, grads.k, grads.v)[i])
        with torch.no_grad():
            again = attnx.attention(*leaves, **options)
            assert not (again[0] if isinstance(again, tuple) else again).requires_grad


@pytest.mark.parametrize("options", KEPT, ids=lambda o: "-".join(o) or "plain")
def test_a_kept_plan_serves_with_and_without_a_gradient_in_turn(options: dict[str, Any]) -> None:
    """Neither forgets the other: an evaluation between training steps plans nothing."""
    arrays = tensors()
    leaves = [x.clone().requires_grad_() for x in arrays]
    for x in (arrays, leaves):
        attnx.attention(*x, **options)
    with mock.patch.object(_attention, "_long_way") as long_way:
        for x in (arrays, leaves, arrays, leaves):
            attnx.attention(*x, **options)
    assert not long_way.called


@pytest.mark.parametrize("options", KEPT, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("wrong", [torch.float16, torch.float64, torch.int32, torch.complex64])
def test_a_kept_plan_never_takes_mixed_dtypes(
    options: dict[str, Any], name: str, wrong: torch.dtype
) -> None:
    q, k, v = tensors()
    for _ in range(2):
        attnx.attention(q, k, v, **options)
    k, v = (x.to(wrong) if n == name else x for n, x in (("k", k), ("v", v)))
    with pytest.raises(ArgumentTypeError, match=f"{name}: expected "):
        attnx.attention(q, k, v, **options)


# What is refused ---------------------------------------------------------------------------------


def test_mixed_dtypes_are_refused_outside_autocast() -> None:
    q, k, v = tensors()
    with pytest.raises(ArgumentTypeError, match="k: expected the dtype of q, float32"):
        attnx.attention(q, k.half(), v)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_tensors_that_are_not_dense_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ArgumentTypeError, match="k: expected a dense, strided tensor, got layout"):
        attnx.attention(q, k.to_sparse(), v)
    with pytest.raises(ArgumentTypeError, match="MaskedTensor has a meaning of its own"):
        attnx.attention(torch.masked.MaskedTensor(q, q > 0), k, v)


def test_tensors_on_two_devices_are_refused() -> None:
    q, k, v = tensors()
    attnx.attention(q, k, v)
    with pytest.raises(ArgumentError, match="v: expected the device of q, cpu, got meta"):
        attnx.attention(q, k, v.to("meta"))
    with pytest.raises(UnsupportedError, match="device=meta"):
        attnx.attention(*(x.to("meta") for x in (q, k, v)))


def test_parameters_and_default_devices_are_no_surprise() -> None:
    q, k, v = tensors()
    weight = torch.nn.Parameter(q)
    out = attnx.attention(weight, k, v)
    out.sum().backward()
    assert weight.grad is not None
    with torch.device("meta"):
        for options in ({}, {"mask": Lengths(3)}, {"softcap": 2.0, "causal": True}):
            tiles = attnx.attention(q, k, v, return_lse=True, **options)[0]
            torch.testing.assert_close(tiles, attnx.attention(q, k, v, **options))


def test_importing_the_plugin_imports_no_torch_and_takes_any_order() -> None:
    program = (
        "import sys, attnx_torch; assert 'torch' not in sys.modules\n"
        "import attnx_torch._backend, attnx, torch\n"
        "assert attnx.get_backend('torch').name == 'torch'\n"
        "assert 'torch' in {b.name for b in attnx.backends() if b.status == 'available'}\n"
    )
    succeeds(program)
