"""Episodes per second in AppWorld with 1, 4 and 16 worlds and scripted agents.

    python benchmarks/appworld.py ROOT [--venv VENV] [--episodes N]

ROOT is an AppWorld folder as made by `lemma env setup appworld`. An episode is a world, four short programs and a
judgement. Prints the table and writes it to benchmarks/results/appworld.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from time import perf_counter

from lemma.core.types import Problem
from lemma.environments import Action, AppWorldOptions
from lemma.plugins.appworld.runner_client import stop_all

RESULTS = Path(__file__).resolve().parent / "results" / "appworld.md"
PROGRAMS = (
    "print(apis.api_docs.show_app_descriptions())",
    "print(apis.supervisor.show_account_passwords())",
    "print(sum(range(10**5)))",
    "apis.supervisor.complete_task(status='fail')",
)
WORLDS = (1, 4, 16)


@dataclass
class Times:
    """Seconds of each kind of call, over the episodes of one row."""

    reset: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)


def play(options: AppWorldOptions, problem: Problem, times: Times) -> None:
    world = options.make()
    begin = perf_counter()
    world.reset(problem, 0)
    times.reset.append(perf_counter() - begin)
    for program in PROGRAMS:
        begin = perf_counter()
        reply = world.step(Action(f"```python\n{program}\n```"))
        times.step.append(perf_counter() - begin)
    assert reply.done
    begin = perf_counter()
    assert world.score().success is False
    times.score.append(perf_counter() - begin)
    world.close()


def memory_of_worlds() -> list[float]:
    """Proportional set size (PSS) of every process of our runner, in MB."""
    found = []
    for place in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if f"lemma-appworld-{os.getpid()}-".encode() in (place / "cmdline").read_bytes():
                lines = (place / "smaps_rollup").read_text().splitlines()
                found.append(next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")))
        except OSError:
            continue
    return found


def measure(options: AppWorldOptions, problems: Sequence[Problem], worlds: int, episodes: int) -> str:
    """One row: this many episodes, with at most this many worlds at a time."""
    times, memory = Times(), [0.0]
    with ThreadPoolExecutor(worlds) as threads:
        begin = perf_counter()
        waiting = [threads.submit(play, options, problems[i % len(problems)], times) for i in range(episodes)]
        while wait(waiting, timeout=1.0).not_done:
            memory.append(sum(memory_of_worlds()))
        for one in waiting:
            one.result()
        seconds = perf_counter() - begin
    mean = [f"{statistics.mean(every) * 1e3:.0f}" for every in (times.reset, times.step, times.score)]
    return f"| {worlds} | {episodes / seconds:.1f} | {' | '.join(mean)} | {max(memory):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--venv")
    parser.add_argument("--split", default="train")
    parser.add_argument("--episodes", type=int, default=48)
    args = parser.parse_args()
    options = AppWorldOptions(root=args.root, venv=args.venv)
    begin = perf_counter()
    problems = options.problems(args.split)
    play(options, problems[0], Times())
    start = perf_counter() - begin
    rows = [measure(options, problems, worlds, args.episodes) for worlds in WORLDS]
    stop_all()
    text = "\n".join([
        f"# AppWorld: scripted episodes, {date.today()}", "",
        f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.0f} (5 minutes); {args.episodes} episodes of a world, "
        f"{len(PROGRAMS)} short programs and a judgement. The runner started and played one in {start:.1f} s.", "",
        "| worlds at a time | episodes a second | world, ms | program, ms | judgement, ms | memory of all, MB |",
        "|---|---|---|---|---|---|", *rows,
    ])  # fmt: skip
    print(text)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
