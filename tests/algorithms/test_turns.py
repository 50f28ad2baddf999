"""Episodes of several turns: ratios of turns, pay of turns, time across rewritten history, and counting once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lemma.algorithms import ALGORITHMS, Algorithm, AlgorithmState, rewards_of
from lemma.algorithms.loop import Loop
from lemma.algorithms.parts.episode_tokens import of_episode
from lemma.algorithms.ppo import Ppo
from lemma.algorithms.reinforce import Reinforce, ReinforceBaseline
from lemma.core.types import Group, Message, Problem, Trajectory
from lemma.objectives import LossInputs, Totals
from lemma.objectives.objective import count_episode_tokens
from lemma.stages.reinforcement.rl_loop import has_advantage

Numbers = Sequence[float]


def piece(reward: float, read: int, episode: int | None = None, *, first: int = 0, **said: Numbers) -> Trajectory:
    """So many ids that were read, then tokens that were chosen, with these numbers; ids count from `first`."""
    size = read + len(next(iter(said.values())))
    fields = {name: np.concatenate([np.zeros(read), np.asarray(numbers, float)]) for name, numbers in said.items()}
    chosen = np.arange(size) >= read
    ids = np.arange(first, first + size)
    return Trajectory(ids, chosen, rewards={"total": reward}, episode=episode, token_fields=fields)


def group(*trajectories: Trajectory) -> Group:
    return Group(Problem((Message("user", "?"),), ("1",)), list(trajectories))


def rewritten() -> Group:
    """One episode of two turns, the second behind another history; the first was paid 0.2 of its 1.0."""
    first = piece(1.0, 2, 0, value=[0.5, 0.4], paid=[0.0, 0.2], turn=[0, 0])
    second = piece(1.0, 3, 0, value=[0.3], paid=[0.0], turn=[1])
    return group(first, second)


def found(one: Group, name: str) -> list[list[float]]:
    return [of_episode(episode, name).tolist() for episode in one.episodes]


def test_the_value_of_the_next_trajectory_follows_and_turns_are_paid_where_they_end() -> None:
    """By hand, from the end: 0.8 - 0.3 = 0.5; 0.2 + 0.9 x 0.3 - 0.4 = 0.07, plus 0.72 x 0.5; 0.9 x 0.4 - 0.5 = -0.14,
    plus 0.72 x 0.43."""
    one = rewritten()
    Ppo.model_validate({"kl": 0.0, "gamma": 0.9, "lam": 0.8, "whiten": False}).assign([one], AlgorithmState())
    assert found(one, "advantage") == [pytest.approx([0.1696, 0.43, 0.5], abs=1e-15)]
    assert found(one, "return") == [pytest.approx([0.6696, 0.83, 0.8], abs=1e-15)]


def test_what_is_read_between_turns_is_no_time() -> None:
    long, short = (piece(1.0, 2, value=[0.5, 0.4, 0.3]) for _ in range(2))
    ids, places = np.arange(9), [2, 3, 8]
    spread = Trajectory(ids, np.isin(ids, places), rewards={"total": 1.0}, token_fields={"value": np.zeros(9)})
    spread.token_fields["value"][places] = [0.5, 0.4, 0.3]
    long = spread
    Ppo.model_validate({"kl": 0.0, "gamma": 0.9, "lam": 0.8, "whiten": False}).assign(
        [group(long, short)], AlgorithmState()
    )
    assert long.token_fields["advantage"][places].tolist() == short.token_fields["advantage"][2:].tolist()
    assert not long.token_fields["advantage"][4:8].any()


@pytest.mark.parametrize(("gamma", "wanted"), [(1.0, [1.0, 1.0, 0.8]), (0.5, [0.3, 0.6, 0.8])])
def test_reinforce_pays_for_what_is_still_to_come(gamma: float, wanted: Numbers) -> None:
    one = rewritten()
    Reinforce(gamma=gamma).assign([one], AlgorithmState())
    assert found(one, "advantage") == [pytest.approx(wanted, abs=1e-15)]


@pytest.mark.parametrize(("scale", "divisor"), [("none", 1.0), ("group", 0.5**0.5 + 1e-6), ("batch", 0.5**0.5 + 1e-6)])
def test_a_baseline_compares_turns_of_the_same_number(scale: str, divisor: float) -> None:
    """Rewards 1 and 0, less their mean; first turns were paid 0.2 and 0, which is 0.1 more than usual, and 0.1 less."""
    one = rewritten()
    one.trajectories.append(piece(0.0, 2, paid=[0.0, 0.0], turn=[0, 0]))
    ReinforceBaseline.model_validate({"scale": scale}).assign([one], AlgorithmState())
    wanted = [[0.5, 0.5, 0.4], [-0.5, -0.5]]
    assert found(one, "advantage") == [pytest.approx([x / divisor for x in row], abs=1e-15) for row in wanted]


def test_without_pay_every_token_has_the_advantage_of_its_episode() -> None:
    one = rewritten()
    one.trajectories.append(piece(0.0, 2, paid=[0.0, 0.0], turn=[0, 0]))
    for trajectory in one.trajectories:
        trajectory.token_fields["paid"][:] = 0.0
    ReinforceBaseline.model_validate({"scale": "none"}).assign([one], AlgorithmState())
    assert found(one, "advantage") == [[0.5, 0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
@pytest.mark.parametrize(
    ("total", "first_turns", "is_live"),
    [
        (0.0, [0.5, 0.0], {"reinforce": True, "reinforce_baseline": True}),
        (0.0, [0.5, 0.5], {"reinforce": True, "reinforce_baseline": False}),
        (0.3, [0.1, 0.1, 0.1], {"reinforce": True, "reinforce_baseline": False}),
        (0.0, [0.0, 0.0], {"reinforce": False, "reinforce_baseline": False}),
    ],
)
def test_a_group_of_equal_totals_is_live_where_its_turns_are_paid_differently(
    name: str, total: float, first_turns: Numbers, is_live: dict[str, bool]
) -> None:
    one = group(*(piece(total, 2, paid=[paid, -paid], turn=[0, 1]) for paid in first_turns))
    algorithm = ALGORITHMS[name].model_validate({"name": name})
    assert algorithm.has_signal(one) == is_live[name]
    algorithm.assign([one], AlgorithmState())
    assert has_advantage(one) == is_live[name], "what the loop computes, and what it counts as live"


# --- the ratio of a turn ---------------------------------------------------------------------------------------------


def test_the_ratio_of_a_turn_is_the_product_over_its_tokens() -> None:
    """Turns with ratios 1.1 x 1.2 = 1.32, above the clip of 1.1, and 0.9 x 1.1 = 0.99, within it; then a sequence of
    one turn, 0.5, below the clip, which for a negative advantage is 1 / 1.1."""
    ratios = torch.tensor([1.1, 1.2, 0.9, 1.1, 0.5], dtype=torch.float64)
    old_N = torch.full((5,), -1.0, dtype=torch.float64)
    logprobs_N = (old_N + ratios.log()).requires_grad_(True)
    advantage_N = torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0], dtype=torch.float64)
    turn_N = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    sequence_N = torch.tensor([0, 0, 0, 0, 1])
    terms = LossInputs(
        {"logprobs": logprobs_N}, sequence_N, torch.tensor([0, 0]), Totals(5.0, 2.0, 1.0),
        tokens={"advantage": advantage_N, "old": old_N, "turn": turn_N},
    )  # fmt: skip
    loss = Loop.model_validate({"ratio": "turn", "normalise": "token"}).objective(8, AlgorithmState())(terms)
    wanted = -(2 * 1.1 * 2.0 + 2 * 0.99 * 2.0 + (1 / 1.1) * -1.0) / 5
    assert loss.value.item() == pytest.approx(wanted, abs=1e-14)
    loss.value.backward()
    # Two tokens carry the ratio of their turn, whose derivative by either log-probability is the ratio.
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx(
        [0.0, 0.0, -2 * 0.99 * 2.0 / 5, -2 * 0.99 * 2.0 / 5, 0.0], abs=1e-14
    )
    high, count = loss.metrics["clip/high"]
    assert (float(high), count) == (1.0, 3.0), "one of three turns"


def test_without_turns_a_turn_is_the_whole_sample() -> None:
    def value(ratio: str) -> float:
        noise = torch.Generator().manual_seed(0)
        old_N, logprobs_N, advantage_N = (torch.randn(6, generator=noise, dtype=torch.float64) for _ in range(3))
        terms = LossInputs(
            {"logprobs": logprobs_N}, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1]), Totals(6.0, 2.0, 2.0),
            tokens={"advantage": advantage_N, "old": old_N},
        )  # fmt: skip
        return Loop.model_validate({"ratio": ratio}).objective(8, AlgorithmState())(terms).value.item()

    assert value("turn") == value("trajectory") != value("token")


# --- an episode counts once ------------------------------------------------------------------------------------------

REWARDS = (1.0, 0.0, 1.0, 0.5)
OPTIONS: dict[str, dict[str, Any]] = {"ppo": {"group_size": 4, "kl": 0.0}, "luffy": {"compat": {}}}
LEVELS = [
    *((name, OPTIONS.get(name, {})) for name in ALGORITHMS),
    ("loop", {"ratio": "turn"}),
    ("loop", {"ratio": "trajectory"}),
    *(("grpo", {"ratio": level, "normalise": by}) for level in ("token", "trajectory") for by in ("token", "constant")),
    ("expert_iteration", {"normalise": "sequence"}),
    ("reinforce", {"whiten": True}),
]


def attempts(parted: bool) -> Group:
    """Four episodes of two turns, of two and three tokens; where `parted`, the second turn of two of them stands behind
    a history of its own. `place` numbers the chosen tokens, whatever they stand in."""
    trajectories = []
    for number, reward in enumerate(REWARDS):
        place = np.arange(5.0) + 5 * number
        said = {"place": place, "turn": np.array([0, 0, 1, 1, 1.0]), "value": np.sin(place), "off": np.zeros(5)}
        if parted and number < 2:
            trajectories.append(
                piece(reward, 2, number, first=10 * number, **{name: row[:2] for name, row in said.items()})
            )
            trajectories.append(piece(reward, 6, number, **{name: row[2:] for name, row in said.items()}))
        else:
            trajectories.append(piece(reward, 2, first=10 * number, **said))
    return group(*trajectories)


def learnt(algorithm: Algorithm, parted: bool) -> tuple[np.ndarray, torch.Tensor, Totals]:
    """The advantage of every chosen token, what the loss pulls on its log-probability, and the counts."""
    one, memory = attempts(parted), AlgorithmState()
    assert rewards_of(one).tolist() == list(REWARDS)
    algorithm.assign([one], memory)
    trajectories = [trajectory for trajectory in one.trajectories if trajectory.trained_tokens]
    count_episode_tokens(trajectories)
    logprobs = torch.linspace(-2, -1, 20, dtype=torch.float64).requires_grad_(True)
    names = trajectories[0].token_fields
    tokens = {
        name: torch.from_numpy(np.concatenate([t.token_fields[name][t.loss_mask_T] for t in trajectories]))
        for name in names
    }
    sequence = np.repeat(np.arange(len(trajectories)), [t.trained_tokens for t in trajectories])
    terms = LossInputs(
        {"logprobs": logprobs[tokens["place"].long()], "entropy": torch.ones(len(sequence), dtype=torch.float64)},
        torch.from_numpy(sequence),
        torch.zeros(len(trajectories), dtype=torch.long),
        Totals.of(trajectories),
        tokens=tokens,
        fields={name: torch.tensor([t.fields[name] for t in trajectories]) for name in trajectories[0].fields},
    )
    algorithm.objective(16, memory)(terms).value.backward()
    advantages = np.zeros(20)
    advantages[tokens["place"].long()] = tokens["advantage"]
    assert logprobs.grad is not None
    return advantages, logprobs.grad, terms.totals


@pytest.mark.parametrize(("name", "options"), LEVELS, ids=lambda part: str(part))
def test_an_episode_counts_once_however_many_trajectories_it_gives(name: str, options: dict[str, Any]) -> None:
    algorithm = ALGORITHMS[name].model_validate({"name": name, **options})
    whole, parted = learnt(algorithm, False), learnt(algorithm, True)
    assert whole[2] == parted[2]
    np.testing.assert_allclose(parted[0], whole[0], atol=1e-12)
    assert whole[0].any() and whole[1].any()
    torch.testing.assert_close(parted[1], whole[1], atol=1e-12, rtol=0)
