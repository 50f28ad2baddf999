"""What an evaluation asks: the problems of every benchmark as token ids, and how they are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lemma.core.errors import UserError
from lemma.engines.protocol import Sampling
from lemma.engines.stop_strings import ends_of
from lemma.environments.openings import opened_all
from lemma.evaluation.benchmarks import OF_ENVIRONMENT, Benchmark, Loaded, find_benchmark, load_parts
from lemma.evaluation.eval_settings import EvalSettings
from lemma.evaluation.in_environment import own_benchmark, own_problems
from lemma.evaluation.shots import STOP, Shots, ShotsAs, load_shots, prompt_with
from lemma.formats import Format, make_format
from lemma.formats.encode import encode_texts
from lemma.rollouts import SampleRequest

if TYPE_CHECKING:
    from lemma.environments import EnvironmentOptions
    from lemma.models.policy import Policy

Wanted = str | Mapping[str, Any] | Benchmark | Loaded

SEVERAL_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Asked:
    """One benchmark, ready to be asked. There is nothing to generate where its options are weighed."""

    loaded: Loaded
    fmt: Format
    k: int
    sampling: Sampling
    prompts: list[str]
    asks: list[SampleRequest]
    shots: Shots | None = None
    environment: EnvironmentOptions | None = None

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def is_weighed(self) -> bool:
        return self.loaded.benchmark.scoring == "likelihood"


def wanted_of(benchmarks: Sequence[Wanted], settings: EvalSettings) -> list[Wanted]:
    """The benchmarks that are named, otherwise the environment's own problems."""
    return list(benchmarks) if benchmarks or settings.environment is None else [own_benchmark(settings)]


def load_all(benchmarks: Sequence[Wanted], settings: EvalSettings) -> list[Loaded]:
    """The problems of all benchmarks, which have different names."""
    by_name: dict[str, Loaded] = {}
    for spec in benchmarks:
        for loaded in [spec] if isinstance(spec, Loaded) else _load(find_benchmark(spec), settings):
            if loaded.name in by_name:
                raise UserError(f"benchmark {loaded.name} is named twice", fix="give one of them another `name`")
            by_name[loaded.name] = loaded
    if not by_name:
        raise UserError("there is no benchmark to evaluate on", fix="write for example `gsm8k`")
    return list(by_name.values())


def _load(benchmark: Benchmark, settings: EvalSettings) -> list[Loaded]:
    if settings.likelihood:
        benchmark = benchmark.model_copy(update={"scoring": "likelihood"})
    environment = settings.environment
    parts = load_parts(
        benchmark,
        limit=settings.limit,
        data_dir=settings.data_dir,
        to_grade=not settings.is_scored_by_environment,
        given=own_problems(environment, benchmark) if benchmark.source == OF_ENVIRONMENT else None,
    )
    if benchmark.scoring == "likelihood":
        for one in parts:
            check_choices(one)
    return parts


def check_choices(loaded: Loaded) -> None:
    """Refuse questions without options to weigh."""
    for problem in loaded.problems:
        if not problem.choices or not problem.golds:
            raise UserError(
                f"problem {problem.id} of {loaded.name} has no options to weigh",
                fix="leave --likelihood out, or name multiple-choice benchmarks such as arc_challenge",
            )


def _shots(benchmark: Benchmark, tokenizer: Any, settings: EvalSettings) -> Shots | None:
    count = benchmark.shots if settings.shots is None else settings.shots
    if not count:
        return None
    usual: ShotsAs = "chat" if getattr(tokenizer, "chat_template", None) else "text"
    kind = "text" if benchmark.scoring == "likelihood" else settings.shots_as or usual
    return load_shots(benchmark, count, kind, settings.data_dir)


def prepare(loaded: Loaded, policy: Policy, settings: EvalSettings) -> Asked:
    """Problems as token ids, and how their completions are sampled."""
    benchmark, environment = loaded.benchmark, settings.environment
    shots = _shots(benchmark, policy.tokenizer, settings)
    fmt = make_format(benchmark.format if settings.format is None else settings.format)
    if benchmark.scoring == "likelihood":
        return Asked(loaded, fmt, 1, Sampling(max_tokens=1, temperature=0.0), [], [], shots)
    k = settings.samples or benchmark.samples
    temperature = settings.temperature
    if temperature is None:
        temperature = 0.0 if k == 1 else SEVERAL_TEMPERATURE
    if k > 1 and temperature == 0:
        raise UserError(
            f"{k} samples of {benchmark.name} at temperature 0 are all the same",
            fix=f"write --samples 1, or a temperature such as {SEVERAL_TEMPERATURE}",
        )
    if environment is not None:
        loaded = replace(loaded, problems=tuple(opened_all(environment, loaded.problems, settings.seed)))
    if shots is None:
        prompts = [fmt.prompt(problem, policy.tokenizer) for problem in loaded.problems]
    else:
        prompts = [prompt_with(shots, fmt, problem, policy.tokenizer) for problem in loaded.problems]
    fmt = _fitted(fmt, prompts[0], settings.thinking)
    sampling = Sampling(
        max_tokens=settings.max_tokens,
        temperature=temperature,
        top_p=settings.top_p,
        stop=fmt.stop + ((STOP,) if shots is not None and shots.kind == "text" else ()),
        stop_ids=tuple(sorted(ends_of(policy))),
    )
    encoded = encode_texts(prompts, policy.tokenizer)
    asks = [
        SampleRequest(("eval", settings.seed, benchmark.name, place), problem, np.asarray(ids, dtype=np.int32), k)
        for place, (problem, ids) in enumerate(zip(loaded.problems, encoded, strict=True))
    ]
    return Asked(loaded, fmt, k, sampling, prompts, asks, shots, environment)


def _fitted(fmt: Format, prompt: str, thinking: str) -> Format:
    """The format as this model's prompts want it read: thoughts that the chat template opens, and what they count."""
    update: dict[str, bool] = {}
    if "thinking" in type(fmt).model_fields and prompt.rstrip().endswith("<think>"):
        update["thinking"] = True
    if thinking == "whole" and "grade_unfinished" in type(fmt).model_fields:
        update["grade_unfinished"] = True
    return fmt.model_copy(update=update) if update else fmt
