"""Every algorithm learns the toy task through the real stage: from chance to above 0.9, within its steps.

Another CPU may draw another token somewhere and so go another way, as another seed does. Every step asks all questions
and budgets are generous: with eight seeds each, the worst run ended at 0.95.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.algorithms import ALGORITHMS
from lemma.core.types import Message, Problem
from lemma.formats.detokenizer import Detokenizer
from lemma.models.model_options import TinyOptions
from lemma.models.tiny import tiny_config, tiny_tokenizer
from lemma.rewards import RewardInput
from lemma.rollouts.scorer import text_of
from tests.algorithms import toy

CHANCE = 0.25

# Each algorithm as it is used, with old log-probabilities and clips where it has them, and its budget of steps. Without
# a baseline, what is drawn too often is paid too often: plain REINFORCE needs more samples not to lose a word for good.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "reinforce": ({"group_size": 64}, 40),
    "reinforce_baseline": ({}, 34),
    "rloo": ({"mini_batches": 2}, 26),
    "grpo": ({"epochs": 2, "mini_batches": 2}, 18),
    "dr_grpo": ({"mini_batches": 2}, 26),
    "dapo": ({"mini_batches": 2}, 22),
    "gspo": ({"epochs": 2}, 24),
    "cispo": ({"epochs": 2}, 22),
    "loop": ({"mini_batches": 2}, 24),
    "ppo": ({"epochs": 2, "mini_batches": 2, "kl": 0.01, "value_lr": 1e-2}, 20),
    "luffy": ({"mini_batches": 2}, 26),
    "expert_iteration": ({"epochs": 2}, 16),
}
RATES = {"ppo": 3e-3}


def test_no_policy_that_does_not_read_the_question_is_above_chance() -> None:
    """The reward of a blind policy is a mean over responses of what each earns on all questions; so the best one always
    gives the best response. All responses are tried."""
    tokenizer = tiny_tokenizer()
    end, words = tokenizer.eos_token_id, range(tiny_config(TinyOptions(), tokenizer).vocab_size)
    short = [(end,), *((word, end) for word in words)]
    cut = [ids for ids in product(words, repeat=toy.MAX_TOKENS) if end not in ids]
    detokenizer = Detokenizer(tokenizer)
    responses = {text_of(np.array(ids), "stop", detokenizer) for ids in short}
    responses |= {text_of(np.array(ids), "length", detokenizer) for ids in cut}
    problems = [Problem((Message("user", asked),), (gold,)) for asked, gold in toy.QUESTIONS.items()]

    def earned(text: str) -> float:
        return sum(toy.said(RewardInput(text, problem)) for problem in problems) / len(problems)

    assert max(map(earned, responses)) == CHANCE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.base_model(tmp_path_factory.mktemp("base"))


def test_every_algorithm_has_a_budget() -> None:
    assert SETTINGS.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_learns_the_task(name: str, base: Path, tmp_path: Path) -> None:
    options, steps = SETTINGS[name]
    world = toy.Toy(tmp_path, base)
    algorithm = {"name": name, "group_size": 16, **options}
    changes = {
        "steps": steps,
        "batch": {"problems": len(toy.QUESTIONS), "token_budget": 4096},
        "optim": {"lr": RATES.get(name, 5e-3)},
    }
    rows = world.train(toy.reinforcement(tmp_path, algorithm, **changes))
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == steps
    assert abs(rewards[0] - CHANCE) < 0.12, "256 samples or more of a policy that answers by chance"
    assert sum(rewards[-3:]) / 3 > 0.9
    assert all(row["mismatch/max"] < 1e-4 for row in rows if row["updates"])
