"""The demonstration: train the built-in model, then show what it can do on problems it has never seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lemma.core.types import Problem
from lemma.data.arithmetic import generate
from lemma.data.options import ArithmeticOptions
from lemma.formats import Format
from lemma.formats.encode import encode_prompt
from lemma.grading import grade

HELD_OUT = 500
BATCH = 250
MAX_TOKENS = 80


@dataclass(frozen=True)
class Answered:
    problem: Problem
    text: str
    answer: str | None
    is_right: bool
    is_well_formed: bool


def held_out_problems(options: ArithmeticOptions, count: int = HELD_OUT) -> list[Problem]:
    """Problems of the test split: no training problem, nor another wording of one, is among them."""
    return [item.problem for item in generate(options, "test", 0, count)]


@torch.no_grad()
def answer(model: Any, tokenizer: Any, fmt: Format, problems: Sequence[Problem]) -> list[Answered]:
    """Greedy answers, graded."""
    results: list[Answered] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(problems), BATCH):
        batch = problems[start : start + BATCH]
        prompts = [encode_prompt(fmt, problem, tokenizer).tolist() for problem in batch]
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for problem, text in zip(batch, texts, strict=True):
            parsed = fmt.parse(text)
            right = parsed.answer is not None and grade(parsed.answer, problem.gold or "").kind == "right"
            results.append(Answered(problem, text, parsed.answer, right, parsed.ok))
    return results


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(results: Sequence[Answered]) -> str:
    """Accuracy with its interval, and three answers as the model wrote them."""
    right, count = sum(r.is_right for r in results), len(results)
    low, high = interval(right, count)
    formed = sum(r.is_well_formed for r in results) / count
    lines = [
        f"Held-out problems answered greedily: {right} of {count} right, {right / count:.1%} "
        f"(95% interval {low:.1%} to {high:.1%}); well-formed answers {formed:.1%}.",
        "",
    ]
    for result in results[:3]:
        mark = "right" if result.is_right else f"wrong, it is {result.problem.gold}"
        lines += [f"  Q: {result.problem.question}", f"  A: {result.text}   [{mark}]", ""]
    return "\n".join(lines)
