"""A reference of its own in the preference stage, and one that follows, beside a plain loop with TRL's rule."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from trl.trainer.callbacks import SyncRefModelCallback

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from tests.models.small import CPU
from tests.stages.preference_world import Row, World

TINY = {"hidden": 32, "layers": 2, "feed_forward": 48, "context": 96}
FAST = {"optim": {"lr": 1e-2}, "steps": 5}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def start_of(seed: int) -> Any:
    """The built-in model as it starts, for transformers' own forward."""
    return build_policy(ModelOptions(tiny=TINY), CPU, seed)


def trained(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["axis"] == "train"]


def of_response(model: Any, one: Trajectory) -> torch.Tensor:
    ids = torch.from_numpy(one.ids_T)
    logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logp[torch.from_numpy(one.loss_mask_T[1:])].sum()


def plain_losses(steps: Sequence[Sequence[Trajectory]], reference: Any, every: int | None, mix: float) -> list[float]:
    """DPO with AdamW, in plain torch; the reference is brought up by TRL's own function."""
    model = start_of(3).causal
    reference = copy.deepcopy(reference)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for number, batch in enumerate(steps, 1):
        margins = []
        for group_id in sorted({one.group_id for one in batch}):
            pair = sorted((one for one in batch if one.group_id == group_id), key=lambda one: -one.fields["sign"])
            with torch.no_grad():
                kept = of_response(reference, pair[0]) - of_response(reference, pair[1])
            margins.append(of_response(model, pair[0]) - of_response(model, pair[1]) - kept)
        loss = -logsigmoid(0.1 * torch.stack(margins)).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if every is not None and number % every == 0:
            SyncRefModelCallback._sync_target_model(model, reference, mix)
    return losses


@pytest.mark.parametrize(
    ("other", "every", "mix"), [(False, 2, 0.6), (False, 2, 1.0), (True, None, 0.6), (True, 2, 0.6)]
)
def test_losses_are_those_of_a_plain_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, other: bool, every: int | None, mix: float
) -> None:
    steps: list[list[Trajectory]] = []
    step = Learner.step

    def watched(self: Any, items: Sequence[Trajectory], *args: Any) -> Any:
        steps.append(list(items))
        return step(self, items, *args)

    monkeypatch.setattr(Learner, "step", watched)
    options: Row = {} if every is None else {"every": every, "mix": mix}
    if other:
        start_of(9).save(world.folder / "other")
        options |= {"path": str(world.folder / "other")}
    rows = trained(world.train({"name": "dpo", "beta": 0.1}, FAST | {"reference_model": options}))
    expected = plain_losses(steps, start_of(9 if other else 3).causal, every, mix)
    assert len(expected) == 5 and max(expected) - min(expected) > 1e-3
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_a_following_reference_goes_on_exactly(world: World) -> None:
    """The newest checkpoint of a run that dies is in the middle between two times that the reference follows."""
    changes = FAST | {"reference_model": {"every": 2}, "checkpoint": {"every": 1, "keep": 9}}
    whole = world.train("kto", changes)
    final = world.run / "stages" / "prefer" / "final"
    weights = load_file(final / "model.safetensors")
    for step in (4, 5):
        shutil.rmtree(world.run / "stages" / "prefer" / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(final)
    (final.parent / "done.json").unlink()
    assert world.train("kto", changes) == whole
    again = load_file(final / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_another_reference_is_scored_once_and_then_let_go(world: World) -> None:
    start_of(3).save(world.folder / "same")
    named = world.train("dpo", {"reference_model": {"path": str(world.folder / "same")}}, "named")
    assert world.scored() == 80
    assert named == world.train("dpo", run="usual")


@pytest.mark.parametrize(
    ("changes", "model", "sentence"),
    [
        ({"reference_model": {"every": 2}}, {"lora": {"r": 2}}, "a reference that follows needs whole weights"),
        ({"reference_model": {"mix": 0.5}}, {}, "mix has no effect without `every`"),
        ({"reference_model": {}}, {}, "this is the reference anyway"),
        ({"reference_model": {"every": 2}, "algorithm": "simpo"}, {}, "simpo holds no reference here; remove"),
        ({"sync_ref_model": True}, {}, "did you mean 'reference_model'"),
        ({"ref_model_sync_steps": 512}, {}, "write it as 'stages.prefer.reference_model.every'"),
        ({"ref_model_mixup_alpha": 0.6}, {}, "write it as 'stages.prefer.reference_model.mix'"),
    ],
)
def test_what_cannot_follow_is_refused(world: World, changes: Row, model: Row, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("`", ".")):
        world.recipe("dpo", changes, **model)


def test_a_model_of_another_shape_cannot_follow(world: World) -> None:
    build_policy(ModelOptions(tiny=TINY | {"layers": 1}), CPU, 9).save(world.folder / "smaller")
    named = {"path": str(world.folder / "smaller")}
    assert world.train("dpo", {"reference_model": named})
    with pytest.raises(UserError, match="cannot follow a policy whose weights have other names or shapes"):
        world.train("dpo", {"reference_model": named | {"every": 2}}, "other")
