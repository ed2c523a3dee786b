"""Masks, dropout and ALiBi as PyTorch pytrees: arrays are leaves, everything else is structure.

So a mask can be an argument that `torch.func.vmap` maps or `torch.export` takes apart. PyTorch
rebuilds trees from tensors of its own making, so unflattening runs none of a mask's checks. A list
of integers counts as one tensor, not as a leaf for each of its numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from attnx import masks
from attnx.plugin import RECORDS, Alibi, Dropout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["register_trees"]


def register_trees() -> None:
    """Tell PyTorch of masks, `Dropout`, `Alibi` and records; done once, when the lane is made."""
    for cls in masks.CLASSES:
        pytree.register_pytree_node(
            cls, _flatten, partial(_unflatten, cls), flatten_with_keys_fn=_flatten_with_keys,
            serialized_type_name=f"attnx.masks.{cls.__name__}",
        )  # fmt: skip
    pytree.register_pytree_node(
        Dropout, _flatten_dropout, Dropout._put_together, serialized_type_name="attnx.Dropout",
        flatten_with_keys_fn=_dropout_with_keys,
    )  # fmt: skip
    pytree.register_pytree_node(
        Alibi, _flatten_alibi, Alibi._put_together, serialized_type_name="attnx.Alibi",
        flatten_with_keys_fn=_alibi_with_keys,
    )  # fmt: skip
    for record in RECORDS:
        flatten, unflatten, with_keys = _record(record)
        pytree.register_pytree_node(
            record, flatten, unflatten, serialized_type_name=f"attnx.{record.__name__}",
            flatten_with_keys_fn=with_keys,
        )  # fmt: skip


def _record(
    cls: type,
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]:
    """How to take a record of the core apart, and back."""
    arrays, static = cls._array_fields, cls._static_fields  # type: ignore[attr-defined]

    def rest(record: Any) -> tuple[Any, ...]:
        return tuple([getattr(record, name) for name in static])

    def flatten(record: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(record, name) for name in arrays], rest(record)

    def unflatten(children: Iterable[Any], structure: tuple[Any, ...]) -> Any:
        return cls(*children, *structure)

    def with_keys(record: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(pytree.GetAttrKey(name), getattr(record, name)) for name in arrays], rest(record)

    return flatten, unflatten, with_keys


def _named(mask: masks.Mask) -> tuple[list[tuple[str, Any]], tuple[Any, ...]]:
    """The children with their names, and the rest; None would be a leaf of PyTorch's."""
    children = zip(mask._array_fields, mask._arrays(), strict=True)
    given = [(name, x) for name, x in children if x is not None]
    if not isinstance(mask, (masks.And, masks.Or)):
        given = [(name, torch.tensor(x) if isinstance(x, tuple) else x) for name, x in given]
    return given, (mask._static(), tuple([name for name, _ in given]), mask.structure)


def _flatten(mask: masks.Mask) -> tuple[list[Any], tuple[Any, ...]]:
    given, structure = _named(mask)
    return [x for _, x in given], structure


def _flatten_with_keys(mask: masks.Mask) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    given, structure = _named(mask)
    return [(pytree.GetAttrKey(name), x) for name, x in given], structure


def _unflatten(
    cls: type[masks.Mask], children: Iterable[Any], structure: tuple[Any, ...]
) -> masks.Mask:
    static, names, text = structure
    given = dict(zip(names, children, strict=True))
    return masks.rebuild(cls, static, tuple([given.get(n) for n in cls._array_fields]), text)


def _words(low: int, high: int) -> torch.Tensor:
    return torch.tensor([low, high]).to(torch.uint32)


def _flatten_dropout(dropout: Dropout) -> tuple[list[Any], tuple[Any, ...]]:
    children, structure = dropout._taken_apart(_words)
    return list(children), structure


def _dropout_with_keys(dropout: Dropout) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, structure = dropout._taken_apart(_words)
    return [(pytree.SequenceKey(n), x) for n, x in enumerate(children)], structure


def _flatten_alibi(alibi: Alibi) -> tuple[list[Any], tuple[Any, ...]]:
    children, structure = alibi._taken_apart()
    return list(children), structure


def _alibi_with_keys(alibi: Alibi) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    given = [(pytree.GetAttrKey(name), x) for name, x in alibi.given().items()]
    return given, alibi._taken_apart()[1]
