"""Small random models of real architectures, saved as people find them on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lemma.models.tiny import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

Saver = Callable[..., Path]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Saver:
    """A function that makes a model from a configuration class and values, and gives its folder."""
    made: dict[str, Path] = {}

    def save(config: str, **values: Any) -> Path:
        key = repr((config, values))
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            sizes = SIZES if "hidden_size" not in values else {}
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes, **values))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(5) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn(parameter.shape))
            model.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return save
