"""The rollouts of one step: groups of graded samples, a teacher's traces among them where the algorithm wants them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lemma.core.errors import UserError, warn
from lemma.core.faults import fault_point
from lemma.core.ranks import own_slots, slots, together
from lemma.core.types import Group
from lemma.engines.protocol import Engine, Sampling
from lemma.engines.sampling import cuts_support
from lemma.rewards import Reward
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import play
from lemma.rollouts.journal import Journal, journal_path
from lemma.rollouts.journal_reader import drawn_after
from lemma.rollouts.multi_turn import World
from lemma.rollouts.order import ProblemOrder, Task
from lemma.rollouts.partial_rollouts import PartialRollouts
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Scorer
from lemma.rollouts.teacher_traces import begun_by_teacher, replay_traces

if TYPE_CHECKING:
    from lemma.algorithms import Algorithm

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
    without_signal: int = 0
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

    With partial rollouts, later steps begin with one that is waited for, and go on after it.
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
        is_partial: bool = False,
    ):
        self.engine, self.scorer, self.sampling, self.algorithm, self.order = engine, scorer, sampling, algorithm, order
        self.folder, self.problems, self.further_rounds = folder, problems, further_rounds
        self.seed, self.name, self.data, self.mask_truncated = seed, name, data, mask_truncated
        self.world, self._is_free = world, world is not None and not world.is_exact
        self.turn_weight = sum(reward.weight for reward in scorer.rewards if reward.name == "environment")
        self._begun: dict[int, _Begun] = {}
        each_alone = all(type(reward).score_all is Reward.score_all for reward in scorer.rewards)
        self._patience = SECONDS_UNWRITTEN if each_alone else None
        self._partial: PartialRollouts | None = None
        if is_partial:
            most = algorithm.group_size * math.ceil(problems * len(own_slots()) / slots())
            self._partial = PartialRollouts(engine, sampling, scorer, world, most=most, patience=self._patience)

    def step(self, step: int, until: int = 0) -> Rollouts:
        """Groups in the order of their draws; with further rounds, those with a signal only, at most as many as wanted.
        With partial rollouts, all steps up to `until` have begun afterwards."""
        for number in range(step, max(step, until) + 1):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        begun, has_signal = self._begun.pop(step), self.algorithm.has_signal
        journals = begun.journals
        graded_before = self.scorer.seconds
        rollouts = Rollouts(wanted=self.problems, from_journal=all(one.is_complete for one in journals.values()))
        missing = self.problems
        for round_ in range(1 + self.further_rounds):
            drawn = begun.drawn if not round_ else self._draw(begun, missing)
            groups = self._round(step, drawn, journals, rollouts)
            rollouts.rounds += 1
            useful = [one for one in groups if any(t.trained_tokens for t in one.trajectories) and has_signal(one)]
            rollouts.without_signal += len(groups) - len(useful)
            rollouts.groups += useful if self.further_rounds else groups
            if len(rollouts.groups) >= self.problems or round_ == self.further_rounds:
                break
            missing = self._next_count(rollouts)
        rollouts.groups = rollouts.groups[: self.problems]
        if self.world is not None and rollouts.unscored > self.world.options.unknown_limit * len(rollouts.episodes):
            self._refuse_unknown(rollouts, journals.values())
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

    def drain(self) -> None:
        """Finish every response that has begun: the engine has other work."""
        if self._partial is not None:
            self._partial.drain()

    def go_on_after(self, step: int) -> None:
        """Draw no problem again that a journal of a later step is about."""
        self.order.drawn = max(self.order.drawn, drawn_after(self.folder, step, self.data))

    def _begin(self, step: int) -> _Begun:
        """Open the journals of a step and draw its problems; with partial rollouts, ask for them."""
        begun = _Begun({}, [])

        def open_own() -> list[int]:
            begun.journals |= {slot: self._journal(step, slot) for slot in own_slots()}
            return [draw for journal in begun.journals.values() for draw in journal.draws]

        begun.recorded = sorted({draw for part in together(open_own, "the journals") for draw in part})
        begun.drawn = self._draw(begun, self.problems)
        if self._partial is not None:
            asks = [ask for draw, task in begun.drawn for ask in self._asks(step, draw, task, Rollouts())[1]]
            for slot, journal in begun.journals.items():
                self._partial.begin([ask for ask in asks if int(ask.key[2]) % slots() == slot], journal)
        return begun

    def _draw(self, begun: _Begun, count: int) -> list[tuple[int, Task]]:
        """The next problems of a step: those that it was about before a run was interrupted, then new ones."""
        known, begun.recorded = begun.recorded[:count], begun.recorded[count:]
        drawn = self.order.draw(count - len(known))
        if self._partial is not None and drawn:
            for journal in begun.journals.values():
                if not journal.is_complete:
                    journal.note_draws([draw for draw, _ in drawn])
        return [*((draw, self.order.at(draw)) for draw in known), *drawn]

    def _refuse_unknown(self, rollouts: Rollouts, journals: Iterable[Journal]) -> None:
        """Too many episodes of an environment have no known worth. The next run plays the step again."""
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
        """What is known of a slot of this step: all of it, or nothing; with a free schedule, and with partial rollouts,
        whatever there is."""
        journal = Journal(journal_path(self.folder, step, slot if slots() > 1 else None), self.data)
        foreign = any(episode.key[:2] != (self.name, step) for episode in journal.episodes.values())
        if journal.damaged or (journal.is_complete and foreign):
            what = "holds samples of another step" if foreign else "is not what was written"
            warn(f"{journal.path} {what}; step {step} is sampled again")
        keeps_part = (self._partial is not None or self._is_free) and not journal.is_ended
        if not journal.is_new and (foreign or not (journal.is_complete or keeps_part)):
            journal.clear()
        return journal

    def _next_count(self, rollouts: Rollouts) -> int:
        """How many more problems will probably do, by the share of groups with a signal so far; never more than a whole
        step."""
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
            if self._partial is not None:
                for slot, journal in journals.items():
                    self._partial.begin(asks[slot], journal, is_urgent=True)
            elif self.world is None and slots() > 1:
                self.engine.announce(
                    {
                        slot: [
                            one.request(self.sampling) for one in own if len(one.known(journals[slot].episodes)) < one.n
                        ]
                        for slot, own in asks.items()
                    }
                )
            for slot, journal in journals.items():
                teachers = [one for draw in tasks if draw % slots() == slot for one in wanted[draw][0]]
                with self.engine.slot(slot) if slots() > 1 and self._partial is None else nullcontext():
                    if teachers:
                        episodes += self._with_teachers(tasks, teachers, asks[slot], journal)
                    else:
                        episodes += self._played(asks[slot], journal)
            return episodes

        played: dict[int, list[Episode]] = {draw: [] for draw in tasks}
        for part in together(own_part, "the samples of a round"):
            for episode in part:
                played[episode.draw].append(episode)
        rollouts.drawn += len(drawn)
        groups = {draw: sorted(own, key=lambda one: one.sample) for draw, own in played.items()}
        return [self._group(tasks[draw], own, rollouts) for draw, own in groups.items()]

    def _with_teachers(
        self, tasks: Mapping[int, Task], teachers: Sequence[Episode], asks: Sequence[SampleRequest], journal: Journal
    ) -> list[Episode]:
        """What is played for one slot in which a teacher speaks too: graded like any other while the policy generates,
        or played again in the world where it takes several turns."""
        known = [journal.episodes[one.order] for one in teachers if one.order in journal.episodes]
        fresh = [one for one in teachers if one.order not in journal.episodes]
        in_turns = [(one, tasks[one.draw]) for one in fresh if tasks[one.draw].turns]
        if in_turns:
            assert self.world is not None, "turns are played in a world"
            self.drain()  # partial rollouts live in it too
            replayed = replay_traces(in_turns, self.sampling, self.scorer, self.world)
            journal.append(*replayed)
            known += replayed
        graded = [self.scorer.begin(tasks[one.draw].problem, one) for one in fresh if not tasks[one.draw].turns]
        played = self._played(asks, journal)
        given = self.scorer.finish(graded)
        journal.append(*given)
        return [*known, *played, *given]

    def _asks(self, step: int, draw: int, task: Task, rollouts: Rollouts) -> tuple[list[Episode], list[SampleRequest]]:
        """What a teacher says in full, and what the policy is asked: alone, or after the beginning of a trace."""
        key, size = (self.name, step, draw), self.algorithm.group_size
        alone = list(range(size))
        whole: list[Episode] = []
        asks: list[SampleRequest] = []
        if task.trace is not None and task.longest_turn > self.sampling.max_tokens:
            rollouts.long_traces += 1
        elif task.trace is not None:
            lengths = self.algorithm.prefix_lengths(
                len(task.trace), seed=self.seed, step=step, problem_id=task.problem.id
            )
            whole, asks, alone = begun_by_teacher(key, task, lengths)
        if alone:
            # The noise of a sample belongs to its number among those that the policy begins itself.
            asks.append(SampleRequest(key, task.problem, task.prompt, len(alone), first=alone[0]))
            assert alone[-1] == size - 1, "samples that a teacher begins come first"
        return whole, asks

    def _played(self, asks: Sequence[SampleRequest], journal: Journal) -> list[Episode]:
        if self._partial is not None:
            return self._partial.finish(asks, journal)
        # What a free schedule has finished outlives a kill.
        patience = self._patience if self._is_free else None
        return list(
            play(self.engine, asks, self.sampling, self.scorer, world=self.world, journal=journal, patience=patience)
        )

    def _group(self, task: Task, episodes: list[Episode], rollouts: Rollouts) -> Group:
        rollouts.episodes += episodes
        scored = [episode for episode in episodes if episode.reward is not None]
        rollouts.unscored += len(episodes) - len(scored)
        cuts = cuts_support(self.sampling) or self.sampling.min_tokens > 0
        group = Group(task.problem, [], tuple(map(len, task.turns)))
        for episode in scored:
            trajectories = episode.trajectories(
                with_kept=cuts, with_turns=self.world is not None, turn_weight=self.turn_weight
            )
            for trajectory in trajectories:
                trajectory.episode = episode.sample if len(trajectories) > 1 else None
                trajectory.attempt = episode.draw, episode.sample
                if self.mask_truncated and episode.finish == "length":
                    trajectory.loss_mask_T = np.zeros_like(trajectory.loss_mask_T)
            group.trajectories += trajectories
        return group
