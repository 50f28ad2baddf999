"""The supervised stage: imitate demonstrations. Read it top to bottom."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lemma.core.collector import loading
from lemma.core.errors import UserError
from lemma.core.events import counted
from lemma.core.random import permutation
from lemma.core.types import Demonstration, Trajectory, content_id
from lemma.data.choices import as_asked
from lemma.data.data_options import DataOptions, journal_place
from lemma.data.held_out import split_share
from lemma.data.load_rows import filter_by_length, load_demonstrations
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration, encode_document, encode_learnt
from lemma.learning.learner import StepReport
from lemma.models.policy import Policy
from lemma.objectives import NegativeLogLikelihood
from lemma.runs.fitted import fit_budget
from lemma.runs.stage import Stage
from lemma.stages.building import stage_learner, stage_policy
from lemma.stages.supervised_options import SupervisedOptions
from lemma.stages.token_store import StoredTokens
from lemma.stages.trained_prompt import Instructions, Systems, as_trained

if TYPE_CHECKING:
    from lemma.stages.evaluating import Measure


def run_supervised(stage: Stage, options: SupervisedOptions, fmt: Format) -> None:
    policy = stage_policy(stage)
    fmt.install(policy.tokenizer)
    with stage.waiting("reading the data"):
        data, validation, systems = prepare(stage, options, fmt, policy)
    trained = as_trained(stage, fmt, policy.tokenizer, systems)
    total = data.total_steps(options)
    objective = NegativeLogLikelihood(options.normalise, options.constant)
    budget = fit_budget(stage, policy, options.batch, options.optim)
    learner = stage_learner(stage, policy, options.optim, budget, total, seed=stage.learner_seed)
    measures: list[Measure] = []
    if validation or options.eval.benchmarks:
        from lemma.stages.evaluating import stage_measures

        loss = partial(learner.evaluate, validation, objective) if validation else None
        measures = stage_measures(stage, options.eval, trained, policy, loss, options.validation.every)
    start = stage.resume(learner, total, data.digest(validation))
    for measure in measures:
        measure.begin(start, total)
    stage.catch_up(learner, start, total)
    for step in range(start + 1, total + 1):
        with stage.clock.measure("data"):
            batch = data.batch(step - 1)
        with stage.clock.measure("update"):
            report = learner.step(batch, objective)
        stage.clock.add(report)
        best = [measure.after(step, total) for measure in measures]
        if stage.is_due(options.log_every, step, total):
            measure_step(stage, step, data.epoch_of(step), report, policy)
        stage.progress(step, total, f"loss {report.loss:.3f}{''.join(one.note for one in measures)}")
        stage.save_if_due(learner, step, total, any(best))
    stage.finish(policy, total, {"tokens": data.tokens, "examples": data.count, "steps": total, **data.learnt(total)})


def measure_step(stage: Stage, step: int, epoch: float, report: StepReport, policy: Policy) -> None:
    values = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "epoch": epoch,
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "packs": report.packs,
        "updated": float(report.updated),
        **report.metrics,
    }
    stage.measure(step, "train", values, stage.clock.read(policy.device))


def digest(trajectories: Sequence[Trajectory]) -> str:
    """A digest of these token ids and masks, in this order."""
    whole = hashlib.blake2b(digest_size=16)
    for trajectory in trajectories:
        whole.update(trajectory.ids_T.tobytes())
        whole.update(trajectory.loss_mask_T.tobytes())
    return whole.hexdigest()


@dataclass
class TrainingData:
    """The order of the data: which trajectories make up which step. A function of the step alone; nothing to save.

    With `packing: stream` the documents of an epoch are concatenated and cut every `length` tokens; each piece has one
    token more, the label of its last.
    """

    items: Sequence[Trajectory]
    per_step: int
    seed: int
    name: str
    shuffle: bool
    length: int | None = None
    _cached: tuple[int, Sequence[Any]] = (-1, [])

    @property
    def tokens(self) -> int:
        return self.items.tokens if isinstance(self.items, StoredTokens) else sum(len(t) for t in self.items)

    def digest(self, validation: Sequence[Trajectory]) -> str:
        """A digest of the training set and the held-out set."""
        if isinstance(self.items, StoredTokens):
            return content_id(self.items.digest, digest(validation))
        return digest([*self.items, *validation])

    @property
    def count(self) -> int:
        """Trajectories in one epoch."""
        return len(self.items) if self.length is None else max(0, self.tokens - 1) // self.length

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.count // self.per_step)

    def total_steps(self, options: SupervisedOptions) -> int:
        if options.steps is not None:
            return options.steps
        return max(1, round((options.epochs or 1.0) * self.steps_per_epoch))

    def epoch_of(self, step: int) -> float:
        return step / self.steps_per_epoch

    def learnt(self, steps: int) -> dict[str, int]:
        """How much the first steps train on, repetitions over epochs included."""
        epochs, left = divmod(steps, self.steps_per_epoch)
        if self.length is not None:
            lengths = np.full(self.count, self.length + 1)
        elif isinstance(self.items, StoredTokens):
            lengths = self.items.lengths
        else:
            lengths = np.array([len(one) for one in self.items])
        part = (lengths if self.length is not None else lengths[self._order(epochs)])[: left * self.per_step]
        return {
            "learnt_tokens": int(epochs * lengths.sum() + part.sum()),
            "learnt_examples": epochs * self.count + len(part),
        }

    def batch(self, index: int) -> list[Trajectory]:
        """The trajectories of step number `index`, counted from 0; the last step of an epoch takes what is left."""
        epoch, place = divmod(index, self.steps_per_epoch)
        if self._cached[0] != epoch:
            order = self._order(epoch)
            self._cached = (epoch, order.tolist() if self.length is None else self._pieces(order))
        own = self._cached[1][place * self.per_step : (place + 1) * self.per_step]
        return [self.items[number] for number in own] if self.length is None else list(own)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.items))
        return permutation(len(self.items), self.seed, self.name, "order", epoch)

    def _pieces(self, order: np.ndarray) -> list[Trajectory]:
        assert self.length is not None
        stream = np.concatenate([self.items[number].ids_T for number in order.tolist()])
        starts = range(0, self.count * self.length, self.length)
        pieces = [stream[start : start + self.length + 1] for start in starts]
        return [Trajectory(ids, np.arange(len(ids)) > 0, origin="teacher") for ids in pieces]


@loading()
def prepare(
    stage: Stage, options: SupervisedOptions, fmt: Format, policy: Policy
) -> tuple[TrainingData, Sequence[Trajectory], Systems]:
    """Demonstrations as token ids: the training set and the held-out set; and their system messages."""
    limit = min(options.max_length or policy.context, policy.context)
    if journal_place(options.data.source) is not None and not options.data.mix:
        return _from_journal(stage, options, fmt, policy, limit)
    if options.data.streaming:
        return _streamed(stage, options, fmt, policy, limit)
    train, held_out = _demonstrations(stage, options, fmt, policy.tokenizer)
    stream = options.packing == "stream"
    if stream and options.max_length is not None and options.max_length > policy.context:
        raise UserError(
            f"stage {stage.name}: pieces of {options.max_length} tokens are longer than the model's {policy.context}",
            fix=f"write `max_length: {policy.context}` or less, or raise max_position_embeddings in model.override",
        )
    if stream:
        items = [_document(fmt, item, policy.tokenizer) for item in train]
    else:
        items = _within(limit, _encoded(stage, options, fmt, train, policy.tokenizer), stage)
    data = TrainingData(
        items, options.batch.sequences, stage.seed, stage.name, options.shuffle, options.max_length if stream else None
    )
    if data.count == 0:
        raise UserError(
            f"stage {stage.name}: {data.tokens} tokens of data do not fill one piece of {options.max_length} tokens",
            fix="lower max_length or use more data",
        )
    encoded = _encoded(stage, options, fmt, held_out, policy.tokenizer)
    if options.validation.data is not None:
        encoded = _held_out(stage, options, options.validation.data, fmt, policy.tokenizer)
    asked = Instructions(fmt, policy.tokenizer)
    systems = Counter(asked.of_row(item) for item in train)
    return data, _within(policy.context if stream else limit, encoded, stage), systems


def _from_journal(
    stage: Stage, options: SupervisedOptions, fmt: Format, policy: Policy, limit: int
) -> tuple[TrainingData, Sequence[Trajectory], Systems]:
    """Episodes with a good enough reward, as they were sampled."""
    from lemma.stages.own_samples import check_ids, imitated, largest_id

    samples = imitated(stage, options.data, options.journal)
    lengths = [int(one[0].loss_mask_T.argmax()) for one in samples]
    samples, _ = filter_by_length(samples, lengths, options.data.prompt_length, stage.say)
    held_out: list[Trajectory] = []
    if options.validation.share:
        samples, others = split_share(
            samples, options.validation.share, stage.seed, identity=lambda one: one[0].problem_id
        )
        held_out = [part for one in others[: options.validation.count] for part in one]
    elif options.validation.data is not None:
        held_out = _held_out(stage, options, options.validation.data, fmt, policy.tokenizer)
    first = options.unique_examples
    items = [part for one in (samples if first == "all" else samples[:first]) for part in one]
    check_ids(largest_id(one.ids_T for one in (*items, *held_out)), len(policy.head.weight), stage)
    data = TrainingData(_within(limit, items, stage), options.batch.sequences, stage.seed, stage.name, options.shuffle)
    return data, _within(limit, held_out, stage), Counter()


def _held_out(
    stage: Stage, options: SupervisedOptions, data: DataOptions, fmt: Format, tokenizer: Any
) -> list[Trajectory]:
    """Separate validation data: rows, or episodes of a journal."""
    if journal_place(data.source) is not None and not data.mix:
        from lemma.stages.own_samples import imitated

        episodes = imitated(stage, data, options.journal)[: options.validation.count]
        return [part for one in episodes for part in one]
    rows = _short_prompts(stage, data, fmt, tokenizer)[: options.validation.count]
    return _encoded(stage, options, fmt, [as_asked(row) for row in rows], tokenizer)


def _streamed(
    stage: Stage, options: SupervisedOptions, fmt: Format, policy: Policy, limit: int
) -> tuple[TrainingData, Sequence[Trajectory], Systems]:
    from lemma.stages.streamed import stream_demonstrations

    learnt, held_out, systems = stream_demonstrations(stage, options, fmt, policy.tokenizer, limit)
    data = TrainingData(learnt, options.batch.sequences, stage.seed, stage.name, options.shuffle)
    if options.validation.data is None:
        return data, held_out, systems
    others = _held_out(stage, options, options.validation.data, fmt, policy.tokenizer)
    return data, _within(limit, others, stage), systems


def _encoded(
    stage: Stage, options: SupervisedOptions, fmt: Format, items: Sequence[Demonstration], tokenizer: Any
) -> list[Trajectory]:
    """Demonstrations as ids; a conversation whose template rewrites earlier turns gives one sequence per turn."""
    counting = counted(items, f"{stage.name}: tokenizing", len(items))
    encoded = [encode_learnt(fmt, item, tokenizer, options.turns, options.train_on) for item in counting]
    parted = sum(len(one) > 1 for one in encoded)
    if parted:
        stage.say(
            f"{parted} of {len(items)} conversations give a sequence for each turn: "
            "the chat template renders finished turns differently from how the model writes them"
        )
    return [trajectory for one in encoded for trajectory in one]


def _demonstrations(
    stage: Stage, options: SupervisedOptions, fmt: Format, tokenizer: Any
) -> tuple[list[Demonstration], list[Demonstration]]:
    """The training demonstrations, and those held out of the same data."""
    items = _short_prompts(stage, options.data, fmt, tokenizer)
    held_out: list[Demonstration] = []
    if options.validation.share:
        items, held_out = split_share(items, options.validation.share, stage.seed)
    if options.unique_examples != "all":
        items = items[: options.unique_examples]
    return [as_asked(item) for item in items], [as_asked(item) for item in held_out[: options.validation.count]]


def _short_prompts(stage: Stage, data: DataOptions, fmt: Format, tokenizer: Any) -> list[Demonstration]:
    """The demonstrations whose prompt, as it is asked, is within the limits of prompt_length."""
    items, limits = load_demonstrations(data, stage.seed), data.prompt_length
    items = Instructions(fmt, tokenizer).understood(items)
    if limits.percentile is None and limits.max_tokens is None:
        return items
    lengths = [int(encode_demonstration(fmt, as_asked(item), tokenizer).loss_mask_T.argmax()) for item in items]
    return filter_by_length(items, lengths, limits, stage.say)[0]


def _document(fmt: Format, item: Demonstration, tokenizer: Any) -> Trajectory:
    ids = encode_document(fmt, item, tokenizer)
    return Trajectory(ids, np.arange(len(ids)) > 0, origin="teacher")


def _within(limit: int, trajectories: list[Trajectory], stage: Stage) -> list[Trajectory]:
    """Those of at most `limit` tokens; the others are counted and left out."""
    kept = [t for t in trajectories if len(t) <= limit]
    left_out = len(trajectories) - len(kept)
    if trajectories and not kept:
        raise UserError(
            f"stage {stage.name}: every demonstration is longer than {limit} tokens",
            fix="raise max_length or shorten the data",
        )
    if left_out:
        stage.warn(f"{left_out} of {len(trajectories)} demonstrations are longer than {limit} tokens and were left out")
    return kept
