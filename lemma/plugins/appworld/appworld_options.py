"""What a recipe can say about AppWorld. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.environments.environment import Attempt, Deadlines, Environment, EnvironmentOptions
from lemma.plugins.appworld.agents import Agent, first_prompt
from lemma.plugins.appworld.appworld_episode import GRACE_SECONDS, JUDGE_SECONDS, TASK, AppWorldEpisode
from lemma.plugins.appworld.appworld_tasks import AppTask, check_data, load_split
from lemma.plugins.appworld.runner_client import OPEN_SECONDS, START_SECONDS, RunnerSettings, begin
from lemma.plugins.appworld.task_reward import RewardKind, goal_completion


class AppWorldOptions(EnvironmentOptions):
    """AppWorld: everyday tasks in a person's apps, done in code; `lemma env setup appworld` installs what it needs."""

    says_first: ClassVar[bool] = False

    name: Literal["appworld"] = "appworld"
    """The tasks and apps of AppWorld."""
    root: str = "appworld"
    """Folder of AppWorld: its tasks are in `data`, its virtual environment in `venv`."""
    venv: str | None = None
    """Virtual environment with the package appworld. Default: `venv` in the root."""
    agent: Agent = "conversation"
    """conversation: a growing chat, with code in fenced blocks. rebuilt: one prompt, rewritten each turn with the steps
    so far, answered in <think> and <code>."""
    history: int | None = Field(None, ge=1)
    """How many of the most recent steps the rebuilt prompt shows. Default: all."""
    reward: RewardKind = "tests"
    """tests: 1 for a success, otherwise the share of tests passed, 0 if the agent did not mark the task as complete.
    success: 1 or 0. compat: 10 for marking the task as complete, right or wrong, as the public PPO system does."""
    pay_for_nothing: bool = False
    """Count all tests in the share, including those that pass if nothing is done, as LOOP does."""
    difficulty: list[Literal[1, 2, 3]] = Field(default_factory=list)
    """Only tasks of these difficulties, such as [1, 2]. Default: all."""
    turns: int = Field(40, ge=1)
    """Maximum number of turns in an episode."""
    reply_tokens: int = Field(3000, ge=1)
    """Maximum number of tokens in a reply; the middle of a longer one is cut out, and the metrics count it."""
    code_seconds: int = Field(30, ge=1)
    """Time limit for the code of one turn; when it is exceeded, the agent reads an error."""
    api_calls: int = Field(1000, ge=1)
    """Maximum number of API calls in the code of one turn."""
    memory_mb: int = Field(1024, ge=64)
    """Memory limit for the code of an episode, on top of what a world needs itself."""
    cpu_seconds: int = Field(600, ge=1)
    """CPU time limit of one world; it ends there."""
    sandbox: Literal["auto", "namespaces", "landlock", "none"] = "auto"
    """How worlds are confined: auto takes namespaces, or else Landlock, or else refuses. none: not at all, only for
    machines that hold nothing private."""
    workers: int = Field(1, ge=0)
    """Processes that talk to the worlds. Each world is a process of its own in any case."""
    worker_calls: int | None = Field(64, ge=1)
    """Worlds that one worker talks to at the same time."""
    episodes: int | None = Field(64, ge=1)
    """Maximum number of worlds at the same time; each takes about 55 MB of memory."""

    @property
    def folder(self) -> Path:
        return Path(self.root).expanduser()

    @property
    def python(self) -> Path:
        place = Path(self.venv).expanduser() if self.venv else self.folder / "venv"
        return place / "bin" / "python"

    @property
    def runner(self) -> RunnerSettings:
        return RunnerSettings(
            str(self.python.absolute()), str(self.folder.resolve()), self.memory_mb, self.cpu_seconds, self.sandbox
        )

    @property
    def deadlines(self) -> Deadlines:
        """The recipe's, or longer than the runner's own limits, so that a hanging world does not cost a worker."""
        return Deadlines(
            reset=self.reset_seconds or START_SECONDS + 2 * OPEN_SECONDS,
            step=self.step_seconds or self.code_seconds + 2 * GRACE_SECONDS,
            score=self.score_seconds or 3 * JUDGE_SECONDS + 2 * OPEN_SECONDS,
        )

    def make(self) -> Environment:
        return AppWorldEpisode(self)

    def check(self) -> None:
        if sys.platform != "linux":
            raise UserError("AppWorld's worlds are confined by Linux", fix="run this stage on Linux")
        if not self.python.exists():
            raise UserError(
                f"there is no virtual environment of AppWorld: '{self.python}' is not there",
                fix=f"run `lemma env setup appworld --dir {self.root}`, or name one with `venv`",
            )
        check_data(self.folder)

    def problems(self, split: str) -> list[Problem]:
        """The tasks of a split, with the first prompt of the agent."""
        problems = [self._problem(task) for task in load_split(self.folder, split) if self._is_wanted(task)]
        if not problems:
            raise UserError(f"split '{split}' of AppWorld has no task of difficulty {self.difficulty}")
        return problems

    def _is_wanted(self, task: AppTask) -> bool:
        return not self.difficulty or task.difficulty in self.difficulty

    def _problem(self, task: AppTask) -> Problem:
        return Problem(
            (Message("user", first_prompt(self.agent, task)),),
            id=task.id,
            source="appworld",
            subject=task.scenario,
            level=None if task.difficulty is None else str(task.difficulty),
            extra={TASK: task.id},
        )

    def introduced(self, problem: Problem, messages: Sequence[Message]) -> Problem:
        """The problem already is the first prompt. Starts the runner in the background."""
        begin(self.runner)
        return problem

    def summarise(self, attempts: Sequence[Attempt]) -> Mapping[str, Sequence[float]]:
        return goal_completion(attempts)
