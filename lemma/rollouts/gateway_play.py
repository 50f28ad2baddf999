"""Episodes of agents that ask the model through a gateway on this machine: their calls become turns.

The engine is driven by the thread that plays; a server's threads hand it what the agents ask.
"""

from __future__ import annotations

import copy
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lemma.core.errors import UserError, warn
from lemma.core.faults import fault_point
from lemma.core.random import key as random_key
from lemma.core.types import Outcome
from lemma.engines.protocol import Engine, Sampling
from lemma.environments.agent_pool import AgentResult
from lemma.environments.gateway import Gateway
from lemma.formats.dialogue import Dialogue
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.journal import Journal
from lemma.rollouts.multi_turn import World
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import BATCH, Pending, Scorer
from lemma.rollouts.sessions import AgentSession, SessionHost
from lemma.serving.engine_driver import EngineDriver
from lemma.serving.http_server import HttpServer
from lemma.serving.openai_app import openai_app

# How often an agent is run whose process died; the second time it has a process for itself.
TRIES = 2
# One for each stage: copying a large tokenizer takes a second.
_DIALOGUES: weakref.WeakKeyDictionary[Scorer, Dialogue] = weakref.WeakKeyDictionary()


def play_agents(
    engine: Engine,
    asks: Sequence[SampleRequest],
    sampling: Callable[[SampleRequest], Sampling],
    scorer: Scorer,
    *,
    world: World,
    journal: Journal | None = None,
) -> Iterator[Episode]:
    """As `rollouts.play`; what is graded comes when all agents have ended, and is in the journal before."""
    assert isinstance(world.options, Gateway)
    known = journal.episodes if journal is not None else {}
    attempts: deque[_Attempt] = deque()
    for ask in asks:
        if len(ask.prefix):
            raise UserError("an agent begins its conversation itself; there is no room for a teacher's beginning")
        for number in range(ask.first, ask.first + ask.n):
            there = known.get((repr(ask.key), number))
            if there is not None:
                yield there
            else:
                attempts.append(_Attempt(ask, number, sampling(ask)))
    if not attempts:
        return
    stage = _Stage(engine, scorer, world, world.options, journal, attempts)
    stage.run()
    fault_point("rollouts.generated")
    stage.settle(0)
    yield from stage.episodes


@dataclass(eq=False)
class _Attempt:
    """An agent at work on a problem, or waiting for its turn."""

    ask: SampleRequest
    sample: int
    sampling: Sampling
    tries: int = 0
    session: AgentSession | None = None


class _Stage:
    """All agents of one call of `play_agents`."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        world: World,
        options: Gateway,
        journal: Journal | None,
        attempts: deque[_Attempt],
    ):
        self._scorer, self._world, self._options, self._journal = scorer, world, options, journal
        self._waiting = attempts
        self._playing: dict[int, _Attempt] = {}
        self._begun = 0
        if scorer not in _DIALOGUES:
            _DIALOGUES[scorer] = Dialogue(scorer.fmt, copy.deepcopy(scorer.tokenizer), scorer.ends)
        self._driver = EngineDriver(engine)
        self._host = SessionHost(self._driver, _DIALOGUES[scorer], options.turns, world.longest)
        self._pending: list[Pending] = []
        self.episodes: list[Episode] = []

    def run(self) -> None:
        """Until every agent has ended, or has been given up. Afterwards neither server nor hanging agent is left."""
        pool = self._options.pool()
        server = HttpServer(openai_app(self._host)).start()
        pool.on_news = self._driver.wake

        def look() -> None:
            for result in pool.look():
                self._ended(result)
            most = self._options.episodes or len(self._waiting) + len(self._playing)
            while self._waiting and len(self._playing) < most and pool.has_room(self._waiting[0].tries > 0):
                self._begin(self._waiting.popleft(), server.url)
            self.settle(BATCH)

        try:
            self._driver.run(lambda: not self._playing and not self._waiting, look, survives_errors=False)
        finally:
            pool.on_news = _nothing
            pool.settle()
            server.close()
        if self._host.overruled:
            names = ", ".join(sorted(self._host.overruled))
            warn(
                f"the agent chooses {names}, which the recipe decides: {names} of calls have no "
                "effect; set them under rollout"
            )

    def settle(self, least: int) -> None:
        """Score what was played, in batches that depend on the order alone, where there are so many at least."""
        while self._pending and len(self._pending) >= least:
            part, self._pending = self._pending[:BATCH], self._pending[BATCH:]
            episodes = self._scorer.finish(part)
            if self._journal is not None:
                self._journal.append(*episodes)
            self.episodes += episodes

    def _begin(self, attempt: _Attempt, url: str) -> None:
        ask, name, secret = attempt.ask, self._begun, f"lemma-{secrets.token_hex(16)}"
        self._begun += 1
        attempt.tries += 1
        attempt.session = AgentSession(self._host, ask.key, attempt.sample, attempt.sampling)
        self._host.open(secret, attempt.session)
        self._playing[name] = attempt
        seed = random_key(self._world.seed, *ask.key, attempt.sample, "agent") % 2**31
        alone, seconds = attempt.tries > 1, self._options.episode_seconds
        self._options.pool().begin(name, ask.problem, seed, url, secret, seconds, alone)

    def _ended(self, result: AgentResult) -> None:
        attempt = self._playing.pop(result.name)
        assert attempt.session is not None
        attempt.session.close()
        if result.lost and attempt.tries < TRIES:
            self._waiting.append(attempt)
            return
        fault_point("rollouts.sampled")
        turns = attempt.session.turns()
        outcome: Outcome | None = result.outcome
        if not turns:
            outcome = result.outcome if result.failed else Outcome(None, None, "the agent never asked the model")
            turns = [_nothing_said(attempt.ask)]
        elif result.outcome.reward is None and not result.failed and not self._needs_word():
            outcome = None
        for turn in turns:
            turn.text = self._scorer.text(turn)
        ask = attempt.ask
        episode = Episode(ask.key, attempt.sample, ask.problem.id, turns, ask.problem.question)
        self._pending.append(self._scorer.begin(ask.problem, episode, outcome))

    def _needs_word(self) -> bool:
        """Whether the agent's word is a reward; otherwise the grader judges what was said last."""
        return any(reward.name == "environment" for reward in self._scorer.rewards)


def _nothing() -> None:
    """Nobody waits for news."""


def _nothing_said(ask: SampleRequest) -> Turn:
    """The turn of an agent that never asked; nothing is learnt from it."""
    none = np.zeros(0, dtype=np.float32)
    return Turn(ask.prompt.astype(np.int32), none.astype(np.int32), none, none, "cancelled")
