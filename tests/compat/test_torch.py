"""SDPA's drop-in: PyTorch's answers and gradients where it keeps its documentation, else that."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import attnx  # noqa: E402
from attnx.compat.torch import scaled_dot_product_attention  # noqa: E402
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError  # noqa: E402

B, H, L, S, E, EV = 2, 4, 3, 5, 8, 6


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Tiny kernels need no pool of threads; the same numbers in every test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, dtype: Any = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def operands(
    q: tuple[int, ...] = (B, H), k: tuple[int, ...] = (B, H), v: tuple[int, ...] | None = None,
    dtype: Any = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tensors with these batch axes and heads."""
    v = k if v is None else v
    sizes = (*q, L, E), (*k, S, E), (*v, S, EV)
    one, two, three = (normal(*size, dtype=dtype) for size in sizes)
    return one, two, three


def gradients(f: Callable[..., Any], inputs: list[Any], **options: Any) -> list[Any]:
    """The answer, and the gradient of each floating input."""
    leaves = [x.detach().clone() if x is not None else None for x in inputs]
    floats = [x for x in leaves if x is not None and x.is_floating_point()]
    for x in floats:
        x.requires_grad_()
    out = f(*leaves, **options)
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), floats)]


def same(
    q: Any, k: Any, v: Any, mask: Any = None, *, tolerance: float = 1e-12, **options: Any
) -> None:
    """Output and gradients are PyTorch's."""
    mine = gradients(scaled_dot_product_attention, [q, k, v, mask], **options)
    theirs = gradients(F.scaled_dot_product_attention, [q, k, v, mask], **options)
    for got, expected in zip(mine, theirs, strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


MASKS = {
    "none": None,
    "L,S": (L, S),
    "1,S": (1, S),
    "L,1": (L, 1),
    "H,L,S": (H, L, S),
    "1,L,S": (1, L, S),
    "B,1,1,S": (B, 1, 1, S),
    "B,H,L,S": (B, H, L, S),
}


def test_signature_is_pytorchs() -> None:
    """By the schema of the operator: the builtin has no signature to inspect."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    mine = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [p.name for p in mine] == [a.name for a in schema.arguments]
    assert [p.kind is p.KEYWORD_ONLY for p in mine] == [a.kwarg_only for a in schema.arguments]
    defaults = [p.default for p in mine if p.default is not p.empty]
    assert defaults == [a.default_value for a in schema.arguments if a.has_default_value()]


@pytest.mark.parametrize("kind", [torch.bool, torch.float64], ids=["bool", "float"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_a_mask_of_each_rank(shape: Any, kind: Any) -> None:
    mask = None if shape is None else normal(*shape)
    if mask is not None and kind is torch.bool:
        mask = mask > -0.5
        mask[..., :1] = True  # PyTorch's gradient of a row that sees nothing is another matter
    same(*operands(), mask)


BROADCASTS = {
    "2 axes": ((), (), ()),
    "3 axes": ((H,), (H,), (H,)),
    "5 axes": ((2, 3, H), (2, 3, H), (2, 3, H)),
    "one batch of keys": ((B, H), (1, H), (1, H)),
    "one batch of queries": ((1, H), (B, H), (B, H)),
    "one batch of values": ((B, H), (B, H), (1, H)),
    "one head of keys": ((B, H), (B, 1), (B, 1)),
    "one head of keys alone": ((B, H), (B, 1), (B, H)),
    "one head of queries": ((B, 1), (B, H), (B, H)),
    "one head of weights": ((B, 1), (B, 1), (B, H)),
    "keys without a batch": ((B, H), (H,), (H,)),
    "queries without a batch": ((H,), (B, H), (B, H)),
    "queries without heads": ((), (H,), (H,)),
    "two batch axes": ((2, 1, H), (1, 3, H), (3, 1)),
}


@pytest.mark.parametrize("heads", BROADCASTS.values(), ids=BROADCASTS.keys())
def test_operands_broadcast_as_matrix_products_do(heads: Any) -> None:
    same(*operands(*heads))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_enable_gqa_shares_consecutive_heads(kv_heads: int) -> None:
    same(*operands((B, H), (B, kv_heads)), enable_gqa=True)


def test_grouped_heads_beside_a_batch_to_broadcast() -> None:
    same(*operands((B, H), (1, 2)), normal(1, 1, L, S), enable_gqa=True)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)], ids=str)
def test_causal_is_top_left(lengths: tuple[int, int]) -> None:
    q, k = normal(B, H, lengths[0], E), normal(B, H, lengths[1], E)
    same(q, k, k, is_causal=True)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_object_is_a_mask(make: Callable[[int, int], Any]) -> None:
    q, k, v = operands()
    expected = F.scaled_dot_product_attention(q, k, v, make(L, S))
    got = scaled_dot_product_attention(q, k, v, make(L, S))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ArgumentError, match=r"attn_mask: expected a CausalBias of \(L, S\)"):
        scaled_dot_product_attention(q, k, v, make(L, S + 1))


@pytest.mark.parametrize("scale", [None, 0.0, 0.5, 2], ids=str)
def test_a_scale(scale: float | None) -> None:
    same(*operands(), scale=scale)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("beside", ["none", "own", "float32"])
def test_dtypes(dtype: Any, tolerance: float, beside: str) -> None:
    """A floating mask is of query's dtype, or float32; the answer is of query's."""
    kind = {"none": None, "own": dtype, "float32": torch.float32}[beside]
    mask = None if kind is None else normal(L, S, dtype=kind)
    same(*operands(dtype=dtype), mask, tolerance=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [torch.bool, torch.float64], ids=["bool", "float"])
def test_every_broadcast_with_every_mask(kind: Any) -> None:
    for heads, gqa in [
        *((h, False) for h in BROADCASTS.values()),
        (((B, H), (B, 2), (B, 2)), True),
    ]:
        q, k, v = operands(*heads)
        full = torch.broadcast_shapes(q.shape[:-2], () if gqa else k.shape[:-2])
        full = (*full, L, S)
        for rank in range(2, len(full) + 1):
            for kept in itertools.product([True, False], repeat=rank):
                shape = [n if keep else 1 for n, keep in zip(full[-rank:], kept, strict=True)]
                mask = normal(*shape)
                if kind is torch.bool:
                    mask = mask > -0.5
                    mask[..., :1] = True
                same(q, k, v, mask, enable_gqa=gqa)


# Where PyTorch leaves its documentation


def documented(q: Any, k: Any, v: Any, bias: Any, scale: float | None = None) -> Any:
    """The formula of its page, for rows that see something."""
    scores = q @ k.mT * (E**-0.5 if scale is None else scale)
    return torch.softmax(scores + bias, -1) @ v


def test_causal_with_a_negative_scale() -> None:
    q, k, v = operands()
    bias = torch.full((L, S), -torch.inf, dtype=q.dtype).triu(1)
    got = scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.7)
    torch.testing.assert_close(got, documented(q, k, v, bias, -0.7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_a_mask_hides_changes_nothing(bad: float) -> None:
    q, k, v = operands()
    mask = torch.ones(S, dtype=torch.bool)
    mask[-1] = False
    expected = documented(q, k[..., :-1, :], v[..., :-1, :], 0.0)
    k[..., -1, :] = v[..., -1, :] = bad
    out, dq, dk, dv, = gradients(scaled_dot_product_attention, [q, k, v, mask])  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert dq.isfinite().all()
    assert not dk[..., -1, :].any()
    assert not dv[..., -1, :].any()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_sees_nothing_is_0_and_has_no_gradient(kind: str) -> None:
    q, k, v = operands()
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[1] = True
    mask = ~hidden if kind == "bool" else torch.where(hidden, -torch.inf, 0.0).double()
    out, dq, *others = gradients(scaled_dot_product_attention, [q, k, v, mask])
    assert not out[..., 1, :].any()
    assert not dq[..., 1, :].any()
    assert all(x.isfinite().all() for x in others)


def test_a_mask_of_fewer_axes_than_two() -> None:
    """It broadcasts, as documented; PyTorch's CPU kernels raise an IndexError."""
    q, k, v = operands()
    row = normal(S)
    got = scaled_dot_product_attention(q, k, v, row)
    torch.testing.assert_close(got, documented(q, k, v, row), rtol=1e-12, atol=1e-12)
    got = scaled_dot_product_attention(q, k, v, torch.tensor(True))
    torch.testing.assert_close(got, documented(q, k, v, 0.0), rtol=1e-12, atol=1e-12)


# Refusals, before anything is computed

REFUSED = {
    "both masks": (
        {"attn_mask": torch.ones(L, S, dtype=torch.bool), "is_causal": True},
        ArgumentError, "attn_mask, is_causal: expected one of the two",
    ),
    "integer mask": (
        {"attn_mask": torch.ones(L, S, dtype=torch.int64)},
        ArgumentTypeError, "attn_mask: expected booleans .* got int64",
    ),
    "list": ({"attn_mask": [[True] * S] * L}, ArgumentTypeError, "attn_mask: .* got list"),
    "mask that grows": (
        {"attn_mask": torch.ones(3, 1, 1, S, dtype=torch.bool)},
        ArgumentError, r"broadcasts to \(\*N, Hq, L, S\) = \(2, 4, 3, 5\), got \(3, 1, 1, 5\)",
    ),
    "mask with too many axes": (
        {"attn_mask": torch.ones(1, 1, 1, L, S, dtype=torch.bool)}, ArgumentError, "attn_mask",
    ),
    "probability": ({"dropout_p": 1.5}, ArgumentError, r"dropout_p: .* within \[0, 1\], got 1.5"),
    "query": ({"query": 1.0}, ArgumentTypeError, "query: expected a torch.Tensor, got float"),
    "heads": (
        {"key": normal(B, 2, S, E), "value": normal(B, 2, S, E)},
        ArgumentError, "heads that broadcast .* is enable_gqa=True missing",
    ),
    "grouped values": (
        {"key": normal(B, 2, S, E), "enable_gqa": True}, ArgumentError, "value: expected the heads",
    ),
    "batch": ({"key": normal(3, H, S, E)}, ArgumentError, "batch axes that broadcast"),
    "one axis": ({"key": normal(E)}, ArgumentError, r"key: expected \(\*N, H, L, E\)"),
    "sparse": ({"key": normal(B, H, S, E).to_sparse()}, UnsupportedError, "key: expected a dense"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = operands()
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**({"query": q, "key": k, "value": v} | given))


def test_nested_tensors_are_refused() -> None:
    q = torch.nested.nested_tensor([normal(H, 3, E), normal(H, 2, E)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="query: expected a dense tensor, got a nested"):
        scaled_dot_product_attention(q, q, q)


# Backends and autocast


def test_the_chosen_backend_computes(marked: Callable[..., Any]) -> None:
    marked("nine", 9.0)
    q, k, v = operands(dtype=torch.float32)
    with attnx.use_backend("nine"):
        assert (scaled_dot_product_attention(q, k, v) == 9.0).all()


def test_under_autocast() -> None:
    q, k, v = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = scaled_dot_product_attention(q, k, v, normal(L, S, dtype=torch.float32))
    assert got.dtype is torch.bfloat16


# Dropout


def test_everything_dropped_is_0_with_gradient_0() -> None:
    for x in gradients(scaled_dot_product_attention, list(operands()), dropout_p=1.0):
        assert not x.any()


def test_dropout_is_repeated_by_pytorchs_seed() -> None:
    q, k, v = operands()
    torch.manual_seed(5)
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_dropout_drops_the_share_asked_for_and_scales_the_rest() -> None:
    """With the identity as values the output is the weights themselves."""
    n, p = 64, 0.25
    q = torch.zeros(2, 2, n, 4)
    got = scaled_dot_product_attention(q, q, torch.eye(n).expand(2, 2, n, n), dropout_p=p) * n
    kept = got[got != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
    assert abs(kept.numel() / got.numel() - (1 - p)) < 0.02


def test_the_gradient_drops_what_the_output_dropped() -> None:
    q, k, v = operands()

    def seeded(*inputs: Any) -> Any:
        torch.manual_seed(7)
        return scaled_dot_product_attention(*inputs, dropout_p=0.4)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(seeded, leaves, fast_mode=True)
