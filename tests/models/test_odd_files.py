"""Strange values in a recipe's override and in a model's files end in one sentence, whatever transformers raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lemma.core.errors import UserError
from lemma.models.load_model import build_policy, load_policy, load_tokenizer
from lemma.models.model_options import ModelOptions, TinyOptions

TINY = TinyOptions(hidden=16, layers=1, feed_forward=16, heads=2, kv_heads=1, context=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy = build_policy(ModelOptions(tiny=TINY), torch.device("cpu"), 0)
    policy.save(tmp_path / "model")
    return tmp_path / "model"


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        build_policy(ModelOptions(path=str(path), tiny=TINY, **options), torch.device("cpu"), 0)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": "many"},
        {"num_attention_heads": -1},
        {"hidden_size": 1.5},
        {"rope_theta": "large"},
        {"hidden_act": "nothing"},
        {"head_dim": 0},
        {"rope_scaling": {"rope_type": "nothing"}},
        {"pad_token_id": 10**9},
        {"to_dict": 3},
    ],
    ids=str,
)
def test_override_with_a_value_that_cannot_be(override: dict[str, Any], folder: Path) -> None:
    for path in ("tiny", folder):
        sentence = refusal(path, override=override)
        assert sentence.startswith(f"the model of {path} cannot be loaded: ") and sentence.endswith("model.override")


@pytest.mark.parametrize(
    "content",
    ["[]", "3", "null", "", "{}", '{"a":' * 10_000, {"model_type": 3}, {"auto_map": 3}, {"architectures": "x"},
     {"quantization_config": 3}, {"vocab_size": -1}, {"max_position_embeddings": None}, {"id2label": 3}],
    ids=lambda content: str(content)[:30],
)  # fmt: skip
def test_a_configuration_that_is_none(content: str | dict[str, Any], folder: Path) -> None:
    file = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content})
    file.write_text(content)
    assert f"of {folder} cannot be loaded: " in refusal(folder)


def test_an_adapter_that_names_itself_or_goes_in_a_circle(tmp_path: Path) -> None:
    for name, base in (("a", "a"), ("b", "c"), ("c", "b")):
        (tmp_path / name).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / base), "peft_type": "LORA"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
    for name in "ab":
        for load in (load_policy, load_tokenizer):
            with pytest.raises(UserError, match=rf"the adapter \S*/{name} names itself as its base; write the model"):
                load(str(tmp_path / name))
