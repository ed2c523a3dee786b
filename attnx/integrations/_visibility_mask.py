"""The masks that transformers hands from a model to its attention, with their structure kept.

transformers asks a mask function for a tensor `(B, 1, Lq, Lk)` and passes it through the model to
the attention function, and some models slice or join it on the way. So what is handed over is a
tensor that holds no Lq x Lk array but says what it means: attention reads the meaning, and any
other operation finds the booleans, made there and then.

Boolean masks are also a trap. A model that computes attention by itself may expect numbers to add
to its scores, and adding booleans is no error to PyTorch, only wrong. So numbers come out of a mask
by selection alone, and every other operation that would make some raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.utils.import_utils import is_torchdynamo_exporting, is_tracing

from attnx.errors import UnsupportedError
from attnx.masks import And, Causal, Mask, Segments, Window

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VisibilityMask", "mask"]

SELECTIONS = frozenset(
    {torch.ops.aten.where, torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_}
)
"""Operations on scores in which booleans mean what they mean here."""


class VisibilityMask(torch.Tensor):
    """A boolean mask `(B, 1, Lq, Lk)`, True = visible, that can be read as options of attention.

    Attributes:
        options: `mask=` and `causal=` of `attnx.attention`.
    """

    options: dict[str, Any]
    _make: Callable[[], torch.Tensor]

    # Every operation goes through dispatch, so that none reaches a storage that is not there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(
        shape: tuple[int, ...], device: Any, options: dict[str, Any],
        make: Callable[[], torch.Tensor],
    ) -> VisibilityMask:  # fmt: skip
        """A mask that means `options`, and whose booleans are `make()`."""
        found: VisibilityMask = torch.Tensor._make_wrapper_subclass(
            VisibilityMask, shape, dtype=torch.bool, device=device
        )
        found.options, found._make = options, make
        return found

    @staticmethod
    def dense(array: torch.Tensor) -> VisibilityMask:
        """A mask that means its booleans."""
        return VisibilityMask.of(
            tuple(array.shape), array.device, {"mask": array, "causal": False}, lambda: array
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VisibilityMask({tuple(self.shape)}, {self.options})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operation on the booleans; what is a mask afterwards stays one."""
        found = func(*tree_map(_booleans, args), **tree_map(_booleans, kwargs or {}))
        if getattr(func, "overloadpacket", None) not in SELECTIONS:
            tree_map(_refuse_numbers, found)
        return tree_map(_guarded, found)


def _booleans(value: Any) -> Any:
    return value._make() if isinstance(value, VisibilityMask) else value


def _refuse_numbers(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        raise UnsupportedError(
            "attn_implementation: this model computes with its mask outside transformers' "
            "attention interface, so attnx cannot serve it; use attn_implementation='eager'"
        )


def _guarded(value: Any) -> Any:
    if type(value) is torch.Tensor and value.dtype == torch.bool and value.ndim == 4:
        return VisibilityMask.dense(value)
    return value


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **rest: Any,
) -> torch.Tensor | None:
    """The mask function that belongs to `attention`, as `transformers.AttentionMaskInterface` asks.

    Plain causal and bidirectional masks, sliding windows and padding keep their structure. Every
    other pattern (chunks, packed sequences, a model's own functions), a static cache and a traced
    model get the booleans that `sdpa` gets.

    Args:
        batch_size: B.
        q_length: Lq.
        kv_length: Lk.
        q_offset: where the first query stands.
        kv_offset: where the first key stands.
        mask_function: transformers' `fn(b, h, i, j) -> bool`.
        attention_mask: `(B, …)` booleans, False = padding, over all keys up to now.
        allow_is_causal_skip: whether the caller can do without a causal mask's booleans.
        allow_is_bidirectional_skip: whether it can do without a bidirectional one's.
        device: where the mask belongs.
        **rest: what transformers' own mask functions take beside.

    Returns:
        A mask for `attention`; None only while a compiler traces the model.
    """

    def dense(skip: bool) -> Any:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            allow_is_causal_skip=skip and allow_is_causal_skip,
            allow_is_bidirectional_skip=False,  # to `attention`, None may mean causal
            device=device, **rest,
        )  # fmt: skip

    if is_tracing(attention_mask) or is_torchdynamo_exporting():
        return dense(skip=True)  # type: ignore[no-any-return]
    pattern = _pattern(mask_function)
    if (
        pattern is None
        or not (allow_is_causal_skip or allow_is_bidirectional_skip)
        or not (isinstance(q_offset, int) and isinstance(kv_offset, int))
    ):
        return VisibilityMask.dense(dense(skip=False))
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    options = _options(pattern, q_offset - kv_offset, q_length, kv_length, padding, device)
    shape = (batch_size, 1, q_length, kv_length)
    return VisibilityMask.of(shape, device, options, lambda: dense(skip=False))


class _Pattern(NamedTuple):
    """What a query at position p sees: keys from p - left to p + right; None = no limit."""

    left: int | None
    right: int | None


def _pattern(function: Any) -> _Pattern | None:
    """The pattern of one of transformers' own mask functions; None for any other function.

    They are told by their code: a factory's functions share it, and a changed one is not met.
    """
    if function is masking_utils.causal_mask_function:
        return _Pattern(None, 0)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern(None, None)
    code, held = _code(function), _held(function)
    if code is _code(masking_utils.and_masks()):
        parts = [_pattern(part) for part in held["mask_functions"]]
        return _intersection([part for part in parts if part]) if all(parts) else None
    size = held.get("sliding_window")
    if type(size) is not int or size < 1:
        return None
    if code is _code(masking_utils.sliding_window_overlay(1)):
        return _Pattern(size - 1, None)
    if code is _code(masking_utils.sliding_window_bidirectional_overlay(1)):
        return _Pattern(size, size)
    return None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", function)


def _held(function: Any) -> dict[str, Any]:
    names = getattr(_code(function), "co_freevars", ())
    return (
        {n: c.cell_contents for n, c in zip(names, function.__closure__ or (), strict=True)}
        if names
        else {}
    )


def _intersection(patterns: list[_Pattern]) -> _Pattern:
    lefts = [p.left for p in patterns if p.left is not None]
    rights = [p.right for p in patterns if p.right is not None]
    return _Pattern(min(lefts, default=None), min(rights, default=None))


def _options(
    pattern: _Pattern, first: int, Lq: int, Lk: int, padding: torch.Tensor | None, device: Any
) -> dict[str, Any]:
    """`mask=` and `causal=` for queries that stand at first, first + 1, … among the keys."""
    left, right = pattern
    if left is not None and first + Lq - 1 <= left:
        left = None
    if right is not None and first + right >= Lk - 1:
        right = None
    align = {0: "top_left", Lk - Lq: "bottom_right"}.get(first)
    where: dict[str, Any] = {"align": align}
    if align is None and (left is not None or right is not None):
        where = {"q_pos": torch.arange(first, first + Lq, device=device)}
    parts: list[Mask] = []
    causal: bool | str = False
    if left is None and right == 0:
        if align is None:
            parts.append(Causal(**where))
        else:
            causal = align
    elif left is not None or right is not None:
        parts.append(Window(left, right, **where))
    if padding is not None and not bool(padding.all()):
        # Not Lengths or Starts: any pattern of padding, and no position moves.
        queries = torch.zeros(Lq, dtype=torch.int64, device=device)
        parts.append(Segments(queries, padding.to(torch.int64) - 1))
    mask = And(tuple(parts)) if len(parts) > 1 else next(iter(parts), None)
    return {"mask": mask, "causal": causal}
