"""The models of a stage, on its device. Sharded weights are loaded in host memory and split from there."""

from __future__ import annotations

import torch

from lemma.learning.weight_split import split_weights
from lemma.models.critic import Critic, build_critic
from lemma.models.load_model import build_policy, pick_precision
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.models.same_weights import check_same_weights
from lemma.runs.stage import Stage

START = "the weights it starts from"


def stage_policy(stage: Stage, *, is_frozen: bool = False) -> Policy:
    """The model that the stage starts from. A frozen one has no master weights."""
    policy = build_policy(_options(stage), _place(stage), stage.learner_seed, stage.start_from)
    check_same_weights(policy.module, START, f"stage {stage.name}")
    if is_frozen:
        for parameter in policy.module.parameters():
            parameter.requires_grad_(False)
    if stage.shard == "weights":
        split_weights(policy, stage.device)
    return policy


def stage_critic(stage: Stage, recomputed: int) -> Critic:
    """A value model on the same weights."""
    critic = build_critic(_options(stage), _place(stage), stage.seed, stage.start_from, recomputed)
    check_same_weights(critic.module, START, f"stage {stage.name}")
    if stage.shard == "weights":
        split_weights(critic, stage.device)
    return critic


def _place(stage: Stage) -> torch.device:
    return torch.device("cpu") if stage.shard == "weights" else stage.device


def _options(stage: Stage) -> ModelOptions:
    """The model's options, with the default precision of its device."""
    precision = pick_precision(stage.model.precision, stage.device)
    return stage.model if stage.shard != "weights" else stage.model.model_copy(update={"precision": precision})
