"""Time and memory per sampled token, from a thousand to two million sampled tokens in a step.

    python -m benchmarks.scaling --out benchmarks/results/scaling.jsonl

A step is GRPO's, groups of 8 on the built-in arithmetic. A CPU cannot sample two million tokens in a sensible time, so
the completions of most rows are made beforehand: right and wrong solutions, encoded by the tiny tokenizer. All that
handles them is what training uses: driver, scorer and grader, journal, groups, advantages, numbers of the step, plan of
the packs, packs, compression, reading the journal again, and the samples of the report. The rows `engine` also sample
and learn, with the tiny model.

Times are CPU time of this process, in microseconds per sampled token. Memory is the rise of the peak, in bytes per
token; below about 16k tokens that is mostly what any step needs.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Row, run_rows
from lemma.engines.protocol import Completion, Engine, Key, Request
from lemma.rollouts.teacher_traces import Script

TOKENS = [1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 2_000_000]
SAMPLED_TOKENS = [1_000, 4_000, 16_000, 64_000]
GROUP, BUDGET, MAX_TOKENS = 8, 4096, 120


class MadeBefore(Script):
    """An engine that returns prepared completions: all samples of a request at once."""

    name = "made before"

    def work(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.finished.extend(self._completion(one, sample) for one in waiting for sample in range(one.n))

    def _completion(self, request: Request, sample: int) -> Completion:
        ids = self._turns[request.key][sample]
        logprobs = np.full(len(ids), -0.25, dtype=np.float32)
        return Completion(request.key, sample, ids, logprobs, np.zeros_like(logprobs), "stop", 0)


class Parts:
    """CPU seconds of each part of a step, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        return result


def tasks_for(tokens: int, problems: int = 1) -> tuple[Any, list[Any], dict[Key, list[np.ndarray]], Any]:
    """A format, tasks, and for each draw the ids of its samples: at least so many tokens in all, and problems."""
    from lemma.data.arithmetic import generate, mistaken
    from lemma.data.data_options import ArithmeticOptions
    from lemma.formats.encode import encode_demonstration, encode_prompt
    from lemma.formats.r1_zero import R1Zero
    from lemma.models.tiny import tiny_tokenizer
    from lemma.rollouts import Task

    fmt, tokenizer = R1Zero(preamble=False), tiny_tokenizer()
    options = ArithmeticOptions(operations=6, style="stepwise", count=10**6)
    tasks: list[Task] = []
    made = 0
    answers: dict[Key, list[np.ndarray]] = {}
    while made < tokens or len(tasks) < problems:
        for item in generate(options, "train", len(tasks), 64):
            problem = item.problem
            both = [encode_demonstration(fmt, one, tokenizer) for one in (item, mistaken(item))]
            right, wrong = (one.ids_T[one.loss_mask_T] for one in both)
            draw = len(tasks)
            answers["rl", 1, draw] = [right if (number + draw) % 3 else wrong for number in range(GROUP)]
            tasks.append(Task(problem, encode_prompt(fmt, problem, tokenizer)))
            made += sum(map(len, answers["rl", 1, draw]))
            if made >= tokens and len(tasks) >= problems:
                break
    return fmt, tasks, answers, tokenizer


class InOrder:
    """Draws the tasks one after the other, each once."""

    def __init__(self, tasks: list[Any]):
        self._tasks, self.drawn = tasks, 0

    def draw(self, count: int) -> list[tuple[int, Any]]:
        first, self.drawn = self.drawn, self.drawn + count
        return [(number, self._tasks[number]) for number in range(first, self.drawn)]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _begin() -> tuple[int, Parts]:
    """The collector of garbage walks no more through what imports have left: a pass takes a quarter of a second, and
    would fall upon one part of one row."""
    gc.collect()
    gc.freeze()
    return peak(), Parts()


def handled(row: Row) -> Row:
    """A step on prepared completions."""
    import torch

    torch.set_num_threads(1)
    fmt, tasks, answers, tokenizer = tasks_for(row["tokens"])
    with tempfile.TemporaryDirectory() as folder:
        # A small step comes first, so that imports and caches are not counted.
        step_of(Parts(), fmt, tasks[:2], MadeBefore(answers), tokenizer, Path(folder) / "first")
        before, parts = _begin()
        journals = Path(folder) / "second"
        trajectories, sampled = step_of(parts, fmt, tasks, MadeBefore(answers), tokenizer, journals)
        _on_disk(parts, journals, tokenizer)
    packs_of(parts, trajectories)
    return _result(row, parts, sampled, peak() - before)


def sampled(row: Row) -> Row:
    """A step that samples with the native engine and trains on the samples."""
    import torch

    from lemma.algorithms import ALGORITHMS
    from lemma.engines.native.engine import NativeEngine
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions
    from lemma.models.load_model import build_policy
    from lemma.models.model_options import ModelOptions

    torch.set_num_threads(1)
    fmt, tasks, _, _ = tasks_for(row["tokens"])
    policy = build_policy(ModelOptions(path="tiny"), torch.device("cpu"), 0)
    engine = NativeEngine(policy)
    learner = Learner(policy, OptimOptions(lr=1e-4), token_budget=BUDGET, total_steps=10)
    algorithm: Any = ALGORITHMS["grpo"](group_size=GROUP)
    with tempfile.TemporaryDirectory() as folder:
        step_of(Parts(), fmt, tasks[:1], engine, policy.tokenizer, Path(folder) / "first")
        before, parts = _begin()
        trajectories, count = step_of(parts, fmt, tasks, engine, policy.tokenizer, Path(folder) / "second")
    for number, trajectory in enumerate(trajectories):  # an untrained model is never right
        trajectory.token_fields["advantage"] = np.where(trajectory.loss_mask_T, number % 3 - 1.0, 0.0)
    parts.time("learn", lambda: learner.step(trajectories, algorithm.objective(MAX_TOKENS, None)))
    return _result(row, parts, count, peak() - before)


def step_of(
    parts: Parts, fmt: Any, tasks: list[Any], engine: Engine, tokenizer: Any, folder: Path
) -> tuple[list[Any], int]:
    """Play, score, write and group; advantages and numbers of the step. The trajectories, and how many tokens."""
    from lemma.algorithms import ALGORITHMS, AlgorithmState
    from lemma.engines.protocol import Sampling
    from lemma.rewards import make_reward
    from lemma.rollouts import RolloutCollector, Scorer
    from lemma.stages.reinforcement.rl_loop import has_advantage
    from lemma.stages.reinforcement.rl_metrics import rollout_metrics

    algorithm: Any = ALGORITHMS["grpo"](group_size=GROUP)
    scorer = Scorer(fmt, [make_reward("accuracy"), make_reward("format")], tokenizer)
    order: Any = InOrder(tasks)
    collector = RolloutCollector(
        engine, scorer, Sampling(max_tokens=MAX_TOKENS), algorithm, order, folder,
        problems=len(tasks), further_rounds=0, seed=0, name="rl",
    )  # fmt: skip
    rollouts = parts.time("play, score, journal, groups", lambda: collector.step(1))
    batch = [group for group in rollouts.groups if group.trajectories]
    parts.time("advantages", lambda: algorithm.assign(batch, AlgorithmState()))
    parts.time("advantages", lambda: [group for group in batch if has_advantage(group)])
    parts.time("numbers of the step", lambda: rollout_metrics(rollouts, batch, by_verdict=True))
    return [t for group in batch for t in group.trajectories], sum(one.tokens for one in rollouts.episodes)


def _on_disk(parts: Parts, folder: Path, tokenizer: Any) -> None:
    from lemma.reports.shown_samples import read_chunk
    from lemma.reports.token_texts import TokenTexts
    from lemma.rollouts.journal import Journal, journal_path, tidy
    from lemma.rollouts.journal_reader import step_journals

    parts.time("compress", lambda: tidy(folder, 1, None, 0))
    parts.time("read again", lambda: Journal(journal_path(folder, 1)))
    texts = TokenTexts(tokenizer.backend_tokenizer)
    parts.time("report", lambda: read_chunk(step_journals(folder, 1), texts))


def packs_of(parts: Parts, trajectories: list[Any]) -> None:
    import torch

    from lemma.models.packing import TokenBatch, plan_packs

    packs = parts.time("plan of packs", lambda: plan_packs(trajectories, BUDGET, "token"))
    parts.time("plan, shared prompts", lambda: plan_packs(trajectories, BUDGET, "token", share=0.1))
    cpu = torch.device("cpu")

    def build() -> None:
        for pack in packs:
            TokenBatch.build(trajectories, pack, cpu)

    parts.time("packs", build)


def _result(row: Row, parts: Parts, sampled: int, memory: int) -> Row:
    import torch

    gc.unfreeze()
    here = Path(__file__).parent
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return row | {
        "sampled": sampled,
        "microseconds": {name: round(1e6 * spent / sampled, 3) for name, spent in parts.seconds.items()},
        "bytes": round(memory / sampled),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}",
    }


def table(results: list[Row]) -> str:
    """A table for each kind of row: a line per size, a column per part."""
    lines: list[str] = []
    for who in RUNNERS:
        rows = [row for row in results if row["who"] == who and "error" not in row]
        if not rows:
            continue
        names = list(rows[0]["microseconds"])
        lines += ["", f"## {who}: microseconds of CPU time a sampled token", ""]
        lines += [f"{rows[0]['date']}, commit {rows[0]['commit']}, {rows[0]['versions']}, one thread.", ""]
        lines += ["| sampled tokens | " + " | ".join(names) + " | together | bytes a token |"]
        lines += ["|---" * (len(names) + 3) + "|"]
        for row in rows:
            spent = [row["microseconds"][name] for name in names]
            cells = [f"{row['sampled']:,}", *(f"{one:.2f}" for one in spent), f"{sum(spent):.2f}", f"{row['bytes']:,}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


RUNNERS: dict[str, Callable[[Row], Row]] = {"made before": handled, "engine": sampled}


def rows() -> list[Row]:
    made = [{"who": "made before", "tokens": tokens} for tokens in TOKENS]
    return made + [{"who": "engine", "tokens": tokens} for tokens in SAMPLED_TOKENS]


if __name__ == "__main__":
    run_rows("benchmarks.scaling", __doc__, RUNNERS, rows, table=table)
