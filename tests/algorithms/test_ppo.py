"""PPO: rewards of tokens, advantages and returns by hand, the two objectives, and what is remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.ppo import Ppo
from lemma.algorithms.rloo import Rloo
from lemma.core.types import Trajectory
from lemma.stages.reinforcement.rl_loop import note_of
from lemma.stages.reinforcement.rl_metrics import credited_metrics
from tests.algorithms.made import group, response, trajectory


def ppo(**options: Any) -> Ppo:
    return Ppo.model_validate(options)


def sample(reward: float = 1.0, **more: Any) -> Trajectory:
    """Three tokens, values 1, 2, 3; the policy's log-probabilities are 0.1, 0.2 and 0.3 above the reference's."""
    return trajectory(reward, value=[1.0, 2.0, 3.0], old=[-1.0, -1.0, -1.0], reference=[-1.1, -1.2, -1.3], **more)


PLAIN = {"kl": 0.0, "gamma": 0.5, "lam": 0.5, "whiten": False}


def assigned(item: Trajectory, memory: AlgorithmState | None = None, **options: Any) -> tuple[list[float], list[float]]:
    ppo(**options).assign([group(item)], memory or AlgorithmState())
    return response(item, "advantage"), response(item, "return")


def test_advantages_and_returns_by_hand() -> None:
    """Surprises: 0.5 x 2 - 1 = 0, 0.5 x 3 - 2 = -0.5, 1 - 3 = -2; each advantage adds a quarter of the next."""
    assert assigned(sample(), **PLAIN) == ([-0.25, -1.0, -2.0], [0.75, 1.0, 1.0])


def test_the_kl_is_taken_off_the_reward() -> None:
    """With gamma = lambda = 1 a return is the sum of the rewards that follow: 1 less half of 0.6, 0.5 and 0.3."""
    _, returns = assigned(sample(), kl=0.5, lam=1.0, whiten=False)
    assert returns == pytest.approx([1 - 0.5 * 0.6, 1 - 0.5 * 0.5, 1 - 0.5 * 0.3])
    _, returns = assigned(sample(), kl=0.5, lam=1.0, whiten=False, kl_estimator="k2")
    assert returns[2] == pytest.approx(1 - 0.5 * 0.3**2 / 2)
    _, returns = assigned(sample(), kl=0.5, kl_in="loss", kl_estimator="k3", lam=1.0, whiten=False)
    assert returns == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "score"),
    [({}, 1.0), ({"compat": {"missing_eos_penalty": 0.25}}, 0.75), ({"compat": {"missing_eos_score": -1.0}}, -1.0)],
)
def test_a_sample_that_was_cut_off(options: dict[str, Any], score: float) -> None:
    settings = {"kl": 0.0, "lam": 1.0, "whiten": False} | options
    assert assigned(sample(finish="length"), **settings)[1] == pytest.approx([score] * 3)
    assert assigned(sample(finish="stop"), **settings)[1] == pytest.approx([1.0] * 3)


def test_whitening_is_over_the_tokens_of_the_whole_batch() -> None:
    """Returns are 1, 1, 1 and 0; values 0: their mean is 3/4, their deviation 1/2."""
    first, second = trajectory(1.0, value=[0.0] * 3), trajectory(0.0, 1, value=[0.0])
    ppo(kl=0.0, lam=1.0).assign([group(first), group(second)], AlgorithmState())
    assert response(first, "advantage") == pytest.approx([0.5, 0.5, 0.5], rel=1e-6)
    assert response(second, "advantage") == pytest.approx([-1.5], rel=1e-6)
    assert response(first, "return") == [1.0, 1.0, 1.0]


def test_whitened_rewards_keep_their_mean() -> None:
    """Rewards 0, 0, 3: mean 1, deviation the root of 3."""
    item = trajectory(3.0, value=[0.0] * 3)
    _, returns = assigned(item, kl=0.0, lam=1.0, whiten=False, compat={"whiten_rewards": True})
    low, high = 1 - 1 / 3**0.5, 1 + 2 / 3**0.5
    assert returns == pytest.approx([2 * low + high, low + high, high], rel=1e-6)


def test_a_sample_without_tokens_to_learn_from_is_passed_over() -> None:
    item, other = sample(), sample()
    item.loss_mask_T[:] = False
    ppo(**PLAIN).assign([group(item, other)], AlgorithmState())
    assert not item.token_fields["advantage"].any() and response(other, "advantage") == [-0.25, -1.0, -2.0]


def test_tokens_that_nobody_chose_take_no_part() -> None:
    """The middle of the response is what a tool said: the value after the first token is that of the third."""
    item = sample()
    item.loss_mask_T[3] = False
    ppo(**PLAIN).assign([group(item)], AlgorithmState())
    assert response(item, "advantage") == [0.5 * 3 - 1 + 0.25 * -2.0, 0.0, -2.0]


def test_an_adaptive_weight_follows_the_kl() -> None:
    """The KL of the sample is 0.6, six times the target: the weight grows by 0.2 x 1 sample / 10."""
    options = {"kl": 0.5, "adaptive_kl": {"target": 0.1, "horizon": 10.0}, "lam": 1.0, "whiten": False}
    memory = AlgorithmState()
    _, first = assigned(sample(), memory, **options)
    assert memory.numbers == pytest.approx({"kl_seen": 0.6, "kl_weight": 0.5 * 1.02})
    resumed = AlgorithmState()
    resumed.load(*memory.state())
    _, second = assigned(sample(), resumed, **options)
    assert first[2] == pytest.approx(1 - 0.5 * 0.3) and second[2] == pytest.approx(1 - 0.51 * 0.3)
    assert resumed.numbers["kl_weight"] == pytest.approx(0.5 * 1.02**2)


def test_samples_without_tokens_have_no_kl() -> None:
    """Masked ones would pull the KL that is seen, and with it its weight, towards 0."""
    options, memory = {"kl": 0.5, "adaptive_kl": {"target": 0.6, "horizon": 10}}, AlgorithmState()
    masked = sample()
    masked.loss_mask_T = np.zeros_like(masked.loss_mask_T)
    ppo(**options).assign([group(sample()), group(masked)], memory)
    assert memory.numbers["kl_seen"] == pytest.approx(0.6)
    ppo(**options).assign([group(masked)], memory)
    assert memory.numbers == pytest.approx({"kl_seen": 0.6, "kl_weight": 0.5})


def test_objectives() -> None:
    policy = ppo(clip=0.1).objective(9, AlgorithmState())
    assert (policy.surrogate.low, policy.surrogate.high) == (0.9, 1.1)  # type: ignore[attr-defined]
    assert policy.normalise == "token" and policy.kl is None, "the KL is in the reward"
    in_loss = ppo(kl_in="loss", kl=0.3, kl_estimator="k2").objective(9, AlgorithmState())
    assert in_loss.kl is not None and in_loss.kl.weight == 0.3
    value = ppo(value_clip=None, value_weight=0.5, value_lr=1e-5).value_objective()
    assert (value.clip, value.weight) == (None, 0.5)


def test_what_the_loop_is_asked_for() -> None:
    assert ppo().needs_critic and ppo().scores_first and ppo().needs_reference and ppo().needs_old
    once = ppo(kl=0.0, epochs=1)
    assert not once.needs_reference and not once.needs_old
    assert once.has_signal(group(trajectory(0.0))) and once.needs_all_groups, "equal rewards still surprise the critic"
    assert (ppo().critic_lr, ppo(value_lr=1e-5).critic_lr) == (None, 1e-5)
    assert ppo(kl=0.05, epochs=1).needs_old, "a KL in the reward compares the policy before the update"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compat": {"missing_eos_penalty": 1.0, "missing_eos_score": -1.0}}, "remove one of them"),
        ({"kl": 0.0, "adaptive_kl": {}}, "kl: 0.05"),
        ({"kl_in": "loss", "kl_estimator": "k3", "adaptive_kl": {}}, "kl_in: reward"),
        ({"kl_by_ratio": True}, "kl_in: loss"),
        ({"scale": "group"}, "remove scale"),
        ({"epsilon": 1e-4}, "epsilon has no effect with `scale: none`; remove it"),
        ({"kl_in": "loss"}, "the gradient of k1 in a loss is 0 on average"),
        ({"kl": 0.0, "kl_in": "loss"}, "kl_in has no effect with `kl: 0`"),
        ({"kl": 0.0, "kl_estimator": "k3"}, "kl_estimator has no effect with `kl: 0`"),
        ({"gamma": 0.0}, "greater than 0"),
        (
            {"missing_eos_score": -1},
            "missing_eos_score is now compat.missing_eos_score; write `compat: {missing_eos_score: -1}`",
        ),
        ({"whiten_rewards": False}, "write `compat: {whiten_rewards: false}`"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        ppo(**options)
    assert words in str(error.value)


def test_an_empty_batch() -> None:
    memory = AlgorithmState()
    ppo().assign([], memory)
    assert memory.numbers == {}
    assert np.isfinite(ppo().kl)


def test_what_a_cut_off_sample_is_credited_with_is_shown() -> None:
    """Rewards 3.75 and 1; the first was cut off and is credited with -1, or with 2.75."""
    one = group(trajectory(3.75, finish="length"), trajectory(1.0))
    score = Ppo.model_validate({"kl": 0.0, "compat": {"missing_eos_score": -1.0}})
    penalty = Ppo.model_validate({"kl": 0.0, "compat": {"missing_eos_penalty": 1.0}})
    clipped = Rloo(reward_clip=(0.0, 2.0))
    found = [credited_metrics(algorithm, [one]) for algorithm in (score, penalty, clipped, Ppo(kl=0.0))]
    assert found == [{"reward/credited": 0.0}, {"reward/credited": 1.875}, {"reward/credited": 1.5}, {}]
    assert note_of({"reward/mean": 2.375, "reward/credited": 0.0}).startswith("reward 2.375 (credited 0.000), ")
