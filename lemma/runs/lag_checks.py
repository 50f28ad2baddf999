"""Which engines can keep generating across updates of the learner. Imports no torch: a dry run stays fast."""

from __future__ import annotations

from collections.abc import Mapping

from lemma.core.errors import UserError
from lemma.engines.engine_options import NativeOptions
from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.runs.run_options import StageOptions


def check_flying(stages: Mapping[str, StageOptions]) -> None:
    """Refuse `rollout.lag: flying` for engines whose responses cannot continue after an update."""
    for name, stage in stages.items():
        rollout = getattr(stage, "rollout", None)
        if rollout is None or rollout.lag != "flying":
            continue
        engine = rollout.engine
        updates_in_flight = isinstance(engine, NativeOptions) or (
            isinstance(engine, VllmOptions) and engine.has_own_devices
        )
        if not updates_in_flight:
            who = f"responses of the engine {engine.name}"
            raise UserError(
                f"stages.{name}.rollout.lag: flying: {who} cannot continue after an update",
                fix="write `engine: native`, vLLM with `mode: server`, or `lag: 1`",
            )
