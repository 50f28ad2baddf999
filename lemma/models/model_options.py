"""What a recipe can say about a model. Imports no torch: validating a recipe stays fast."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lemma.config import Options

Precision = Literal["bf16", "fp16", "fp32"]
Quantize = Literal["4bit", "8bit"]


class LoraOptions(Options):
    """Low-rank adapters (peft) on the linear layers; the base weights stay frozen."""

    r: int = Field(16, ge=1)
    """Rank of the two small matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / r."""
    rslora: bool = False
    """Multiply the update by alpha / sqrt(r) instead, so that a larger rank does not shrink it (rsLoRA)."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA). Slower, and takes more memory."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Reinforcement learning requires 0."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter, or all-linear: every linear layer except the head."""
    modules_to_save: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Names of layers that are trained whole beside the adapters and saved with them, as in peft: `embed_tokens`,
    `lm_head`, norms or linear layers. Where embedding and head are one matrix, naming one trains both as one."""
    merged: bool = False
    """Also write the model with the adapter merged in, as `final/merged`. It is written anyway where a later stage
    starts from it or where the model is the built-in one, and by `lemma export RUN` at any time."""


class TinyOptions(Options):
    """The shape of the built-in model (Qwen3 architecture, made for the built-in arithmetic)."""

    hidden: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(3, ge=1)
    """Number of decoder blocks."""
    feed_forward: int = Field(256, ge=8)
    """Width of the feed-forward layer."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_heads: int = Field(2, ge=1)
    """Key and value heads."""
    context: int = Field(512, ge=16)
    """Maximum sequence length."""
    words: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Extra tokens, such as the tags of a format; they are recognised anywhere in the text, and may contain line
    breaks."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyOptions:
        if self.heads % self.kv_heads or self.hidden % self.heads:
            raise ValueError("heads must be a multiple of kv_heads and divide hidden")
        return self


class ModelOptions(Options):
    """Which model to train, and how it is held in memory."""

    path: str = Field("tiny", min_length=1)
    """A folder, a hub name, a GGUF file, or `tiny` for the built-in model, which starts from random weights."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Folder, hub name or GGUF file of the tokenizer, if it is not the model's own."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Values to override in the model's configuration, such as rope_theta or max_position_embeddings."""
    lora: LoraOptions | None = None
    """Train low-rank adapters instead of all weights."""
    precision: Precision | None = None
    """Compute precision; bf16 and fp16 keep fp32 master weights. Default: bf16 on a GPU, fp32 on a CPU."""
    quantize: Quantize | None = None
    """Keep the frozen base weights in fewer bits, by bitsandbytes: 4bit (nf4), or 8bit (integers, with a scale for each
    row); products are made in the compute precision. Needs lora."""
    checkpointing: bool | None = None
    """Gradient checkpointing: recompute activations in the backward pass. Takes less memory and is up to a quarter
    slower. Default: on a GPU for as many blocks as the memory plan needs, on a CPU for none."""
    share_prompts: bool | None = None
    """Compute a prompt shared by several sequences of a pass only once. Default: true on a GPU, false on a CPU."""
    compile: bool = False
    """Compile each decoder block for training with torch.compile."""
    fused: bool = True
    """Use fused kernels on a GPU that supports them: Triton's for norms, rotary embeddings and the feed-forward gate,
    and FlashAttention 4 for attention if it is installed."""
    trust_remote_code: bool = False
    """Run code that comes with a hub model."""
    tiny: TinyOptions = TinyOptions()
    """Shape of the built-in model; used if path is `tiny`."""

    @model_validator(mode="after")
    def _works_together(self) -> ModelOptions:
        if self.quantize and self.lora is None:
            bits = self.quantize.removesuffix("bit")
            raise ValueError(f"{bits}-bit weights cannot be trained themselves; add `lora: {{r: 16}}` under model")
        return self
