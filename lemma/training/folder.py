"""The folder of a run: what it is a run of, its metrics, its stages. Everything on disk is named here.

recipe.yaml                the resolved recipe
run.json                   digest of the recipe, threads, versions
run.log, tensorboard/      what was said and measured, for people
metrics.jsonl              one row per step and axis
stages/NAME/checkpoints/   whole states to go on from
stages/NAME/final/         the finished model; stages/NAME/done.json is written after it
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import JsonLines, write_whole

OWN_FILES = ("recipe.yaml", "run.json", "run.log", "metrics.jsonl", "wandb_run_id")
OWN_FOLDERS = ("stages", "tensorboard", "wandb", "journal")


class RunFolder:
    """Opens or creates the folder; holds a lock so that two processes never write to one run."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")
        except OSError as error:
            raise UserError(
                f"the run folder {path} cannot be written ({error.strerror})", fix="set run.dir to a folder of yours"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another process is working in {path}", fix="wait for it, or give this run another run.dir"
            ) from error
        self.metrics: JsonLines | None = None

    def begin(self, recipe_yaml: str, digest: str, threads: int, fresh: bool) -> int:
        """Start the run or go on with it; the number of threads to use (recorded at the first start)."""
        if fresh:
            self.clear()
        facts = self.facts()
        if facts is not None and facts["digest"] != digest:
            raise UserError(
                f"{self.path} holds a run of another recipe",
                fix="change run.dir, restore the recipe, or start anew with --fresh",
            )
        if facts is None:
            facts = {"digest": digest, "threads": threads, "created": time.strftime("%Y-%m-%dT%H:%M:%S"), **_versions()}
            write_whole(self.path / "recipe.yaml", recipe_yaml)
            write_whole(self.path / "run.json", json.dumps(facts, indent=1))
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        return int(facts["threads"])

    def facts(self) -> dict[str, Any] | None:
        path = self.path / "run.json"
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is broken", fix="start anew with --fresh, or change run.dir") from error

    def clear(self) -> None:
        """Remove what an earlier run wrote here, and nothing else."""
        for name in OWN_FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in OWN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def stage(self, name: str) -> Path:
        return self.path / "stages" / name

    def forget_after(self, stage: str, step: int) -> None:
        """Drop the rows of a stage's later steps, which a run that was killed wrote and this one will write again."""
        assert self.metrics is not None
        size = 0
        with open(self.metrics.path, "rb") as handle:
            for line in handle:
                row = json.loads(line)
                if row["stage"] == stage and row["step"] > step:
                    break
                size += len(line)
        self.metrics.truncate(size)

    def finish_stage(self, name: str, partial: Path, summary: Mapping[str, Any]) -> None:
        """Make a finished model visible under its final name, then mark the stage as done."""
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb") as handle:
                    os.fsync(handle.fileno())
        final = self.stage(name) / "final"
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        write_whole(self.stage(name) / "done.json", json.dumps(dict(summary), indent=1))

    def is_done(self, name: str) -> bool:
        return (self.stage(name) / "done.json").is_file() and self.final_model(name) is not None

    def final_model(self, name: str) -> Path | None:
        """The finished model of a stage, merged where it was trained as an adapter."""
        final = self.stage(name) / "final"
        for place in (final / "merged", final):
            if (place / "config.json").is_file():
                return place
        return None

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self._lock.close()


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
