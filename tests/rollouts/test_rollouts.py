"""Problems through the real engine, format and grader into the journal, and back out of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.data.data_options import ArithmeticOptions, DataOptions
from lemma.data.load_rows import load_problems
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Sampling
from lemma.formats import make_format
from lemma.formats.detokenizer import Detokenizer
from lemma.formats.encode import encode_prompt
from lemma.grading import Verdict
from lemma.grading.grader import PendingGrade
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions, TinyOptions
from lemma.models.policy import Policy
from lemma.rewards import make_reward
from lemma.rollouts import Episode, Journal, SampleRequest, Scorer, play, read_episodes
from lemma.rollouts.scorer import text_of, texts_of
from tests.models.small import CPU
from tests.rollouts.episode_rows import row_of
from tests.rollouts.scripted import Scripted

FORMAT = make_format("r1_zero")
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def policy() -> Policy:
    tiny = TinyOptions(hidden=32, layers=2, feed_forward=64, heads=2, kv_heads=1)
    return build_policy(ModelOptions(tiny=tiny), CPU, 0, None)


def asks(policy: Policy, count: int = 3, n: int = 4) -> list[SampleRequest]:
    data = DataOptions(arithmetic=ArithmeticOptions(operations=2, count=count))
    problems = load_problems(data, 0)
    return [
        SampleRequest(("rl", 1, draw), problem, encode_prompt(FORMAT, problem, policy.tokenizer), n)
        for draw, problem in enumerate(problems)
    ]


def scorer(policy: Policy) -> Scorer:
    return Scorer(FORMAT, [make_reward("accuracy"), make_reward("think_answer_format")], policy.tokenizer)


def run(policy: Policy, work: list[SampleRequest], journal: Journal | None = None) -> list[Episode]:
    engine = NativeEngine(policy, 3)
    return sorted(play(engine, work, SAMPLING, scorer(policy), journal=journal), key=lambda s: s.order)


def same(mine: Episode, other: Episode) -> bool:
    rows = [row_of(one) for one in (mine, other)]
    for row in rows:
        row["turns"] = [turn | {"timings": None} for turn in row["turns"]]
    return rows[0] == rows[1]


def test_a_journal_gives_back_every_sample_to_the_last_bit(policy: Policy, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    made = run(policy, asks(policy), journal)
    journal.finish()
    journal.close()
    read = sorted(read_episodes(tmp_path / "a.jsonl"), key=lambda s: s.order)
    assert len(made) == len(read) == 12
    assert all(same(a, b) for a, b in zip(made, read, strict=True))
    assert Journal(tmp_path / "a.jsonl").is_complete


def test_what_is_in_the_journal_is_not_generated_again(policy: Policy, tmp_path: Path) -> None:
    whole = run(policy, asks(policy))
    journal = Journal(tmp_path / "a.jsonl")
    for sample in whole[:5]:
        journal.append(replace(sample, reason="kept"))
    journal.close()
    with open(tmp_path / "a.jsonl", "ab") as handle:
        handle.write(b'{"torn": ')
    again = run(policy, asks(policy), Journal(tmp_path / "a.jsonl"))
    assert [s.order for s in again] == [s.order for s in whole]
    assert [s.reason == "kept" for s in again] == [True] * 5 + [False] * 7
    assert all((a.ids == b.ids).all() for a, b in zip(again, whole, strict=True))


def test_a_teachers_prefix_is_part_of_the_response_and_not_sampled(policy: Policy) -> None:
    ask = asks(policy, 1)[0]
    prefix = np.asarray(policy.tokenizer.encode(" 1 + 2 ", add_special_tokens=False), dtype=np.int32)
    (sample,) = run(policy, [replace(ask, n=1, prefix=prefix, first=6)])
    assert (sample.sample, sample.given) == (6, len(prefix))
    assert (sample.ids[: len(prefix)] == prefix).all() and not sample.logprobs[: len(prefix)].any()
    assert sample.text.startswith(policy.tokenizer.decode(prefix.tolist()))
    (trajectory,) = sample.trajectories()
    assert trajectory.trained_tokens == len(sample.ids) and len(trajectory) == len(ask.prompt) + len(sample.ids)


class AllAtOnce(Scripted):
    """Gives its completions when all of them are there."""

    def work(self) -> None:
        while self.is_busy:
            super().work()


def test_answers_that_are_there_together_are_read_as_one_by_one(policy: Policy, tmp_path: Path) -> None:
    said = ["<think> 1 </think> <answer> 7 </answer>", "", "1 + 2", "<answer> 5"]
    one, *others = asks(policy)
    prefix = np.asarray(policy.tokenizer.encode(" 1 + ", add_special_tokens=False), dtype=np.int32)
    work = [replace(one, n=1, prefix=prefix, first=3), *others]

    def written(kind: type[Scripted], name: str) -> tuple[bytes, list[int]]:
        journal, reader, together = Journal(tmp_path / name), scorer(policy), []
        read = reader.read
        reader.read = lambda episodes: (together.append(len(episodes)), read(episodes))[1]  # type: ignore[method-assign]
        engine = kind(policy.tokenizer, lambda request, sample: said[sample])
        list(play(engine, work, Sampling(max_tokens=30), reader, journal=journal))
        journal.close()
        return (tmp_path / name).read_bytes(), together

    alone, none = written(Scripted, "alone")
    at_once, together = written(AllAtOnce, "at once")
    assert alone == at_once and alone.count(b"\n") == 9
    assert set(none) == {1} and together[0] == 9


def test_verdict_and_rewards_are_those_of_the_text(policy: Policy) -> None:
    ask = asks(policy, 1)[0]
    engine = NativeEngine(policy, 3)
    answer = f" so </think> <answer> {ask.problem.gold} </answer>"
    ids = np.asarray(policy.tokenizer.encode(answer, add_special_tokens=False), dtype=np.int32)
    stopped = Sampling(max_tokens=len(ids) + 1)
    (sample,) = play(engine, [replace(ask, n=1, prefix=ids)], stopped, scorer(policy))
    assert sample.answer == ask.problem.gold and sample.verdict == "right"
    assert sample.rewards["accuracy"] == 1.0 and sample.reward is not None


def test_a_journal_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"version": 99}\n')
    with pytest.raises(UserError, match=r"no version of the journal that is known here"):
        Journal(tmp_path / "a.jsonl")


def test_a_slow_verdict_does_not_keep_later_completions_from_being_read(policy: Policy) -> None:
    read: list[str] = []

    class Slow:
        """Gives every verdict but the first, which comes when all completions have been read."""

        first: Future[Verdict] | None = None

        def decide(self, pending: PendingGrade) -> Future[Verdict]:
            read.append(pending.extracted)
            future: Future[Verdict] = Future()
            if self.first is None:
                self.first = future
            else:
                future.set_result(Verdict("wrong", "value"))
            if len(read) == 300:
                self.first.set_result(Verdict("right", "value"))
            return future

    engine = Scripted(policy.tokenizer, lambda request, sample: "<think> 1 </think> <answer> 2 </answer>")
    work = [
        replace(ask, key=("rl", 1, i), problem=replace(ask.problem, golds=(r"\int_0^1 x dx",)))
        for i, ask in enumerate(asks(policy, 75))
    ]
    judged = Scorer(make_format({"name": "r1_zero"}), [make_reward("accuracy")], policy.tokenizer, service=Slow())  # type: ignore[arg-type]
    samples = iter(play(engine, work, Sampling(max_tokens=20), judged))
    assert next(samples).verdict == "right"
    assert len(read) == 300
    assert len(list(samples)) == 299


class Failing(Scripted):
    """An engine that says nothing more after some samples."""

    _count = 0

    def work(self) -> None:
        if self._count == 10:
            raise OSError("the device is gone")
        super().work()
        self._count += 1


@pytest.mark.parametrize("where", ["scorer", "consumer"])
def test_no_request_stays_in_the_engine_where_an_exception_ends_a_play(policy: Policy, where: str) -> None:
    """What an aborted play asked for is neither generated nor told to whoever uses the engine next."""
    engine = NativeEngine(policy, 3)
    judged = scorer(policy)
    work = asks(policy)
    if where == "scorer":

        def fails(*parts: object) -> None:
            raise OSError("no grader")

        judged.begin = fails  # type: ignore[method-assign, assignment]
        with pytest.raises(OSError, match="no grader"):
            list(play(engine, work, SAMPLING, judged))
    else:
        samples = play(engine, work, SAMPLING, judged, patience=0.0)
        next(samples)
        assert not engine.scheduler.is_idle
        samples.close()  # type: ignore[attr-defined]
    assert engine.scheduler.is_idle and not list(engine.completions())
    again = sorted(play(engine, work, SAMPLING, scorer(policy)), key=lambda one: one.order)
    assert all(same(a, b) for a, b in zip(again, run(policy, work), strict=True))


@pytest.mark.parametrize("patience", [0.0, 3600.0, None])
def test_what_is_graded_is_written_though_the_engine_fails(
    policy: Policy, tmp_path: Path, patience: float | None
) -> None:
    engine = Failing(policy.tokenizer, lambda request, sample: "<think> 1 </think> <answer> 2 </answer>")
    journal = Journal(tmp_path / "a.jsonl")
    samples = play(engine, asks(policy), Sampling(max_tokens=20), scorer(policy), journal=journal, patience=patience)
    with pytest.raises(OSError, match="the device is gone"):
        list(samples)
    assert len(list(read_episodes(journal.path))) == (10 if patience is not None else 0)


def test_a_journal_that_cannot_be_written_is_what_is_told(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "jsonl.mid_line:3:ENOSPC")
    engine, journal = NativeEngine(policy, seed=7), Journal(tmp_path / "step.jsonl")
    with pytest.raises(OSError, match="No space"):
        list(play(engine, asks(policy), Sampling(max_tokens=20), scorer(policy), journal=journal, patience=0.0))


def test_with_patience_a_sample_is_written_before_a_batch_is_full(policy: Policy, tmp_path: Path) -> None:
    engine = Scripted(policy.tokenizer, lambda request, sample: "<think> 1 </think> <answer> 2 </answer>")
    journal = Journal(tmp_path / "a.jsonl")
    samples = iter(play(engine, asks(policy), Sampling(max_tokens=20), scorer(policy), journal=journal, patience=0.0))
    next(samples)
    assert len(list(read_episodes(journal.path))) == 1


def test_many_texts_are_those_of_each(policy: Policy) -> None:
    tokenizer, rng = policy.tokenizer, np.random.default_rng(0)
    responses: list[tuple[np.ndarray, str]] = [
        (rng.integers(0, len(tokenizer), length), finish) for length in (0, 1, 7) for finish in ("stop", "length")
    ]
    responses += [
        (np.array([7, 8, end]), finish) for end in (tokenizer.eos_token_id, 9) for finish in ("stop", "length")
    ]
    detokenizer = Detokenizer(tokenizer)
    texts = texts_of(responses, detokenizer, {9})
    assert texts == [text_of(*one, detokenizer, {9}) for one in responses]
    assert texts[-4:] == [tokenizer.decode([7, 8, *end]) for end in ([], [tokenizer.eos_token_id], [], [9])]
