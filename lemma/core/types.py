"""The data that is passed through Lemma: problems with responses of people or models, then trajectories of token ids.

Text is tokenised once, when a trajectory is made; after that only ids are passed on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Origin = Literal["policy", "teacher"]
Finish = Literal["stop", "length", "cancelled", "given"]

# The unit that an objective needs as a whole, and so what is never split over packs.
Scope = Literal["token", "sequence", "pair", "batch"]

# What a model gives for each trained token: its log-probability, the entropy and the log of the sum of squares of the
# probabilities that it is drawn from; a critic's value; the hidden state.
Output = Literal["logprobs", "entropy", "collisions", "values", "hidden"]


@dataclass(frozen=True, slots=True)
class Message:
    """`more` holds what chat templates use in addition to the text: `tool_calls`, or the `name` of a tool result."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.more}


def content_id(*parts: Any) -> str:
    """A short name that depends on content only: the same parts give the same name on every machine."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Problem:
    """One task. `golds` are spellings of the right answer, any of which counts; empty if none is known.

    `choices` are the options of a multiple-choice question, in the order shown; its gold is then a letter.
    `traces` are whole assistant texts by a teacher.
    """

    messages: tuple[Message, ...]
    golds: tuple[str, ...] = ()
    id: str = ""
    source: str = ""
    subject: str | None = None
    level: str | None = None
    choices: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.id:
            words = [(m.role, m.content, m.more) if m.more else (m.role, m.content) for m in self.messages]
            object.__setattr__(self, "id", content_id(words, self.golds, self.choices))

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), "")

    @property
    def system(self) -> str | None:
        return next((m.content for m in self.messages if m.role == "system"), None)

    @property
    def gold(self) -> str | None:
        return self.golds[0] if self.golds else None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A problem with an answer to imitate.

    Either `response` is the assistant text, word for word, or `reasoning` and `answer` are given and the format
    combines them. A verbatim `prompt`, if a data set has one, replaces the format's. In a conversation, the problem's
    assistant messages from index `turns_from` on may be trained on as well; `more` is what the response has in
    addition to its text, such as tool calls.
    """

    problem: Problem
    response: str | None = None
    reasoning: str | None = None
    answer: str | None = None
    prompt: str | None = None
    turns_from: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def earlier_turns(self) -> list[int]:
        """Indices of the assistant messages before the response that may be trained on: those that reply to another
        role. A verbatim prompt has none."""
        said = self.problem.messages
        start = len(said) if self.turns_from is None or self.prompt is not None else self.turns_from
        first = next((place for place, message in enumerate(said) if message.role == "user"), len(said))
        return [
            place
            for place in range(max(start, first), len(said))
            if said[place].role == "assistant" and (said[place].content.strip() or said[place].more)
        ]


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one problem, a preferred one and a rejected one."""

    problem: Problem
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Judged:
    """One response to a problem, and whether it is wanted."""

    problem: Problem
    response: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The score of an episode. None is unknown, not 0: such an episode counts nowhere, and `reason` says why."""

    reward: float | None
    success: bool | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TokenField:
    """What a token field means; it holds one number for each token or, with a `width`, so many."""

    meaning: str
    width: int | None = None


TOKEN_FIELDS = {
    "advantage": TokenField("how much better the token is than what was expected"),
    "sampler_logprobs": TokenField("its log-probability under the engine that sampled it"),
    "log_kept_mass": TokenField("the log of the probability mass that the sampling kept"),
    "old": TokenField("its log-probability before the first update on it"),
    "reference": TokenField("its log-probability under the reference model"),
    "collision": TokenField("the log of the sum of squared probabilities where it is drawn"),
    "off": TokenField("1 where a teacher chose it"),
    "target_prob": TokenField("its probability under that teacher"),
    "turn": TokenField("the number of its turn"),
    "paid": TokenField("the reward of a turn, on its last token"),
    "value": TokenField("the critic's value before the first update on it"),
    "return": TokenField("what that value should have been"),
    "response": TokenField("1 in the response of a preference"),
    "nll": TokenField("1 where its negative log-likelihood counts as well"),
}
"""The token fields that are known by name. An algorithm that adds others may declare them here, and must if they have a
width; undeclared ones hold one number for each token."""


@dataclass(slots=True)
class Trajectory:
    """A sequence of token ids and how it was made.

    `loss_mask_T` marks the tokens that the policy (or a teacher) chose: never the first one, which nothing
    predicts. `token_fields` (see `TOKEN_FIELDS`) and `fields` (one number) hold what an objective needs, and
    `model_inputs` what the model reads besides ids, such as images: arrays whose rows a pack puts one after the other,
    in the order of its sequences. If the objective's scope is `pair`, those of the same `group_id` are never split over
    micro-batches. Trajectories of a group with the same `episode` number are one attempt whose history was
    rewritten on the way: they count once. None: an attempt by itself. `attempt` is the number of the draw and of the
    sample that it was sampled for.
    """

    ids_T: np.ndarray
    loss_mask_T: np.ndarray
    rewards: dict[str, float] = field(default_factory=dict)
    origin: Origin = "policy"
    finish: Finish = "given"
    problem_id: str = ""
    group_id: int = 0
    episode: int | None = None
    attempt: tuple[int, int] | None = None
    policy_version: int = 0
    token_fields: dict[str, np.ndarray] = field(default_factory=dict)
    fields: dict[str, float] = field(default_factory=dict)
    model_inputs: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.ids_T) == len(self.loss_mask_T) > 0, "ids and mask must have the same length"
        assert not self.loss_mask_T[0], "nothing predicts the first token"

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask_T))

    def read(self, name: str) -> np.ndarray:
        """A token field at the trained tokens; 0 where it is absent."""
        if name not in self.token_fields:
            return np.zeros((self.trained_tokens, *width_of(name)))
        return np.asarray(self.token_fields[name], dtype=np.float64)[self.loss_mask_T]

    def write(self, name: str, numbers: np.ndarray) -> None:
        """Set a token field at the trained tokens, from a row that may be longer; 0 elsewhere."""
        self.token_fields[name] = np.zeros((len(self), *width_of(name)))
        self.token_fields[name][self.loss_mask_T] = numbers[: self.trained_tokens]


def width_of(name: str) -> tuple[int, ...]:
    """The shape that a token field has at each token."""
    width = TOKEN_FIELDS[name].width if name in TOKEN_FIELDS else None
    return () if width is None else (width,)


def write_tokens(name: str, trajectories: Sequence[Trajectory], rows: Sequence[np.ndarray]) -> None:
    """Set a token field of each trajectory, from a row for each."""
    for trajectory, numbers in zip(trajectories, rows, strict=True):
        trajectory.write(name, numbers)


@dataclass(slots=True)
class Group:
    """The attempts at one problem, as trajectories; those of one episode are adjacent.

    `trace_turns` are the lengths of the turns of a teacher's trace, where it takes several.
    """

    problem: Problem
    trajectories: list[Trajectory]
    trace_turns: tuple[int, ...] = ()

    @property
    def episodes(self) -> list[list[Trajectory]]:
        """The trajectories of each attempt: one, or several if its history was rewritten."""
        episodes: list[list[Trajectory]] = []
        for one in self.trajectories:
            if episodes and one.episode is not None and one.episode == episodes[-1][0].episode:
                episodes[-1].append(one)
            else:
                episodes.append([one])
        return episodes


def problem_of(item: Any) -> Problem:
    """The problem that an item is about."""
    return item if isinstance(item, Problem) else item.problem
