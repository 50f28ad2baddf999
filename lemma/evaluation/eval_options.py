"""What a recipe can say about evaluation during a stage. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lemma.config.shape import Choice
from lemma.core.errors import UserError
from lemma.engines.engine_options import ENGINES, EngineOptions, NativeOptions
from lemma.evaluation.benchmarks import Benchmark, find_benchmark
from lemma.evaluation.eval_settings import Measuring
from lemma.evaluation.metrics import sizes_up_to

BETTER_WHEN_HIGHER = ("answer_accuracy", "format_accuracy", "reasoning_present", "reward")
SUCCESS = "success"
"""What answer_accuracy is called where problems are played in an environment."""
_AT_K = re.compile(r"(pass|maj)@([1-9]\d*)")


class EvalOptions(Measuring):
    """Benchmarks of the policy during a stage: before the first step, every `every` steps, and at the end."""

    benchmarks: list[str | Benchmark] = Field(default_factory=list)
    """Names such as gsm8k, data files, or mappings with `source` and more. Empty: no evaluation. In a stage with an
    environment they are played there, and `source: environment` with a `split` takes its own problems."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates at the start and at the end only."""
    at_start: bool = True
    """Evaluate before the first step too, to see what training changed."""
    metric: str = "answer_accuracy"
    """The best checkpoint is the one with the highest value of this: the mean over benchmarks of answer_accuracy,
    format_accuracy, reasoning_present, reward, pass@k or maj@k, or of one benchmark, such as gsm8k/pass@4. k is 2, 4, 8
    and so on up to the number of samples, or that number; pass@1 is answer_accuracy, and so is success, its name in
    environments."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens in a completion, or in a turn of an episode."""
    engine: Annotated[EngineOptions, Choice(ENGINES, by="name")] = Field(default_factory=NativeOptions)
    """Which engine generates in a stage that samples nothing itself, and on which devices: native, vllm or
    transformers; a name, or a mapping with name and options. It is opened for each evaluation and closed after it. A
    stage that samples evaluates with its `rollout.engine`."""

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
    def _metric_is_measured(self) -> EvalOptions:
        sizes = self._sizes()
        part, slash, name = self.metric.rpartition("/")
        at_k = _AT_K.fullmatch(name)
        if (slash and part not in sizes) or (name not in (*BETTER_WHEN_HIGHER, SUCCESS) and at_k is None):
            raise ValueError(
                f"there is no metric '{self.metric}' to choose a checkpoint by; write one of: "
                f"{', '.join(BETTER_WHEN_HIGHER)}, pass@K or maj@K, with or without the name of a benchmark in front"
            )
        if at_k is not None and name != "pass@1" and sizes:
            measured = {size for own in ([sizes[part]] if slash else sizes.values()) for size in own[1:]}
            if int(at_k[2]) not in measured:
                raise ValueError(_not_measured(self.metric, f"{part}{slash}", at_k[1], sorted(measured)))
        for benchmark, own in sizes.items():
            if self.temperature == 0 and own[-1] > 1:
                raise ValueError(
                    f"{own[-1]} samples of {benchmark} at temperature 0 are all the same; raise temperature or write "
                    "`samples: 1`"
                )
        return self

    @property
    def measured_metric(self) -> str:
        """The name under which `metric` is measured."""
        front, slash, name = self.metric.rpartition("/")
        return f"{front}{slash}answer_accuracy" if name in ("pass@1", SUCCESS) else self.metric

    def _sizes(self) -> dict[str, list[int]]:
        """For each benchmark, the k that pass@k and maj@k are measured for; the first is 1, the last all samples."""
        benchmarks = map(find_benchmark, self.benchmarks)
        return {one.name: sizes_up_to(self.samples or one.samples) for one in benchmarks}


def _not_measured(metric: str, front: str, kind: str, sizes: list[int]) -> str:
    if not sizes:
        instead = f"raise `samples`, or write {front}answer_accuracy, which is all that one sample can tell"
    else:
        instead = f"write {', '.join(f'{front}{kind}@{size}' for size in sizes)}, or other `samples`"
    return f"eval.metric is '{metric}', which is not measured with this number of samples; {instead}"
