"""ONNX's RotaryEmbedding drop-in against ONNX's own cases, and what they leave out."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnx
from attnx.compat import onnx
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions import rope_table

B, H, L, D = 2, 3, 5, 8
CASES = [
    "test_rotary_embedding", "test_rotary_embedding_3d_input", "test_rotary_embedding_interleaved",
    "test_rotary_embedding_with_rotary_dim", "test_rotary_embedding_with_interleaved_rotary_dim",
    "test_rotary_embedding_no_position_ids", "test_rotary_embedding_no_position_ids_interleaved",
    "test_rotary_embedding_no_position_ids_rotary_dim",
]  # fmt: skip
# The generators run when their module is imported and seed NumPy's global state, hence a process.
GENERATE = """
import importlib, pathlib, pickle, sys
from onnx import helper
from onnx.backend.test.case import node as generators
records = {}
def expect(node, inputs, outputs, name, **options):
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    records[name] = (inputs, attributes, outputs[0])
generators.expect = expect
importlib.import_module("onnx.backend.test.case.node.rotaryembedding")
pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(records))
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each case of the installed onnx: inputs, attributes, answer."""
    if find_spec("onnx") is None:
        pytest.skip("onnx is not installed")
    path = Path(tmp_path_factory.mktemp("onnx"), "cases.pickle")
    subprocess.run([sys.executable, "-W", "ignore", "-c", GENERATE, str(path)], check=True)
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize(
    "framework", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("name", CASES)
def test_onnx_own_cases(name: str, framework: str, cases: Any) -> None:
    assert set(cases) == set(CASES)
    inputs, attributes, golden = cases[name]
    lane = attnx.get_backend(framework).lane
    inputs = [lane.integers(lane.from_numpy(x), x) if x.dtype == np.int64 and framework == "jax"
              else lane.from_numpy(x) for x in inputs]  # fmt: skip
    got = lane.to_numpy(onnx.rotary_embedding(*inputs, **attributes))
    assert (got.shape, got.dtype) == (golden.shape, golden.dtype)
    np.testing.assert_allclose(got, golden, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_with_caches_of_rope_table_it_is_rope(interleaved: int, rng: np.random.Generator) -> None:
    X, ids = rng.standard_normal((B, H, L, D), np.float32), rng.integers(0, 40, (B, L))
    style = "interleaved" if interleaved else "half"
    cos, sin = rope_table(np.arange(40), 6)
    options = {"interleaved": interleaved, "rotary_embedding_dim": 6}
    wanted = attnx.rope(X, ids, style=style, rotary_dim=6)
    np.testing.assert_array_equal(onnx.rotary_embedding(X, cos, sin, ids, **options), wanted)
    packed = X.transpose(0, 2, 1, 3).reshape(B, L, H * D)
    got = onnx.rotary_embedding(packed, cos[ids], sin[ids], num_heads=H, **options)
    np.testing.assert_array_equal(got.reshape(B, L, H, D).transpose(0, 2, 1, 3), wanted)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_are_rounded_once(dtype: Any, rng: np.random.Generator) -> None:
    X, cos, sin = (rng.random(s).astype(dtype) for s in ((B, H, L, D), (B, L, 4), (B, L, 4)))
    got = onnx.rotary_embedding(X, cos, sin)
    wide = onnx.rotary_embedding(*(x.astype(np.float32) for x in (X, cos, sin)))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), wide.astype(dtype).astype(np.float32))


def test_gradients_flow_through_the_lookup(rng: np.random.Generator) -> None:
    shapes = ((1, 2, 6), (4, 1), (4, 1))
    leaves = [torch.tensor(rng.standard_normal(s), requires_grad=True) for s in shapes]
    ids = torch.tensor([[3, 1]])
    options = {"num_heads": 2, "rotary_embedding_dim": 2}
    assert torch.autograd.gradcheck(
        lambda *x: onnx.rotary_embedding(*x, ids, **options), tuple(leaves)
    )


X, CACHE, ROWS = np.ones((B, H, L, D)), np.ones((9, 4)), np.ones((B, L, 4))
IDS = np.zeros((B, L), int)
GOOD: dict[str, Any] = {"X": X, "cos_cache": CACHE, "sin_cache": CACHE, "position_ids": IDS}
PACKED = np.ones((B, L, H * D))
REFUSED: dict[str, Any] = {
    "axes": ({"X": np.ones((L, D))}, ArgumentError, "X: expected .B, num_heads, L, head_size"),
    "heads missing": ({"X": PACKED}, ArgumentError, "num_heads: expected a divisor .* got 0"),
    "heads": ({"X": PACKED, "num_heads": 5}, ArgumentError, "num_heads: .* got 5"),
    "heads beside 4": ({"num_heads": 2}, ArgumentError, "num_heads: expected 0 or 3"),
    "odd": ({"X": np.ones((B, H, L, 7))}, ArgumentError, "X: expected an even head size, got 7"),
    "odd part": ({"rotary_embedding_dim": 3}, ArgumentError, "rotary_embedding_dim: .* got 3"),
    "large part": ({"rotary_embedding_dim": 10}, ArgumentError, "up to the head size 8, got 10"),
    "interleaved": ({"interleaved": 2}, ArgumentError, "interleaved: expected 0 or 1, got 2"),
    "cache": ({"sin_cache": np.ones((9, 3))}, ArgumentError, "sin_cache: .* got .9, 3"),
    "rows": (
        {"position_ids": None}, ArgumentError,
        r"cos_cache: expected \(B, L, R / 2\) = \(2, 5, 4\) without position_ids, got \(9, 4\)",
    ),
    "both": ({"cos_cache": ROWS}, ArgumentError, "cos_cache: .* beside position_ids"),
    "ids shape": ({"position_ids": IDS[0]}, ArgumentError, r"position_ids: expected \(B, L\)"),
    "ids high": ({"position_ids": IDS + 9}, ArgumentError, "position_ids: expected 0 to 8"),
    "ids low": ({"position_ids": IDS - 1}, ArgumentError, "position_ids: .* got -1 to -1"),
    "ids floating": ({"position_ids": IDS * 1.0}, ArgumentTypeError, "position_ids: .* float64"),
    "types": ({"cos_cache": CACHE.astype(np.float32)}, ArgumentTypeError, "the type of X, float64"),
    "integers": ({"X": np.ones((B, H, L, D), int)}, ArgumentTypeError, "X: expected one of"),
    "frameworks": ({"X": torch.ones(B, H, L, D)}, ArgumentTypeError, "arrays of one framework"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        onnx.rotary_embedding(**(GOOD | given))
