"""`lemma`, `lemma train` and `lemma plan` as a person meets them."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import lemma.cli as cli
from lemma.cli import COMMANDS, main
from lemma.recipe import load_recipe
from tests.models.gguf_made_here import made_model, write_gguf

RECIPE = """\
run: {dir: out}
stages:
  warm: {kind: supervised, steps: 5, data: {mix: [{source: a.jsonl, count: 3}, {source: org/set, fraction: 0.5}]}}
  sft: {epochs: 2, unique_examples: 64, batch: {sequences: 1}, validation: {share: 0.1, every: 4}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")


def test_a_dry_run_writes_the_resolved_recipe_and_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe.yaml", "--dry-run", "--skip", "warm", "--set", "stages.sft.optim.lr=0"]) == 0
    assert [path.name for path in Path("out").iterdir()] == ["recipe.resolved.yaml"]
    assert load_recipe("out/recipe.resolved.yaml") == load_recipe("recipe.yaml", ["stages.sft.optim.lr=0"])
    out = capsys.readouterr().out
    for line in [
        "stage 1: warm (supervised, skipped)",
        "stage 2: sft (supervised)",
        "  starts from  the end of warm",
        "  length       2 epochs of 64 rows, 128 steps",
        "  data         built-in arithmetic (20000 problems of 6 operations, mixed), the first 64 rows",
        "  validation   10.0% of the rows, every 4 steps and at the end",
        "  batch        1 sequence a step, at most 16,384 tokens at a time, on a GPU as many as fit",
        "  optimiser    adamw, lr 0 constant, no warm-up",
        "The resolved recipe is in out/recipe.resolved.yaml. Nothing was loaded.",
    ]:
        assert line in out.splitlines()


FLYING = ["--set", "stages.rl.rollout.lag=flying"]
RL = """
run: {dir: out, device: cpu}
stages:
  rl: {steps: 1, data: {arithmetic: {count: 9}}, rollout: {max_tokens: 4}, algorithm: grpo}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks 0 is not a number of processes"),
        (["--speakers", "2"], "any more, servers do; write `rollout.engine: {name: native, servers: 2}` in the stage"),
        (["--ranks", "2", "--set", "cluster.shard=weights"], "cluster.shard: weights leaves no whole weights"),
        ([*FLYING, "--set", "stages.rl.rollout.engine=transformers"], "of the engine transformers cannot continue"),
    ],
)
def test_a_dry_run_refuses_what_cannot_run(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rl.yaml").write_text(RL, encoding="utf-8")
    assert main(["train", "rl.yaml", "--dry-run", *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == "" and not Path("out").exists()


def test_a_plan_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe.yaml", "--set", "model.path=org/model", "--set", "model.lora={r: 4}"]) == 1
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]
    out = capsys.readouterr().out.splitlines()
    assert "  model        org/model; LoRA r 4, alpha 32; bf16 on a GPU, fp32 on a CPU" in out
    assert "  data         a.jsonl, 3 rows + org/set / train, 0.5 of the rows" in out


@pytest.mark.parametrize("config", ["{ nope", "[1]", '{"hidden_size": 8}'])
def test_a_plan_of_a_model_of_unknown_shape(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(config)
    assert main(["plan", "recipe.yaml", "--set", "model.path=model"]) == 1
    assert "memory       unknown: model/config.json does not tell the shape of the model" in capsys.readouterr().out


def test_a_plan_of_a_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    model = made_model()
    model.save_pretrained("folder")
    file = write_gguf(Path("small.gguf"), model)
    told = []
    for path in ("folder", str(file)):
        assert main(["plan", "recipe.yaml", "--set", f"model.path={path}"]) == 1, "the data are not there"
        told.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory")])
    assert told[0] == told[1] and "weights" in told[0][0]
    file.write_bytes(file.read_bytes()[:100])
    assert main(["plan", "recipe.yaml", "--set", f"model.path={file}"]) == 1
    assert "memory       unknown: the file small.gguf is damaged or was cut short" in capsys.readouterr().out


ROWS = """\
{"prompt": [{"role": "user", "content": "tom"}], "target": null, "reward_model": {"ground_truth": "1"}}
{"prompt": [{"role": "user", "content": "eva"}], "target": [{"role": "assistant", "content": "2"}], \
"reward_model": {"ground_truth": "2"}}
"""


@pytest.mark.filterwarnings("default::lemma.core.errors.LemmaWarning")
def test_a_warning_is_a_sentence_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("one.yaml").write_text("run: {threads: 1, device: cpu}\nstages: {sft: {steps: 1, data: {source: rows.jsonl}}}")
    sentence = "warning: 1 of 2 rows of 'rows.jsonl' lack a solution to imitate and were left out"
    assert main(["train", "one.yaml", "--set", "stages.sft.batch.token_budget=1000000000"]) == 0
    out = capsys.readouterr().out
    assert sentence in out.splitlines() and "warning: stage sft needs up to " in out
    assert sentence.partition(": ")[2] in Path("runs/run/run.log").read_text()
    assert main(["data", "prepare", "correct", "rows.jsonl", "--to", "right.jsonl"]) == 0
    assert f"lemma: {sentence}" in capsys.readouterr().err.splitlines()


def test_only_leaves_the_others_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe.yaml", "--dry-run", "--only", "sft"]) == 0
    assert "stage 1: warm (supervised, skipped)" in capsys.readouterr().out


def test_help_lists_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone
    assert all(name in alone for name in COMMANDS)
    assert main(["train", "--help"]) == 0
    options = capsys.readouterr().out
    assert "--dry-run" in options and "stages.NAME.optim: The optimiser and its schedule." in options
    assert "  lr [1e-05]                  Peak learning rate. (a number of at least 0)" in options


def test_every_command_can_be_asked_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: lemma {name} ")


def test_every_command_is_a_file_of_its_own() -> None:
    for name in COMMANDS:
        assert callable(importlib.import_module(f"lemma.cli.{name}").add)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lemma 0.")


def test_help_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "lemma", "--help"], check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 0.5


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = "lemma train --help | true; echo ${PIPESTATUS[0]}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == "" and done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "lemma: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"),
            2,
            "lemma: error: No space left on device (out/x); free some space and give the same command again\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "out/x"),
            2,
            "lemma: error: Permission denied (out/x); check who may read and write there\n",
        ),
    ],
)
def test_what_ends_a_command(
    trouble: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise trouble

    monkeypatch.setattr("lemma.cli.plan.run", fail)
    assert main(["plan", "recipe.yaml"]) == code
    assert capsys.readouterr().err == said


def test_a_defect_of_ours_is_not_dressed_up_as_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str], *, is_program: bool) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main([])
