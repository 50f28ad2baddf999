"""PPO with a reward model beside a rule, and what is refused before anything is generated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from lemma.core.errors import UserError
from lemma.models.model_options import TinyOptions
from lemma.models.tiny import tiny_config, tiny_tokenizer
from lemma.rewards import make_reward
from lemma.rollouts import read_episodes
from tests.algorithms import toy

TINY = {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 32}


def save_model(folder: Path, outputs: int = 1) -> Path:
    """A random model over the tiny vocabulary whose scores are far apart."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(TinyOptions(**TINY), tokenizer)
    config.num_labels = outputs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("reward_model"))


def stage(folder: Path, rewards: list[Any]) -> dict[str, Any]:
    changes = {"rewards": rewards, "steps": 2, "rollout": {"max_tokens": 6}}
    changes["batch"] = {"problems": 6, "token_budget": 256}
    return toy.reinforcement(folder, {"name": "ppo", "epochs": 2}, **changes)


def test_ppo_learns_from_a_rule_and_a_model_by_their_weights(reward_model: Path, tmp_path: Path) -> None:
    rewards = [
        {"name": "custom", "function": toy.PARITY, "weight": 10.0},
        {"name": "reward_model", "path": str(reward_model), "weight": 0.5, "batch": 4},
    ]
    world = toy.Toy(tmp_path)
    rows = world.train(stage(tmp_path, rewards), tiny=TINY)
    model: Any = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = tiny_tokenizer()
    questions = {f"{question}\n" for question in toy.QUESTIONS}
    for number, row in enumerate(rows, 1):
        samples = list(read_episodes(world.run / f"stages/toy/journal/step-{number:06d}.jsonl"))
        assert len(samples) == 6
        scores = []
        for sample in samples:
            text = f"{sample.problem_id}\n{sample.text}"
            assert any(text.startswith(question) for question in questions)
            with torch.inference_mode():
                score = float(model(torch.tensor([tokenizer.encode(text)])).logits[0, 0])
            rule, found = sample.rewards["parity"], sample.rewards["reward_model"]
            assert found == pytest.approx(score, abs=1e-5)
            assert rule == float(sample.ids.sum() % 2) and sample.reward == pytest.approx(10 * rule + 0.5 * score)
            scores.append(score)
        assert row["rewards/reward_model/mean"] == pytest.approx(sum(scores) / 6, abs=1e-5)
        assert row["rewards/reward_model/std"] > 0.01, "the model tells completions apart"
        assert row["updates"] > 0 and "critic/loss" in row


def test_the_score_of_the_model_changes_what_is_learnt(reward_model: Path, tmp_path: Path) -> None:
    def learnt(folder: Path, weight: float) -> dict[str, torch.Tensor]:
        folder.mkdir()
        world = toy.Toy(folder)
        rewards = [toy.PARITY, {"name": "reward_model", "path": str(reward_model), "weight": weight}]
        world.train(stage(folder, rewards) | {"steps": 1}, tiny=TINY)
        return load_file(world.final / "model.safetensors")

    alone, beside = learnt(tmp_path / "a", 0.0), learnt(tmp_path / "b", 1.0)
    assert any(not torch.equal(alone[name], beside[name]) for name in alone)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for name in names for path in folder.glob(name)] and None


def two_outputs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "bad", "1": "good"}}))


def unsaid_outputs(folder: Path) -> None:
    """As of a language model, which is no reward model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "id2label"}))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without("config.json"), r"has no configuration that can be read; give the path of a sequence-classification"),
        (without("*.safetensors"), r"has no weights; give the path of a sequence-classification model"),
        (without("tokenizer*"), r"has no tokenizer; give the path"),
        (two_outputs, r"has 2 outputs; use a model with one output"),
        (unsaid_outputs, r"has 2 outputs; use a model with one output"),
    ],
    ids=["config", "weights", "tokenizer", "two", "unsaid"],
)
def test_a_model_that_cannot_score_is_refused(damage: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    reward = make_reward({"name": "reward_model", "path": str(folder)})
    reward.check()
    damage(folder)
    with pytest.raises(UserError, match=sentence):
        reward.check()


def test_a_wrong_path_stops_a_run_before_it_begins(reward_model: Path, tmp_path: Path) -> None:
    wrong = str(reward_model) + "x"
    world = toy.Toy(tmp_path)
    with pytest.raises(UserError, match=f"there is no folder '{wrong}' with a reward model; did you mean"):
        world.train(stage(tmp_path, [toy.PARITY, {"name": "reward_model", "path": wrong}]), tiny=TINY)
    assert not world.run.exists()


def test_a_name_that_the_hub_does_not_give_gets_one_sentence() -> None:
    with pytest.raises(UserError, match=r"'nobody/nothing' is neither a folder nor found on the hub"):
        make_reward({"name": "reward_model", "path": "nobody/nothing"}).check()


def test_the_check_loads_no_torch(reward_model: Path) -> None:
    code = (
        "import sys; from lemma.rewards import make_reward; "
        f"make_reward({{'name': 'reward_model', 'path': {str(reward_model)!r}}}).check(); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
