"""attnx: one attention API with a written meaning, on whatever backend you choose at run time.

>>> import numpy as np, attnx
>>> q = np.ones((1, 8, 16, 64), np.float32)
>>> attnx.attention(q, q, q, causal=True).shape
(1, 8, 16, 64)
"""

from __future__ import annotations

from attnx import _install, errors, masks
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
from attnx._registry import BackendInfo, Record
from attnx._report import backends, doctor, get_backend, implementations, register, unregister
from attnx.masks import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx.plugin import Gradients

__all__ = [
    "BackendInfo",
    "BoundPlan",
    "Candidate",
    "Causal",
    "Dense",
    "Dropout",
    "Explanation",
    "Gradients",
    "Lengths",
    "Predicate",
    "Prefix",
    "Record",
    "Segments",
    "Starts",
    "Window",
    "attention",
    "attention_vjp",
    "attention_weights",
    "backends",
    "doctor",
    "errors",
    "explain",
    "get_backend",
    "implementations",
    "masks",
    "merge",
    "plan",
    "register",
    "set_default_backend",
    "unregister",
    "use_backend",
]

__version__ = "0.1.0"

_install.look()
