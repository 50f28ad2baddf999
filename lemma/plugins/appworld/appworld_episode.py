"""One episode in AppWorld: a world that runs the agent's code, and a judge that tests the final state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lemma.core.errors import UserError
from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import Action, Environment, Observation, WorldGone
from lemma.plugins.appworld.agents import NO_CODE, code_of, heard, rebuilt_prompt
from lemma.plugins.appworld.appworld_tasks import load_task
from lemma.plugins.appworld.runner_client import OPEN_SECONDS, RemoteWorld
from lemma.plugins.appworld.task_reward import outcome, tests_of

if TYPE_CHECKING:
    from lemma.plugins.appworld.appworld_options import AppWorldOptions

TASK = "appworld_task"
JUDGE_SECONDS = 60.0
# Time for an action beyond the limit of its code: to save, to print, to send.
GRACE_SECONDS = 15.0


class AppWorldEpisode(Environment):
    """`WorldGone` says that the world is lost; its state depends on the task and the code alone."""

    def __init__(self, options: AppWorldOptions):
        self._options, self._runner = options, options.runner
        self._world: RemoteWorld | None = None
        self._steps: list[tuple[str, str]] = []

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        name = problem.extra.get(TASK)
        if not name:
            raise UserError(
                "this problem is no task of AppWorld", fix="write `data: {source: environment, split: train}`"
            )
        self._task = load_task(self._options.folder, str(name))
        self.close()
        self._steps = []
        settings = {
            "timeout_seconds": self._options.code_seconds,
            "max_interactions": self._options.turns,
            "max_api_calls_per_interaction": self._options.api_calls,
        }
        self._world = RemoteWorld(self._runner, {"call": "play", "task": self._task.id, "settings": settings})
        return []

    def step(self, said: Action) -> Observation:
        agent = self._options.agent
        code = code_of(agent, said.text)
        done = False
        if not code.strip():
            output = NO_CODE[agent]
        else:
            answer = self._open_world().call(
                {"call": "execute", "code": code}, self._options.code_seconds + GRACE_SECONDS
            )
            output, done = str(answer.get("output", "")), bool(answer.get("completed"))
        self._steps.append((code, output))
        if agent == "conversation":
            return Observation(heard(output) if code.strip() else output, done)
        return Observation(output, done, prompt=rebuilt_prompt(self._task, self._steps, self._options.history))

    def score(self) -> Outcome:
        """Save the world's changes, end it, and have them judged in a process that has the gold."""
        world = self._open_world()
        files = world.call({"call": "save"}, JUDGE_SECONDS).get("files")
        self.close()
        if not isinstance(files, dict):
            raise WorldGone("the world saved nothing")
        try:
            verdict = self._judged(files)
        except WorldGone as error:
            # If an untouched world can be judged, the failure comes from what the agent left behind.
            self._judged({name: "" for name in files if name.endswith(".jsonl")})
            return Outcome(self._options.limit_reward, False, f"limit: what it changed cannot be judged ({error})")
        return outcome(tests_of(verdict), self._options.reward, self._options.pay_for_nothing)

    def _judged(self, files: dict[str, str]) -> dict[str, object]:
        judge = RemoteWorld(
            self._runner, {"call": "judge", "task": self._task.id, "files": files}, OPEN_SECONDS + JUDGE_SECONDS
        )
        judge.close()
        return judge.first

    def _open_world(self) -> RemoteWorld:
        if self._world is None:
            raise WorldGone("the world has ended")
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None
