"""Exported models for others: precision, card, GGUF, and the way to a hub and back, by the real clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.plugins.gguf.gguf_writing import write_gguf
from lemma.runs.card_contamination import check_stages, in_words
from lemma.runs.model_card import card_text
from lemma.runs.publishing_model import convert, precision_of
from tests.hub import Hub, serve
from tests.models.gguf_made_here import SIZES, made_model, vocabulary
from tests.stages.sft_world import World

IDS = torch.tensor([[3, 20, 31, 5, 17, 40]])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("shared"))
    assert world.train(world.recipe()) == 0
    return world


def logits(folder: Path, **how: Any) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **how)(IDS).logits.float()


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_an_export_has_the_precision_that_was_asked_for(dtype: str, world: World, tmp_path: Path) -> None:
    assert main(["export", str(world.run), "--dtype", dtype, "--to", str(tmp_path / "out")]) == 0
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert {one.dtype for one in load_file(tmp_path / "out" / "model.safetensors").values()} == {wanted}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == wanted
    exact = logits(world.run / "stages" / "sft" / "final")
    assert torch.allclose(logits(tmp_path / "out", dtype=torch.float32), exact, atol=0 if dtype == "fp32" else 0.05)


def test_without_a_word_an_export_has_the_precision_of_the_run(world: World, tmp_path: Path) -> None:
    assert main(["export", str(world.run), "--to", str(tmp_path / "as-it-is")]) == 0
    assert precision_of(tmp_path / "as-it-is") == "fp32"
    layout = world.run / "stages" / "sft" / "layout.json"
    before = layout.read_text()
    layout.write_text(json.dumps({**json.loads(before), "precision": "bfloat16"}))
    try:
        assert main(["export", str(world.run), "--to", str(tmp_path / "half")]) == 0
    finally:
        layout.write_text(before)
    assert precision_of(tmp_path / "half") == "bf16", "the run was trained in half precision on another device"


def test_weights_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.tensor([1e6])}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="too large for fp16"):
        convert(tmp_path, "fp16")


# --- the card --------------------------------------------------------------------------------------------------------

QUESTIONS = [
    f"{name} has {count} {thing} and finds as many again . {name} gives half of all {thing} away . how many are left ?"
    for name, count, thing in (("eva", 3, "pens"), ("tom", 5, "cups"), ("ann", 7, "keys"), ("max", 9, "hats"))
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run whose data hold two of the three problems that it is measured on, one of them twice."""
    world = World(tmp_path_factory.mktemp("measured"))
    rows = [
        {"dataset": "toy", "id": one, "problem": one, "answer": "3", "response": "3 </think> <answer> 3 </answer>"}
        for one in QUESTIONS
    ]
    (world.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:3], rows[0]]))
    (world.folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [rows[0], rows[1], rows[3]]))
    stage = {
        "data": {"source": str(world.folder / "train.jsonl")},
        "steps": 1,
        "batch": {"sequences": 2, "token_budget": 256},
        "checkpoint": {"every": 1},
    }
    evaluated = {"eval": {"benchmarks": [str(world.folder / "asked.jsonl")], "max_tokens": 2, "at_start": False}}
    assert world.train(world.recipe(stages={"first": stage, "second": stage | evaluated})) == 0
    return world


def section(folder: Path) -> str:
    return (folder / "README.md").read_text().split("## Contamination\n")[1].split("\n## ")[0]


def test_a_card_says_which_rows_of_which_stage_repeat_which_benchmark(measured: World, tmp_path: Path) -> None:
    said = section(measured.final("second"))
    assert "Training data against asked:" in said
    for stage in ("first", "second"):
        assert f"- {stage}: 3 of 4 rows repeat a problem\n" in said
    assert said.count("asked: 2 of its 3 problems (66.7%) found in the data; rows word for word: 3") == 2
    assert "No benchmark was named" in section(measured.final("first")), "the first stage is measured on nothing"

    for name in ("train", "asked"):  # an export elsewhere tells what was found when the stage ended
        (measured.folder / f"{name}.jsonl").rename(measured.folder / f"{name}.gone")
    try:
        assert main(["export", str(measured.run), "--to", str(tmp_path / "out")]) == 0
        assert main(["export", str(measured.run), "--contamination", "--to", str(tmp_path / "asked")]) == 2
    finally:
        for name in ("train", "asked"):
            (measured.folder / f"{name}.gone").rename(measured.folder / f"{name}.jsonl")
    assert section(tmp_path / "out") == said and not (tmp_path / "asked").exists()


def test_an_export_compares_with_the_benchmarks_that_are_named(
    measured: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"problem": QUESTIONS[2], "answer": "7"}) + "\n")
    to = ["--to", str(tmp_path / "out"), "--stage", "first"]
    assert main(["export", str(measured.run), "--contamination", str(other), *to]) == 0
    said = section(tmp_path / "out")
    assert "- first: 1 of 4 rows repeat a problem" in said and "other: 1 of its 1 problems (100.0%)" in said
    assert "1 of 4 rows repeat a problem" in capsys.readouterr().out
    assert "second:" not in said, "a later stage did not make this model"
    assert main(["export", str(measured.run), "--contamination", "--stage", "first", "--to", str(tmp_path / "no")]) == 2
    assert "names no benchmark" in capsys.readouterr().err


def test_data_that_are_not_small_files_are_said_not_to_be_compared() -> None:
    measured = {"benchmarks": ["gsm8k"]}
    stages = {
        "sft": {"kind": "supervised", "data": {"source": "openai/gsm8k"}},
        "own": {"kind": "supervised", "data": {"source": "journal"}},
        "world": {"kind": "rl", "data": {"source": "environment"}},
        "rl": {"kind": "rl", "data": {"source": "arithmetic"}, "eval": measured},
        "gone": {"kind": "rl", "data": {"source": "journal"}, "eval": {"benchmarks": ["no/such/file.yaml"]}},
    }
    said = in_words(check_stages(stages, 0))
    assert "against gsm8k" in said and "- sft: not compared; `lemma export RUN --contamination` does it" in said
    assert "- world: the problems are its environment's own" in said
    assert "- own: its own samples" in said and "- rl: the problems are made by rule" in said


def test_every_final_model_has_a_card_that_the_hubs_client_reads(world: World) -> None:
    card = ModelCard.load(world.run / "stages" / "sft" / "final" / "README.md")
    assert card.data.library_name == "transformers" and "lemma" in card.data.tags
    for words in ("How to load it", "Results", "Data", "Contamination", "License", "Recipe"):
        assert f"## {words}" in card.text
    assert str(world.folder) not in card.content, "a card names no folder of this machine"
    recipe = yaml.safe_load(card.text.split("```yaml")[1].split("```")[0])
    assert recipe["stages"]["sft"]["optim"]["lr"] == 2e-3


def test_a_card_has_results_with_intervals_base_data_and_license(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    recipe = {
        "run": {"dir": "/somewhere/runs/x", "seed": 0},
        "model": {"path": str(base)},
        "stages": {
            "sft": {"kind": "supervised", "data": {"source": "openai/gsm8k", "split": "train"}},
            "other": {"kind": "supervised", "data": {"source": "/home/me/rows.jsonl"}},
            "rl": {"kind": "rl", "start_from": "sft", "data": {"source": "openai/gsm8k"}},
        },
    }
    result = {"benchmark": "gsm8k", "metric": "avg@1", "value": 0.5, "low": 0.4, "high": 0.6, "n": 100, "k": 1}
    card = ModelCard(card_text(recipe, "rl", [result], step=7))
    (found,) = card.data.eval_results
    assert (found.dataset_name, found.metric_value) == ("gsm8k", 50.0)
    assert "| gsm8k | avg@1 | 50.0 | 40.0 to 60.0 | 100 | 1 |" in card.text
    assert card.data.license == "mit" and card.data.datasets == ["openai/gsm8k"]
    assert "other" not in yaml.safe_load(card.text.split("```yaml")[1].split("```")[0])["stages"]
    assert "/home/me" not in card.content and "/somewhere" not in card.content


# --- the hub ---------------------------------------------------------------------------------------------------------


LOAD = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained("me/tiny") for kind in (AutoModelForCausalLM, AutoTokenizer))
assert tokenizer("1 + 2")["input_ids"]
with torch.no_grad():
    print(json.dumps(model(torch.tensor([[3, 20, 31, 5, 17, 40]])).logits[0, -1].tolist()))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    with serve(Hub({})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_made_here")
        yield hub


def test_a_pushed_model_loads_from_the_hub(
    world: World, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    target = world.run / "export" / "sft-6-merged"
    assert main(["export", str(world.run), "--to", "hub", "me/tiny"]) == 0
    assert "pushed to me/tiny" in capsys.readouterr().out
    assert hub.private == {"models/me/tiny"}
    files = hub.repositories["models/me/tiny"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == logits(target)[0, -1].tolist()


def test_what_a_hub_does_not_take_is_one_sentence(world: World, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.gated.add("models/me/closed")
    assert main(["export", str(world.run), "--checkpoint", "4", "--to", "hub", "me/closed"]) == 2
    assert "the hub does not take me/closed" in capsys.readouterr().err
    for words, sentence in ((["hub"], "neither a folder nor"), (["a", "b"], "neither a folder nor")):
        assert main(["export", str(world.run), "--to", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["export", str(world.run), "--public"]) == 2


# --- GGUF ------------------------------------------------------------------------------------------------------------


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokens, merges = vocabulary()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>", bos_token="<|begin|>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def qwen(kind: Any, config: Any, **values: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config(**SIZES | values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


MODELS = {
    "llama": lambda: made_model(),
    "llama, tied": lambda: made_model(tie_word_embeddings=True),
    "qwen2": lambda: qwen(Qwen2ForCausalLM, Qwen2Config),
    "qwen3": lambda: qwen(Qwen3ForCausalLM, Qwen3Config, head_dim=128),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gguf_file_has_the_logits_of_its_model(name: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    MODELS[name]().save_pretrained(folder)
    tokenizer = save_tokenizer(folder)
    if dtype != "fp32":
        convert(folder, dtype)
    file = write_gguf(folder)
    exact = logits(folder, dtype=torch.float32)
    theirs = logits(folder, gguf_file=file.name, dtype=torch.float32)
    assert torch.allclose(theirs, exact, atol=1e-5), (theirs - exact).abs().max()
    from lemma.plugins.gguf.gguf import load_tokenizer

    text = "def f(x):\n    return 12345  # it's"
    assert load_tokenizer(file)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_without_the_gguf_package_nothing_is_written(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export", str(world.run), "--gguf", "--to", str(tmp_path / "x")]) == 2
    assert "--gguf needs the gguf package" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_what_gguf_has_no_place_for_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["export", str(world.run), "--gguf", "--to", str(tmp_path / "x")]) == 2
    assert "byte-level" in capsys.readouterr().err
    assert main(["export", str(world.run), "--gguf", "--adapter"]) == 2
    assert "an adapter has no GGUF file" in capsys.readouterr().err
