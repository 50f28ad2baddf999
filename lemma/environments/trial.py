"""Tries out an environment with scripted answers: do all calls work, and is an episode reproducible?"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeVar

from lemma.core.types import Outcome, Problem
from lemma.environments.env_handle import EnvFailure
from lemma.environments.env_pool import EnvPool
from lemma.environments.environment import ERROR, Action, EnvironmentOptions, Observation
from lemma.environments.openings import polled
from lemma.environments.tools import ToolOptions

PLAIN = ("I do not know.", "1", "```python\nprint(1)\n```")
# A call that takes longer matters when hundreds of episodes wait for theirs.
SLOW_SECONDS = 0.2
T = TypeVar("T")


@dataclass
class Tried:
    """One episode with scripted answers: its outcome or first failure, and how long calls took."""

    actions: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    outcome: Outcome | None = None
    failure: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialFinding:
    """One finding; `level` is ok, note or BAD."""

    level: str
    topic: str
    text: str


async def play_script(pool: EnvPool, problem: Problem, seed: int, answers: Sequence[str], turns: int) -> Tried:
    """Play one episode; the last answer is repeated until the environment or its turn limit ends it."""
    tried, env = Tried(), pool.open(problem, seed)

    async def timed(name: str, call: Awaitable[T]) -> T:
        before = env.seconds
        try:
            return await call
        except EnvFailure as failure:
            tried.failure = f"{name}: {failure.reason}"
            raise
        finally:
            tried.seconds[name] = max(tried.seconds.get(name, 0.0), env.seconds - before)

    with suppress(EnvFailure):
        await timed("reset", env.reset())
        while len(tried.actions) < turns:
            tried.actions.append(answers[min(len(tried.actions), len(answers) - 1)])
            tried.observations.append(await timed("step", env.step(Action(tried.actions[-1]))))
            if tried.observations[-1].done:
                break
        tried.outcome = await timed("score", env.score())
    env.leave()
    return tried


def try_out(
    options: EnvironmentOptions, problems: Sequence[Problem], seed: int, answers: Sequence[str] = ()
) -> list[TrialFinding]:
    """Play each problem twice with the given answers and once with empty ones; returns the findings."""
    pool = EnvPool.of(options)
    spoken = [list(answers) or [*PLAIN, problem.gold or PLAIN[0]] for problem in problems]

    async def play_all(said: Sequence[Sequence[str]]) -> list[Tried]:
        return [await play_script(pool, *one, options.turns) for one in zip(problems, repeat(seed), said, strict=False)]

    try:
        once, again, silent = (polled(pool, play_all(said)) for said in (spoken, spoken, [[""]] * len(problems)))
    finally:
        pool.close()
        options.close()
    rewards = _rewards(once, silent)
    if options.is_graded:
        rewards = [TrialFinding("ok", "rewards", "the stage's rewards judge the last turn, and nothing is scored here")]
    if isinstance(options, ToolOptions):
        untried = "no tool is called: the scripted answers are passed on as plain text; see `lemma env play`"
        rewards.append(TrialFinding("note", "tools", untried))
    return [*_calls(options, [*once, *silent]), _repeats(once, again), *rewards]


def _calls(options: EnvironmentOptions, tried: Sequence[Tried]) -> list[TrialFinding]:
    findings: list[TrialFinding] = []
    for call in ("reset", "step", "score"):
        slowest = max((one.seconds.get(call, 0.0) for one in tried), default=0.0)
        limit = getattr(options.deadlines, call)
        failures = [one.failure for one in tried if one.failure.startswith(f"{call}:")]
        text = f"at most {slowest:.3g} s; the deadline is {limit:g} s"
        replies = [reply.text for one in tried for reply in one.observations] if call == "step" else []
        if failures:
            findings.append(TrialFinding("BAD", call, f"{len(failures)} of {len(tried)} episodes fail: {failures[0]}"))
        elif replies and all(text.startswith(ERROR) for text in replies):
            findings.append(TrialFinding("BAD", call, f"every action is refused: {replies[0].removeprefix(ERROR)}"))
        elif slowest > limit / 2:
            findings.append(TrialFinding("note", call, f"{text}, raise {call}_seconds"))
        elif slowest > SLOW_SECONDS and options.workers and options.calls_at_once == 1:
            advice = "raise workers, or worker_calls where the class is safe for threads"
            findings.append(TrialFinding("note", call, f"{text}. A worker makes one call at a time: {advice}"))
        else:
            findings.append(TrialFinding("ok", call, text))
    return findings


def _repeats(once: Sequence[Tried], again: Sequence[Tried]) -> TrialFinding:
    pairs = list(zip(once, again, strict=True))
    other = [a for a, b in pairs if (a.observations, a.outcome) != (b.observations, b.outcome)]
    if not other:
        return TrialFinding(
            "ok", "repeat", "an episode that is played again gives the same replies and the same reward"
        )
    text = f"{len(other)} of {len(pairs)} episodes answer differently when they are played again"
    return TrialFinding("BAD", "repeat", f"{text}: the state may depend on problem, seed and what was said alone")


def _rewards(once: Sequence[Tried], silent: Sequence[Tried]) -> list[TrialFinding]:
    outcomes = [one.outcome for one in (*once, *silent) if one.outcome is not None]
    findings: list[TrialFinding] = []
    if unknown := sum(outcome.reward is None for outcome in outcomes):
        findings.append(TrialFinding("note", "score", f"{unknown} episodes have no known reward"))
    paid = [one.outcome.reward for one in silent if one.outcome is not None and one.outcome.reward is not None]
    if paid:
        mean = sum(paid) / len(paid)
        level, more = ("note", ": it is paid") if mean > 0 else ("ok", "")
        findings.append(TrialFinding(level, "nothing", f"the mean reward of saying nothing is {mean:.3g}{more}"))
    return findings
