"""What a completion says and what it is worth: text, format, verdict and rewards. The grader works meanwhile."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lemma.core.types import Outcome, Problem
from lemma.formats import Format, read_answer
from lemma.formats.detokenizer import Detokenizer
from lemma.grading import DEFAULT, GradingService, Rules
from lemma.rewards import Reward, RewardInput, combine
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.journal import Journal

# Episodes that are scored together.
BATCH = 64
# How many verdicts may be on their way before the oldest is waited for.
MOST_WAITING = 4096


@dataclass(slots=True)
class Pending:
    """An episode whose verdict is on its way."""

    episode: Episode
    item: RewardInput


class Scorer:
    """Reads completions by one format and scores them by some rewards.

    `grade` asks the grader even where no reward needs a verdict, as an evaluation does. `ends` are the tokens that end
    a completion in addition to the tokenizer's end-of-sequence token.
    """

    def __init__(
        self,
        fmt: Format,
        rewards: Sequence[Reward],
        tokenizer: Any,
        *,
        service: GradingService | None = None,
        rules: Rules = DEFAULT,
        grade: bool = True,
        ends: Collection[int] = (),
    ):
        self.fmt, self.rewards, self.tokenizer = fmt, list(rewards), tokenizer
        self.service, self.rules, self.ends = service, rules, frozenset(ends)
        self.detokenizer = Detokenizer(tokenizer)
        self.needs_verdict = grade or any(reward.needs_verdict for reward in rewards)
        self.seconds = 0.0
        """Time that reading, waiting for verdicts and scoring took so far."""

    def begin(self, problem: Problem, episode: Episode, outcome: Outcome | None = None) -> Pending:
        """Parse what was said last and begin grading it; nothing is waited for. An environment's `outcome` decides."""
        if not episode.turns[-1].text:
            self.read([episode])
        began = time.perf_counter()
        last = episode.turns[-1]
        fmt, rules = self.reads(problem, episode)
        parsed = read_answer(fmt, last.text, last.finish, rules)
        if outcome is not None and outcome.reward is not None:
            outcome = replace(outcome, reward=outcome.reward + episode.paid)
        episode.reasoning, episode.answer, episode.faults = parsed.reasoning, parsed.answer, parsed.faults
        episode.format_ok, episode.gold = parsed.ok, problem.golds
        item = RewardInput(
            last.text,
            problem,
            parsed,
            last.ids.tolist(),
            last.finish,
            service=self.service,
            rules=rules,
            format=fmt,
            earlier=[turn.ids.tolist() for turn in episode.turns[:-1]],
            outcome=outcome,
        )
        if self.needs_verdict:
            item.ask()
        self.seconds += time.perf_counter() - began
        return Pending(episode, item)

    def read(self, episodes: Sequence[Episode]) -> None:
        """The texts of what was said last, decoded together where they are not known yet."""
        began = time.perf_counter()
        if fresh := [episode.turns[-1] for episode in episodes if not episode.turns[-1].text]:
            texts = texts_of([(turn.ids, turn.finish) for turn in fresh], self.detokenizer, self.ends)
            for turn, text in zip(fresh, texts, strict=True):
                turn.text = text
        self.seconds += time.perf_counter() - began

    def reads(self, problem: Problem, episode: Episode) -> tuple[Format, Rules]:
        """The format and the rules by which an episode is read; an evaluation has others for each benchmark."""
        return self.fmt, self.rules

    def text(self, turn: Turn) -> str:
        """What was said in a turn, without the token that ended it."""
        return text_of(turn.ids, turn.finish, self.detokenizer, self.ends)

    def finish(self, pending: Sequence[Pending]) -> list[Episode]:
        """Wait for the verdicts of these and score them together."""
        began = time.perf_counter()
        scored = combine(self.rewards, [one.item for one in pending])
        for one, score in zip(pending, scored, strict=True):
            episode = one.episode
            episode.rewards, episode.reward = dict(score.parts), score.total
            if self.needs_verdict:
                verdict = one.item.verdict
                episode.verdict, episode.reason = verdict.kind, verdict.reason
        self.seconds += time.perf_counter() - began
        return [one.episode for one in pending]


@dataclass
class ScoringQueue:
    """Episodes that are being graded, in the order in which they are scored and written to their journals."""

    _scorer: Scorer
    _journals: dict[int, Journal | None] = field(default_factory=dict)
    _settled: float = field(default_factory=time.monotonic)
    # In the order in which they came, whatever that depended on.
    _outside: list[Pending] = field(default_factory=list)
    _all: list[Pending] = field(default_factory=list)

    def add(self, pending: Pending, journal: Journal | None, *, waits: bool = False) -> None:
        """One more, at the end; if it `waits`, not before `let_in`."""
        (self._outside if waits else self._all).append(pending)
        self._journals[id(pending)] = journal

    def let_in(self) -> None:
        """Queue those that wait, in the order of their keys."""
        self._all += sorted(self._outside, key=lambda one: one.episode.order)
        self._outside = []

    def graded(self) -> list[Pending]:
        return [one for one in self._all if not one.item.is_waiting]

    def due(self, patience: float | None) -> list[Pending]:
        """What should be scored now: all that is graded after `patience`, or else a full batch, or nothing."""
        if patience is not None and time.monotonic() - self._settled >= patience:
            self._settled = time.monotonic()
            return self.graded()
        batch = self._all[:BATCH]
        if len(batch) == BATCH and (len(self._all) >= MOST_WAITING or not any(one.item.is_waiting for one in batch)):
            return batch
        return []

    def settle(self, part: Sequence[Pending]) -> list[Episode]:
        """Score these together, write them to their journals, and wait for them no more."""
        if not part:
            return []
        episodes = self._scorer.finish(part)
        gone = {id(pending) for pending in part}
        self._all = [one for one in self._all if id(one) not in gone]
        by_journal: dict[int, tuple[Journal, list[Episode]]] = {}
        for pending, episode in zip(part, episodes, strict=True):
            journal = self._journals.pop(id(pending))
            if journal is not None:
                by_journal.setdefault(id(journal), (journal, []))[1].append(episode)
        for journal, own in by_journal.values():
            journal.append(*own)
        self._settled = time.monotonic()
        return episodes

    def settle_all(self) -> list[Episode]:
        if self._outside:
            self.let_in()
        episodes: list[Episode] = []
        while self._all:
            episodes += self.settle(self._all[:BATCH])
        return episodes


def text_of(ids: np.ndarray, finish: str, detokenizer: Detokenizer, ends: Collection[int] = ()) -> str:
    """The text of a response; the end token that ended it, the tokenizer's or one of `ends`, is not part of it."""
    return detokenizer.text(_without_end(ids, finish, detokenizer.tokenizer, ends))


def texts_of(
    responses: Sequence[tuple[np.ndarray, str]], detokenizer: Detokenizer, ends: Collection[int] = ()
) -> list[str]:
    """`text_of` for many ids and finishes."""
    return detokenizer.texts([_without_end(ids, finish, detokenizer.tokenizer, ends) for ids, finish in responses])


def _without_end(ids: np.ndarray, finish: str, tokenizer: Any, ends: Collection[int]) -> np.ndarray:
    last = int(ids[-1]) if len(ids) else None
    is_ended = finish in ("stop", "given") and last is not None and (last == tokenizer.eos_token_id or last in ends)
    return ids[:-1] if is_ended else ids
