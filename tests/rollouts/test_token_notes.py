"""What updates note of each token, against plain transformers and numbers worked out here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lemma.core.types import Group, Message, Problem
from lemma.learning.checkpoint import CheckpointStore
from lemma.recipe import load_recipe
from lemma.rollouts import Episode, read_episodes
from lemma.rollouts.journal import tidy
from lemma.rollouts.notes_reader import Noted, read_notes
from lemma.rollouts.token_notes import TokenNotes, notes_path
from lemma.runs.exporting import export_model
from tests.algorithms import toy
from tests.reports.made_runs import sample

GROUP = {"name": "grpo", "group_size": 4, "scale": "group"}
# Half precision and the four digits that are kept.
NEAR = {"abs": 2e-3, "rel": 2e-3}


def train(folder: Path, steps: int, *, lag: int = 0, **algorithm: Any) -> toy.Toy:
    folder.mkdir()
    world = toy.Toy(folder)
    changes = {"rewards": [toy.PARITY], "steps": steps, "checkpoint": {"every": 1}, "optim": {"lr": 0.01}}
    changes |= {"rollout": {"max_tokens": 6, "lag": lag}, "batch": {"problems": 4, "token_budget": 128}}
    world.train(toy.reinforcement(folder, GROUP | algorithm, **changes))
    return world


def found(world: toy.Toy, step: int) -> list[tuple[Episode, Noted]]:
    stage = world.run / "stages" / "toy"
    (path,) = (stage / "journal").glob(f"step-{step:06d}.*")
    notes = read_notes(stage / "notes", step)
    episodes = list(read_episodes(path))
    assert len(notes) == len(episodes) == 16
    return [(one, notes[int(one.key[2]), one.sample]) for one in episodes]


def plain_logprobs(model: Any, episode: Episode) -> np.ndarray:
    ids = torch.tensor(np.concatenate([episode.prompt, episode.ids])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(episode.prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(episode.ids).long()[:, None])[:, 0].numpy()


def test_a_checkpoint_waits_for_the_notes_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written beside the work, and a run that goes on from the checkpoint would not write them again."""
    write, save, seen = TokenNotes.write, CheckpointStore.save, []

    def write_late(*arguments: Any) -> None:
        time.sleep(0.2)
        write(*arguments)

    def look_and_save(store: CheckpointStore, step: int, *arguments: Any, **named: Any) -> None:
        seen.append(notes_path(tmp_path / "late" / "run" / "stages" / "toy" / "notes", step).is_file())
        save(store, step, *arguments, **named)

    monkeypatch.setattr(TokenNotes, "write", write_late)
    monkeypatch.setattr(CheckpointStore, "save", look_and_save)
    train(tmp_path / "late", 2)
    assert seen == [True, True]


def test_samples_of_an_older_version_are_held_against_the_engine_that_drew_them(tmp_path: Path) -> None:
    world = train(tmp_path / "lag", 2, lag=1)
    recipe = load_recipe(world.run / "recipe.yaml")
    to = export_model(recipe, world.run, stage="toy", checkpoint="1", kind="merged", to=tmp_path / "one").folder
    model = AutoModelForCausalLM.from_pretrained(to)
    moved = 0.0
    for episode, noted in found(world, 2):
        assert noted.is_about(episode.ids) and noted.ratio is None, "one update: there is no old policy"
        if np.isnan(noted.engine).all():
            continue
        expected = plain_logprobs(model, episode) - episode.logprobs
        assert noted.engine == pytest.approx(expected, **NEAR)
        moved = max(moved, float(np.abs(expected).max()))
    assert moved > 0.05, "version 0 sampled what version 1 learnt from"
    for _, noted in found(world, 1):
        assert np.nan_to_num(noted.engine) == pytest.approx(0, abs=1e-3)


def test_the_ratio_is_that_of_the_last_update_to_the_policy_before_the_first(tmp_path: Path) -> None:
    twice, once = train(tmp_path / "twice", 1, epochs=2), train(tmp_path / "once", 1)
    model = AutoModelForCausalLM.from_pretrained(once.final)
    moved = 0.0
    for episode, noted in found(twice, 1):
        assert noted.ratio is not None
        if np.isnan(noted.ratio).all():
            continue
        expected = plain_logprobs(model, episode) - episode.logprobs
        assert noted.ratio == pytest.approx(expected, **NEAR)
        moved = max(moved, float(np.abs(expected).max()))
    assert moved > 0.05, "the second update saw what the first had changed"


def test_advantages_are_those_of_the_groups(tmp_path: Path) -> None:
    rows = found(train(tmp_path / "run", 1), 1)
    groups: dict[int, list[tuple[Episode, Noted]]] = {}
    for episode, noted in rows:
        groups.setdefault(int(episode.key[2]), []).append((episode, noted))
    live = 0
    for own in groups.values():
        rewards = np.array([episode.reward for episode, _ in own], dtype=np.float64)
        spread = rewards.std(ddof=1)
        live += spread > 0
        for reward, (_, noted) in zip(rewards, own, strict=True):
            expected = (reward - rewards.mean()) / spread if spread else 0.0
            assert noted.advantage == pytest.approx(np.full(len(noted.advantage), expected), **NEAR)
            assert np.isnan(noted.engine).all() == (spread == 0), "a group without a difference is not computed"
    assert live


def write_one(folder: Path, step: int) -> Episode:
    episode = sample(step, 3, 1, "3 + 4 = 7", given=2)
    (trajectory,) = episode.trajectories()
    trajectory.attempt = (3, 1)
    trajectory.token_fields["advantage"] = np.arange(len(trajectory), dtype=np.float64)
    notes = TokenNotes()
    notes.take([trajectory], [episode.logprobs + 0.25])
    notes.write(folder, step, [Group(Problem(messages=(Message("user", "how many ?"),)), [trajectory])])
    return episode


def test_what_a_teacher_said_has_no_engine_and_others_samples_no_notes(tmp_path: Path) -> None:
    episode = write_one(tmp_path, 1)
    noted = read_notes(tmp_path, 1)[3, 1]
    assert np.isnan(noted.engine[:2]).all() and noted.engine[2:] == pytest.approx(0.25, abs=1e-3)
    assert np.diff(noted.advantage) == pytest.approx(1)
    assert (
        noted.is_about(episode.ids) and not noted.is_about(episode.ids[::-1]) and not noted.is_about(episode.ids[:-1])
    )


def test_as_many_steps_stay_as_of_the_journal_and_a_torn_file_is_none(tmp_path: Path) -> None:
    journals, notes = tmp_path / "journal", tmp_path / "notes"
    for step in range(1, 6):
        write_one(notes, step)
    (notes / ".step-000004.npz.77.tmp").write_bytes(b"half")
    tidy(journals, 5, None, 5)
    assert len(list(notes.iterdir())) == 5
    tidy(journals, 5, 2, 1)
    assert sorted(path.name for path in notes.iterdir())[0] == "step-000002.npz", "a run may go on after step 1"
    tidy(journals, 5, 2, 5)
    assert sorted(path.name for path in notes.iterdir()) == ["step-000004.npz", "step-000005.npz"]
    whole = notes_path(notes, 5).read_bytes()
    for broken in (b"", whole[:40], whole[: len(whole) // 2], b"x" * 100):
        notes_path(notes, 5).write_bytes(broken)
        assert read_notes(notes, 5) == {}
    assert read_notes(notes, 1) == {}
