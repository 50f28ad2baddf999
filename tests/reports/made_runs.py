"""Run folders written by the real parts (recipe, metrics, log, journals, tokenizer) with content made here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lemma.core.events import Measured, Said, StageStarted
from lemma.core.files import JsonLines
from lemma.core.types import Group, Message, Problem, write_tokens
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.results import make_report, write_report
from lemma.models.tiny import tiny_tokenizer
from lemma.recipe import load_recipe
from lemma.reporting.logfile import LogFile
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal import Journal
from lemma.rollouts.token_notes import NOTES, TokenNotes, notes_path

TINY = tiny_tokenizer()


def recipe(folder: Path, **stage: Any) -> None:
    """The resolved recipe of a run with one stage of reinforcement, as a run writes it."""
    own = {
        "kind": "rl",
        "steps": 1000,
        "data": {"arithmetic": {"count": 60, "operations": 2}},
        "rewards": ["accuracy"],
        "rollout": {"max_tokens": 40},
        "algorithm": {"name": "grpo", "group_size": 4},
    }
    content = {
        "run": {"dir": str(folder), "device": "cpu"},
        "model": {"path": "tiny"},
        "format": {"name": "r1_zero", "preamble": False},
        "stages": {"grpo": own | stage},
    }
    folder.mkdir(parents=True, exist_ok=True)
    source = folder.parent / f"{folder.name}.yaml"
    source.write_text(yaml.safe_dump(content))
    (folder / "recipe.yaml").write_text(load_recipe(source).to_yaml())
    (folder / "run.json").write_text(json.dumps({"digest": "x", "threads": 1, "created": "2026-01-02T03:04:05"}))


def metrics_row(step: int) -> dict[str, Any]:
    """Numbers that tell from which step they are."""
    return {
        "reward/mean": 1 - math.exp(-step / 300) + 0.01 * math.sin(step),
        "rewards/accuracy/mean": 0.9 * (1 - math.exp(-step / 300)),
        "right": min(1.0, step / 1000),
        "entropy/sampled": 2.0 / (1 + step / 100),
        "length/mean": 100.0 + step,
        "groups/live": 0.5,
        "grad_norm": 10.0 ** (step % 5 - 2),
        "loss": -0.1,
        "lr": 1e-6,
        "odd/number": float("nan") if step == 3 else float(step),
    }


def measure(folder: Path, steps: Sequence[int], warnings: dict[int, str] | None = None, total: int = 1000) -> None:
    lines, log = JsonLines(folder / "metrics.jsonl"), LogFile(folder / "run.log")
    log(StageStarted("grpo", 0, total))
    for step in steps:
        row = metrics_row(step)
        timings = {"seconds": 2.0, "generate_seconds": 1.2, "update_seconds": 0.5, "tokens_per_second": 1000.0 + step}
        timings["peak_memory_gib"] = 0.3
        apart = {**timings, "held_by": "generate"}
        lines.append({"stage": "grpo", "step": step, "axis": "train", **row, "timings": apart})
        log(Measured("grpo", step, "train", row, timings, "generate"))
        if warnings and step in warnings:
            log(Said(f"step {step}: {warnings[step]}", "warning"))
    lines.close()
    log.close(False)


def write_byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer with one token for every byte, where the finished model of the stage keeps it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    final = folder / "stages" / "grpo" / "final"
    final.mkdir(parents=True)
    tokenizer.save(str(final / "tokenizer.json"))
    return tokenizer


def sample(step: int, group: int, number: int, said: str | Sequence[int], **changes: Any) -> Episode:
    """A sample of words of the built-in vocabulary, or of the ids of another one."""
    ids = np.array(TINY.encode(said) if isinstance(said, str) else said, dtype=np.int32)
    values: dict[str, Any] = {
        "key": ("grpo", step, group),
        "sample": number,
        "problem_id": f"problem-{group % 7}",
        "context": np.array(TINY.encode("User: how many ? Assistant: <think>"), dtype=np.int32),
        "ids": ids,
        "logprobs": np.linspace(-0.01, -4.0, len(ids)).astype(np.float32),
        "kept": np.zeros(len(ids), dtype=np.float32),
        "finish": "stop",
        "text": said if isinstance(said, str) else "",
        "answer": "10",
        "gold": ("10",),
        "format_ok": True,
        "verdict": "right" if number % 2 == 0 else "wrong",
        "reason": "exact" if number % 2 == 0 else "not equal",
        "rewards": {"accuracy": 1.0 - number % 2},
        "reward": 1.0 - number % 2,
    }
    return Episode.at_once(**(values | changes))


def write_journal(folder: Path, step: int, samples: Sequence[Episode]) -> Path:
    path = folder / "stages" / "grpo" / "journal" / f"step-{step:06d}.jsonl"
    journal = Journal(path)
    for one in samples:
        journal.append(one)
    journal.finish()
    journal.close()
    return path


def log_ratio(place: int) -> float:
    """Of the token at this place of a sample, after the step's updates."""
    return 0.1 * (place % 5 - 2)


def write_notes(folder: Path, step: int, samples: Sequence[Episode]) -> Path:
    """What updates would note: advantages of 1 and -1, two updates, and the last sample of each group left out."""
    notes, trajectories = TokenNotes(), []
    for one in samples:
        (trajectory,) = one.trajectories()
        trajectory.attempt = (int(one.key[2]), one.sample)
        trajectory.token_fields["advantage"] = np.full(len(trajectory), 2 * float(one.reward or 0) - 1)
        write_tokens("old", [trajectory], [one.logprobs + 0.01])
        if one.sample != 3:
            notes.take([trajectory], [one.logprobs])
            notes.take([trajectory], [one.logprobs + 0.01 + [log_ratio(i) for i in range(len(one.ids))]])
        trajectories.append(trajectory)
    place = folder / "stages" / "grpo" / NOTES
    notes.write(place, step, [Group(Problem((Message("user", "how many ?"),)), trajectories)])
    return notes_path(place, step)


def small_run(folder: Path, steps: int = 6) -> Path:
    """A few steps of two groups of four."""
    recipe(folder, steps=steps)
    measure(folder, range(1, steps + 1), {2: "90% of the completions are cut off; raise `rollout.max_tokens`"}, steps)
    for step in range(1, steps + 1):
        samples = [
            sample(step, 2 * step + g, n, f"{step} + {g} = {step + g} ; {n} * 2 = {2 * n} </think>")
            for g in range(2)
            for n in range(4)
        ]
        write_journal(folder, step, samples)
        write_notes(folder, step, samples)
    return folder


def long_run(folder: Path, steps: int, samples: int, tokens: int) -> Path:
    """A long run. All its journals have the content of one: what is measured is reading them."""
    recipe(folder, steps=steps)
    measure(folder, range(1, steps + 1), total=steps)
    draw = np.random.default_rng(0)
    made = [
        sample(1, n // 8, n % 8, draw.integers(12, len(TINY), size=tokens).tolist(), finish="length")
        for n in range(samples)
    ]
    for first in (write_journal(folder, 1, made), write_notes(folder, 1, made)):
        for step in range(2, steps + 1):
            os.link(first, first.with_name(f"step-{step:06d}{first.suffix}"))
    return folder


def evaluate(folder: Path, right: list[bool]) -> None:
    """A finished evaluation of one sample a problem, as `lemma eval` writes it."""
    settings = {
        "metric": "avg", "ties": "average", "n": len(right), "k": 1, "temperature": 0.0, "top_p": 1.0, "max_tokens": 9,
        "format": {"name": "boxed"}, "format_hash": "x", "grader": "lemma", "engine": "native", "seed": 0,
    }  # fmt: skip
    said = {"prompt": "", "completion": "", "extracted": "1", "gold": ["1"], "reason": "", "format_ok": True}
    said |= {"faults": [], "finish": "stop", "tokens": 3, "reasoning": None}
    rows = [
        EvalRow("held-out", f"p{i}", 0, f"question {i}", verdict="right" if ok else "wrong", **said)
        for i, ok in enumerate(right)
    ]
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(
        json.dumps({"version": 1, "model": {"name": "m"}, "benchmarks": {"held-out": settings}})
    )
    write_report(folder, make_report({"name": "m"}, {"held-out": settings}, {"held-out": rows}))
