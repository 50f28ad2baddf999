"""Checkpoints that are whole or do not exist.

A save takes a snapshot to host memory and returns; a background thread writes it to a hidden folder, syncs, hashes and
renames it. A folder `step-N` is therefore complete, unless the disk itself lies: that is what the hashes are for. The
newest valid one is used; a broken one is reported and passed over. Safetensors and JSON, no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lemma.core.errors import UserError
from lemma.core.faults import fault_point
from lemma.core.files import sync_folder, write_whole
from lemma.learning.manifest import find_damage, fingerprint

FORMAT_VERSION = 1
TENSORS, STATE, MANIFEST, BEST = "tensors.safetensors", "state.json", "manifest.json", "best.json"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class BrokenCheckpoint(Exception):
    """What is wrong with a checkpoint on disk."""


class CheckpointStore:
    """The checkpoints of one stage: `keep` newest and the best. One write at a time, in the background."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None], recipes: Sequence[str] = ()):
        self.folder = folder
        self.keep = keep
        # Digests of the run's recipe, the newest first; a checkpoint of another one is no good. None: take any.
        self._recipes = recipes
        self._say = say
        self._best: dict[str, Any] | None = None
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    # --- writing -----------------------------------------------------------------------------------------------

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, prune: bool = True
    ) -> None:
        """Take a snapshot now and write it in the background; waits for an earlier write to end first."""
        self.wait()
        snapshot = {name: _to_host(tensor) for name, tensor in tensors.items()}
        own = {"step": step, "best": self._best} | ({"recipe": self._recipes[0]} if self._recipes else {})
        text = json.dumps({**own, **state}, indent=1, sort_keys=True)
        arguments = (step, snapshot, text, self._best, prune)
        self._writer = threading.Thread(target=self._write_guarded, args=arguments, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until what was saved is on disk; a failed write is raised here, as one sentence."""
        self.settle()
        self.check()

    def settle(self) -> None:
        """Until nothing is written any more, well or badly."""
        if self._writer is not None:
            if self._writer.ident is not None:  # an interrupt may come while it is being started
                self._writer.join()
            self._writer = None

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        if not isinstance(failure, OSError | SafetensorError):
            raise failure
        last = max(self.steps(), default=None)
        left = "there is no earlier one" if last is None else f"the one of step {last} is intact"
        reason = getattr(failure, "strerror", None) or str(failure)
        raise UserError(
            f"a checkpoint could not be written to {self.folder} ({reason}); {left}",
            fix="make room there and start the same command again",
        ) from failure

    def _write_guarded(
        self, step: int, snapshot: dict[str, torch.Tensor], text: str, best: dict[str, Any] | None, prune: bool
    ) -> None:
        partial = self.folder / f".partial-{step:08d}"
        try:
            self._write(step, partial, snapshot, text, best)
            if prune:
                self._prune()
        except Exception as error:  # noqa: BLE001 (raised again by `check`, in the thread that trains)
            shutil.rmtree(partial, ignore_errors=True)
            self._failure = error

    def _write(
        self, step: int, partial: Path, snapshot: dict[str, torch.Tensor], text: str, best: dict[str, Any] | None
    ) -> None:
        self._clear_partials()
        partial.mkdir(parents=True)
        save_file(snapshot, partial / TENSORS)
        fault_point("checkpoint.mid_write")
        (partial / STATE).write_text(text)
        files = {name: fingerprint(partial / name) for name in (TENSORS, STATE)}
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT_VERSION, "step": step, "files": files}, indent=1))
        fault_point("checkpoint.before_sync")
        for name in (TENSORS, STATE, MANIFEST):
            _sync_file(partial / name)
        sync_folder(partial)
        fault_point("checkpoint.before_rename")
        self._remove(step)
        os.replace(partial, self._path(step))
        fault_point("checkpoint.after_rename")
        sync_folder(self.folder)
        if best is not None:
            self._write_best(best)

    def _write_best(self, best: Mapping[str, Any]) -> None:
        write_whole(self.folder / BEST, json.dumps(best, sort_keys=True))

    def _prune(self) -> None:
        """Remove all but the newest `keep` and the best."""
        best = self.best()
        for step in sorted(self.steps(), reverse=True)[self.keep :]:
            if best is None or step != best["step"]:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, renamed first, so that a crash never leaves half of one."""
        if self._path(step).exists():
            doomed = self.folder / f".partial-removed-{step:08d}"
            os.replace(self._path(step), doomed)
            fault_point("checkpoint.pruning")
            shutil.rmtree(doomed)

    def _clear_partials(self) -> None:
        for leftover in self.folder.glob(".partial-*"):
            shutil.rmtree(leftover)

    def mark_best(self, step: int, score: float) -> None:
        """Remember which step is best. Call it before saving that step: the mark reaches the disk with it."""
        self._best = {"step": step, "score": score}

    def is_best(self, step: int) -> bool:
        """Whether this step was marked as the best so far."""
        return self._best is not None and self._best["step"] == step

    # --- reading -----------------------------------------------------------------------------------------------

    def best(self) -> dict[str, Any] | None:
        """Step and score of the best checkpoint on disk."""
        path = self.folder / BEST
        return json.loads(path.read_text()) if path.is_file() else None

    def steps(self) -> list[int]:
        """Steps with a checkpoint on disk, valid or not."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdigit())

    @property
    def oldest(self) -> int:
        """The earliest step that a run may have to go on from; 0 where there is none."""
        return min(self.steps()[-self.keep :], default=0)

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint; broken ones are reported, set aside and passed over.

        What it says about the best one holds again, whatever was marked after it.
        """
        for step in sorted(self.steps(), reverse=True):
            try:
                found = self.load(step)
            except BrokenCheckpoint as error:
                self._say(f"the checkpoint of step {step} is broken ({error}); using an earlier one")
                aside = self.folder / f"broken-{step:08d}"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self._path(step), aside)
                continue
            self._best = found.state["best"]
            if self._best is not None:
                self._write_best(self._best)
            return found
        return None

    def load(self, step: int) -> Checkpoint:
        """A verified checkpoint; raises BrokenCheckpoint."""
        path = self._path(step)
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if manifest["format"] != FORMAT_VERSION:
                raise BrokenCheckpoint(f"format {manifest['format']}, this version of Lemma reads {FORMAT_VERSION}")
            if manifest["files"].keys() != {TENSORS, STATE}:
                raise BrokenCheckpoint(f"its manifest names {', '.join(manifest['files']) or 'no files'}")
            damage = find_damage(path, manifest["files"])
            if damage is not None:
                raise BrokenCheckpoint(damage)
            state = json.loads((path / STATE).read_text())
            for found in (manifest["step"], state["step"]):
                if found != step:
                    raise BrokenCheckpoint(f"it is that of step {found}")
            if self._recipes and state.get("recipe", self._recipes[0]) not in self._recipes:
                raise BrokenCheckpoint("it is of a run of another recipe")
            return Checkpoint(step, load_file(path / TENSORS), state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise BrokenCheckpoint(str(error) or type(error).__name__) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory that later updates do not touch."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sync_file(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
