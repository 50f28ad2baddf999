"""How an evaluation measures: every setting once, for recipes, `lemma eval` and `lemma.evaluate`. Light to import."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lemma.config import Options
from lemma.config.shape import Choice, annotation_of, words
from lemma.core.errors import UserError, nearest
from lemma.engines.engine_options import ENGINES, EngineOptions, NativeOptions
from lemma.evaluation.benchmarks import Benchmark, find_benchmark
from lemma.evaluation.metrics import Ties, sizes_up_to

OURS = "lemma"
"""The name of Lemma's own grader."""
BETTER_WHEN_HIGHER = ("answer_accuracy", "format_accuracy", "reasoning_present", "reward")
SUCCESS = "success"
"""What answer_accuracy is called where problems are played in an environment."""
_AT_K = re.compile(r"(pass|maj)@([1-9]\d*)")


class Measuring(Options):
    """What a stage and a command both say about an evaluation."""

    samples: int | None = Field(None, ge=1)
    """Samples per problem. Default: the benchmark's own number."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. Default: 0 for one sample, 0.6 for several."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    max_tokens: int = Field(4096, ge=1)
    """Maximum number of tokens in a completion, or in a turn of an episode."""
    limit: int | None = Field(None, ge=1)
    """At most this many problems of each benchmark; always the same ones."""
    thinking: Literal["after", "whole"] = "after"
    """If the reasoning never ends: after counts no answer, whole looks for one in the whole text."""
    data_dir: str | None = None
    """A folder of data files to use instead of the hub."""
    shots: int | None = Field(None, ge=0)
    """Solved examples before each question (few-shot), from the benchmark's training split. Default: the benchmark's
    own number."""
    shots_as: Literal["chat", "text"] | None = None
    """Examples as chat turns or as plain text. Default: chat for tokenizers with a chat template."""


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
    def _exist(cls, benchmarks: list[str | Benchmark], info: ValidationInfo) -> list[str | Benchmark]:
        try:
            sizes = _sizes(benchmarks, info.data.get("samples"))
        except UserError as error:
            raise ValueError(str(error)) from None
        for benchmark, own in sizes.items():
            if info.data.get("temperature") == 0 and own[-1] > 1:
                raise ValueError(
                    f"{own[-1]} samples of {benchmark} at temperature 0 are all the same; raise temperature or write "
                    "`samples: 1`"
                )
        return benchmarks

    @field_validator("metric")
    @classmethod
    def _is_measured(cls, metric: str, info: ValidationInfo) -> str:
        if "benchmarks" not in info.data:
            return metric
        sizes = _sizes(info.data["benchmarks"], info.data.get("samples"))
        part, slash, name = metric.rpartition("/")
        at_k = _AT_K.fullmatch(name)
        if (slash and part not in sizes) or (name not in (*BETTER_WHEN_HIGHER, SUCCESS) and at_k is None):
            raise ValueError(
                f"there is no metric '{metric}' to choose a checkpoint by; write one of: "
                f"{', '.join(BETTER_WHEN_HIGHER)}, pass@K or maj@K, with or without the name of a benchmark in front"
            )
        if at_k is not None and name != "pass@1" and sizes:
            measured = {size for own in ([sizes[part]] if slash else sizes.values()) for size in own[1:]}
            if int(at_k[2]) not in measured:
                raise ValueError(_not_measured(metric, f"{part}{slash}", at_k[1], sorted(measured)))
        return metric

    @property
    def measured_metric(self) -> str:
        """The name under which `metric` is measured."""
        front, slash, name = self.metric.rpartition("/")
        return f"{front}{slash}answer_accuracy" if name in ("pass@1", SUCCESS) else self.metric


class EvalSettings(Measuring):
    """Everything that one evaluation is told; None leaves a value to the benchmark."""

    format: Any = None
    """How questions are put and answers are read: a name, a mapping or a `Format`. Default: that of the model's run,
    else the one whose chat template was saved with the tokenizer, else the benchmark's."""
    grader: str = OURS
    """lemma, or graders of other systems joined by commas, such as math_verify,boxed_slow."""
    seed: int = Field(0, ge=0)
    """Another seed, other samples."""
    likelihood: bool = False
    """Multiple choice: take the likeliest option, in place of what the model writes."""
    environment: Any = None
    """Play the problems in an environment: a name, `path.py:Class`, a YAML file with its options, or a recipe."""
    split: str = "dev"
    """Which of the environment's own problems are played where no benchmark is named."""
    ties: Ties = "average"
    """What maj@k is worth where answers tie: the mean over them, or the one that was given first."""

    @classmethod
    def of(cls, options: Measuring, **more: Any) -> EvalSettings:
        """The settings that a recipe writes, and what the recipe does not say there."""
        return cls(**{name: getattr(options, name) for name in Measuring.model_fields}, **more)

    @property
    def is_scored_by_environment(self) -> bool:
        """Whether the environment itself says what was a success, and no grader does."""
        return self.environment is not None and not self.environment.is_graded

    @property
    def said(self) -> dict[str, Any]:
        """What differs from the defaults: a setting that is added one day changes no name that is made of this."""
        given = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        return {name: value for name, value in given.items() if value != type(self).model_fields[name].default}


def make_settings(values: Mapping[str, Any], spelt: Callable[[str], str] = str) -> EvalSettings:
    """The settings of a call or a command; a wrong one gets one sentence, under the name by which `spelt` knows it."""
    try:
        return EvalSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = nearest(spelt(name), map(spelt, EvalSettings.model_fields))
            raise UserError(f"an evaluation has no setting '{spelt(name)}'", fix=known) from None
        least = first.get("ctx", {}).get("ge")
        may = words(annotation_of(EvalSettings.model_fields[name])) if least is None else f"{least} or more"
        raise UserError(f"{spelt(name)} is {first['input']}", fix=f"write {may}") from None


def _sizes(benchmarks: Iterable[str | Benchmark], samples: int | None) -> dict[str, list[int]]:
    """For each benchmark, the k that pass@k and maj@k are measured for; the first is 1, the last all samples."""
    return {one.name: sizes_up_to(samples or one.samples) for one in map(find_benchmark, benchmarks)}


def _not_measured(metric: str, front: str, kind: str, sizes: list[int]) -> str:
    if not sizes:
        instead = f"raise `samples`, or write {front}answer_accuracy, which is all that one sample can tell"
    else:
        instead = f"write {', '.join(f'{front}{kind}@{size}' for size in sizes)}, or other `samples`"
    return f"eval.metric is '{metric}', which is not measured with this number of samples; {instead}"


@dataclass(frozen=True)
class Preset:
    """`options` of the command, and the number of samples of benchmarks that are measured otherwise than ours."""

    options: dict[str, Any]
    samples: dict[str, int] = field(default_factory=dict)

    def of(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark as this evaluation measures it."""
        if benchmark.name not in self.samples:
            return benchmark
        return benchmark.model_copy(update={"samples": self.samples[benchmark.name]})


PRESETS: dict[str, Preset] = {
    # Temperature 0.6 also for one sample; AIME and AMC are avg@32, which are our own defaults; the rest is pass@1.
    "luffy": Preset({"temperature": 0.6, "top_p": 1.0, "max_tokens": 8192}, {"gpqa_diamond": 1}),
}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"there is no preset '{name}'", fix=nearest(name, PRESETS))
    return PRESETS[name]


@cache
def grader_version() -> str:
    """The version of Lemma and a digest of its grading code, which changes whenever a verdict could."""
    import hashlib

    import lemma.grading
    from lemma.core.version import lemma_version

    whole = hashlib.blake2b(digest_size=4)
    for path in sorted(Path(lemma.grading.__file__).parent.rglob("*.py")):
        whole.update(path.read_bytes())
    return f"{lemma_version()}+{whole.hexdigest()}"


def check_graders(names: str) -> list[str]:
    """The graders in `a,b`; an answer is right where any of them says so."""
    graders = [name.strip() for name in names.split(",")]
    if graders == [OURS]:
        return graders
    from lemma.grading.compat import COMPAT

    for name in graders:
        if name != OURS and name not in COMPAT:
            raise UserError(f"there is no grader '{name}'", fix=nearest(name, [OURS, *COMPAT]))
    return graders
