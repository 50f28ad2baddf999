"""A trial of AppWorld: is it installed, how are its worlds confined, does a task run and can it be judged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from lemma.config.registry import from_options
from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments.environment import Action
from lemma.plugins.appworld import AppWorldOptions

LOOK = "```python\nprint(apis.supervisor.show_active_task()['instruction'])\n```"
PEEK = (
    "```python\nfrom appworld.task import Task\n"
    "print('gold', Task.load({task!r}).ground_truth.answer)\n```"
)  # fmt: skip
HOST = "```python\nposix = __import__('posix')\nprint('read', posix.read(posix.open('/etc/passwd', 0), 9))\n```"
GIVE_UP = "```python\napis.supervisor.complete_task(status='fail')\n```"


def options_of(overrides: Sequence[str]) -> AppWorldOptions:
    """What `name=value` sets."""
    values: dict[str, str] = {}
    for one in overrides:
        name, is_given, value = one.partition("=")
        if not is_given:
            raise UserError(f"'{one}' sets nothing", fix="write for example `--set root=appworld`")
        values[name] = value
    return from_options(AppWorldOptions, values, "appworld")


def try_appworld(options: AppWorldOptions) -> Iterator[tuple[bool, str]]:
    """One line for each thing that was tried, and whether it is as it should be."""
    options.check()
    splits = sorted(path.stem for path in (options.folder / "data" / "datasets").glob("*.txt"))
    counts = {split: len(options.problems(split)) for split in splits}
    yield bool(counts), "tasks: " + ", ".join(f"{split} {count}" for split, count in counts.items())
    yield from _played(options, options.problems(splits[0])[0])


def _played(options: AppWorldOptions, problem: Problem) -> Iterator[tuple[bool, str]]:
    world = options.make()
    begin = time.perf_counter()
    world.reset(problem, 0)
    yield True, f"a world of task {problem.id} in {time.perf_counter() - begin:.1f} s, the start of AppWorld included"
    try:
        reply = world.step(Action(LOOK))
        yield not reply.text.startswith("Output:\n```\nExecution failed"), "its code runs"
        peeked = world.step(Action(PEEK.format(task=problem.id))).text
        yield "gold" not in peeked.splitlines()[2], "agents do not see the gold"
        read = world.step(Action(HOST)).text
        yield "read" not in read.splitlines()[2], "agents do not see files of this machine"
        done = world.step(Action(GIVE_UP)).done
        yield done, "a task that is given up is over"
        outcome = world.score()
        reward = f"{outcome.reward:g}" if outcome.reward is not None else "unknown"
        yield outcome.success is False, f"it is judged: {outcome.reason}; reward {reward}"
    finally:
        world.close()
