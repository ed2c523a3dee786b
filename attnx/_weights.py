"""The weights of multi-head attention, and how layers of other libraries hold them.

The loaders know those layers by their attributes and import nothing. What they give are views of a
layer's own parameters where its framework has views, so that gradients reach the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HeadWeights"]


class HeadWeights(NamedTuple):
    """The projections of multi-head attention, `y = x w + b`, heads side by side in the columns.

    A named tuple is a tree of arrays to JAX and to PyTorch.

    Attributes:
        wq: (E, Hq * D).
        wk: (Ec, Hk * D).
        wv: (Ec, Hk * Dv).
        wo: (Hq * Dv, Eo).
        bq: (Hq * D,), or None.
        bk: (Hk * D,), or None.
        bv: (Hk * Dv,), or None.
        bo: (Eo,), or None.

    Example:
        >>> import numpy as np, attnx
        >>> kernels = [
        ...     np.ones((8, 2, 4)),
        ...     np.ones((6, 2, 4)),
        ...     np.ones((6, 2, 3)),
        ...     np.ones((2, 3, 8)),
        ... ]
        >>> [w.shape for w in attnx.HeadWeights.from_keras(kernels)[:4]]
        [(8, 8), (6, 8), (6, 6), (6, 8)]
    """

    wq: Any
    wk: Any
    wv: Any
    wo: Any
    bq: Any = None
    bk: Any = None
    bv: Any = None
    bo: Any = None

    @classmethod
    def from_torch(cls, layer: Any) -> HeadWeights:
        """Those of a `torch.nn.MultiheadAttention`.

        Args:
            layer: the layer. Its `dropout`, `batch_first` and masks are the call's matter.

        Raises:
            ArgumentTypeError: it is no such layer.
            ArgumentError: it adds keys of its own (`add_bias_kv`, `add_zero_attn`).
        """
        if not (hasattr(layer, "in_proj_weight") and hasattr(layer, "out_proj")):
            raise ArgumentTypeError(
                f"layer: expected a torch.nn.MultiheadAttention, got {type(layer).__name__}"
            )
        if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
            raise ArgumentError(
                "layer: expected one without add_bias_kv and add_zero_attn: they add keys that "
                "every query sees, and no weights say that"
            )
        E = layer.embed_dim
        if layer.in_proj_weight is None:
            rows = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        else:
            rows = [layer.in_proj_weight[n * E : (n + 1) * E] for n in range(3)]
        b = layer.in_proj_bias
        bq, bk, bv = (None if b is None else b[n * E : (n + 1) * E] for n in range(3))
        wq, wk, wv = (w.T for w in rows)
        return cls(wq, wk, wv, layer.out_proj.weight.T, bq, bk, bv, layer.out_proj.bias)

    @classmethod
    def from_flax(cls, layer: Any) -> HeadWeights:
        """Those of a `flax.nnx.MultiHeadAttention`.

        Args:
            layer: the layer. Its `dropout_rate`, `decode` and `attention_fn` are the call's matter.

        Raises:
            ArgumentTypeError: it is no such layer.
            ArgumentError: it normalises queries and keys (`normalize_qk`).
        """
        parts: list[Any] = [getattr(layer, name, None) for name in ("query", "key", "value", "out")]
        if any(not hasattr(part, "kernel") for part in parts):
            raise ArgumentTypeError(
                f"layer: expected a flax.nnx.MultiHeadAttention, got {type(layer).__name__}"
            )
        if getattr(layer, "query_ln", None) is not None:
            raise ArgumentError(
                "layer: expected one without normalize_qk: no projection can say that"
            )
        kernels = [part.kernel[...] for part in parts]
        biases = [None if part.bias is None else part.bias[...] for part in parts]
        return cls._of_kernels(kernels, biases)

    @classmethod
    def from_keras(cls, layer: Any) -> HeadWeights:
        """Those of a `keras.layers.MultiHeadAttention` or `GroupQueryAttention`.

        Args:
            layer: the layer, once it is built; or its arrays in the order of `layer.weights`.

        Raises:
            ArgumentError: they are not 4 arrays, or 8 with biases.
        """
        arrays: Sequence[Any]
        if isinstance(layer, (list, tuple)):
            arrays = layer
        elif hasattr(layer, "weights"):
            arrays = [getattr(w, "value", w) for w in layer.weights]
        else:
            raise ArgumentTypeError(
                "layer: expected a Keras layer or the list of its arrays, got "
                f"{type(layer).__name__}"
            )
        if len(arrays) not in (4, 8):
            raise ArgumentError(
                "layer: expected the kernels of query, key, value and output, and with biases a "
                f"bias after each, got {len(arrays)} arrays; a layer must be built first"
            )
        biases = [None] * 4 if len(arrays) == 4 else list(arrays[1::2])
        return cls._of_kernels(list(arrays if len(arrays) == 4 else arrays[0::2]), biases)

    @classmethod
    def _of_kernels(cls, kernels: list[Any], biases: list[Any]) -> HeadWeights:
        """From kernels (E, H, D), the last one (H, Dv, Eo), and biases (H, D) and (Eo,)."""
        matrices = [w.reshape(w.shape[0], -1) for w in kernels[:3]]
        matrices.append(kernels[3].reshape(-1, kernels[3].shape[-1]))
        return cls(*matrices, *(None if b is None else b.reshape(-1) for b in biases))
