"""The learner's joint products, sunk gradients and shared prompts on a GPU, beside a product for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lemma.core.types import Trajectory
from lemma.learning import tensor_files
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import are_finite
from lemma.models import installing
from lemma.models.attention import NAME
from lemma.models.joint_products import sink_of
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def answers() -> list[Trajectory]:
    """Three prompts with eight answers each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 1000, length) for length in (40, 80, 9)]
    made = []
    for number in range(24):
        prompt = prompts[number % 3]
        ids = np.concatenate([prompt, rng.integers(3, 1000, int(rng.integers(20, 300)))])
        made.append(Trajectory(ids_T=ids, loss_mask_T=np.arange(len(ids)) >= len(prompt), group_id=number % 3))
    return made


@dataclass
class Found:
    grads: dict[str, torch.Tensor]
    scores: np.ndarray

    def distance(self, other: Found) -> float:
        return max(
            ((grad - other.grads[name]).norm() / other.grads[name].norm()).item() for name, grad in self.grads.items()
        )


def step(kind: str, dtype: torch.dtype, *, jointly: bool, share: bool, recomputed: int = 0) -> Found:
    torch.manual_seed(0)
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(CONFIGS[kind](**SHAPE), attn_implementation=NAME)
    installing.install(causal.to(dtype), True, jointly)
    policy = Policy(causal, SimpleNamespace(eos_token_id=1, pad_token_id=2))
    policy.recompute(recomputed)
    learner = Learner(policy, OptimOptions(lr=1e-20, clip=0.0), token_budget=2048, total_steps=2, share_prompts=share)
    sinks = [sink_of(parameter) for parameter in policy.parameters().values()]
    assert all((sink is not None) == (dtype == torch.bfloat16) for sink in sinks)
    scores = np.concatenate(learner.score(answers()))
    grads: dict[str, torch.Tensor] = {}
    update = learner.optimiser.step

    def recorded(rate: float) -> tuple[float, bool]:
        for name, master in learner.optimiser.masters.items():
            assert master.grad is not None, name
            grads[name] = master.grad.double().cpu()
        return update(rate)

    learner.optimiser.step = recorded  # type: ignore[method-assign]
    learner.step(answers(), NegativeLogLikelihood("token"))
    return Found(grads, scores)


@pytest.mark.parametrize("kind", CONFIGS)
def test_joint_products_and_shared_prompts_change_nothing(kind: str) -> None:
    plain = step(kind, torch.float32, jointly=False, share=False)
    for jointly, share, recomputed in ((True, False, 0), (True, True, 0), (True, True, 3), (False, True, 0)):
        found = step(kind, torch.float32, jointly=jointly, share=share, recomputed=recomputed)
        assert found.distance(plain) < 1e-5
        assert np.abs(found.scores - plain.scores).max() < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_half_precision_is_as_near_to_float32_as_before(kind: str) -> None:
    exact = step(kind, torch.float32, jointly=False, share=False)
    before = step(kind, torch.bfloat16, jointly=False, share=False).distance(exact)
    for recomputed in (0, 4):
        found = step(kind, torch.bfloat16, jointly=True, share=True, recomputed=recomputed)
        assert found.distance(exact) < 1.2 * before < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_number_that_is_not_finite_is_found_among_many(dtype: torch.dtype) -> None:
    """In tensors of several chunks of torch's kernel, at their borders, and in parts that are not aligned."""
    whole = torch.randn(200_003, device="cuda").to(dtype)
    parts = [whole, whole[1:], whole[5:70_000], whole[:0], whole[:1], torch.zeros(3, device="cuda")]
    assert are_finite(parts)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 65_535, 65_536, 200_002):
            number = whole[place].clone()
            whole[place] = bad
            assert not are_finite(parts)
            whole[place] = number
    assert are_finite(parts)


def test_a_snapshot_for_a_checkpoint_is_what_the_gpu_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied by several threads through small pinned buffers, while the next update is already asked for."""
    monkeypatch.setattr(tensor_files, "BLOCK", 1 << 16)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {f"weight/{n}": torch.randn(n, 4097, device="cuda", generator=generator) for n in range(1, 40)}
    tensors |= {"half": tensors["weight/9"].bfloat16().T, "step": torch.tensor(3.0), "none": torch.empty(0).cuda()}
    for tensor in tensors.values():
        tensor.mul_(2)
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}  # one is on the CPU
    for tensor in tensors.values():
        tensor.mul_(0.5).mul_(2)
    found = tensor_files.to_host(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert found.keys() == expected.keys()
    assert all(found[name].device.type == "cpu" and torch.equal(found[name], expected[name]) for name in expected)
