"""`rollout.lag: flying`: an update does not wait for responses. They continue with the new weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.core.errors import UserError
from lemma.engines.protocol import Engine
from lemma.models.policy import Policy
from lemma.rollouts import ProblemOrder, RolloutCollector, Rollouts
from lemma.stages.reinforcement.staleness_queue import blame_divergence


class PartialRolloutQueue:
    """The rollouts of each step, with responses that continue across updates. Those of a step began at most `limit`
    steps before it, so no token is older when it is trained on. The journal of a step records its problems."""

    is_sampling = True

    def __init__(self, order: ProblemOrder, limit: int, total: int):
        self._order, self._limit, self._total = order, limit, total
        self._has_begun = False
        self._collector: RolloutCollector | None = None
        self._policy: Policy | None = None

    def use(self, collector: RolloutCollector, policy: Policy, engine: Engine) -> None:
        if not engine.updates_in_flight:
            raise UserError(
                f"`rollout.lag: flying` needs responses that continue after an update, which the engine {engine.name} "
                "does not support here",
                fix="write `engine: native`, vLLM with `mode: server`, or `lag: 1`",
            )
        self._collector, self._policy = collector, policy

    def take(self, step: int) -> Rollouts:
        assert self._collector is not None and self._policy is not None
        if not self._has_begun:
            self._collector.go_on_after(step - 1)
        self._has_begun = True
        with blame_divergence(self._policy):
            return self._collector.step(step, min(step + self._limit, self._total))

    def wait(self) -> None:
        """An update waits for nothing."""

    def drain(self) -> None:
        """The engine is needed for something else: finish what has begun."""
        assert self._collector is not None
        self._collector.drain()

    def settle(self) -> None:
        """The engine is closed, along with the responses in flight."""

    def close(self) -> None:
        """Nothing is left."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"drawn": self._order.drawn}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._order.load(tensors, extra)
