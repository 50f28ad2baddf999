"""Models by folder, run folder, adapter folder and hub name; what is wrong with them is said in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from lemma.core.errors import UserError
from lemma.models.load_model import build_policy, load_for_inference, load_tokenizer, pick_device
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.places import base_of_adapter, resolve
from lemma.models.policy import Policy
from tests.models.conftest import Saver
from tests.models.small import CPU, SHAPE, tiny_policy

IDS = torch.arange(3, 43)[None]


def load(path: object, **options: Any) -> Policy:
    return build_policy(ModelOptions(path=str(path), **options), CPU, 0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def plain(folder: Path) -> torch.Tensor:
    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.fixture(scope="module")
def llama(save_model: Saver) -> Path:
    return save_model("LlamaConfig")


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copied"))


# --- what is wrong ---------------------------------------------------------------------------------------------------


def refusal(path: object, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_folder_that_is_not_there(copied: Path) -> None:
    wrong = copied.with_name("copid")
    assert refusal(wrong) == f"there is no model folder {wrong}; did you mean '{copied}'?"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path) == f"the folder {tmp_path} holds no model; give a folder with a config.json or a .gguf file"
    )


def test_a_hub_name_while_the_hub_is_switched_off() -> None:
    sentence = refusal("nobody/no-such-model")
    assert "no folder nobody/no-such-model" in sentence
    assert "HF_HUB_OFFLINE=1" in sentence and "lemma download model" in sentence


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_cut_short(copied: Path, name: str) -> None:
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[: len(content) // 2])
    sentence = refusal(copied)
    assert str(copied) in sentence and "cannot be loaded" in sentence


def test_weights_that_are_not_there(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(copied)


def test_weights_of_another_shape_are_not_made_up(llama: Path) -> None:
    sentence = refusal(llama, override={"intermediate_size": 64})
    assert "mlp.down_proj.weight has shape (32, 48), not (32, 64)" in sentence and "model.override" in sentence
    assert "layers.3.input_layernorm.weight is missing" in refusal(llama, override={"num_hidden_layers": 4})


def test_an_override_of_nothing(llama: Path) -> None:
    sentence = refusal(llama, override={"rope_thetta": 1e4})
    assert sentence.startswith("model.override names 'rope_thetta', which LlamaConfig does not have; did you mean")


def test_overrides_of_rotary_positions_keep_what_they_do_not_name(llama: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    before = load(llama).causal.config.rope_parameters["rope_theta"]
    found = load(llama, override={"rope_scaling": yarn}).causal.config.rope_parameters
    assert found == {"rope_theta": before, **yarn}
    assert load(llama, override={"rope_theta": 5e4}).causal.config.rope_parameters["rope_theta"] == 5e4


def test_overrides_without_effect_are_refused(llama: Path, save_model: Saver) -> None:
    assert "has no effect afterwards" in refusal(llama, override={"use_sliding_window": True})
    gemma = save_model("Gemma3TextConfig")
    sentence = refusal(gemma, override={"rope_theta": 1e5})
    assert "has one for each of" in sentence and "sliding_attention" in sentence and "rope_parameters" in sentence


def test_a_tokenizer_without_an_end(copied: Path) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    assert refusal(copied).startswith(f"the tokenizer of {copied} has no end-of-sequence token; set one in")


def test_a_tokenizer_without_a_pad_pads_with_the_end(copied: Path) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(copied)).pad_token == "<eos>"


@pytest.mark.parametrize("target", ["q_porj", "lm_head", "mlp.q_proj", "embed_tokens"])
def test_an_adapter_for_a_layer_that_is_not_there(llama: Path, target: str) -> None:
    sentence = refusal(llama, lora=LoraOptions(targets=["v_proj", target]))
    assert sentence.startswith(f"model.lora.targets names '{target}', which is not a linear layer")


def test_four_bits_of_the_built_in_model() -> None:
    assert "cannot be held in 4 bits" in refusal("tiny", quantize="4bit", lora=LoraOptions())


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        assert pick_device("cuda").type == "cuda"
    else:
        with pytest.raises(UserError, match="torch finds no GPU"):
            pick_device("cuda")


# --- what is honoured ------------------------------------------------------------------------------------------------


def test_an_override_changes_the_model_and_what_is_saved(llama: Path, tmp_path: Path) -> None:
    policy = load(llama, override={"rope_theta": 77.0, "max_position_embeddings": 64})
    assert policy.context == 64
    changed = logits(policy.causal)
    assert not torch.allclose(changed, plain(llama), atol=1e-2)
    policy.save(tmp_path / "saved")
    torch.testing.assert_close(plain(tmp_path / "saved"), changed, rtol=1e-4, atol=1e-4)


def test_an_override_of_the_built_in_model() -> None:
    policy = tiny_policy(override={"rope_theta": 77.0})
    assert not torch.equal(policy.causal.model.rotary_emb.inv_freq, tiny_policy().causal.model.rotary_emb.inv_freq)


def test_low_precision_leaves_the_rotary_frequencies_alone(tmp_path: Path) -> None:
    policy = tiny_policy(precision="bf16")
    assert policy.head.weight.dtype == torch.bfloat16
    assert policy.causal.model.rotary_emb.inv_freq.dtype == torch.float32
    policy.save(tmp_path)
    again = load(tmp_path, precision="bf16")
    assert torch.equal(logits(policy.causal), logits(again.causal))


@pytest.mark.parametrize("lora", [False, True])
def test_weights_and_adapters_depend_on_the_seed_alone(lora: bool) -> None:
    torch.manual_seed(1)
    first = tiny_policy(lora, seed=3)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second, other = tiny_policy(lora, seed=3), tiny_policy(lora, seed=4)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "loading must not use the global random state"
    assert torch.equal(logits(first.module), logits(second.module))
    assert not torch.equal(logits(first.module), logits(other.module))
    for name, parameter in first.parameters().items():
        assert torch.equal(parameter, second.parameters()[name])


def test_only_adapters_are_trained_and_they_start_as_nothing(llama: Path) -> None:
    policy = load(llama, lora=LoraOptions(r=2, targets=["q_proj", "mlp.down_proj"]))
    assert {name.split(".")[-4] for name in policy.parameters()} == {"q_proj", "down_proj"}
    assert all("lora_" in name for name in policy.parameters())
    torch.testing.assert_close(logits(policy.causal), plain(llama), rtol=1e-5, atol=1e-5)
    everywhere = load(llama, lora=LoraOptions(r=2)).parameters()
    assert len(everywhere) == 3 * 7 * 2 and not any("lm_head" in name for name in everywhere)


# --- saved and loaded again ------------------------------------------------------------------------------------------


def stirred(policy: Policy) -> Policy:
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return policy


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    policy = stirred(tiny_policy())
    policy.save(tmp_path)
    assert "lemma" not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(plain(tmp_path), logits(policy.causal), rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("eva has 13 pens .").input_ids) == "eva has 13 pens ."


def test_adapter_and_merged_model_say_the_same(llama: Path, tmp_path: Path) -> None:
    policy = stirred(load(llama, lora=LoraOptions(r=2, alpha=8)))
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    policy.save(tmp_path)
    mine = logits(policy.module)
    assert not torch.allclose(mine, plain(llama), atol=1e-2)
    torch.testing.assert_close(plain(tmp_path / "merged"), mine, rtol=1e-4, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), mine, rtol=1e-4, atol=1e-4
    )
    after = policy.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "saving must not touch the policy"


def test_an_adapter_folder_is_a_model(llama: Path, tmp_path: Path) -> None:
    policy = stirred(load(llama, lora=LoraOptions(r=2)))
    policy.save(tmp_path)
    again = load(tmp_path / "adapter")
    assert not again.is_adapter
    torch.testing.assert_close(logits(again.causal), logits(policy.module), rtol=1e-4, atol=1e-4)
    (tmp_path / "adapter" / "tokenizer_config.json").unlink()
    assert len(load_tokenizer(str(tmp_path / "adapter"))) == len(policy.tokenizer)


def test_an_adapter_finds_its_base_from_any_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.parent)
    stirred(load(f"./{llama.name}", lora=LoraOptions(r=2))).save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    assert not load("./saved/adapter").is_adapter


def test_a_temperature_without_sampling_does_not_keep_a_model_from_being_saved(copied: Path, tmp_path: Path) -> None:
    """transformers loads such settings for generation, which published folders hold, and refuses to save them."""
    settings = {"eos_token_id": 5, "temperature": 0.6, "do_sample": False}
    (copied / "generation_config.json").write_text(json.dumps(settings))
    load(copied).save(tmp_path / "saved")
    assert load(tmp_path / "saved").causal.generation_config.eos_token_id == 5


@pytest.mark.parametrize("content", ["{", "{}", '{"base_model_name_or_path": null}', "[]"])
def test_an_adapter_that_names_no_base(content: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    assert "adapter_config.json: this file does not name the base model of the adapter" in refusal(tmp_path)


def test_an_adapter_upon_an_adapter_names_what_it_stands_on(llama: Path, tmp_path: Path) -> None:
    stirred(load(llama, lora=LoraOptions(r=2))).save(tmp_path / "first")
    policy = stirred(load(tmp_path / "first" / "adapter", lora=LoraOptions(r=3)))
    policy.save(tmp_path / "second")
    mine = logits(policy.module)
    torch.testing.assert_close(plain(tmp_path / "second" / "merged"), mine, rtol=1e-4, atol=1e-4)
    again = load(tmp_path / "second" / "adapter")
    torch.testing.assert_close(logits(again.causal), mine, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_the_built_in_model_says_where_the_whole_is(tmp_path: Path) -> None:
    tiny_policy(lora=True).save(tmp_path)
    assert "load the merged model next to it" in refusal(tmp_path / "adapter")
    assert resolve(str(tmp_path)) == str(tmp_path / "merged")


def test_an_adapter_of_another_model(llama: Path, tmp_path: Path, save_model: Saver) -> None:
    load(llama, lora=LoraOptions(r=2)).save(tmp_path)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    smaller = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings["base_model_name_or_path"] = str(save_model("Qwen2Config", vocab_size=160, **smaller))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    assert "the adapter of" in refusal(tmp_path / "adapter")


def test_a_run_folder_stands_for_its_newest_model(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "stages" / "sft").mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text("stages: {}\n")
    assert "has no finished model yet" in refusal(tmp_path)
    shutil.copytree(llama, tmp_path / "stages" / "sft" / "final")
    assert resolve(str(tmp_path)) == str(tmp_path / "stages" / "sft" / "final")
    torch.testing.assert_close(logits(load(tmp_path).causal), plain(llama), rtol=1e-5, atol=1e-5)
    model, tokenizer = load_for_inference(str(tmp_path), "cpu")
    torch.testing.assert_close(logits(model), plain(llama), rtol=1e-5, atol=1e-5)
    assert tokenizer.eos_token == "<eos>"


def test_the_last_stage_of_the_recipe_counts_whatever_the_times_of_its_files(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: {warm: {steps: 1}, rl: {steps: 1}, never: {steps: 1}}\n")
    for stage in ("rl", "warm"):  # the first stage is copied last
        shutil.copytree(llama, tmp_path / "stages" / stage / "final")
        os.utime(tmp_path / "stages" / stage / "final", (1, 1 + (stage == "warm")))
    assert resolve(str(tmp_path)) == str(tmp_path / "stages" / "rl" / "final")


def test_a_folder_without_tokenizer_files_is_refused(llama: Path, tmp_path: Path) -> None:
    """transformers makes a tokenizer of no tokens there, to which every text is one unknown."""
    folder = shutil.copytree(llama, tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(llama: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(llama))
    tokenizer.add_tokens([f"more{i}" for i in range(200)])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model knows 160"):
        load(llama, tokenizer=str(tmp_path))


def test_the_shape_of_the_built_in_model() -> None:
    policy = tiny_policy()
    config = policy.causal.config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (SHAPE.hidden, SHAPE.layers, 8)
    assert policy.context == 128
    whole = build_policy(ModelOptions(), CPU, 0)
    assert 300_000 < sum(p.numel() for p in whole.causal.parameters()) < 700_000


def test_further_words_of_the_built_in_model_are_found_anywhere_and_travel_with_it(tmp_path: Path) -> None:
    text = "how many ?<start>1 + 2 = 3<end>\n<answer>\n3"
    shape = SHAPE.model_copy(update={"words": ["<start>", "<end>\n<answer>\n"]})
    policy = build_policy(ModelOptions(tiny=shape), CPU, 0)
    policy.save(tmp_path / "model")
    for tokenizer in (policy.tokenizer, load_tokenizer(str(tmp_path / "model"))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == "how many ? <start> 1 + 2 = 3 <end>\n<answer>\n 3"
    assert "<unk>" in load_tokenizer("tiny").decode(load_tokenizer("tiny").encode(text))


def test_an_adapter_finds_the_stage_below_where_its_run_was_moved_to(tmp_path: Path) -> None:
    base, adapter = (tmp_path / "run" / "stages" / name for name in ("first/final/merged", "second/final/adapter"))
    for folder, name, settings in (
        (base, "config.json", {}),
        (adapter, "adapter_config.json", {"base_model_name_or_path": str(base)}),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(settings))
    assert base_of_adapter(str(adapter)) == str(base)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "stages"
    assert base_of_adapter(str(moved / "second/final/adapter")) == str(moved / "first/final/merged")
