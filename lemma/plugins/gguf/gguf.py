"""Models in GGUF files, made dense: tables of transformers and the gguf package say what is what.

Transformers' own way from a GGUF file to a tokenizer is not used: it cuts the text of most vocabularies into words as
GPT-2 does and takes the beginning-of-sequence token for the end. Its way to a configuration leaves out scaled
rotations, and its way to weights leaves out whatever it has no name for, which is refused here.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lemma.core.deadlines import Overdue, cpu_limit
from lemma.core.errors import UserError
from lemma.core.whole_files import AT_ONCE
from lemma.plugins.gguf.gguf_file import FLOAT32, Header, damaged, ends_of_turns, gguf_package, read_header
from lemma.plugins.gguf.gguf_tokenizer import build_tokenizer

# Architectures whose configuration is their row of transformers' table and nothing more; the others are read by
# transformers itself, which takes many seconds for a large vocabulary.
PLAIN = {
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text", "starcoder2": "starcoder2",
}  # fmt: skip
# Values that transformers' reader does not know for every architecture, under their names in its configurations.
MORE_VALUES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# How many numbers of a weight a thread makes dense at a time: so few stay in the cache of its core.
CHUNK = 1 << 17
ROPE_FACTORS = "rope_freqs.weight"
# For a chat template, which takes milliseconds.
TEMPLATE_SECONDS = 10.0
# Rotations that a configuration gives as numbers, not as weights of their own.
NOT_WEIGHTS = (ROPE_FACTORS, "attn_rot_embd.weight")
# How Llama 3.1 and its successors scale rotations: all but the factor is the same for all of them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The largest Gemmas scale attention by their width over their heads, the others by the size of a head. No file says so;
# llama.cpp tells them by their layers too.
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}


def load_tokenizer(file: Path) -> Any:
    """The tokenizer in a GGUF file."""
    return build_tokenizer(read_header(file).metadata, str(file))


def load_weights(file: Path, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration and the dense weights of a GGUF file, by the names that transformers gives them."""
    gguf_package(str(file))
    header = read_header(file)
    config = config_of(header)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, _tensors(header, model, dtype)


def find_ends(tokenizer: Any, file: Path) -> list[int]:
    """Every token that the file or the chat template ends a turn with; the tokenizer's own end comes first."""
    named = [number for number in ends_of_turns(read_header(file).metadata) if number < len(tokenizer)]
    turn = _end_of_turn(tokenizer)
    return list(dict.fromkeys([tokenizer.eos_token_id, *named, *([] if turn is None else [turn])]))


def set_ends(model: Any, tokenizer: Any, file: Path) -> None:
    """Let generation end where the model ends its turns."""
    ends = find_ends(tokenizer, file)
    settings = model.generation_config
    settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    settings.bos_token_id, settings.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    model.config.eos_token_id, model.config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id


def config_of(header: Header) -> Any:
    """What transformers makes of the metadata, and what it leaves out."""
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    kind = PLAIN.get(header.architecture)
    row = GGUF_CONFIG_MAPPING.get(kind or "", GGUF_CONFIG_MAPPING.get(header.architecture, {}))
    try:
        if kind is None:
            config = AutoConfig.from_pretrained(header.path.parent, gguf_file=header.path.name)
        else:
            said = {theirs: header.about(name) for name, theirs in row.items() if theirs}
            values = {name: value for name, value in said.items() if value is not None}
            values.setdefault("vocab_size", len(header.metadata.get("tokenizer.ggml.tokens", ())))
            tied = "output.weight" not in header.tensors
            values = {**GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {}), "tie_word_embeddings": tied, **values}
            values |= {f"{end}_token_id": None for end in ("bos", "eos", "pad")}  # set with the tokenizer
            config = AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        raise _unknown_kind(header) from error
    if not any(name.startswith("blk.") for name in header.tensors):
        raise UserError(f"{header.path} holds no weights, only a vocabulary", fix="give a file with a whole model")
    for name, theirs in MORE_VALUES.items():
        value = header.about(name)
        if isinstance(value, int) and name not in row and hasattr(config, theirs):
            setattr(config, theirs, value)
    if "blk.0.attn_q.bias" in header.tensors and hasattr(config, "attention_bias"):
        config.attention_bias = True
    if header.architecture in LARGEST_GEMMAS:
        is_largest = config.num_hidden_layers == LARGEST_GEMMAS[header.architecture]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if is_largest else config.head_dim
    theta = header.about("rope.freq_base")
    if theta and "rope.freq_base" not in row and getattr(config, "rope_parameters", None):
        config.rope_parameters = {**config.rope_parameters, "rope_theta": float(theta)}
    if kind is not None:
        _check_rotated(config, header)
    _scale_rotations(config, header)
    return config


def _unknown_kind(header: Header) -> UserError:
    return UserError(
        f"{header.path} holds a model of the kind '{header.architecture}', which cannot be read from GGUF",
        fix="take its folder in the Hugging Face format",
    )


def _check_rotated(config: Any, header: Header) -> None:
    """Refuse heads whose rotated part is not the one that the configuration names."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = header.about("rope.dimension_count", size)
    if rotated != int(size * config.rope_parameters.get("partial_rotary_factor", 1.0)):
        raise _unknown_rotation(header, f"{rotated} of the {size} numbers of a head")


def _scale_rotations(config: Any, header: Header) -> None:
    """Rotary positions that are scaled, which transformers' reader takes for plain ones."""
    kind, factor = header.about("rope.scaling.type", "none"), header.about("rope.scaling.factor")
    if ROPE_FACTORS in header.tensors:
        config.rope_parameters = {**config.rope_parameters, **_llama3(config, header)}
    elif kind == "none" or not factor:
        if any("rope_factors" in name for name in header.tensors):
            raise _unknown_rotation(header, "longrope")
    elif kind in ("linear", "yarn"):
        scaled = {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = header.about("rope.scaling.original_context_length")
        # Where each kind of layer has rotations of its own (Gemma 3), those of full attention are scaled.
        full = config.rope_parameters.get("full_attention")
        changed = scaled if full is None else {"full_attention": {**full, **scaled}}
        config.rope_parameters = {**config.rope_parameters, **changed}
    else:
        raise _unknown_rotation(header, str(kind))


def _unknown_rotation(header: Header, kind: str) -> UserError:
    return UserError(
        f"{header.path} scales its rotary positions in a way that cannot be read from GGUF ({kind})",
        fix="take the model's folder in the Hugging Face format",
    )


def _llama3(config: Any, header: Header) -> dict[str, Any]:
    """The settings of Llama 3.1's rotations that give the factors in the file, one for each frequency."""
    shape, kind, offset = header.tensors[ROPE_FACTORS]
    if kind != FLOAT32 or len(shape) != 1:
        raise _unknown_rotation(header, ROPE_FACTORS)
    factors = np.fromfile(header.path, dtype="<f4", count=shape[0], offset=offset)
    settings = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **LLAMA3}
    theta, width = config.rope_parameters["rope_theta"], 2 * shape[0]
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(shape[0]) * 2 / width))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / settings["factor"] + smooth), rtol=1e-3):
        raise _unknown_rotation(header, ROPE_FACTORS)
    return settings


def _tensors(header: Header, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight of the file, dense. One that the model has no place for is refused."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    kind = {"gpt-oss": "gpt_oss"}.get(header.architecture, header.architecture)
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=model.config.to_dict())
    places = _places(header, model, processor)
    # Experts are one weight for all of them, which has no `.weight` in its name.
    known = {*places, *(f"{name}.weight" for name in places)}
    homeless = [name for name in header.tensors if name not in known and not name.endswith(NOT_WEIGHTS)]
    if homeless:
        others = f" (and {len(homeless) - 1} more)" if len(homeless) > 1 else ""
        raise UserError(
            f"{header.path} holds weights that {type(model).__name__} has no place for: {homeless[0]}{others}",
            fix="take the model's folder in the Hugging Face format",
        )
    made: dict[str, torch.Tensor] = {}
    blob = np.memmap(header.path, mode="r", dtype=np.uint8).view(np.ndarray)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for name in header.tensors:
            if name.endswith(NOT_WEIGHTS):
                continue
            weights = _dense(header, name, blob, threads)
            # Experts are put into `made` by their processor, which then leaves no name.
            done = processor.process(
                weights=weights, name=name, tensor_key_mapping=places, parsed_parameters={"tensors": made}
            )
            if done.name is not None:
                made[places[done.name]] = torch.from_numpy(np.ascontiguousarray(done.weights)).to(dtype)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def _places(header: Header, model: Any, processor: Any) -> dict[str, str]:
    """The names of the model's weights by their names in GGUF files."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    if header.architecture not in kinds:
        raise _unknown_kind(header)
    names = get_tensor_name_map(kinds[header.architecture], model.config.get_text_config().num_hidden_layers)
    places: dict[str, str] = {}
    for whole in model.state_dict():
        theirs = processor.preprocess_name(whole)
        stem, dot, suffix = theirs.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = theirs, "", ""
        place = names.get_name(stem) or names.get_name(stem.removeprefix(f"{model.base_model_prefix}."))
        if place is None:
            processor.perform_fallback_tensor_mapping(places, f"{dot}{suffix}", "", theirs)
        else:
            places[f"{place}{dot}{suffix}"] = theirs
    return places


def _dense(header: Header, name: str, blob: np.ndarray, threads: Executor) -> np.ndarray:
    """A weight in full, in memory of its own. Its blocks know nothing of each other: however they are shared out, the
    numbers are those of the package for the whole weight."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    shape, number, offset = header.tensors[name]
    try:
        kind = GGMLQuantizationType(number)
        stored = math.prod(quant_shape_to_byte_shape(shape, kind))
        raw = blob[offset : offset + stored]
        if raw.size < stored:
            raise damaged(header.path)
        numbers, size = GGML_QUANT_SIZES[kind]
        step = max(1, CHUNK // numbers)
        first = dequantize(raw[:size][None], kind)
        dense = np.empty((raw.size // size, numbers), first.dtype)

        def fill(start: int) -> None:
            part = raw[start * size : (start + step) * size]
            dense[start : start + step] = dequantize(part[None], kind).reshape(-1, numbers)

        for _ in threads.map(fill, range(0, len(dense), step)):
            pass
        return dense.reshape(tuple(shape))
    except (NotImplementedError, ValueError, KeyError) as error:
        raise UserError(f"{header.path} holds weights in a form that the gguf package does not read ({name})",
                        fix="take another quantisation of the model, such as Q8_0") from error  # fmt: skip


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after what the assistant said."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    said = "what was said"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        with cpu_limit(TEMPLATE_SECONDS):
            after = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(said)[2].lstrip()
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, Overdue):
        return None
    special = {text: number for number, text in _special(tokenizer).items() if text and after.startswith(text)}
    return special[max(special, key=len)] if special else None


def _special(tokenizer: Any) -> dict[int, str]:
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
