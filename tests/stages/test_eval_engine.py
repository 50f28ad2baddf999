"""The engine that a stage without sampling evaluates with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lemma.core.events import Awaited
from lemma.engines.engine_options import ENGINES
from lemma.engines.transformers_engine import TransformersEngine
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from tests.stages.sft_world import World


def test_a_supervised_stage_chooses_it_and_every_one_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = TransformersEngine.close
    monkeypatch.setattr(TransformersEngine, "close", lambda self: (closed.append(id(self)), close(self))[1])
    benchmark = {"source": "arithmetic", "name": "sums", "arithmetic": {"count": 2, "operations": 1}}
    options: dict[str, Any] = {"benchmarks": [benchmark], "max_tokens": 4, "every": 3}
    for name, engine in (("native", "native"), ("transformers", {"name": "transformers", "batch": 2})):
        (tmp_path / name).mkdir()
        world = World(tmp_path / name)
        assert world.train(world.recipe({"eval": {**options, "engine": engine}})) == 0
        places = sorted((world.run / "evaluations" / "sft").glob("step-*"))
        settings = [json.loads((place / "settings.json").read_text()) for place in places]
        assert [one["benchmarks"]["sums"]["engine"].split()[0] for one in settings] == [name] * 3
        waits = [event.what for event in world.events if isinstance(event, Awaited)]
        told = ["preparing the engine", "evaluating (benchmarks)", "closing the engine"]
        assert [what for what in waits if what in told] == told * 3, "none of it counts for a step's pace"
    assert len(closed) == 3, "one for each evaluation"
    assert ENGINES["vllm"]().start == "starting vLLM"


def test_a_stage_that_samples_has_one_already() -> None:
    with pytest.raises(ValidationError, match=r"write `rollout.engine`, not eval.engine"):
        ReinforcementOptions.model_validate({"eval": {"engine": {"name": "transformers"}}})
