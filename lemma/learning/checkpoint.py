"""Checkpoints that are whole or do not exist.

A save takes a snapshot to host memory and returns; in the background it is written to a hidden folder, hashed, synced
and renamed, many bytes in several files at once. A folder `step-N` is therefore complete, unless the disk itself lies:
that is what the hashes are for. The newest valid one is used; a broken one is reported and passed over. Safetensors and
JSON, no pickle.

Several ranks write files of their own, in the background too. When all of them say that theirs are on disk, which they
are asked after every step, the first rank writes the manifest and renames the folder. Any number of ranks reads it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.core.faults import fault_point
from lemma.core.files import from_json, sync_folder, write_whole
from lemma.core.ranks import from_leader, is_leader, rank, together, world_size
from lemma.core.whole_files import sync_file
from lemma.learning.manifest import find_damage, fingerprint
from lemma.learning.tensor_files import to_host, write_tensors

# 1: one file of whole tensors. 2: several files, or tensors in pieces, which are named by where they begin.
FORMATS = (1, 2)
STATE, MANIFEST, BEST = "state.json", "manifest.json", "best.json"
TENSOR_FILE = re.compile(r"tensors(-\d+)?\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that ranks are writing; `state` is everything but the tensors."""

    step: int
    partial: Path
    state: str
    best: dict[str, Any] | None
    prune: bool


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
        # Whether something was saved whose end `check` has not seen.
        self.is_saving = False
        # The earliest step that a run may have to go on from; 0 where there is none.
        self.oldest = self._find_oldest()
        # What all ranks write together, and the marks of this rank's files once they are on disk.
        self._pending: _Pending | None = None
        self._written: dict[str, dict[str, Any]] | None = None

    # --- writing -----------------------------------------------------------------------------------------------

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, prune: bool = True
    ) -> None:
        """Take a snapshot now and write it in the background; waits for an earlier write to end first."""
        self.wait()
        snapshot = to_host(tensors)
        own = {"step": step, "best": self._best} | ({"recipe": self._recipes[0]} if self._recipes else {})
        text = json.dumps({**own, **state}, indent=1, sort_keys=True)
        pending = _Pending(step, self.folder / f".partial-{step:08d}", text, self._best, prune)
        if world_size() > 1:
            from_leader(lambda: self._begin(pending), "the folder of a checkpoint")
            self._pending, self._written = pending, None
        target = self._write_guarded if world_size() == 1 else self._write_part_guarded
        self._writer = threading.Thread(target=target, args=(pending, snapshot), name="checkpoint")
        self.is_saving = True
        self._writer.start()

    def wait(self) -> None:
        """Until what was saved is on disk; a failed write is raised here, as one sentence."""
        self.settle()
        self.check()

    def _begin(self, pending: _Pending) -> None:
        try:
            self._clear_partials()
            pending.partial.mkdir(parents=True)
        except OSError as error:
            self._failure = error
        self._raise_failure()

    def settle(self) -> None:
        """Until nothing is written any more, well or badly."""
        if self._writer is not None:
            if self._writer.ident is not None:  # an interrupt may come while it is being started
                self._writer.join()
            self._writer = None

    def check(self) -> None:
        """Raise what went wrong in the background, here or on another rank, if anything did; complete what all ranks
        have written."""
        pending = self._pending
        if pending is None:
            self.is_saving = self._writer is not None and self._writer.is_alive()
            self._raise_failure()
            return

        def own_part() -> dict[str, dict[str, Any]] | None:
            self._raise_failure()
            return self._written

        try:
            parts = together(own_part, "a checkpoint")
            if None not in parts:
                self._pending = None
                files = {name: mark for part in parts for name, mark in (part or {}).items()}
                from_leader(lambda: self._complete(pending, files), "a checkpoint")
        except UserError:
            self._pending = None
            if is_leader():
                shutil.rmtree(pending.partial, ignore_errors=True)
            raise

    def _raise_failure(self) -> None:
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

    def _write_guarded(self, pending: _Pending, snapshot: dict[str, torch.Tensor]) -> None:
        try:
            self._clear_partials()
            pending.partial.mkdir(parents=True)
            files = write_tensors(pending.partial, snapshot)
            self._finish(pending, files, is_whole=len(files) == 1 and not _has_pieces(snapshot))
        except Exception as error:  # noqa: BLE001 (raised again by `check`, in the thread that trains)
            shutil.rmtree(pending.partial, ignore_errors=True)
            self._failure = error

    def _write_part_guarded(self, pending: _Pending, snapshot: dict[str, torch.Tensor]) -> None:
        """Write this rank's files; the others may be at work meanwhile, and nothing of theirs is touched."""
        try:
            self._written = write_tensors(pending.partial, snapshot)
        except Exception as error:  # noqa: BLE001 (raised again by `check`, in the thread that trains)
            self._failure = error

    def _complete(self, pending: _Pending, files: dict[str, dict[str, Any]]) -> None:
        """The first rank's last part, once the files of all ranks are there."""
        try:
            self._finish(pending, files, is_whole=False)
        except (OSError, SafetensorError) as error:
            self._failure = error
        self._raise_failure()

    def _finish(self, pending: _Pending, files: dict[str, dict[str, Any]], *, is_whole: bool) -> None:
        """Write everything but the tensors, sync, and give the folder its name."""
        partial, step = pending.partial, pending.step
        (partial / STATE).write_text(pending.state)
        files[STATE] = fingerprint(partial / STATE)
        facts = {"format": 1 if is_whole else 2, "step": step, "files": files}
        (partial / MANIFEST).write_text(json.dumps(facts, indent=1))
        fault_point("checkpoint.before_sync")
        for name in (STATE, MANIFEST):
            sync_file(partial / name)
        sync_folder(partial)
        fault_point("checkpoint.before_rename")
        self._remove(step)
        os.replace(partial, self._path(step))
        fault_point("checkpoint.after_rename")
        sync_folder(self.folder)
        if pending.best is not None:
            self._write_best(pending.best)
        if pending.prune:
            self._prune()
        self.oldest = self._find_oldest()

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

    def mark_best(self, step: int, score: float, metric: str) -> None:
        """Remember which step is best. Call it before saving that step: the mark reaches the disk with it."""
        self._best = {"step": step, "score": score, "metric": metric}

    def is_best(self, step: int) -> bool:
        """Whether this step was marked as the best so far."""
        return self._best is not None and self._best["step"] == step

    # --- reading -----------------------------------------------------------------------------------------------

    def best(self) -> dict[str, Any] | None:
        """Step, score and its metric of the best checkpoint on disk."""
        path = self.folder / BEST
        return from_json(path.read_text()) if path.is_file() else None

    def steps(self) -> list[int]:
        """Steps with a checkpoint on disk, valid or not."""
        steps = (int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdecimal())
        return sorted(step for step in steps if self._path(step).exists())

    def _find_oldest(self) -> int:
        return min(self.steps()[-self.keep :], default=0)

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint; broken ones are reported, set aside and passed over, by the first rank.

        What it says about the best one holds again, whatever was marked after it.
        """
        held: list[Checkpoint | None] = []

        def look() -> int | None:
            self._clear_partials()  # of a run that died while it removed its last one
            held.append(self._newest())
            return None if held[0] is None else held[0].step

        step = from_leader(look, "the newest checkpoint")

        def follow() -> None:
            if not held:
                held.append(None if step is None else self._read_too(step))

        together(follow, "the newest checkpoint")
        checkpoint = held[0]
        self.oldest = self._find_oldest()
        if checkpoint is not None:
            self._best = checkpoint.state["best"]
        return checkpoint

    def _read_too(self, step: int) -> Checkpoint:
        """The same on another rank, which finds what the first one has found valid."""
        try:
            return self.load(step, verify=False)
        except BrokenCheckpoint as error:
            raise UserError(
                f"rank {rank()} cannot read the checkpoint of step {step} in {self.folder} ({error}), and rank 0 can",
                fix="see that all ranks may read everything in the run folder, and have memory for it",
            ) from error

    def _newest(self) -> Checkpoint | None:
        for step in sorted(self.steps(), reverse=True):
            try:
                checkpoint = self.load(step)
            except BrokenCheckpoint as error:
                self._say(f"the checkpoint of step {step} is broken ({error}); using an earlier one")
                aside = self.folder / f"broken-{step:08d}"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self._path(step), aside)
                continue
            if checkpoint.state["best"] is not None:
                self._write_best(checkpoint.state["best"])
            return checkpoint
        return None

    def load(self, step: int, *, verify: bool = True) -> Checkpoint:
        """A checkpoint, verified unless somebody did that already; raises BrokenCheckpoint."""
        path = self._path(step)
        try:
            manifest = from_json((path / MANIFEST).read_text())
            if manifest["format"] not in FORMATS:
                raise BrokenCheckpoint(
                    f"format {manifest['format']}, this version of Lemma reads {FORMATS[-1]} and less"
                )
            names = sorted(manifest["files"].keys() - {STATE})
            if len(names) == len(manifest["files"]) or not names or any(not TENSOR_FILE.fullmatch(n) for n in names):
                raise BrokenCheckpoint(f"its manifest names {', '.join(manifest['files']) or 'no files'}")
            damage = find_damage(path, manifest["files"]) if verify else None
            if damage is not None:
                raise BrokenCheckpoint(damage)
            state = from_json((path / STATE).read_text())
            for found in (manifest["step"], state["step"]):
                if found != step:
                    raise BrokenCheckpoint(f"it is that of step {found}")
            if self._recipes and state.get("recipe", self._recipes[0]) not in self._recipes:
                raise BrokenCheckpoint("it is of a run of another recipe")
            tensors = {name: tensor for file in names for name, tensor in load_file(path / file).items()}
            return Checkpoint(step, tensors, state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise BrokenCheckpoint(str(error) or type(error).__name__) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _has_pieces(tensors: Mapping[str, torch.Tensor]) -> bool:
    return any("@" in name for name in tensors)
