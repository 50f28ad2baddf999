"""How much data a stage has and how long its sequences are, where both are quickly known without loading a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError, warnings_said
from lemma.core.types import Problem
from lemma.data.choices import as_asked
from lemma.data.data_options import DataOptions, journal_place
from lemma.data.load_rows import load_demonstrations, load_judged, load_preferences, load_problems
from lemma.data.sources import BUILT_IN, files_of
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration, encode_prompt, encode_text
from lemma.recipe import Recipe
from lemma.runs.run_options import StageOptions
from lemma.stages.preference.preference_options import PreferenceOptions
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import gold_wanted
from lemma.stages.supervised_options import SupervisedOptions

# Files of at most so many bytes are read for a plan.
SMALL = 64 << 20
# Sequences that are measured, from everywhere in the data.
MEASURED = 256


@dataclass(frozen=True)
class Amount:
    """Rows that a stage learns from, before `data.prompt_length` leaves any out, and lengths in tokens of some of its
    sequences; none where the tokenizer is not on this machine."""

    rows: int
    lengths: tuple[int, ...] = ()

    def pack(self, budget: int, sequences: int) -> int | None:
        """Tokens that are computed at a time: those of a step, no more than the budget, but never less than the longest
        sequence."""
        if not self.lengths:
            return None
        step = round(sequences * sum(self.lengths) / len(self.lengths))
        return max(max(self.lengths), min(budget, step))


def amount_of(recipe: Recipe, stage: StageOptions, say: Callable[[str], None] = lambda fault: None) -> Amount | None:
    """None where the data are large, elsewhere or faulty: a plan takes seconds. What is wrong with rows is said."""
    try:
        if not _is_quick(stage):
            return None
        with warnings_said(lambda text: None):
            return _amount(recipe, stage, say)
    except UserError:
        return None  # the check of files, or the run itself, says what is wrong


def _is_quick(stage: StageOptions) -> bool:
    data = getattr(stage, "data", None)
    if not isinstance(data, DataOptions):
        return False
    size = 0
    for source in data.mix or [data]:
        if source.source in BUILT_IN:
            continue
        files = [] if journal_place(source.source) is not None else files_of(source)
        if not files:
            return False
        size += sum(path.stat().st_size for path in files)
    return size <= SMALL


def _amount(recipe: Recipe, stage: StageOptions, say: Callable[[str], None]) -> Amount:
    tokenizer = _tokenizer(recipe)
    try:
        items = range(_made(stage)) if tokenizer is None and _made(stage) else _items(stage, recipe.run.seed)
    except UserError as error:
        say(str(error))
        raise
    share = getattr(getattr(stage, "validation", None), "share", 0.0)
    first = getattr(stage, "unique_examples", "all")
    rows = max(1, round(len(items) * (1 - share)))
    if isinstance(first, int):
        rows = min(rows, first)
    if tokenizer is None:
        return Amount(rows)
    apart = max(1, len(items) // MEASURED)
    chosen = items[::apart][:MEASURED]
    return Amount(rows, tuple(_tokens(stage, recipe.format, item, tokenizer) for item in chosen))


def _made(stage: StageOptions) -> int:
    """How many problems the built-in generator would make for this stage, which need not be made to be counted."""
    data = stage.data  # type: ignore[attr-defined]
    if data.mix or data.source != "arithmetic":
        return 0
    return data.count if data.count is not None else max(1, round(data.arithmetic.count * (data.fraction or 1)))


def _items(stage: StageOptions, seed: int) -> Sequence[Any]:
    data = stage.data  # type: ignore[attr-defined]
    if isinstance(stage, ReinforcementOptions):
        return load_problems(data, seed, wanted=gold_wanted(stage))
    if isinstance(stage, PreferenceOptions):
        return load_preferences(data, seed) if stage.algorithm.paired else load_judged(data, seed)
    return load_demonstrations(data, seed)


def _tokenizer(recipe: Recipe) -> Any:
    """The model's tokenizer, where it is a folder on this machine."""
    path = recipe.model.tokenizer or recipe.model.path
    if not (Path(path).expanduser() / "tokenizer_config.json").is_file():
        return None
    from lemma.models.load_model import load_tokenizer

    return load_tokenizer(path)


def _tokens(stage: StageOptions, fmt: Format, item: Any, tokenizer: Any) -> int:
    """Tokens of the longest sequence that this item becomes."""
    if isinstance(item, Problem):
        answer: int | None = getattr(getattr(stage, "rollout", None), "max_tokens", None)
        return len(encode_prompt(fmt, as_asked(item), tokenizer)) + (answer or 0)
    most = getattr(stage, "max_length", None) or math.inf
    if hasattr(item, "reasoning"):
        return int(min(len(encode_demonstration(fmt, as_asked(item), tokenizer)), most))
    responses = [item.chosen, item.rejected] if hasattr(item, "chosen") else [one.response for one in item]
    problem = item.problem if hasattr(item, "problem") else item[0].problem
    longest = max(len(encode_text(text, tokenizer)) for text in responses)
    return int(min(len(encode_prompt(fmt, problem, tokenizer)) + longest + 1, most))


def sequences_of(stage: StageOptions) -> int:
    """Sequences of one optimisation step."""
    if isinstance(stage, ReinforcementOptions):
        return max(1, stage.batch.problems * stage.algorithm.group_size // stage.algorithm.mini_batches)
    if isinstance(stage, PreferenceOptions):
        return stage.batch.examples * (2 if stage.algorithm.paired else 1)
    assert isinstance(stage, SupervisedOptions)
    return stage.batch.sequences
