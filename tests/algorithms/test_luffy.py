"""LUFFY: which samples begin with a trace, the advantages of a mixed group, and the objective that options make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.luffy import Luffy
from lemma.algorithms.parts.prefixes import PrefixOptions
from lemma.core.errors import UserError
from lemma.objectives import LossInputs, Totals
from tests.algorithms.made import group, response, trajectory

HERE = {"seed": 1, "step": 1, "problem_id": "a"}


def luffy(**options: Any) -> Luffy:
    return Luffy.model_validate(options)


def test_a_masked_sample_that_a_teacher_began_is_not_the_policys_own() -> None:
    """It was cut off and lost its tokens; the baseline of the policy's own samples must not take its reward in."""
    cut = trajectory(1.0, given=1, finish="length")
    cut.loss_mask_T = np.zeros_like(cut.loss_mask_T)
    one = group(cut, trajectory(0.0), trajectory(0.0))
    options = luffy(group_size=3, statistics="on_policy", prefix={"min": 0.5, "max": 0.5})
    options.assign([one], AlgorithmState())
    assert [response(t, "advantage")[0] for t in one.trajectories] == [1.0, 0.0, 0.0]
    assert not luffy(group_size=3, sft_weight=1.0, prefix={"min": 0.5, "max": 0.5}).has_signal(group(cut))


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_by_default_one_sample_is_the_whole_trace_and_the_rest_are_the_policys_own() -> None:
    assert luffy().prefix_lengths(17, **HERE) == [17, 0, 0, 0, 0, 0, 0, 0]
    assert luffy(prefix={"samples": 0}).prefix_lengths(17, **HERE) == [0] * 8
    assert PrefixOptions(samples=-1).lengths(17, 8, seed=1, step=0, problem_id="a") == [17] * 8
    assert luffy().uses_traces and not luffy(prefix={"samples": 0}).uses_traces


def test_shares_are_a_function_of_seed_step_and_problem() -> None:
    options = PrefixOptions(samples=3, min=0.2, max=0.8)
    first = options.shares(5, seed=1, step=4, problem_id="a")
    assert first == options.shares(5, seed=1, step=4, problem_id="a")
    assert all(0.2 <= share <= 0.8 for share in first[:3]) and first[3:] == [0.0, 0.0]
    assert len(set(first[:3])) == 3
    for changed in ({"seed": 2}, {"step": 5}, {"problem_id": "b"}):
        assert options.shares(5, **({"seed": 1, "step": 4, "problem_id": "a"} | changed)) != first  # type: ignore[arg-type]


def test_lengths_are_whole_tokens_longest_first() -> None:
    """Half of 5 is 2 tokens; shares 0, 1/2 and 1 give 0, 2 and 5."""
    options = luffy(group_size=4, prefix={"samples": 3, "strategy": "fixed", "min": 0.0, "max": 1.0})
    assert options.prefix.shares(4, seed=0, step=0, problem_id="a") == [0.0, 0.5, 1.0, 0.0]
    assert options.prefix_lengths(5, **HERE) == [5, 2, 0, 0]
    single = PrefixOptions(samples=1, strategy="fixed", min=0.0, max=0.6)
    assert single.shares(2, seed=0, step=0, problem_id="a") == [0.6, 0.0]


@pytest.mark.parametrize(
    ("strategy", "limits"), [("linear_max", [0.8, 0.6, 0.4, 0.2, 0.2]), ("reverse_linear", [0.2, 0.4, 0.6, 0.8, 0.8])]
)
def test_windows_of_steps(strategy: Any, limits: list[float]) -> None:
    """Four windows over 8 steps with at most 0.8; after the last one it stays."""
    options = PrefixOptions(samples=200, strategy=strategy, max=0.8, steps=8, windows=4)
    for step, limit in zip((0, 2, 5, 7, 99), limits, strict=True):
        shares = options.shares(200, seed=0, step=step, problem_id="a")
        assert 0.9 * limit < max(shares) <= limit
        assert min(shares) < 0.1 * limit


def test_shared_shares() -> None:
    random = PrefixOptions(samples=3, min=0.0, max=1.0, shared=True)
    shares = random.shares(3, seed=0, step=0, problem_id="a")
    assert len(set(shares)) == 1 and 0 < shares[0] < 1
    linear = PrefixOptions(samples=2, strategy="linear", max=0.5, steps=4, shared=True)
    found = [linear.shares(3, seed=0, step=step, problem_id="a") for step in (0, 1, 4, 9)]
    assert found == [[0.5, 0.5, 0.0], [0.375, 0.375, 0.0], [0.0] * 3, [0.0] * 3]


def test_the_first_step_of_a_run_is_the_first_of_the_schedule() -> None:
    options = luffy(prefix={"samples": 1, "strategy": "linear", "steps": 4, "shared": True})
    lengths = [options.prefix_lengths(8, seed=1, step=step, problem_id="a")[0] for step in (1, 2, 5)]
    assert lengths == [8, 6, 0]


def test_a_share_of_the_draws_has_no_trace() -> None:
    options = PrefixOptions(traced=0.25)
    taught = [options.shares(2, seed=0, step=step, problem_id="a")[0] for step in range(400)]
    assert set(taught) == {0.0, 1.0}
    assert 0.18 < np.mean(taught) < 0.32


# --- advantages ------------------------------------------------------------------------------------------------------


def mixed_group(**extra: object) -> Any:
    """A teacher's right sample, and two wrong and one right of the policy's."""
    return group(trajectory(1.0, given=3), trajectory(0.0), trajectory(0.0), trajectory(1.0), **extra)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, -0.5, -0.5, 0.5]),
        ({"statistics": "on_policy"}, [2 / 3, -1 / 3, -1 / 3, 2 / 3]),
        ({"scale": "group"}, [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
    ],
)
def test_advantages_of_a_mixed_group(options: dict[str, Any], expected: list[float]) -> None:
    """The mean of all rewards is 1/2, of the policy's own 1/3; the deviation of all is 0.577."""
    mixed = mixed_group()
    luffy(**options).assign([mixed], AlgorithmState())
    for item, advantage in zip(mixed.trajectories, expected, strict=True):
        assert response(item, "advantage") == pytest.approx([advantage] * 3, rel=1e-5)
    assert luffy(**options).has_signal(mixed)


def test_an_episode_of_two_trajectories_counts_once() -> None:
    """Rewards 1 and 0: the mean is 1/2, though the first has two trajectories."""
    mixed = group(trajectory(1.0, given=3), trajectory(1.0), trajectory(0.0))
    mixed.trajectories[0].episode = mixed.trajectories[1].episode = 0
    luffy().assign([mixed], AlgorithmState())
    assert [response(item, "advantage")[0] for item in mixed.trajectories] == [0.5, 0.5, -0.5]


def test_groups_are_compared_each_with_itself() -> None:
    first, second = group(trajectory(1.0), trajectory(0.0)), group(trajectory(5.0), trajectory(5.0))
    luffy(group_size=2).assign([first, second], AlgorithmState())
    assert [response(item, "advantage")[0] for item in first.trajectories] == [0.5, -0.5]
    assert [response(item, "advantage")[0] for item in second.trajectories] == [0.0, 0.0]
    assert not luffy(entropy=0).has_signal(second)


def test_tokens_count_by_their_origin() -> None:
    begun = group(trajectory(1.0, given=2), trajectory(0.0))
    options = luffy(group_size=2, off_policy={"factor": 3.0}, compat={"on_policy": {"factor": 0.5}})
    options.assign([begun], AlgorithmState())
    assert response(begun.trajectories[0], "advantage") == [1.5, 1.5, 0.25]
    assert response(begun.trajectories[1], "advantage") == [-0.25] * 3


def test_a_reward_for_the_prefix_alone() -> None:
    begun = group(trajectory(1.0, given=2), trajectory(1.0, given=1))
    options = luffy(group_size=2, prefix={"samples": -1, "min": 0.0}, compat={"prefix_reward": 1.0}, entropy=0)
    options.assign([begun], AlgorithmState())
    assert response(begun.trajectories[0], "advantage") == [0.5, 0.5, 0.0]
    assert options.has_signal(begun), "equal rewards, and still the teacher's tokens are learnt"


def test_imitation_keeps_groups_of_equal_rewards_alive() -> None:
    equal = group(trajectory(1.0, given=3), trajectory(1.0))
    assert luffy(sft_weight=1.0, entropy=0).has_signal(equal)
    assert luffy(sft_weight=1.0, entropy=0).needs_all_groups
    assert not luffy(entropy=0).has_signal(equal) and not luffy(entropy=0).needs_all_groups


def test_a_teachers_own_probabilities() -> None:
    """Two are given for three tokens: the third is the end that was added to the trace."""
    options = luffy(off_policy={"behaviour": "given"})
    mixed = mixed_group(trace_probs=[0.5, 0.25])
    options.assign([mixed], AlgorithmState())
    assert response(mixed.trajectories[0], "target_prob") == [0.5, 0.25, 1.0]
    assert response(mixed.trajectories[1], "target_prob") == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="behaviour: one"):
        options.assign([mixed_group()], AlgorithmState())
    with pytest.raises(UserError, match="1 trace_probs for 3 tokens"):
        options.assign([mixed_group(trace_probs=[0.5])], AlgorithmState())


def test_a_teachers_probabilities_are_those_of_its_turns() -> None:
    """Three turns of two, two and one tokens. The first lost its end to a limit, so the second has the third and fourth
    probability; the last, behind a rewritten history, the fifth."""
    begun = trajectory(1.0, given=3, turn=[0, 1, 1])
    last = trajectory(1.0, 1, given=1, turn=[2])
    begun.episode = last.episode = 0
    mixed = group(begun, last, trajectory(0.0), trace_probs=[0.1, 0.2, 0.3, 0.4, 0.5])
    mixed.trace_turns = (2, 2, 1)
    luffy(off_policy={"behaviour": "given"}).assign([mixed], AlgorithmState())
    assert [response(one, "target_prob") for one in (begun, last)] == [[0.1, 0.3, 0.4], [0.5]]


# --- the objective ---------------------------------------------------------------------------------------------------


def terms(logprobs: list[float], **tokens: list[float]) -> LossInputs:
    count = len(logprobs)
    return LossInputs(
        outputs={
            "logprobs": torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
            "entropy": torch.full((count,), 0.5, dtype=torch.float64),
        },
        sequence_N=torch.arange(count),
        group_B=torch.zeros(count, dtype=torch.long),
        totals=Totals(float(count), float(count), 1.0),
        tokens={name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in tokens.items()},
    )


def test_the_published_loss_by_hand() -> None:
    """Two samples of one token. The teacher's has p = 0.1 and advantage 1: f(p) = 1/2, and d f / d log p = 1/4, the
    largest there is. The policy's has ratio 1 and advantage -1. Constant 4, two samples; entropy weight 0.001."""
    made = terms([np.log(0.1), np.log(0.3)], advantage=[1.0, -1.0], off=[1.0, 0.0])
    loss = luffy(constant=4).objective(99, AlgorithmState())(made)
    assert loss.value.item() == pytest.approx((-0.5 + 1.0) / (4 * 2) - 0.001 * 0.5)
    grad = torch.autograd.grad(loss.value, made.logprobs_N)[0]
    assert grad.tolist() == pytest.approx([-0.25 / 8, 1.0 / 8])
    assert loss.metrics["off/prob"] == pytest.approx((0.1, 1.0))
    assert loss.metrics["on/prob"] == pytest.approx((0.3, 1.0))
    assert loss.metrics["off/share"] == pytest.approx((1.0, 2.0))


def test_the_constant_is_the_longest_response_unless_given() -> None:
    assert luffy().objective(77, AlgorithmState()).constant == 77.0
    assert luffy(constant=5).objective(77, AlgorithmState()).constant == 5.0


def test_imitation_by_hand() -> None:
    """The teacher's sample has -2 log p whatever its advantage, the other -A ratio; both over all tokens."""
    made = terms([np.log(0.1), np.log(0.3)], advantage=[-7.0, -1.0], off=[1.0, 0.0])
    loss = luffy(sft_weight=2.0, normalise="token", entropy=0).objective(9, AlgorithmState())(made)
    assert loss.value.item() == pytest.approx((-2 * np.log(0.1) + 1.0) / 2)
    assert loss.metrics["sft/loss"] == pytest.approx((-np.log(0.1), 1.0))
    assert loss.metrics["on/loss"] == pytest.approx((1.0, 1.0))


def test_a_teachers_token_does_not_overflow_where_the_old_policy_is_far_away() -> None:
    made = terms([-1.0, -1.0], advantage=[1.0, 1.0], off=[1.0, 0.0], old=[-5000.0, -1.0])
    loss = luffy(entropy=0).objective(9, AlgorithmState())(made).value
    assert torch.isfinite(loss) and torch.autograd.grad(loss, made.logprobs_N)[0].isfinite().all()


def test_options_reach_the_objective() -> None:
    options = luffy(
        clip=0.2,
        clip_high=0.3,
        kl=0.1,
        mismatch_cap=2.0,
        off_policy={"reshape": "p_logp", "weight": 0.3, "max": 0.8},
        compat={
            "micro_batch_scale": True,
            "skip_above": 0.9,
            "ratio_kl": 0.01,
            "on_policy": {"reshape": "pow", "power": 2.0},
            "adaptive_entropy": {"kind": "proportional", "target": 0.7},
        },
    )
    made = options.objective(10, AlgorithmState())
    assert (made.surrogate.low, made.surrogate.high) == (0.8, 1.3)  # type: ignore[attr-defined]
    assert made.kl is not None and (made.kl.weight, made.kl.estimator) == (0.1, "low_var_kl")
    assert (made.skip_above, made.ratio_kl, made.entropy_target, made.off_max) == (0.9, 0.01, 0.7, 0.8)
    assert made.mismatch is not None and made.mismatch.cap == 2.0 and made.compat is not None
    assert (made.on_shape.kind, made.on_shape.power) == ("pow", 2.0)
    assert (made.off_shape.kind, made.off_shape.weight) == ("p_logp", 0.3)
    assert options.needs_reference and not luffy().needs_reference


def test_a_learned_entropy_weight_goes_on_from_what_is_remembered() -> None:
    options = luffy(entropy=0.01, compat={"adaptive_entropy": {"target": 1.0, "lr": 0.1}})
    straight, saved = AlgorithmState(), AlgorithmState()
    for entropy in (0.5, 0.4):
        options.observe({"entropy": entropy}, straight)
    options.observe({"entropy": 0.5}, saved)
    resumed = AlgorithmState()
    resumed.load(*saved.state())
    options.observe({"entropy": 0.4}, resumed)
    assert resumed.numbers == straight.numbers
    weight = options.objective(9, straight).entropy
    assert weight == options.objective(9, resumed).entropy > 0.01, "too little entropy, so more of a bonus"
    assert options.objective(9, AlgorithmState()).entropy == pytest.approx(0.01)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": {"samples": 9}}, "above group_size 8; write -1"),
        ({"prefix": {"samples": -1, "min": 0.2}, "statistics": "on_policy"}, "statistics: group"),
        ({"prefix": {"samples": 0}, "sft_weight": 1.0}, "samples: 1"),
        ({"compat": {"prefix_reward": 1.0}}, "samples: -1"),
        ({"normalise": "token", "constant": 9}, "normalise: constant"),
        ({"clip_high": 0.3}, "clip: 0.2"),
        ({"entropy": 0, "compat": {"adaptive_entropy": {}}}, "entropy: 0.001"),
        ({"compat": {"micro_batch_scale": True}, "normalise": "sequence"}, "normalise: constant"),
        ({"off_policy": {"min": 0.5, "max": 0.1}}, "lower min"),
        ({"off_policy": {"reshape": "p_div_p_0.1"}}, "p_div_p"),
        ({"prefix": {"min": 0.8, "max": 0.5}}, "lower min"),
        ({"prefix": {"strategy": "linear_max"}}, "steps: 500"),
        ({"prefix": {"steps": 5}}, "strategy: linear_max"),
        ({"prefix": {"strategy": "linear", "steps": 5}}, "shared: true"),
        ({"prefix": {"strategy": "fixed", "shared": True}}, "shared: false"),
        ({"prefix": {"samples": -1}}, "every advantage is 0; write `prefix: {samples: 1}`, or a prefix.min below 1"),
        ({"prefix": {"samples": 8}}, "all the whole trace"),
        ({"prefix": {"min": 0, "max": 0}}, "write `samples: 0`, or a max above 0"),
        ({"prefix": {"traced": 0}}, "write `samples: 0`, or a traced above 0"),
        ({"prefix": {"samples": 0, "min": 0.5, "traced": 0.5}}, "min and traced have no effect with `samples: 0`"),
        ({"prefix": {"samples": 0, "strategy": "fixed"}}, "remove it, or write `samples: 1`"),
        ({"prefix": {"samples": 0}, "off_policy": {"gamma": 0.2}}, "remove it, or write `prefix: {samples: 1}`"),
        ({"prefix": {"samples": 0}, "statistics": "on_policy"}, "statistics has no effect with `prefix: {samples: 0}`"),
        ({"prefix": {"windows": 4}}, "windows has no effect with `strategy: random`"),
        ({"prefix": {"strategy": "linear", "steps": 5, "shared": True, "windows": 4}}, "windows has no effect"),
        (
            {"prefix": {"strategy": "linear_max", "steps": 5, "min": 0.2}},
            "min has no effect with `strategy: linear_max`",
        ),
        ({"prefix": {"strategy": "linear", "steps": 5, "shared": True, "min": 0}}, "min has no effect"),
        ({"sft_weight": 1.0, "off_policy": {"max": 0.5}}, "off_policy has no effect with sft_weight"),
        ({"sft_weight": 1.0, "off_policy": {"behaviour": "given"}}, "remove it, or remove sft_weight"),
        ({"sft_weight": 0}, "greater than 0"),
        ({"off_policy": {"behaviour": "given", "reshape": "logp"}}, "reshape has no effect with `behaviour: given`"),
        ({"off_policy": {"behaviour": "given", "gamma": 0.2}}, "remove it, or write `behaviour: one`"),
        (
            {"off_policy": {"power": 2.0}},
            "power has no effect with `reshape: p_div_p`; remove it, or write `reshape: pow`",
        ),
        ({"off_policy": {"reshape": "square_root", "gamma": 0.2}}, "write `reshape: p_div_p`"),
        ({"compat": {"on_policy": {"reshape": "logp", "weight": 0.2}}}, "weight has no effect with `reshape: logp`"),
        (
            {"compat": {"adaptive_entropy": {"kind": "proportional", "lr": 0.1, "limit": 2}}},
            "limit and lr have no effect",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator has no effect with `kl: 0`"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "the gradient of k1 in a loss is 0 on average"),
        ({"clip": 0.2, "compat": {"on_policy": {"reshape": "logp"}}}, "remove clip"),
        ({"group_size": 1}, "write for example `group_size: 8`"),
        ({"skip_above": 0.9}, "skip_above is now compat.skip_above; write `compat: {skip_above: 0.9}`"),
        ({"ratio_kl": 1}, "write `compat: {ratio_kl: 1}`"),
        ({"on_policy": {"factor": 2}}, "write `compat: {on_policy: {factor: 2}}`"),
        ({"compat": True}, "compat is a block now; write `compat: {micro_batch_scale: true}`"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        luffy(**options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix": {"strategy": "linear_max", "steps": 5, "max": 0.8}},
        {"prefix": {"samples": -1, "strategy": "linear_max", "steps": 5}, "statistics": "on_policy"},
        {"prefix": {"samples": -1}, "compat": {"prefix_reward": 1.0}},
        {"prefix": {"samples": 0, "min": 1.0, "strategy": "random"}, "off_policy": {"reshape": "p_div_p"}},
        {"off_policy": {"reshape": "logp", "weight": 0.2}},
        {"off_policy": {"behaviour": "given", "max": 2.0, "factor": 0.5}},
        {"sft_weight": 1.0, "compat": {"on_policy": {"reshape": "pow", "power": 2.0}}},
        {"group_size": 1, "sft_weight": 1.0},
        {"kl": 0.1, "kl_estimator": "k2"},
    ],
)
def test_what_has_an_effect_is_taken_also_as_it_resolves(options: dict[str, Any]) -> None:
    first = luffy(**options)
    assert luffy(**first.model_dump()) == first
