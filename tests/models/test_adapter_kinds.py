"""rsLoRA and DoRA against peft on a plain transformers model, against their formulas, and in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import EngineError, Request, Sampling, generate
from lemma.engines.vllm.weights import check_policy
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions, Precision
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood
from lemma.runs.joined_adapters import join_adapters
from tests.models.conftest import Saver
from tests.models.small import CPU

KINDS = [{"rslora": True}, {"dora": True}, {"dora": True, "rslora": True}]
IDS = torch.arange(3, 43)


def stirred(folder: Path, kind: dict[str, bool], precision: Precision = "fp32", start: Path | None = None) -> Policy:
    """A model whose adapters add something; with DoRA the lengths are not those of the weights."""
    lora = LoraOptions(r=4, alpha=6, **kind)
    policy = build_policy(ModelOptions(path=str(folder), lora=lora, precision=precision), CPU, 0, start)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return policy


def peft_twin(folder: Path, adapter: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_learner_computes_what_peft_computes(
    family: str, kind: dict[str, bool], save_model: Saver, tmp_path: Path
) -> None:
    """The same log-probabilities and the same gradient of every parameter; Qwen2's projections have biases."""
    folder = save_model(family)
    policy = stirred(folder, kind)
    policy.save(tmp_path)
    twin = peft_twin(folder, tmp_path / "adapter")
    config = twin.peft_config["default"]
    assert (config.use_rslora, config.use_dora) == (kind.get("rslora", False), kind.get("dora", False))
    batch = TokenBatch.build([Trajectory(IDS.numpy(), np.arange(len(IDS)) > 0)], [0], CPU)
    mine = policy.logprobs(batch)
    logits = twin(input_ids=IDS[None]).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    mine.sum().backward()
    theirs.sum().backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert expected.keys() == policy.parameters().keys()
    for name, parameter in policy.parameters().items():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_merged_weights_follow_the_formula(kind: dict[str, bool], save_model: Saver, tmp_path: Path) -> None:
    folder = save_model("LlamaConfig")
    stirred(folder, kind).save(tmp_path)
    base, merged = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = [name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")]
    assert len(layers) == 3 * 7
    for layer in layers:
        name = layer.removeprefix("base_model.model.") + ".weight"
        scale = 6 / (2 if kind.get("rslora") else 4)
        total = base[name].double() + scale * adapter[f"{layer}.lora_B.weight"].double() @ adapter[
            f"{layer}.lora_A.weight"
        ].double()  # fmt: skip
        if kind.get("dora"):
            lengths = adapter[f"{layer}.lora_magnitude_vector"].double()
            total = total * (lengths / total.norm(dim=1))[:, None]
        torch.testing.assert_close(merged[name].double(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [{}, *KINDS], ids=str)
def test_what_starts_from_an_adapter_has_the_merged_weights(
    kind: dict[str, bool], precision: Precision, save_model: Saver, tmp_path: Path
) -> None:
    stirred(save_model("LlamaConfig"), kind, precision).save(tmp_path)
    one, other = (
        build_policy(ModelOptions(path=str(tmp_path / place), precision=precision), CPU, 0).causal.state_dict()
        for place in ("adapter", "merged")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_engine_says_what_was_learnt(kind: dict[str, bool], family: str, save_model: Saver) -> None:
    """Before an update and after it, the engine's log-probabilities are the learner's. With DoRA, the engine multiplies
    by what it noted of the weights."""
    policy = stirred(save_model(family), kind)
    learner = Learner(policy, OptimOptions(lr=0.05), token_budget=256, total_steps=1)
    engine = NativeEngine(policy, cache_tokens=512, seed=1)
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
            assert np.abs(scores - one.logprobs).max() < 1e-4
        noted = [layer for layer in policy.module.modules() if getattr(layer, "lemma_rows", None) is not None]
        assert len(noted) == (3 * 7 if kind.get("dora") else 0)
        said.append(np.concatenate([one.logprobs for one in found]))
        if step == 0:
            before = {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}
            learner.step(rows, NegativeLogLikelihood())
    assert all(not torch.equal(before[name], parameter) for name, parameter in policy.parameters().items())
    assert not np.allclose(said[0], said[1], atol=1e-3)


def test_without_its_adapter_a_dora_policy_is_the_base(save_model: Saver) -> None:
    folder = save_model("LlamaConfig")
    policy = stirred(folder, {"dora": True})
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad(), policy.peft.disable_adapter():
        torch.testing.assert_close(policy.module(input_ids=IDS[None]).logits, base(input_ids=IDS[None]).logits)


def test_rs_lora_adapters_of_two_stages_are_joined_and_dora_ones_refused(save_model: Saver, tmp_path: Path) -> None:
    folder = save_model("LlamaConfig")
    stirred(folder, {"rslora": True}).save(tmp_path / "first")
    last = stirred(folder, {"rslora": True}, start=tmp_path / "first" / "merged")
    last.save(tmp_path / "second")
    last.save_adapter(tmp_path / "one")
    join_adapters([tmp_path / "first" / "adapter", tmp_path / "second" / "adapter"], tmp_path / "one", None)
    assert json.loads((tmp_path / "one" / "adapter_config.json").read_text())["use_rslora"] is False
    with torch.no_grad():
        joined = peft_twin(folder, tmp_path / "one").eval()(input_ids=IDS[None]).logits
        wanted = last.module.eval()(input_ids=IDS[None]).logits
    torch.testing.assert_close(joined, wanted, rtol=1e-4, atol=2e-4)
    stirred(folder, {"dora": True}).save_adapter(tmp_path / "dora")
    with pytest.raises(UserError, match="DoRA adapters of several stages cannot be added up into one"):
        join_adapters([tmp_path / "dora", tmp_path / "dora"], tmp_path / "dora", None)


def test_vllm_is_told_of_dora_before_it_starts(save_model: Saver) -> None:
    with pytest.raises(EngineError, match="vLLM cannot run DoRA adapters; write `engine: native`"):
        check_policy(stirred(save_model("LlamaConfig"), {"dora": True}))
