"""Models from GGUF files: the same numbers as the model that was written, and one sentence where there is none."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.models.load_model import build_policy, load_for_inference, load_policy, load_tokenizer
from lemma.models.memory import Shape
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.places import resolve
from lemma.plugins.gguf import gguf, gguf_file
from lemma.plugins.gguf.gguf_file import Header, read_header
from tests.models.gguf_made_here import SIZES, made_model, write_gguf
from tests.models.small import CPU
from tests.stages.sft_world import World

IDS = torch.arange(5, 65)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def model() -> Any:
    return made_model()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_for_inference(str(path), "cpu")
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"rope_parameters": {"rope_theta": 7e4}}],
    ids=["plain", "tied", "biased", "theta"],
)
def test_the_model_is_the_one_that_was_written(values: dict[str, Any], tmp_path: Path) -> None:
    model = made_model(**values)
    loaded, _ = load_for_inference(str(write_gguf(tmp_path / "m.gguf", model)), "cpu")
    assert torch.equal(logits(loaded), logits(model))


def test_quantised_weights_are_made_dense(model: Any, tmp_path: Path) -> None:
    loaded, _ = load_for_inference(str(write_gguf(tmp_path / "m.gguf", model, quantised=True)), "cpu")
    theirs, mine = model.model.layers[1].mlp.up_proj.weight, loaded.model.layers[1].mlp.up_proj.weight
    assert not torch.equal(mine, theirs)
    assert (mine - theirs).abs().max() <= theirs.abs().max() / 127 / 2 * 1.01  # half a step of eight bits
    assert getattr(loaded.config, "quantization_config", None) is None


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
def test_weights_made_dense_in_parts_have_the_numbers_of_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "CHUNK", 600)  # neither a row nor a whole number of blocks
    number = GGMLQuantizationType[kind]
    stored = quant_shape_to_byte_shape((7, 512), number)
    raw = np.random.default_rng(0).integers(0, 60, stored, dtype=np.uint8)
    blob = np.concatenate([np.zeros(32, np.uint8), raw.ravel()])
    header = Header(tmp_path / "m.gguf", {}, {"a": ((7, 512), int(number), 32)})
    with ThreadPoolExecutor(3) as threads:
        found = gguf._dense(header, "a", blob, threads)
    assert found.tobytes() == dequantize(raw, number).tobytes() and found.shape == (7, 512)


def test_the_folder_with_one_file_is_the_file(file: Path) -> None:
    assert resolve(str(file.parent)) == str(file)
    (file.parent / "mmproj-model.gguf").write_bytes(b"GGUF")  # the eyes of a model are no model
    assert resolve(str(file.parent)) == str(file)


def test_ends_come_from_the_file_and_from_its_template(file: Path) -> None:
    model, tokenizer = load_for_inference(str(file), "cpu")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|begin|>", "<|end|>", "<|end|>")
    assert model.generation_config.eos_token_id == [3, 2]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 3, 3)
    assert tokenizer.encode("a b", add_special_tokens=True) == tokenizer.encode("a b", add_special_tokens=False)


def test_text_begins_with_bos_where_the_file_says_so(tmp_path: Path, model: Any) -> None:
    written = write_gguf(tmp_path / "m.gguf", model, tokenizer__ggml__add_bos_token=1)
    assert load_tokenizer(str(written)).encode("a")[0] == 0


def test_what_is_saved_is_a_plain_folder(file: Path, tmp_path: Path) -> None:
    policy = load_policy(str(file), "cpu")
    policy.save(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(policy.causal))
    assert again.generation_config.eos_token_id == [3, 2]
    text = "User: 12 + 30?\n\n<|im_start|>it's"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(text) == policy.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_adapter_finds_its_file_again(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    policy = build_policy(ModelOptions(path="model.gguf", lora=LoraOptions(r=2)), CPU, 0)
    for name, parameter in policy.parameters().items():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.01)
    policy.save_adapter(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    loaded, _ = load_for_inference("adapter", "cpu")
    assert (logits(loaded) - logits(policy.module)).abs().max() < 1e-4
    assert not torch.equal(logits(loaded), logits(load_for_inference(str(file), "cpu")[0]))


def test_scaled_rotations_of_llama_3_are_told_by_their_factors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    model = made_model(rope_parameters=scaling, hidden_size=256)
    plain = 1 / 5e5 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert (factors.min(), factors.max()) == pytest.approx((1, 8))
    file = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    loaded, _ = load_for_inference(str(file), "cpu")
    assert loaded.config.rope_parameters == pytest.approx(scaling)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    wrong = write_gguf(tmp_path / "wrong.gguf", model, extra={"rope_freqs.weight": factors[::-1]})
    assert "scales its rotary positions" in refusal(wrong)


def config_of(architecture: str, layers: int = 4, **about: Any) -> Any:
    """The configuration from a file's metadata, as of a model 64 wide with 4 heads."""
    shape = {"block_count": layers, "embedding_length": 64, "feed_forward_length": 96, "context_length": 256,
             "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 7e4}  # fmt: skip
    named = {name.replace("__", "."): value for name, value in about.items()}
    metadata = {f"{architecture}.{name}": value for name, value in (shape | named).items()}
    header = Header(
        Path("m.gguf"),
        {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"] * 9, **metadata},
        {"blk.0.attn_q.weight": ((64, 64), 0, 0)},
    )
    return gguf.config_of(header)


def test_scaled_rotations_of_gemma_3_are_those_of_full_attention() -> None:
    config = config_of("gemma3", 6, attention__key_length=32, rope__scaling__type="linear", rope__scaling__factor=8.0)
    rotations = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    plain = 1 / 7e4 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(rotations.full_attention_inv_freq, plain / 8)
    assert torch.allclose(rotations.sliding_attention_inv_freq, 1 / 1e4 ** (torch.arange(0, 32, 2) / 32))


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_attention_by_their_width(architecture: str, largest: int) -> None:
    assert config_of(architecture, attention__key_length=32).query_pre_attn_scalar == 32
    assert config_of(architecture, largest, attention__key_length=32).query_pre_attn_scalar == 16


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "starcoder2"])
def test_every_kind_takes_the_base_of_its_rotations_from_the_file(architecture: str) -> None:
    assert config_of(architecture, attention__key_length=16).rope_parameters["rope_theta"] == 7e4


def test_heads_that_are_rotated_in_part_are_refused() -> None:
    with pytest.raises(UserError, match="12 of the 16 numbers of a head"):
        config_of("phi3", rope__dimension_count=12)


def test_the_shape_is_told_without_loading(file: Path, model: Any) -> None:
    shape = Shape.of_config(read_header(file).config())
    assert shape == Shape.of_config(model.config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_a_run_trains_it_and_writes_a_plain_folder(file: Path, tmp_path: Path) -> None:
    world = World(tmp_path)
    recipe = world.recipe({"steps": 1}, path=str(file))
    assert world.train(recipe) == 0
    final = world.final()
    assert json.loads((final / "config.json").read_text())["model_type"] == "llama"
    trained = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert not torch.equal(logits(trained), logits(load_for_inference(str(file), "cpu")[0]))
    assert load_tokenizer(str(final)).encode("12 + 3") == load_tokenizer(str(file)).encode("12 + 3")


def test_it_speaks(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(file), "12 + 3?", "--max-tokens", "4", "--device", "cpu"]) == 0
    assert "transformers engine" not in capsys.readouterr().err


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_several_files_in_a_folder(model: Any, tmp_path: Path) -> None:
    for name in ("b-q4.gguf", "a-q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert f"holds 2 models: a-q8.gguf, b-q4.gguf; name one, such as {tmp_path / 'a-q8.gguf'}" in refusal(tmp_path)


def test_a_piece_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert "one of 3 pieces" in refusal(tmp_path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for name, content in {"a.gguf": b"<html>", "b.gguf": b"", "c.txt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
    assert "a.gguf is not a GGUF file" in refusal(tmp_path / "a.gguf")
    assert "b.gguf is not a GGUF file" in refusal(tmp_path / "b.gguf")
    assert "c.txt is a file, not a model" in refusal(tmp_path / "c.txt")
    assert "there is no model folder" in refusal(tmp_path / "d.gguf")
    assert "aa.gguf; did you mean" in refusal(tmp_path / "aa.gguf") and "a.gguf'" in refusal(tmp_path / "aa.gguf")


def test_a_file_that_was_cut_or_damaged(file: Path, tmp_path: Path) -> None:
    whole, broken = file.read_bytes(), tmp_path / "m.gguf"
    for length in (5, 20, 30, 500, 5_000, len(whole) // 2, len(whole) - 1000):
        broken.write_bytes(whole[:length])
        assert "damaged or was cut short" in refusal(broken), length
    draw = random.Random(0)
    for _ in range(300):
        place = draw.randrange(4, 9_000)
        broken.write_bytes(whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :])
        gguf_file._read_header.cache_clear()  # files written so fast have the same time
        try:
            read_header(broken)
        except UserError as error:
            assert "\n" not in str(error)


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    assert "of the kind 'lemmatron', which" in refusal(write_gguf(tmp_path / "m.gguf", architecture="lemmatron"))


def test_a_vocabulary_alone_gives_a_tokenizer_and_no_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    assert len(load_tokenizer(str(file))) == SIZES["vocab_size"]
    assert "holds no weights" in refusal(file)


def test_weights_that_would_be_left_out(tmp_path: Path, model: Any) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    assert "has no place for: blk.0.attn_q_norm.weight" in refusal(file)


def test_weights_that_are_missing(tmp_path: Path, model: Any) -> None:
    shallow = made_model(num_hidden_layers=1)
    shallow.config.num_hidden_layers = 2
    assert "do not fit its configuration: model.layers.1" in refusal(write_gguf(tmp_path / "m.gguf", shallow))


@pytest.mark.parametrize(("pre", "says"), [("klingon", "a rule 'klingon'"), (None, "does not say how text is cut")])
def test_words_that_nobody_can_cut(pre: str | None, says: str, tmp_path: Path, model: Any) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, pre=pre)
    assert says in refusal(file) and "model.tokenizer" in refusal(file)
    build_policy(ModelOptions(path=str(file), tokenizer="tiny"), CPU, 0)


def test_the_package_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the gguf package" in refusal(file) and ".venv/bin/pip install -e '.[gguf]'" in refusal(file)
