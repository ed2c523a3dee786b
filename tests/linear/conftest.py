"""What the tests of linear attention share: decays and feature maps by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attnx_conformance.relatives import elu_features

Array = np.ndarray[Any, Any]


def square(x: Any) -> Any:
    """A feature map with more features, none of them negative."""
    xp = torch if isinstance(x, torch.Tensor) else jnp if isinstance(x, jax.Array) else np
    return xp.concatenate([x * x, x * x + 1], **{"dim" if xp is torch else "axis": -1})


MAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "identity": ({}, {}),
    "elu": ({"feature_map": "elu"}, {"features": elu_features, "normalize": True}),
    "elu, undivided": (
        {"feature_map": "elu", "normalize": False}, {"features": elu_features},
    ),
    "a function": (
        {"feature_map": square, "normalize": True}, {"features": square, "normalize": True},
    ),
}  # fmt: skip


@pytest.fixture
def maps() -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
    """`maps("elu")`: what attnx is told, and what the reference is told."""
    return MAPS.__getitem__


@pytest.fixture
def decays() -> Callable[..., dict[str, Any]]:
    """`decays(kind, q)`: the option `decay` for queries in the layout bhsd, random or none."""

    def decays(kind: str, q: Array, low: float = 0.3) -> dict[str, Any]:
        rng = np.random.default_rng(5)
        dtype = np.float64 if q.dtype == np.float64 else np.float32
        if kind == "none":
            return {}
        if kind == "number":
            return {"decay": 0.75}
        shape = q.shape[-3:-2] if kind == "heads" else q.shape[:-1]
        return {"decay": rng.uniform(low, 1, shape).astype(dtype)}

    return decays
