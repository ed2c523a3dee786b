"""attnx as an attention implementation of Hugging Face transformers.

transformers takes attention and masks from two registries under one name, and each half fails
silently without the other: with attention alone, a model's padding mask is never made. So
`register` writes both.

Everything that a model hands to its attention is honoured, or named here as having no part in it,
or refused. Models pass what concerns them alone through the same keywords, so an argument that is
not known is an error: it may well be one that changes the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import attnx
from attnx._registry import registry
from attnx.errors import ArgumentTypeError, UnsupportedError
from attnx.integrations._visibility_mask import VisibilityMask, mask

__all__ = ["attention", "mask", "register"]

NO_PART = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "seq_idx", "token_type_ids", "use_cache",
})  # fmt: skip
"""Arguments of models that change nothing in attention: positions are in q and k already."""

HINTS = {
    "output_attentions": "attention weights are not kept; load it with attn_implementation='eager'",
    "cu_seq_lens_q": "leave it out: the position_ids of packed sequences say it",
    "indices": "the model leaves its sparse keys to the kernel; use attn_implementation='eager'",
    "sinks": "pass sinks of shape (Hq,) as s_aux",
}
MISREAD = ("flash", "sdpa", "flex_attention")
"""Parts of a name by which transformers takes it for another implementation."""


def register() -> None:
    """Make `attn_implementation="attnx"` and `"attnx:NAME"` known to transformers.

    `"attnx"` computes where `use_backend`, `set_default_backend` or `ATTNX_BACKEND` say, PyTorch
    being the default; `"attnx:NAME"` names the backend. It may be called again, and knows then the
    backends registered since. A backend whose name holds `flash`, `sdpa` or `flex_attention` is
    left to `"attnx"`: transformers would take its name for another implementation.

    Causal masks, padding, sliding windows, grouped heads, sinks, softcaps, position biases,
    dropout, caches and a caller's own 4-D masks are honoured. A model that asks for anything else
    gets an `UnsupportedError`, and so does one that computes attention without transformers'
    attention interface.

    Example:
        >>> import attnx.integrations.transformers
        >>> attnx.integrations.transformers.register()
        >>> from transformers import AttentionInterface
        >>> "attnx" in AttentionInterface(), "attnx:numpy" in AttentionInterface()
        (True, True)
    """
    # `attnx.backends` would load them all, and import their frameworks.
    names = (name for name in registry.names() if not any(part in name for part in MISREAD))
    for implementation, backend in (("attnx", None), *((f"attnx:{name}", name) for name in names)):
        AttentionInterface.register(implementation, partial(attention, backend=backend))
        AttentionMaskInterface.register(implementation, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that `register` gives to transformers (S1 to S9).

    A query whose every key is hidden, as padding on the left is, gets 0 (S3.7), where `eager` gives
    it an average of what it must not see.

    Args:
        module: the attention layer; its `is_causal` counts where there is no mask.
        query: `(B, Hq, Lq, D)`.
        key: `(B, Hk, Lk, D)`.
        value: `(B, Hk, Lk, Dv)`.
        attention_mask: what `mask` gave; or a model's own, boolean (True = visible) or added to the
            scores.
        dropout: the probability of S9, while the module trains; its seed comes from PyTorch's
            generator.
        scaling: the scale; by default 1/sqrt(D).
        is_causal: replaces the module's.
        sliding_window: the mask says it; without one it must not be shorter than the keys.
        softcap: see S2.
        s_aux: sinks, `(Hq,)`.
        position_bias: added to the scores.
        backend: the backend's name; None as in `attnx.attention`.
        **others: what models pass to every attention function.

    Returns:
        The result `(B, Lq, Hq, Dv)`, and None for the weights.

    Raises:
        UnsupportedError: an argument that attention cannot honour.
        ArgumentError: as in `attnx.attention`.
        ArgumentTypeError: as in `attnx.attention`.
    """
    _refuse(others)
    options, bias = _mask_options(module, query, attention_mask, is_causal)
    if attention_mask is None and sliding_window is not None and sliding_window < key.shape[2]:
        raise UnsupportedError(
            f"sliding_window: got {sliding_window} for {key.shape[2]} keys without a mask; pass "
            "the mask that transformers makes for it"
        )
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    drop = None
    if dropout and module.training:
        # Words that stay on the device, since a compiler cannot trace the reading of a number.
        words = torch.randint(1 << 32, (2,), device=query.device).to(torch.uint32)
        drop = attnx.Dropout(dropout, words)
    out = attnx.attention(
        query, key, value, **options, bias=bias, scale=scaling, softcap=softcap, sinks=s_aux,
        dropout=drop, backend=backend,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _mask_options(
    module: torch.nn.Module, query: torch.Tensor, attention_mask: Any, is_causal: bool | None
) -> tuple[dict[str, Any], Any]:
    """`mask=` and `causal=`, and a bias."""
    if isinstance(attention_mask, VisibilityMask):
        return attention_mask.options, None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # One query without a mask is the newest; more are the first ones, before an empty cache.
        return {"causal": "top_left" if causal and query.shape[2] > 1 else False}, None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 4:
        shape = getattr(attention_mask, "shape", None)
        raise ArgumentTypeError(
            "attention_mask: expected a tensor (B, 1 or Hq, Lq, Lk) or None, got "
            + (type(attention_mask).__name__ if shape is None else f"shape {tuple(shape)}")
        )
    if attention_mask.is_floating_point():
        return {}, attention_mask
    return {"mask": attention_mask}, None


def _refuse(others: dict[str, Any]) -> None:
    for name, given in others.items():
        if given is None or given is False or name in NO_PART:
            continue
        hint = HINTS.get(name, "leave it out, or use attn_implementation='eager'")
        raise UnsupportedError(f"{name}: attnx has no such option of attention; {hint}")
