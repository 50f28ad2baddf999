"""A model folder as a GGUF file, written by the official gguf package, for llama.cpp and its kin.

Written are decoders whose weights GGUF knows one by one (Llama, Qwen2, Qwen3) with a byte-level vocabulary, which is
what `gguf_tokenizer` reads back. Weights keep their precision; norms and biases are float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from lemma.core.errors import UserError
from lemma.plugins.gguf.gguf_file import gguf_package
from lemma.plugins.gguf.gguf_tokenizer import RULES, build_tokenizer

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# Text in which every way of cutting words shows itself.
PROBE = (
    "It's 12345 o'clock, we'LL see:\n\n  x_1 = (3.14)**2;\tCafe\u0301 naïve 你好 мир!! ...  \r\n\r\n#tag's don't I'm"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def write_gguf(folder: Path) -> Path:
    """Write FOLDER/NAME.gguf; its path. Refused in one sentence where GGUF has no place for the model."""
    gguf = gguf_package()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise UserError(
            f"a model of the kind '{kind}' cannot be written as GGUF", fix=f"kinds: {', '.join(ARCHITECTURES)}"
        )
    file = folder / f"{folder.resolve().name}.gguf"
    partial = file.with_name(f".{file.name}.partial")
    writer = gguf.GGUFWriter(partial, kind)
    try:
        writer.add_name(folder.resolve().name)
        _write_shape(writer, config)
        for key, value in tokenizer_metadata(folder, config, kind).items():
            _add(writer, gguf, key, value)
        _write_weights(writer, gguf, folder, config, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    os.replace(partial, file)
    return file


def _write_shape(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise UserError("a model with scaled rotations cannot be written as GGUF yet", fix="leave --gguf out")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


# --- the vocabulary ----------------------------------------------------------------------------------------------


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What a GGUF file says about the tokenizer of a folder; the rule that cuts words is found by trying all."""
    from transformers import PreTrainedTokenizerFast

    # As it was saved: the classes of some families add tokens that the model has no embedding for.
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
    model = json.loads(theirs.backend_tokenizer.to_str())["model"]
    # Some tokenizers ask for pieces of bytes as well, and have none: their words are bytes already.
    if model["type"] != "BPE" or (model.get("byte_fallback") and "<0x00>" in model["vocab"]):
        raise UserError("only byte-level vocabularies can be written as GGUF yet", fix="leave --gguf out")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    added = theirs.added_tokens_decoder
    words = {number: word for word, number in model["vocab"].items()} | {n: one.content for n, one in added.items()}
    count = max(config["vocab_size"], max(words) + 1)
    tokens = [words.get(number, f"[PAD{number}]") for number in range(count)]
    types = [_type(number, words, added) for number in range(count)]
    about: dict[str, Any] = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges}
    # Readers of a file without a padding token take one that their family usually has.
    padding = theirs.eos_token_id if theirs.pad_token_id is None else theirs.pad_token_id
    for name, number in (("bos", theirs.bos_token_id), ("eos", theirs.eos_token_id), ("padding", padding)):
        if number is not None:
            about[f"{name}_token_id"] = int(number)
    begins = theirs("x")["input_ids"]
    about["add_bos_token"] = bool(theirs.bos_token_id is not None and begins[:1] == [theirs.bos_token_id])
    metadata = {f"tokenizer.ggml.{key}": value for key, value in about.items()}
    if theirs.chat_template:
        metadata["tokenizer.chat_template"] = str(theirs.chat_template)
    return metadata | {"tokenizer.ggml.pre": _find_rule(metadata, theirs, kind, folder)}


def _type(number: int, words: Mapping[int, str], added: Mapping[int, Any]) -> int:
    if number in added:
        return CONTROL if added[number].special else USER_DEFINED
    return NORMAL if number in words else UNUSED


def _find_rule(metadata: Mapping[str, Any], theirs: Any, kind: str, folder: Path) -> str:
    wanted = theirs(PROBE, add_special_tokens=False)["input_ids"]
    for name in RULES:
        content = {**metadata, "general.architecture": kind, "tokenizer.ggml.pre": name}
        if build_tokenizer(content, str(folder))(PROBE, add_special_tokens=False)["input_ids"] == wanted:
            return name
    raise UserError("the tokenizer cuts words by a rule that GGUF files have no name for", fix="leave --gguf out")


def _add(writer: Any, gguf: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# --- the weights -------------------------------------------------------------------------------------------------


def _write_weights(writer: Any, gguf: Any, folder: Path, config: Mapping[str, Any], kind: str) -> None:
    """Every tensor of the folder, one at a time; one that GGUF has no name for is refused."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURES[kind]), config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for theirs in opened.keys():  # noqa: SIM118
                if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise UserError(f"GGUF has no place for the weights '{theirs}'", fix="leave --gguf out")
                tensor = opened.get_tensor(theirs)
                part = theirs.split(".")[-2]
                if kind == "llama" and part in heads:
                    tensor = _halves_together(tensor, heads[part] or config["num_attention_heads"])
                _add_tensor(writer, gguf, name, tensor)


def _halves_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours of a Llama's head; transformers rotates its first half with its second."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: torch.Tensor) -> None:
    kinds: Sequence[tuple[torch.dtype, Any]] = (
        (torch.bfloat16, gguf.GGMLQuantizationType.BF16),
        (torch.float16, gguf.GGMLQuantizationType.F16),
    )
    packed = next((kind for dtype, kind in kinds if tensor.dtype == dtype and tensor.ndim > 1), None)
    values = np.ascontiguousarray(tensor.float().numpy())
    if packed is None:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, packed), raw_dtype=packed)
