"""Strange values in a recipe's override and in a model's files end in one sentence, whatever transformers raises."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
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


class Order:
    """With pickle, what is read is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


@pytest.mark.parametrize("kind", ["weights", "model", "tokenizer", "adapter"])
def test_nothing_in_a_model_is_executed(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled weights, and code that a configuration names; a model that needs them is refused, another one is read."""
    mark = tmp_path / "executed"
    # Classes of its own: transformers marks those that it takes from a folder, for good.
    code = f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class C(LlamaConfig): pass\nclass M(LlamaForCausalLM): config_class = C\n"
    (folder / "evil.py").write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Order(mark)))
    place = folder
    if kind == "weights":
        (folder / "model.safetensors").unlink()
    elif kind == "adapter":
        place = tmp_path / "adapter"
        place.mkdir()
        (place / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "lora_alpha": 2,
                        "target_modules": ["q_proj"]})
        )  # fmt: skip
        (place / "adapter_model.bin").write_bytes(pickle.dumps(Order(mark)))
    else:
        file = folder / ("config.json" if kind == "model" else "tokenizer_config.json")
        named = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.C", "evil.C"]}
        unknown = {"model_type": "nothing"} if kind == "model" else {"tokenizer_class": "Nothing"}
        file.write_text(json.dumps(json.loads(file.read_text()) | unknown | {"auto_map": named}))
    with suppress(UserError):
        load_policy(str(place), "cpu")
    assert not mark.exists()
    if kind in ("model", "tokenizer"):  # there is something to execute
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(tmp_path / "modules")
        with suppress(AttributeError):
            build_policy(ModelOptions(path=str(folder), trust_remote_code=True), torch.device("cpu"), 0)
        assert mark.exists()
