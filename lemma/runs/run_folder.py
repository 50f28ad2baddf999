"""The folder of a run: its recipe, its metrics, its stages. Everything on disk is named here.

recipe.yaml                the resolved recipe
run.json                   digest of the recipe, threads, slots, versions
run.log, tensorboard/      what was said and measured, for people; logs/: what each further rank said
metrics.jsonl              one row per step and axis
stages/NAME/checkpoints/   whole states to go on from
stages/NAME/final/         the finished model; stages/NAME/done.json is written after it
.earlier/                  what a fresh start set aside, until a stage has begun
.doomed-N                  what is being deleted
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from lemma.config.document import in_yaml, leaves, read
from lemma.core.errors import UserError
from lemma.core.faults import fault_point
from lemma.core.files import JsonLines, from_json, leads_out, sync_folder, write_whole
from lemma.core.version import installed_version, lemma_version
from lemma.learning.manifest import find_damage
from lemma.runs.run_options import STAGE_NAME

OWN_FILES = ("recipe.yaml", "run.json", "run.log", "metrics.jsonl", "results.md", "report.html", "wandb_run_id")
OWN_FOLDERS = ("stages", "tensorboard", "wandb", "journal", "evaluations", "logs")
# In `.earlier`: the names that were set aside, written before the first of them is moved.
NAMES = "names.json"
DOOMED = ".doomed-"
EARLIER = ".earlier"
# In the folder of a stage: the ranks of its last start, what they shard, and the tokens they compute at a time.
LAYOUT = "layout.json"


class RunFolder:
    """Opens or creates the folder; holds a lock so that two processes never write to one run.

    A fresh start sets the earlier run aside and removes it only when a stage has really begun: a start that fails
    (wrong path, missing model) puts it back; if a process dies before that, the next opening of the folder does.
    Its paths are absolute: code of the user's own may change the working folder while files are written.
    """

    def __init__(self, path: Path, *, only_read: bool = False):
        self.given = path
        self.path = path.absolute()
        self.metrics: JsonLines | None = None
        self._lock: IO[str] | None = None
        self._aside = path / EARLIER
        # Digests of the recipe, newest first: a lengthened run has several.
        self.recipes: list[str] = []
        if not only_read:
            refuse_links(path)
            self._take_lock()
            self._remove_doomed()
            self.put_back()

    def _take_lock(self) -> None:
        path = self.given
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "a")
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

    def begin(
        self, recipe_yaml: str, digest: str, threads: int, *, fresh: Collection[str], slots: int = 1
    ) -> dict[str, Any]:
        """Start or resume the run; returns what was recorded at the first start, such as threads and slots.

        `fresh` names the stages to start over; all of them mean a new run.
        """
        if fresh and (self.path / "run.json").exists():
            self._set_aside(fresh)
        facts = self.facts()
        if facts is not None and facts["digest"] != digest and not self.has_begun():
            self.put_back()
            self._set_aside(())
            facts = None
        if facts is not None and facts["digest"] != digest:
            raise UserError(
                f"{self.given} holds a run of another recipe{self._difference(recipe_yaml)}",
                fix="change run.dir, restore the recipe, or start over with --fresh"
                + (" and all of its stages" if fresh else ""),
            )
        if facts is None:
            self._check_own_recipe(recipe_yaml)
            facts = {
                "digest": digest,
                "threads": threads,
                "slots": slots,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S"),
                **_versions(),
            }
            fault_point("folder.before_identity")
            write_whole(self.path / "run.json", json.dumps(facts, indent=1))
        self.recipes = [facts["digest"], *facts.get("earlier", [])]
        fault_point("folder.before_recipe")
        if not (self.path / "recipe.yaml").exists():
            write_whole(self.path / "recipe.yaml", recipe_yaml)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        return facts

    def follow(self, facts: Mapping[str, Any]) -> None:
        """Follow the first rank, which has begun the run, without writing anything."""
        self.recipes = [facts["digest"], *facts.get("earlier", [])]

    def _check_own_recipe(self, recipe_yaml: str) -> None:
        """Refuse to overwrite the user's own recipe in a folder that is not a run yet."""
        path = self.path / "recipe.yaml"
        if path.exists() and not (path.is_file() and path.read_bytes() == recipe_yaml.encode()):
            raise UserError(f"{path} would be overwritten by the run's own copy", fix="set run.dir to another folder")

    def facts(self) -> dict[str, Any] | None:
        path = self.path / "run.json"
        if not path.is_file():
            return None
        try:
            facts = from_json(path.read_text())
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or not {"digest", "threads"} <= facts.keys():
            raise UserError(f"{path} is broken", fix="start over with --fresh, or change run.dir")
        return facts

    def has_work(self, name: str) -> bool:
        """Whether this stage has a checkpoint, or is done."""
        return any((self.stage(name) / "checkpoints").glob("step-*")) or self.is_done(name)

    def has_begun(self) -> bool:
        """Whether there is any training here that a start under another recipe would lose."""
        stages = self.path / "stages"
        return any(stages.glob("*/checkpoints/step-*")) or any(stages.glob("*/done.json"))

    def _set_aside(self, fresh: Collection[str]) -> None:
        """Move the files of an earlier run out of the way: the whole run, or some of its stages."""
        stages = self.path / "stages"
        others = {p.name for p in stages.glob("*")} - set(fresh) if fresh else set()
        names = [f"stages/{name}" for name in fresh] if others else [*OWN_FILES, *OWN_FOLDERS]
        there = [name for name in names if (self.path / name).exists()]
        write_whole(self._aside / NAMES, json.dumps({"whole": not others, "names": there}))
        for name in there:
            (self._aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path / name, self._aside / name)
            fault_point("folder.set_aside")

    def put_back(self) -> None:
        """Undo a fresh start that failed. If interrupted, it can be repeated."""
        if not (self._aside / NAMES).is_file():  # nothing was moved yet
            self._doom(self._aside)
            return
        is_whole, names = self._names_aside()
        new = [*OWN_FILES, *OWN_FOLDERS] if is_whole else []
        for name in [*new, *names]:
            kept, target = self._aside / name, self.path / name
            if kept.exists() or name not in names:
                self._doom(target)
            if kept.exists():
                target.parent.mkdir(exist_ok=True)
                os.replace(kept, target)
                fault_point("folder.put_back")
        self._doom(self._aside)

    def _names_aside(self) -> tuple[bool, list[str]]:
        """Whether a whole run was set aside, and which of its names; the folder may be from anybody."""
        path = self._aside / NAMES
        try:
            aside = from_json(path.read_text(encoding="utf-8"))
            is_whole, names = bool(aside["whole"]), list(aside["names"])
            if all(name in (*OWN_FILES, *OWN_FOLDERS) or re.fullmatch(f"stages/{STAGE_NAME}", name) for name in names):
                return is_whole, names
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise UserError(
            f"{path} is damaged: it does not say what a fresh start set aside",
            fix=f"move what you need out of {self._aside}, then remove that folder",
        )

    def stage_began(self) -> None:
        """A stage has really begun: remove what was set aside."""
        self._doom(self._aside)

    def remove(self, path: Path) -> None:
        """Delete something that the run no longer needs, such as an old checkpoint."""
        self._doom(path)

    def _doom(self, path: Path) -> None:
        """Delete a file or a folder; a crash never leaves part of it under its name."""
        if path.exists():
            numbers = itertools.count()
            os.replace(path, next(free for n in numbers if not (free := self.path / f"{DOOMED}{n}").exists()))
            sync_folder(self.path)
            fault_point("folder.doomed")
            self._remove_doomed()

    def _remove_doomed(self) -> None:
        """Files that a file system keeps while they are open stay until a later start."""
        for doomed in self.path.glob(f"{DOOMED}*"):
            for path in [*sorted(doomed.iterdir()), doomed] if _is_folder(doomed) else [doomed]:
                shutil.rmtree(path, ignore_errors=True) if _is_folder(path) else path.unlink()
                fault_point("folder.deleting")

    def recipe(self) -> Any:
        """The values of the run's recipe; None if they cannot be read."""
        try:
            return read(self.path / "recipe.yaml").data
        except UserError:
            return None

    def _difference(self, recipe_yaml: str) -> str:
        """Which key differs first from the recipe of the run, as `: key was X, is Y`."""
        before = self.recipe()
        if before is None:
            return ""
        was, now = leaves(before), leaves(yaml.safe_load(recipe_yaml))
        # What only one of them has may be an option that came to Lemma, or left it, in between.
        for key in sorted([*now, *was], key=lambda key: key not in was or key not in now):
            if key != "run.dir" and was.get(key) != now.get(key):
                before, after = (in_yaml(one[key]) if key in one else "not there" for one in (was, now))
                return f" ({key} was {before}, is {after})"
        return ""

    def shown(self, path: Path) -> Path:
        """A path in this folder, as the user would write it."""
        return self.given / path.relative_to(self.path)

    def stage(self, name: str) -> Path:
        return self.path / "stages" / name

    def count_rows(self, stage: str, step: int) -> int:
        """Number of metrics rows that a stage has written up to a step."""
        assert self.metrics is not None
        places = map(_place, self.metrics.path.read_bytes().splitlines())
        return sum(1 for place in places if place is not None and place[0] == stage and place[1] <= step)

    def forget_after(self, stage: str, step: int) -> None:
        """Drop the rows of a stage's later steps, which a killed run wrote and this one will write again."""
        assert self.metrics is not None
        lines = self.metrics.path.read_bytes().splitlines(keepends=True)
        places = [_place(line) for line in lines]
        void = [place is None or (place[0] == stage and place[1] > step) for place in places]
        first = void.index(True) if True in void else len(void)
        if all(void[first:]):
            self.metrics.truncate(sum(map(len, lines[:first])))
        else:  # another stage wrote in between
            self.metrics.close()
            write_whole(self.metrics.path, b"".join(line for line, gone in zip(lines, void, strict=True) if not gone))
            self.metrics = JsonLines(self.metrics.path)

    def finish_stage(
        self, name: str, partial: Path, files: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]
    ) -> None:
        """Make a finished model of these files, which are on the disk, visible under its final name, then mark the
        stage as done."""
        done, final = self.stage(name) / "done.json", self.stage(name) / "final"
        content = json.dumps({**summary, "files": files}, indent=1)
        done.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        write_whole(done, content)

    def is_done(self, name: str) -> bool:
        return (self.stage(name) / "done.json").is_file() and self.final_model(name) is not None

    def final_model(self, name: str) -> Path | None:
        """The finished model of a stage; of one that was trained as an adapter, the merged one if it was written."""
        final = self.stage(name) / "final"
        for place, settings in (("merged", "config.json"), (".", "config.json"), ("adapter", "adapter_config.json")):
            if (final / place / settings).is_file():
                return final / place
        return None

    def checked_model(self, name: str) -> Path | None:
        """The same, after verifying that every byte is what the stage wrote."""
        place, done = self.final_model(name), self.stage(name) / "done.json"
        if place is None:
            return None
        try:
            files = {
                self.stage(name) / "final" / file: mark for file, mark in from_json(done.read_text())["files"].items()
            }
            used = {str(path.relative_to(place)): mark for path, mark in files.items() if path.is_relative_to(place)}
            damage = find_damage(place, used) if used else "done.json names no files"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            damage = "done.json does not say what was written"
        if damage is not None:
            raise UserError(
                f"the model of stage {name} in {place} is damaged: {damage}",
                fix=f"remove {done} and train again: the stage writes its model again from its last checkpoint",
            )
        return place

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self._lock is not None:
            self._lock.close()


def refuse_links(run: Path) -> None:
    """Refuse a run folder in which a link leads outside, or a file that is written to is none: a folder from somebody
    else must not have anything written, moved or removed elsewhere. The run folder itself may be a link.

    The folder of each session of Weights & Biases holds a link to a log of its own. Nothing is written there again, and
    what is removed is not followed.
    """
    sessions = (run / "wandb", run / EARLIER / "wandb")
    for place, folders, names in os.walk(run):
        for path in (os.path.join(place, name) for name in (*folders, *names)):
            if leads_out(path, run):
                raise UserError(
                    f"{path} is a link that leads out of the run folder",
                    fix="put what it leads to in its place, or make the whole run folder a link",
                )
        if Path(place) in sessions:
            folders.clear()
        elif place == str(run):
            folders[:] = [name for name in folders if not name.startswith(DOOMED)]
    refuse_odd_files(run)


def refuse_odd_files(run: Path) -> None:
    """Refuse a run folder with a pipe, a device or a folder in the place of a file: it would be read without end."""
    own = [str(run / name) for name in (".lock", *OWN_FILES)]
    for place, folders, names in os.walk(run):
        if place == str(run / "wandb"):
            folders.clear()
        for path in (*(os.path.join(place, name) for name in names), *(own if place == str(run) else ())):
            if os.path.exists(path) and not os.path.isfile(path):
                raise UserError(f"{path} is not a file", fix="remove it, or give this run another run.dir")


def _place(line: bytes) -> tuple[str, int] | None:
    """Stage and step of a metrics row; None for a line that is not one."""
    try:
        row = from_json(line)
        return str(row["stage"]), int(row["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _versions() -> dict[str, str]:
    import torch
    import transformers

    found = {"lemma": lemma_version(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    flash = installed_version("flash-attn-4")
    return found if flash is None else found | {"flash-attn-4": flash}
