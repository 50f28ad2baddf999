"""The rollouts of a step: groups, their journal, dynamic sampling, unknown verdicts and a teacher's traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.algorithms import ALGORITHMS, Algorithm
from lemma.core.types import Message, Problem
from lemma.engines.protocol import Request, Sampling
from lemma.formats import make_format
from lemma.formats.encode import encode_prompt
from lemma.grading.limits import MAX_GOLD
from lemma.models.tiny import tiny_tokenizer
from lemma.rewards import make_reward
from lemma.rollouts import ProblemOrder, RolloutCollector, Rollouts, Scorer, Task
from tests.rollouts.scripted import Line, Scripted, Silent

FORMAT = make_format({"name": "r1_zero", "preamble": False})
TOKENIZER = tiny_tokenizer()
GOLD = "7"


def said(answer: str) -> str:
    return f"so </think> <answer> {answer} </answer>"


def problem(number: int, gold: str = GOLD) -> Problem:
    return Problem((Message("user", f"eva has {number} pens"),), (gold,), id=f"p{number}")


def task(number: int, gold: str = GOLD, trace: str | None = None) -> Task:
    asked = problem(number, gold)
    ids = None if trace is None else np.array([*TOKENIZER.encode(trace), TOKENIZER.eos_token_id])
    return Task(asked, encode_prompt(FORMAT, asked, TOKENIZER), ids)


class Step:
    """One step of rollouts after another, in one folder."""

    def __init__(self, folder: Path, tasks: list[Task], algorithm: str | dict[str, Any] = "grpo", **options: Any):
        wanted = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
        self.algorithm: Algorithm = ALGORITHMS[wanted["name"]](**({"group_size": 4} | wanted))
        self.tasks, self.folder = tasks, folder
        self.options = {"problems": 4, "further_rounds": 0, "seed": 3, "name": "rl"} | options
        self.sampling = Sampling(max_tokens=10)
        self.order = ProblemOrder(tasks, 3, "rl")

    def run(self, say: Line | Scripted, step: int = 1) -> Rollouts:
        """A new collector each time, as after a restart before this step."""
        engine = say if isinstance(say, Scripted) else Scripted(TOKENIZER, say)
        scorer = Scorer(FORMAT, [make_reward("accuracy"), make_reward("format")], TOKENIZER)
        self.order = ProblemOrder(self.tasks, 3, "rl")
        collector = RolloutCollector(
            engine, scorer, self.sampling, self.algorithm, self.order, self.folder, **self.options
        )
        return collector.step(step)


def numbers(rollouts: Rollouts) -> list[Any]:
    """All that a step learns from, to the last number."""
    return [
        (
            group.problem.id,
            [
                (t.ids_T.tolist(), t.rewards, t.finish, t.group_id, {k: v.tolist() for k, v in t.token_fields.items()})
                for t in group.trajectories
            ],
        )
        for group in rollouts.groups
    ]


def half_right(request: Request, sample: int) -> str:
    return said(GOLD if sample % 2 else "8")


def by_draw(live: set[int]) -> Line:
    """Samples of these draws differ; all others are right throughout."""
    return lambda request, sample: said(GOLD if request.key[2] not in live or sample else "8")


# --- the journal -----------------------------------------------------------------------------------------------------


def test_a_complete_journal_is_read_and_nothing_is_generated(tmp_path: Path) -> None:
    step = Step(tmp_path, [task(i) for i in range(6)])
    first = step.run(half_right)
    again = step.run(Silent())
    assert not first.from_journal and again.from_journal
    assert numbers(again) == numbers(first) and len(first.episodes) == 16
    assert [group.trajectories[0].group_id for group in first.groups] == [0, 1, 2, 3]


def test_an_incomplete_journal_is_started_again(tmp_path: Path) -> None:
    step = Step(tmp_path, [task(i) for i in range(6)])
    step.run(half_right)
    path = tmp_path / "step-000001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    again = step.run(lambda request, sample: said("9"))
    assert not again.from_journal
    assert {sample.answer for sample in again.episodes} == {"9"}
    assert len(path.read_text().splitlines()) == 17


def test_a_journal_about_other_data_is_void(tmp_path: Path) -> None:
    Step(tmp_path, [task(i) for i in range(6)], data="one").run(half_right)
    other = Step(tmp_path, [task(i) for i in range(6, 12)], data="other")
    found = other.run(half_right)
    assert not found.from_journal and all(s.problem_id in {f"p{i}" for i in range(6, 12)} for s in found.episodes)
    assert other.run(Silent()).from_journal


# --- dead groups -----------------------------------------------------------------------------------------------------


def test_without_further_rounds_dead_groups_stay_and_are_counted(tmp_path: Path) -> None:
    found = Step(tmp_path, [task(i) for i in range(8)]).run(by_draw({1, 2}))
    assert (len(found.groups), found.without_signal, found.rounds, found.drawn) == (4, 2, 1, 4)


def test_dead_groups_are_replaced_in_the_order_of_draws(tmp_path: Path) -> None:
    step = Step(tmp_path, [task(i) for i in range(9)], further_rounds=3)
    found = step.run(by_draw({1, 2, 5, 6, 9}))
    live = [int(sample.key[2]) for sample in found.episodes if sample.verdict != "right"]
    assert len(found.groups) == 4 and live[:4] == [1, 2, 5, 6]
    # Two of four were live, so for the two that are missing four more are drawn.
    assert (found.rounds, found.drawn, found.without_signal, step.order.drawn) == (2, 8, 4, 8)
    assert all(step.algorithm.has_signal(group) for group in found.groups)
    assert numbers(step.run(by_draw({1, 2, 5, 6, 9}))) == numbers(found)
    assert numbers(step.run(Silent())) == numbers(found) and step.order.drawn == 8


def test_dynamic_sampling_ends(tmp_path: Path) -> None:
    step = Step(tmp_path, [task(i) for i in range(3)], further_rounds=3)
    found = step.run(by_draw(set()))
    assert not found.groups and found.wanted == 4
    assert (found.rounds, found.drawn, found.without_signal) == (4, 16, 16)
    assert len(found.episodes) == 64


def test_more_live_groups_than_wanted_are_not_learnt_from(tmp_path: Path) -> None:
    found = Step(tmp_path, [task(i) for i in range(9)], further_rounds=2).run(by_draw({0, 4, 5, 6, 7}))
    assert len(found.groups) == 4 and found.drawn == 8 and found.without_signal == 3


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_samples_of_unknown_verdict_belong_to_no_group_and_are_counted(tmp_path: Path) -> None:
    """A gold that no grader can read: whoever answers is neither right nor wrong, even where the format is kept."""
    tasks = [task(0), task(1, gold="9" * (MAX_GOLD + 1)), task(2), task(3)]
    found = Step(tmp_path, tasks).run(lambda request, sample: said(GOLD) if sample else "so")
    by_problem = {group.problem.id: group for group in found.groups}
    assert found.unscored == 3
    assert [len(by_problem[f"p{i}"].trajectories) for i in range(4)] == [4, 1, 4, 4]
    unknown = [s for s in found.episodes if s.verdict == "unknown"]
    assert len(unknown) == 3 and all(s.reward is None and s.rewards["format"] == 1.0 for s in unknown)


def test_what_was_cut_off_says_so(tmp_path: Path) -> None:
    found = Step(tmp_path, [task(i) for i in range(4)]).run(
        lambda request, sample: said(GOLD) if sample else "1 + 1 ; " * 9
    )
    finishes = [trajectory.finish for trajectory in found.groups[0].trajectories]
    assert finishes == ["length", "stop", "stop", "stop"]


def test_masked_samples_lose_their_tokens_and_keep_their_rewards(tmp_path: Path) -> None:
    """The first sample of every draw is cut off; in the first draw all are, right or wrong, and nothing is left."""

    def say(request: Request, sample: int) -> str:
        rest = "1 + 1 ; " * 9 if not sample or not request.key[2] else ""
        return f"{said(GOLD)} {rest}" if sample else rest

    kept = Step(tmp_path / "keep", [task(i) for i in range(4)]).run(say)
    masked = Step(tmp_path / "mask", [task(i) for i in range(4)], mask_truncated=True).run(say)
    for found, first, other in ((kept, [10] * 4, [10, 6, 6, 6]), (masked, [0] * 4, [0, 6, 6, 6])):
        assert [[t.trained_tokens for t in group.trajectories] for group in found.groups[:2]] == [first, other]
        assert all([t.rewards["total"] for t in group.trajectories] == [0.0, 2.0, 2.0, 2.0] for group in found.groups)
    assert (kept.without_signal, masked.without_signal) == (0, 1)


# --- a teacher's traces ----------------------------------------------------------------------------------------------

TRACE = said(GOLD)
IDS = [*TOKENIZER.encode(TRACE), TOKENIZER.eos_token_id]
LENGTH = len(IDS)


def luffy(**prefix: Any) -> dict[str, Any]:
    return {"name": "luffy", "prefix": prefix}


def test_nothing_is_generated_after_a_whole_trace(tmp_path: Path) -> None:
    engine = Scripted(TOKENIZER, half_right)
    found = Step(tmp_path, [task(i, trace=TRACE) for i in range(4)], luffy()).run(engine)
    assert [(request.n, len(request.key)) for request in engine.asked] == [(3, 3)] * 4
    for group in found.groups:
        teacher, *own = group.trajectories
        assert teacher.origin == "teacher" and teacher.finish == "given" and teacher.rewards["accuracy"] == 1.0
        assert teacher.token_fields["off"].sum() == teacher.trained_tokens == LENGTH
        assert teacher.ids_T[teacher.loss_mask_T].tolist() == IDS
        assert all(t.origin == "policy" and not t.token_fields["off"].any() for t in own)
        # Samples are numbered through; the noise of the policy's own does not know of the teacher.
        assert [t.rewards["accuracy"] for t in own] == [0.0, 1.0, 0.0]
    assert sorted(s.sample for s in found.episodes) == sorted([0, 1, 2, 3] * 4)


def test_a_prefix_begins_the_response_and_shortens_what_may_follow(tmp_path: Path) -> None:
    engine = Scripted(TOKENIZER, half_right)
    guided = luffy(samples=3, min=0.3, max=1.0, strategy="fixed")
    step = Step(tmp_path, [task(i, trace=TRACE) for i in range(4)], guided)
    step.sampling = Sampling(max_tokens=10, min_tokens=4)
    found = step.run(engine)
    lengths = [LENGTH, int(0.65 * LENGTH), int(0.3 * LENGTH), 0]
    for group in found.groups:
        assert [int(t.token_fields["off"].sum()) for t in group.trajectories] == lengths
        for trajectory, given in zip(group.trajectories, lengths, strict=True):
            assert trajectory.ids_T[trajectory.loss_mask_T][:given].tolist() == IDS[:given]
            assert trajectory.trained_tokens <= 10
            assert not trajectory.token_fields["sampler_logprobs"][trajectory.token_fields["off"] > 0].any()
    for request in engine.asked:
        given = len(request.prompt) - len(task(0).prompt)
        assert request.sampling.max_tokens == 10 - given and request.sampling.min_tokens == max(0, 4 - given)
    assert numbers(step.run(Silent())) == numbers(found)


def test_traces_longer_than_a_response_are_left_out_and_counted(tmp_path: Path) -> None:
    tasks = [task(i, trace="1 + 1 ; " * 9 if i < 2 else TRACE) for i in range(4)]
    found = Step(tmp_path, tasks, luffy()).run(half_right)
    assert found.long_traces == 2
    assert sorted(sum(s.given > 0 for s in found.episodes if s.problem_id == f"p{i}") for i in range(4)) == [0, 0, 1, 1]


def test_problems_without_a_trace_are_the_policys_own(tmp_path: Path) -> None:
    tasks = [task(i, trace=TRACE if i else None) for i in range(4)]
    found = Step(tmp_path, tasks, luffy(samples=-1, min=0.5, max=0.5)).run(half_right)
    given = {s.problem_id: 0 for s in found.episodes}
    for sample in found.episodes:
        given[sample.problem_id] += sample.given > 0
    assert given == {"p0": 0, "p1": 4, "p2": 4, "p3": 4}


# --- the order of problems -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3, 11])
def test_what_is_drawn_depends_on_how_many_were_drawn_before(first: int) -> None:
    tasks = [task(i) for i in range(5)]
    whole = ProblemOrder(tasks, 3, "rl")
    numbers_, ids = zip(*((n, t.problem.id) for n, t in whole.draw(20)), strict=True)
    assert numbers_ == tuple(range(20))
    assert all(sorted(ids[i : i + 5]) == [f"p{j}" for j in range(5)] for i in range(0, 20, 5)), "each once in a pass"
    assert len({ids[i : i + 5] for i in range(0, 20, 5)}) > 1, "in another order each time"
    resumed = ProblemOrder(tasks, 3, "rl")
    resumed.load({}, {"drawn": first})
    assert [t.problem.id for _, t in resumed.draw(20 - first)] == list(ids[first:])
    assert resumed.state() == ({}, {"drawn": 20})
