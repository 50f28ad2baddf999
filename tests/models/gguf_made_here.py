"""Small GGUF files, written by the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def made_model(**values: Any) -> Any:
    """A random Llama whose predictions are far from uniform."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary that was trained here; special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text[start : start + 200] for start in range(0, len(text), 200)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The two halves of each head's rotation next to each other, as GGUF files of Llamas have them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _name(theirs: str) -> str:
    stem, _, suffix = theirs.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    number, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest]}.{suffix}"


def write_gguf(
    file: Path,
    model: Any = None,
    *,
    architecture: str = "llama",
    pre: str | None = "gpt-2",
    quantised: bool = False,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """A Llama as a GGUF file; without a model, only its vocabulary. `metadata` are further numbers and texts."""
    writer = GGUFWriter(file, architecture)
    config = made_model().config if model is None else model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    writer.add_chat_template(TEMPLATE)
    for name, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    tensors = dict(extra or {})
    for theirs, tensor in () if model is None else model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        kind = theirs.split(".")[-2]
        weight = tensor.numpy()
        tensors[_name(theirs)] = _permuted(weight, heads[kind]) if kind in heads else weight
    for name, weight in tensors.items():
        if quantised and weight.ndim == 2:
            packed = quantize(weight, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
