"""An external agent that calls the model through an OpenAI client."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from lemma.config.registry import file_of
from lemma.core.errors import UserError
from lemma.environments.agent_pool import AgentPool
from lemma.environments.custom_world import load_named
from lemma.environments.environment import EnvironmentOptions

WITHOUT_EFFECT = ("reset_seconds", "step_seconds", "score_seconds", "limit_reward")
# Agents that one worker runs at the same time: mostly they wait for the model.
AGENTS = 64


class Gateway(EnvironmentOptions):
    """Each episode runs an agent, whose calls to the model are its turns."""

    is_stepped = says_first = False

    name: Literal["gateway"] = "gateway"
    """An agent that calls the model through an OpenAI client."""
    agent: str | None = None
    """The agent as `path/to/file.py:function`, plain or `async`. It takes problem, base_url and api_key, and returns a
    reward, a mapping with `reward` and `success`, or None for unknown."""
    command: str | None = None
    """The agent as a shell command, instead of `agent`: OPENAI_BASE_URL and OPENAI_API_KEY are in its environment, the
    problem is passed as JSON on standard input, and the last line it prints is the reward, as JSON."""
    score: str | None = None
    """A function as `path/to/file.py:function` that takes the problem and what the agent returned, and returns the
    reward."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the agent's function."""
    turns: int = Field(64, ge=1)
    """Maximum number of calls to the model in an episode; further ones are refused."""
    episode_seconds: float = Field(600.0, gt=0)
    """Time limit of an agent; an episode that exceeds it has no known reward."""
    workers: int = Field(2, ge=1)
    """Processes that agents run in."""
    worker_calls: int | None = Field(None, ge=1)
    """Agents that one worker runs at the same time, in threads if they are not `async`. Default: 64."""
    log: str | None = None
    """File for the agents' output."""

    _pool: AgentPool | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_agent(self) -> Gateway:
        if (self.agent is None) == (self.command is None):
            raise ValueError("a gateway has one agent; write `agent: my_agent.py:solve`, or `command: ./my_agent`")
        if self.schedule == "exact":
            raise ValueError("an agent decides when it calls the model; leave `schedule: exact` out")
        for name in WITHOUT_EFFECT:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for environments that are stepped; leave it out")
        return self

    @property
    def calls_at_once(self) -> int:
        return self.worker_calls or AGENTS

    def check(self) -> None:
        if self.agent is not None:
            _check_takes(self.agent, "agent: my_agent.py:solve", ("problem", "base_url", "api_key"), self.options)
        if self.score is not None:
            _check_takes(self.score, "score: my_agent.py:score", ("problem", "result"), {})

    def pool(self) -> AgentPool:
        """The processes of the agents; they stay from step to step, until `close`."""
        if self._pool is None or self._pool.is_closed:
            settings = {"agent": self.agent, "command": self.command, "score": self.score, "options": self.options}
            self._pool = AgentPool(settings, self.workers, self.calls_at_once, self.log)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _check_takes(place: str, example: str, names: tuple[str, ...], options: dict[str, Any]) -> None:
    signature = inspect.signature(load_named(place, "function", example))
    seed = {"seed": 0} if "seed" in signature.parameters else {}
    try:
        signature.bind(*names, **{**seed, **options})
    except TypeError as error:
        wanted = ", ".join((*names, *options))
        raise UserError(
            f"{place.rpartition(':')[2]} does not take ({wanted}): {error}", file=file_of(place),
            fix="change what it takes, or `options` of the environment",
        ) from error  # fmt: skip
