"""attnx: one attention API with a written meaning, on whatever backend you choose at run time.

>>> import numpy as np, attnx
>>> q = np.ones((1, 8, 16, 64), np.float32)
>>> attnx.attention(q, q, q, causal=True).shape
(1, 8, 16, 64)
"""

from __future__ import annotations

from attnx import _install, errors, masks, positions
from attnx._alibi import Alibi
from attnx._api import (
    BoundPlan,
    attention,
    attention_vjp,
    attention_weights,
    explain,
    merge,
    plan,
)
from attnx._choice import set_default_backend, use_backend
from attnx._dispatch import Candidate, Explanation
from attnx._dropout import Dropout
from attnx._registry import BackendInfo, Record, registry
from attnx._report import backends, doctor, get_backend, implementations, register, unregister
from attnx.cache import KVCache
from attnx.heads import (
    HeadGradients,
    HeadWeights,
    multi_head_attention,
    multi_head_attention_vjp,
)
from attnx.linear import (
    LinearGradients,
    LinearState,
    linear_attention,
    linear_attention_step,
    linear_attention_vjp,
)
from attnx.masks import (
    BlockMask,
    Causal,
    Dense,
    Lengths,
    Predicate,
    Prefix,
    Segments,
    Starts,
    Window,
)
from attnx.parts import prefill, split_kv
from attnx.plugin import Gradients
from attnx.positions import alibi_slopes, rope, sinusoidal

__all__ = [
    "Alibi",
    "BackendInfo",
    "BlockMask",
    "BoundPlan",
    "Candidate",
    "Causal",
    "Dense",
    "Dropout",
    "Explanation",
    "Gradients",
    "HeadGradients",
    "HeadWeights",
    "KVCache",
    "Lengths",
    "LinearGradients",
    "LinearState",
    "Predicate",
    "Prefix",
    "Record",
    "Segments",
    "Starts",
    "Window",
    "alibi_slopes",
    "attention",
    "attention_vjp",
    "attention_weights",
    "backends",
    "doctor",
    "errors",
    "explain",
    "get_backend",
    "implementations",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
    "masks",
    "merge",
    "multi_head_attention",
    "multi_head_attention_vjp",
    "plan",
    "positions",
    "prefill",
    "register",
    "rope",
    "set_default_backend",
    "sinusoidal",
    "split_kv",
    "unregister",
    "use_backend",
]

__version__ = "0.1.0"


def _policy() -> object:
    """The plugin that `ATTNX_POLICY` asks for, made when plugins are collected."""
    from attnx import policies

    return policies.named(registry.settings.policy or "")


if registry.settings.policy is not None:
    registry.policy = _policy
_install.look()
