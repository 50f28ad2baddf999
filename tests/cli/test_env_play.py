"""`lemma env play` and `lemma env test` on real recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lemma.api.play_call import shown
from lemma.cli import main
from lemma.models.tiny import tiny_tokenizer
from lemma.rollouts.episode import Episode, Turn
from tests.environments.trouble import write_world


def recipe(folder: Path, environment: dict[str, Any]) -> str:
    rows = [{"question": "how many ?", "answer": str(number)} for number in range(1, 4)]
    (folder / "secrets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stage = {
        "kind": "rl", "data": {"source": str(folder / "secrets.jsonl")}, "rollout": {"max_tokens": 3},
        "environment": environment,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    content = {"format": {"name": "r1_zero", "preamble": False}, "stages": {"rl": stage}, "model": {"path": "tiny"}}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_play_prints_every_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, {"name": "higher_lower", "turns": 2, "words": ["more", "less", "so"]})
    words = ["--set", "model.tiny.words=[more, less, no, number]"]
    assert main(["env", "play", path, "--device", "cpu", "--colour", "always", "--problems", "2", *words]) == 0
    out = capsys.readouterr().out
    assert "<unk>" not in out, "the model is the recipe's, with its vocabulary"
    assert out.count("  problem | ") == 2 and out.count("  outcome | ") == 2
    assert 2 <= out.count("\x1b[1;32m  sampled | ") <= 4, "sampled tokens have their colour"
    assert "tokens are learnt from" in out and "User: how many ?" in out


def test_a_terminal_obeys_nothing_that_a_world_says() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    turn = Turn(nothing, nothing, nothing, nothing, "stop", heard="clear\x1b[2J\x07 it\nnow")
    lines = "\n".join(shown(Episode(("a",), 0, "p", [turn], "?"), tiny_tokenizer(), False))
    assert "clear\\x1b[2J\\x07 it\n   unread | now" in lines


def test_a_good_environment_passes_its_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "test", recipe(tmp_path, {"name": "higher_lower"}), "--answer", "2"]) == 0
    out = capsys.readouterr().out
    assert "BAD" not in out and "the mean reward of saying nothing is 0" in out


def test_the_trial_of_tools_says_that_none_was_called_and_leaves_their_worth_to_the_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_tools.py").write_text(
        f'def count(word: str) -> int:\n    """Count letters."""\n    open({str(tmp_path / "called")!r}, "w")\n'
        "    return len(word)\n"
    )
    tools = {"name": "tools", "functions": [f"{tmp_path}/my_tools.py:count"], "calls": "hermes", "workers": 0}
    call = '<tool_call>{"name": "count", "arguments": {"word": "a"}}</tool_call>'
    assert main(["env", "test", recipe(tmp_path, tools), "--answer", call]) == 0
    out = capsys.readouterr().out
    assert "rewards judge the last turn" in out and "no known reward" not in out
    assert "note tools    no tool is called" in out and not (tmp_path / "called").exists()


def test_a_trial_finds_what_does_not_repeat_what_fails_and_what_pays_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{write_world(tmp_path)}:Trouble"
    world = {"name": "custom", "class": place, "options": {"notes": str(tmp_path)}, "turns": 2, "workers": 1}
    path = recipe(tmp_path, world)
    assert main(["env", "test", path, "--problems", "1", "--answer", "chance"]) == 1
    assert "BAD  repeat" in (out := capsys.readouterr().out) and "saying nothing is 2: it is" in out
    assert main(["env", "test", path, "--problems", "1", "--answer", "late"]) == 0
    assert "A worker makes one call at a time: raise workers" in capsys.readouterr().out
    assert main(["env", "test", path, "--problems", "1", "--answer", "raise"]) == 1
    assert "BAD  step" in (out := capsys.readouterr().out) and "ValueError: no such luck" in out


def test_a_stage_without_an_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, {"name": "single_turn"})
    for action in ("play", "test"):
        assert main(["env", action, path]) == 2
        assert "has no environment; add one" in capsys.readouterr().err


def test_a_game_begins_before_the_first_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in games are conversations to imitate; an episode starts from what they ask, as in training."""
    path = recipe(tmp_path, {"name": "higher_lower", "turns": 1})
    played = ["--set", "stages.rl.data={source: higher_lower}", "--set", "model.tiny.words=[higher, lower]"]
    assert main(["env", "play", path, "--device", "cpu", "--problems", "2", *played]) == 0
    out = capsys.readouterr().out
    prompts = [line for line in out.splitlines() if line.startswith("   prompt | ")]
    assert prompts and not any("higher" in line or "lower" in line for line in prompts)
