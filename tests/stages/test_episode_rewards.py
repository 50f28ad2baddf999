"""Turns that are paid one by one, through a real stage: the sum counts, and no turn is paid for earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.game_world import episodes_of, game_stage, measured, run_games

PAYING = """
from lemma.environments import Environment, Outcome, Observation

class Paying(Environment):
    turns = 0

    def step(self, said):
        self.turns += 1
        return Observation("higher", reward=0.25 if len(said.text) == 1 else None, done=self.turns == 3)

    def score(self):
        return Outcome(1.0, True)
"""


@pytest.mark.parametrize("name", ["grpo", "reinforce", "reinforce_baseline", "ppo"])
def test_what_turns_are_paid_is_added_to_what_the_episode_was_worth(name: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(PAYING)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Paying", "turns": 3}
    rewards = [{"name": "environment", "weight": 2.0}]
    stage = game_stage(environment=world, algorithm={"name": name, "group_size": 4}, rewards=rewards)
    run = run_games(tmp_path, rl=stage)
    episodes = episodes_of(run, "rl")
    assert len({one.paid for one in episodes}) > 1
    for one in episodes:
        assert one.reward == 2.0 * (1.0 + one.paid) == 2.0 * (one.rewards["environment"] or 0.0)
        (trajectory,) = one.trajectories(with_turns=True, turn_weight=2.0)
        paid = [0.5 if turn.reward else 0.0 for turn in one.turns]
        assert trajectory.token_fields["paid"][trajectory.loss_mask_T].tolist() == paid
        assert not trajectory.token_fields["paid"][~trajectory.loss_mask_T].any()
    (row,) = measured(run, "rl")
    if (
        name == "reinforce"
    ):  # without a baseline the first turn has the whole reward for its advantage, the last the rest
        assert row["advantage/max"] == max(one.reward for one in episodes if one.reward is not None)
        assert row["advantage/min"] == 2.0


def test_a_length_is_that_of_the_whole_episode(tmp_path: Path) -> None:
    """Three turns of one token are worth 1; the last turn alone would be worth -1."""
    (tmp_path / "world.py").write_text(PAYING)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Paying", "turns": 3}
    rewards = ["environment", {"name": "length", "target": 3, "scale": 1}, {"name": "soft_overlong", "max_tokens": 2}]
    run = run_games(tmp_path, rl=game_stage(environment=world, rewards=rewards))
    found = [(one.rewards["length"], one.rewards["soft_overlong"]) for one in episodes_of(run, "rl")]
    assert found == [(1.0, -1.0)] * 16
