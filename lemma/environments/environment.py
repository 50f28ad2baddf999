"""What replies to the policy between its turns. One instance serves one episode.

Its state depends only on the problem, the seed and the policy's turns: an episode can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from lemma.config import Options
from lemma.core.types import Finish, Message, Outcome, Problem

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.formats.tool_prompt import ToolSpeech


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said in a turn, without the token that ended it, and how the turn ended.

    If the environment has tools, `code` is the code block and `tool_calls` are the calls found in the text: each a
    mapping with `name` and `arguments`, or with `error`, a sentence that says what is wrong with the call. `answer` is
    the answer that the stage's format finds, or None.
    """

    text: str
    finish: Finish = "stop"
    code: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None


# How a reply begins that says why an action could not be carried out.
ERROR = "error: "


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads next. `done` ends the episode; `reward` is for this turn, in addition to `score`.

    `prompt` is for agents without a growing conversation: it replaces the whole history by one message, and `text` is
    only shown to people. `results` are the results of tool calls, one for each: the policy reads these if the chat
    template has a place for tool results, otherwise `text`.
    """

    text: str = ""
    done: bool = False
    reward: float | None = None
    prompt: str | None = None
    results: tuple[str, ...] = ()


class WorldGone(Exception):
    """Raise this if the world is lost and a fresh one may work: its server died, or reported a failure.

    The episode is then replayed up to the same action, which gets one more try. `ConnectionError` and `TimeoutError`
    have the same effect.
    """


class Environment:
    """Override `step` and `score`, and `reset` if an episode begins with more than its problem.

    Each may be `async`. A class may set `reset_seconds`, `step_seconds` and `score_seconds`: the deadlines of its calls
    unless the recipe sets them.
    """

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        """Start an episode. Returns messages to put after the problem's own in the first prompt.

        Also called when a stage prepares its problems: the same problem and seed must give the same messages.
        """
        return []

    def step(self, action: Action) -> Observation:
        """Observation to a turn of the policy."""
        raise NotImplementedError

    def score(self) -> Outcome:
        """The outcome of the episode, once it is over."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the episode's resources. Always called, once."""


class EnvironmentOptions(Options):
    """Which environment, and how far an episode may go."""

    name: str = ""
    """Which environment."""
    turns: int = Field(8, ge=1)
    """Maximum number of turns in an episode."""
    reply_tokens: int = Field(512, ge=1)
    """Maximum number of tokens in a reply; the middle of a longer one is cut out, and the metrics count it."""
    episode_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in an episode, prompt and replies included. Default: the model's context."""
    reset_seconds: float | None = Field(None, gt=0)
    """Time limit of the call that begins an episode. Default: what the class says, or 60."""
    step_seconds: float | None = Field(None, gt=0)
    """Time limit of a reply. Default: what the class says, or 60."""
    score_seconds: float | None = Field(None, gt=0)
    """Time limit of the call that scores an episode. Default: what the class says, or 60."""
    episode_seconds: float | None = Field(None, gt=0)
    """Time limit of all calls of an episode together; when it is reached, the episode ends and is scored. Default: no
    limit."""
    workers: int = Field(0, ge=0)
    """Processes that the environments run in. 0 runs them in the trainer's process, where a call that hangs cannot be
    stopped."""
    worker_calls: int | None = Field(None, ge=1)
    """Calls that one worker makes at the same time, in threads; use 1 if the class is not thread-safe. Default: 256 if
    `step` is `async`, otherwise 1."""
    episodes: int | None = Field(None, ge=1)
    """Maximum number of episodes played at the same time; those of one problem (`group_size`) begin together. Default:
    as many as fit the engine's cache."""
    schedule: Literal["exact", "free"] | None = None
    """exact sends all turns with the same number together, in the order of their keys, so that a run is reproducible
    bit for bit; free sends a turn as soon as its reply is there. Default: exact on a CPU and with `run.deterministic`,
    otherwise free."""
    limit_reward: float = 0.0
    """Reward of an episode in which the same action broke the environment twice: it counts as wrong, with the reason
    `limit`."""
    unknown_limit: float = Field(0.2, ge=0, le=1)
    """Share of a step's episodes that may end without a known reward; above it the run stops."""

    needs_columns: ClassVar[bool] = False
    """Whether problems keep all columns of the row that they came from, as `extra["row"]`."""
    is_stepped: ClassVar[bool] = True
    """Whether the policy's turns are passed to `step`; otherwise the environment calls the model itself."""
    is_graded: ClassVar[bool] = False
    """Whether the stage's rewards judge what was said last, as without an environment; `score` is not called.
    Otherwise the environment says what was a success, and no grader does."""
    is_single_turn: ClassVar[bool] = False
    """Whether there is only one response, scored by the rewards alone."""
    says_first: ClassVar[bool] = True
    """Whether `reset` may have something to say before the first turn: then each problem is begun once to hear it."""

    @property
    def label(self) -> str:
        """Its name in results."""
        return self.name.rpartition(":")[2]

    def speech(self, fmt: Format, tokenizer: Any) -> ToolSpeech | None:
        """How the policy calls tools; None if there are none."""
        return None

    def make(self) -> Environment:
        """A world for one episode."""
        raise NotImplementedError

    def introduced(self, problem: Problem, messages: Sequence[Message]) -> Problem:
        """The problem with the messages of `reset`."""
        return replace(problem, messages=(*problem.messages, *messages)) if messages else problem

    def check(self) -> None:
        """Refuse what can never work, such as a class that does not exist, before anything is loaded."""

    def close(self) -> None:
        """Release what is kept from step to step. Always called, when no more episodes are played."""

    def problems(self, split: str) -> Sequence[Problem] | None:
        """The environment's own problems of a split, always the same and in the same order; None if it has none.

        `lemma eval MODEL --environment NAME --split dev` plays these.
        """
        return None

    def summarise(self, attempts: Sequence[Attempt]) -> Mapping[str, Sequence[float]]:
        """The environment's own metrics, in addition to success and turns.

        A metric is one number from 0 to 1 for each unit, such as a task or a scenario: the evaluation reports their
        mean and its 95% interval. Unknown ones are left out.
        """
        return {}

    def longest_episode(self, turn_tokens: int) -> int:
        """Maximum number of tokens after the first prompt, including the template's tokens between turns."""
        most = self.turns * turn_tokens + (self.turns - 1) * (self.reply_tokens + MARKS)
        return most if self.episode_tokens is None else min(most, self.episode_tokens)

    @property
    def deadlines(self) -> Deadlines:
        """The time limit of each call in seconds."""
        return self.deadlines_of(None)

    @property
    def calls_at_once(self) -> int:
        """Calls that one worker makes at the same time."""
        return self.worker_calls or 1

    @property
    def world_key(self) -> str:
        """Equal for options whose worlds are the same, however episodes are played in them."""
        rest = self.model_dump_json(by_alias=True, exclude=OF_EPISODES)
        return f"{type(self).__module__}.{type(self).__qualname__} {rest}"

    @property
    def keeps_time(self) -> bool:
        """Whether calls end by themselves at their deadlines, so that a hanging call does not cost its worker."""
        return False

    def deadlines_of(self, world_class: type | None) -> Deadlines:
        """The recipe's deadlines, else the class's, else the default."""
        chosen = {}
        for call in ("reset", "step", "score"):
            name = f"{call}_seconds"
            own = getattr(self, name)
            chosen[call] = float(own if own is not None else getattr(world_class, name, SECONDS))
        return Deadlines(**chosen)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits of an environment's calls in seconds."""

    reset: float
    step: float
    score: float


# Options that say how episodes are played, not what their worlds are.
OF_EPISODES = {"turns", "episode_tokens", "episode_seconds", "episodes", "schedule", "limit_reward", "unknown_limit"}

# Default time limit of a call.
SECONDS = 60.0


# Upper estimate of a chat template's tokens between two turns.
MARKS = 32


class SingleTurn(EnvironmentOptions):
    """One response, scored by the stage's rewards."""

    name: Literal["single_turn"] = "single_turn"
    """A single response."""
    turns: int = Field(1, ge=1, le=1)
    """Always 1."""

    is_graded: ClassVar[bool] = True
    is_single_turn: ClassVar[bool] = True
    says_first: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode of an evaluation. None is unknown, never a failure."""

    problem: Problem
    sample: int
    turns: int
    success: bool | None
    reward: float | None = None
