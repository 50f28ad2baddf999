"""The turns of an episode in an environment: action, observation, action, until it is over and scored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from lemma.core.faults import fault_point
from lemma.core.types import Finish, Outcome
from lemma.engines.protocol import Completion, Request, Sampling
from lemma.environments import Action, EnvironmentOptions
from lemma.environments.env_handle import EnvFailure, EnvHandle
from lemma.environments.env_pool import EnvPool
from lemma.rollouts.episode import Episode
from lemma.rollouts.sample_request import SampleRequest, turn_of

if TYPE_CHECKING:
    from lemma.formats.bridge import Bridge
    from lemma.rollouts.scorer import Scorer

Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class World:
    """Where episodes are played: which environment, how a reply becomes ids, and how long everything may become.

    `understand` makes of a turn's text and end what the environment hears.
    """

    options: EnvironmentOptions
    bridge: Bridge
    context: int
    seed: int = 0
    schedule: Literal["exact", "free"] = "exact"
    understand: Callable[[str, Finish], Action] = Action

    @property
    def pool(self) -> EnvPool:
        """The environments of these options; their workers start with the first episode and live until `close`."""
        return EnvPool.of(self.options)

    @property
    def is_exact(self) -> bool:
        return (self.options.schedule or self.schedule) == "exact"

    @property
    def longest(self) -> int:
        """Maximum number of tokens in an episode."""
        most = self.options.episode_tokens
        return self.context if most is None else min(most, self.context)

    def most_tokens(self, ask: SampleRequest, sampling: Sampling) -> int:
        """Tokens that an episode may have in the end."""
        most = len(ask.prompt) + len(ask.prefix) + self.options.longest_episode(sampling.max_tokens)
        return min(most, self.longest)

    def close(self) -> None:
        """End the workers, and whatever else the environment runs."""
        self.pool.close()
        self.options.close()


async def play_turns(
    ask: SampleRequest,
    first: Awaitable[Completion],
    sampling: Sampling,
    world: World,
    generate: Generate,
    scorer: Scorer,
) -> tuple[Episode, Outcome | None]:
    """An episode from its first completion, which is on its way, to its end, and what the environment says of it; None
    if the rewards alone score it. An environment that fails ends the episode, whose worth is then unknown."""
    env = world.pool.open(ask.problem, world.seed)
    begun = env.reset()
    try:
        episode = ask.episode(await first)
        fault_point("rollouts.sampled")
        await begun
        while (new := await _observation(episode, world, env, scorer)) is not None:
            request = _next_request(episode, new, sampling, world)
            if request is None:
                break
            completion = await generate(request)
            episode.turns.append(turn_of(completion, new.ids, extends=new.extends))
        return episode, None if world.options.is_graded else await env.score()
    except EnvFailure as failure:
        worth = world.options.limit_reward if failure.is_limit else None
        return episode, Outcome(worth, False if failure.is_limit else None, failure.reason)
    finally:
        env.leave()


@dataclass(frozen=True, slots=True)
class _New:
    """What the policy reads before its next turn: ids behind all before, or in their place."""

    ids: np.ndarray
    extends: bool


async def _observation(episode: Episode, world: World, env: EnvHandle, scorer: Scorer) -> _New | None:
    """What the environment replies to the last turn; None if the episode is over."""
    turn = episode.turns[-1]
    turn.text = scorer.text(turn)
    action = world.understand(turn.text, turn.finish)
    turn.calls, turn.bad_calls = len(action.tool_calls), sum("error" in call for call in action.tool_calls)
    reply = await env.step(action)
    turn.heard, turn.reward = reply.text, reply.reward
    most = world.options.episode_seconds
    is_late = most is not None and env.seconds >= most
    if reply.done or is_late or len(episode.turns) >= world.options.turns:
        return None
    if reply.prompt is not None:
        return _New(world.bridge.anew(reply.prompt), extends=False)
    ids, turn.cut = world.bridge.answer(turn.ids, reply.text, reply.results)
    return _New(ids, extends=True)


def _next_request(episode: Episode, new: _New, sampling: Sampling, world: World) -> Request | None:
    """The policy's next turn; None if there is no room for it."""
    number = len(episode.turns)
    read = new.ids
    if new.extends:
        read = np.concatenate([episode.context(number - 1), episode.turns[-1].ids, read])
    room = world.longest - len(read)
    if room < 1:
        return None
    limits = replace(sampling, max_tokens=min(sampling.max_tokens, room), min_tokens=min(sampling.min_tokens, room))
    return Request((*episode.key, episode.sample, "turn", number), read.astype(np.int64), limits)
