"""Stages of one run hold the same questions out of the same rows, whatever they are called and in whatever order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lemma.core.types import Message, Problem
from lemma.data.held_out import question_of
from lemma.formats import make_format
from lemma.models.tiny import tiny_tokenizer
from lemma.stages import supervised
from lemma.stages.preference import examples
from lemma.stages.preference.preference_options import PreferenceOptions
from lemma.stages.reinforcement import rl_tasks
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.supervised_options import SupervisedOptions
from tests.algorithms import toy
from tests.stages.test_rl_validation import run

Sides = tuple[set[str], set[str]]
BARE = make_format({"name": "r1_zero", "preamble": False})


def stage(name: str, seed: int = 3) -> Any:
    return SimpleNamespace(name=name, seed=seed, say=lambda text: None, warn=lambda text: None)


def options(path: Path, share: float) -> dict[str, Any]:
    return {
        "data": {"source": str(path), "reader": "lemma" if "lemma" in path.name else "auto"},
        "validation": {"share": share},
    }


def imitated(path: Path, share: float = 0.1) -> Sides:
    """The questions that a supervised stage trains on, and those that it holds out."""
    wanted = SupervisedOptions.model_validate(options(path, share))
    learnt, held = supervised._demonstrations(stage("sft"), wanted, BARE, tiny_tokenizer())
    return {one.problem.question for one in learnt}, {one.problem.question for one in held}


def sampled(path: Path, share: float = 0.1, seed: int = 3) -> Sides:
    """Those of a reinforcement stage."""
    wanted, own = ReinforcementOptions.model_validate(options(path, share)), stage("rl", seed)
    given = rl_tasks._given(own, wanted, BARE, tiny_tokenizer())
    tasks, held = rl_tasks._split(own, wanted, given, BARE, tiny_tokenizer())
    return {task.problem.question for _, task in tasks}, {one.question for one in held}


def compared(path: Path) -> list[set[str]]:
    """The names of those of a preference stage."""
    wanted = PreferenceOptions.model_validate(options(path, 0.1))
    sides = examples.prepare(stage("dpo"), wanted, BARE, tiny_tokenizer(), 96)
    return [{one.question for one in side} for side in sides]


def named(questions: set[str]) -> set[str]:
    return {question_of(Problem((Message("user", question),))) for question in questions}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_stages_of_every_kind_hold_out_the_same_questions(tmp_path: Path) -> None:
    asked = [f"{number // 10} pens . {number % 10} cards ?" for number in range(200)]
    path = write(
        tmp_path / "rows.jsonl", [{"question": q, "answer": f"so {n} .\n#### {n}"} for n, q in enumerate(asked)]
    )
    pairs = [{"prompt": q, "chosen": "pens", "rejected": "cards"} for q in reversed(asked)]
    (learnt, held), (_, measured) = imitated(path), sampled(path)
    assert measured == held and len(held) == 20 and not measured & learnt
    assert compared(write(tmp_path / "pairs.jsonl", pairs)) == [named(learnt), named(held)]
    larger = sampled(path, 0.2)[1]
    assert held < larger and len(larger) == 40
    assert sampled(path, seed=4)[1] != measured


def test_multiple_choice_questions_too(tmp_path: Path) -> None:
    rows = [
        {"dataset": "d", "problem": f"{n} ?", "choices": ["1", "2"], "answer": "A", "response": "so A"}
        for n in range(40)
    ]
    path = write(tmp_path / "lemma.jsonl", rows)
    held = [{question.split("\n")[0] for question in of(path)[1]} for of in (imitated, sampled)]
    assert held[0] == held[1] and len(held[0]) == 4


def test_rows_in_between_change_little(tmp_path: Path) -> None:
    """The place of a question in the order depends on nothing but the question and the seed."""
    rows = [{"question": f"{n} ?", "answer": f"so {n} .\n#### {n}"} for n in range(100)]
    every, half = (imitated(write(tmp_path / f"{len(own)}.jsonl", own)) for own in (rows, rows[::2]))
    even = {row["question"] for row in rows[::2]}
    assert len(every[1] & even & half[1]) == min(len(every[1] & even), len(half[1]))


def test_held_out_prompts_are_as_short_as_those_that_are_trained_on(tmp_path: Path) -> None:
    long = " ".join(["eva has pens ."] * 4)
    asked = [question if n % 2 else f"{long} {question}" for n, question in enumerate(toy.QUESTIONS)]
    path = write(tmp_path / "rows.jsonl", [{"question": q, "answer": "1"} for q in asked])
    world = run(
        tmp_path,
        data={"source": str(path), "prompt_length": {"max_tokens": 12}},
        validation={"share": 0.5},
    )
    folder = next((world.run / "evaluations" / "toy" / "validation").glob("step-*"))
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert samples and not any(long in sample["question"] for sample in samples)
