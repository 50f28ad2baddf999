"""Weights & Biases, where a recipe names a project. Honours WANDB_MODE=offline and the other variables of wandb."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, StageEnded, StageStarted
from lemma.core.files import write_whole


def _run_id(run_dir: Path) -> str:
    """The id that every start of this run shares, so that a resumed run goes on in the same place."""
    path = run_dir / "wandb_run_id"
    if not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class WeightsAndBiases:
    """Train and eval numbers of each stage, each against its own step: `<stage>/train_step`, `<stage>/eval_step`."""

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, recipe: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"run.wandb is '{project}' but wandb is not installed",
                fix="install it with `pip install wandb` or leave run.wandb out",
            ) from error
        self.troubles: tuple[type[Exception], ...] = (OSError, wandb.Error)
        try:
            self._run = wandb.init(
                project=project,
                dir=run_dir,
                id=_run_id(run_dir),
                name=run_dir.name,
                resume="allow",
                config=dict(recipe),
                settings=wandb.Settings(console="off", silent=True),
            )
        except self.troubles as error:
            raise UserError(
                f"Weights & Biases does not start ({error})",
                fix="run `wandb login`, or set WANDB_MODE=offline, or leave run.wandb out",
            ) from error

    @property
    def place(self) -> str:
        """Where to look at the run."""
        if self._run.settings.mode == "offline":
            return f"offline, upload later with `wandb sync {self._run.settings.sync_dir}`"
        return str(self._run.url)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            for axis in ("train", "eval"):
                step = f"{event.stage}/{axis}_step"
                self._run.define_metric(step, hidden=True)
                self._run.define_metric(f"{event.stage}/{axis}/*", step_metric=step)
        elif isinstance(event, Measured):
            row: dict[str, float] = {f"{event.stage}/{event.axis}_step": event.step}
            for name, value in {**event.values, **event.timings}.items():
                row[f"{event.stage}/{event.axis}/{name}"] = value
            self._run.log(row)
        elif isinstance(event, StageEnded):
            for name, value in event.summary.items():
                self._run.summary[f"{event.stage}/{name}"] = value

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
