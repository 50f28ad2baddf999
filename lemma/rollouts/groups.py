"""The rollouts of one step: groups of graded samples, a teacher's traces among them where the algorithm wants them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lemma.algorithms import Algorithm
from lemma.core.errors import LemmaWarning
from lemma.core.faults import fault_point
from lemma.core.types import Group, Trajectory
from lemma.engines.protocol import Engine, Sampling
from lemma.rollouts.collect import Ask, collect
from lemma.rollouts.journal import Journal
from lemma.rollouts.journal_files import journal_path
from lemma.rollouts.judge import Judge, Pending
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.sample import Sample


@dataclass
class Rollouts:
    """What a step learns from (`groups`), and everything that was sampled for it (`samples`).

    A sample without a reward belongs to no group; it is counted in `unscored`. One that was cut off and is masked keeps
    its reward and loses its tokens.
    """

    groups: list[Group] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rounds: int = 0
    wanted: int = 0
    drawn: int = 0
    dead: int = 0
    unscored: int = 0
    long_traces: int = 0
    from_journal: bool = False
    grade_seconds: float = 0.0


class Roller:
    """Makes the rollouts of each step. What is in the step's complete journal is read and not generated."""

    def __init__(
        self,
        engine: Engine,
        judge: Judge,
        sampling: Sampling,
        algorithm: Algorithm,
        order: ProblemOrder,
        folder: Path,
        *,
        problems: int,
        further_rounds: int,
        seed: int,
        name: str,
        data: str = "",
        mask_truncated: bool = False,
    ):
        self.engine, self.judge, self.sampling, self.algorithm, self.order = engine, judge, sampling, algorithm, order
        self.folder, self.problems, self.further_rounds = folder, problems, further_rounds
        self.seed, self.name, self.data, self.mask_truncated = seed, name, data, mask_truncated

    def step(self, step: int) -> Rollouts:
        """Groups in the order of their draws; with further rounds, live ones only, at most as many as wanted."""
        journal = self._journal(step)
        graded_before = self.judge.seconds
        found = Rollouts(wanted=self.problems, from_journal=journal.is_complete)
        missing = self.problems
        for round_ in range(1 + self.further_rounds):
            groups = self._round(step, self.order.draw(missing), journal, found)
            found.rounds += 1
            live = [group for group in groups if self._is_live(group)]
            found.dead += len(groups) - len(live)
            found.groups += live if self.further_rounds else groups
            if len(found.groups) >= self.problems or round_ == self.further_rounds:
                break
            missing = self._next_count(found)
        found.groups = found.groups[: self.problems]
        fault_point("rollouts.before_finish")
        if not journal.is_complete:
            journal.finish()
        journal.close()
        found.grade_seconds = self.judge.seconds - graded_before
        for unit, group in enumerate(found.groups):
            for trajectory in group.trajectories:
                trajectory.unit = unit
        return found

    def _journal(self, step: int) -> Journal:
        """What is known of this step: all of it, or nothing."""
        journal = Journal(journal_path(self.folder, step), self.data)
        foreign = any(sample.key[:2] != (self.name, step) for sample in journal.samples.values())
        if journal.damaged or (journal.is_complete and foreign):
            what = "holds samples of another step" if foreign else "is not what was written"
            warnings.warn(LemmaWarning(f"{journal.path} {what}; step {step} is sampled again"), stacklevel=2)
        if not journal.is_complete or foreign:
            journal.clear()
        return journal

    def _is_live(self, group: Group) -> bool:
        return any(trajectory.trained_tokens for trajectory in group.trajectories) and self.algorithm.is_live(group)

    def _next_count(self, found: Rollouts) -> int:
        """How many more problems will probably do, by the share of live groups so far; never more than a whole step."""
        share = max(len(found.groups) / found.drawn, 1 / self.problems)
        return min(self.problems, math.ceil((self.problems - len(found.groups)) / share))

    def _round(self, step: int, drawn: Sequence[tuple[int, Task]], journal: Journal, found: Rollouts) -> list[Group]:
        tasks = dict(drawn)
        teachers: list[Sample] = []
        asks: list[Ask] = []
        for draw, task in drawn:
            whole, requests = self._asks(step, draw, task, found)
            teachers, asks = teachers + whole, asks + requests
        known = [journal.samples[one.order] for one in teachers if one.order in journal.samples]
        fresh = [one for one in teachers if one.order not in journal.samples]
        graded = [self.judge.begin(tasks[_draw(one)].problem, one) for one in fresh]
        sampled: dict[int, list[Sample]] = {draw: [] for draw in tasks}
        for sample in [*known, *self._sampled(asks, journal), *self._finished(graded, journal)]:
            sampled[_draw(sample)].append(sample)
        found.drawn += len(drawn)
        return [self._group(tasks[draw], sorted(samples, key=_number), found) for draw, samples in sampled.items()]

    def _asks(self, step: int, draw: int, task: Task, found: Rollouts) -> tuple[list[Sample], list[Ask]]:
        """What a teacher says in full, and what the policy is asked: alone, or after the beginning of a trace."""
        key = (self.name, step, draw)
        whole: list[Sample] = []
        size = self.algorithm.group_size
        lengths = [0] * size
        if task.trace is not None:
            if len(task.trace) > self.sampling.max_tokens:
                found.long_traces += 1
            else:
                lengths = self.algorithm.prefix_lengths(
                    len(task.trace), seed=self.seed, step=step, problem_id=task.problem.id
                )
        asks: list[Ask] = []
        for number, length in enumerate(lengths):
            if task.trace is not None and length >= len(task.trace):
                whole.append(_teacher_sample(key, number, task))
            elif task.trace is not None and length:
                prefix = task.trace[:length].astype(np.int32)
                asks.append(Ask((*key, "after", number), task.problem, task.prompt, 1, prefix, number))
        alone = [number for number, length in enumerate(lengths) if not length]
        if alone:
            # The noise of a sample belongs to its number among those that the policy begins itself.
            asks.append(Ask(key, task.problem, task.prompt, len(alone), first=alone[0]))
            assert alone == list(range(alone[0], size)), "samples that a teacher begins come first"
        return whole, asks

    def _finished(self, graded: Sequence[Pending], journal: Journal) -> list[Sample]:
        """A teacher's whole responses, graded like any other while the policy spoke."""
        samples = self.judge.finish(graded)
        for sample in samples:
            journal.append(sample)
        return samples

    def _sampled(self, asks: Sequence[Ask], journal: Journal) -> list[Sample]:
        def sampling(ask: Ask) -> Sampling:
            given, least = len(ask.prefix), self.sampling.min_tokens
            return replace(self.sampling, max_tokens=self.sampling.max_tokens - given, min_tokens=max(0, least - given))

        return list(collect(self.engine, asks, sampling, self.judge, journal=journal))

    def _group(self, task: Task, samples: list[Sample], found: Rollouts) -> Group:
        found.samples += samples
        scored = [sample for sample in samples if sample.reward is not None]
        found.unscored += len(samples) - len(scored)
        return Group(task.problem, [self._trajectory(sample) for sample in scored])

    def _trajectory(self, sample: Sample) -> Trajectory:
        trajectory = sample.trajectory()
        assert trajectory.behaviour_T is not None
        trajectory.token_fields["behaviour"] = trajectory.behaviour_T
        if self.sampling.cuts_support or self.sampling.min_tokens:
            trajectory.token_fields["kept"] = np.concatenate([np.zeros(len(sample.prompt)), sample.kept])
        if self.mask_truncated and sample.truncated:
            trajectory.chosen_T = np.zeros_like(trajectory.chosen_T)
        off = np.zeros(len(trajectory))
        off[len(sample.prompt) : len(sample.prompt) + sample.given] = 1.0
        trajectory.token_fields["off"] = off
        return trajectory


def _number(sample: Sample) -> int:
    return sample.sample


def _draw(sample: Sample) -> int:
    return int(sample.key[2])


def _teacher_sample(key: tuple[str | int, ...], number: int, task: Task) -> Sample:
    assert task.trace is not None
    zeros = np.zeros(len(task.trace), dtype=np.float32)
    return Sample(
        key=(*key, "trace"),
        sample=number,
        problem_id=task.problem.id,
        prompt=task.prompt.astype(np.int32),
        ids=task.trace.astype(np.int32),
        logprobs=zeros,
        kept=zeros,
        finish="given",
        given=len(task.trace),
    )
