"""Reward models that are damaged or unfit: one sentence each, before any number of theirs becomes a reward."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.rewards import RewardInput, combine, make_reward
from tests.stages.test_rl_reward_model import save_model

WEIGHTS = "model.safetensors"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def head(values: torch.Tensor | None) -> Callable[[Path], None]:
    """Put another head in, or none at all."""

    def damage(folder: Path) -> None:
        change_weights(
            folder, lambda t: t.pop("score.weight") if values is None else t.update({"score.weight": values})
        )

    return damage


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["LEMMA_TEST_ATTACKED"],)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))


def small_vocabulary(folder: Path) -> None:
    change_json(folder / "config.json", vocab_size=10)
    change_weights(folder, lambda t: t.update({"model.embed_tokens.weight": torch.ones(10, 16)}))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan": (head(torch.full((1, 16), float("nan"))), "gives the score nan to the completion '2'.*must be finite"),
    "infinite": (head(torch.full((1, 16), 3e38)), "gives the score (nan|-?inf) to"),
    "no head": (head(None), "score.weight is missing; give the path of a sequence-classification model"),
    "shape": (head(torch.ones(3, 16)), r"score.weight has shape \(3, 16\), not \(1, 16\)"),
    "truncated": (truncate, "are damaged: model.safetensors is not whole"),
    "pickle": (pickled, "its .bin file is damaged, or holds something else than tensors"),
    "generates": (
        lambda folder: change_json(folder / "config.json", architectures=["Qwen3ForCausalLM"]),
        "is a language model \\(Qwen3ForCausalLM\\), which writes text, and no reward model; give the path of a",
    ),
    "vocabulary": (small_vocabulary, "has 157 tokens, and the model knows 10"),
    "no such kind": (lambda folder: change_json(folder / "config.json", model_type="nothing"), "cannot be loaded"),
    "no heads": (lambda folder: change_json(folder / "config.json", num_attention_heads=0), "cannot be loaded"),
    "words": (lambda folder: change_json(folder / "config.json", hidden_size="x"), "expected int, got str"),
    "labels": (lambda folder: change_json(folder / "config.json", id2label=7), "has 2 outputs"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}") and None, "cannot be loaded"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_reward_model_gives_one_sentence_and_no_reward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, sentence = DAMAGES[name]
    monkeypatch.setenv("LEMMA_TEST_ATTACKED", str(tmp_path / "attacked"))
    damage(save_model(tmp_path / "model"))
    reward = make_reward({"name": "reward_model", "path": str(tmp_path / "model")})
    items = [RewardInput(text, Problem((Message("user", "1 + 1"),))) for text in ("2", "2 3 4")]
    with pytest.raises(UserError, match=sentence) as refused:
        reward.check()
        combine([reward], items)
    assert "\n" not in str(refused.value) and not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("value", [1e19, -1e160, 1.7e308])
def test_rewards_that_are_too_large_to_learn_from_are_refused(value: float, tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(f"def huge(item):\n    return {value!r} if item.completion == 'b' else 0.0\n")
    reward = make_reward(f"{tmp_path / 'huge.py'}:huge")
    items = [RewardInput(text, Problem((Message("user", "?"),))) for text in "ab"]
    with pytest.raises(UserError, match=r"huge.py:1: reward 'huge' is .* on the completion 'b', and beyond 1e\+18"):
        combine([reward], items)
    weighted = make_reward({"name": "custom", "function": f"{tmp_path / 'huge.py'}:huge", "weight": 1e300})
    with pytest.raises(UserError, match="reward 'huge' is"):
        combine([weighted], items)
