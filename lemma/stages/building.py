"""The models of a stage, on its device, and what trains them. Sharded weights are loaded in host memory and split from
there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lemma.core.errors import UserError
from lemma.core.ranks import world_size
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.weight_split import split_weights
from lemma.models.critic import Critic, build_critic
from lemma.models.load_model import build_policy, load_tokenizer, pick_precision
from lemma.models.model_options import ModelOptions
from lemma.models.policy import PackModel, Policy
from lemma.models.same_weights import check_same_weights
from lemma.runs.stage import Stage

START = "the weights it starts from"


def stage_policy(stage: Stage, *, is_frozen: bool = False, path: str | None = None) -> Policy:
    """The model that the stage starts from, or the one at `path`, whole. A frozen one has no master weights."""
    options, start_from = _from(stage, path)
    with stage.waiting("loading the reference model" if is_frozen else "loading the model"):
        policy = build_policy(options, _place(stage), stage.learner_seed, start_from)
        _check_same(policy, path, stage)
    if is_frozen:
        for parameter in policy.module.parameters():
            parameter.requires_grad_(False)
    if stage.shard == "weights":
        split_weights(policy, stage.device)
    return policy


def stage_critic(stage: Stage, recomputed: int, path: str | None = None) -> Critic:
    """A value model on the same weights, or on those at `path`; with model.lora as adapters on them."""
    options, start_from = _from(stage, path, adapted=True)
    with stage.waiting("loading the value model"):
        critic = build_critic(options, _place(stage), stage.seed, start_from, recomputed)
        _check_same(critic, path, stage)
    if stage.shard == "weights":
        split_weights(critic, stage.device)
    return critic


def stage_learner(
    stage: Stage,
    model: PackModel,
    optim: OptimOptions,
    token_budget: int,
    updates: int,
    *,
    seed: int,
    temperature: float = 1.0,
) -> Learner:
    """What trains the policy of a stage, or its critic, in so many updates."""
    return Learner(
        model,
        optim,
        token_budget=token_budget,
        total_steps=updates,
        seed=seed,
        temperature=temperature,
        compile_blocks=stage.model.compile and isinstance(model, Policy),
        may_flash=not stage.model.compile,  # one choice for the process
        share_prompts=stage.model.share_prompts,
        shard=stage.shard,
        say=stage.warn,
    )


def _check_same(model: PackModel, path: str | None, stage: Stage) -> None:
    if world_size() > 1:
        check_same_weights(model.module, path or START, f"stage {stage.name}")


def switch_dropout_off(model: PackModel, stage: Stage) -> None:
    """Set every dropout of the model to 0, and say so if there was any: comparisons of log-probabilities must not be
    noisy."""
    found = model.dropouts
    for module, name in found:
        setattr(module, name, 0.0)
    if found:
        stage.say(f"{stage.name}: the model's dropout is off in stages of kind {stage.options.kind}")


def check_tokens(stage: Stage, path: str, tokenizer: Any, what: str) -> None:
    """Refuse a model to which ids mean other tokens."""
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"stage {stage.name}: the tokens of {path} are not those of the policy",
            fix=f"name a model with the same tokenizer as {what}",
        )


def _place(stage: Stage) -> torch.device:
    return torch.device("cpu") if stage.shard == "weights" else stage.device


def _from(stage: Stage, path: str | None, *, adapted: bool = False) -> tuple[ModelOptions, Path | None]:
    """The model's options, with the default precision of its device, and the stage that it starts from. One at a `path`
    of its own is held as it is, without the policy's adapters and quantised weights, or `adapted` as the policy is."""
    precision = pick_precision(stage.model.precision, stage.device)
    options = stage.model if stage.shard != "weights" else stage.model.model_copy(update={"precision": precision})
    if path is None:
        return options, stage.start_from
    alone: dict[str, Any] = {"path": path, "revision": None, "tokenizer": None, "override": {}}
    return options.model_copy(update=alone if adapted else alone | {"lora": None, "quantize": None}), None
