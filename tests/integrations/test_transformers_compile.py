"""`torch.compile` of models: what they compute by themselves, with attnx inside the program."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

import torch
import transformers
from torch import Tensor

from attnx.integrations.transformers import attention, register

# torch.compile warns of its own imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    torch._dynamo.reset()
    torch.manual_seed(0)


def model(kind: str = "llama") -> Any:
    """A small random model; the window of Mistral's is shorter than what it reads."""
    config = (
        transformers.LlamaConfig(**CONFIG) if kind == "llama"
        else transformers.MistralConfig(**CONFIG, sliding_window=4)
    )  # fmt: skip
    lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return lm.eval()


def batch(padding: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids, and their mask where there is padding, on the left of the first row."""
    ids = torch.randint(3, CONFIG["vocab_size"], (2, 11))
    if not padding:
        return ids, {}
    real = torch.ones_like(ids)
    real[0, :padding] = 0
    return ids * real, {"attention_mask": real}


def close(found: Tensor, expected: Tensor) -> None:
    size = expected.abs().max().clamp_min(1.0)
    assert ((found - expected).abs().max() / size).item() <= 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("padding", [0, 3], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("name", ["attnx", "attnx:numpy"])
def test_a_compiled_model_gives_the_logits_of_eager(name: str, kind: str, padding: int) -> None:
    """The mask function is traced with the model."""
    lm, (ids, options) = model(kind), batch(padding)
    with torch.no_grad():
        expected = lm(ids, **options).logits
        lm.set_attn_implementation(name)
        found = torch.compile(lm, backend="aot_eager")(ids, **options).logits
    real = options.get("attention_mask", torch.ones_like(ids)).bool()
    close(found[real], expected[real])


@pytest.mark.sweep
def test_a_compiled_model_has_the_gradients_of_eager() -> None:
    lm, (ids, options) = model(), batch(0)

    def gradients(run: Any) -> list[Tensor]:
        lm.zero_grad()
        run(ids, labels=ids, **options).loss.backward()
        return [p.grad.clone() for p in lm.parameters()]

    expected = gradients(lm)
    lm.set_attn_implementation("attnx")
    for found, wanted in zip(
        gradients(torch.compile(lm, backend="aot_eager")), expected, strict=True
    ):
        close(found, wanted)


@pytest.mark.parametrize("backend", ["torch", pytest.param("numpy", marks=pytest.mark.sweep)])
def test_dropout_is_compiled_in_one_graph_and_drops_the_same(backend: str) -> None:
    """Its seed is drawn inside the program, anew in each run."""
    layer, q = torch.nn.Module().train(), torch.randn(1, 2, 8, 4, requires_grad=True)

    def run(q: Tensor) -> Tensor:
        return attention(layer, q, q, q, None, dropout=0.5, backend=backend)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for call in (run, compiled):
        torch.manual_seed(5)
        out = call(q)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), q)))
    for found, expected in zip(*reversed(results), strict=True):
        close(found, expected)
    assert not torch.equal(compiled(q), results[1][0])
