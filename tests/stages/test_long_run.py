"""A thousand steps of reinforcement learning: what a run holds at its end it held at its beginning."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from lemma.core.events import Event, Progressed
from lemma.recipe import Recipe
from lemma.runs.run import train
from tests.algorithms import toy
from tests.stages.test_rl_stage import SMALL, small_stage

STEPS, KEPT = 1000, 20


class Held(NamedTuple):
    """What the process holds after a step, in MB and in numbers, and when."""

    memory: float
    files: int
    threads: int
    children: int
    when: float


@pytest.mark.long
def test_a_thousand_steps_need_no_more_than_a_hundred(tmp_path: Path) -> None:
    process, held = psutil.Process(os.getpid()), dict[int, Held]()

    def look(event: Event) -> None:
        if isinstance(event, Progressed) and event.what == "toy":
            held[event.done] = Held(
                process.memory_info().rss / 2**20,
                process.num_fds(),
                process.num_threads(),
                len(process.children(recursive=True)),
                time.process_time(),
            )

    stage = small_stage(tmp_path, steps=STEPS, journal={"keep": KEPT}, checkpoint={"every": 50, "keep": 2}, log_every=1)
    recipe: Recipe = toy.Toy(tmp_path).recipe(stage, **SMALL)
    assert train(recipe, sink=look) == 0
    early, late = held[STEPS // 10], held[STEPS]
    print(f"after {STEPS // 10} steps {early}\nafter {STEPS} {late}")
    assert late.memory - early.memory < 40, "MB of memory for 900 steps"
    assert late.files - early.files <= 2 and late.threads - early.threads <= 1 and late.children <= early.children
    first, last = (held[end].when - held[end - STEPS // 10].when for end in (2 * STEPS // 10, STEPS))
    assert last < 1.5 * first, "CPU seconds of a hundred steps"
    journals = list((tmp_path / "run" / "stages" / "toy" / "journal").iterdir())
    assert KEPT <= len(journals) <= 2 * 50, "what was sampled since the older checkpoint stays"
