"""The final model of a stage, with its card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from lemma.core.errors import UserError
from lemma.learning.divergence import check_written
from lemma.learning.manifest import sync_and_mark
from lemma.models.places import TINY, lasting
from lemma.models.policy import Policy
from lemma.runs.joined_adapters import put_on_base
from lemma.runs.model_card import stages_until, write_cards

if TYPE_CHECKING:
    from lemma.runs.stage import Stage


def write_final_model(stage: Stage, policy: Policy, partial: Path) -> dict[str, dict[str, Any]]:
    """Have the model on the disk, in a hidden folder; its files, as `done.json` knows them."""
    shutil.rmtree(partial, ignore_errors=True)
    try:
        policy.save(partial, merged=_merges(stage))
        if policy.is_adapter and stage.start_from is not None:
            _put_on_base(stage, partial / "adapter")
        check_written(partial)
        write_cards(partial, stage.recipe, stage.name, stage.folder.path)
        return sync_and_mark(partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the model of stage {stage.name} could not be written ({error}); its checkpoints are intact",
            fix="make room there and start the same command again",
        ) from error


def _put_on_base(stage: Stage, adapter: Path) -> None:
    lora, earlier = stage.model.lora, list(stages_until(stage.recipe, stage.name))[:-1]
    assert lora is not None
    folders = [stage.folder.stage(name) / "final" / "adapter" for name in earlier]
    if not put_on_base(adapter, folders, lora.r, lasting(stage.model.path), stage.model.revision):
        stage.warn(
            f"the adapter of stage {stage.name} belongs on the model of stage {earlier[-1]}, not on the recipe's: not "
            "all of their adapters are there and purely low-rank"
        )


def _merges(stage: Stage) -> bool:
    """Whether the final model of an adapter is also written with the adapter merged in."""
    lora = stage.model.lora
    return lora is not None and (lora.merged or stage.is_continued or stage.model.path == TINY)
