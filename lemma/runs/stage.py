"""What every stage needs besides its loop: resuming, logging metrics, saving, stopping cleanly, and its final model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from lemma.core import outside
from lemma.core.errors import UserError
from lemma.core.events import Axis, Measured, Progressed, Said, Sink, StageEnded, StageStarted
from lemma.core.faults import fault_point
from lemma.core.files import write_whole
from lemma.core.random import key
from lemma.core.ranks import from_leader, gather_over_ranks, is_leader, slots, world_size
from lemma.core.roll_call import check_alike
from lemma.learning.checkpoint import Checkpoint, CheckpointStore
from lemma.learning.divergence import Diverged, check_finite
from lemma.learning.learner import Learner
from lemma.learning.optimiser import Split
from lemma.learning.weight_split import whole_policy
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.runs.clock import Clock
from lemma.runs.final_model import write_final_model
from lemma.runs.ingredients import BASE, ingredients
from lemma.runs.run_folder import LAYOUT, RunFolder
from lemma.runs.run_options import StageOptions
from lemma.runs.stopping import StopNow, Stopped, StopSignal
from lemma.runs.waits import Waits

# Separates the name of a kept part from that of its tensor in a checkpoint; the learner's own tensors have no part.
PART = "//"
LOSS = "loss"
"""What chooses the best checkpoint where no metric does."""


class Stateful(Protocol):
    """What a stage saves besides its learner: a controller, a critic, a position in the data. Tensors may be empty."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...
    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None: ...


class Stage:
    """One stage of a run, as its loop sees it."""

    def __init__(
        self,
        name: str,
        options: StageOptions,
        model: ModelOptions,
        folder: RunFolder,
        sink: Sink,
        stop: StopSignal,
        *,
        seed: int,
        device: torch.device,
        start_from: Path | None,
        earlier: Sequence[str],
        recipe: Mapping[str, Any],
        shard: Split = "none",
        is_continued: bool = False,
        taught_in: str | None = None,
    ):
        # What the learners of this stage shard across the ranks.
        self.shard = shard
        self.name, self.options, self.model, self.folder = name, options, model, folder
        self.seed, self.device, self.start_from = seed, device, start_from
        # Whether a later stage of the recipe starts from this one's model.
        self.is_continued = is_continued
        # The supervised stage that it builds on.
        self.taught_in = taught_in
        # Names of the earlier stages, in the order of the recipe.
        self.earlier = earlier
        self.clock = Clock()
        self.emit, self._stop, self.recipe = sink, stop, recipe
        checkpoints = folder.stage(name) / "checkpoints"
        self.store = CheckpointStore(checkpoints, options.checkpoint.keep, self.warn, folder.recipes)
        # The best score so far and what it is of; lower is better for a loss only.
        self._best: tuple[str, float] | None = None
        self._data = ""
        # Fingerprints of what it depends on besides the data, and how many metrics rows it has written.
        self._ingredients: dict[str, str] = {}
        self._rows = 0
        self._kept: dict[str, Stateful] = {}
        # Waits for files that a checkpoint's step must have on disk, if they are written in the background.
        self.before_saving: Callable[[], None] = lambda: None
        # The step after which metrics rows are void; None once they are dropped.
        self._forget_after: int | None = None
        # A checkpoint was due while updates were skipped.
        self._is_owed = False
        # Evaluations that a stop interrupted, and rows to be written after theirs.
        self._unmeasured: list[str] = []
        self._is_behind = False
        self._rows_after: list[dict[str, Any]] = []
        self._went_on = time.perf_counter()
        self._is_resumed = False
        self._waits = Waits(name, sink)
        self.waiting = self._waits.within

    @property
    def learner_seed(self) -> int:
        """The seed of adapters at their start, and of dropout: a stage that starts from another one's model has its
        own."""
        return self.seed if self.start_from is None else key(self.seed, self.name)

    # --- telling -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.emit(Said(text))

    def warn(self, text: str) -> None:
        self.emit(Said(text, "warning"))

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self._waits.now:
            self._waits.end_all()
        self.emit(Progressed(self.name, done, total, note))

    def measure(
        self, step: int, axis: Axis, values: Mapping[str, float], timings: Mapping[str, float], bottleneck: str = ""
    ) -> None:
        """Write a metrics row and emit it as an event. Timings are kept apart: only they, and the name of the
        bottleneck, differ between repetitions."""
        self._begin()
        apart = {**timings, "held_by": bottleneck} if bottleneck else dict(timings)
        row = {"stage": self.name, "step": step, "axis": axis, **values, "timings": apart}
        if self._unmeasured and axis == "train":
            self._rows_after.append(row)
        else:
            self._write(row)
        self.emit(Measured(self.name, step, axis, values, timings, bottleneck))

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.folder.metrics is not None:  # the first rank's
            self.folder.metrics.append(row)
        self._rows += 1

    # --- evaluations that a stop may break off -----------------------------------------------------------------

    @contextmanager
    def precomputing(self) -> Iterator[None]:
        """Context before the first step in which a stop ends the run at once."""
        try:
            with self._stop.at_once():
                yield
        except StopNow:
            raise Stopped from None

    def evaluate(self, name: str, step: int, run: Callable[[], Mapping[str, float]]) -> Mapping[str, float] | None:
        """The metrics of an evaluation, written as a row; None if a stop interrupted it.

        The stage is then saved without them, and the next start evaluates before it trains.
        """
        try:
            with self._stop.at_once(), self.waiting(f"evaluating ({name})"):
                values = run()
        except StopNow:
            if step == 0:
                raise Stopped from None
            self._unmeasured.append(name)
            return None
        self.measure(step, "eval", values, {})
        return values

    def owes(self, name: str) -> bool:
        """Whether this evaluation of the last step was interrupted; asking clears it."""
        owed = name in self._unmeasured
        if owed:
            self._unmeasured.remove(name)
        return owed

    def catch_up(self, learner: Learner, step: int, total: int) -> None:
        """After the interrupted evaluations have been redone: write the rows that come after theirs, and save if that
        is now due."""
        if not self._is_behind:
            return
        if self._unmeasured:  # interrupted again
            self.save(learner, step)
            self.store.wait()
            raise Stopped
        for row in self._rows_after:
            self._write(row)
        self._rows_after, self._is_behind = [], False
        if self.store.is_best(step) or self.is_due(self.options.checkpoint.every, step, total):
            self.save(learner, step)

    # --- going on ----------------------------------------------------------------------------------------------

    def keep(self, name: str, part: Stateful) -> None:
        """Save this part in every checkpoint, and load it when the stage resumes."""
        self._kept[name] = part

    def resume(self, learner: Learner, total: int, data: str) -> int:
        """Load the newest checkpoint, if any, and drop what was written after it. Returns the step to resume from.

        `data` is a digest of the training data; a resumed run must find the same.
        """
        self._data = data
        checkpoint = self.store.newest()
        self._ingredients = ingredients(self.options, self.model, self.start_from, self.recipe.get("format"))
        if world_size() > 1:
            marks = {"the data": data, "the newest checkpoint": "" if checkpoint is None else str(checkpoint.step)}
            # The weights it starts from were compared.
            marks |= {what: mark for what, mark in self._ingredients.items() if what != BASE}
            check_alike(marks, f"stage {self.name}")
        if checkpoint is not None:
            self._check_same(checkpoint)
            learner.load(_of_part("", checkpoint.tensors), checkpoint.state["learner"])
            for name, part in self._kept.items():
                part.load(_of_part(f"{name}{PART}", checkpoint.tensors), checkpoint.state["kept"][name])
            best = checkpoint.state["best"]
            self._best = None if best is None else (best.get("metric", LOSS), best["score"])
        self._record_layout(learner)
        step = 0 if checkpoint is None else checkpoint.step
        self._forget_after = -1 if checkpoint is None else step
        self._is_resumed = checkpoint is not None
        self.emit(StageStarted(self.name, step, total, resumed=self._is_resumed, recipe=self.recipe))
        if self.device.type == "cuda" or self.model.compile:
            self._waits.begin("the first step, which compiles kernels")
        self.clock = Clock()
        self._went_on = time.perf_counter()
        return step

    def _record_layout(self, learner: Learner) -> None:
        """Record what memory use and precision depend on besides the recipe."""
        recomputed = learner.policy.recomputed if isinstance(learner.policy, Policy) else 0
        layout: dict[str, Any] = {"ranks": world_size(), "slots": slots(), "shard": self.shard}
        layout |= {"token_budget": learner.token_budget, "precision": str(learner.policy.dtype).removeprefix("torch.")}
        path = self.folder.stage(self.name) / LAYOUT
        from_leader(lambda: write_whole(path, json.dumps(layout | {"recomputed": recomputed})), "the stage's folder")

    def _check_same(self, checkpoint: Checkpoint) -> None:
        """Refuse to resume with inputs other than those the stage began with; warn if metrics rows are missing."""
        if checkpoint.state["data"] != self._data:
            raise UserError(
                f"the data of stage {self.name} are not those it was trained on until step {checkpoint.step}",
                fix="restore them, or start over with --fresh",
            )
        for what, mark in checkpoint.state.get("ingredients", {}).items():
            if self._ingredients.get(what) != mark:
                raise UserError(
                    f"{what} is not what stage {self.name} was trained with until step {checkpoint.step}",
                    fix="restore its files, or start over with --fresh",
                )
        self._rows = checkpoint.state.get("rows", 0)
        self._unmeasured = list(checkpoint.state.get("unmeasured", []))
        self._rows_after = list(checkpoint.state.get("rows_after", []))
        self._is_behind = bool(self._unmeasured)
        lost = self._rows - self.folder.count_rows(self.name, checkpoint.step) if is_leader() else 0
        if lost > 0:
            self.warn(
                f"metrics.jsonl lacks {lost} of the {self._rows} rows that stage {self.name} wrote until step "
                f"{checkpoint.step}; its curves have a gap, and nothing else is lost"
            )

    def _begin(self) -> None:
        """Once there is something to show, drop what was written after the checkpoint, and an earlier run that a fresh
        start set aside: a start that fails before this has changed nothing."""
        if self._forget_after is not None and is_leader():
            self.folder.stage_began()  # comes first: until then an earlier run, with all of its rows, may be put back
            self.folder.forget_after(self.name, self._forget_after)
        self._forget_after = None

    def is_due(self, every: int, step: int, total: int) -> bool:
        """Every `every` steps, and always at the last one."""
        return step == total or (every > 0 and step % every == 0)

    def save_if_due(self, learner: Learner, step: int, total: int, is_best: bool = False) -> None:
        """Save on schedule, at the end and when the score is the best so far; stop if requested.

        While updates are skipped the weights may be corrupt: the schedule waits, and no earlier checkpoint is removed.
        """
        self._begin()
        if self.store.is_saving:
            self.store.check()
        asked = any(gather_over_ranks(self._stop.asked, "whether to stop"))
        due = self._is_owed or self.is_due(self.options.checkpoint.every, step, total)
        learners = [learner, *(part for part in self._kept.values() if isinstance(part, Learner))]
        healthy = not any(one.skipped for one in learners)
        self._is_owed = due and not healthy
        if is_best or asked or (due and healthy):
            with self.clock.measure("checkpoint"):
                self.save(learner, step, prune=healthy)
        fault_point("stage.step_end")
        if asked and (step < total or self._unmeasured):
            self.store.wait()
            raise Stopped

    def save(self, learner: Learner, step: int, *, prune: bool = True) -> None:
        if outside.is_fork:
            outside.end_fork()
        self.before_saving()
        if self.folder.metrics is not None:
            self.folder.metrics.sync()
        tensors, state = learner.state()
        kept: dict[str, Any] = {}
        for name, part in self._kept.items():
            own, kept[name] = part.state()
            if is_leader() or isinstance(part, Learner):  # everything else is the same on all ranks
                tensors |= {f"{name}{PART}{key}": tensor for key, tensor in own.items()}
        same = {"data": self._data, "ingredients": self._ingredients, "rows": self._rows}
        same |= {"unmeasured": self._unmeasured, "rows_after": self._rows_after}
        self.store.save(step, tensors, {"learner": state, "kept": kept, **same}, prune=prune)

    def note_score(self, step: int, score: float, metric: str = LOSS) -> bool:
        """Remember the score of a step, the loss or a metric that is better when higher; returns whether it is the best
        so far."""
        known = self._best[1] if self._best is not None and self._best[0] == metric else None
        if not math.isfinite(score) or (known is not None and not _is_better(score, known, metric)):
            return False
        self._best = (metric, score)
        self.store.mark_best(step, score, metric)
        return True

    def finish(self, policy: Policy, step: int, summary: Mapping[str, Any]) -> None:
        """Write the final model, whole, while the last checkpoint is written, and mark the stage as done."""
        self._begin()
        self._waits.begin("writing the last checkpoint and the model")
        partial = self.folder.stage(self.name) / ".final.partial"
        try:
            check_finite(policy)
            written = whole_policy(policy) if policy.is_split else policy
            files = from_leader(lambda: write_final_model(self, written or policy, partial), "the final model")
        except UserError:
            self.store.wait()
            raise
        self.store.wait()

        def give_name() -> None:
            fault_point("stage.before_final_rename")
            self.folder.finish_stage(self.name, partial, files, {"step": step, **summary})

        from_leader(give_name, "the final model's name")
        self.emit(StageEnded(self.name, step, {**summary, **self._reached()}, self._is_resumed))

    def _reached(self) -> dict[str, Any]:
        """Summary of a finished stage: its best score, its duration in this process, and where the model is."""
        facts: dict[str, Any] = {"seconds": time.perf_counter() - self._went_on}
        if self._best is not None:
            facts |= {f"best {self._best[0]}": self._best[1]}
        final = self.folder.final_model(self.name)
        return {**facts, "model": str(final and self.folder.shown(final))}

    def explain(self, error: Diverged) -> UserError:
        """An error that says what to do about a divergence, and what is left of the stage."""
        self.store.settle()
        last = max(self.store.steps(), default=None)
        left = "there is no checkpoint" if last is None else f"the last checkpoint before that is of step {last}"
        critic = f" and stages.{self.name}.algorithm.value_lr" if "critic" in self._kept else ""
        return UserError(
            f"stage {self.name} diverged: {error.problem}; {left}",
            fix=f"lower stages.{self.name}.optim.lr (it is {self.options.optim.lr:g}){critic}, or warm up longer, "
            "and start over with --fresh",
        )


def _is_better(score: float, best: float, metric: str) -> bool:
    return score < best if metric == LOSS else score > best


def _of_part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one part of a checkpoint, under their own names."""
    if prefix:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in tensors.items() if PART not in name}
