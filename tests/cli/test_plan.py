"""`lemma plan`: what is missing, how many steps epochs are, and memory by the lengths of the data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lemma.cli import main
from lemma.config.load import load_values
from lemma.core.ranks import RankWorld, joined, use_slots
from lemma.learning.learning_options import BudgetOptions, OptimOptions
from lemma.models.load_model import load_for_inference
from lemma.planning.data_amounts import Amount
from lemma.planning.plan_words import describe, length_in_words
from lemma.planning.stage_memory import memory_warnings
from lemma.recipe import Recipe, load_recipe
from lemma.runs.fitted import fit_budget
from lemma.runs.run_options import usual_slots
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.supervised_options import SupervisedOptions
from tests.hub import Hub, serve
from tests.models.small import tiny_policy

CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip

CANNOT = "The run cannot be made as planned"


def write(folder: Path, model: str, **stage: Any) -> str:
    rows = [{"question": f"{n} + 1 ?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"data": {"source": str(folder / "rows.jsonl")}, "batch": {"sequences": 4}, **stage}
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": model},
        "format": "r1_zero",
        "stages": {"sft": sft},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


def test_epochs_in_steps_and_steps_in_epochs() -> None:
    ten = Amount(10)
    assert length_in_words(SupervisedOptions(epochs=2, batch={"sequences": 4}), ten) == "2 epochs of 10 rows, 6 steps"
    assert length_in_words(SupervisedOptions(steps=6, batch={"sequences": 4}), ten) == "6 steps, 2 epochs of 10 rows"
    rl = ReinforcementOptions(epochs=3, batch={"problems": 4})
    assert length_in_words(rl, ten) == "3 epochs of 10 problems, 8 steps" and length_in_words(rl, None) == "3 epochs"
    filtered = SupervisedOptions(steps=6, batch={"sequences": 4}, data={"prompt_length": {"max_tokens": 9}})
    assert length_in_words(filtered, ten) == "6 steps, 2 epochs of at most 10 rows"


def test_tokens_at_a_time_by_the_data() -> None:
    amount = Amount(10, (100, 200, 300))
    assert amount.pack(16384, 32) == 6400, "a step has fewer than the budget allows"
    assert amount.pack(4096, 32) == 4096 and amount.pack(256, 32) == 300, "no sequence is split"
    assert Amount(10).pack(256, 32) is None


def test_a_local_model_and_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_for_inference("tiny", "cpu")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    for command in (["plan"], ["train", "--dry-run"]):
        assert main([command[0], write(tmp_path, str(tmp_path / "model"), epochs=2), *command[1:]]) == 0
        out = capsys.readouterr().out
        assert "2 epochs of 10 rows, 6 steps" in out and "warning" not in out
        assert re.search(r"model +\S+; \w+, [0-9.]+ million parameters, context 512", out)
        assert re.search(r"memory .*; in bf16, as on a GPU; \d+ tokens at a time by a step's data", out)


def test_a_plan_for_a_cpu_has_the_packs_that_the_run_will_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lemma.planning.stage_memory.host_memory", lambda: 2**30)
    words = ["plan", write(tmp_path, "tiny"), "--set", "run.device=cpu"]
    told = "; 2,048 tokens at a time by the memory of this machine"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert told in out and "at most 16,384 tokens at a time, fewer if memory is short\n" in out
    assert main([*words[:-1], "run.device=cuda"]) == 0
    assert "4 sequences a step, as many tokens at a time as fit\n" in capsys.readouterr().out
    assert main([*words, "--set", "stages.sft.batch.token_budget=4096"]) == 0 and told not in capsys.readouterr().out


def test_more_than_the_machine_has_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan, by a dry run and at the start of a run, on a CPU that is named or is all there is."""
    monkeypatch.setattr("lemma.planning.stage_memory.host_memory", lambda: 2**30)
    monkeypatch.setattr("lemma.planning.local_gpus.DRIVERS", ())
    recipe = write(tmp_path, "tiny", batch={"sequences": 4, "token_budget": 1_000_000}, steps=1)
    said = (
        r"stage sft needs up to \d+\.\d GiB and this machine has 1\.0; lower stages\.sft\.batch\.token_budget to 2048\n"
    )
    for command in (["plan", recipe], ["train", recipe, "--dry-run"]):
        assert main([*command, "--set", "run.device=cpu"]) == 1
        out = capsys.readouterr().out
        assert re.search(f"\nwarning: {said}", out)
        assert out.endswith(f"\n{CANNOT}: a stage does not fit into memory (see above).\n")
        assert main(command) == 0, "another machine may have a GPU"
        assert re.search(f"\nwarning: without a GPU, {said}", capsys.readouterr().out)
        assert main([*command, "--set", "stages.sft.batch.token_budget=2048"]) == 0
        assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(("length", "is_said"), [(8, False), (4000, True)])
def test_a_run_begins_with_what_its_data_need(
    length: int,
    is_said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget that the data never fill is no fault."""
    for part in load_for_inference("tiny", "cpu"):
        part.save_pretrained(tmp_path / "model")
    recipe = load_recipe(write(tmp_path, str(tmp_path / "model"), batch={"sequences": 4, "token_budget": 10**6}))
    rows = [{"question": "1 + 1 ?", "answer": f"{'1 + ' * length}1\n#### 2"} for _ in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("lemma.planning.stage_memory.host_memory", lambda: 2**30)
    found = memory_warnings(recipe, ["sft"], has_gpu=False)
    assert ["stage sft needs " in one and "up to" not in one for one in found] == [True] * is_said
    assert not memory_warnings(recipe, ["sft"], has_gpu=True)


@pytest.mark.parametrize(
    ("ranks", "servers", "slots"),
    [
        *((None, 0, None), (4, 0, None), (2, 0, 8), (4, 0, 2)),
        *((None, 2, None), (1, 2, None), (2, 2, None), (3, 5, None), (1, 2, 6)),
    ],
)
def test_a_plan_divides_the_memory_of_a_cpu_as_the_run_does(
    ranks: int | None, servers: int, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: dict[str, float] = {}

    def budget_of(who: str) -> Callable[..., int]:
        return lambda shape, model, precision, memory, **_: shares.setdefault(who, memory) and 2048

    for module in ("lemma.planning.stage_memory", "lemma.runs.fitted"):
        monkeypatch.setattr(f"{module}.host_memory", lambda: 2**30)
    monkeypatch.setattr("lemma.planning.stage_memory.host_budget", budget_of("plan"))
    monkeypatch.setattr("lemma.runs.fitted.host_budget", budget_of("run"))
    cluster = {"ranks": ranks, "slots": slots}
    grpo = {"steps": 1, "rollout": {"engine": {"name": "native", "servers": servers}}}
    recipe = load_values(Recipe, {"run": {"device": "cpu"}, "cluster": cluster, "stages": {"grpo": grpo}}, [])
    describe(recipe)
    with joined(RankWorld(size=ranks or 1)):
        monkeypatch.setattr("lemma.runs.fitted.gather_over_ranks", lambda value: [value])
        use_slots(usual_slots(recipe, ranks or 1))
        options = next(iter(recipe.stages.values()))
        stage: Any = SimpleNamespace(model=recipe.model, options=options, say=lambda text: None)
        fit_budget(stage, tiny_policy(), BudgetOptions(), OptimOptions())
    assert shares["plan"] == shares["run"]


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, "nobody/nothing", eval={"benchmarks": ["gsm8k"]})
    assert main(["plan", recipe]) == 1
    out = capsys.readouterr().out
    assert out.endswith(f"\n{CANNOT}: something that it needs is missing or wrong (see above).\n")
    assert "warning: the model nobody/nothing is not on this machine" in out
    assert "warning: stage sft: benchmark gsm8k: the dataset openai/gsm8k is not on this machine" in out
    assert main(["plan", recipe, "--set", f"model.path={tmp_path}/typo"]) == 1
    assert f"warning: there is no model folder {tmp_path}/typo" in capsys.readouterr().out
    assert main(["train", recipe, "--dry-run"]) == 1
    assert CANNOT in capsys.readouterr().out


TOOL = """#!/bin/sh
case "$*" in
  *--id=0*) echo 1024 ;;
  *--id=1*) echo 65536 ;;
  *--id=GPU-small*) echo 1024 ;;
  *--id=*) exit 6 ;;
  *) echo 1024; echo 65536 ;;
esac
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, and NVIDIA's tool: of two GPUs the first has 1 GiB and the second 64 GiB."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setattr("lemma.planning.local_gpus.DRIVERS", (str(tool),))
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.mark.usefixtures("gpus")
def test_a_budget_is_compared_with_the_memory_of_the_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(tmp_path, "tiny", batch={"sequences": 4, "token_budget": 1_000_000}, steps=1)
    said = (
        "\nwarning: stage sft needs up to 14.4 GiB of a GPU and here it has 1.0; lower stages.sft.batch.token_budget "
        f"to 65536\n\n{CANNOT}: a stage does not fit into memory (see above).\n"
    )
    for device in ("auto", "cuda"):
        assert main(["plan", recipe, "--set", f"run.device={device}"]) == 1
        assert capsys.readouterr().out.endswith(said)
    assert main(["plan", recipe, "--set", "stages.sft.batch.token_budget=65536"]) == 0
    assert main(["plan", recipe, "--gpu", "h100-80"]) == 0, "the plan is for another machine"
    assert main(["plan", recipe, "--set", "cluster.ranks=1"]) == 0, "CUDA may count from the larger one"
    by_bus, by_speed = "PCI_BUS_ID", "FASTEST_FIRST"
    for shown, order, code in (
        *(("1", by_bus, 0), ("0", by_bus, 1), ("0,1", by_bus, 1), ("", by_bus, 0), ("-1", by_bus, 0)),
        *(("1", by_speed, 0), ("0", by_speed, 0), ("0,1", by_speed, 1), ("", by_speed, 0), ("-1", by_speed, 0)),
        *(("GPU-small", by_speed, 1), ("GPU-none", by_speed, 0)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
        assert main(["plan", recipe]) == code, (shown, order)


@pytest.mark.parametrize("path", ["tiny", "model"])
def test_an_adapter_for_a_layer_that_the_model_does_not_have(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if path == "model":
        path = str(tmp_path / path)
        for part in load_for_inference("tiny", "cpu"):
            part.save_pretrained(path)
    recipe = write(tmp_path, path)
    assert main(["plan", recipe, "--set", "model.lora.targets=[q_proj, v_porj]"]) == 1
    refused = r"warning: model.lora.targets names 'v_porj', which is not a linear layer .*did you mean 'v_proj'\?"
    assert re.search(refused, capsys.readouterr().out)
    assert main(["plan", recipe, "--set", "model.lora.targets=[q_proj, v_proj]"]) == 0
    assert main(["plan", recipe, "--set", "model.lora.modules_to_save=[lm_haed]"]) == 1
    refused = r"warning: model.lora.modules_to_save names 'lm_haed', which is not a layer .*did you mean 'lm_head'\?"
    assert re.search(refused, capsys.readouterr().out)
    assert main(["plan", recipe, "--set", "model.lora.modules_to_save=[lm_head]"]) == 0


@pytest.mark.parametrize("path", ["tiny", "model"])
def test_heads_that_vllm_cannot_run_on_a_cpu(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path == "model":
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 12}))
        path = str(tmp_path / path)
    recipe = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {"path": path, "tiny": {"hidden": 48, "heads": 4}},
        "stages": {"rl": {"kind": "rl", "steps": 1, "data": {"arithmetic": {}}, "rollout": {"engine": "vllm"}}},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    refused = (
        "vLLM cannot run attention heads of size 12 on a CPU (only 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)"
    )
    assert main(["plan", str(file)]) == 1
    assert f"warning: {refused}; write `engine: native` in stage rl" in capsys.readouterr().out
    size = ["model.tiny.hidden=128"] if recipe["model"]["path"] == "tiny" else ["model.override.head_dim=64"]
    main(["plan", str(file), "--set", *size])
    assert "attention heads" not in capsys.readouterr().out
    main(["plan", str(file), "--set", "run.device=cuda"])
    assert "attention heads" not in capsys.readouterr().out


@pytest.mark.usefixtures("gpus")
def test_a_model_that_no_gpu_here_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in load_for_inference("tiny", "cpu"):
        part.save_pretrained(tmp_path / "model")
    recipe = write(tmp_path, str(tmp_path / "model"), batch={"sequences": 4, "token_budget": 1_000_000})
    assert main(["plan", recipe]) == 0, "a budget that the data never fill is no fault"
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", recipe, "--set", "stages.sft.batch.token_budget=null"]) == 1
    needs = (
        r"stage sft needs at least \d\.\d GiB of a GPU and here it has 1\.0; take a smaller model, or `model.lora`\n"
    )
    assert re.search(needs, capsys.readouterr().out)


def test_a_hub_model_is_told_by_its_configuration(tmp_path: Path) -> None:
    recipe = write(tmp_path, "someone/small", eval={"benchmarks": ["someone/absent"]})
    files = {"models/someone/small": {"config.json": json.dumps(CONFIG).encode()}}
    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"}
    with serve(Hub(files)) as hub:
        env = {name: value for name, value in os.environ.items() if name not in offline}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "lemma", "plan", recipe]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "someone/small; qwen2, 494 million parameters, context 32,768" in done.stdout
    assert re.search(r"memory +\d+\.\d GiB: weights", done.stdout)
    assert f"benchmark absent: there is no dataset 'someone/absent' on {hub.url}" in done.stdout
    assert not any("safetensors" in path for path, _ in hub.files_sent())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--gpu", "nosuch"], "no GPU is called 'nosuch'"),
        (["--ranks", "0"], "a number of at least 1"),
        (["--gpu", "h100", "--length", "0"], "a number of at least 1"),
        (["--against", "nosuch"], "nosuch"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], said: str
) -> None:
    assert main(["plan", write(tmp_path, "tiny"), *option]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err
