"""The layers that options of `model.lora` name, on a model or on its skeleton: the modules without their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lemma.core.errors import UserError, nearest
from lemma.models.model_options import ModelOptions

# The names of layers that peft keeps one where a model has them as one.
PEFT_ENDS = ("embed_tokens", "lm_head")


def check_targets(causal: Any, targets: Sequence[str] | Literal["all-linear"]) -> None:
    """Refuse a target that is no linear layer, or the head."""
    if targets == "all-linear":
        return
    linear = [name for name, m in causal.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = {name.rpartition(".")[2] for name in linear}
            raise UserError(f"model.lora.targets names '{target}', which is not a linear layer of this model that can "
                            "be adapted", fix=nearest(target, known))  # fmt: skip


def whole_layers(causal: Any, names: Sequence[str]) -> tuple[list[str], bool]:
    """The full names of the layers that are trained whole, and whether the one matrix of embedding and head is among
    them; refuses what has no weights of its own, or none that can be learnt."""
    layers = {name: [*module.parameters(recurse=False)] for name, module in causal.named_modules()}
    layers = {name: weights for name, weights in layers.items() if weights}
    found: list[str] = []
    for wanted in names:
        fits = [name for name in layers if name == wanted or name.endswith(f".{wanted}")]
        if not fits:
            known = {name.rpartition(".")[2] for name in layers}
            raise UserError(f"model.lora.modules_to_save names '{wanted}', which is not a layer of this model with "
                            "weights of its own", fix=nearest(wanted, known))  # fmt: skip
        if not all(weight.is_floating_point() for name in fits for weight in layers[name]):
            raise UserError(f"model.lora.modules_to_save names '{wanted}', whose weights are quantised and cannot be "
                            "trained", fix="leave it out, or remove model.quantize")  # fmt: skip
        found += fits
    ends = [end.weight for end in (causal.get_input_embeddings(), causal.get_output_embeddings())]
    trains_both = ends[0] is ends[1] and any(weight is ends[0] for name in found for weight in layers[name])
    if trains_both and not any(name.endswith(PEFT_ENDS) for name in found):
        raise UserError("model.lora.modules_to_save names an embedding that is one matrix with the head, which peft "
                        f"knows only as {' and '.join(PEFT_ENDS)}", fix="leave it out")  # fmt: skip
    return found, trains_both


def skeleton(options: ModelOptions, file: Path | None) -> Any:
    """The model that a config.json or a GGUF file describes, or the built-in one if there is no file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lemma.models.tiny import tiny_config, tiny_tokenizer
    from lemma.plugins.gguf import gguf
    from lemma.plugins.gguf.gguf_file import read_header

    if file is None:
        config: Any = tiny_config(options.tiny, tiny_tokenizer())
    else:
        is_gguf = file.suffix == ".gguf"
        config = gguf.config_of(read_header(file)) if is_gguf else AutoConfig.from_pretrained(file)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
