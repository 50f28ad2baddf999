"""The arithmetic of memory against real models, and what it must grow with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lemma.models import logprobs, memory
from lemma.models.load_model import build_policy
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import LoraOptions, ModelOptions, TinyOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy
from tests.models.small import CPU, SHAPE, tiny_policy, trajectories

LARGE = Shape(
    layers=28, hidden=1536, query_width=1536, kv_width=256, feed_forward=8960, vocabulary=151936, tied=True
)  # Qwen2.5-1.5B


@pytest.mark.parametrize("shape", [SHAPE, TinyOptions()])
def test_the_built_in_model_has_the_parameters_that_are_counted(shape: TinyOptions) -> None:
    real = sum(p.numel() for p in build_policy(ModelOptions(tiny=shape), CPU, 0).causal.parameters())
    norms_of_heads = shape.layers * 2 * shape.hidden // shape.heads
    assert Shape.of_tiny(shape).parameters == real - norms_of_heads


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 500,
}


def test_a_mixture_of_experts_is_not_counted_as_one_of_them() -> None:
    with pytest.raises(KeyError):
        Shape.of_config({**SIZES, "num_experts": 8})
    assert Shape.of_config({**SIZES, "num_experts": None}).parameters


def test_a_critic_and_a_reference_stand_beside_the_policy() -> None:
    plan = plan_training(LARGE, ModelOptions(), "bf16", 8192)
    with_both = plan.beside(critic=True, reference=True)
    computing = plan.activations + plan.head
    assert with_both.total == pytest.approx(2 * plan.total - computing + plan.weights)
    assert "critic" in str(with_both) and "critic" not in str(plan)


def test_families_that_tie_without_saying_so() -> None:
    assert Shape.of_config({**SIZES, "model_type": "gemma3_text"}).tied
    assert not Shape.of_config({**SIZES, "model_type": "gemma3_text", "tie_word_embeddings": False}).tied
    assert not Shape.of_config({**SIZES, "model_type": "llama"}).tied


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Qwen2Config", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("Qwen3Config", {"num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False}),
    ],
)
def test_a_configuration_has_the_parameters_that_are_counted(kind: str, values: dict[str, Any]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = getattr(transformers, kind)(vocab_size=4000, **sizes, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(p.numel() for p in model.parameters())
    assert Shape.of_config(config.to_dict()).parameters == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("lora", [LoraOptions(r=3), LoraOptions(r=3, dora=True)])
def test_adapters_have_the_parameters_that_are_counted(lora: LoraOptions) -> None:
    real = sum(p.numel() for p in tiny_policy(lora=lora).parameters().values())
    assert memory.lora_parameters(Shape.of_tiny(SHAPE), lora) == real


def test_the_bytes_of_a_full_step() -> None:
    """18 bytes a parameter: weight, master, gradient and two moments (DESIGN, 7)."""
    plan = plan_training(LARGE, ModelOptions(), "bf16", 16384)
    assert (plan.weights + plan.optimiser) / LARGE.parameters == pytest.approx(18)
    assert plan_training(LARGE, ModelOptions(), "fp32", 16384).optimiser / LARGE.parameters == pytest.approx(12)
    assert plan.total > plan.weights + plan.optimiser + plan.activations + plan.head


def test_what_makes_it_grow_and_shrink() -> None:
    def total(budget: int = 16384, **options: Any) -> float:
        return plan_training(LARGE, ModelOptions(**options), "bf16", budget).total

    assert total(4096) < total(8192) < total(16384)
    assert total(checkpointing=True) < total()
    assert total(lora=LoraOptions(), quantize="4bit") < total(lora=LoraOptions()) < total()
    assert total(lora=LoraOptions(r=8)) < total(lora=LoraOptions(r=64))
    small = plan_training(LARGE, ModelOptions(), "bf16", 16384, moments=2.03)
    assert small.optimiser < plan_training(LARGE, ModelOptions(), "bf16", 16384).optimiser


def test_the_cache_of_one_token() -> None:
    assert plan_training(LARGE, ModelOptions(), "bf16", 1024).cache_per_token == 2 * 28 * 256 * 2


def test_the_numbers_that_stand_in_two_places_are_the_same() -> None:
    assert memory.CHUNK_BYTES == logprobs.CHUNK_BYTES
    for words in ([], ["<a>", "<b>", "<c>"], ["<a>", "<b>", "<c>", "<d>"]):
        shape = SHAPE.model_copy(update={"words": words})
        made = build_policy(ModelOptions(tiny=shape), CPU, 0)
        assert made.head.weight.shape[0] == Shape.of_tiny(shape).vocabulary


# Peak GiB of rank 0 on an H200, by benchmarks/fake_world.py: packs of 4,096 tokens, all blocks recomputed, bf16.
QWEN_7B = Shape(
    layers=28, hidden=3584, query_width=3584, kv_width=512, feed_forward=18944, vocabulary=152064, tied=False
)
QWEN_14B = Shape(
    layers=48, hidden=5120, query_width=5120, kv_width=1024, feed_forward=13824, vocabulary=152064, tied=False
)
MEASURED = [
    (LARGE, 1, "none", 27.45),
    (LARGE, 8, "optimiser", 13.88),
    (LARGE, 64, "optimiser", 10.44),
    (QWEN_7B, 8, "gradients", 49.08),
    (QWEN_7B, 64, "gradients", 31.30),
    (QWEN_14B, 8, "gradients", 92.25),
    (QWEN_14B, 64, "gradients", 60.04),
]


@pytest.mark.parametrize(("shape", "ranks", "shard", "gib"), MEASURED)
def test_what_was_measured_on_a_gpu_is_within_a_tenth_of_the_plan(
    shape: Shape, ranks: int, shard: str, gib: float
) -> None:
    options = ModelOptions(path="benchmark", checkpointing=True)
    plan = plan_training(shape, options, "bf16", 4096, ranks=ranks, shard=shard)
    assert abs(gib * 2**30 / plan.total - 1) < 0.1


@pytest.mark.parametrize("lora", [None, LoraOptions(r=4), LoraOptions(r=4, dora=True)], ids=["full", "lora", "dora"])
def test_a_cpu_keeps_for_the_backward_what_the_plan_says(save_model: Any, lora: LoraOptions | None) -> None:
    """By the tensors that autograd saves in two blocks; one that is a view of another counts once."""
    options = ModelOptions(path=str(save_model("LlamaConfig")), lora=lora)
    lengths = [40] * 9  # what does not grow with the tokens weighs little
    kept: dict[int, int] = {}
    planned: dict[int, float] = {}
    for layers in (1, 3):
        policy = build_policy(options.model_copy(update={"override": {"num_hidden_layers": layers}}), CPU, 0)
        shape = Shape.of_config(policy.causal.config.to_dict())
        planned[layers] = plan_training(shape, options, "fp32", sum(lengths), on_cpu=True).activations
        kept[layers] = _saved_bytes(policy, TokenBatch.build(trajectories(lengths), range(9), CPU))
    assert kept[3] - kept[1] == pytest.approx(planned[3] - planned[1], rel=0.05)


def _saved_bytes(policy: Policy, batch: TokenBatch) -> int:
    weights = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    seen: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logprobs = policy.logprobs(batch)
    logprobs.sum().backward()
    return sum(seen.values())


def test_what_norms_of_heads_keep_is_in_the_plan() -> None:
    """Qwen3-0.6B on an H200, packs of 32,768 tokens, nothing recomputed: 55.4 GiB, of which 9.3 are logits that are
    kept only where there is room."""
    shape = Shape.of_config(
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        | {"tie_word_embeddings": True}
    )
    plan = plan_training(shape, ModelOptions(path="benchmark"), "bf16", 32768)
    assert abs((55.4 - 9.3) * 2**30 / plan.total - 1) < 0.05
