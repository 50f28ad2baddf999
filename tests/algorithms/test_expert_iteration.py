"""Expert iteration: what is kept, and the loss on it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.expert_iteration import ExpertIteration
from lemma.core.types import Group
from lemma.objectives import Totals
from tests.algorithms.made import group, response, trajectory


def expert(**options: Any) -> ExpertIteration:
    return ExpertIteration.model_validate(options)


def samples() -> Group:
    """Rewards 1, 0, 1, 1, of which the last says what the first said."""
    return group(trajectory(1.0), trajectory(0.0, first=7), trajectory(1.0, 2, first=8), trajectory(1.0))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [True, False, True, False]),
        ({"distinct": False}, [True, False, True, True]),
        ({"per_problem": 1}, [True, False, False, False]),
        ({"distinct": False, "per_problem": 2}, [True, False, True, False]),
        ({"threshold": 1.5}, [False] * 4),
        ({"threshold": 0.0}, [True, True, True, False]),
    ],
)
def test_right_samples_are_kept(options: dict[str, Any], kept: list[bool]) -> None:
    mine = samples()
    assert expert(**options).has_signal(mine) == any(kept)
    expert(**options).assign([mine], AlgorithmState())
    assert [bool(t.trained_tokens) for t in mine.trajectories] == kept
    assert [response(t, "advantage")[0] for t in mine.trajectories] == [float(one) for one in kept]
    assert Totals.of(mine.trajectories).tokens == sum(
        length for length, one in zip((3, 3, 2, 3), kept, strict=True) if one
    )


def test_what_was_cut_off_and_lost_its_tokens_is_not_kept() -> None:
    mine = samples()
    mine.trajectories[0].loss_mask_T[:] = False
    assert [id(t) for t in expert().kept(mine)] == [id(mine.trajectories[2]), id(mine.trajectories[3])]


def test_an_episode_of_two_trajectories_is_kept_whole_and_counts_once() -> None:
    mine = samples()
    mine.trajectories[0].episode = mine.trajectories[1].episode = 0
    mine.trajectories[1].rewards["total"] = 1.0
    assert [id(t) for t in expert(per_problem=1).kept(mine)] == [id(t) for t in mine.trajectories[:2]]


def test_its_loss_is_the_likelihood() -> None:
    loss = expert(normalise="constant").objective(30, AlgorithmState())
    assert (loss.normalise, loss.constant) == ("constant", 30.0)
    assert not expert(epochs=3).needs_old and not expert().needs_all_groups


@pytest.mark.parametrize(
    ("options", "words"), [({"per_problem": 9}, "above group_size 8"), ({"constant": 3}, "normalise: constant")]
)
def test_what_cannot_work_is_refused_with_what_to_write(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        expert(**options)
    assert words in str(error.value)
