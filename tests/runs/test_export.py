"""`lemma export` and the final model: what plain transformers and peft load is what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lemma.cli import main
from lemma.learning.checkpoint import CheckpointStore

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
    return run(tmp_path_factory.mktemp("export") / "lora", str(base), ", lora: {r: 4, alpha: 16}")


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


def test_an_adapter_exports_alone_and_merged(lora: Path, tmp_path: Path) -> None:
    from peft import PeftConfig, PeftModel

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


WRONG = {
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
