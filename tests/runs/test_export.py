"""`lemma export` and the final model: what plain transformers and peft load is what was trained."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lemma.cli import main
from lemma.learning.checkpoint import CheckpointStore
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.runs.joined_adapters import put_on_base

RECIPE = """
run: {{dir: {dir}, threads: 1, device: cpu, tensorboard: false}}
model: {{path: {model}, tiny: {{hidden: 32, layers: 2, feed_forward: 48}}{lora}}}
format: {{name: r1_zero, preamble: false}}
stages:
  sft:
    steps: 6
    data: {{arithmetic: {{count: 60, operations: 2}}}}
    batch: {{sequences: 6}}
    optim: {{lr: 2e-2}}
    checkpoint: {{every: 2, keep: 9}}
    validation: {{share: 0.1, every: 2}}
"""
IDS = torch.tensor([[3, 20, 31, 5, 17, 40]])


def run(folder: Path, model: str = "tiny", lora: str = "") -> Path:
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(dir=folder / "run", model=model, lora=lora))
    assert main(["train", str(recipe)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("export") / "full")


@pytest.fixture(scope="module")
def lora(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = full / "stages" / "sft" / "final"
    return run(tmp_path_factory.mktemp("export") / "lora", str(base), ", lora: {r: 4, alpha: 16, merged: true}")


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_the_last_checkpoint_exports_the_final_model(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(full)]) == 0
    target = full / "export" / "sft-6-merged"
    assert str(target) in capsys.readouterr().out
    assert torch.equal(logits(target), logits(full / "stages" / "sft" / "final"))
    assert AutoTokenizer.from_pretrained(target).chat_template


def test_any_step_and_the_best_one_can_be_exported(full: Path, tmp_path: Path) -> None:
    assert main(["export", str(full), "--checkpoint", "2", "--to", str(tmp_path / "two")]) == 0
    assert not torch.equal(logits(tmp_path / "two"), logits(full / "stages" / "sft" / "final"))
    store = CheckpointStore(full / "stages" / "sft" / "checkpoints", 1, print)
    best = store.best()
    assert best is not None
    assert main(["export", str(full), "--checkpoint", "best", "--to", str(tmp_path / "best")]) == 0
    head = store.load(best["step"]).tensors["weight/model.embed_tokens.weight"]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "best").get_input_embeddings().weight, head)


@pytest.mark.parametrize("kind", ["plain", "whole"])
def test_an_adapter_exports_alone_and_merged(kind: str, lora: Path, full: Path, tmp_path: Path) -> None:
    """Also one with layers that are trained whole; the built-in model has embedding and head as one matrix."""
    from peft import PeftConfig, PeftModel

    if kind == "whole":
        options = "{r: 4, merged: true, modules_to_save: [embed_tokens, norm]}"
        lora = run(tmp_path / "whole", str(full / "stages" / "sft" / "final"), f", lora: {options}")
    assert main(["export", str(lora), "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(lora), "--to", str(tmp_path / "merged")]) == 0
    config = PeftConfig.from_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    before = base(IDS).logits.detach()
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits
    assert (adapted - before).abs().max() > 1e-3
    assert torch.allclose(adapted, logits(tmp_path / "merged"), atol=1e-5)
    assert torch.equal(logits(tmp_path / "merged"), logits(lora / "stages" / "sft" / "final" / "merged"))


def test_only_the_adapter_is_written_unless_the_merged_model_is_asked_for(
    lora: Path, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(full / "stages" / "sft" / "final")
    alone = run(tmp_path / "alone", base, ", lora: {r: 4, alpha: 16}")
    final = alone / "stages" / "sft" / "final"
    assert [path.name for path in final.iterdir() if path.is_dir()] == ["adapter"]
    assert f"the model is in {final / 'adapter'}" in capsys.readouterr().out
    assert main(["export", str(alone)]) == 0
    assert torch.equal(logits(alone / "export" / "sft-6-merged"), logits(lora / "stages" / "sft" / "final" / "merged"))
    assert main(["train", str(tmp_path / "alone" / "recipe.yaml"), "--set", "model.lora.merged=true"]) == 0


def test_what_starts_from_an_adapter_starts_from_the_merged_weights(lora: Path) -> None:
    final, device = lora / "stages" / "sft" / "final", torch.device("cpu")
    one, other = (
        build_policy(ModelOptions(path="unused"), device, 0, final / kind).causal.state_dict()
        for kind in ("adapter", "merged")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


TWO = (
    RECIPE
    + """
  grpo:
    steps: 2
    data: {{arithmetic: {{count: 60, operations: 2}}}}
    rewards: [accuracy, {{name: length, weight: 0.1}}]
    batch: {{problems: 4}}
    algorithm: {{group_size: 4}}
    rollout: {{max_tokens: 16}}
    optim: {{lr: 2e-2}}
"""
)


@pytest.fixture(scope="module")
def two(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT, then GRPO, each with an adapter of its own, on a base that was downloaded from the hub."""
    folder = tmp_path_factory.mktemp("two")
    base = folder / "base"
    shutil.copytree(full / "stages" / "sft" / "final", base)
    (base / ".cache").mkdir()
    (base / ".cache" / "lemma-origin.json").write_text('{"repository": "owner/base"}')
    recipe = folder / "recipe.yaml"
    recipe.write_text(TWO.format(dir=folder / "run", model=base, lora=", lora: {r: 4, alpha: 16, merged: true}"))
    assert main(["train", str(recipe)]) == 0
    return folder


def adapted(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    with torch.no_grad():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(IDS).logits


def test_the_adapters_of_all_stages_become_one_on_the_base(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftConfig

    run, base = two / "run", two / "base"
    whole = logits(run / "stages" / "grpo" / "final" / "merged")
    assert main(["export", str(run), "--onto", "base", "--to", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "it belongs on owner/base" in said and "rank 8;" in said
    config = PeftConfig.from_pretrained(tmp_path / "one")
    assert config.base_model_name_or_path == "owner/base" and config.r == 8
    assert torch.allclose(adapted(base, tmp_path / "one"), whole, atol=1e-4)
    assert main(["export", str(run), "--adapter", "--to", str(tmp_path / "last")]) == 0
    assert not torch.allclose(adapted(base, tmp_path / "last"), whole, atol=1e-2)  # GRPO's alone is not enough
    card = (tmp_path / "last" / "README.md").read_text()
    assert "It belongs on the model of stage `sft`" in card and "on owner/base itself it gives wrong outputs" in card


def test_the_final_adapter_of_a_later_stage_belongs_on_the_base(two: Path) -> None:
    from peft import PeftConfig

    final, base = two / "run" / "stages" / "grpo" / "final", two / "base"
    config = PeftConfig.from_pretrained(final / "adapter")
    assert config.base_model_name_or_path == str(base) and config.r == 8
    assert torch.allclose(adapted(base, final / "adapter"), logits(final / "merged"), atol=1e-5)
    assert "It belongs on the model" not in (final / "adapter" / "README.md").read_text()
    first = load_file(two / "run" / "stages" / "sft" / "final" / "adapter" / FILE)
    for name, whole in load_file(final / "adapter" / FILE).items():
        part = whole[:4] if ".lora_A." in name else whole[:, :4]
        assert torch.equal(part, first[name]), "factors stay as they are"


def test_a_later_stage_starts_from_another_random_factor_than_the_first(two: Path) -> None:
    """GRPO's two steps move its first factor far less than one start is from another."""
    whole = load_file(two / "run" / "stages" / "grpo" / "final" / "adapter" / FILE)
    downs = [tensor.split(4) for name, tensor in whole.items() if ".lora_A." in name]
    assert all(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) < 0.7 for one, other in downs)


@pytest.mark.parametrize("other", ["base_model.model.layer.lora_magnitude_vector.weight", "base_model.model.lm_head"])
def test_an_adapter_that_has_no_sum_stays_on_the_model_it_was_trained_on(
    other: str, two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, adapter = tmp_path / "run", tmp_path / "run" / "stages" / "sft" / "final" / "adapter"
    shutil.copytree(two / "run", run)
    save_file(load_file(adapter / FILE) | {other: torch.ones(1)}, adapter / FILE)
    before = (adapter / "adapter_config.json").read_text()
    put_on_base(adapter, [run / "stages" / "grpo" / "final" / "adapter"], 4, "base", None)
    assert (adapter / "adapter_config.json").read_text() == before
    assert main(["export", str(run), "--onto", "base", "--to", str(tmp_path / "one")]) == 2
    assert "cannot be added up into one; leave `--onto base` out, or export the merged model" in capsys.readouterr().err


def test_a_smaller_rank_loses_what_is_printed(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two / "run"
    assert main(["export", str(run), "--onto", "base", "--rank", "3", "--to", str(tmp_path / "small")]) == 0
    printed = float(capsys.readouterr().out.split("rank 3; ")[1].split(" ")[0])
    lost = total = 0.0
    small = updates(tmp_path / "small")
    for name, update in updates(run / "stages" / "grpo" / "final" / "adapter").items():
        lost += float((update - small[name]).pow(2).sum())
        total += float(update.pow(2).sum())
    assert 0.01 < printed < 1 and printed == pytest.approx((lost / total) ** 0.5, rel=0.02)


def test_others_may_read_what_the_umask_lets_them(two: Path, full: Path, tmp_path: Path) -> None:
    ways = {"adapter": ["--adapter"], "merged": [], "one": ["--onto", "base"], "half": ["--dtype", "bf16"]}
    before = os.umask(0o022)
    try:
        for name, options in ways.items():
            assert main(["export", str(two / "run"), *options, "--to", str(tmp_path / name)]) == 0
        assert main(["export", str(full), "--to", str(tmp_path / "full")]) == 0
        os.umask(0o027)
        assert main(["export", str(full), "--to", str(tmp_path / "closed")]) == 0
    finally:
        os.umask(before)
    modes = {path.parent.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*.safetensors")}
    assert modes == dict.fromkeys([*ways, "full"], 0o644) | {"closed": 0o640}
    assert not list(tmp_path.glob("*/.mode*"))


def updates(adapter: Path) -> dict[str, torch.Tensor]:
    """What each layer is changed by, multiplied out."""
    settings, tensors = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / FILE)
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    scale = settings["lora_alpha"] / settings["r"]
    return {n: scale * tensors[f"{n}.lora_B.weight"].double() @ tensors[f"{n}.lora_A.weight"].double() for n in names}


FILE = "adapter_model.safetensors"
WRONG = {
    "rank alone": (["{run}", "--rank", "4"], "--rank is the rank of an adapter, at least 1; write `--onto base --rank"),
    "onto base of full weights": (["{run}", "--onto", "base"], "trains full weights, so there is no adapter"),
    "not a run": (["{nowhere}"], "is not the folder of a run"),
    "no such stage": (["{run}", "--stage", "stf"], "the run has no stage 'stf'; did you mean 'sft'?"),
    "no such step": (["{run}", "--checkpoint", "3"], "stage sft has no checkpoint '3'; steps on disk: 2, 4, 6"),
    "no such word": (["{run}", "--checkpoint", "first"], "there is no checkpoint called 'first'; write last, best"),
    "no adapter": (["{run}", "--adapter"], "trains full weights, so there is no adapter"),
    "target exists": (["{run}", "--to", "{run}"], "exists already; name another folder with --to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_exports_get_one_sentence(
    case: str, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, sentence = WRONG[case]
    assert main(["export", *(word.format(run=full, nowhere=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
