"""A packed forward equals separate forwards of the plain model, for every kind of decoder that the learner takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models import blocks
from lemma.models.load_model import build_policy, load_for_inference
from lemma.models.logprobs import map_logits
from lemma.models.model_options import ModelOptions
from lemma.models.packing import Segments, TokenBatch
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood
from tests.models.conftest import Saver
from tests.models.small import CPU, tiny_policy, trajectories

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2, some layers with a window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3, untied": ("Qwen3Config", {"tie_word_embeddings": False}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 6}),
    "gemma 3 with windows": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma 2 with windows, capped scores and logits": (
        "Gemma2Config",
        {"sliding_window": 6, "attn_logit_softcapping": 0.1, "final_logit_softcapping": 2.0},
    ),
    "granite, divided logits": ("GraniteConfig", {"logits_scaling": 2.0}),
    "cohere, multiplied logits": ("CohereConfig", {"logit_scale": 0.5}),
}
LENGTHS = (1, 30, 12, 25, 13)


def load(folder: object, **options: Any) -> Policy:
    return build_policy(ModelOptions(path=str(folder), **options), CPU, 0)


@pytest.mark.parametrize("name", DECODERS)
def test_a_packed_forward_equals_separate_ones(name: str, save_model: Saver) -> None:
    config, values = DECODERS[name]
    policy = load(save_model(config, **values))
    policy.module.double().eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 150, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        packed = map_logits(policy.head(policy.hidden(ids, positions, Segments(LENGTHS, CPU))), *policy.logit_map)
        parts = [policy.causal(input_ids=part[None]).logits[0] for part in ids.split(list(LENGTHS))]
    # The norms of these work in float32, whatever the model is in.
    limit = 1e-5 if name.startswith(("gemma", "cohere")) else 1e-12
    assert (packed - torch.cat(parts)).abs().max().item() < limit
    assert packed.std().item() > 0.1


@pytest.mark.parametrize("name", DECODERS)
def test_the_loss_is_that_of_transformers(name: str, save_model: Saver) -> None:
    """In float32, beside the plain model without anything of Lemma's in it."""
    config, values = DECODERS[name]
    folder = save_model(config, **values)
    items = [Trajectory(t.ids_T, np.arange(len(t)) > 0) for t in trajectories(LENGTHS[1:])]
    learner = Learner(load(folder), OptimOptions(), token_budget=60, total_steps=1)
    mine = learner.evaluate(items, NegativeLogLikelihood("sequence"))["loss"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        rows = [torch.from_numpy(item.ids_T)[None] for item in items]
        theirs = [plain(input_ids=ids, labels=ids).loss.item() for ids in rows]
    assert mine == pytest.approx(sum(theirs) / len(theirs), rel=1e-5)


def test_padded_loss_and_gradient_of_transformers() -> None:
    """One padded batch with labels of -100, against packs: the same loss and the same gradient in float32."""
    policy = tiny_policy()
    items = trajectories((20, 9, 14, 33))
    learner = Learner(policy, OptimOptions(clip=0.0), token_budget=48, total_steps=1)
    grads: dict[str, torch.Tensor] = {}
    learner.optimiser.step = lambda rate: (  # type: ignore[method-assign]
        grads.update({n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}) or (0.0, True)
    )
    report = learner.step(items, NegativeLogLikelihood())
    policy.module.zero_grad()
    ids, mask = torch.zeros(4, 33, dtype=torch.long), torch.zeros(4, 33, dtype=torch.long)
    labels = torch.full((4, 33), -100)
    for row, item in enumerate(items):
        ids[row, : len(item)] = torch.from_numpy(item.ids_T)
        mask[row, : len(item)] = 1
        labels[row, : len(item)] = torch.from_numpy(np.where(item.loss_mask_T, item.ids_T, -100))
    loss = policy.causal(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-5)


REFUSED = {
    "attention sinks": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "its attention has sinks"),
    "no attention": ("MambaConfig", {"hidden_size": 32, "vocab_size": 160, "num_hidden_layers": 1}, "carry a state"),
    "attention of its own": (
        "GPTJConfig",
        {"hidden_size": 32, "vocab_size": 160, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
        "is built into its class",
    ),
    "attention both ways": (
        "BertConfig",
        {"hidden_size": 32, "vocab_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4},
        "log-probabilities are off by",
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_learner_does_not_compute_is_refused(name: str, precision: str, save_model: Saver) -> None:
    config, values, why = REFUSED[name]
    with pytest.raises(UserError, match=why) as caught:
        load(save_model(config, **values), precision=precision)
    assert "take a family that docs/engines.md lists" in str(caught.value)


def test_generation_uses_the_attention_that_transformers_picks(save_model: Saver) -> None:
    """A model with sinks can be asked, though not trained; its answers are those of plain transformers."""
    folder = save_model("GptOssConfig", num_local_experts=4, num_experts_per_tok=2)
    model, _ = load_for_inference(str(folder), "cpu")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_generation_keeps_a_cap_that_transformers_leaves_out(save_model: Saver) -> None:
    """What transformers picks for Gemma 2 passes over the cap of its scores; the learner would train another model."""
    folder = save_model("Gemma2Config", attn_logit_softcapping=0.1, final_logit_softcapping=2.0, sliding_window=6)
    model, _ = load_for_inference(str(folder), "cpu")
    ids = torch.arange(5, 25)[None]
    logits = {}
    with torch.no_grad():
        for attention in ("eager", "sdpa"):
            plain = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention
            ).eval()
            logits[attention] = plain(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, logits["eager"])
    assert (logits["eager"] - logits["sdpa"]).abs().max() > 0.01


def test_the_probe_looks_at_the_model_as_it_came(save_model: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that Lemma installs wrongly shows up, because the other side of the comparison does not use it."""
    monkeypatch.setattr(blocks, "gated", lambda gate, up, fused=False: gate * up)
    with pytest.raises(UserError, match=r"log-probabilities are off by .* it begins in layers\.0\.mlp"):
        load(save_model("LlamaConfig"))


def test_installed_forwards_come_back_after_the_probe() -> None:
    policy = tiny_policy()
    norms = [m for m in policy.causal.modules() if type(m).__name__.endswith("RMSNorm")]
    feed_forwards = [m for m in policy.causal.modules() if type(m).__name__.endswith("MLP")]
    assert len(norms) == 2 * 4 + 1 and len(feed_forwards) == 2
    assert all("forward" in m.__dict__ for m in [*norms, *feed_forwards])


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_give_the_same_gradient(lora: bool) -> None:
    grads = []
    for checkpointing in (False, True):
        policy = tiny_policy(lora=lora, checkpointing=checkpointing)
        policy.module.double().train()
        batch = TokenBatch.build(trajectories((20, 9, 14)), [0, 1, 2], CPU, torch.float64)
        calls = count_calls(policy.backbone.layers[0].self_attn)
        policy.logprobs(batch).sum().backward()
        assert calls == [1, 1] if checkpointing else [1]
        grads.append([p.grad for p in policy.parameters().values()])
    for plain, recomputed in zip(*grads, strict=True):
        assert plain is not None and recomputed is not None
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-12)


def count_calls(module: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls
