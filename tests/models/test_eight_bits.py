"""8-bit base weights, which bitsandbytes rounds for real, against transformers with LLM.int8 on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import EngineError, Request, Sampling, generate
from lemma.engines.vllm.weights import check_policy
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import LoraOptions, ModelOptions, Precision
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood
from tests.models.conftest import Saver
from tests.models.small import CPU, tiny_policy
from tests.models.test_adapter_kinds import IDS

pytest.importorskip("bitsandbytes")


def eight_bits(folder: Path, precision: Precision = "fp32", **lora: Any) -> Policy:
    """A policy on 8-bit weights whose adapters add something."""
    options = ModelOptions(path=str(folder), quantize="8bit", precision=precision, lora=LoraOptions(r=4, **lora))
    policy = build_policy(options, CPU, 0)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return policy


def twin_of(folder: Path, adapter: Path) -> Any:
    """The same in transformers and peft. While it learns, its product on a CPU rounds weights alone."""
    from peft import PeftModel

    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config"])
def test_the_learner_computes_what_transformers_computes(
    family: str, kind: dict[str, Any], save_model: Saver, tmp_path: Path
) -> None:
    """Log-probabilities, and the gradient of every adapter; Qwen2's projections have biases."""
    folder = save_model(family)
    policy = eight_bits(folder, **kind)
    layer = policy.causal.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.int8 and layer.weight.data_ptr() == layer.weight.CB.data_ptr()
    policy.save_adapter(tmp_path)
    twin = twin_of(folder, tmp_path).train()
    batch = TokenBatch.build([Trajectory(IDS.numpy(), np.arange(len(IDS)) > 0)], [0], CPU)
    mine = policy.logprobs(batch)
    theirs = twin(input_ids=IDS[None]).logits[0, :-1].log_softmax(-1).gather(1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    mine.sum().backward()
    theirs.sum().backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert expected.keys() == policy.parameters().keys()
    for name, parameter in policy.parameters().items():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-4, msg=name)


def test_it_is_nearer_to_the_whole_weights_than_rounded_activations_are(save_model: Saver, tmp_path: Path) -> None:
    folder = save_model("LlamaConfig")
    policy = eight_bits(folder)
    policy.save(tmp_path)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not getattr(merged, "is_quantized", False)
    models = (merged.eval(), policy.module.eval(), twin_of(folder, tmp_path / "adapter").eval())
    with torch.no_grad():
        whole, mine, theirs = (model(input_ids=IDS[None]).logits.log_softmax(-1) for model in models)
    assert 0 < (mine - whole).abs().mean() < (theirs - whole).abs().mean()


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_an_engine_says_what_was_learnt(precision: Precision, most: float, save_model: Saver) -> None:
    """In bf16, as near as rounding lets them."""
    policy = eight_bits(save_model("Qwen2Config"), precision)
    learner = Learner(policy, OptimOptions(lr=0.05), token_budget=256, total_steps=1)
    engine = NativeEngine(policy, cache_tokens=512, seed=1)
    codes = policy.causal.model.layers[0].mlp.up_proj.base_layer.weight.clone()
    said = []
    for step in range(2):
        engine.update_weights(step)
        prompts = [np.arange(5 + number, 12 + number) for number in range(3)]
        sampling = Sampling(max_tokens=12, min_tokens=12)
        found = generate(engine, [Request((step, i), prompt, sampling) for i, prompt in enumerate(prompts)])
        rows = [
            Trajectory(np.concatenate([prompt, one.ids]), np.arange(len(prompt) + len(one.ids)) >= len(prompt))
            for prompt, one in zip(prompts, found, strict=True)
        ]
        for scores, one in zip(learner.score(rows), found, strict=True):
            assert np.abs(scores - one.logprobs).max() < most
        said.append(np.concatenate([one.logprobs for one in found]))
        if step == 0:
            learner.step(rows, NegativeLogLikelihood())
    assert not np.allclose(said[0], said[1], atol=1e-3)
    assert torch.equal(codes, policy.causal.model.layers[0].mlp.up_proj.base_layer.weight)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_learning_or_not_it_computes_alike(precision: Precision, save_model: Saver) -> None:
    """To the last bit."""
    policy = eight_bits(save_model("LlamaConfig"), precision)
    speaking, learning = (policy.module.train(mode)(input_ids=IDS[None]).logits for mode in (False, True))
    assert torch.equal(speaking, learning)


def test_the_plan_counts_the_bytes_that_are_held(save_model: Saver) -> None:
    folder = save_model("LlamaConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=6, vocab_size=160,
                        num_attention_heads=4)  # fmt: skip
    policy = eight_bits(folder)
    tensors = [*policy.causal.parameters()] + [
        layer.weight.SCB for layer in policy.causal.modules() if getattr(layer, "weight", None) is not None
        and hasattr(layer.weight, "SCB")
    ]  # fmt: skip
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    options = ModelOptions(path=str(folder), quantize="8bit", lora=LoraOptions(r=4))
    shape = Shape.of_config(policy.causal.config.to_dict())
    assert plan_training(shape, options, "fp32", 64).weights == pytest.approx(sum(held.values()), rel=0.02)


def test_what_cannot_be_done_with_it_is_refused(save_model: Saver) -> None:
    with pytest.raises(ValueError, match=r"8-bit weights cannot be trained themselves; add `lora: \{r: 16\}`"):
        ModelOptions(quantize="8bit")
    with pytest.raises(UserError, match="the built-in model cannot be held in 8 bits; remove"):
        tiny_policy(lora=True, quantize="8bit")
    with pytest.raises(EngineError, match="vLLM cannot take over a quantised model; write `engine: native`"):
        check_policy(eight_bits(save_model("LlamaConfig")))
    with pytest.raises(UserError, match="names 'q_proj', whose weights are quantised and cannot be trained; leave it"):
        eight_bits(save_model("LlamaConfig"), modules_to_save=["q_proj"])
