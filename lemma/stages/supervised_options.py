"""What a recipe can say about the supervised stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lemma.config import Options
from lemma.config.options import refuse_unused
from lemma.data.data_options import JOURNAL, DataOptions, ValidationOptions, journal_place
from lemma.learning.learning_options import BatchOptions
from lemma.runs.run_options import BOTH_LENGTHS, StageOptions

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.runs.stage import Stage


# Options of files and datasets; a journal holds samples, not rows to select from.
OF_ROWS = ("config", "split", "revision", "reader", "keep_if", "drop_if", "answers", "arithmetic", "guessing")


class ImitatedOptions(Options):
    """Which samples of a journal to imitate: those that are good enough."""

    least_reward: float = 1.0
    """Imitate samples with at least this reward."""
    per_problem: int | None = Field(None, ge=1)
    """At most this many samples per problem. Default: all."""
    distinct: bool = True
    """Imitate identical samples of a problem only once."""


class SupervisedOptions(StageOptions):
    """Imitate worked solutions: cross-entropy on the response, the end-of-sequence token included."""

    kind: Literal["supervised"] = "supervised"
    """Supervised fine-tuning."""
    batch: BatchOptions = BatchOptions()
    """Batch sizes."""
    data: DataOptions = DataOptions()
    """Where the demonstrations come from. `source: journal` takes good samples of earlier stages, and `journal:runs/x`
    those of another run: whole episodes, trained on the tokens that the policy sampled."""
    journal: ImitatedOptions = ImitatedOptions()
    """Which samples of a journal to imitate."""
    validation: ValidationOptions = ValidationOptions()
    """Held-out demonstrations and how often their loss is computed."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data. Give this or steps; default one epoch."""
    steps: int | None = Field(None, ge=1)
    """Optimisation steps."""
    unique_examples: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    """Use only the first N demonstrations."""
    packing: Literal["borders", "stream"] = "borders"
    """borders: sequences are packed side by side, and attention never crosses between them. stream: documents are
    concatenated and cut every max_length tokens, as in classic instruction tuning."""
    max_length: int | None = Field(None, ge=8)
    """Maximum sequence length; longer ones are dropped and counted. Default: the model's context."""
    train_on: Literal["response", "all"] = "response"
    """Tokens to train on: the response only, or the prompt as well."""
    turns: Literal["all", "last", "played"] = "all"
    """Which turns of a conversation (rows with messages) to train on: every assistant turn, or only the last; `played`:
    every turn, token for token as an episode in an environment would hold it."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """What the sum of token losses is divided by: the number of trained tokens; each sequence's own length and the
    number of sequences; or `constant` times the number of sequences."""
    constant: float = Field(1.0, gt=0)
    """Divisor for `normalise: constant`."""
    shuffle: bool = True
    """A new order for every epoch, from the run's seed."""

    @model_validator(mode="after")
    def _one_length(self) -> SupervisedOptions:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(BOTH_LENGTHS)
        if self.packing == "stream" and self.data.streaming:
            raise ValueError("`data.streaming` keeps whole sequences; write `packing: borders`")
        if self.packing == "stream" and self.max_length is None:
            raise ValueError("`packing: stream` cuts every max_length tokens; add `max_length: 512` to the stage")
        return self

    @model_validator(mode="after")
    def _journal_fits(self) -> SupervisedOptions:
        held_out = self.validation.data
        sources = [("data", self.data), *([("validation.data", held_out)] if held_out is not None else [])]
        journals = {key: data for key, data in sources if not data.mix and journal_place(data.source) is not None}
        for key, data in sources:
            if any(journal_place(part.source) is not None for part in data.mix):
                raise ValueError(f"a journal cannot be mixed with other sources; name it as {key}.source alone")
        for key, data in journals.items():
            refuse_unused(data, OF_ROWS, f"on the journal that {key} names")
            if self.packing == "stream" or data.streaming:
                raise ValueError("episodes of a journal stay whole and in memory; remove `packing` and `streaming`")
        if journals:
            refuse_unused(
                self, ("turns", "train_on"), "on the episodes of a journal, which are trained on the sampled tokens"
            )
        elif self.journal != ImitatedOptions():
            raise ValueError("the options of journal have no effect without `source: journal`; remove them")
        return self

    def missing(self, *, has_adapter: bool, has_samples: bool) -> tuple[tuple[str, ...], str]:
        """The key and the error for something that this stage needs and the recipe lacks; empty if nothing is
        missing."""
        for place, data in ((("data",), self.data), (("validation", "data"), self.validation.data)):
            if data is not None and data.source == JOURNAL and not has_samples:
                wrong = "no stage before this one samples; put one of kind rl before it, or name a run: journal:RUN"
                return (*place, "source"), wrong
        return (), ""

    def run(self, stage: Stage, fmt: Format) -> None:
        from lemma.stages.supervised import run_supervised

        run_supervised(stage, self, fmt)
