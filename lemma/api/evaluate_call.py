"""`lemma.evaluate`: a model and benchmarks in, numbers with intervals out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lemma.core.errors import UserError
from lemma.core.events import Sink, silent

if TYPE_CHECKING:
    from lemma.engines.protocol import Engine
    from lemma.evaluation.benchmarks import Benchmark
    from lemma.evaluation.metrics import Score
    from lemma.evaluation.questions import EvalSettings
    from lemma.evaluation.results import Report
    from lemma.formats import Format
    from lemma.models.policy import Policy

Device = Literal["auto", "cpu", "cuda"]
EngineName = Literal["native", "vllm", "transformers"]


@dataclass(frozen=True)
class Evaluation:
    """The outcome, and the folder that holds it. `evaluation["gsm8k"]` is the number that stands in tables."""

    report: Report
    folder: Path

    def __getitem__(self, benchmark: str) -> Score:
        return self.report.headline(benchmark)[1]

    @property
    def scores(self) -> dict[str, Score]:
        """The number of each benchmark, as a share between 0 and 1, with its 95% interval."""
        return {name: self[name] for name in self.report.summaries}


def evaluate(
    model: str | Path,
    benchmarks: str | Benchmark | Mapping[str, Any] | Sequence[str | Benchmark | Mapping[str, Any]],
    *,
    samples: int | None = None,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_tokens: int = 4096,
    format: str | Mapping[str, Any] | Format | None = None,
    shots: int | None = None,
    shots_as: Literal["chat", "text"] | None = None,
    likelihood: bool = False,
    thinking: Literal["after", "whole"] = "after",
    grader: str = "lemma",
    limit: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    device: Device = "auto",
    engine: EngineName = "native",
    out: str | Path | None = None,
    sink: Sink = silent,
) -> Evaluation:
    """Measure a model on benchmarks, or go on with an evaluation that was cut off. The same as `lemma eval`.

    A benchmark is a name, a data file, a hub dataset, a YAML entry, `path.py:Name`, a mapping or a `Benchmark`. What
    the arguments mean is in docs/evaluation.md. Results go into `out`, by default a folder below `evaluations/` that
    belongs to these arguments.
    """
    from lemma.evaluation.questions import EvalSettings, load_all

    settings = EvalSettings(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        limit=limit,
        format=format,
        grader=grader,
        thinking=thinking,
        data_dir=None if data_dir is None else str(data_dir),
        shots=shots,
        shots_as=shots_as,
        likelihood=likelihood,
    )
    check_settings(settings)
    wanted = [benchmarks] if isinstance(benchmarks, str | Mapping) or hasattr(benchmarks, "source") else benchmarks
    loaded = load_all(list(wanted), settings)  # type: ignore[arg-type]
    folder = Path(out) if out else default_folder(str(model), [one.name for one in loaded], settings, device, engine)
    return measure(str(model), loaded, settings, folder, device, engine, sink)


def measure(
    model: str,
    benchmarks: Sequence[Any],
    settings: EvalSettings,
    folder: Path,
    device: Device,
    engine: EngineName,
    sink: Sink,
) -> Evaluation:
    """Load the model, ask it in the format that is named or its own, and give its memory back."""
    from lemma.api.model_format import format_of_model
    from lemma.evaluation.evaluator import evaluate as evaluate_policy
    from lemma.models.places import TINY, resolve

    place = model if model == TINY else resolve(model)
    policy, speaker = open_model(place, device, engine, settings.seed, sink)
    try:
        own = settings.format or format_of_model(model, policy.tokenizer)
        report = evaluate_policy(
            speaker, policy, benchmarks, replace(settings, format=own), folder, model=place, sink=sink
        )
    finally:
        speaker.close()
    return Evaluation(report, folder)


def check_settings(settings: EvalSettings) -> None:
    """Refuse, before anything is loaded, numbers, graders and formats that cannot be."""
    from lemma.evaluation.rescore import check_graders
    from lemma.formats import make_format

    leasts = {"samples": 1, "max_tokens": 1, "temperature": 0, "seed": 0, "limit": 1, "shots": 0}
    for name, least in leasts.items():
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name} is {value}", fix=f"write {least} or more")
    if not 0 < settings.top_p <= 1:
        raise UserError(f"top_p is {settings.top_p}", fix="write a number above 0 and up to 1")
    check_graders(settings.grader)
    if settings.format is not None:
        make_format(settings.format)


def open_model(model: str, device: Device, engine: EngineName, seed: int, sink: Sink) -> tuple[Policy, Engine]:
    """A model with the engine that is to generate."""
    from lemma.engines import make_engine, open_engine
    from lemma.engines.engine_options import ENGINES
    from lemma.models.load_model import load_policy

    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}'", fix=f"write one of: {', '.join(sorted(ENGINES))}")
    if engine == "native":
        return open_engine(model, device, seed, sink)
    policy = load_policy(model, device, plain=engine == "transformers")
    return policy, make_engine(ENGINES[engine](), policy, seed, sink)


def default_folder(model: str, benchmarks: Sequence[str], settings: EvalSettings, *more: str) -> Path:
    """A folder that belongs to these settings: asking for the same again goes on there."""
    from lemma.core.types import content_id

    place = Path(model)
    stem = "-".join(place.parts[-2:] if place.exists() else place.parts).strip("./") or "model"
    said = content_id(model, list(benchmarks), repr(replace(settings, data_dir=None)), more)
    return Path("evaluations") / f"{stem}-{'+'.join(benchmarks)[:60]}-{said[:8]}"
