"""Layers trained whole beside adapters, against peft on a plain transformers model, in the engine and on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import EngineError, Request, Sampling, generate
from lemma.engines.vllm.weights import check_policy
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models import memory
from lemma.models.load_model import build_policy, load_policy
from lemma.models.memory import Shape
from lemma.models.model_options import LoraOptions, ModelOptions, Precision
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from lemma.models.update_flops import flops_per_row
from lemma.objectives import NegativeLogLikelihood
from tests.models.conftest import Saver
from tests.models.small import CPU, SHAPE, tiny_policy
from tests.models.test_adapter_kinds import IDS, peft_twin, stirred

# Names, and whether the model has embedding and head as one matrix.
CASES = [
    (["embed_tokens"], False),
    (["lm_head"], False),
    (["embed_tokens", "lm_head", "norm"], False),
    (["q_proj", "down_proj", "post_attention_layernorm", "model.layers.1.self_attn.o_proj"], False),
    (["embed_tokens"], True),
    (["lm_head"], True),
]
BATCH = [Trajectory(IDS.numpy(), np.arange(len(IDS)) > 0)]


def whole(save_model: Saver, names: list[str], tied: bool, precision: Precision = "fp32") -> tuple[Path, Policy]:
    folder = save_model("Qwen2Config", tie_word_embeddings=tied)
    return folder, stirred(folder, {"modules_to_save": names}, precision)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS[None]).logits


@pytest.mark.parametrize(("names", "tied"), CASES, ids=str)
def test_the_learner_computes_what_peft_computes(
    names: list[str], tied: bool, save_model: Saver, tmp_path: Path
) -> None:
    """The same log-probabilities and the same gradient of every parameter, from the folder that peft reads."""
    folder, policy = whole(save_model, names, tied)
    policy.save(tmp_path)
    twin = peft_twin(folder, tmp_path / "adapter")
    mine = policy.logprobs(TokenBatch.build(BATCH, [0], CPU))
    logits = twin(input_ids=IDS[None]).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    mine.sum().backward()
    theirs.sum().backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.requires_grad}
    assert expected.keys() == policy.parameters().keys()
    trained = [name for name in expected if "modules_to_save" in name]
    assert all(any(f".{one}." in name for name in trained) for one in names if not tied) and trained
    for name, parameter in policy.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("names", "tied"), CASES, ids=str)
def test_merged_and_loaded_it_is_the_same_model(
    names: list[str], tied: bool, precision: Precision, save_model: Saver, tmp_path: Path
) -> None:
    """The merged folder, in plain transformers, gives the logits of what was trained; a policy from the adapter's
    folder has the merged weights to the last bit; a tied model stays tied."""
    folder, policy = whole(save_model, names, tied, precision)
    policy.save(tmp_path)
    if precision == "fp32":
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(logits_of(plain), logits_of(policy.module), rtol=1e-4, atol=2e-4)
    one, other = (load_policy(str(tmp_path / place), "cpu", precision).causal for place in ("adapter", "merged"))
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize(("names", "tied"), CASES, ids=str)
def test_an_engine_says_what_was_learnt(names: list[str], tied: bool, save_model: Saver) -> None:
    _, policy = whole(save_model, names, tied)
    learner = Learner(policy, OptimOptions(lr=0.05), token_budget=256, total_steps=1)
    engine = NativeEngine(policy, cache_tokens=512, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}
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
        said.append(np.concatenate([one.logprobs for one in found]))
        if step == 0:
            learner.step(rows, NegativeLogLikelihood())
    assert all(not torch.equal(before[name], parameter) for name, parameter in policy.parameters().items())
    assert not np.allclose(said[0], said[1], atol=1e-3)


def test_without_its_adapter_the_policy_is_the_base(save_model: Saver) -> None:
    folder, policy = whole(save_model, ["embed_tokens", "lm_head"], False)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = TokenBatch.build(BATCH, [0], CPU)
    trained = policy.parameters().keys()
    with torch.no_grad(), policy.peft.disable_adapter():
        scored = policy.logprobs(batch)
    wanted = logits_of(base)[0, :-1].log_softmax(-1).gather(1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(scored, wanted, rtol=1e-4, atol=1e-4)
    assert policy.parameters().keys() == trained, "afterwards it learns again"


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_counts_what_is_trained(names: list[str], tied: bool, save_model: Saver) -> None:
    folder = save_model("LlamaConfig", tie_word_embeddings=tied)
    lora = LoraOptions(r=3, modules_to_save=names)
    policy = build_policy(ModelOptions(path=str(folder), lora=lora), CPU, 0)
    shape = Shape.of_config(policy.causal.config.to_dict())
    real = sum(parameter.numel() for parameter in policy.parameters().values())
    assert memory.lora_parameters(shape, lora) == real


def test_the_plan_counts_layers_of_blocks() -> None:
    shape, plain = Shape.of_tiny(SHAPE), LoraOptions(r=3)

    def more(names: list[str]) -> int:
        return memory.lora_parameters(shape, plain.model_copy(update={"modules_to_save": names})) - (
            memory.lora_parameters(shape, plain)
        )

    assert more(["k_proj", "down_proj"]) == 2 * (32 * 16 + 32 * 48)
    assert more(["model.layers.1.self_attn.q_proj", "norm"]) == 32 * 32


def test_an_update_counts_a_layer_once() -> None:
    """A frozen layer takes 4 FLOP a weight and row, one that is trained 6; what lies unused beside it takes none."""
    frozen, trained, head = (
        tiny_policy(lora=LoraOptions(r=3, targets=["v_proj"], modules_to_save=names))
        for names in ([], ["q_proj"], ["lm_head"])
    )
    assert flops_per_row(trained)[0] - flops_per_row(frozen)[0] == 2 * 2 * 32 * 32
    assert flops_per_row(head)[1] == 6 * head.head.weight.numel()


@pytest.mark.parametrize("name", ["emb_tokens", "layers", "mlp"])
def test_what_cannot_be_trained_whole_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"model.lora.modules_to_save names '{name}', which is not a layer of this"):
        tiny_policy(lora=LoraOptions(modules_to_save=[name]))


def test_vllm_is_told_before_it_starts(save_model: Saver) -> None:
    with pytest.raises(EngineError, match="vLLM cannot run adapters with layers that are trained whole"):
        check_policy(whole(save_model, ["lm_head"], False)[1])
