"""What a recipe can say about evaluation during a stage. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from lemma.config import Options
from lemma.core.errors import UserError
from lemma.evaluation.benchmarks import Benchmark, find_benchmark

# The five numbers of every benchmark that a stage logs, and two more that say why they are low.
STAGE_METRICS = (
    "answer_accuracy",
    "format_accuracy",
    "reasoning_present",
    "reasoning_length",
    "reward",
    "truncated",
    "unknown",
)
BETTER_WHEN_HIGHER = ("answer_accuracy", "format_accuracy", "reasoning_present", "reward")
_AT_K = re.compile(r"(?:pass|maj)@\d+")


class EvalOptions(Options):
    """Benchmarks during a stage, with the policy's own weights: before the first step, every so often, at the end."""

    benchmarks: list[str | Benchmark] = Field(default_factory=list)
    """Names such as gsm8k, data files, or mappings with `source` and more. None: no evaluation."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates at the start and at the end only."""
    at_start: bool = True
    """Evaluate before the first step too, to see what training changed."""
    metric: str = "answer_accuracy"
    """The best checkpoint is the one with the highest of this: the mean over benchmarks of answer_accuracy,
    format_accuracy, reasoning_present, reward, pass@k or maj@k, or of one benchmark, such as gsm8k/pass@4."""
    samples: int | None = Field(None, ge=1)
    """Samples of each problem. Default: the benchmark's own number."""
    temperature: float | None = Field(None, ge=0)
    """Default: 0 for one sample, 0.6 for several."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from everything."""
    max_tokens: int = Field(1024, ge=1)
    """Longest completion."""
    limit: int | None = Field(None, ge=1)
    """At most this many problems of each benchmark; always the same ones."""
    thinking: Literal["after", "whole"] = "after"
    """Where thoughts never end: after counts no answer, whole looks for one in the whole text."""
    data_dir: str | None = None
    """A folder of data files that stands in for the hub."""

    @field_validator("benchmarks")
    @classmethod
    def _exist(cls, benchmarks: list[str | Benchmark]) -> list[str | Benchmark]:
        for one in benchmarks:
            try:
                find_benchmark(one)
            except UserError as error:
                raise ValueError(str(error)) from None
        return benchmarks

    @model_validator(mode="after")
    def _metric_exists(self) -> EvalOptions:
        name = self.metric
        for benchmark in self.benchmarks:
            name = name.removeprefix(f"{find_benchmark(benchmark).name}/")
        if name not in BETTER_WHEN_HIGHER and not _AT_K.fullmatch(name):
            raise ValueError(
                f"there is no metric '{self.metric}' to choose a checkpoint by; write one of: "
                f"{', '.join(BETTER_WHEN_HIGHER)}, pass@K or maj@K, with or without the name of a benchmark in front"
            )
        if self.temperature == 0 and self.samples is not None and self.samples > 1:
            raise ValueError("samples at temperature 0 are all the same; raise temperature or write `samples: 1`")
        return self
