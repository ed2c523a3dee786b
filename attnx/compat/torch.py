"""`torch.nn.functional.scaled_dot_product_attention`, computed by `attnx.attention`.

The signature and the meaning are those that PyTorch documents: matrix products broadcast, a mask
broadcasts to the scores, causal is top-left whatever the lengths. attnx leaves none of this to
guessing, so it is spelt out here, by views alone. Where PyTorch's kernels leave their own
documentation, this does not: a value that no query may see changes nothing, and a row that sees
nothing is 0.

What attnx refuses in q, k and v, it says of q, k and v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

import attnx
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name on any attnx backend, with gradients (spec S1 to S9).

    Args:
        query: `(*N, Hq, L, E)`, or `(L, E)`.
        key: `(*N, H, S, E)`; batch axes and heads broadcast as in a matrix product.
        value: `(*N, H, S, Ev)`, alike.
        attn_mask: boolean, True = takes part, or floating (of query's dtype or float32), added to
            the scores; broadcasts to `(*N, Hq, L, S)`. A `CausalBias` of
            `torch.nn.attention.bias` is a mask, too.
        dropout_p: the probability with which a weight is dropped, always active. The seed is drawn
            from PyTorch's default generator of query's device, so `torch.manual_seed` repeats it;
            which weights it drops is attnx's (S9), the same ones on every backend.
        is_causal: query i sees the keys j <= i, also where L != S.
        scale: by default 1/sqrt(E).
        enable_gqa: H may divide Hq; consecutive query heads share a key/value head.

    Returns:
        `(*N, Hq, L, Ev)` in query's dtype. A row that sees nothing is 0.

    Raises:
        ArgumentError: shapes that do not broadcast, both attn_mask and is_causal, or a dropout_p
            outside [0, 1].
        ArgumentTypeError: what is no tensor, or a mask that is neither boolean nor floating.
        UnsupportedError: nested and sparse tensors, and what the backend cannot do (S8.2).

    Example:
        >>> import torch
        >>> from attnx.compat.torch import scaled_dot_product_attention
        >>> q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 4, 5, 8)
        >>> scaled_dot_product_attention(q, k, k, is_causal=True).shape
        torch.Size([2, 4, 3, 8])
    """
    _check_operands(query, key, value)
    q, k, v = _broadcast(query, key, value, enable_gqa)
    options = _visible(attn_mask, is_causal, q, k)
    if dropout_p == 0.0:
        return cast("Tensor", attnx.attention(q, k, v, scale=scale, **options))
    return _with_dropout(q, k, v, dropout_p, {"scale": scale, **options})


def _check_operands(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise UnsupportedError(
                f"{name}: expected a dense tensor, got {kind}; pad it, and hide the padding by "
                "attn_mask, or join the sequences and use attnx.attention with attnx.Segments"
            )
        if x.dim() < 2:
            raise ArgumentError(
                f"{name}: expected (*N, H, L, E) or (L, E), got shape {tuple(x.shape)}"
            )


def _broadcast(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with equal batch axes and heads that attnx can group, without a copy."""
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return q, k, v
    rank = max(q.dim(), k.dim(), v.dim())
    q, k, v = (x.reshape((1,) * (rank - x.dim()) + x.shape) for x in (q, k, v))
    batch = _common([x.shape[:-3] for x in (q, k, v)], "batch axes", q, k, v)
    Hq, Hk, Hv = (x.shape[-3] for x in (q, k, v))
    if grouped:
        if Hk != Hv:
            raise ArgumentError(
                f"value: expected the heads of key beside enable_gqa=True, {Hk}, got {Hv}"
            )
        heads = Hq, Hk
    else:
        hint = "; is enable_gqa=True missing?" if Hk and Hq % Hk == 0 else ""
        (H,) = _common([(Hq,), (Hk,), (Hv,)], "heads", q, k, v, hint)
        heads = H, (1 if Hk == Hv == 1 else H)
    return (
        q.expand(*batch, heads[0], *q.shape[-2:]),
        k.expand(*batch, heads[1], *k.shape[-2:]),
        v.expand(*batch, heads[1], *v.shape[-2:]),
    )


def _common(
    shapes: Sequence[tuple[int, ...]], what: str, q: Tensor, k: Tensor, v: Tensor, hint: str = ""
) -> tuple[int, ...]:
    """The shape to which shapes of one length broadcast."""
    common = []
    for sizes in zip(*shapes, strict=True):
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            raise ArgumentError(
                f"key, value: expected {what} that broadcast with those of query, got query "
                f"{tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)}{hint}"
            )
        common.append(size)
    return tuple(common)


def _visible(mask: Any, causal: bool, q: Tensor, k: Tensor) -> dict[str, Any]:
    """`causal=`, `mask=` or `bias=` of attnx."""
    if mask is None:
        return {"causal": "top_left"} if causal else {}
    if causal:
        raise ArgumentError(
            "attn_mask, is_causal: expected one of the two, got both; attnx.attention takes both "
            "(mask= and causal=) and intersects them"
        )
    full = (*q.shape[:-1], k.shape[-2])
    if isinstance(mask, CausalBias):
        return {"causal": _alignment(mask, full)}
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError(
            f"attn_mask: expected a boolean or floating torch.Tensor, got {type(mask).__name__}"
        )
    if not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise ArgumentTypeError(
            "attn_mask: expected booleans (True = takes part) or floating values that are added "
            f"to the scores, got {str(mask.dtype)[6:]}; compare it to get booleans"
        )
    shape = tuple(mask.shape)
    fits = len(shape) <= len(full) and all(
        n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"attn_mask: expected a shape that broadcasts to (*N, Hq, L, S) = {full}, got {shape}"
        )
    # Two axes, or as many as q: the ranks that attnx takes.
    rank = 2 if len(shape) <= 2 else len(full)
    if len(shape) != rank:
        mask = mask.reshape((1,) * (rank - len(shape)) + shape)
    return {"mask" if mask.dtype is torch.bool else "bias": mask}


def _alignment(bias: CausalBias, full: tuple[int, ...]) -> str:
    if (bias.seq_len_q, bias.seq_len_kv) != full[-2:]:
        raise ArgumentError(
            f"attn_mask: expected a CausalBias of (L, S) = {full[-2:]}, "
            f"got {(bias.seq_len_q, bias.seq_len_kv)}"
        )
    return "top_left" if bias.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def _with_dropout(q: Tensor, k: Tensor, v: Tensor, p: float, options: dict[str, Any]) -> Tensor:
    """Dropped by attnx's elements (S9), from a seed that never leaves the device."""
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"dropout_p: expected a probability within [0, 1], got {p}")
    if p == 1.0:  # S9 has p < 1; here everything is dropped, and each gradient is 0
        out = attnx.attention(q, k, v, **options)
        return cast("Tensor", out.masked_fill(torch.ones_like(out, dtype=torch.bool), 0.0))
    words = torch.randint(2**32, (2,), device=q.device).to(torch.uint32)
    return cast("Tensor", attnx.attention(q, k, v, dropout=attnx.Dropout(p, words), **options))
