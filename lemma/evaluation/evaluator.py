"""The one way to evaluate, for `lemma eval` and for stages: prompts, samples, verdicts, numbers, files.

Generation of all benchmarks goes through one queue, and grading runs in worker processes meanwhile. Every graded sample
is in the journal before it counts; the noise of a sample depends on its key alone. So an evaluation that dies goes on
where it was, and ends with the same files as one that never died.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lemma.core.events import Progressed, Said, Sink, silent
from lemma.core.faults import fault_point
from lemma.core.files import write_whole
from lemma.core.types import Message, Outcome, Problem, content_id
from lemma.core.version import lemma_version
from lemma.engines.protocol import Engine, Sampling
from lemma.evaluation.eval_folder import alone_in, claim
from lemma.evaluation.eval_progress import Meter
from lemma.evaluation.eval_settings import OURS, EvalSettings
from lemma.evaluation.in_environment import in_settings, is_scored_by, measures_of
from lemma.evaluation.lenient import with_lenient
from lemma.evaluation.option_likelihood import WORDING, log_likelihoods, rows_of, wording
from lemma.evaluation.questions import Asked, Wanted, load_all, prepare
from lemma.evaluation.relay import read_beside
from lemma.evaluation.rescore import check_graders, grader_version, regrade
from lemma.evaluation.results import (
    VERSION,
    EvalRow,
    Report,
    is_complete,
    make_report,
    read_report,
    write_report,
)
from lemma.formats import Format
from lemma.grading import GradingService, Rules
from lemma.rewards import Reward
from lemma.rewards.correctness import Accuracy
from lemma.rewards.episodes import EnvironmentReward
from lemma.rollouts import Ask, Episode, Journal, Judge, Pending, World, play
from lemma.rollouts.open_world import open_world

if TYPE_CHECKING:
    from lemma.models.policy import Policy

__all__ = ["EvalSettings", "evaluate", "load_all"]

# The most that a graded sample waits for the journal, and so what a killed evaluation may lose.
SECONDS_UNWRITTEN = 1.0
# What a format does to this question, with a model's chat template, is part of its name in results.
EXAMPLE = Problem((Message("user", "What is 6 times 7?"),))


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
) -> Report:
    """Measure the policy on these benchmarks and write everything into the folder, or go on with what is there."""
    check_graders(settings.grader)
    asked = [prepare(one, policy, settings) for one in load_all(benchmarks, settings)]
    identity = _identity(engine, policy, asked, settings, model)
    claim(folder, identity)
    with alone_in(folder):
        if is_complete(folder):
            report = read_report(folder)
        else:
            report = _evaluate(engine, policy, asked, settings, identity, folder, rewards, service, sink)
        (folder / "journal.jsonl").unlink(missing_ok=True)
    return report


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
    all_rows = {one.name: _weigh(one, policy, sink) for one in asked if one.is_weighed}
    with GradingService(_workers()) if service is None else nullcontext(service) as used:
        if policy.device.type != "cpu" and written:
            used.start()  # where the engine leaves the cores alone, starting hides behind it
        if written:
            usual = EnvironmentReward() if is_scored_by(settings.environment) else Accuracy()
            judge = _Judge(written, rewards or [usual], policy.tokenizer, used)
            all_rows |= _generate(engine, written, judge, _worlds(written, policy, settings), folder, sink)
        sampled = time.perf_counter()
        for one in written:
            own = identity["benchmarks"][one.name]
            rows = all_rows[one.name]
            if settings.grader != OURS:
                rows = regrade(rows, own, settings.grader, used)
            all_rows[one.name] = with_lenient(rows, own, used)
    rows_by_name = {one.name: all_rows[one.name] for one in asked}
    report = make_report(identity["model"], identity["benchmarks"], rows_by_name, _measures(asked, rows_by_name))
    fault_point("evaluation.before_results")
    write_report(folder, report)
    tokens = sum(row.tokens for own in all_rows.values() for row in own)
    _write_timings(folder, sampled - began, time.perf_counter() - began, tokens)
    fault_point("evaluation.before_cleanup")
    return report


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
            "device": f"{policy.device.type}, {str(policy.head.weight.dtype).removeprefix('torch.')}",
            "seed": settings.seed,
            "ties": settings.ties,
            "source": benchmark.source,
        } | _unusual(one)
        problems[one.name] = content_id([(p.id, p.question, p.golds) for p in one.loaded.problems])
    named = {"name": model or "a policy in training", "weights": _weights(model)}
    return {"version": VERSION, "model": named, "benchmarks": benchmarks, "problems": problems}


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
    return f"{engine.name} {_engine_version(engine.name)}{stands_in}"


def _engine_version(name: str) -> str:
    if name == "vllm":
        from lemma.engines.vllm.versions import installed

        return installed() or "of another machine"
    return version("transformers") if name == "transformers" else f"{lemma_version()}, torch {version('torch')}"


def _weights(model: str) -> str | None:
    """A name for the weights in a folder or a file, by their sizes and times; None for a model of the hub."""
    place = Path(model).expanduser()
    if not model or not place.exists():
        return None
    files = [place] if place.is_file() else sorted(path for path in place.glob("*.safetensors") if path.is_file())
    return content_id([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


# --- samples and verdicts ------------------------------------------------------------------------------------------


def _weigh(one: Asked, policy: Policy, sink: Sink) -> list[EvalRow]:
    """A multiple-choice benchmark by the log-likelihoods of its options."""
    questions = [wording(one.loaded, problem, one.shots) for problem in one.loaded.problems]
    sums = log_likelihoods(
        policy, questions, told=lambda done, total: sink(Progressed(f"weighing {one.name}", done, total))
    )
    return rows_of(one.loaded, questions, sums)


class _Judge(Judge):
    """Each benchmark with its own format, each problem with its own rules."""

    def __init__(self, asked: Sequence[Asked], rewards: Sequence[Reward], tokenizer: Any, service: GradingService):
        super().__init__(asked[0].fmt, rewards, tokenizer, service=service, ends=asked[0].sampling.stop_ids)
        self._asked = {one.name: one for one in asked}

    def reads(self, problem: Problem, episode: Episode) -> tuple[Format, Rules]:
        own = self._asked[str(episode.key[2])]
        return own.fmt, own.loaded.benchmark.rules_of(problem)

    def begin(self, problem: Problem, episode: Episode, outcome: Outcome | None = None) -> Pending:
        pending = super().begin(problem, episode, outcome)
        if episode.answer is None and self.service is not None and outcome is None:
            for gold in problem.golds:  # the lenient verdict will be asked for later: the grader begins now
                self.service.submit(episode.text, gold, pending.item.rules)
        return pending


def _worlds(asked: Sequence[Asked], policy: Policy, settings: EvalSettings) -> dict[str, World | None]:
    """Where each benchmark is played, by name; None where its problems are answered at once."""
    environment = settings.environment
    if environment is None:
        return {one.name: None for one in asked}
    return {one.name: open_world(environment, one.fmt, policy, one.sampling.stop_ids, settings.seed) for one in asked}


def _measures(asked: Sequence[Asked], rows: Mapping[str, Sequence[EvalRow]]) -> dict[str, dict[str, list[float]]]:
    """The measures of environments, by benchmark."""
    measures = {
        one.name: measures_of(one.environment, one.loaded.problems, rows[one.name])
        for one in asked
        if one.environment is not None
    }
    return {name: own for name, own in measures.items() if own}


def _generate(
    engine: Engine,
    asked: Sequence[Asked],
    judge: _Judge,
    worlds: Mapping[str, World | None],
    folder: Path,
    sink: Sink,
) -> dict[str, list[EvalRow]]:
    """All samples as rows, in the order of benchmarks, problems and samples."""
    context = engine.context
    by_name = {one.name: one for one in asked}
    is_played = any(world is not None for world in worlds.values())
    fitting = [[ask for ask in one.asks if len(ask.prompt) < context] for one in asked]
    total = sum(ask.n for one in asked for ask in one.asks)
    episodes: dict[tuple[str, int], list[Episode]] = {}
    journal = Journal(folder / "journal.jsonl")
    if journal.episodes:
        sink(Said(f"{len(journal.episodes)} of {total} samples are there already"))

    def sampling(ask: Ask) -> Sampling:
        own = by_name[str(ask.key[2])].sampling
        room = context - len(ask.prompt)
        return own if own.max_tokens <= room else Sampling(**{**_fields(own), "max_tokens": room})

    one_by_one = all(type(reward).score_all is Reward.score_all for reward in judge.rewards)
    patience = SECONDS_UNWRITTEN if one_by_one else None

    meter = Meter(total, max(one.sampling.max_tokens for one in asked), sink)

    def read(relay: Engine, asks: Sequence[Ask], world: World | None = None) -> None:
        for sample in play(relay, asks, sampling, judge, world=world, journal=journal, patience=patience):
            episodes.setdefault((str(sample.key[2]), int(sample.key[3])), []).append(sample)
            meter.graded(sample.key, sample.sample, len(sample.ids), sample.right)

    try:
        with meter.listening(engine):
            everything = [ask for asks in fitting for ask in asks]
            if is_played:  # the next turns are asked for while others are read
                for one, asks in zip(asked, fitting, strict=True):
                    read(engine, asks, worlds[one.name])
            # A reward that computes on the device must not do so while the engine captures its graphs.
            elif any(reward.may_use_device for reward in judge.rewards):
                read(engine, everything)
            else:
                read_beside(engine, lambda relay: read(relay, everything))
    finally:
        journal.close()
    return {one.name: _rows(one, episodes, sink) for one in asked}


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


def _rows(one: Asked, episodes: Mapping[tuple[str, int], list[Episode]], sink: Sink) -> list[EvalRow]:
    rows, too_long = [], 0
    for place, (ask, prompt) in enumerate(zip(one.asks, one.prompts, strict=True)):
        samples = episodes.get((one.name, place))
        if samples is None:
            too_long += 1
            samples = [_never_asked(ask, number) for number in range(ask.n)]
        tolerance = one.loaded.benchmark.rules_of(ask.problem)
        own = None if tolerance == one.loaded.benchmark.rules else tolerance.absolute
        for sample in sorted(samples, key=lambda sample: sample.sample):
            row = _row(one.name, ask.problem, prompt, sample, own)
            rows.append(row if one.environment is None else replace(row, turns=_turns(sample)))
    if too_long:
        sink(Said(f"{one.name}: {too_long} prompts do not fit into the model's context and count as wrong", "warning"))
    return rows


def _never_asked(ask: Ask, number: int) -> Episode:
    """The empty answer to a prompt that is longer than the model's context: the problem still counts."""
    nothing = np.zeros(0, dtype=np.float32)
    return Episode.at_once(
        ask.key, number, ask.problem.id, ask.prompt, nothing.astype(np.int32), nothing, nothing, "length",
        verdict="wrong", reason="prompt_too_long",
    )  # fmt: skip


def _row(benchmark: str, problem: Problem, prompt: str, sample: Episode, tolerance: float | None) -> EvalRow:
    return EvalRow(
        benchmark=benchmark,
        problem=problem.id,
        sample=sample.sample,
        question=problem.question,
        prompt=prompt,
        completion=sample.text,
        extracted=sample.answer,
        gold=list(problem.golds),
        verdict=sample.verdict or "unknown",
        reason=sample.reason,
        format_ok=sample.format_ok,
        faults=list(sample.faults),
        finish=sample.finish,
        tokens=len(sample.ids),
        reasoning=sample.reasoning,
        reward=sample.reward,
        subject=problem.subject,
        level=problem.level,
        tolerance=tolerance,
    )


def _turns(sample: Episode) -> list[dict[str, Any]]:
    return [{"said": turn.text, "heard": turn.heard, "tokens": len(turn.ids)} for turn in sample.turns]


def _workers() -> int:
    """Number of grading processes that run next to the engine: a quarter of the cores, at most four."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4 if hasattr(os, "sched_getaffinity") else 1))


def _write_timings(folder: Path, sampling: float, whole: float, tokens: int) -> None:
    timings = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": whole,
        "sampling_and_grading_seconds": sampling,
        "tokens": tokens,
        "tokens_per_second": tokens / sampling if sampling else 0.0,
    }
    write_whole(folder / "timings.json", json.dumps(timings, indent=1) + "\n")
