"""Few-shot prompts: solved examples from the training split in front of the question.

As chat turns, each example is a question of the user and the answer that the format would want. As text, there is no
chat template: `Question: ... Answer: ...` again and again, as base models are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lemma.core.errors import UserError
from lemma.core.random import permutation
from lemma.core.types import Demonstration, Message, Problem, content_id, problem_of
from lemma.data.choices import as_asked
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import load_rows
from lemma.evaluation.benchmarks import Benchmark, example_source
from lemma.formats import Format

ShotsAs = Literal["chat", "text"]
STOP = "\nQuestion:"
"""Where a model continues with a question of its own, its answer has ended."""


@dataclass(frozen=True)
class Shots:
    """`count` examples for each question, out of `pool`, which is in a drawn order that depends on the benchmark only.

    A question is never its own example. Where the pool has enough examples of the question's subject, they are all of
    that subject, as MMLU's are.
    """

    pool: tuple[Demonstration, ...]
    count: int
    kind: ShotsAs

    def of(self, problem: Problem) -> list[Demonstration]:
        others = [one for one in self.pool if one.problem.question != problem.question]
        same = [one for one in others if one.problem.subject == problem.subject]
        chosen = (same if problem.subject is not None and len(same) >= self.count else others)[: self.count]
        if len(chosen) < self.count:
            raise UserError(f"there are only {len(chosen)} examples to show", fix=f"write --shots {len(chosen)}")
        return chosen

    @property
    def digest(self) -> str:
        """A name for what may be shown."""
        return content_id([(one.problem.question, one.reasoning, one.response, one.answer) for one in self.pool])


def load_shots(benchmark: Benchmark, count: int, kind: ShotsAs, data_dir: str | Path | None) -> Shots:
    """The examples of a benchmark, from its training data."""
    source: DataOptions = example_source(benchmark, data_dir)
    items = [item for item in load_rows(source, 0) if problem_of(item).gold is not None]
    if benchmark.scoring == "generate":
        items = [as_asked(item) for item in items]
    order = permutation(len(items), 0, "benchmark", benchmark.name, "shots").tolist()
    pool = tuple(_demonstration(items[place]) for place in order)
    return Shots(pool, count, kind)


def _demonstration(item: Any) -> Demonstration:
    if isinstance(item, Demonstration) and (item.answer or item.response):
        return item
    problem = problem_of(item)
    return Demonstration(problem, reasoning="", answer=problem.gold)


def prompt_with(shots: Shots, fmt: Format, problem: Problem, tokenizer: Any) -> str:
    """The prompt of a question, its examples in front."""
    examples = shots.of(problem)
    write = _as_text if shots.kind == "text" else _as_chat
    return write(examples, fmt, problem, tokenizer)


def _as_chat(examples: Sequence[Demonstration], fmt: Format, problem: Problem, tokenizer: Any) -> str:
    turns: list[Message] = []
    for one in examples:
        turns += [Message("user", one.problem.question), Message("assistant", fmt.opening + fmt.target(one))]
    system = [message for message in problem.messages if message.role == "system"]
    rest = [message for message in problem.messages if message.role != "system"]
    prompt = fmt.prompt(replace(problem, messages=(*system, *turns, *rest)), tokenizer)
    if any(one.problem.question.strip() not in prompt for one in examples):
        raise UserError(
            f"the format {fmt.name} shows one turn only", fix="write `--shots-as text`, or another --format"
        )
    return prompt


def _as_text(examples: Sequence[Demonstration], fmt: Format, problem: Problem, tokenizer: Any) -> str:
    lead = f" {fmt.opening}" if fmt.opening else ""
    parts = []
    for one in examples:
        answer = fmt.target(one)
        parts.append(f"Question: {one.problem.question}\nAnswer:{lead}{answer if lead else ' ' + answer.strip()}")
    text = "\n\n".join([*parts, f"Question: {problem.question}\nAnswer:{lead}"])
    return (tokenizer.bos_token if fmt.wants_bos(tokenizer) else "") + text
