"""Policy gradients: advantages computed by hand, the objective each algorithm chooses, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lemma.algorithms import ALGORITHMS, AlgorithmState
from lemma.algorithms.grpo import Grpo
from lemma.algorithms.rloo import Rloo
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.objectives.policy_loss import (
    CappedWeight,
    Clip,
    GammaWeight,
    KlTerm,
    LogprobGain,
    MismatchWeight,
    PolicyLoss,
    SoftGate,
    Unclipped,
)

PROBLEM = Problem((Message("user", "1+1?"),), ("2",))
MIXED, SAME = np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.5])
DEVIATION = np.sqrt(1 / 3)
"""Of one right sample in three, with one sample less in the divisor."""


def make(name: str, **options: Any) -> Any:
    return ALGORITHMS[name](**options)


def group(rewards: list[dict[str, float]]) -> Group:
    """Samples of four tokens, the last three chosen."""
    chosen = np.array([False, True, True, True])
    return Group(PROBLEM, [Trajectory(np.arange(4), chosen.copy(), rewards=dict(r)) for r in rewards])


def advantages_in(groups: list[Group]) -> list[float]:
    """The advantage of each sample, which all its tokens share."""
    found = [t.token_fields["advantage"] for g in groups for t in g.trajectories]
    assert all(len(set(values.tolist())) == 1 for values in found)
    return [float(values[0]) for values in found]


@pytest.mark.parametrize(
    ("name", "options", "mixed", "same"),
    [
        ("reinforce", {}, [1, 0, 0], [0.5, 0.5]),
        ("reinforce_baseline", {"scale": "none"}, [2 / 3, -1 / 3, -1 / 3], [0, 0]),
        ("reinforce_baseline", {}, [2 / 3 / DEVIATION, -1 / 3 / DEVIATION, -1 / 3 / DEVIATION], [0, 0]),
        ("rloo", {}, [1, -0.5, -0.5], [0, 0]),
        ("rloo", {"reward_clip": (0.0, 0.4)}, [0.4, -0.2, -0.2], [0, 0]),
        ("grpo", {}, [2 / 3 / DEVIATION, -1 / 3 / DEVIATION, -1 / 3 / DEVIATION], [0, 0]),
        ("grpo", {"epsilon": 0.05}, [2 / 3 / (DEVIATION + 0.05), *[-1 / 3 / (DEVIATION + 0.05)] * 2], [0, 0]),
        ("dr_grpo", {}, [2 / 3, -1 / 3, -1 / 3], [0, 0]),
        ("dapo", {"scale": "none"}, [2 / 3, -1 / 3, -1 / 3], [0, 0]),
        ("gspo", {}, [2 / 3 / DEVIATION, -1 / 3 / DEVIATION, -1 / 3 / DEVIATION], [0, 0]),
        ("cispo", {"scale": "none"}, [2 / 3, -1 / 3, -1 / 3], [0, 0]),
        ("loop", {}, [1, -0.5, -0.5], [0, 0]),
        ("loop", {"leave_out_own": False}, [2 / 3, -1 / 3, -1 / 3], [0, 0]),
        ("loop", {"positive_only": True}, [1, 0, 0], [0, 0]),
        ("loop", {"least_advantage": 0.6}, [1, 0, 0], [0, 0]),
    ],
)
def test_advantages(name: str, options: dict[str, Any], mixed: list[float], same: list[float]) -> None:
    algorithm = make(name, **options)
    found = algorithm.advantages([MIXED, SAME])
    assert found[0].tolist() == pytest.approx(mixed, rel=1e-5)
    assert found[1].tolist() == same, "exactly"
    groups = [group([{"total": r} for r in rewards]) for rewards in (MIXED, SAME)]
    algorithm.assign(groups, AlgorithmState())
    assert advantages_in(groups) == pytest.approx([*mixed, *same], rel=1e-5)
    assert [algorithm.has_signal(g) for g in groups] == [True, name == "reinforce"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("reinforce", {}), ("loop", {"positive_only": True}), ("grpo", {"each_reward": {"total": 1.0}})],
)
def test_an_advantage_of_masked_samples_alone_keeps_no_group_alive(name: str, options: dict[str, Any]) -> None:
    one = group([{"total": 1.0}, {"total": 0.0}, {"total": 0.0}])
    algorithm = make(name, **options)
    assert algorithm.has_signal(one)
    masked = one.trajectories if name == "grpo" else one.trajectories[:1]
    for trajectory in masked:
        trajectory.loss_mask_T = np.zeros_like(trajectory.loss_mask_T)
    assert not algorithm.has_signal(one)


def test_one_deviation_for_the_batch() -> None:
    found = make("grpo", scale="batch", epsilon=0.0).advantages([np.array([1.0, 0.0]), np.array([3.0, 3.0])])
    deviation = np.std([1, 0, 3, 3], ddof=1)
    assert [value for part in found for value in part] == pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0])
    assert make("grpo").advantages([]) == []


@pytest.mark.parametrize(
    ("name", "options", "objective"),
    [
        ("reinforce", {}, PolicyLoss(LogprobGain(), normalise="sequence")),
        ("reinforce_baseline", {"normalise": "token"}, PolicyLoss(LogprobGain(), normalise="token")),
        ("rloo", {}, PolicyLoss(Clip(0.8, 1.2), level="trajectory", normalise="sequence")),
        ("grpo", {}, PolicyLoss(Clip(0.8, 1.2), normalise="sequence")),
        ("grpo", {"clip": None}, PolicyLoss(Unclipped(), normalise="sequence")),
        ("grpo", {"clip_high": 0.3, "clip_cap": 2.0}, PolicyLoss(Clip(0.8, 1.3, 2.0), normalise="sequence")),
        ("grpo", {"normalise": "token"}, PolicyLoss(Clip(0.8, 1.2), normalise="token")),
        ("grpo", {"gain": "sapo"}, PolicyLoss(SoftGate(), normalise="sequence")),
        ("grpo", {"gain": "vespo"}, PolicyLoss(GammaWeight(), level="trajectory", normalise="sequence")),
        (
            "grpo",
            {"gain": "sapo", "sapo": {"positive": 2, "negative": 3}},
            PolicyLoss(SoftGate(positive=2.0, negative=3.0), normalise="sequence"),
        ),
        (
            "grpo",
            {"gain": "vespo", "vespo": {"power_positive": 1, "decay_positive": 4, "power_negative": 5}},
            PolicyLoss(GammaWeight(1.0, 4.0, 5.0, 2.0), level="trajectory", normalise="sequence"),
        ),
        (
            "grpo",
            {"ratio": "sequence", "normalise": "constant", "constant": 1},
            PolicyLoss(Clip(0.8, 1.2), level="sequence", normalise="constant", constant=1.0),
        ),
        ("dr_grpo", {}, PolicyLoss(Clip(0.8, 1.2), normalise="constant", constant=64.0)),
        ("dapo", {}, PolicyLoss(Clip(0.8, 1.28), normalise="token")),
        ("gspo", {}, PolicyLoss(Clip(0.9997, 1.0004), level="sequence", normalise="sequence")),
        ("cispo", {"cap": 3}, PolicyLoss(CappedWeight(3.0), normalise="token")),
        ("loop", {}, PolicyLoss(Clip(1 / 1.1, 1.1), normalise="sequence")),
        ("loop", {"ratio": "trajectory"}, PolicyLoss(Clip(1 / 1.1, 1.1), level="trajectory", normalise="sequence")),
        ("loop", {"clip": None, "epochs": 1}, PolicyLoss(LogprobGain(), normalise="sequence")),
        (
            "grpo",
            {"kl": 0.1, "kl_by_ratio": True, "entropy": 0.01, "mismatch_cap": 2, "top_entropy": 0.2},
            PolicyLoss(
                normalise="sequence",
                kl=KlTerm(0.1, "k3", by_ratio=True),
                entropy=0.01,
                mismatch=MismatchWeight("token", 2.0),
                top_entropy=0.2,
            ),
        ),
        (
            "dapo",
            {"mismatch_cap": 1.5, "mismatch_floor": 0.5, "mismatch_level": "sequence", "mismatch_mask": True},
            PolicyLoss(Clip(0.8, 1.28), mismatch=MismatchWeight("sequence", 1.5, 0.5, mask=True)),
        ),
    ],
)
def test_objective(name: str, options: dict[str, Any], objective: PolicyLoss) -> None:
    from dataclasses import replace

    mine = make(name, **options).objective(64, AlgorithmState())
    constant = mine.constant if mine.normalise != "constant" else objective.constant
    assert mine == replace(objective, constant=constant, name=name)


def test_what_an_algorithm_asks_of_the_loop() -> None:
    plain = make("grpo")
    assert not (plain.needs_old or plain.needs_reference or plain.needs_all_groups or plain.scores_first)
    assert make("grpo", mini_batches=2).needs_old and make("loop").needs_old
    assert make("grpo", kl=0.1).needs_reference and make("grpo", kl=0.1).needs_all_groups
    assert make("grpo", entropy=0.1).needs_all_groups and make("grpo", top_entropy=0.5).needs_all_groups
    penalised = make("rloo", reward_kl=0.1)
    assert penalised.scores_first and penalised.needs_old and penalised.needs_reference and penalised.needs_all_groups
    assert make("dapo").replaces_groups > 0 == make("grpo").replaces_groups


def test_rloo_takes_the_kl_off_the_reward() -> None:
    one = group([{"total": 1.0}, {"total": 0.0}])
    for trajectory, gap in zip(one.trajectories, (0.2, 0.1), strict=True):
        trajectory.token_fields |= {"old": np.full(4, -1.0), "reference": np.full(4, -1.0 - gap)}
    Rloo(reward_kl=0.5).assign([one], AlgorithmState())
    difference = (1.0 - 0.5 * 3 * 0.2) - (0.0 - 0.5 * 3 * 0.1)
    assert advantages_in([one]) == pytest.approx([difference, -difference])
    Rloo(reward_kl=0.5, standardise=True).assign([one], AlgorithmState())
    assert advantages_in([one]) == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], rel=1e-3)


def test_each_reward_by_itself() -> None:
    """A reward ten times as large weighs no more than its weight."""
    algorithm = Grpo(each_reward={"right": 1.0, "format": 1.0}, epsilon=0.0)
    groups = [
        group([{"right": 10.0, "format": 0.0, "total": 10.0}, {"right": 0.0, "format": 1.0, "total": 1.0}]),
        group([{"right": 10.0, "format": 1.0, "total": 11.0}, {"right": 0.0, "format": 1.0, "total": 1.0}]),
        group([{"right": 5.0, "format": 1.0, "total": 6.0}] * 2),
    ]
    algorithm.assign(groups, AlgorithmState())
    raw = np.array([0, 0, np.sqrt(0.5), -np.sqrt(0.5), 0, 0])
    assert advantages_in(groups) == pytest.approx((raw / raw.std(ddof=1)).tolist())
    assert [algorithm.has_signal(g) for g in groups] == [True, True, False]
    logged = Grpo(each_reward={"right": 0.0, "format": 1.0})
    assert [logged.has_signal(g) for g in groups] == [True, False, False], "a weight of 0 is of a reward to log only"


def test_a_reward_that_applies_to_no_sample_of_a_group_says_nothing_about_it() -> None:
    algorithm = Grpo(each_reward={"right": 1.0, "format": 1.0}, epsilon=0.0)
    without = group([{"right": 1.0, "total": 1.0}, {"right": 0.0, "total": 0.0}])
    assert algorithm.has_signal(without)
    algorithm.assign([without], AlgorithmState())
    assert advantages_in([without]) == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], rel=1e-3)


def test_the_entropy_bonus_follows_its_target() -> None:
    algorithm, memory = Grpo(entropy_target=1.0, entropy_step=0.1, entropy_max=0.25), AlgorithmState()
    seen = []
    for entropy in (0.5, 0.5, 0.5, 2.0, 0.5):
        algorithm.observe({"entropy": entropy}, memory)
        objective = algorithm.objective(64, memory)
        assert "entropy" in objective.outputs
        seen.append(objective.entropy)
    assert seen == pytest.approx([0.1, 0.2, 0.25, 0.0, 0.25])
    later = AlgorithmState()
    later.load(*memory.state())
    assert algorithm.objective(64, later) == algorithm.objective(64, memory)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("reinforce", {"epochs": 2}, r"a batch is used once; write `epochs: 1`"),
        ("reinforce", {"scale": "group"}, r"no baseline, so nothing to scale; remove scale"),
        ("reinforce", {"clip": 0.2}, r"clip"),
        ("grpo", {"constant": 5}, r"`normalise: constant` only; write that, or remove constant"),
        ("grpo", {"clip": None, "clip_high": 0.3}, r"clip_high and clip_cap need clip; write for example `clip: 0.2`"),
        ("grpo", {"clip": 1.5}, r"clip\n  Input should be less than 1"),
        ("grpo", {"clip_high": 0.5, "clip_cap": 1.4}, r"clip_cap lies within the clip"),
        ("grpo", {"gain": "sapo", "clip": 0.1}, r"sapo does not clip; remove clip"),
        ("grpo", {"sapo": {"positive": 2}}, r"sapo has no effect with `gain: clip`; remove it, or write `gain: sapo`"),
        ("grpo", {"gain": "sapo", "vespo": {"power_negative": 2}}, r"vespo has no effect with `gain: sapo`"),
        ("grpo", {"gain": "vespo", "ratio": "sequence"}, r"write `ratio: trajectory`"),
        ("grpo", {"gain": "vespo", "mismatch_cap": 2}, r"remove mismatch_cap"),
        ("grpo", {"each_reward": {}}, r"names no reward"),
        ("grpo", {"each_reward": {"right": 1}, "scale": "none"}, r"remove scale or each_reward"),
        ("grpo", {"mismatch_mask": True}, r"without mismatch_cap; remove it, or write for example `mismatch_cap: 2`"),
        ("grpo", {"mismatch_cap": 2, "mismatch_floor": 3}, r"mismatch_floor is not below mismatch_cap"),
        ("rloo", {"kl": 0.1, "reward_kl": 0.1}, r"keep one of them"),
        ("rloo", {"reward_clip": [1, -1]}, r"a lower and an upper end"),
        ("loop", {"clip": None}, r"loop without clip uses a batch once"),
        ("loop", {"clip": None, "epochs": 1, "ratio": "trajectory"}, r"ratio has no effect with `clip: null`"),
        (
            "grpo",
            {"kl_estimator": "k1", "kl_by_ratio": True},
            r"kl_estimator and kl_by_ratio have no effect with `kl: 0`",
        ),
        ("reinforce", {"kl_estimator": "k1"}, r"remove it, or write for example `kl: 0.04`"),
        ("grpo", {"kl": 0.1, "kl_estimator": "k1"}, r"the gradient of k1 in a loss is 0 on average"),
        ("rloo", {"reward_kl": 0.1, "kl_estimator": "k2"}, r"kl_estimator has no effect"),
        ("dapo", {"entropy": 0.1, "entropy_step": 0.1}, r"entropy_step has no effect without entropy_target"),
        ("grpo", {"entropy_max": 2}, r"write for example `entropy_target: 0.5`"),
        ("grpo", {"mismatch_level": "sequence"}, r"mismatch_level has no effect without mismatch_cap"),
        ("dr_grpo", {"epsilon": 1e-4}, r"epsilon has no effect with `scale: none`; remove it, or write `scale: group`"),
        ("rloo", {"epsilon": 1e-4, "standardise": True}, r"epsilon has no effect"),
        ("reinforce", {"epsilon": 1e-4}, r"with `scale: none`; remove it \["),
        ("grpo", {"group_size": 1}, r"with `group_size: 1` every advantage is 0; write for example `group_size: 8`"),
        ("loop", {"group_size": 1, "leave_out_own": False}, r"every advantage is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        make(name, **options)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_refused_without_effect_is_taken_where_it_has_one(name: str) -> None:
    """And every default may be written out, as a resolved recipe does."""
    plain = make(name)
    assert ALGORITHMS[name](**plain.model_dump()) == plain
    fields = type(plain).model_fields
    if "kl_estimator" in fields:
        assert make(name, kl=0.1, kl_estimator="k2").kl_estimator == "k2"
    if "entropy_step" in fields:
        assert make(name, entropy_target=1.0, entropy_step=0.1).entropy_step == 0.1


def test_a_group_of_one() -> None:
    assert make("grpo").advantages([np.array([1.0])])[0].tolist() == [0.0]
    assert make("reinforce", group_size=1).advantages([np.array([1.0])])[0].tolist() == [1.0]
