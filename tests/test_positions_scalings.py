"""Scalings of rope: frozen values, and transformers' own numbers for each of its `rope_type`s."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import attnx
from attnx import positions
from attnx.positions import (
    DynamicNtk,
    Frequencies,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Yarn,
)
from attnx.positions._scaling import read

SCALINGS = [
    Linear(4), Ntk(2), DynamicNtk(2.0, 64, 100), Yarn(4, 4096), Llama3(8, 8192),
    LongRope([1.0] * 4, [2.0, 3, 4, 5], 64, 65, 8.0), Proportional(0.5),
    Frequencies([3.0, 1, 0.5, 0]),
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_a_scaling_is_a_frozen_value(scaling: Any) -> None:
    """Its text says all of it, and that is how copies, pickles and compilers carry it."""
    assert read(scaling.text) == scaling == pickle.loads(pickle.dumps(scaling))
    assert hash(copy.deepcopy(scaling)) == hash(scaling)
    assert eval(repr(scaling), vars(positions)) == scaling
    assert scaling not in [other for other in SCALINGS if other is not scaling]
    with pytest.raises(AttributeError, match="frozen: make a new"):
        scaling.factor = 3.0
    table = positions.rope_table(np.arange(5), 8, scaling=scaling)
    angles = np.arange(5)[:, None] * positions.inverse_frequencies(8, scaling=scaling)
    for got, wanted in zip(table, (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(got, wanted * scaling.attention_factor, rtol=1e-6, atol=1e-6)


def test_what_the_records_say_without_a_peer() -> None:
    """Those that transformers has no name for, and the ends of the others."""
    plain = positions.inverse_frequencies(8)
    assert plain == (1.0, 0.1, 0.01, 0.001)
    ntk = Ntk(3).frequencies(8, 10000.0)
    assert ntk[0] == 1.0
    assert ntk[-1] == pytest.approx(plain[-1] / 3)
    assert DynamicNtk(3, 64, 10).frequencies(8, 10000.0) == plain
    assert Frequencies((1, 2), 0.5).frequencies(4, 7.0) == (1.0, 2.0)
    assert Yarn(4, 64, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0


# transformers ------------------------------------------------------------------------------------

PEERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic, short": (DynamicNtk(2.0, 2048, 100), {"rope_type": "dynamic", "factor": 2.0}),
    "dynamic, long": (DynamicNtk(4.0, 2048, 6000), {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": (
        Yarn(4.0, 512),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn, a ramp beyond the last pair": (
        Yarn(4.0, 65536),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536},
    ),
    "yarn, a ramp before the first pair": (
        Yarn(4.0, 6),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    ),
    "yarn of DeepSeek": (
        Yarn(40.0, 512, 16.0, 2.0, truncate=False, mscale=1.0, mscale_all_dim=0.8),
        {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512,
            "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "yarn, own attention factor": (
        Yarn(8.0, 256, attention_factor=1.25),
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256,
            "attention_factor": 1.25,
        },
    ),
    "llama3": (
        Llama3(8.0, 1024, 1.0, 4.0),
        {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    ),
    "longrope, short": (
        LongRope([1.0] * 16, [2.0] * 16, 512, 512, 4.0),
        {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
        },
    ),
    "longrope, long": (
        LongRope([1.0] * 16, [1.0 + n / 3 for n in range(16)], 512, 513, 4.0),
        {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 16, "long_factor": [1.0 + n / 3 for n in range(16)],
        },
    ),
    "proportional": (
        Proportional(0.25, 2.0),
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def peer() -> Any:
    """transformers' configuration of a Llama, and its functions."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def peer(parameters: dict[str, Any], base: float, length: int | None) -> tuple[Any, float]:
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048,
            rope_parameters={"rope_theta": base} | parameters,
        )  # fmt: skip
        made, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)
        return made.numpy(), factor

    return peer


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", PEERS)
def test_frequencies_and_attention_factor_are_transformers(
    name: str, base: float, peer: Any
) -> None:
    """Their frequencies are computed in float32, and ours lie within that."""
    scaling, parameters = PEERS[name]
    wanted, factor = peer(parameters, base, getattr(scaling, "length", None))
    got = positions.inverse_frequencies(32, base=base, scaling=scaling)
    np.testing.assert_allclose(got, wanted, rtol=2e-6)
    assert scaling.attention_factor == pytest.approx(factor)


def test_rope_is_transformers_llama(rng: np.random.Generator) -> None:
    """Style half, with Llama 3.1's scaling and with YaRN's attention factor."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama import modeling_llama

    q, k = (torch.tensor(rng.standard_normal((2, heads, 7, 32), np.float32)) for heads in (4, 2))
    p = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 9, 40, 41, 300, 301, 999]])
    for name in ("llama3", "yarn"):
        scaling, parameters = PEERS[name]
        config = transformers.LlamaConfig(
            hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048,
            rope_parameters={"rope_theta": 500000.0} | parameters,
        )  # fmt: skip
        cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, p)
        wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        for x, y in zip((q, k), wanted, strict=True):
            got = attnx.rope(x, p, style="half", base=500000.0, scaling=scaling)
            torch.testing.assert_close(got, y, rtol=0, atol=2e-4)  # their angles are float32's


def test_rope_is_transformers_gpt_j(rng: np.random.Generator) -> None:
    """Style interleaved, layout bshd, a part turned."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gptj import modeling_gptj

    x = torch.tensor(rng.standard_normal((2, 7, 3, 16), np.float32))
    sin, cos = modeling_gptj.create_sinusoidal_positions(7, 8)[None].chunk(2, -1)
    part = modeling_gptj.apply_rotary_pos_emb(x[..., :8], sin, cos)
    wanted = torch.concat([part, x[..., 8:]], -1)
    got = attnx.rope(x, range(7), style="interleaved", rotary_dim=8, layout="bshd")
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)


def test_alibi_slopes_are_transformers_bloom() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (1, 4, 6, 12, 20, 71):
        second = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        np.testing.assert_allclose(attnx.alibi_slopes(heads), second.numpy(), rtol=1e-6)
