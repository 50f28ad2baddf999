"""Commands that share their work over machines refuse to mix what these have read: weights, problems, code. Here a
machine is a folder of its own, from which a rank reads all files."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.ranks import rank
from lemma.models.same_weights import _sum_of_bits
from tests.cluster.crew import Crew
from tests.models.small import SHAPE, tiny_policy

RECIPE = """
run: {dir: run, device: cpu}
format: {name: r1_zero, preamble: false}
stages:
  rl: {kind: rl, data: {source: problems.jsonl}, rewards: [mine.py:same], rollout: {max_tokens: 2}}
"""
REWARD = "def same(completion):\n    return {}\n"
PLACES = ["--device", "cpu"]
COMMANDS = {
    "eval": ["--benchmarks", "problems.jsonl", "--to", "../out", "--max-tokens", "2", "--format", "r1_zero", *PLACES],
    "debug": ["--recipe", "recipe.yaml", "--groups", "2", "--group-size", "1", *PLACES],
    "generate": ["--file", "questions.txt", "--max-tokens", "2", *PLACES],
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders with the same files, and next to each file one that differs."""
    from lemma.engines.vllm.weights import write_model

    whole = tmp_path_factory.mktemp("machines")
    for number in range(2):
        folder = whole / f"machine-{number}"
        write_model(tiny_policy(), folder / "model")
        write_model(tiny_policy(seed=number), folder / "model.other")
        (folder / "recipe.yaml").write_text(RECIPE)
        for ending, more in (("", 0), (".other", number)):
            rows = [{"question": f"what is {n} + 2 ?", "answer": str(n + 2 + more)} for n in range(4)]
            (folder / f"problems.jsonl{ending}").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / f"questions.txt{ending}").write_text(f"what is 2 + 3 ?\nwhat is 2 + {more} ?\n")
            (folder / f"mine.py{ending}").write_text(REWARD.format(1 + more))
    return whole


def said(machines: Path, words: list[str], other: str) -> tuple[int, str]:
    """Run a command on this rank, which finds other content in one of the files; what it says of a mistake."""
    folder, before = machines / f"machine-{rank()}", Path.cwd()
    own, aside = folder / other, folder / "aside"
    own.rename(aside)
    (folder / f"{other}.other").rename(own)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(words)
    finally:
        os.chdir(before)
        own.rename(folder / f"{other}.other")
        aside.rename(own)
    return code, errors.getvalue()


@pytest.mark.parametrize(
    ("command", "other", "sentence"),
    [
        ("eval", "model", "the weights of the model"),
        ("eval", "problems.jsonl", "the problems of problems"),
        ("debug", "model", "the weights of the model"),
        ("debug", "problems.jsonl", "the problems"),
        ("debug", "mine.py", "what reward 1 (same) is computed from"),
        ("generate", "model", "the weights of the model"),
        ("generate", "questions.txt", "the questions, as prompts"),
    ],
)
def test_what_machines_read_differently_is_refused(
    crew: Crew, machines: Path, command: str, other: str, sentence: str
) -> None:
    told = crew.run(2, said, machines, [command, "model", *COMMANDS[command]], other)
    assert [code for code, _ in told] == [2, 2], told
    assert f"finds other content for {sentence} than rank 0 on " in told[0][1] and "rank 1 on " in told[0][1]
    assert not (machines / "out").exists(), "nothing was begun"


def evaluated(folder: Path) -> str:
    """An evaluation of a stage, in a run folder that the ranks do not share."""
    from lemma.engines import make_engine
    from lemma.engines.engine_options import NativeOptions
    from lemma.evaluation.during_training import StageEvaluator
    from lemma.evaluation.eval_settings import EvalOptions
    from lemma.formats import make_format

    policy = tiny_policy()
    sums = {"name": "sums", "source": "arithmetic", "arithmetic": {"operations": 1, "count": 4}}
    options = EvalOptions.model_validate({"benchmarks": [sums], "max_tokens": 2})
    own = folder / f"machine-{rank()}" / "run"
    evaluator = StageEvaluator(options, policy, make_format("r1_zero"), own, name="rl")
    try:
        evaluator.run(make_engine(NativeOptions(cache_tokens=8 * SHAPE.context), policy, 0), 1)
    except UserError as error:
        return str(error)
    return "nothing"


def test_an_evaluation_during_training_names_an_option_of_the_recipe(crew: Crew, tmp_path: Path) -> None:
    told = crew.run(2, evaluated, tmp_path)
    assert all("does not see what rank 1 on " in text and "; set run.dir to a folder" in text for text in told), told
    assert not (tmp_path / "machine-1").exists(), "it was not there before"


def test_any_part_of_a_weight_has_its_sum() -> None:
    """Whatever the place in memory at which it begins."""
    whole = torch.arange(40, dtype=torch.bfloat16)
    assert [_sum_of_bits(whole[n : n + 21]) for n in range(4)] == [
        _sum_of_bits(whole[n : n + 21].clone()) for n in range(4)
    ]
