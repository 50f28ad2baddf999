"""The rollouts of one step: groups of graded samples, a teacher's traces among them where the algorithm wants them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lemma.algorithms import Algorithm
from lemma.core.errors import UserError, warn
from lemma.core.faults import fault_point
from lemma.core.ranks import own_slots, slots, together
from lemma.core.types import Group, Trajectory
from lemma.engines.protocol import Engine, Request, Sampling
from lemma.rewards import Reward
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import play
from lemma.rollouts.flight import FlyingAsks
from lemma.rollouts.journal import Journal, drawn_after, journal_path
from lemma.rollouts.multi_turn import World
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.replay import replayed
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Pending, Scorer

# Seconds that a finished episode may wait to be written where it is kept.
SECONDS_UNWRITTEN = 1.0


@dataclass
class Rollouts:
    """What a step learns from (`groups`), and everything that was played for it (`episodes`).

    An episode without a reward belongs to no group; it is counted in `unscored`. One that was cut off and is masked
    keeps its reward and loses its tokens.
    """

    groups: list[Group] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    rounds: int = 0
    wanted: int = 0
    drawn: int = 0
    dead: int = 0
    unscored: int = 0
    long_traces: int = 0
    from_journal: bool = False
    grade_seconds: float = 0.0


@dataclass
class _Begun:
    """A step that has begun: the journals of this rank's slots, and the draws that they were about before."""

    journals: dict[int, Journal]
    recorded: list[int]
    drawn: list[tuple[int, Task]] = field(default_factory=list)


class RolloutCollector:
    """Makes the rollouts of each step. What is in the step's complete journal is read and not generated.

    Where responses fly, later steps begin with one that is waited for, and go on after it.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
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
        world: World | None = None,
        flies: bool = False,
    ):
        self.engine, self.scorer, self.sampling, self.algorithm, self.order = engine, scorer, sampling, algorithm, order
        self.folder, self.problems, self.further_rounds = folder, problems, further_rounds
        self.seed, self.name, self.data, self.mask_truncated = seed, name, data, mask_truncated
        self.world = world
        self.turn_weight = sum(reward.weight for reward in scorer.rewards if reward.name == "environment")
        self._begun: dict[int, _Begun] = {}
        each_alone = all(type(reward).score_all is Reward.score_all for reward in scorer.rewards)
        self._patience = SECONDS_UNWRITTEN if each_alone else None
        self._flight: FlyingAsks | None = None
        if flies:
            most = algorithm.group_size * math.ceil(problems * len(own_slots()) / slots())
            self._flight = FlyingAsks(engine, self._sampling, scorer, world, most=most, patience=self._patience)

    def step(self, step: int, until: int = 0) -> Rollouts:
        """Groups in the order of their draws; with further rounds, live ones only, at most as many as wanted. Where
        responses fly, all steps up to `until` have begun afterwards."""
        for number in range(step, max(step, until) + 1):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        begun = self._begun.pop(step)
        journals = begun.journals
        graded_before = self.scorer.seconds
        rollouts = Rollouts(wanted=self.problems, from_journal=all(one.is_complete for one in journals.values()))
        missing = self.problems
        for round_ in range(1 + self.further_rounds):
            drawn = begun.drawn if not round_ else self._draw(begun, missing)
            groups = self._round(step, drawn, journals, rollouts)
            rollouts.rounds += 1
            live = [group for group in groups if self._is_live(group)]
            rollouts.dead += len(groups) - len(live)
            rollouts.groups += live if self.further_rounds else groups
            if len(rollouts.groups) >= self.problems or round_ == self.further_rounds:
                break
            missing = self._next_count(rollouts)
        rollouts.groups = rollouts.groups[: self.problems]
        self._check_known(rollouts, journals.values())
        fault_point("rollouts.before_finish")
        for journal in journals.values():
            if not journal.is_complete:
                journal.finish(self.order.drawn)
            journal.close()
        rollouts.grade_seconds = self.scorer.seconds - graded_before
        for number, group in enumerate(rollouts.groups):
            for trajectory in group.trajectories:
                trajectory.group_id = number
        return rollouts

    def land(self) -> None:
        """Finish all that flies: the engine has other work."""
        if self._flight is not None:
            self._flight.land()

    def go_on_after(self, step: int) -> None:
        """Draw no problem again that a journal of a later step is about."""
        self.order.drawn = max(self.order.drawn, drawn_after(self.folder, step, self.data))

    def _begin(self, step: int) -> _Begun:
        """Open the journals of a step and draw its problems; where responses fly, ask for them."""
        begun = _Begun({}, [])

        def open_own() -> list[int]:
            begun.journals |= {slot: self._journal(step, slot) for slot in own_slots()}
            return [draw for journal in begun.journals.values() for draw in journal.draws]

        begun.recorded = sorted({draw for part in together(open_own, "the journals") for draw in part})
        begun.drawn = self._draw(begun, self.problems)
        if self._flight is not None:
            asks = [ask for draw, task in begun.drawn for ask in self._asks(step, draw, task, Rollouts())[1]]
            for slot, journal in begun.journals.items():
                self._flight.begin([ask for ask in asks if int(ask.key[2]) % slots() == slot], journal)
        return begun

    def _draw(self, begun: _Begun, count: int) -> list[tuple[int, Task]]:
        """The next problems of a step: those that it was about before a run was interrupted, then new ones."""
        known, begun.recorded = begun.recorded[:count], begun.recorded[count:]
        drawn = self.order.draw(count - len(known))
        if self._flight is not None and drawn:
            for journal in begun.journals.values():
                if not journal.is_complete:
                    journal.note_draws([draw for draw, _ in drawn])
        return [*((draw, self.order.at(draw)) for draw in known), *drawn]

    def _check_known(self, rollouts: Rollouts, journals: Iterable[Journal]) -> None:
        """Stop where too many episodes of an environment have no known worth. The next run plays the step again."""
        if self.world is None or rollouts.unscored <= self.world.options.unknown_limit * len(rollouts.episodes):
            return
        for journal in journals:
            journal.clear()
            journal.close()
        reasons = Counter(episode.reason for episode in rollouts.episodes if episode.reward is None)
        raise UserError(
            f"{rollouts.unscored} of {len(rollouts.episodes)} episodes of this step have no known worth, most often "
            f"because: {reasons.most_common(1)[0][0]}",
            fix="repair the environment, or raise `environment.unknown_limit`",
        )

    def _journal(self, step: int, slot: int) -> Journal:
        """What is known of a slot of this step: all of it, or nothing; with a free schedule, and where responses fly,
        whatever there is."""
        journal = Journal(journal_path(self.folder, step, slot if slots() > 1 else None), self.data)
        foreign = any(episode.key[:2] != (self.name, step) for episode in journal.episodes.values())
        if journal.damaged or (journal.is_complete and foreign):
            what = "holds samples of another step" if foreign else "is not what was written"
            warn(f"{journal.path} {what}; step {step} is sampled again")
        keeps_part = (self._flight is not None or self._is_free) and not journal.is_ended
        if foreign or not (journal.is_complete or keeps_part):
            journal.clear()
        return journal

    def _is_live(self, group: Group) -> bool:
        return any(trajectory.trained_tokens for trajectory in group.trajectories) and self.algorithm.has_signal(group)

    def _next_count(self, rollouts: Rollouts) -> int:
        """How many more problems will probably do, by the share of live groups so far; never more than a whole step."""
        share = max(len(rollouts.groups) / rollouts.drawn, 1 / self.problems)
        return min(self.problems, math.ceil((self.problems - len(rollouts.groups)) / share))

    def _round(
        self, step: int, drawn: Sequence[tuple[int, Task]], journals: Mapping[int, Journal], rollouts: Rollouts
    ) -> list[Group]:
        """The groups of these draws. Draw d belongs to slot d modulo their number; each slot is played by itself, by
        the rank that has it, and what was played is exchanged."""
        tasks = dict(drawn)
        wanted = {draw: self._asks(step, draw, task, rollouts) for draw, task in drawn}

        def own_part() -> list[Episode]:
            episodes: list[Episode] = []
            asks = {
                slot: [one for draw in tasks if draw % slots() == slot for one in wanted[draw][1]] for slot in journals
            }
            if self._flight is not None:
                for slot, journal in journals.items():
                    self._flight.begin(asks[slot], journal, is_urgent=True)
            elif self.world is None:
                self.engine.announce({slot: self._requests(own, journals[slot]) for slot, own in asks.items()})
            for slot, journal in journals.items():
                teachers = [one for draw in tasks if draw % slots() == slot for one in wanted[draw][0]]
                with self.engine.slot(slot) if slots() > 1 and self._flight is None else nullcontext():
                    episodes += self._slot(tasks, teachers, asks[slot], journal)
            return episodes

        played: dict[int, list[Episode]] = {draw: [] for draw in tasks}
        for part in together(own_part, "the samples of a round"):
            for episode in part:
                played[_draw(episode)].append(episode)
        rollouts.drawn += len(drawn)
        return [self._group(tasks[draw], sorted(own, key=_number), rollouts) for draw, own in played.items()]

    def _slot(
        self, tasks: Mapping[int, Task], teachers: Sequence[Episode], asks: Sequence[SampleRequest], journal: Journal
    ) -> list[Episode]:
        """What is played for one slot, and what a teacher says there."""
        known = [journal.episodes[one.order] for one in teachers if one.order in journal.episodes]
        fresh = [one for one in teachers if one.order not in journal.episodes]
        episodes = [*known, *self._replayed([one for one in fresh if tasks[_draw(one)].turns], tasks, journal)]
        graded = [self.scorer.begin(tasks[_draw(one)].problem, one) for one in fresh if not tasks[_draw(one)].turns]
        return [*episodes, *self._played(asks, journal), *self._finished(graded, journal)]

    def _asks(self, step: int, draw: int, task: Task, rollouts: Rollouts) -> tuple[list[Episode], list[SampleRequest]]:
        """What a teacher says in full, and what the policy is asked: alone, or after the beginning of a trace."""
        key = (self.name, step, draw)
        whole: list[Episode] = []
        size = self.algorithm.group_size
        lengths = [0] * size
        if task.trace is not None:
            if task.longest_turn > self.sampling.max_tokens:
                rollouts.long_traces += 1
            else:
                lengths = self.algorithm.prefix_lengths(
                    len(task.trace), seed=self.seed, step=step, problem_id=task.problem.id
                )
        asks: list[SampleRequest] = []
        for number, length in enumerate(lengths):
            if task.trace is not None and length >= len(task.trace):
                whole.append(_teachers(key, number, task))
            elif task.trace is not None and length:
                prefix = task.trace[:length].astype(np.int32)
                asks.append(SampleRequest((*key, "after", number), task.problem, task.prompt, 1, prefix, number))
        alone = [number for number, length in enumerate(lengths) if not length]
        if alone:
            # The noise of a sample belongs to its number among those that the policy begins itself.
            asks.append(SampleRequest(key, task.problem, task.prompt, len(alone), first=alone[0]))
            assert alone == list(range(alone[0], size)), "samples that a teacher begins come first"
        return whole, asks

    def _replayed(self, teachers: Sequence[Episode], tasks: Mapping[int, Task], journal: Journal) -> list[Episode]:
        """A teacher's episodes of several turns, answered and judged by the world."""
        if not teachers:
            return []
        assert self.world is not None, "turns are played in a world"
        self.land()  # those who fly live in it too
        pairs = [(one, tasks[_draw(one)]) for one in teachers]
        asks = [
            SampleRequest(one.key, task.problem, task.prompt, first=one.sample, name=(*one.key, one.sample))
            for one, task in pairs
        ]
        most = self.sampling.max_tokens
        turns = {
            ask.request_key: [ids[:most].astype(np.int32) for ids in task.turns]
            for ask, (_, task) in zip(asks, pairs, strict=True)
        }
        episodes = replayed(asks, turns, self.sampling, self.scorer, self.world)
        journal.append(*episodes)
        return episodes

    def _finished(self, graded: Sequence[Pending], journal: Journal) -> list[Episode]:
        """A teacher's whole responses, graded like any other while the policy spoke."""
        episodes = self.scorer.finish(graded)
        journal.append(*episodes)
        return episodes

    def _requests(self, asks: Sequence[SampleRequest], journal: Journal) -> list[Request]:
        """What `play` submits for these without a world."""
        return [ask.request(self._sampling(ask)) for ask in asks if not ask.is_known(journal.episodes)]

    def _sampling(self, ask: SampleRequest) -> Sampling:
        given, least = len(ask.prefix), self.sampling.min_tokens
        if not given:
            return self.sampling
        return replace(self.sampling, max_tokens=self.sampling.max_tokens - given, min_tokens=max(0, least - given))

    def _played(self, asks: Sequence[SampleRequest], journal: Journal) -> list[Episode]:
        if self._flight is not None:
            return self._flight.finish(asks, journal)
        # What a free schedule has finished outlives a kill.
        patience = self._patience if self._is_free else None
        return list(
            play(self.engine, asks, self._sampling, self.scorer, world=self.world, journal=journal, patience=patience)
        )

    @property
    def _is_free(self) -> bool:
        return self.world is not None and not self.world.is_exact

    def _group(self, task: Task, episodes: list[Episode], rollouts: Rollouts) -> Group:
        rollouts.episodes += episodes
        scored = [episode for episode in episodes if episode.reward is not None]
        rollouts.unscored += len(episodes) - len(scored)
        cuts = self.sampling.cuts_support or self.sampling.min_tokens > 0
        trajectories = [one for episode in scored for one in self._trajectories(episode, cuts)]
        return Group(task.problem, trajectories, tuple(map(len, task.turns)))

    def _trajectories(self, episode: Episode, cuts: bool) -> list[Trajectory]:
        trajectories = episode.trajectories(
            with_kept=cuts, with_turns=self.world is not None, turn_weight=self.turn_weight
        )
        for trajectory in trajectories:
            trajectory.episode = episode.sample if len(trajectories) > 1 else None
            trajectory.attempt = _draw(episode), episode.sample
            if self.mask_truncated and episode.truncated:
                trajectory.loss_mask_T = np.zeros_like(trajectory.loss_mask_T)
        return trajectories


def _number(episode: Episode) -> int:
    return episode.sample


def _draw(episode: Episode) -> int:
    return int(episode.key[2])


def _teachers(key: tuple[str | int, ...], number: int, task: Task) -> Episode:
    """What a teacher said, as an attempt of its own."""
    assert task.trace is not None
    zeros, trace = np.zeros(len(task.trace), dtype=np.float32), task.trace.astype(np.int32)
    return Episode.at_once(
        (*key, "trace"), number, task.problem.id, task.prompt.astype(np.int32), trace, zeros, zeros, "given",
        given=len(trace), question=task.problem.question,
    )  # fmt: skip
