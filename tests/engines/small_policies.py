"""Random models of every architecture the engines serve, made on the spot, with a byte-level tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lemma.core.types import Trajectory
from lemma.engines.protocol import Completion, Request
from lemma.models import installing
from lemma.models.attention import NAME
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text")
# What engine and learner may differ by in float32, as in a run. On these models rounding makes up to 2e-5, eight units
# in the last place of the largest logit, over seeds and kinds of CPU; old weights or an old cache make more than 1e-2.
FLOAT32 = 1e-4
CORPUS = ["<think> so 6 times 7 is 42 </think><answer>42</answer> and 数学 é"] * 4


@cache
def small_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def small_policy(
    kind: str = "qwen2",
    *,
    tied: bool = False,
    lora: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    context: int = 256,
    sharp: float = 4.0,
    **more: Any,
) -> Policy:
    """`sharp` scales the head, so that likely and unlikely tokens differ as in a trained model."""
    tokenizer = small_tokenizer()
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **({"sliding_window": 16} if kind in ("mistral", "gemma2", "gemma3_text") else {}),
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4.0)
            if not tied:
                model.get_output_embeddings().weight.mul_(sharp)
        installing.install(model)
        module = model
        if lora:
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
            module = get_peft_model(model, wanted, autocast_adapter_dtype=False)
            shake(Policy(module, tokenizer), seed)
    return Policy(module, tokenizer)


def exact_policy(kind: str = "qwen2", **options: Any) -> Policy:
    """In float64, where the same tokens come out whatever the order of a sum is.

    In float32 a draw, or a likeliest token, that lies between two roundings depends on the batch and on the CPU.
    """
    return small_policy(kind, dtype=torch.float64, **options)


@torch.no_grad()
def shake(policy: Policy, seed: int, size: float = 0.05) -> None:
    """Move every trained weight, as an optimiser step would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters().values():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))


@torch.no_grad()
def learner_logprobs(policy: Policy, prompt: np.ndarray, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """What the learner says about a completion."""
    whole = np.concatenate([prompt, ids])
    batch = TokenBatch.build([Trajectory(whole, np.arange(len(whole)) >= len(prompt))], [0], policy.device)
    policy.module.eval()
    found = policy.logprobs(batch, temperature=temperature)
    return found.float().cpu().numpy()


def worst_difference(
    policy: Policy, requests: list[Request], completions: list[Completion], temperature: float = 1.0
) -> float:
    """Between what the engine and what the learner says, over all tokens."""
    prompts = {request.key: request.prompt for request in requests}
    return max(
        float(np.abs(learner_logprobs(policy, prompts[c.key], c.ids, temperature) - c.logprobs).max())
        for c in completions
    )


def random_prompts(count: int, seed: int = 0, longest: int = 30) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, len(small_tokenizer()), generator.integers(1, longest + 1)) for _ in range(count)]
