"""Weights & Biases, if a recipe names a project. Honours WANDB_MODE=offline and the other variables of wandb."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, StageEnded, StageStarted
from lemma.core.files import write_whole


def _run_id(run_dir: Path) -> str:
    """The id that every start of this run shares, so that a resumed run continues in the same place."""
    path = run_dir / "wandb_run_id"
    if not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class WeightsAndBiases:
    """Train and eval numbers of each stage, each against its own step: `<stage>/train_step`, `<stage>/eval_step`.

    Starts with the first stage, when the run folder is known to be this run's.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, recipe: Mapping[str, Any], say: Callable[[str], None]):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"run.wandb is '{project}' but wandb is not installed",
                fix="install it with `pip install wandb` or leave run.wandb out",
            ) from error
        self.troubles: tuple[type[Exception], ...] = (OSError, wandb.Error)
        self._folder, self._project, self._recipe, self._say = run_dir, project, recipe, say
        self._run: Any = None

    def _start(self) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=self._project,
                dir=self._folder,
                id=_run_id(self._folder),
                name=self._folder.name,
                resume="allow",
                config=dict(self._recipe),
                settings=wandb.Settings(console="off", silent=True),
            )
        except self.troubles as error:
            raise UserError(
                f"Weights & Biases does not start ({error})",
                fix="run `wandb login`, or set WANDB_MODE=offline, or leave run.wandb out",
            ) from error
        settings = self._run.settings
        place = f"offline; `wandb sync {settings.sync_dir}` uploads it" if settings.mode == "offline" else self._run.url
        self._say(f"Weights & Biases: {place}")

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            if self._run is None:
                self._start()
            for axis in ("train", "eval"):
                step = f"{event.stage}/{axis}_step"
                self._run.define_metric(step, hidden=True)
                self._run.define_metric(f"{event.stage}/{axis}/*", step_metric=step)
        elif self._run is None:
            return
        elif isinstance(event, Measured):
            row: dict[str, float] = {f"{event.stage}/{event.axis}_step": event.step}
            for name, value in {**event.values, **event.timings}.items():
                row[f"{event.stage}/{event.axis}/{name}"] = value
            self._run.log(row)
        elif isinstance(event, StageEnded):
            for name, value in event.summary.items():
                self._run.summary[f"{event.stage}/{name}"] = value

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
