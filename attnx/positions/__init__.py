"""Where a token stands: rotary and sinusoidal positions, scalings for longer texts, ALiBi's slopes.

Positions are put into queries and keys before `attention`, or into embeddings before all layers;
attention itself knows none. Every function takes arrays of any registered framework, computes with
that framework's own operations, and is differentiable and traceable as those are.

    >>> import numpy as np, attnx
    >>> from attnx.positions import Llama3
    >>> q, k = np.ones((1, 8, 16, 64), np.float32), np.ones((1, 2, 16, 64), np.float32)
    >>> options = {"style": "half", "base": 500000.0, "scaling": Llama3(8, 8192)}
    >>> q, k = (attnx.rope(x, np.arange(16), **options) for x in (q, k))
    >>> attnx.attention(q, k, k, causal=True).shape
    (1, 8, 16, 64)
"""

from __future__ import annotations

from attnx.positions._fixed import alibi_slopes, sinusoidal
from attnx.positions._ramps import Llama3, Yarn
from attnx.positions._rope import (
    RopeTable,
    inverse_frequencies,
    rope,
    rope_permutation,
    rope_table,
    rotate,
)
from attnx.positions._scaling import Scaling
from attnx.positions._scalings import (
    DynamicNtk,
    Frequencies,
    Linear,
    LongRope,
    Ntk,
    Proportional,
)

__all__ = [
    "DynamicNtk",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRope",
    "Ntk",
    "Proportional",
    "RopeTable",
    "Scaling",
    "Yarn",
    "alibi_slopes",
    "inverse_frequencies",
    "rope",
    "rope_permutation",
    "rope_table",
    "rotate",
    "sinusoidal",
]
