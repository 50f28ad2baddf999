"""Episodes of several turns through a real stage: what is read and learnt, and what failing worlds do to a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.events import Event
from lemma.core.types import Problem
from lemma.environments import Action, Environment, Observation, Outcome
from lemma.recipe import Recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train
from tests.rollouts.episode_rows import row_of

NUMBERS = 8


def secrets(folder: Path) -> Path:
    path = folder / "secrets.jsonl"
    rows = [{"question": "how many ?", "answer": str(number)} for number in range(1, NUMBERS + 1)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def recipe(folder: Path, **stage: Any) -> Recipe:
    settings: dict[str, Any] = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": str(secrets(folder))},
        "environment": {"name": "higher_lower", "turns": 3}, "rollout": {"max_tokens": 1},
        "batch": {"problems": 4}, "steps": 2, "optim": {"lr": 1e-3}, "eval": {"benchmarks": []},
    }  # fmt: skip
    tiny = {"hidden": 32, "layers": 2, "feed_forward": 64, "heads": 2, "kv_heads": 1}
    return Recipe.model_validate({
        "run": {"dir": str(folder / "run"), "threads": 1, "tensorboard": False},
        "model": {"tiny": tiny}, "format": "r1_zero", "stages": {"rl": settings | stage},
    })  # fmt: skip


def run(folder: Path, **stage: Any) -> tuple[Path, list[Event]]:
    events: list[Event] = []
    assert train(recipe(folder, **stage), sink=events.append) == 0
    return folder / "run", events


def rows(run_folder: Path) -> list[dict[str, Any]]:
    return [row for line in (run_folder / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))]


def test_every_turn_is_in_the_journal_and_extends_the_last(tmp_path: Path) -> None:
    folder, _ = run(tmp_path)
    episodes = list(read_episodes(folder / "stages/rl/journal/step-000001.jsonl"))
    assert len(episodes) == 16 and {len(one.turns) for one in episodes} >= {3}
    for episode in episodes:
        (trajectory,) = episode.trajectories(with_turns=True)
        assert trajectory.trained_tokens == len(episode.turns) == episode.tokens
        for number, turn in enumerate(episode.turns):
            assert turn.extends == (number > 0)
            read = episode.context(number)
            assert trajectory.ids_T[: len(read)].tolist() == read.tolist()
        assert (episode.verdict == "right") == (episode.turns[-1].heard == "right") == (episode.reward == 1.0)
    first = next(row for row in rows(folder) if row["axis"] == "train")
    assert first["turns/max"] == 3.0 and first["generated_tokens"] == sum(one.tokens for one in episodes)


TALKATIVE = """
from lemma.environments import Environment, Outcome, Observation

class Talkative(Environment):
    total = turns = 0

    def step(self, said):
        self.turns += 1
        self.total += sum(map(ord, said.text))
        return Observation("how many pens ?" if self.total % 3 else "", done=self.turns == 2 + self.total % 3)

    def score(self):
        return Outcome(float(self.total % 2), self.total % 2 == 1)
"""


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo", "loop", "rloo", "reinforce", "expert_iteration"])
def test_engine_and_learner_agree_on_every_turn(algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(TALKATIVE)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Talkative", "turns": 4}
    settings = {"name": algorithm} | ({} if algorithm == "ppo" else {"group_size": 4})
    folder, _ = run(tmp_path, environment=world, algorithm=settings, rollout={"max_tokens": 5})
    found = [row for row in rows(folder) if row["axis"] == "train"]
    assert [row["updates"] > 0 for row in found] == [True, True]
    assert all(row["mismatch/max"] < 1e-5 for row in found if "mismatch/max" in row)
    assert algorithm == "expert_iteration" or "mismatch/max" in found[0]
    assert any(2 < row["turns/mean"] < 4 for row in found)


def test_a_killed_step_is_played_again_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lemma.core import faults

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole, _ = run(tmp_path / "a")
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rollouts.sampled:21:EIO")
    with pytest.raises(OSError):
        run(tmp_path / "b")
    monkeypatch.delenv("LEMMA_FAULT")
    again, _ = run(tmp_path / "b")
    strip = {"timings", "seconds"}
    both = [[{k: v for k, v in row.items() if k not in strip} for row in rows(one)] for one in (whole, again)]
    assert both[0] == both[1]


def test_a_free_schedule_keeps_what_was_finished_before_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lemma.core import faults

    world = {"name": "higher_lower", "turns": 2, "schedule": "free", "episodes": 4}
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rollouts.sampled:13:EIO")
    with pytest.raises(OSError):
        run(tmp_path, environment=world, steps=1)
    journal = tmp_path / "run/stages/rl/journal/step-000001.jsonl"
    kept = [row_of(episode) for episode in read_episodes(journal)]
    assert 4 <= len(kept) < 16
    monkeypatch.delenv("LEMMA_FAULT")
    _, events = run(tmp_path, environment=world, steps=1)
    whole = [row_of(episode) for episode in read_episodes(journal)]
    assert whole[: len(kept)] == kept and len(whole) == 16, "times included"
    assert any("not bit-exact: turns are sent" in str(event) for event in events)


BROKEN = """
from lemma.environments import Environment, Outcome, Observation

class Broken(Environment):
    def reset(self, problem, seed):
        self.secret = int(problem.gold)
        return []

    def step(self, said):
        if self.secret % 2:
            raise OSError("the world is gone")
        return Observation("no", done=True)

    def score(self):
        return Outcome(0.5, True)
"""


def test_an_environment_that_fails_is_unknown_and_never_a_reward(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(BROKEN)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Broken", "unknown_limit": 1.0}
    folder, events = run(tmp_path, environment=world, steps=1)
    episodes = list(read_episodes(folder / "stages/rl/journal/step-000001.jsonl"))
    failed = [one for one in episodes if one.verdict == "unknown"]
    assert 0 < len(failed) < 16
    assert all(one.reward is None and "OSError: the world is gone" in one.reason for one in failed)
    assert all(one.reward == 0.5 for one in episodes if one.verdict == "right")
    assert any("have no reward" in str(event) for event in events)


def test_a_step_with_too_many_unknown_episodes_stops_the_run_and_is_played_again(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(BROKEN)
    world = {"name": "custom", "class": f"{tmp_path / 'world.py'}:Broken", "workers": 0}
    with pytest.raises(UserError, match=r"of 16 episodes of this step have no known worth, .*OSError: the world is go"):
        run(tmp_path, environment=world, steps=1)
    assert (tmp_path / "run/stages/rl/journal/step-000001.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ({"environment": "higher_lower", "rollout": {}}, "needs a limit on each of its turns"),
        ({"environment": "single_turn", "rewards": ["environment"]}, "the reward environment needs one"),
        ({"environment": {"name": "custom", "class": "nowhere.py:A"}}, "there is no file 'nowhere.py'"),
    ],
)
def test_what_cannot_be_played_is_refused(stage: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=sentence):
        train(recipe(tmp_path, **stage), sink=lambda event: None)


def test_a_world_depends_on_what_was_said_alone() -> None:
    class Count(Environment):
        heard = 0

        def step(self, said: Action) -> Observation:
            self.heard += 1
            return Observation(str(self.heard), done=self.heard == 2)

        def score(self) -> Outcome:
            return Outcome(float(self.heard))

    one = Count()
    assert list(one.reset(Problem((), id="p"), 0)) == []
    assert [one.step(Action("a")).done, one.step(Action("b")).done] == [False, True]
    assert one.score() == Outcome(2.0) and np.isfinite(one.score().reward or 0.0)


OPENING = """
from lemma.core.types import Message
from lemma.environments import Environment, Outcome, Observation

class Opening(Environment):
    open_worlds = 0

    def __init__(self, hint="pens"):
        self.hint = hint

    def reset(self, problem, seed):
        type(self).open_worlds += 1
        return [Message("user", f"how many {self.hint} ?")]

    def step(self, said):
        return ANSWER

    def score(self):
        return Outcome(1.0, True)

    def close(self):
        type(self).open_worlds -= 1
"""


def opening(folder: Path, answer: str, **options: Any) -> dict[str, Any]:
    (folder / "opening.py").write_text(OPENING.replace("ANSWER", answer))
    place = f"{folder / 'opening.py'}:Opening"
    return {"name": "custom", "class": place, "turns": 2, "options": options, "workers": 0}


def test_what_reset_says_is_in_the_first_prompt(tmp_path: Path) -> None:
    folder, _ = run(tmp_path, environment=opening(tmp_path, 'Observation("no")', hint="books"), steps=1)
    first, *_ = read_episodes(folder / "stages/rl/journal/step-000001.jsonl")
    from lemma.models.tiny import tiny_tokenizer

    assert "how many books ?" in tiny_tokenizer().decode(first.turns[0].context)


@pytest.mark.parametrize("answer", ["'no'", "None"])
def test_a_step_that_returns_no_reply_stops_with_one_sentence(answer: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Opening gave .* where Observation is wanted"):
        run(tmp_path, environment=opening(tmp_path, answer))


def test_options_that_the_class_does_not_take_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"class Opening does not take these options.*hints"):
        run(tmp_path, environment=opening(tmp_path, 'Observation("no")', hints="books"))


def test_every_world_is_closed_where_the_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lemma.config.registry import load_place
    from lemma.core import faults

    world = opening(tmp_path, 'Observation("no")')
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rollouts.sampled:9:EIO")
    with pytest.raises(OSError):
        run(tmp_path, environment=world)
    assert load_place(world["class"]).open_worlds == 0
