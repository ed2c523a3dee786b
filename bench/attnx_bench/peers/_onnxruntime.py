"""ONNX Runtime: a model of one node, the standard's `Attention`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.workload import Arrays, Workload

from ._shared import Array, named, refuse, refuse_scores, spelled

__all__ = ["IMPLEMENTATIONS"]

OPSET, IR = 23, 11
"""The opset that brought `Attention`, and the model format of its time."""


def make(workload: Workload, arrays: Arrays) -> Ready:
    """A session on the CPU with a thread for each of its processors.

    Without a cache the operator's `is_causal` is aligned at the top left.
    """
    refuse(workload, gradient="no gradients", need_lse="returns no lse", dropout="has no dropout")
    refuse_scores(workload)
    causal, mask, bias = spelled(workload, arrays, apart=False)
    feeds = {"q": arrays.q, "k": arrays.k, "v": arrays.v}
    if mask is not None:
        # The kernel broadcasts over batch and heads, and refuses a mask of one row for all.
        feeds["attn_mask"] = np.ascontiguousarray(
            np.broadcast_to(mask, (*mask.shape[:2], workload.Lq, workload.Lk))
        )
    if bias is not None:
        feeds["attn_mask"] = bias
    attributes: dict[str, Any] = {"is_causal": int(causal)}
    if workload.softcap is not None:
        attributes["softcap"] = workload.softcap
    how = "is_causal" if causal else "attn_mask" if "attn_mask" in feeds else "no mask"
    session = _session(_model(feeds, attributes))

    def run() -> Any:
        return session.run(None, feeds)

    return Ready(run, named, how)


def _model(feeds: dict[str, Array], attributes: dict[str, Any]) -> bytes:
    """The model, with the shapes of these arrays."""
    from onnx import helper

    def value(name: str, array: Array, shape: Any) -> Any:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), shape
        )

    node = helper.make_node("Attention", list(feeds), ["out"], **attributes)
    inputs = [value(name, array, array.shape) for name, array in feeds.items()]
    graph = helper.make_graph([node], "attention", inputs, [value("out", feeds["q"], None)])
    opset = helper.make_opsetid("", OPSET)
    model: bytes = helper.make_model(
        graph, opset_imports=[opset], ir_version=IR
    ).SerializeToString()
    return model


def _session(model: bytes) -> Any:
    """A session, or `NotApplicable` with the first line of the runtime's refusal."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base of their own
        if type(error).__module__.split(".")[0] != "onnxruntime":
            raise
        raise NotApplicable(str(error).splitlines()[0]) from None


IMPLEMENTATIONS = (Implementation("ONNX Runtime", make, ("onnx", "onnxruntime")),)
