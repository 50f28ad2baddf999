"""Joint products of the learner beside a product for each layer, and gradients that are added to float32 sums."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lemma.models import blocks, installing
from lemma.models.attention import NAME
from lemma.models.joint_products import sink_of
from lemma.models.packing import Segments

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def gradients(
    kind: str, dtype: torch.dtype, jointly: bool, *, sinks: bool = False, recompute: bool = False
) -> dict[str, torch.Tensor]:
    """Hidden states and the gradients of all parameters, on a pack of three sequences."""
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(CONFIGS[kind](**SHAPE), dtype=dtype, attn_implementation=NAME)
    installing.install(causal, fused=False, jointly=jointly)
    if recompute:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    causal.train()
    if sinks:
        for parameter in causal.parameters():
            parameter.lemma_sink = torch.zeros_like(parameter, dtype=torch.float32)
    lengths = (5, 9, 3)
    output = causal.model(
        input_ids=torch.arange(sum(lengths))[None] * 3 % 64,
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        segments=Segments(lengths, torch.device("cpu")),
    ).last_hidden_state[0]
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    found = {"hidden": output.detach()}
    for name, parameter in causal.model.named_parameters():
        sink = sink_of(parameter)
        parts = [part for part in (parameter.grad, sink) if part is not None]
        found[name] = torch.stack([part.to(torch.float64) for part in parts]).sum(0)
        assert found[name].abs().sum() > 0, name
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_joint_products_are_those_of_each_layer(kind: str, recompute: bool) -> None:
    plain = gradients(kind, torch.float64, jointly=False)
    joint = gradients(kind, torch.float64, jointly=True, recompute=recompute)
    for name, value in plain.items():
        torch.testing.assert_close(joint[name], value.double(), rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sink_gets_what_autograd_would_bring(recompute: bool) -> None:
    plain = gradients("qwen2", torch.float32, jointly=True)
    sunk = gradients("qwen2", torch.float32, jointly=True, sinks=True, recompute=recompute)
    for name, value in plain.items():
        torch.testing.assert_close(sunk[name].float(), value.float(), rtol=1e-5, atol=1e-6, msg=name)


def test_blocks_with_adapters_or_moved_weights_go_their_own_way() -> None:
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), attn_implementation=NAME)
    installing.install(causal, fused=False, jointly=True)
    first, second = causal.model.layers
    assert blocks._is_plain(first) and blocks._is_plain(second)
    first.self_attn.k_proj.weight.data = first.self_attn.k_proj.weight.data.clone()
    assert not blocks._is_plain(first) and blocks._is_plain(second)
