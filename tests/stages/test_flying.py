"""`rollout.lag: flying`: responses go on across updates, each token is of one version, and nothing is sampled twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.rollouts import Episode, Rollouts, Turn, read_episodes
from lemma.rollouts.journal import Journal
from lemma.rollouts.journal_reader import drawn_after, list_journals
from lemma.runs.run import train
from lemma.stages.reinforcement.lag_metrics import staleness
from tests.algorithms import toy
from tests.stages.game_world import episodes_of, game_stage, run_games
from tests.stages.test_rl_stage import SMALL, small_stage

STEPS, LIMIT = 6, 1
LONG = {"tiny": SMALL["tiny"] | {"context": 64}}


def stage(folder: Path, algorithm: dict[str, Any] | str = "grpo", **changes: Any) -> dict[str, Any]:
    rollout = {"max_tokens": 24, "stop": ["p"], "lag": "flying", "lag_limit": LIMIT, **changes.pop("rollout", {})}
    base = {"steps": STEPS, "rollout": rollout, "checkpoint": {"every": 2}, "optim": {"lr": 0.01}}
    return small_stage(folder, algorithm, **(base | changes))


def by_step(world: toy.Toy) -> dict[int, list[Episode]]:
    paths = list_journals((world.run / "stages" / "toy" / "journal").iterdir())
    return {int(path.name[5:11]): list(read_episodes(path)) for path in paths}


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> toy.Toy:
    folder = tmp_path_factory.mktemp("flown")
    world = toy.Toy(folder)
    world.train(stage(folder), **LONG)
    return world


def test_every_token_has_a_version_and_none_is_older_than_the_limit(flown: toy.Toy) -> None:
    rows, steps = flown.rows(), by_step(flown)
    assert list(steps) == list(range(1, STEPS + 1))
    ages = set()
    for step, episodes in steps.items():
        assert len(episodes) == 4 * 8, "whole groups, in the order of their draws"
        assert {episode.key[2] for episode in episodes} == set(range(4 * (step - 1), 4 * step))
        for turn in (turn for episode in episodes for turn in episode.turns):
            places, versions = zip(*turn.versions, strict=True)
            assert places[0] == 0 and sorted(set(places)) == list(places) and places[-1] < len(turn.ids)
            assert sorted(set(versions)) == list(versions) and max(0, step - 1 - LIMIT) <= versions[0] < step
            ages |= {step - 1 - version for version in versions}
    assert ages == {0, 1}
    assert any(row["staleness/mixed"] > 0 for row in rows), "an update came in the middle of a response"
    assert all(0 <= row["staleness/mean"] <= row["staleness/max"] <= LIMIT for row in rows)
    assert rows[0]["staleness/max"] == 0 and rows[0]["mismatch/max"] < 1e-4, "the first step is never stale"
    assert any(row["effective_samples"] < 0.9999 for row in rows[1:] if row["updates"])


def test_a_run_on_one_process_repeats_itself(flown: toy.Toy, tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    world.train(stage(tmp_path), **LONG)
    first, second = (load_file(one.final / "model.safetensors") for one in (flown, world))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert world.rows() == flown.rows()


@pytest.mark.parametrize("where", ["rollouts.sampled:90", "rl.before_update:4", "rl.mid_update:3"])
def test_what_was_sampled_before_an_interruption_is_read_and_not_sampled_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are replaced make the draws of steps overlap."""
    world = toy.Toy(tmp_path)
    recipe = world.recipe(stage(tmp_path, {"name": "dapo", "group_size": 4}), **LONG)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", f"{where}:EIO")
    with pytest.raises(OSError):
        train(recipe, sink=world.events.append)
    monkeypatch.delenv("LEMMA_FAULT")
    before = {one.order: one for episodes in by_step(world).values() for one in episodes}
    assert train(recipe, sink=world.events.append) == 0
    after = [one for episodes in by_step(world).values() for one in episodes]
    found = {one.order: one for one in after}
    assert len(found) == len(after) > len(before) > 0
    assert all(found[order].ids.tobytes() == one.ids.tobytes() for order, one in before.items())
    attempts = Counter((one.key[2], one.sample) for one in after)
    assert set(attempts.values()) == {1}, "no draw belongs to two steps"


def test_an_evaluation_in_the_middle_has_the_engine_for_itself(tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    changes = {"validation": {"share": 0.25, "every": 2}, "eval": {"max_tokens": 4, "at_start": False}}
    rows = world.train(stage(tmp_path, steps=4, **changes), **LONG)
    assert [row["step"] for row in rows if row["axis"] == "eval"] == [2, 4]
    assert all(len(episodes) == 32 for episodes in by_step(world).values())


def test_games_fly_too(tmp_path: Path) -> None:
    """An update comes between two turns, or within one, and every player plays to the end."""
    rollout = {"max_tokens": 10, "stop": ["1"], "lag": "flying"}
    grpo = {"name": "grpo", "group_size": 2}
    run = run_games(tmp_path, game=game_stage(steps=4, rollout=rollout, algorithm=grpo, batch={"problems": 8}))
    episodes = episodes_of(run, "game")
    assert len({one.order for one in episodes}) == len(episodes) == 4 * 16
    assert all(one.reward is not None for one in episodes)
    assert any(len({turn.versions[-1][1] for turn in one.turns}) > 1 for one in episodes)


def test_staleness_counts_tokens() -> None:
    one = Episode.at_once(("rl", 5, 0), 0, "", *(torch.zeros(n).numpy() for n in (2, 10, 10, 10)), "stop")
    one.turns[0].versions, one.turns[0].given = ((0, 2), (6, 4)), 2
    taught = Turn(*(torch.zeros(n).numpy() for n in (2, 10, 10, 10)), "given")
    found = staleness(Rollouts(episodes=[one, Episode(("rl", 5, 1), 0, "", [taught])]), 5)
    assert found == {"staleness/mean": 2 * 4 / 8, "staleness/max": 2.0, "staleness/mixed": 1.0}


def test_a_journal_notes_which_problems_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "step-000003.jsonl"
    journal = Journal(path, "these")
    journal.note_draws([8, 9])
    journal.close()
    assert Journal(path, "these").draws == [8, 9] and not Journal(path, "these").is_ended
    assert Journal(path, "others").is_ended, "other data: nothing of it is kept"
    assert drawn_after(tmp_path, 2, "these") == 10 and drawn_after(tmp_path, 3, "these") == 0
    assert drawn_after(tmp_path, 2, "others") == 0


def test_what_cannot_fly_is_refused(tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    with pytest.raises(
        UserError, match=r"responses of the engine transformers cannot continue after an update; write `engine: native`"
    ):
        world.train(stage(tmp_path, rollout={"engine": "transformers"}), **LONG)
    exact = {"name": "higher_lower", "turns": 2, "schedule": "exact"}
    with pytest.raises(UserError, match=r"has no exact schedule; remove environment\.schedule"):
        world.recipe(stage(tmp_path, environment=exact))
    with pytest.raises(UserError, match="lag"):
        world.recipe(stage(tmp_path, rollout={"lag": "falling"}))
