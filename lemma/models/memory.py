"""Memory is planned, not guessed: the bytes of weights, optimiser state, activations and cache of a recipe.

The arithmetic follows what the learner keeps: fp32 masters and gradients under low-precision weights, the tensors that
autograd saves in one decoder block with Lemma's own norm, gate and attention, and the head's chunk of logits. It needs
numbers only, no torch. `benchmarks/sft_step.py` prints it next to the measured peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lemma.models.model_options import LoraOptions, ModelOptions, Precision, TinyOptions

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GIB = 2**30
# Float32 logits held at a time by `lemma.models.logprobs`, on a GPU and on a CPU.
CHUNK_BYTES, HOST_CHUNK_BYTES = 2**29, 2**27
# What libraries and a fragmented allocator take in addition to the tensors.
ALLOCATOR_SHARE = 0.03
# Python, torch and transformers in the memory of the host, which a plan for a CPU counts.
HOST_LIBRARIES = 2.0**29
# Of activations: what the C library keeps in gaps between blocks that are freed. Measured with glibc.
HOST_GAPS = 0.7
# What the engine needs for the prompts of one pass, in addition to its cache.
PREFILL_BYTES = 3.0 * 2**28
# Words of the built-in tokenizer; its model rounds them up to a multiple of 32.
TINY_WORDS = 157
# What ranks can split among them, from nothing to everything: the words of `cluster.shard`.
SHARDS = ("none", "optimiser", "gradients", "weights")


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose embedding and head are one where config.json does not say.
TIED_FAMILIES = ("gemma", "cohere")
HEAD_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder that memory depends on."""

    layers: int
    hidden: int
    query_width: int
    kv_width: int
    feed_forward: int
    vocabulary: int
    tied: bool
    # Queries and keys are normalised: what the norms read is kept beside what they give.
    head_norms: bool = False

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights but biases and norms of heads, which are less than a thousandth."""
        attention = 2 * self.hidden * self.query_width + 2 * self.hidden * self.kv_width
        block = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return self.layers * block + self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def adapted_width(self) -> int:
        """Outputs of all linear layers of a block."""
        return 2 * self.hidden + self.query_width + 2 * self.kv_width + 2 * self.feed_forward

    def block_width(self, kept_inside: int = 2) -> int:
        """Numbers that a GPU keeps of a token in one block for the backward pass."""
        return 4 * self.hidden + 2 * self.query_width + 2 * self.kv_width + kept_inside * self.feed_forward

    def spread_cost(self, by_kernel: bool) -> float:
        """What a token takes that is written out for attention only, as a share of a row of a pack: keys and values;
        without a kernel also queries and results, and all of them for every query head."""
        written = 2 * self.kv_width if by_kernel else 6 * self.query_width
        return min(1.0, written / self.block_width())

    @classmethod
    def of_config(cls, values: Mapping[str, Any]) -> Shape:
        """From the values of a config.json; raises KeyError where it is no decoder of the usual kind."""
        values = values.get("text_config", values)
        if any((values.get(name) or 1) > 1 for name in EXPERTS):
            raise KeyError("a mixture of experts")
        ties = str(values.get("model_type", "")).startswith(TIED_FAMILIES)
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        return cls(
            layers=values["num_hidden_layers"],
            hidden=values["hidden_size"],
            query_width=heads * head_dim,
            kv_width=(values.get("num_key_value_heads") or heads) * head_dim,
            feed_forward=values["intermediate_size"],
            vocabulary=values["vocab_size"],
            tied=bool(values.get("tie_word_embeddings", ties)),
            head_norms=str(values.get("model_type", "")).startswith(HEAD_NORMS),
        )

    @classmethod
    def of_tiny(cls, tiny: TinyOptions) -> Shape:
        width = tiny.hidden // tiny.heads
        words = -(-(TINY_WORDS + len(tiny.words)) // 32) * 32
        return cls(tiny.layers, tiny.hidden, tiny.hidden, tiny.kv_heads * width, tiny.feed_forward, words, True)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, by what they are for. `gathered`: what is whole for a while, blocks of weights that are split
    or gradients before they go to their owners. `sums`: gradients of slots that wait for those of the next ones.
    `cache_per_token` is what an engine needs for each token it holds."""

    weights: float
    optimiser: float
    activations: float
    head: float
    reserve: float
    cache_per_token: float
    critic: float = 0.0
    reference: float = 0.0
    gathered: float = 0.0
    sums: float = 0.0
    libraries: float = 0.0

    @property
    def total(self) -> float:
        computing = self.activations + self.head + self.gathered + self.sums
        beside = self.critic + self.reference + self.libraries
        return self.weights + self.optimiser + self.reserve + computing + beside

    def beside(self, *, critic: bool, reference: bool) -> MemoryPlan:
        """The same with a critic, which is trained as the policy is, and a second, frozen copy as the reference.

        The critic is updated after the policy: what one has computed with is free when the other begins."""
        state = (1 + ALLOCATOR_SHARE) * (self.weights + self.optimiser)
        return replace(self, critic=state if critic else 0.0, reference=self.weights if reference else 0.0)

    def __str__(self) -> str:
        parts = {name: value for name, value in asdict(self).items() if name != "cache_per_token" and value}
        return f"{_size(self.total)}: " + ", ".join(f"{name} {_size(value)}" for name, value in parts.items())


def _size(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:.0f} MiB"


def plan_training(
    shape: Shape,
    model: ModelOptions,
    precision: Precision,
    token_budget: int,
    trained: int | None = None,
    *,
    moments: float = 8.0,
    ranks: int = 1,
    slots: int = 1,
    shard: str = "none",
    recomputed: int | None = None,
    on_cpu: bool = False,
) -> MemoryPlan:
    """Peak memory of an optimisation step on packs of `token_budget` tokens, `trained` of which are targets, on one of
    so many ranks, which split the state as `shard` says and have at most `slots` slots each. `recomputed` counts blocks
    whose activations are not kept; without it, `model.checkpointing` decides. On a CPU it is the memory of the whole
    process, and plain torch keeps more for the backward pass than fused kernels do."""
    if recomputed is None:
        recomputed = shape.layers if model.checkpointing else 0
    width = BYTES[precision]
    trainable = lora_parameters(shape, model.lora) if model.lora else shape.parameters
    frozen = shape.parameters if model.lora else 0
    outside = shape.head_parameters * (1 if shape.tied else 2)  # embeddings and head are never quantised
    held = {None: width, "4bit": 0.53, "8bit": 1 + 4 / shape.hidden}[model.quantize]
    base = (frozen - outside) * held + outside * width if model.lora else 0.0
    weights, optimiser = _state(base, trainable, width, moments, ranks, shard)
    activations = _activations(shape, model, width, token_budget, recomputed, on_cpu)
    # Where gradients are added up in the product, on a GPU, the head's needs no memory of its own.
    sums_up = ranks > 1 and shard == "optimiser" and width == 2
    head = _head(shape, model, width, token_budget if trained is None else trained, not sums_up, on_cpu)
    gathered = 0.0
    if ranks > 1 and shard == "weights":
        gathered = width * (outside + 2 * (shape.parameters - outside) / shape.layers)
    elif ranks > 1:
        gathered = _sent(trainable, width, ranks, shard, activations + head)
    return MemoryPlan(
        weights=weights,
        optimiser=optimiser,
        activations=activations,
        head=head,
        reserve=ALLOCATOR_SHARE * (weights + optimiser) + (HOST_GAPS * activations if on_cpu else 0.0),
        libraries=HOST_LIBRARIES if on_cpu else 0.0,
        cache_per_token=2.0 * shape.layers * shape.kv_width * width,
        gathered=gathered,
        sums=0.0 if ranks > 1 and shard == "weights" else _sums(trainable, width, slots, shard, activations + head),
    )


def plan_server(shape: Shape, model: ModelOptions, precision: Precision) -> MemoryPlan:
    """Memory of a generation server, without the cache: all weights, and what a pass over prompts needs."""
    whole = plan_training(shape, model, precision, 0, 0)
    return replace(whole, optimiser=0.0, activations=PREFILL_BYTES, head=0.0, reserve=ALLOCATOR_SHARE * whole.weights)


def _sent(trainable: int, width: int, ranks: int, shard: str, computing: float) -> float:
    """Gradients on their way between ranks, beyond what computing takes: sums at home and what comes in. Where they are
    split, those of one pack come as activations go: of the two, the larger counts. With nothing split, sums over all
    ranks stand next to a rank's own once everything is computed. By measurement; see docs/many-gpus.md."""
    at_home = 8.0 * trainable / ranks
    if shard == "none":
        return max(0.0, 4.0 * trainable - computing)
    return at_home + (max(0.0, width * trainable - computing) if shard == "gradients" else 0.0)


def _sums(trainable: int, width: int, slots: int, shard: str, computing: float) -> float:
    """Gradients in float32 that wait on the stack of the tree over the slots while the next slot is computed; and where
    buffers add up low-precision gradients, the copy at the end of a slot, when activations are gone."""
    kept = 4.0 * trainable * (slots - 1).bit_length()
    is_copied = slots > 1 and width == 2 and shard in ("none", "optimiser")
    return kept + (max(0.0, 4.0 * trainable - computing) if is_copied else 0.0)


def _state(base: float, trainable: float, width: int, moments: float, ranks: int, shard: str) -> tuple[float, float]:
    """Bytes of weights, and of gradients, masters and moments. With P parameters in bf16 on N ranks: 18P where nothing
    is split, 6P + 12P/N, 2P + 16P/N, and 16P/N where fp32 weights are split themselves and need no masters."""
    gradient, master = 4.0, 0.0 if width == 4 else 4.0
    if shard == "weights" and ranks > 1:
        return (base + trainable * 4) / ranks, trainable * (gradient + moments) / ranks
    whole = gradient if shard in ("none", "optimiser") else 0.0
    split = master + moments + gradient - whole
    return base + trainable * width, trainable * (whole + split / (1 if shard == "none" else ranks))


def lora_parameters(shape: Shape, lora: LoraOptions) -> int:
    """Adapters on every linear layer: each adds the rank times the sum of its two sides, and with DoRA a length for
    each output; and what is trained whole beside them, but norms."""
    attention = 2 * (shape.hidden + shape.query_width) + 2 * (shape.hidden + shape.kv_width)
    factors = lora.r * (attention + 3 * (shape.hidden + shape.feed_forward))
    adapters = shape.layers * (factors + (shape.adapted_width if lora.dora else 0))
    return adapters + _whole(shape, lora.modules_to_save)


def _whole(shape: Shape, names: list[str]) -> int:
    """The weights of embedding, head and the linear layers of blocks among these names."""
    sides = {
        "k_proj": shape.kv_width,
        "v_proj": shape.kv_width,
        "q_proj": shape.query_width,
        "o_proj": shape.query_width,
    }
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.feed_forward)
    paths = [name.split(".") for name in {*names}]
    ends = len({path[-1] for path in paths} & {"embed_tokens", "lm_head"})
    inner = sum(
        shape.hidden * sides.get(path[-1], 0) * (1 if any(map(str.isdigit, path)) else shape.layers) for path in paths
    )
    return inner + shape.head_parameters * (min(ends, 1) if shape.tied else ends)


def _activations(
    shape: Shape, model: ModelOptions, width: int, tokens: int, recomputed: int, on_cpu: bool = False
) -> float:
    """Tensors saved for the backward pass, and the widest ones that are alive with them.

    In half precision and without adapters, what the last product of a feed-forward layer reads is made again.
    """
    kept_inside = 2 if width == 2 and model.lora is None else 3
    block = shape.block_width(kept_inside)
    if on_cpu:
        # Normalised states where norms are trained, keys and values for every query, what attention gives before and
        # after it is put in order, and both factors of the gate.
        block = (4 if model.lora else 6) * shape.hidden + 6 * shape.query_width + 4 * shape.feed_forward
    if shape.head_norms:
        block += shape.query_width + shape.kv_width
    if model.lora:
        # With DoRA what each layer gives without the adapter, and what the adapter gives, are kept for the lengths.
        block += 7 * model.lora.r + (2 * shape.adapted_width if model.lora.dora else 0)
    working = 3 * shape.feed_forward + 6 * shape.hidden
    kept = recomputed * shape.hidden + (shape.layers - recomputed + (recomputed > 0)) * block
    return float(tokens * width * (kept + working))


def _head(
    shape: Shape, model: ModelOptions, width: int, trained: int, has_gradient: bool, on_cpu: bool = False
) -> float:
    """One chunk of logits, and where the head is trained its gradient, in float32 and in compute precision."""
    rows = min(trained, max(1, (HOST_CHUNK_BYTES if on_cpu else CHUNK_BYTES) // (4 * shape.vocabulary)))
    logits = rows * shape.vocabulary * (width + (4 if width == 4 else 8 if on_cpu else 0))
    ends = ("lm_head", "embed_tokens") if shape.tied else ("lm_head",)
    is_trained = model.lora is None or any(name.endswith(ends) for name in model.lora.modules_to_save)
    gradient = shape.head_parameters * (4 + 2 * width) if has_gradient and is_trained else 0
    return float(logits + gradient)
