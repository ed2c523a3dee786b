"""An ONNX Attention node in the words of `attnx.attention`.

Kept apart from the judging, because this is the whole of what the adapter decides: a fault here
gives a call that means something else, whatever the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnx.masks import Causal, Dense, Lengths, Mask, Window

from .oracle import Reference, reference

__all__ = ["ATTRIBUTES", "Call", "OnnxCase", "translate"]

Array = NDArray[Any]

ATTRIBUTES = frozenset({
    "is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode",
    "right_window_size", "scale", "softcap", "softmax_precision",
})  # fmt: skip
"""Of the operator up to opset 25. A case with another one is not understood, so it is not run."""


@dataclass(frozen=True)
class OnnxCase:
    """One node of ONNX's own tests, with the arrays that go in and those expected out.

    Attributes:
        name: ONNX's, `test_attention_...`.
        opset: the version of the operator set that defines the node.
        inputs: by the operator's names (`Q`, `K`, `V`, `attn_mask`, ...); optional ones may lack.
        outputs: the goldens, by name (`Y`, `present_key`, `present_value`, `qk_matmul_output`).
        attributes: as the node has them; an absent one has the operator's default.
    """

    name: str
    opset: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """The arguments of `attnx.attention` that mean the same, with NumPy arrays.

    Attributes:
        q: in `layout`; k and v alike, with the past in front.
        options: mask, causal, bias, scale and softcap, where the node asks for them.
    """

    q: Array
    k: Array
    v: Array
    layout: str
    options: Mapping[str, Any]

    def expected(self) -> Reference:
        """The oracle's answer."""
        return reference(self.q, self.k, self.v, layout=self.layout, **self.options)

    def in_layout(self, layout: str) -> tuple[Array, Array, Array]:
        """The operands in another layout."""
        same = layout == self.layout
        q, k, v = (x if same else np.swapaxes(x, 1, 2) for x in (self.q, self.k, self.v))
        return q, k, v


def translate(case: OnnxCase) -> Call:
    """The call that a node stands for."""
    packed = case.inputs["Q"].ndim == 3
    layout = "bshd" if packed else "bhsd"
    q_heads, kv_heads = (case.attributes.get(f"{x}_num_heads", 0) for x in ("q", "kv"))
    q, k, v = (
        _split(case.inputs[name], heads) if packed else case.inputs[name]
        for name, heads in (("Q", q_heads), ("K", kv_heads), ("V", kv_heads))
    )
    past = case.inputs.get("past_key")
    if past is not None:
        k, v = (
            _joined(case.inputs[name], new, layout)
            for name, new in (("past_key", k), ("past_value", v))
        )
    Lq, Lk = (x.shape[1 if packed else 2] for x in (q, k))
    options = _masks(case, Lq, Lk, 0 if past is None else past.shape[2])
    scale, softcap = case.attributes.get("scale"), case.attributes.get("softcap")
    options |= {} if scale is None else {"scale": float(scale)}
    options |= {"softcap": float(softcap)} if softcap else {}  # 0 means none
    return Call(q, k, v, layout, options)


def _split(array: Array, heads: int) -> Array:
    """`(B, L, H * D)` to `(B, L, H, D)`: the heads lie one after the other in a token."""
    B, L, size = array.shape
    return array.reshape(B, L, heads, size // heads)


def _joined(past: Array, new: Array, layout: str) -> Array:
    """The past, always `(B, H, L, D)`, and the new tokens behind it."""
    axis = 1 if layout == "bshd" else 2
    return np.concatenate([np.swapaxes(past, 1, 2) if axis == 1 else past, new], axis=axis)


def _masks(case: OnnxCase, Lq: int, Lk: int, past: int) -> dict[str, Any]:
    stands = _alignment(case, Lq, Lk, past)
    parts: list[Mask] = []
    options: dict[str, Any] = {}
    given = case.inputs.get("attn_mask")
    if given is not None:
        given = _padded(given, Lk)
        if given.dtype == np.bool_:
            parts.append(Dense(given))
        else:
            options["bias"] = given
    if (lengths := case.inputs.get("nonpad_kv_seqlen")) is not None:
        parts.append(Lengths(lengths.reshape(-1).astype(np.int32)))
    left, right = (case.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if max(left, right) >= 0:
        parts.append(Window(*(None if n < 0 else n for n in (left, right)), **stands))
    if case.attributes.get("is_causal", 0):
        if "align" in stands:
            options["causal"] = stands["align"]
        else:
            parts.append(Causal(**stands))
    if parts:
        options["mask"] = reduce(and_, parts)
    return options


def _alignment(case: OnnxCase, Lq: int, Lk: int, past: int) -> dict[str, Any]:
    """Where query i stands: at i plus the number of keys before the queries.

    ONNX calls that bottom-right, but it is so only where the last query meets the last key. With a
    past and as many new keys as queries it is; without a past it is top-left, whatever the
    lengths; else the positions have to be written out.
    """
    if "nonpad_kv_seqlen" in case.inputs:  # i + kv - Lq for each batch entry
        return {"align": "bottom_right"}
    if past == 0:
        return {"align": "top_left"}
    if past == Lk - Lq:
        return {"align": "bottom_right"}
    return {"q_pos": np.arange(past, past + Lq, dtype=np.int32)}


def _padded(mask: Array, Lk: int) -> Array:
    """To 2 or 4 axes, as broadcasting would, but with hidden keys where it is shorter than Lk."""
    hidden = False if mask.dtype == np.bool_ else -np.inf
    short = Lk - mask.shape[-1]
    if short > 0:
        mask = np.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, short)], constant_values=hidden)
    axes = 2 if mask.ndim < 3 else 4
    return mask.reshape((1,) * (axes - mask.ndim) + mask.shape)
