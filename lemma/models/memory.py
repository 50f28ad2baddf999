"""Memory is planned, not guessed: the bytes of weights, optimiser state, activations and cache of a recipe.

The arithmetic follows what the learner keeps: fp32 masters and gradients under low-precision weights, the tensors that
autograd saves in one decoder block with Lemma's own norm, gate and attention, and the head's chunk of logits.
`benchmarks/sft_step.py` prints it beside the measured peak.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lemma.models.options import ModelOptions, Precision

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GIB = 2**30
# What the CUDA context, libraries and a fragmented allocator take beside the tensors.
ALLOCATOR_SHARE = 0.03


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder that memory depends on."""

    parameters: int
    head_parameters: int
    linear_parameters: int
    layers: int
    hidden: int
    query_width: int
    kv_width: int
    feed_forward: int
    vocabulary: int
    tied: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, by what they are for. `cache_per_token` is what an engine needs for each token it holds."""

    weights: float
    optimiser: float
    activations: float
    head: float
    cache_per_token: float
    reserve: float

    @property
    def total(self) -> float:
        return self.weights + self.optimiser + self.activations + self.head + self.reserve

    def table(self) -> list[tuple[str, str]]:
        rows = [(name, value) for name, value in asdict(self).items() if name != "cache_per_token"]
        text = [(name, f"{value / GIB:.2f} GiB") for name, value in [*rows, ("total", self.total)]]
        return [*text, ("cache per token", f"{self.cache_per_token / 1024:.1f} KiB")]


def shape_of(config: Any) -> Shape:
    """The shape of a Hugging Face configuration; parameters are counted on a model without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = model.get_output_embeddings().weight.numel()
    tied = bool(text.tie_word_embeddings)
    total = sum(p.numel() for p in model.parameters())
    return Shape(
        parameters=total,
        head_parameters=head,
        linear_parameters=total - (head if tied else 2 * head),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query_width=text.num_attention_heads * head_dim,
        kv_width=text.num_key_value_heads * head_dim,
        feed_forward=text.intermediate_size,
        vocabulary=text.vocab_size,
        tied=tied,
    )


def plan_training(
    shape: Shape, model: ModelOptions, precision: Precision, token_budget: int, trained: int
) -> MemoryPlan:
    """Memory of an optimisation step on packs of `token_budget` tokens, `trained` of which are targets."""
    width = BYTES[precision]
    trainable = _lora_parameters(shape, model) if model.lora else shape.parameters
    frozen = shape.parameters if model.lora else 0
    frozen_bytes = frozen * (0.53 if model.quantize else width)
    low = precision != "fp32"
    state = trainable * (4 + 4 + _moments(model) if low else 4 + _moments(model))
    reserve = ALLOCATOR_SHARE * (frozen_bytes + trainable * width + state)
    return MemoryPlan(
        weights=frozen_bytes + trainable * width,
        optimiser=state,
        activations=_activations(shape, model, width, token_budget),
        head=_head(shape, model, width, trained),
        cache_per_token=2.0 * shape.layers * shape.kv_width * width,
        reserve=reserve,
    )


def _moments(model: ModelOptions) -> int:
    return 8


def _lora_parameters(shape: Shape, model: ModelOptions) -> int:
    """Adapters on every linear layer: each adds r times the sum of its two sides."""
    assert model.lora is not None
    sides = (
        2 * (shape.hidden + shape.query_width)
        + 2 * (shape.hidden + shape.kv_width)
        + 3 * (shape.hidden + shape.feed_forward)
    )
    return model.lora.r * sides * shape.layers


def _activations(shape: Shape, model: ModelOptions, width: int, tokens: int) -> float:
    """Tensors saved for the backward pass, and the widest ones alive beside them."""
    block = 4 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 3 * shape.feed_forward
    if model.lora:
        block += 7 * model.lora.r
    working = 3 * shape.feed_forward + 2 * shape.hidden
    if model.checkpointing:
        kept = shape.layers * shape.hidden + block
    else:
        kept = shape.layers * block
    return float(tokens * width * (kept + working + 4 * shape.hidden))


def _head(shape: Shape, model: ModelOptions, width: int, trained: int) -> float:
    """One chunk of logits, and where the head is trained its gradient, in float32 and in compute precision."""
    from lemma.models.logprobs import CHUNK_BYTES

    rows = min(trained, max(1, CHUNK_BYTES // (4 * shape.vocabulary)))
    logits = rows * shape.vocabulary * (width + (4 if width == 4 else 0))
    gradient = 0 if model.lora else shape.head_parameters * (4 + 2 * width)
    return float(logits + gradient)
