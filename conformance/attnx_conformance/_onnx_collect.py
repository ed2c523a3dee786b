"""Writes ONNX's Attention node cases to a file: `python -m attnx_conformance._onnx_collect FILE`.

The package ships generators and no vectors, and its generators have side effects: they run when
their module is imported, they seed NumPy's global state, and asking for one operator imports all
of them (ten seconds, with warnings). So one operator is generated in a process of its own, with a
recorder in the place of the function to which each generator hands its case.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

__all__ = ["INPUTS", "OUTPUTS", "main"]

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")

Record = dict[str, Any]


def main(path: str) -> None:
    """Generate the cases and pickle them as a list of plain dicts of NumPy arrays."""
    Path(path).write_bytes(pickle.dumps(_generated("attention")))


def _generated(module: str) -> list[Record]:
    from onnx import defs, helper
    from onnx.backend.test.case import node as generators

    records: list[Record] = []

    def expect(node_op: Any, inputs: Any, outputs: Any, name: str, **options: Any) -> None:
        latest = [helper.make_opsetid("", defs.get_schema(node_op.op_type).since_version)]
        opsets = options.get("opset_imports", latest)
        records.append({
            "name": name,
            "opset": next(int(opset.version) for opset in opsets if opset.domain == ""),
            "inputs": _named(INPUTS, node_op.input, inputs),
            "outputs": _named(OUTPUTS, node_op.output, outputs),
            "attributes": {a.name: helper.get_attribute_value(a) for a in node_op.attribute},
        })  # fmt: skip

    # Before its import, because the generators take the name from the package.
    generators.expect = expect
    importlib.import_module(f"{generators.__name__}.{module}")
    return records


def _named(names: tuple[str, ...], slots: Any, arrays: Any) -> dict[str, Any]:
    """The operator's names for the arrays given; an optional one left out has an empty slot."""
    taken = [name for name, slot in zip(names, slots, strict=False) if slot]
    return dict(zip(taken, arrays, strict=True))


if __name__ == "__main__":
    main(sys.argv[1])
