from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lemma.core.events import silent
from lemma.recipe import Recipe
from lemma.runs.run import train

ONE_STEP = {"operations": 1, "largest": 10, "style": "stepwise"}
ENTRY = {"name": "sums", "source": "arithmetic", "arithmetic": {**ONE_STEP, "count": 60, "seed": 5}}


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """The run of a tiny model that has learnt the format and a little arithmetic, evaluated while it learnt."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    stage = {
        "steps": 60,
        "data": {"arithmetic": {**ONE_STEP, "count": 2000}},
        "batch": {"sequences": 32, "token_budget": 2048},
        "optim": {"lr": 5e-3, "warmup": 5, "schedule": "cosine"},
        "eval": {
            "benchmarks": [ENTRY],
            "every": 30,
            "limit": 20,
            "samples": 2,
            "max_tokens": 24,
            "metric": "format_accuracy",
        },
    }
    recipe = Recipe.model_validate(
        {
            "run": {"dir": str(folder), "seed": 3, "threads": 1, "device": "cpu", "tensorboard": False},
            "model": {"path": "tiny", "tiny": {"hidden": 64, "layers": 2, "feed_forward": 128}},
            "format": {"name": "r1_zero", "preamble": False},
            "stages": {"sft": stage},
        }
    )
    assert train(recipe, sink=silent) == 0
    return folder
