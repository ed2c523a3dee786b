"""Masks, dropout and ALiBi as JAX pytrees: arrays are leaves, everything else is structure.

So a mask can be an argument of `jax.jit`, a carry of `lax.scan`, or mapped by `vmap`. JAX rebuilds
trees from tracers and placeholders, so unflattening never runs a mask's own checks. A list of
integers counts as one array, not as a leaf for each of its numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnx import masks
from attnx.plugin import RECORDS, Alibi, Dropout

__all__ = ["register_trees"]


def register_trees() -> None:
    """Tell JAX of masks, `Dropout`, `Alibi` and records; done once, when the lane is made."""
    for cls in masks.CLASSES:
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, partial(_unflatten, cls), _flatten
        )
    jax.tree_util.register_pytree_node(Dropout, _flatten_dropout, _unflatten_dropout)
    jax.tree_util.register_pytree_node(
        Alibi, Alibi._taken_apart, lambda rest, arrays: Alibi._put_together(arrays, rest)
    )
    for record in RECORDS:
        arrays, static = record._array_fields, record._static_fields  # type: ignore[attr-defined]
        jax.tree_util.register_dataclass(record, arrays, static)


def _flatten(mask: masks.Mask) -> tuple[tuple[Any, ...], tuple[Any, str]]:
    children = mask._arrays()
    if not isinstance(mask, (masks.And, masks.Or)):
        children = tuple(jnp.asarray(c) if isinstance(c, tuple) else c for c in children)
    return children, (mask._static(), mask.structure)


def _flatten_with_keys(mask: masks.Mask) -> tuple[tuple[Any, ...], tuple[Any, str]]:
    children, structure = _flatten(mask)
    keys = map(jax.tree_util.GetAttrKey, mask._array_fields)
    return tuple(zip(keys, children, strict=True)), structure


def _unflatten(
    cls: type[masks.Mask], structure: tuple[tuple[Any, ...], str], children: Any
) -> masks.Mask:
    return masks.rebuild(cls, structure[0], tuple(children), structure[1])


def _flatten_dropout(dropout: Dropout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The words of the seed are NumPy's: JAX's integers may have 32 bits."""
    return dropout._taken_apart(lambda low, high: np.array([low, high], np.uint32))


def _unflatten_dropout(structure: tuple[Any, ...], children: Any) -> Dropout:
    return Dropout._put_together(children, structure)
