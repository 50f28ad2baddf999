"""The samples of an evaluation. Each rank plays a share of the problems and writes them to a journal of its own; the
first rank gets all of them as rows.

Problems are dealt out to slots by their number, so that who plays what does not depend on who is faster. A journal is
read by any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lemma.core.events import Said, Sink
from lemma.core.ranks import from_leader, gather_to_leader, is_leader, own_slots, slots, together
from lemma.core.types import Outcome, Problem
from lemma.engines.protocol import Completion, Engine, Request, Sampling
from lemma.evaluation.eval_progress import Meter
from lemma.evaluation.eval_row import EvalRow, lines_of
from lemma.evaluation.eval_settings import EvalSettings
from lemma.evaluation.questions import Asked
from lemma.evaluation.relay import read_beside
from lemma.formats import Format
from lemma.grading import GradingService, Rules
from lemma.rewards import Reward
from lemma.rollouts import Episode, Journal, Pending, SampleRequest, Scorer, World, play
from lemma.rollouts.journal_reader import read_episodes
from lemma.rollouts.open_world import open_world
from lemma.rollouts.scorer import texts_of

if TYPE_CHECKING:
    from lemma.models.policy import Policy

# The most that a graded sample waits for the journal, and so what a killed evaluation may lose.
SECONDS_UNWRITTEN = 1.0
# Of a sample: its benchmark, the number of its problem there, and its own.
Place = tuple[str, int, int]
Known = Mapping[tuple[str, int], Episode]


def sample(
    engine: Engine,
    asked: Sequence[Asked],
    scorer: BenchmarkScorer,
    worlds: Mapping[str, World | None],
    folder: Path,
    sink: Sink,
) -> dict[str, list[EvalRow]]:
    """All samples as rows, in the order of benchmarks, problems and samples. Ranks other than the first get none."""
    known: Known = from_leader(lambda: _known(folder), "the journals of an evaluation")
    total = sum(ask.n for one in asked for ask in one.asks)
    if known:
        sink(Said(f"{len(known)} of {total} samples are there already"))
    meter = Meter(total, max(one.sampling.max_tokens for one in asked), sink)
    share = _Share(engine, asked, scorer, worlds, known, meter)
    fitting = [ask for one in asked for ask in one.asks if len(ask.prompt) < engine.context]
    there = [ask.known(known) for ask in fitting]
    missing = [ask for ask, own in zip(fitting, there, strict=True) if len(own) < ask.n]
    if is_leader():
        share.take(one for ask, own in zip(fitting, there, strict=True) if len(own) == ask.n for one in own)

    def own_part() -> None:
        parts = {slot: missing[slot :: slots()] for slot in own_slots()}
        if slots() > 1 and not any(worlds.values()):
            engine.announce({slot: [share.request(ask) for ask in part] for slot, part in parts.items()})
        for slot, part in parts.items():
            with engine.slot(slot) if slots() > 1 else nullcontext():
                share.play(part, journal_path(folder, slot))

    with meter.watching(engine, folder):
        together(own_part, "the samples of an evaluation")
        shares = gather_to_leader(share.rows, "the samples of an evaluation")
    rows = {place: row for own in shares for place, row in own.items()}
    return {one.name: _in_order(one, rows, sink) for one in asked} if is_leader() else {}


# --- journals ------------------------------------------------------------------------------------------------------


def journal_path(folder: Path, slot: int) -> Path:
    return folder / ("journal.jsonl" if slots() == 1 else f"journal.slot-{slot:03d}.jsonl")


def journals_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal*.jsonl"))


def _known(folder: Path) -> Known:
    """What was sampled by an evaluation that was cut off, with whatever number of ranks."""
    return {episode.order: episode for path in journals_in(folder) for episode in read_episodes(path)}


# --- what one rank plays -------------------------------------------------------------------------------------------


class _Share:
    """Plays problems on this rank; `rows` are the samples so far."""

    def __init__(
        self,
        engine: Engine,
        asked: Sequence[Asked],
        scorer: BenchmarkScorer,
        worlds: Mapping[str, World | None],
        known: Known,
        meter: Meter,
    ):
        self._engine, self._asked, self._scorer, self._worlds = engine, asked, scorer, worlds
        self._known, self._meter = known, meter
        self._by_name = {one.name: one for one in asked}
        one_by_one = all(type(reward).score_all is Reward.score_all for reward in scorer.rewards)
        self._patience = SECONDS_UNWRITTEN if one_by_one else None
        self.rows: dict[Place, EvalRow] = {}

    def play(self, asks: Sequence[SampleRequest], path: Path) -> None:
        journal = Journal(path)
        journal.episodes.update(self._known)
        try:
            if any(world is not None for world in self._worlds.values()):
                for name, world in self._worlds.items():  # the next turns are asked for while others are read
                    self._read(self._engine, [ask for ask in asks if ask.key[2] == name], journal, world)
            # A reward that computes on the device must not do so while the engine captures its graphs.
            elif any(reward.may_use_device for reward in self._scorer.rewards):
                self._read(self._engine, asks, journal)
            else:
                read_beside(self._engine, lambda relay: self._read(relay, asks, journal), self._scorer.read_ahead)
        finally:
            # The results take its place within seconds. What a power cut takes from it is sampled again, to the same.
            journal.close(sync=False)

    def request(self, ask: SampleRequest) -> Request:
        return ask.request(self._sampling(ask))

    def _read(self, relay: Engine, asks: Sequence[SampleRequest], journal: Journal, world: World | None = None) -> None:
        self.take(
            play(relay, asks, self._sampling, self._scorer, world=world, journal=journal, patience=self._patience)
        )

    def take(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            name, place = str(episode.key[2]), int(episode.key[3])
            row = self.rows[name, place, episode.sample] = _row(self._by_name[name], place, episode)
            row.lines = lines_of(row)  # now, while the engine generates, rather than at the end
            self._meter.graded(len(episode.ids), episode.verdict == "right")

    def _sampling(self, ask: SampleRequest) -> Sampling:
        own = self._by_name[str(ask.key[2])].sampling
        room = self._engine.context - len(ask.prompt)
        return own if own.max_tokens <= room else replace(own, max_tokens=room)


class BenchmarkScorer(Scorer):
    """Each benchmark with its own format, each problem with its own rules."""

    def __init__(self, asked: Sequence[Asked], rewards: Sequence[Reward], tokenizer: Any, service: GradingService):
        super().__init__(asked[0].fmt, rewards, tokenizer, service=service, ends=asked[0].sampling.stop_ids)
        self._asked = {one.name: one for one in asked}
        self._texts: dict[tuple[str, int], str] = {}
        self.lenient: dict[Place, list[Any]] = {}
        """Verdicts to come on whole completions in which the format finds no answer, one for each gold."""

    def reads(self, problem: Problem, episode: Episode) -> tuple[Format, Rules]:
        own = self._asked[str(episode.key[2])]
        return own.fmt, own.loaded.benchmark.rules_of(problem)

    def read_ahead(self, completions: Sequence[Completion]) -> None:
        """Texts of completions that are episodes by themselves, before they are heard one by one."""
        texts = texts_of([(one.ids, one.finish) for one in completions], self.detokenizer, self.ends)
        self._texts.update(zip((one.order for one in completions), texts, strict=True))

    def read(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            episode.turns[-1].text = self._texts.pop(episode.order, episode.turns[-1].text)
        super().read(episodes)

    def begin(self, problem: Problem, episode: Episode, outcome: Outcome | None = None) -> Pending:
        pending = super().begin(problem, episode, outcome)
        if episode.answer is None and self.service is not None and outcome is None:
            # The lenient verdict will be asked for later: the grader begins now.
            place = (str(episode.key[2]), int(episode.key[3]), episode.sample)
            self.lenient[place] = [
                self.service.submit(episode.text, gold, pending.item.rules) for gold in problem.golds
            ]
        return pending


def open_worlds(asked: Sequence[Asked], policy: Policy, settings: EvalSettings) -> dict[str, World | None]:
    """Where each benchmark is played, by name; None where its problems are answered at once."""
    environment = settings.environment
    if environment is None or environment.is_single_turn:
        return {one.name: None for one in asked}
    return {one.name: open_world(environment, one.fmt, policy, one.sampling.stop_ids, settings.seed) for one in asked}


# --- rows ----------------------------------------------------------------------------------------------------------


def _in_order(one: Asked, rows: Mapping[Place, EvalRow], sink: Sink) -> list[EvalRow]:
    """The rows of a benchmark; a prompt that is longer than the model's context counts, with empty answers."""
    ordered, too_long = [], 0
    for place, ask in enumerate(one.asks):
        is_asked = (one.name, place, 0) in rows
        too_long += not is_asked
        for number in range(ask.n):
            ordered.append(rows[one.name, place, number] if is_asked else _row(one, place, _never_asked(ask, number)))
    if too_long:
        sink(Said(f"{one.name}: {too_long} prompts do not fit into the model's context and count as wrong", "warning"))
    return ordered


def _never_asked(ask: SampleRequest, number: int) -> Episode:
    nothing = np.zeros(0, dtype=np.float32)
    return Episode.at_once(
        ask.key, number, ask.problem.id, ask.prompt, nothing.astype(np.int32), nothing, nothing, "length",
        verdict="wrong", reason="prompt_too_long",
    )  # fmt: skip


def _row(one: Asked, place: int, sample: Episode) -> EvalRow:
    problem, benchmark = one.asks[place].problem, one.loaded.benchmark
    rules = benchmark.rules_of(problem)
    return EvalRow(
        benchmark=one.name,
        problem=problem.id,
        sample=sample.sample,
        question=problem.question,
        prompt=one.prompts[place],
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
        tolerance=None if rules == benchmark.rules else rules.absolute,
        turns=None if one.environment is None else _turns(sample),
    )


def _turns(sample: Episode) -> list[dict[str, Any]]:
    return [{"said": turn.text, "heard": turn.heard, "tokens": len(turn.ids)} for turn in sample.turns]
