"""Benchmarks during a stage: the same evaluation as `lemma eval`, with the weights that are being trained."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.core.events import Sink, silent
from lemma.core.ranks import is_leader
from lemma.engines.protocol import Engine
from lemma.evaluation.benchmarks import Loaded
from lemma.evaluation.eval_settings import EvalOptions, EvalSettings
from lemma.evaluation.evaluator import evaluate, load_all
from lemma.evaluation.in_environment import has_gold
from lemma.evaluation.metrics import mean_over_benchmarks
from lemma.evaluation.questions import prepare
from lemma.evaluation.results import Report
from lemma.formats import Format
from lemma.rewards import Reward

if TYPE_CHECKING:
    from lemma.environments import EnvironmentOptions
    from lemma.models.policy import Policy

PREFIX = "evaluation/"


class StageEvaluator:
    """Evaluates at a step into `folder`/step-N, and gives the numbers that a stage logs.

    What a killed run wrote after the step that it goes on from is thrown away by `begin`.
    """

    def __init__(
        self,
        options: EvalOptions,
        policy: Policy,
        fmt: Format,
        folder: Path,
        *,
        name: str,
        seed: int = 0,
        rewards: Sequence[Reward] = (),
        sink: Sink = silent,
        given: Sequence[Loaded] = (),
        environment: EnvironmentOptions | None = None,
    ):
        self.options, self.policy, self.folder, self.name = options, policy, folder, name
        self.rewards, self.sink = list(rewards), sink
        self.settings = EvalSettings.of(options, seed=seed, format=fmt, environment=environment)
        wanted = [*options.benchmarks, *given]
        self._benchmarks: list[Loaded] = load_all(wanted, self.settings)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer together: what the cache of an engine must hold at least."""
        asked = [prepare(one, self.policy, self.settings) for one in self._benchmarks]
        answer, environment = self.settings.max_tokens, self.settings.environment
        room = answer if environment is None else environment.longest_episode(answer)
        needed = [len(ask.prompt) + room for one in asked for ask in one.asks]
        return min(max(needed, default=0), self.policy.context)

    def is_due(self, step: int, total: int) -> bool:
        """Before the first step, every so many steps, and after the last."""
        if step == 0:
            return self.options.at_start
        return step == total or (self.options.every > 0 and step % self.options.every == 0)

    def begin(self, step: int) -> None:
        """Forget evaluations of steps that will come again."""
        for path in self.folder.glob("step-*") if is_leader() else ():
            number = path.name.removeprefix("step-")
            if number.isdigit() and (int(number) > step or step == 0):
                shutil.rmtree(path)

    def run(self, engine: Engine, step: int) -> dict[str, float]:
        """Evaluate now. Names are `evaluation/gsm8k/answer_accuracy`, and, for the mean over several benchmarks,
        `evaluation/answer_accuracy`. Every rank takes part and gets the same numbers."""
        folder = self.folder / f"step-{step:06d}"
        model = f"{self.name}, step {step}"
        report = evaluate(
            engine, self.policy, self._benchmarks, self.settings, folder,
            model=model, rewards=self.rewards, sink=self.sink, option="run.dir",
        )  # fmt: skip
        told = flat_metrics(report).items()
        return {f"{PREFIX}{name}": value for name, value in told if not name.startswith(self._without_gold)}

    @property
    def _without_gold(self) -> tuple[str, ...]:
        """How the names of numbers begin that say nothing: accuracies where nothing can be right."""
        if self.settings.is_scored_by_environment:
            return ()
        names = [one.name for one in self._benchmarks if not has_gold(one.problems)]
        return tuple(f"{name}/{kind}_accuracy" for name in names for kind in ("answer", "lenient"))

    def score(self, values: dict[str, float]) -> float:
        """The number that the best checkpoint has the highest of; the lowest where no sample could be rewarded."""
        metric = self.options.measured_metric
        wanted = PREFIX + metric
        if len(self._benchmarks) == 1 and wanted not in values:
            wanted = f"{PREFIX}{self._benchmarks[0].name}/{metric}"
        if wanted not in values and metric.endswith("reward"):
            return -math.inf
        part, _, name = metric.rpartition("/")
        own = [f"{PREFIX}{one.name}/{name}" for one in self._benchmarks if part in (one.part_of, "")]
        if wanted not in values and own:
            return math.fsum(values[one] for one in own) / len(own)
        assert wanted in values, "the options only allow what is measured"
        return values[wanted]


def flat_metrics(report: Report) -> dict[str, float]:
    """One number a name: for each benchmark, and where there are several as a mean over those that have it."""
    by_name: dict[str, dict[str, float]] = {}
    for benchmark, summary in report.summaries.items():
        own = {
            "answer_accuracy": summary.accuracy.value,
            "answer_accuracy_low": summary.accuracy.low,
            "answer_accuracy_high": summary.accuracy.high,
            "format_accuracy": summary.scores["format"].value,
            "reasoning_present": summary.scores["reasoning"].value,
            "reasoning_length": summary.numbers["reasoning_length"],
            "truncated": summary.scores["truncated"].value,
            "tokens": summary.numbers["tokens"],
            "unknown": summary.unknown / (summary.n * summary.k),
        }
        if "lenient" in summary.scores:
            own["lenient_accuracy"] = summary.scores["lenient"].value
        named = ("acc_norm", *report.measures.get(benchmark, {}))
        is_told = [name for name in summary.scores if name in named or name.startswith(("pass@", "maj@"))]
        own |= {name: summary.scores[name].value for name in is_told}
        own |= {name: summary.numbers[name] for name in ("reward", "turns") if name in summary.numbers}
        for name, value in own.items():
            by_name.setdefault(name, {})[benchmark] = value
    flat = {f"{benchmark}/{name}": value for name, own in by_name.items() for benchmark, value in own.items()}
    if len(report.summaries) == 1:
        return flat
    means = {name: math.fsum(own.values()) / len(own) for name, own in by_name.items()}
    mean = mean_over_benchmarks([summary.accuracy for summary in report.summaries.values()])
    return {**means, "answer_accuracy_low": mean.low, "answer_accuracy_high": mean.high, **flat}
