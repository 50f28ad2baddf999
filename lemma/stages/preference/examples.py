"""The training examples of the preference stage: prompts with responses as ids, from data, a journal, or the built-in
source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lemma.core.errors import UserError
from lemma.core.random import permutation
from lemma.core.types import Demonstration, Judged, Message, Problem, Trajectory
from lemma.data.arithmetic import mistaken
from lemma.data.data_options import JOURNAL, DataOptions, journal_place
from lemma.data.held_out import origin_of, question_of, split_share
from lemma.data.load_rows import (
    filter_by_length,
    judgements,
    load_demonstrations,
    load_judged,
    load_preferences,
    row_of,
    take,
)
from lemma.data.rows import Row
from lemma.data.sources import ARITHMETIC
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration
from lemma.rollouts.episode import Episode
from lemma.runs.stage import Stage
from lemma.stages.own_samples import check_ids, graded_samples, largest_id
from lemma.stages.preference.preference_options import JournalOptions, PreferenceOptions


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt with a chosen and a rejected response, or with one response that is wanted (+1) or unwanted (-1).

    `masks` mark the sampled tokens of each response, as opposed to those read between turns; empty: all were sampled.
    `question` is a name for what is asked, empty where a journal has only its ids.
    """

    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]
    signs: tuple[int, ...]
    problem_id: str = ""
    system: str | None = None
    masks: tuple[np.ndarray, ...] = ()
    question: str = ""

    @property
    def said(self) -> tuple[np.ndarray, ...]:
        """The mask of each response."""
        return self.masks or tuple(np.ones(len(response), dtype=bool) for response in self.responses)

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(response) for response in self.responses)

    def single(self) -> list[Example]:
        """Each response alone."""
        each = zip(self.responses, self.signs, self.said, strict=True)
        return [
            replace(self, responses=(response,), signs=(sign,), masks=(mask,) if self.masks else ())
            for response, sign, mask in each
        ]


@dataclass(frozen=True)
class Order:
    """Which examples make up which step: a function of the step alone.

    The last step of an epoch takes what is left; if that is less than `fewest`, it joins the previous step.
    """

    count: int
    per_step: int
    seed: int
    name: str
    shuffle: bool
    fewest: int = 1

    @property
    def steps_per_epoch(self) -> int:
        whole, left = divmod(self.count, self.per_step)
        return max(1, whole + (left >= self.fewest))

    def total_steps(self, options: PreferenceOptions) -> int:
        if options.steps is not None:
            return options.steps
        return max(1, round((options.epochs or 1.0) * self.steps_per_epoch))

    def learnt(self, steps: int) -> int:
        """How many examples the first steps train on, repetitions included."""
        epochs, left = divmod(steps, self.steps_per_epoch)
        return epochs * self.count + left * self.per_step

    def batch(self, index: int) -> list[int]:
        """The examples of step number `index`, counted from 0."""
        epoch, place = divmod(index, self.steps_per_epoch)
        order = np.arange(self.count)
        if self.shuffle:
            order = permutation(self.count, self.seed, self.name, "order", epoch)
        end = self.count if place == self.steps_per_epoch - 1 else (place + 1) * self.per_step
        return order[place * self.per_step : end].tolist()


def prepare(
    stage: Stage, options: PreferenceOptions, fmt: Format, tokenizer: Any, limit: int
) -> tuple[list[Example], list[Example]]:
    """Examples as token ids of at most `limit` tokens: the training set and the held-out set."""
    examples = _short_prompts(stage, options, options.data, fmt, tokenizer)
    held_out: list[Example] = []
    if options.validation.data is not None:
        held_out = _short_prompts(stage, options, options.validation.data, fmt, tokenizer)
    elif options.validation.share:
        examples, held_out = split_share(examples, options.validation.share, stage.seed, identity=_asked(examples))
    return _within(limit, examples, stage), _within(limit, held_out[: options.validation.count], stage)


def _asked(examples: Sequence[Example]) -> Callable[[Example], str]:
    """The question of an example: its name or its prompt; for a variation, of which a journal has only the id, that of
    the original, or the original's id if it is absent."""
    questions = {example.problem_id: example.question or example.prompt.tobytes().hex() for example in examples}

    def identity(example: Example) -> str:
        origin = origin_of(example.problem_id)
        own = example.question or example.prompt.tobytes().hex()
        return own if origin == example.problem_id else questions.get(origin, origin)

    return identity


def digest(examples: Sequence[Example]) -> str:
    """A digest of these ids and their labels, in this order."""
    whole = hashlib.blake2b(digest_size=16)
    for example in examples:
        for ids, sign in zip((example.prompt, *example.responses), (0, *example.signs), strict=True):
            whole.update(len(ids).to_bytes(8, "little") + ids.tobytes() + bytes([sign + 1]))
        for mask in example.masks:
            whole.update(mask.tobytes())
    return whole.hexdigest()


def _short_prompts(
    stage: Stage, options: PreferenceOptions, data: DataOptions, fmt: Format, tokenizer: Any
) -> list[Example]:
    """The examples of one source whose prompt is within the limits of its prompt_length."""
    examples = _load(stage, options, data, fmt, tokenizer)
    return filter_by_length(examples, [len(example.prompt) for example in examples], data.prompt_length, stage.say)[0]


def _load(stage: Stage, options: PreferenceOptions, data: DataOptions, fmt: Format, tokenizer: Any) -> list[Example]:
    place = journal_place(data.source)
    if place is not None and not data.mix:
        examples = _from_journal(stage, options, data, place)
    elif data.source == ARITHMETIC and not data.mix:
        examples = [built_in(fmt, item, tokenizer) for item in load_demonstrations(data, stage.seed)]
    else:
        examples = _from_rows(stage, options, data, fmt, tokenizer)
    return examples if options.algorithm.paired else [one for example in examples for one in example.single()]


def _from_journal(stage: Stage, options: PreferenceOptions, data: DataOptions, place: str) -> list[Example]:
    """Pairs of samples; of earlier stages, if no journal is given."""
    if place:
        pairs = journal_pairs(Path(place).expanduser(), options.journal, say=stage.warn)
    else:
        pairs = journal_pairs(stage.folder.path, options.journal, stage.earlier, stage.warn)
    kept = [pair for pair in pairs if not np.array_equal(pair.responses[0], pair.responses[1])]
    _report_identical(len(pairs), len(kept), stage, None)
    return take(kept, data, stage.seed, JOURNAL)


def _from_rows(
    stage: Stage, options: PreferenceOptions, data: DataOptions, fmt: Format, tokenizer: Any
) -> list[Example]:
    """Examples from rows that compare or judge: each gives two responses, or one."""
    if options.algorithm.paired:
        rows = [judgements(item) for item in load_preferences(data, stage.seed)]
    else:
        rows = load_judged(data, stage.seed)
    kept = [row for row in rows if len(row) == 1 or row[0].response.strip() != row[1].response.strip()]
    _report_identical(len(rows), len(kept), stage, lambda: row_of(data, rows[0][0].problem))
    return [of_row(fmt, tokenizer, data, row) for row in kept]


def _report_identical(count: int, kept: int, stage: Stage, first: Callable[[], Row | None] | None) -> None:
    """Report how many pairs of identical responses were left out; refuse if no others remain."""
    if not kept:
        problem, row = "the two responses of every pair are the same", None if first is None else first()
        raise (
            UserError(f"stage {stage.name}: {problem}")
            if row is None
            else row.error(problem, "name the columns as they are meant")
        )
    if kept < count:
        stage.warn(f"{count - kept} of {count} examples hold the same response twice and were left out")


def of_row(fmt: Format, tokenizer: Any, data: DataOptions, said: Sequence[Judged]) -> Example:
    """The example from a row; errors of format and tokenizer name that row."""
    problem, responses = said[0].problem, [one.response for one in said]
    signs = tuple(1 if one.wanted else -1 for one in said)
    try:
        return _example(fmt, tokenizer, [Demonstration(problem, text) for text in responses], signs)
    except UserError as error:
        plain = Demonstration(Problem((Message("user", "?"),)), "!")
        _example(fmt, tokenizer, [plain], (1,))  # if this fails as well, the row is not to blame
        row = row_of(data, problem, responses)
        raise error if row is None else row.error(error.problem, error.fix) from None


def _example(fmt: Format, tokenizer: Any, said: Sequence[Demonstration], signs: tuple[int, ...] = (1, -1)) -> Example:
    """The same prompt with each of these responses."""
    encoded = [encode_demonstration(fmt, one, tokenizer) for one in said]
    start = int(encoded[0].loss_mask_T.argmax())
    responses = tuple(one.ids_T[start:] for one in encoded)
    asked = said[0].problem
    return Example(encoded[0].ids_T[:start], responses, signs, asked.id, asked.system, question=question_of(asked))


def built_in(fmt: Format, item: Demonstration, tokenizer: Any) -> Example:
    """The right solution of a problem paired with one that contains a slip."""
    return _example(fmt, tokenizer, [item, mistaken(item)])


def _within(limit: int, examples: list[Example], stage: Stage) -> list[Example]:
    """Those of at most `limit` tokens; the others are counted and left out."""
    kept = [example for example in examples if example.longest <= limit]
    if examples and not kept:
        raise UserError(
            f"stage {stage.name}: every example has a sequence longer than {limit} tokens",
            fix="raise max_length or shorten the data",
        )
    if len(kept) < len(examples):
        lost = len(examples) - len(kept)
        stage.warn(f"{lost} of {len(examples)} examples have a sequence longer than {limit} tokens and were left out")
    return kept


def check_vocabulary(examples: Sequence[Example], vocabulary: int, stage: Stage) -> None:
    """Refuse ids that the model does not have."""
    check_ids(largest_id(ids for one in examples for ids in (one.prompt, *one.responses)), vocabulary, stage)


# --- pairs from samples ----------------------------------------------------------------------------------------------


def journal_pairs(
    place: Path,
    options: JournalOptions,
    stages: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Example]:
    """Pairs the best with the worst of each group of graded samples; the ids are those that were sampled.

    For a run, `stages` are those whose samples to use, in this order; None: all of them. For a multi-turn episode, the
    response is everything after its first prompt, trained on the sampled tokens.
    """
    groups: dict[str, list[Episode]] = {}
    rewritten = 0
    for path, sample in graded_samples(place, stages):
        if len(sample.trajectories()) > 1:
            rewritten += 1
        else:
            groups.setdefault(f"{path}\x1f{sample.key!r}", []).append(sample)
    if rewritten:
        say(f"{rewritten} episodes of {place} rewrite their history, which no pair can hold, and were left out")
    pairs = [pair for group in groups.values() for pair in _pairs_of(group, options)]
    if not pairs:
        raise UserError(
            f"no group of samples in {place} has two whose rewards differ by more than {options.gap:g}",
            fix="take a run with more samples per problem, or problems that are neither too easy nor too hard",
        )
    return pairs


def _pairs_of(group: Sequence[Episode], options: JournalOptions) -> list[Example]:
    ranked = sorted(group, key=lambda sample: (-(sample.reward or 0.0), sample.sample))
    pairs = []
    for best, worst in list(zip(ranked, reversed(ranked), strict=True))[: min(options.per_group, len(ranked) // 2)]:
        assert best.reward is not None and worst.reward is not None
        if best.reward - worst.reward > options.gap:
            start, whole = len(best.prompt), [sample.trajectories()[0] for sample in (best, worst)]
            masks = tuple(one.loss_mask_T[start:] for one in whole)
            pairs.append(
                Example(
                    best.prompt.astype(np.int64),
                    tuple(one.ids_T[start:] for one in whole),
                    (1, -1),
                    best.problem_id,
                    masks=() if all(mask.all() for mask in masks) else masks,
                )
            )
    return pairs


def trajectory(
    example: Example,
    response: np.ndarray,
    said: np.ndarray,
    *,
    group_id: int = 0,
    sign: int = 0,
    whole: bool = False,
) -> Trajectory:
    """Prompt and response, trained on the tokens that `said` marks in the response; with `whole`, on the prompt as
    well."""
    ids = np.concatenate([example.prompt, response])
    chosen = np.concatenate([np.full(len(example.prompt), whole), said])
    chosen[0] = False
    return Trajectory(
        ids, chosen, origin="teacher", problem_id=example.problem_id, group_id=group_id, fields={"sign": float(sign)}
    )
