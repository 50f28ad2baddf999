"""What a reinforcement run says about itself: its numbers, its warnings and what holds it back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel

from lemma.algorithms import ALGORITHMS
from lemma.core.events import Event, Measured, Progressed, Said
from lemma.core.types import Group, Trajectory
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions, TinyOptions
from lemma.models.update_flops import flops_per_row
from lemma.objectives import NegativeLogLikelihood
from lemma.recipe import load_recipe
from lemma.reporting.console import describe
from lemma.rollouts import Episode, Rollouts
from lemma.runs.clock import throughput
from lemma.runs.run import train
from lemma.stages.reinforcement.diagnosis import CHECKS, FAR, LEAST_GROUPS, PARTS, PAUSE, Diagnosis, Seen, bottleneck
from lemma.stages.reinforcement.rl_metrics import rollout_metrics
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from tests.algorithms import toy
from tests.algorithms.made import group, trajectory
from tests.models.small import CPU

# A step with nothing to complain about.
FINE = {
    "truncated": 0.1,
    "format": 0.9,
    "groups/live": 0.7,
    "groups/varied": 0.7,
    "reward/commonest": 0.6,
    "groups/all_right": 0.2,
    "groups/none_right": 0.1,
    "entropy/sampled": 1.0,
    "kl": 0.1,
    "length/mean": 20.0,
    "kl/old": 0.02,
    "ratio/max": 1.5,
    "mismatch/mean": 0.01,
    "updates": 2.0,
    "updated": 1.0,
    "samples": 64.0,
    "unscored": 2.0,
}

# For each check numbers that deserve it, and words of the warning.
DESERVED: dict[str, list[tuple[dict[str, float], str]]] = {
    "truncation": [({"truncated": 0.95}, "95% of the completions are cut off at 77 tokens")],
    "dead groups": [
        ({"groups/live": 0.02, "groups/all_right": 0.9}, "nothing left to learn"),
        ({"groups/live": 0.02, "groups/none_right": 0.9}, "nearly no group has a right completion"),
        ({"groups/live": 0.02}, "do not vary"),
    ],
    "format": [({"format": 0.0}, "almost never met")],
    "missing groups": [({"missing_groups": 3.0, "rounds": 6.0}, "3 of 32 groups are missing after 6 rounds")],
    "entropy": [({"entropy/sampled": 0.05}, "fell from 1 to 0.05")],
    "noise": [({"entropy/sampled": 3.1}, "rose from 1 to 3.1")],
    "kl": [({"kl": 4.0}, "4 nats a token"), ({"kl_seen": 60.0}, "3 nats a token")],
    "moved": [({"kl/old": 0.8}, "0.8 nats a token from the one that sampled its batch")],
    "ratio": [({"ratio/max": 1e4}, "largest ratio is 1e+04")],
    "mismatch": [({"mismatch/mean": 0.05}, "differ by 0.05 on average, and rounding explains 0.03")],
    "old samples": [
        (
            {"effective_samples": 0.2, "staleness/mean": 3.0, "staleness/max": 4.0, "mismatch/mean": 0.9},
            "3.0 updates old, and 20% of them are left; lower `rollout.lag`",
        ),
    ],
    "not finite": [({"updated": 0.0}, "not finite")],
    "unscored": [({"unscored": 30.0}, "30 of 64 completions have no reward")],
    "long traces": [({"off_policy/long_traces": 20.0}, "20 of the teacher's traces are longer than 77 tokens")],
}
CASES = [(name, numbers, words) for name, cases in DESERVED.items() for numbers, words in cases]


def options(algorithm: str | dict[str, Any] = "grpo") -> ReinforcementOptions:
    given = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    return ReinforcementOptions(algorithm=ALGORITHMS[given["name"]](**given))


def seen(numbers: dict[str, float], algorithm: str | dict[str, Any] = "grpo") -> Seen:
    values = FINE | numbers
    if "kl_seen" in numbers:
        del values["kl"]
    return Seen(values, options(algorithm), 77, 1.0)


def told(name: str, step: Seen) -> str | None:
    """The warning that this check has for a step."""
    return CHECKS[name].words(step) if CHECKS[name].when(step) else None


def exists(key: str, model: Any) -> bool:
    """Whether a dotted name is an option below these."""
    for part in key.split("."):
        if not isinstance(model, BaseModel) or part not in type(model).model_fields:
            return False
        model = getattr(model, part)
    return True


def test_every_check_is_tried() -> None:
    assert DESERVED.keys() == CHECKS.keys()


@pytest.mark.parametrize(("name", "numbers", "words"), CASES)
def test_a_warning_comes_where_it_is_deserved(name: str, numbers: dict[str, float], words: str) -> None:
    assert {one for one, check in CHECKS.items() if check.when(seen(numbers))} == {name}
    assert words in (told(name, seen(numbers)) or "")


@pytest.mark.parametrize(
    ("algorithm", "numbers"),
    [
        ("grpo", {"groups/varied": 0.02}),
        ("ppo", {"reward/commonest": 1.0}),
        ("reinforce", {"reward/commonest": 1.0}),
        ("expert_iteration", {"reward/commonest": 1.0}),
        ({"name": "luffy", "sft_weight": 1.0}, {"groups/varied": 0.0}),
    ],
    ids=str,
)
def test_rewards_that_do_not_vary_are_named_though_every_group_is_alive(algorithm: Any, numbers: Any) -> None:
    assert "do not vary" in (told("dead groups", seen(numbers | {"groups/live": 1.0}, algorithm)) or "")
    assert bottleneck(seen(numbers | {"groups/live": 1.0}, algorithm), {}) == "dead groups"
    assert told("dead groups", seen({"groups/live": 1.0}, algorithm)) is None


def test_what_keeps_groups_dead_though_rewards_vary_is_named() -> None:
    numbers = {"groups/live": 0.0, "groups/varied": 1.0, "truncated": 0.8}
    assert "`algorithm.threshold` (2)" in (
        told("dead groups", seen(numbers, {"name": "expert_iteration", "threshold": 2.0})) or ""
    )
    masked = replace(seen(numbers), options=options().model_copy(update={"truncated": "mask"}))
    assert "`truncated: mask` leaves them out" in (told("dead groups", masked) or "")


def test_groups_that_differ_from_each_other_only_teach_whoever_compares_with_the_batch() -> None:
    """One sample for each problem, as PPO has it, never varies inside its group; and a teacher is beside LUFFY's."""
    for algorithm in ("ppo", "reinforce", "expert_iteration", "luffy"):
        assert told("dead groups", seen({"groups/live": 1.0, "groups/varied": 0.0}, algorithm)) is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_warnings_name_settings_that_exist(algorithm: str) -> None:
    for name, numbers, _ in CASES:
        if name == "kl" and not exists("algorithm.kl", options(algorithm)):
            continue
        text = told(name, seen(numbers, algorithm)) or ""
        named = re.findall(r"`([^`]*)`", text)
        assert named, f"{name} names no setting: {text}"
        for key in named:
            assert exists(key, options(algorithm)), f"{algorithm} has no {key}: {text}"


def test_nothing_is_said_of_a_step_that_is_fine() -> None:
    assert not [name for name, check in CHECKS.items() if check.when(seen({}))]


def test_functions_that_read_the_text_themselves_need_no_format() -> None:
    step = seen({"format": 0.0})
    for rewards, warned in (([{"trl": "mine.py:f"}], False), ([{"trl": "mine.py:f"}, "accuracy"], True)):
        step.options = ReinforcementOptions(rewards=rewards)
        assert (told("format", step) is not None) == warned


def test_whoever_is_right_everywhere_has_no_choice_left() -> None:
    assert told("entropy", seen({"entropy/sampled": 0.01, "groups/all_right": 0.9})) is None


def test_a_warning_comes_again_after_a_pause_and_remembers_it_over_a_restart() -> None:
    said: list[str] = []
    first = Diagnosis(options(), 77, said.append)
    for step in range(1, PAUSE + 1):
        first.look(step, FINE | {"truncated": 1.0}, {})
    assert len(said) == 1 and said[0].startswith("step 1: ")
    again = Diagnosis(options(), 77, said.append)
    again.load(*first.state())
    again.look(PAUSE, FINE | {"truncated": 1.0, "entropy/sampled": 0.05}, {})
    assert len(said) == 2 and "fell from 1 to 0.05" in said[1], "the first entropy is that of the stage"
    again.look(PAUSE + 1, FINE | {"truncated": 1.0}, {})
    assert len(said) == 3 and said[2].startswith(f"step {PAUSE + 1}: 100% of the completions")


def test_who_was_taught_already_is_taught_longer() -> None:
    poor = {"truncated": 1.0, "format": 0.0, "groups/live": 0.0, "groups/varied": 0.0, "groups/none_right": 1.0}
    for stage, told in ((None, "put a supervised stage"), ("sft", "train stage sft longer")):
        said: list[str] = []
        Diagnosis(options(), 77, said.append, stage).look(1, FINE | poor, {})
        assert len(said) == 3 and all(told in sentence for sentence in said)


def test_one_right_group_is_no_reason_for_advice() -> None:
    """With one problem a step, every step has all or no groups right: only many steps say something."""
    said: list[str] = []
    few = options().model_copy(update={"batch": options().batch.model_copy(update={"problems": 1})})
    right = FINE | {"groups/live": 0.0, "groups/varied": 0.0, "groups/all_right": 1.0, "groups/none_right": 0.0}
    diagnosis = Diagnosis(few, 77, said.append)
    for step in range(1, LEAST_GROUPS):
        assert diagnosis.look(step, right, {}) == "dead groups"
    assert not said
    again = Diagnosis(few, 77, said.append)
    again.load(*diagnosis.state())
    again.look(LEAST_GROUPS, FINE, {})
    assert len(said) == 1 and "nothing left to learn" in said[0]
    mixed = Diagnosis(few, 77, said.append)
    for step in range(1, 2 * LEAST_GROUPS):
        mixed.look(step, right if step % 2 else FINE, {})
    assert len(said) == 1, "every other group teaches"


def test_where_nothing_was_learnt_there_is_no_rate() -> None:
    assert throughput(CPU, 0, 0.5, 0.0) == {} and throughput(CPU, 100, 0.5, 1e9) == {"tokens_per_second": 200.0}


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)], ids=["full", "lora"])
def test_the_arithmetic_of_an_update_is_what_is_computed(lora: LoraOptions | None) -> None:
    """Rows of a shared prompt once, the head for scored rows alone, and no gradient of frozen weights: by hand."""
    tiny = TinyOptions(hidden=16, layers=1, feed_forward=24, heads=2, kv_heads=1)
    policy = build_policy(ModelOptions(path="tiny", tiny=tiny, lora=lora), CPU, 0)
    layers = {
        "q": (16, 16),
        "k": (16, 8),
        "v": (16, 8),
        "o": (16, 16),
        "gate": (16, 24),
        "up": (16, 24),
        "down": (24, 16),
    }
    weights, adapters = sum(i * o for i, o in layers.values()), sum(2 * (i + o) for i, o in layers.values())
    head = 16 * len(policy.head.weight)
    wanted = 10 * 6 * weights + 3 * 6 * head if lora is None else 10 * (4 * weights + 6 * adapters) + 3 * 4 * head
    body, head = flops_per_row(policy)
    assert 10 * body + 3 * head == wanted
    learner = Learner(policy, OptimOptions(), token_budget=64, total_steps=1)
    paths = [Trajectory(np.arange(3, 8), np.arange(5) >= start) for start in (3, 4)]
    assert learner.step(paths, NegativeLogLikelihood()).flops == wanted


@pytest.mark.parametrize("part", PARTS)
def test_the_slowest_part_holds_a_step_back(part: str) -> None:
    assert bottleneck(seen({}), dict.fromkeys(PARTS, 1.0) | {part: 2.0, "else": 9.0}) == part


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"truncated": 0.6}, "truncation"),
        ({"groups/live": 0.2}, "dead groups"),
        ({"clip/region": 0.5}, "stale ratio"),
        ({"clip/high": 0.5}, "stale ratio"),
        ({"kl/old": 0.2}, "stale ratio"),
    ],
)
def test_samples_that_teach_nothing_hold_a_step_back_before_any_part(numbers: dict[str, float], name: str) -> None:
    assert bottleneck(seen(numbers), {"generate": 5.0}) == name


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "grpo", "clip": None}, {"name": "grpo", "gain": "sapo"}, "gspo", "rloo", "luffy"],
    ids=str,
)
def test_a_stale_ratio_is_named_without_a_clip_of_tokens(algorithm: Any) -> None:
    """Whoever clips whole samples clips many; the distance from the policy that sampled them counts."""
    by_sample = algorithm in ("gspo", "rloo")
    shares = {"clip/region": 0.6, "clip/high": 0.4} if by_sample else {}
    assert bottleneck(seen(shares, algorithm), {"update": 5.0}) == "update"
    far = seen(shares | {"kl/old": 0.2}, algorithm)
    if algorithm == "luffy":
        far = Seen(
            {name: x for name, x in FINE.items() if name != "kl/old"} | {"ratio/max": 20.0}, options("luffy"), 77, 1.0
        )
    assert bottleneck(far, {"update": 5.0}) == "stale ratio"


# --- real runs -------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 32}}


def run(folder: Path, algorithm: str | dict[str, Any], **changes: Any) -> toy.Toy:
    """Three steps of a random model that is paid for parity."""
    world = toy.Toy(folder)
    base = {"rewards": [toy.PARITY], "steps": 3, "batch": {"problems": 4, "token_budget": 256}}
    world.train(toy.reinforcement(folder, algorithm, **(base | {"rollout": {"max_tokens": 6}} | changes)), **SMALL)
    return world


def test_rloo_tells_the_kl_that_it_takes_off_the_reward(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "rloo", "group_size": 4, "reward_kl": 0.1}, optim={"lr": 0.3})
    first, *later = [row["kl_seen"] for row in world.rows()]
    assert first == 0.0 and all(abs(value) > 1e-3 for value in later)
    assert any(
        "nats a token from the reference" in text and "`algorithm.reward_kl`" in text for text in world.warnings()
    )


def test_every_step_writes_what_held_it_back(tmp_path: Path) -> None:
    """Into the row, beside the timings; and into the line of run.log. The numbers stay numbers."""
    world = run(tmp_path, {"name": "grpo", "group_size": 4})
    rows = [json.loads(line) for line in (world.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["timings"].pop("held_by") for row in rows] == ["truncation"] * 3
    assert all(isinstance(value, int | float) for row in rows for value in row["timings"].values())
    told = [event for event in world.events if isinstance(event, Measured)]
    assert len(told) == 3 and all(describe(event).endswith(", bottleneck truncation") for event in told)
    assert all(isinstance(value, int | float) for event in told for value in {**event.values, **event.timings}.values())
    notes = [event.note for event in world.events if isinstance(event, Progressed) and event.what == "toy"]
    assert len(notes) == 3 and all(note.endswith("bottleneck truncation") for note in notes)


def test_steps_between_two_rows_are_looked_at_too(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "group_size": 4}, rewards=[toy.NOTHING], steps=3, log_every=3)
    assert len(world.rows()) == 1
    assert any(text.startswith("step 2: ") for text in world.warnings())


def test_rates_are_of_all_steps_since_the_last_row(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "group_size": 4}, steps=4, log_every=4)
    (row,) = [json.loads(line) for line in (world.run / "metrics.jsonl").read_text().splitlines()]
    sampled = row["timings"]["generated_per_second"] * row["timings"]["generate_seconds"]
    assert 3 * 96 < sampled <= 4 * 96, "four steps of four groups of four samples of at most six tokens"


def test_a_step_without_an_update_keeps_the_rate_of_the_schedule(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "group_size": 4}, rewards=[toy.NOTHING], optim={"lr": 0.01, "warmup": 3})
    assert [row["lr"] for row in world.rows()] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert all(row["updates"] == 0 for row in world.rows())


def untrained_ppo(folder: Path, rewards: list[Any]) -> list[str]:
    """The warnings of two steps of the small PPO recipe without its supervised stage, with room for six tokens."""
    content = yaml.safe_load((ROOT / "recipes" / "small" / "numina_ppo.yaml").read_text())
    content["run"] |= {"dir": str(folder / "run"), "tensorboard": False}
    stage = content["stages"].pop("ppo")
    stage |= {"rewards": rewards, "rollout": {"max_tokens": 6}, "steps": 2}
    # Otherwise a sample that is cut off has this score, and its reward does not count.
    del stage["algorithm"]["compat"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content | {"stages": {"ppo": stage}}))
    events: list[Event] = []
    assert train(load_recipe(path), sink=events.append) == 0
    return [event.text for event in events if isinstance(event, Said) and event.level == "warning"]


def test_a_model_that_knows_nothing_is_warned_about(tmp_path: Path) -> None:
    """It never ends, never boxes an answer, and is never rewarded for it; each is said once in two steps."""
    said = untrained_ppo(tmp_path, ["format"])
    for words in (
        "of the completions are cut off at 6 tokens",
        "the format is almost never met",
        "rewards do not vary",
    ):
        assert [text.startswith("step 1: ") for text in said if words in text] == [True], (words, said)


def test_rewards_that_vary_are_not_warned_about(tmp_path: Path) -> None:
    said = untrained_ppo(tmp_path, [toy.PARITY])
    assert any("the format is almost never met" in text for text in said)
    assert not any("vary" in text or "nothing left to learn" in text for text in said), said


def test_a_policy_that_runs_away_from_its_batch_is_warned_about(tmp_path: Path) -> None:
    world = run(tmp_path, {"name": "grpo", "gain": "sapo", "group_size": 4, "epochs": 3}, optim={"lr": 0.3})
    assert max(row["kl/old"] for row in world.rows()) > FAR
    assert any("from the one that sampled its batch; lower `optim.lr`" in text for text in world.warnings())


# --- the numbers of a step -------------------------------------------------------------------------------------------


def sample(draw: int, number: int, reward: float | None, *, right: bool = False, **more: Any) -> Episode:
    zeros = np.zeros(3, dtype=np.float32)
    return Episode.at_once(
        ("rl", 1, draw), number, f"p{draw}", zeros, zeros, zeros - 0.5, zeros, "stop",
        verdict="right" if right else "wrong", reward=reward, rewards={"accuracy": reward}, **more,
    )  # fmt: skip


def measured(samples: list[Episode], *, by_verdict: bool = True, **counts: Any) -> dict[str, float]:
    one: list[Group] = [group(trajectory(1.0, advantage=[1, 1, 1]))]
    return rollout_metrics(Rollouts(groups=one, episodes=samples, **counts), one, by_verdict=by_verdict)


def test_shares_of_groups_are_of_all_that_were_drawn() -> None:
    """Of four draws one is right throughout, one never, one in part; what only keeps the format is not right."""
    samples = [sample(0, i, 1.1, right=True) for i in range(2)] + [sample(1, i, 0.1) for i in range(2)]
    samples += [sample(2, 0, 1.1, right=True), sample(2, 1, 0.1), sample(3, 0, None), sample(3, 1, 0.1)]
    values = measured(samples, drawn=4, without_signal=3, unscored=1, wanted=4)
    assert values["groups/dead"] == 0.75 and values["groups/live"] == 0.25
    assert values["groups/all_right"] == 0.25 and values["groups/none_right"] == 0.5
    assert values["groups/varied"] == 0.25 and values["reward/commonest"] == pytest.approx(4 / 7)
    assert values["missing_groups"] == 3.0 and values["unscored"] == 1.0
    assert values["entropy/sampled"] == 0.5
    by_reward = measured(samples, by_verdict=False, drawn=4, without_signal=3)
    assert by_reward["groups/all_right"] == 1.0 and by_reward["groups/none_right"] == 0.0


def test_a_teachers_samples_are_counted_apart() -> None:
    own = [sample(0, 2, 0.0), sample(0, 3, 1.0, right=True)]
    begun = sample(0, 1, 1.0, right=True, given=1)
    whole = sample(0, 0, 1.0, right=True, given=3)
    values = measured([whole, begun, *own], drawn=1)
    assert values["reward/mean"] == 0.5 and values["off_policy/reward"] == 1.0
    assert values["off_policy/samples"] == 2.0 and values["off_policy/prefix_share"] == pytest.approx(2 / 3)
    assert values["generated_tokens"] == 3 + 3 + 2
    alone = measured([whole, begun], drawn=1)
    assert alone["reward/mean"] == 1.0 and alone["reward/absent"] == 0.0


def test_traces_that_are_too_long_are_reported_even_where_none_is_left() -> None:
    assert measured([sample(0, 0, 1.0)], drawn=1, long_traces=3)["off_policy/long_traces"] == 3.0
    assert "off_policy/long_traces" not in measured([sample(0, 0, 1.0)], drawn=1)
