"""One attempt at a problem: what the policy read and said turn by turn, what it says in the end and what it is worth.

This is what a row of the journal holds (`lemma/rollouts/journal_rows.py`); the text is there for people to read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lemma.core.types import Finish, Origin, Trajectory

VerdictKind = Literal["right", "wrong", "unknown"]


@dataclass(slots=True)
class Turn:
    """What the policy read and what it then said.

    `context` are the ids that it had not read before where the turn `extends` the one before, otherwise all that it
    read. `ids` is the whole response; its first `given` tokens were put there by a teacher and were not sampled: their
    log-probabilities are 0 and mean nothing. `versions` are spans of the policy's versions: the first token of each
    span, and the version that sampled it. `heard` is what came back, in words; `cut` where it was shortened.
    `calls` counts tool calls, `bad_calls` those among them that could not be made.
    """

    context: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    finish: Finish
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    given: int = 0
    extends: bool = False
    text: str = ""
    heard: str = ""
    cut: bool = False
    calls: int = 0
    bad_calls: int = 0
    reward: float | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Episode:
    """The turns of one attempt. A problem that is answered at once is an episode of one turn.

    `verdict` is None where nothing asked the grader, `reward` where no reward applies or the verdict is unknown.
    `question` and `gold` are for people who read the journal.
    """

    key: tuple[str | int, ...]
    sample: int
    problem_id: str
    turns: list[Turn]
    question: str = ""
    gold: tuple[str, ...] = ()
    reasoning: str | None = None
    answer: str | None = None
    faults: tuple[str, ...] = ()
    format_ok: bool = False
    verdict: VerdictKind | None = None
    reason: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None

    @classmethod
    def at_once(
        cls,
        key: tuple[str | int, ...],
        sample: int,
        problem_id: str,
        context: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
        kept: np.ndarray,
        finish: Finish,
        *,
        version: int = 0,
        given: int = 0,
        text: str = "",
        seconds: float = 0.0,
        **rest: Any,
    ) -> Episode:
        """An episode of one turn."""
        turn = Turn(context, ids, logprobs, kept, finish, ((0, version),), given, text=text, seconds=seconds)
        return cls(key, sample, problem_id, [turn], **rest)

    # --- what was said, over all turns -----------------------------------------------------------------------------

    @property
    def prompt(self) -> np.ndarray:
        """What the policy read first."""
        return self.turns[0].context

    @property
    def ids(self) -> np.ndarray:
        """Everything that was said."""
        return _joined([turn.ids for turn in self.turns])

    @property
    def logprobs(self) -> np.ndarray:
        """Of everything that was said; 0 where a teacher said it."""
        return _joined([turn.logprobs for turn in self.turns])

    @property
    def given(self) -> int:
        """Tokens that a teacher said: the beginning of the first turn, or everything."""
        return sum([turn.given for turn in self.turns])

    @property
    def tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum([len(turn.ids) - turn.given for turn in self.turns])

    @property
    def text(self) -> str:
        """What was said last."""
        return self.turns[-1].text

    @property
    def finish(self) -> Finish:
        return self.turns[-1].finish

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def origin(self) -> Origin:
        given = self.given
        return "teacher" if given and given == len(self.ids) else "policy"

    @property
    def paid(self) -> float:
        """What the environment paid for single turns, in addition to what the whole was worth."""
        return math.fsum(turn.reward for turn in self.turns if turn.reward is not None)

    @property
    def draw(self) -> int:
        """In training, the number of the draw that it is an attempt at."""
        return int(self.key[2])

    @property
    def order(self) -> tuple[str, int]:
        """Episodes are sorted by this; it does not depend on timing."""
        return (repr(self.key), self.sample)

    def context(self, number: int) -> np.ndarray:
        """All ids that the policy had read when turn `number` began."""
        parts: list[np.ndarray] = []
        for turn in self.turns[number::-1]:
            if parts:
                parts.insert(0, turn.ids)
            parts.insert(0, turn.context)
            if not turn.extends:
                break
        return _joined(parts)

    # --- what is learnt from ---------------------------------------------------------------------------------------

    def trajectories(
        self, *, with_kept: bool = False, with_turns: bool = False, turn_weight: float = 1.0
    ) -> list[Trajectory]:
        """Ids to learn from: one trajectory where each turn extends the last, one more wherever history is rewritten.

        Token fields: `sampler_logprobs`; `off`, 1 where a teacher spoke; where asked for, `log_kept_mass`, and of turns
        their number as `turn` and as `paid`, at the last token of each, what the environment paid for it, times
        `turn_weight`.
        """
        runs: list[list[int]] = []
        for number, turn in enumerate(self.turns):
            if turn.extends and runs:
                runs[-1].append(number)
            else:
                runs.append([number])
        found = [self._trajectory(run, with_kept) for run in runs]
        if with_turns:
            for run, trajectory in zip(runs, found, strict=True):
                trajectory.token_fields |= self._of_turns(run, turn_weight)
        return found

    def _of_turns(self, numbers: Sequence[int], weight: float) -> dict[str, np.ndarray]:
        turns = [self.turns[number] for number in numbers]
        said = _said(turns)
        numbered_T, paid_T = np.zeros(said[-1].stop), np.zeros(said[-1].stop)
        for number, turn, place in zip(numbers, turns, said, strict=True):
            numbered_T[place] = number
            if len(turn.ids):
                paid_T[place.stop - 1] = weight * (turn.reward or 0.0)
        return {"turn": numbered_T, "paid": paid_T}

    def _trajectory(self, numbers: Sequence[int], with_kept: bool) -> Trajectory:
        turns = [self.turns[number] for number in numbers]
        said = _said(turns)
        length = said[-1].stop
        loss_mask_T, off_T, sampler_T = np.zeros(length, dtype=bool), np.zeros(length), np.zeros(length, np.float32)
        for turn, place in zip(turns, said, strict=True):
            loss_mask_T[place] = True
            sampler_T[place] = turn.logprobs - turn.kept
            if turn.given:
                off_T[place.start : place.start + turn.given] = 1.0
        fields = {"sampler_logprobs": sampler_T}
        if with_kept:
            fields["log_kept_mass"] = kept_T = np.zeros(length)
            for turn, place in zip(turns, said, strict=True):
                kept_T[place] = turn.kept
        rewards = {name: value for name, value in self.rewards.items() if value is not None}
        if self.reward is not None:
            rewards["total"] = self.reward
        return Trajectory(
            ids_T=np.concatenate([part for turn in turns for part in (turn.context, turn.ids)], dtype=np.int64),
            loss_mask_T=loss_mask_T,
            rewards=rewards,
            origin=self.origin,
            finish=self.finish,
            problem_id=self.problem_id,
            policy_version=turns[-1].versions[-1][1],
            token_fields=fields | {"off": off_T},
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _said(turns: Sequence[Turn]) -> list[slice]:
    """Where in a trajectory of these turns each one's words stand; what is read stands before."""
    places, end = [], 0
    for turn in turns:
        start = end + len(turn.context)
        end = start + len(turn.ids)
        places.append(slice(start, end))
    return places
