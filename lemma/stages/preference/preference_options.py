"""What a recipe can say about the preference stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lemma.algorithms.preference import PREFERENCE_ALGORITHMS, Dpo, PreferenceAlgorithm
from lemma.config import Options
from lemma.config.options import refuse_unused
from lemma.config.shape import Choice
from lemma.data.data_options import JOURNAL, DataOptions, ValidationOptions, journal_place
from lemma.learning.learning_options import BudgetOptions
from lemma.runs.run_options import BOTH_LENGTHS, StageOptions
from lemma.stages.reference_options import ReferenceModelOptions
from lemma.stages.supervised_options import OF_ROWS

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.runs.stage import Stage


class ExampleBatchOptions(BudgetOptions):
    """How much goes into one optimisation step, and how much of it is computed at a time."""

    examples: int = Field(32, ge=1)
    """Pairs per optimisation step; for kto, single responses."""


class JournalOptions(Options):
    """Which samples of a journal become pairs: a group's best with its worst, second best with second worst, ..."""

    per_group: int = Field(1, ge=1)
    """At most this many pairs per group."""
    gap: float = Field(0.0, ge=0)
    """The rewards of a pair must differ by more than this."""


class PreferenceOptions(StageOptions):
    """Train on pairs of a better and a worse response, or on single responses that are wanted or unwanted."""

    kind: Literal["preference"] = "preference"
    """Preference optimisation."""
    algorithm: Annotated[PreferenceAlgorithm, Choice(PREFERENCE_ALGORITHMS, by="name")] = Field(default_factory=Dpo)
    """The algorithm: a name, or a mapping with name and options."""
    data: DataOptions = DataOptions()
    """Where pairs or judged responses come from. `source: journal` makes them from the graded samples of earlier
    stages, `journal:runs/x` from those of another run; with `arithmetic`, right solutions are paired with wrong
    ones."""
    journal: JournalOptions = JournalOptions()
    """How pairs are made from the samples of a journal."""
    validation: ValidationOptions = ValidationOptions()
    """Held-out pairs and how often their loss is computed."""
    batch: ExampleBatchOptions = ExampleBatchOptions()
    """Batch sizes."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data. Give this or steps; default one epoch."""
    steps: int | None = Field(None, ge=1)
    """Optimisation steps."""
    max_length: int | None = Field(None, ge=8)
    """Maximum sequence length; an example with a longer one is dropped and counted. Default: the model's context."""
    reference: Literal["precomputed", "adapters_off"] = "precomputed"
    """How to get log-probabilities under the reference, the model that the stage starts from: computed once and cached,
    or at every step with the adapters of model.lora switched off. Losses without a reference need neither."""
    reference_model: ReferenceModelOptions | None = None
    """Another reference than that model, or one that follows the policy, which is asked at every step."""
    shuffle: bool = True
    """A new order for every epoch, from the run's seed."""

    @model_validator(mode="after")
    def _consistent(self) -> PreferenceOptions:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(BOTH_LENGTHS)
        if self.data.streaming:
            raise ValueError("`data.streaming` is for supervised stages: pairs stay in memory; remove it")
        if self.algorithm.needs_baseline and self.batch.examples < 2:
            raise ValueError(
                f"{self.algorithm.name} compares each response with those to other prompts of the step; write "
                "`examples: 2` or more"
            )
        for key, data in self._sources():
            if any(journal_place(part.source) is not None for part in data.mix):
                raise ValueError(f"a journal cannot be mixed with other sources; name it as {key}.source alone")
        if self.reference != "precomputed" and not self.algorithm.needs_reference:
            raise ValueError(f"{self.algorithm.name} holds no reference here; remove `reference: {self.reference}`")
        if self.reference_model is not None and not self.algorithm.needs_reference:
            raise ValueError(f"{self.algorithm.name} holds no reference here; remove reference_model")
        if self.reference_model is not None and self.reference == "adapters_off":
            raise ValueError("without its adapters the policy is no other model; remove `reference: adapters_off`")
        journals = {
            key: data for key, data in self._sources() if not data.mix and journal_place(data.source) is not None
        }
        for key, data in journals.items():
            refuse_unused(data, OF_ROWS, f"on the journal that {key} names")
            if data.count == 0:
                raise ValueError(f"`count: 0` takes no pair of the journal that {key} names; raise or remove it")
        if self.journal != JournalOptions() and not journals:
            raise ValueError("the options of journal have no effect without `source: journal`; remove them")
        return self

    def _sources(self) -> list[tuple[str, DataOptions]]:
        """The training data and the held-out data, each with its key."""
        held_out = self.validation.data
        return [("data", self.data), *([("validation.data", held_out)] if held_out is not None else [])]

    def missing(self, *, has_adapter: bool, has_samples: bool) -> tuple[tuple[str, ...], str]:
        """The key and the error for something that this stage needs and the recipe lacks; empty if nothing is
        missing."""
        if self.reference == "adapters_off" and self.algorithm.needs_reference and not has_adapter:
            wrong = "adapters_off needs an adapter to switch off; add model.lora, or write `reference: precomputed`"
            return ("reference",), wrong
        wrong = self.reference_model.missing(has_adapter=has_adapter) if self.reference_model is not None else ""
        if wrong:
            return ("reference_model",), wrong
        if not has_samples:
            for place, data in ((("data",), self.data), (("validation", "data"), self.validation.data)):
                if data is not None and data.source == JOURNAL:
                    wrong = "no stage before this one samples; put one of kind rl before it, or name a run: journal:RUN"
                    return (*place, "source"), wrong
        return (), ""

    def models_beside(self, *, has_adapter: bool) -> dict[str, bool]:
        """A reference only where it follows the policy: another one is asked before the first step."""
        return {"critic": False, "reference": self.reference_model is not None and self.reference_model.follows}

    def run(self, stage: Stage, fmt: Format) -> None:
        from lemma.stages.preference.preference_loop import run_preference

        run_preference(stage, self, fmt)
