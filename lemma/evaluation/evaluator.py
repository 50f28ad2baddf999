"""The one way to evaluate, for `lemma eval` and for stages: prompts, samples, verdicts, numbers, files.

Generation of all benchmarks goes through one queue, and grading runs in worker processes meanwhile. Every graded sample
is in the journal before it counts; the noise of a sample depends on its key alone. So an evaluation that dies goes on
where it was, and ends with the same files as one that never died.

On several ranks each of them generates, plays and grades a share. The first one owns the folder and writes the results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.core.collector import set_aside
from lemma.core.events import Progressed, Sink, silent
from lemma.core.faults import fault_point
from lemma.core.ranks import from_leader, is_leader, world_size
from lemma.core.roll_call import check_alike, roll_call
from lemma.core.types import Message, Problem, content_id
from lemma.core.version import lemma_version
from lemma.engines.protocol import Engine
from lemma.evaluation.eval_row import EvalRow
from lemma.evaluation.eval_samples import BenchmarkScorer, Place, journals_in, open_worlds, sample
from lemma.evaluation.eval_settings import OURS, EvalSettings, check_graders, grader_version
from lemma.evaluation.in_environment import in_settings, measures_of
from lemma.evaluation.lenient import add_lenient
from lemma.evaluation.option_likelihood import WORDING, log_likelihoods, rows_of, wording
from lemma.evaluation.questions import Asked, Wanted, load_all, prepare
from lemma.evaluation.rescore import regrade
from lemma.evaluation.results import (
    VERSION,
    Report,
    alone_in,
    claim,
    is_complete,
    make_report,
    read_report,
    write_report,
)
from lemma.grading import GradingService
from lemma.rewards import Reward
from lemma.rewards.correctness import Accuracy
from lemma.rewards.episodes import EnvironmentReward

if TYPE_CHECKING:
    from lemma.models.policy import Policy

__all__ = ["EvalSettings", "evaluate", "load_all"]

# What a format does to this question, with a model's chat template, is part of its name in results.
EXAMPLE = Problem((Message("user", "What is 6 times 7?"),))


@set_aside(collect=False)  # a pass over all that torch and transformers made would keep the engine waiting
def evaluate(
    engine: Engine,
    policy: Policy,
    benchmarks: Sequence[Wanted],
    settings: EvalSettings,
    folder: Path,
    *,
    model: str = "",
    rewards: Sequence[Reward] = (),
    service: GradingService | None = None,
    sink: Sink = silent,
    option: str = "--to",
) -> Report:
    """Measure the policy on these benchmarks and write everything into the folder, or go on with what is there.
    `option` is where the user names the folder.

    Every rank must call this alike. Those other than the first get the report without its rows.
    """
    check_graders(settings.grader)
    asked = [prepare(one, policy, settings) for one in load_all(benchmarks, settings)]
    identity = _identity(engine, policy, asked, settings, model)
    if world_size() > 1:
        check_alike(_marks(asked, identity))
    sink = sink if is_leader() else silent
    with ExitStack() as stack:

        def begin() -> bool:
            claim(folder, identity)
            stack.enter_context(alone_in(folder))
            return is_complete(folder)

        if from_leader(begin, "the folder of an evaluation"):
            report = _from_leader(lambda: read_report(folder))
        else:
            if world_size() > 1:
                roll_call(folder, option)
            report = _evaluate(engine, policy, asked, settings, identity, folder, rewards, service, sink)
        for path in journals_in(folder) if is_leader() else ():
            path.unlink()
    return report


def _from_leader(make: Callable[[], Report]) -> Report:
    """A report of the first rank; the others get it without its rows, which may be large."""
    whole: list[Report] = []

    def without_rows() -> Report:
        whole.append(make())
        return replace(whole[0], rows={})

    short = from_leader(without_rows, "the results of an evaluation")
    return whole[0] if whole else short


def _evaluate(
    engine: Engine,
    policy: Policy,
    asked: Sequence[Asked],
    settings: EvalSettings,
    identity: dict[str, Any],
    folder: Path,
    rewards: Sequence[Reward],
    service: GradingService | None,
    sink: Sink,
) -> Report:
    began = time.perf_counter()
    written = [one for one in asked if not one.is_weighed]
    rows = {one.name: _weigh(one, policy, sink) for one in asked if one.is_weighed}
    begun: Mapping[Place, list[Any]] = {}
    with GradingService(_workers()) if service is None else nullcontext(service) as used:
        if policy.device.type != "cpu" and written:
            used.start()  # where the engine leaves the cores alone, starting hides behind it
        if written:
            usual = EnvironmentReward() if settings.is_scored_by_environment else Accuracy()
            scorer = BenchmarkScorer(written, rewards or [usual], policy.tokenizer, used)
            rows |= sample(engine, written, scorer, open_worlds(written, policy, settings), folder, sink)
            begun = scorer.lenient
        sampled = time.perf_counter()

        def results() -> Report:
            report = _results(rows, asked, settings, identity, used, begun)
            fault_point("evaluation.before_results")
            tokens = sum(row.tokens for own in report.rows.values() for row in own)
            write_report(folder, report, _timings(sampled - began, time.perf_counter() - began, tokens))
            fault_point("evaluation.before_cleanup")
            return report

        return _from_leader(results)


def _results(
    rows: Mapping[str, Sequence[EvalRow]],
    asked: Sequence[Asked],
    settings: EvalSettings,
    identity: dict[str, Any],
    service: GradingService,
    begun: Mapping[Place, list[Any]],
) -> Report:
    """Numbers from samples, by the grader that is asked for and with the lenient verdict next to it."""
    graded: dict[str, Sequence[EvalRow]] = {}
    for one in asked:
        own, settled = identity["benchmarks"][one.name], rows[one.name]
        if not one.is_weighed:
            if settings.grader != OURS:
                settled = regrade(settled, own, settings.grader, service)
            add_lenient(settled, own, service, begun)
        graded[one.name] = settled
    return make_report(identity["model"], identity["benchmarks"], graded, _measures(asked, graded))


# --- what is measured, and whether it is what this folder holds ----------------------------------------------------


def _identity(
    engine: Engine, policy: Policy, asked: Sequence[Asked], settings: EvalSettings, model: str
) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    benchmarks, problems = {}, {}
    for one in asked:
        benchmark, form = one.loaded.benchmark, one.fmt.model_dump(mode="json")
        benchmarks[one.name] = {
            "n": len(one.loaded.problems),
            "k": one.k,
            "metric": benchmark.metric,
            "temperature": one.sampling.temperature,
            "top_p": one.sampling.top_p,
            "max_tokens": one.sampling.max_tokens,
            "format": form,
            "format_hash": content_id(form, one.fmt.prompt(EXAMPLE, policy.tokenizer)),
            "grader": f"{settings.grader} {grader_version()}",
            "rules": benchmark.rules.model_dump(mode="json"),
            "engine": _engine_in_words(engine),
            "device": f"{policy.device.type}, {str(policy.dtype).removeprefix('torch.')}",
            "seed": settings.seed,
            "ties": settings.ties,
            "source": benchmark.source,
        } | _unusual(one)
        problems[one.name] = content_id([(p.id, p.question, p.golds) for p in one.loaded.problems])
    named = {"name": model or "a policy in training", "weights": _weights(model)}
    return {"version": VERSION, "model": named, "benchmarks": benchmarks, "problems": problems}


def _marks(asked: Sequence[Asked], identity: Mapping[str, Any]) -> dict[str, str]:
    """What all ranks must have read alike; files may lie elsewhere on other machines."""
    marks: dict[str, str] = {}
    for one in asked:
        marks[f"the problems of {one.name}"] = identity["problems"][one.name]
        settings = {name: value for name, value in identity["benchmarks"][one.name].items() if name != "source"}
        marks |= {f"`{name}` of {one.name}": content_id(value) for name, value in settings.items()}
        marks[f"the prompts of {one.name}"] = content_id(one.prompts, [ask.prompt.tolist() for ask in one.asks])
    return marks


def _unusual(one: Asked) -> dict[str, Any]:
    """Settings that most evaluations do not have: examples in the prompt, options that are weighed."""
    settings: dict[str, Any] = {}
    if one.shots is not None:
        settings |= {"shots": one.shots.count, "shots_as": one.shots.kind, "shots_hash": one.shots.digest}
    if one.is_weighed:
        benchmark = one.loaded.benchmark
        settings |= {"scoring": "likelihood", "weighs": benchmark.weighs, "wording": benchmark.wording or WORDING}
    return settings if one.environment is None else settings | in_settings(one.environment)


def _engine_in_words(engine: Engine) -> str:
    stands_in = f", in place of {engine.in_place_of}" if engine.in_place_of else ""
    if engine.name == "vllm":
        from lemma.engines.vllm.versions import installed

        return f"vllm {installed() or 'of another machine'}{stands_in}"
    own = version("transformers") if engine.name == "transformers" else f"{lemma_version()}, torch {version('torch')}"
    return f"{engine.name} {own}{stands_in}"


def _weights(model: str) -> str | None:
    """A name for the weights in a folder or a file, by their sizes and times; None for a model of the hub."""
    place = Path(model).expanduser()
    if not model or not place.exists():
        return None
    files = [place] if place.is_file() else sorted(path for path in place.glob("*.safetensors") if path.is_file())
    return content_id([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


# --- numbers ------------------------------------------------------------------------------------------------------


def _weigh(one: Asked, policy: Policy, sink: Sink) -> list[EvalRow]:
    """A multiple-choice benchmark by the log-likelihoods of its options."""
    questions = [wording(one.loaded, problem, one.shots) for problem in one.loaded.problems]
    sums = log_likelihoods(
        policy, questions, told=lambda done, total: sink(Progressed(f"weighing {one.name}", done, total))
    )
    return rows_of(one.loaded, questions, sums)


def _measures(asked: Sequence[Asked], rows: Mapping[str, Sequence[EvalRow]]) -> dict[str, dict[str, list[float]]]:
    """The measures of environments, by benchmark."""
    measures = {
        one.name: measures_of(one.environment, one.loaded.problems, rows[one.name])
        for one in asked
        if one.environment is not None
    }
    return {name: own for name, own in measures.items() if own}


def _workers() -> int:
    """Number of grading processes that run next to the engine: a quarter of the cores that a rank has, at most four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(4, cores // 4 // world_size()))


def _timings(sampling: float, whole: float, tokens: int) -> dict[str, Any]:
    return {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": whole,
        "sampling_and_grading_seconds": sampling,
        "tokens": tokens,
        "tokens_per_second": tokens / sampling if sampling else 0.0,
    }
