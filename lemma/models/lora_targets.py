"""The layers that `model.lora.targets` names, on a model or on its skeleton: the modules without their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lemma.core.errors import UserError, nearest
from lemma.models.model_options import ModelOptions


def check_targets(causal: Any, targets: Sequence[str]) -> None:
    """Refuse a target that is no linear layer, or the head."""
    linear = [name for name, m in causal.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = {name.rpartition(".")[2] for name in linear}
            raise UserError(f"model.lora.targets names '{target}', which is not a linear layer of this model that can "
                            "be adapted", fix=nearest(target, known))  # fmt: skip


def skeleton(options: ModelOptions, file: Path | None) -> Any:
    """The model that a config.json or a GGUF file describes, or the built-in one if there is no file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lemma.models import gguf
    from lemma.models.gguf_file import read_header
    from lemma.models.tiny import tiny_config, tiny_tokenizer

    if file is None:
        config: Any = tiny_config(options.tiny, tiny_tokenizer())
    else:
        is_gguf = file.suffix == ".gguf"
        config = gguf.config_of(read_header(file)) if is_gguf else AutoConfig.from_pretrained(file)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
