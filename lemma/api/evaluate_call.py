"""`lemma.evaluate`: a model and benchmarks in, numbers with intervals out."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from lemma.config.registry import check_not_imported
from lemma.core.errors import UserError
from lemma.core.events import Awaited, Said, Sink, silent
from lemma.core.ranks import leader_first, world_size
from lemma.core.roll_call import check_alike
from lemma.evaluation.eval_settings import EvalSettings, make_settings

if TYPE_CHECKING:
    from lemma.engines.engine_options import NativeOptions
    from lemma.engines.protocol import Engine
    from lemma.evaluation.benchmarks import Benchmark, Loaded
    from lemma.evaluation.metrics import Score
    from lemma.evaluation.questions import Wanted
    from lemma.evaluation.results import Report
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


def with_settings(call: Callable[..., Any]) -> inspect.Signature:
    """What `help` and editors show: the settings one by one, in place of `**settings`."""
    kept = [one for one in inspect.signature(call).parameters.values() if one.kind is not one.VAR_KEYWORD]
    fields = EvalSettings.model_fields.items()
    told = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default) for name, one in fields]
    return inspect.Signature([*kept, *told], return_annotation="Evaluation")


def evaluate(
    model: str | Path,
    benchmarks: str | Benchmark | Mapping[str, Any] | Sequence[str | Benchmark | Mapping[str, Any]] = (),
    *,
    checkpoint: str | int | None = None,
    device: Device = "auto",
    engine: EngineName = "native",
    out: str | Path | None = None,
    sink: Sink = silent,
    **settings: Any,
) -> Evaluation:
    """Measure a model on benchmarks, or go on with an evaluation that was cut off. The same as `lemma eval`.

    A benchmark is a name, a data file, a hub dataset, a YAML entry, `path.py:Name`, a mapping or a `Benchmark`. The
    settings are those of `lemma.evaluation.eval_settings.EvalSettings`; with an `environment`, the problems are played
    in it, and without benchmarks they are its own. Of a run, `checkpoint` (a step, `best` or `last`) is exported and
    measured in place of the final model. Results go into `out`, by default a folder
    below `evaluations/` that belongs to these arguments.
    """
    from lemma.api.model_of_run import model_at

    check_not_imported("lemma.evaluate")
    told = checked_settings(settings)
    wanted = [benchmarks] if isinstance(benchmarks, str | Mapping) or hasattr(benchmarks, "source") else benchmarks
    model = model_at(str(model), None if checkpoint is None else str(checkpoint))
    named = settings.get("environment")
    task = evaluation_task(model, list(wanted), told, named, device, engine, out=out, sink=sink)  # type: ignore[arg-type]
    return measure(task, sink)


evaluate.__signature__ = with_settings(evaluate)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class EvalTask:
    """What is measured, how, and where the results go."""

    model: str
    benchmarks: Sequence[Loaded]
    settings: EvalSettings
    device: Device
    engine: EngineName
    folder: Path


def evaluation_task(
    model: str,
    benchmarks: Sequence[Wanted],
    settings: EvalSettings,
    environment: Any,
    device: Device,
    engine: EngineName,
    *,
    out: str | Path | None = None,
    sink: Sink = silent,
    more: Sequence[str] = (),
) -> EvalTask:
    """Load the benchmarks. `environment` is how it was named; `more` belongs to the name of
    the folder where none is given. Of several ranks, all must call this alike."""
    from lemma.evaluation.questions import load_all, wanted_of

    settings = as_in_run(settings, environment, model, sink)
    with leader_first("loading the benchmarks"):  # what it downloads, the others find
        loaded = load_all(wanted_of(benchmarks, settings), settings)
    names = [one.name for one in loaded]
    folder = Path(out) if out else default_folder(model, names, settings, device, engine, *more)
    return EvalTask(model, loaded, settings, device, engine, folder)


def measure(task: EvalTask, sink: Sink) -> Evaluation:
    """Load the model, ask it in the format that is named or its own, and give its memory back."""
    from lemma.api.model_of_run import format_of_model
    from lemma.environments.env_pool import EnvPool
    from lemma.evaluation.evaluator import evaluate as evaluate_policy
    from lemma.models.places import TINY, resolve

    settings, benchmarks = task.settings, task.benchmarks
    place = task.model if task.model == TINY else resolve(task.model)
    sink(Awaited("evaluation", "starting vLLM" if task.engine == "vllm" else "loading the model"))
    policy, speaker = open_model(place, task.device, task.engine, settings.seed, sink)
    sink(Awaited("evaluation"))
    try:
        if world_size() > 1:
            from lemma.models.same_weights import check_same_weights
            from lemma.runs.ingredients import code_marks

            check_same_weights(policy.module)
            check_alike(code_marks(settings, [one.benchmark for one in benchmarks]))
        own = settings.format or format_of_model(task.model, policy.tokenizer)
        report = evaluate_policy(
            speaker,
            policy,
            benchmarks,
            settings.model_copy(update={"format": own}),
            task.folder,
            model=place,
            sink=sink,
        )
    finally:
        if settings.environment is not None:
            EnvPool.of(settings.environment).close()
            settings.environment.close()
        speaker.close()
    return Evaluation(report, task.folder)


def checked_settings(values: Mapping[str, Any], spelt: Callable[[str], str] = str) -> EvalSettings:
    """The settings, or one sentence about what cannot be, before anything is loaded."""
    from lemma.environments.choosing import find_environment
    from lemma.evaluation.eval_settings import check_graders
    from lemma.formats import make_format

    if values.get("data_dir") is not None:
        values = {**values, "data_dir": str(values["data_dir"])}
    settings = make_settings(values, spelt)
    if settings.environment is not None:
        settings = settings.model_copy(update={"environment": find_environment(settings.environment)})
        _check_played(settings, spelt)
    check_graders(settings.grader)
    if settings.format is not None:
        make_format(settings.format)
    return settings


def as_in_run(settings: EvalSettings, named: Any, model: str, sink: Sink) -> EvalSettings:
    """An environment that is named without options is played as in the run of the model, where it has one of its own
    of that name."""
    from lemma.api.model_of_run import recipe_of_model

    recipe = recipe_of_model(model) if isinstance(named, str) and not named.endswith((".yaml", ".yml")) else None
    if recipe is None:
        return settings
    named = settings.environment
    stages: list[Any] = [getattr(stage, "environment", None) for stage in recipe.stages.values()]
    own = [one for one in stages if type(one) is type(named) and one.label == named.label]
    if not own or own[-1] == named:
        return settings
    plain, usual = (one.model_dump(mode="json") for one in (own[-1], named))
    other = ", ".join(f"{name}: {value}" for name, value in plain.items() if value != usual.get(name))
    sink(Said(f"{own[-1].label} is played as in the model's run ({other}); for other options name a YAML file"))
    return settings.model_copy(update={"environment": own[-1]})


def _check_played(settings: EvalSettings, spelt: Callable[[str], str]) -> None:
    """Refuse what has no effect where problems are played."""
    useless = ["likelihood", "shots"] + ([] if settings.environment.is_graded else ["grader", "thinking"])
    for name in useless:
        if settings.said.get(name):
            raise UserError(f"{spelt(name)} has no effect in an environment", fix=f"leave {spelt(name)} out")


_opened: WeakSet[Policy] = WeakSet()
"""Models of earlier calls that are still in memory: they are in cycles, and evaluations keep the collector off them."""


def open_model(
    model: str, device: Device, engine: EngineName, seed: int, sink: Sink, options: NativeOptions | None = None
) -> tuple[Policy, Engine]:
    """A model with the engine that is to generate; `options` are those of the native one. Those of earlier calls that
    nobody holds give their memory back."""
    from lemma.engines import make_engine, open_engine
    from lemma.engines.engine_options import ENGINES
    from lemma.models.load_model import load_policy

    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}'", fix=f"write one of: {', '.join(sorted(ENGINES))}")
    if _opened:
        gc.collect()
    speaker: Engine
    if engine == "native":
        policy, speaker = open_engine(model, device, seed, sink, options)
    else:
        policy = load_policy(model, device, plain=engine == "transformers")
        speaker = make_engine(ENGINES[engine](), policy, seed, sink)
    _opened.add(policy)
    return policy, speaker


def default_folder(model: str, benchmarks: Sequence[str], settings: EvalSettings, *more: str) -> Path:
    """The folder of these settings: an evaluation with the same settings resumes there."""
    from lemma.core.types import content_id

    place = Path(model)
    stem = "-".join(place.parts[-2:] if place.exists() else place.parts).strip("./") or "model"
    said = {name: value for name, value in settings.said.items() if name != "data_dir"}
    return (
        Path("evaluations")
        / f"{stem}-{'+'.join(benchmarks)[:60]}-{content_id(model, list(benchmarks), said, more)[:8]}"
    )
