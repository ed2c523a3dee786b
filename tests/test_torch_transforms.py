"""PyTorch's transforms see through the torch backend: `torch.func`, forward AD, second derivatives.

Every figure is compared with a plain formula in float64, written here, which no transform can
mislead.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.autograd import forward_ad

import attnx
from attnx import Causal, Lengths, Segments, Window
from attnx.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

B, HQ, HK, L, D, DV = 2, 4, 2, 6, 5, 3

# PyTorch's own decompositions for forward AD are scripted when they are first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    shapes = (B, HQ, L, D), (B, HK, L, D), (B, HK, L, DV)
    return tuple(torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)


BIAS = torch.linspace(-1, 1, HQ * L * L, dtype=torch.float64).reshape(1, HQ, L, L)
HOLED = BIAS.masked_fill(torch.eye(L, dtype=torch.bool), -math.inf)
VISIBLE = torch.ones(L, L, dtype=torch.bool).tril()
LENGTHS = torch.arange(L) < torch.tensor([6, 4])[:, None, None, None]
SEGMENT = torch.tensor([0, 0, 1, 1, 1, -1])
SAME = (SEGMENT[:, None] == SEGMENT) & (SEGMENT[:, None] >= 0)

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"shown": VISIBLE}),
    "lengths": ({"mask": Lengths(torch.tensor([6, 4]))}, {"shown": LENGTHS}),
    "empty rows": ({"mask": Segments(SEGMENT, SEGMENT)}, {"shown": SAME}),
    "softcap": ({"softcap": 2.0, "scale": -0.7}, {"softcap": 2.0, "scale": -0.7}),
    "bias": ({"bias": HOLED}, {"bias": HOLED}),
    "sinks": (
        {"sinks": torch.ones(HQ, dtype=torch.float64), "causal": True},
        {"sinks": torch.ones(HQ, dtype=torch.float64), "shown": VISIBLE},
    ),
}
NAMES = list(CALLS)


def formula(q: Any, k: Any, v: Any, shown: Any = None, bias: Any = None, scale: Any = None,
            softcap: Any = None, sinks: Any = None) -> torch.Tensor:  # fmt: skip
    """S2 as it is written; rows that see nothing are taken out by hand."""
    k, v = k.repeat_interleave(HQ // HK, -3), v.repeat_interleave(HQ // HK, -3)
    s = (q @ k.mT) * (D**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    live = torch.ones((), dtype=torch.bool) if shown is None else shown.any(-1, keepdim=True)
    if shown is not None:
        s = torch.where(shown | ~live, s, -math.inf)
    top = torch.exp(s)
    total = top.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[:, None, None]
    return torch.where(live, (top / total) @ v, 0.0)


def pair(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    options, plain = CALLS[name]
    return (lambda *a: attnx.attention(*a, **options)), (lambda *a: formula(*a, **plain))


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_func_grad(name: str) -> None:
    ours, plain = pair(name)
    made, wanted = (
        torch.func.grad(lambda *a, f=f: f(*a).square().sum(), argnums=(0, 1, 2))(*inputs())
        for f in (ours, plain)
    )
    close(made, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_jvp_and_vmap_of_it(name: str) -> None:
    ours, plain = pair(name)
    close(*(torch.func.jvp(f, inputs(), inputs(1)) for f in (ours, plain)))
    many, tangents = tuple(torch.stack((x, 2 * x)) for x in inputs(2)), inputs(1)
    made, wanted = (
        torch.func.vmap(lambda *a, f=f: torch.func.jvp(f, a, tangents))(*many)
        for f in (ours, plain)
    )
    close(made, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_and_third_derivative(name: str) -> None:
    """By autograd, in every input, with cotangents that want a gradient of their own."""
    found = []
    for f in pair(name):
        arrays = [
            x.clone().requires_grad_() for x in (*inputs(), torch.ones(B, HQ, L, DV).double())
        ]
        first = torch.autograd.grad(f(*arrays[:3]), arrays[:3], arrays[3], create_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), arrays, create_graph=True
        )
        third = torch.autograd.grad(sum(g.sin().sum() for g in second), arrays)
        found.append((first, second, third))
    close(*found)


def test_a_second_derivative_of_one_tensor_as_q_k_and_v() -> None:
    """Each of its three parts counts once."""
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradgradcheck(
        lambda x: attnx.attention(x, x, x, causal=True), x.requires_grad_()
    )


@pytest.mark.parametrize("given", ["bias", "sinks"])
def test_second_derivatives_of_bias_sinks_and_lse(given: str) -> None:
    extra = {"bias": BIAS[:, :, :1], "sinks": torch.linspace(-1, 1, HQ).double()}[given]
    arrays = [x.requires_grad_() for x in (*inputs(), extra.clone())]

    def call(q: Any, k: Any, v: Any, x: Any) -> Any:
        return attnx.attention(q, k, v, causal=True, return_lse=True, **{given: x})

    assert torch.autograd.gradcheck(call, arrays, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, arrays, fast_mode=True)


def test_jacobians_and_the_hessian() -> None:
    q, k, v = inputs()
    ours, plain = pair("causal")
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        close(*(transform(lambda q, f=f: f(q, k, v)[0, 0, -1])(q) for f in (ours, plain)))


def test_vmap_over_a_mask_and_its_lengths() -> None:
    q, k, v = inputs()
    masks = torch.stack((VISIBLE, torch.eye(L, dtype=torch.bool)))
    made = torch.func.vmap(lambda m: attnx.attention(q, k, v, mask=m))(masks)
    close(made, torch.stack([attnx.attention(q, k, v, mask=m) for m in masks]))
    lengths = torch.tensor([[6, 4], [1, 0]])
    made = torch.func.vmap(lambda n: attnx.attention(q, k, v, mask=Lengths(n)))(lengths)
    close(made, torch.stack([attnx.attention(q, k, v, mask=Lengths(n)) for n in lengths]))


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks"])
def test_a_dual_number_in_any_argument_has_its_tangent(which: str) -> None:
    """Forward AD outside torch.func: an argument that alone is dual is not taken for a constant."""
    q, k, v = inputs()
    sinks = torch.zeros(HQ, dtype=torch.float64)
    given = {"q": q, "k": k, "v": v, "bias": BIAS, "sinks": sinks}
    with forward_ad.dual_level():
        dual = {**given, which: forward_ad.make_dual(given[which], torch.ones_like(given[which]))}
        tangent = forward_ad.unpack_dual(attnx.attention(**dual, causal=True)).tangent
    step = 1e-6
    ends = [
        attnx.attention(**{**given, which: given[which] + d}, causal=True) for d in (step, -step)
    ]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("transform", ["eager", "grad", "vmap"])
def test_what_nobody_sees_stays_unseen(transform: str) -> None:
    """S4.1 and S3.7 under transforms: poison in padding, and in an empty row and its cotangent."""
    q, k, v = (x.clone() for x in inputs())
    cotangent = torch.ones(B, HQ, L, DV, dtype=torch.float64)
    options, _ = CALLS["empty rows"]

    def gradients(q: Any, k: Any, v: Any, d: Any) -> Any:
        out, pull = torch.func.vjp(lambda *a: attnx.attention(*a, **options), q, k, v)
        return out, *pull(d)

    clean = gradients(q, k, v, cotangent)
    for x in (q, k, v, cotangent):
        x[:, :, -1] = math.nan
    if transform == "vmap":
        made = torch.func.vmap(gradients)(*(x[None] for x in (q, k, v, cotangent)))
        made = tuple(x[0] for x in made)
    elif transform == "grad":
        made = gradients(q, k, v, cotangent)
    else:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attnx.attention(*leaves, **options)
        made = out, *torch.autograd.grad(out, leaves, cotangent, create_graph=True)
    assert torch.equal(made[0][:, :, -1], torch.zeros(B, HQ, DV).double())
    for a, b in zip(made, clean, strict=True):
        close(a[:, :, :-1], b[:, :, :-1])
        assert not a[:, :, -1].any()


def test_a_batch_of_cotangents_refuses() -> None:
    """S6.5: `vectorize=True` hands autograd a tensor that only looks like one."""
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match="of a batch of cotangents"):
        torch.autograd.functional.jacobian(lambda x: attnx.attention(x, k, v), q, vectorize=True)


def test_explain_names_the_formula() -> None:
    q, k, v = inputs()
    seen: list[str | None] = []

    def call(q: Any) -> Any:
        seen.append(attnx.explain(q, k, v, mask=Causal() & Window(2, 0)).route)
        return attnx.attention(q, k, v)

    torch.func.vmap(call)(q[None])
    assert seen[0] is not None
    assert "the formula over all scores" in seen[0]


def test_dropout_under_transforms_drops_the_same() -> None:
    """S9: the formula and the kernel agree on every element, in both derivatives."""
    q, k, v = (x.requires_grad_() for x in inputs())
    options = {"dropout": attnx.Dropout(0.4, 11), "causal": True}
    out = attnx.attention(q, k, v, **options)
    wanted = torch.autograd.grad(out.square().sum(), (q, k, v))
    made = torch.func.grad(
        lambda *a: attnx.attention(*a, **options).square().sum(), argnums=(0, 1, 2)
    )(*(x.detach() for x in (q, k, v)))
    close(made, wanted)
    assert torch.autograd.gradgradcheck(
        lambda *a: attnx.attention(*a, **options), (q, k, v), fast_mode=True
    )


def test_a_mask_object_and_a_dropout_are_trees() -> None:
    """Mapped by vmap, with their arrays as leaves; the rest is the structure of the tree."""
    q, k, v = inputs()
    many = Causal() & Lengths(torch.tensor([[6, 4], [1, 0]]))
    made = torch.func.vmap(lambda m: attnx.attention(q, k, v, mask=m), in_dims=(0,))(many)
    ones = [Causal() & Lengths(n) for n in torch.tensor([[6, 4], [1, 0]])]
    close(made, torch.stack([attnx.attention(q, k, v, mask=m) for m in ones]))
    leaves, tree = pytree.tree_flatten((Segments([0, 1], SEGMENT), attnx.Dropout(0.5, 7)))
    assert [tuple(x.shape) for x in leaves] == [(2,), (6,), (2,)]
    ids, dropout = pytree.tree_unflatten(leaves, tree)
    assert ids.structure == "segments"
    assert (dropout.p, dropout.seed.tolist()) == (0.5, [7, 0])


def test_a_mask_is_a_tree_before_anything_was_called() -> None:
    code = """
import attnx
import torch
import torch.utils._pytree as pytree
mask = attnx.Lengths(torch.tensor([1, 2]))
assert [x.shape for x in pytree.tree_leaves(mask)] == [(2,)]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
