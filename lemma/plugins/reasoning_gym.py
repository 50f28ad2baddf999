"""reasoning-gym problems, made by one of its generators and scored by the generator's own scorer."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import Any, Literal

from pydantic import Field

from lemma.core.errors import UserError, nearest
from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import Action, Environment, EnvironmentOptions, Observation

UNFIT = {
    "game_of_life_halting": "its scorer pays 1.0 for any text",
    "prime_factorization": "its scorer breaks on every answer that is not a number",
}
"""Generators that are refused: their scorers would teach nonsense. `tests/environments` measures all of them."""

EXECUTES = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
"""Generators whose scorers run an answer as Python, here or in sympy: only arithmetic and lists get that far."""

SEEDS = {"train": 0, "dev": 1_000_003, "validation": 1_000_003, "test": 2_000_003}
FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "Abs", "abs", "asin", "acos", "atan", "sinh"})
LARGEST_POWER = 100
ITEM = "reasoning_gym"
# Score of a right answer; some scorers give slightly less than 1 to a different spelling.
RIGHT = 0.99


class GymProblem(Environment):
    """One question, one answer."""

    def __init__(self, options: ReasoningGym):
        self._options = options
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._reward: float | None = None

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        where = problem.extra.get(ITEM)
        if where is None:
            raise UserError(f"problem {problem.id} is not of reasoning-gym", fix="write `data: {source: environment}`")
        self._dataset = self._options.dataset(where["split"])
        self._entry, self._reward = self._dataset[where["number"]], None
        return []

    def step(self, said: Action) -> Observation:
        self._reward = scored(self._options.generator, self._dataset, said.answer, self._entry)
        return Observation(done=True)

    def score(self) -> Outcome:
        return Outcome(self._reward, None if self._reward is None else self._reward >= RIGHT)


class ReasoningGym(EnvironmentOptions):
    """Problems from a reasoning-gym generator, one response each, scored by the generator."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    """Problems from reasoning-gym."""
    turns: int = Field(1, ge=1, le=1)
    """Always 1."""
    generator: str = ""
    """Which generator, such as leg_counting."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The generator's own options."""
    problems_per_split: int = Field(1000, ge=1)
    """Problems in each of the splits train, dev and test, which have seeds of their own."""
    seed: int = Field(0, ge=0)
    """Seed of the problems."""
    allow_unfit: bool = False
    """Allow a generator whose scorer rewards nonsense or crashes."""

    def make(self) -> Environment:
        return GymProblem(self)

    def dataset(self, split: str) -> Any:
        seed = self.seed + SEEDS[split]
        return _dataset(self.generator, json.dumps(self.options, sort_keys=True), seed, self.problems_per_split)

    def problems(self, split: str) -> Sequence[Problem] | None:
        if split not in SEEDS:
            raise UserError(f"reasoning-gym has no split '{split}' here", fix=nearest(split, SEEDS))
        dataset = self.dataset(split)
        problems = []
        for number in range(self.problems_per_split):
            entry = dataset[number]
            golds = (str(entry["answer"]),) if entry.get("answer") is not None else ()
            problems.append(
                Problem(
                    (Message("user", str(entry["question"])),),
                    golds,
                    id=f"{self.generator}/{split}/{self.seed}/{number}",
                    source=f"reasoning_gym/{self.generator}",
                    extra={ITEM: {"split": split, "number": number}},
                )
            )
        return problems

    def check(self) -> None:
        known = generators()
        if self.generator not in known:
            raise UserError(f"reasoning-gym has no generator '{self.generator}'", fix=nearest(self.generator, known))
        if self.generator in UNFIT and not self.allow_unfit:
            raise UserError(
                f"generator {self.generator} is unfit for training: {UNFIT[self.generator]}",
                fix="choose another, or write `allow_unfit: true`",
            )
        try:
            self.dataset("train")[0]
        except Exception as error:
            raise UserError(
                f"generator {self.generator} refuses its options: {type(error).__name__}: {error}",
                fix="change `options` of the environment",
            ) from error


def generators() -> list[str]:
    """All generators of the installed reasoning-gym."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            "environment reasoning_gym needs the package reasoning-gym", fix=".venv/bin/pip install -e '.[gym]'"
        ) from None
    return sorted(DATASETS)


def scored(generator: str, dataset: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """The generator's score of an answer; 0 without an answer, or if scoring could execute it as a program."""
    if answer is None or (generator in EXECUTES and not is_harmless(answer)):
        return 0.0
    with redirect_stdout(StringIO()):
        return float(dataset.score_answer(answer, entry))


def is_harmless(answer: str) -> bool:
    """Whether an answer that will be run as Python is only arithmetic or lists, and cheap to compute."""
    try:
        tree = ast.parse(answer.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return not set(answer) & set("\"'()[]_.")
    for node in ast.walk(tree):
        if not isinstance(node, HARMLESS):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
            high = [
                one for one in ast.walk(node.right) if not isinstance(one, ast.Constant | ast.unaryop | ast.UnaryOp)
            ]
            values = [one.value for one in ast.walk(node.right) if isinstance(one, ast.Constant)]
            if any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Pow) for one in high):
                return False
            if any(not isinstance(value, int | float) or abs(value) > LARGEST_POWER for value in values):
                return False
    return True


HARMLESS = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Call, ast.List, ast.Tuple,
    ast.operator, ast.unaryop,
)  # fmt: skip


@lru_cache(maxsize=8)
def _dataset(generator: str, options: str, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    given = json.loads(options)
    if generator == "composite":
        given["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | one) for one in given.get("datasets", ())]
    return reasoning_gym.create_dataset(generator, **{**given, "seed": seed, "size": size})
