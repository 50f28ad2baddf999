"""Where episodes are played: an environment, and how its replies become ids for one format and one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from lemma.environments import EnvironmentOptions
from lemma.environments.tools import understanding
from lemma.formats import Format
from lemma.formats.bridge import Bridge
from lemma.rollouts.multi_turn import World

if TYPE_CHECKING:
    from lemma.models.policy import Policy


def open_world(
    environment: EnvironmentOptions, fmt: Format, policy: Policy, stop_ids: Sequence[int], seed: int
) -> World:
    """The world of some episodes."""
    speech = environment.speech(fmt, policy.tokenizer)
    bridge = Bridge.of(fmt, policy.tokenizer, stop_ids, environment.reply_tokens, speech)
    is_exact = policy.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    schedule: Literal["exact", "free"] = "exact" if is_exact else "free"
    return World(environment, bridge, policy.context, seed, schedule, understanding(speech, fmt))
