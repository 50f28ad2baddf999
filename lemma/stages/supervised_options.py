"""What a recipe can say about the supervised stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lemma.data.data_options import DataOptions, ValidationOptions
from lemma.learning.learning_options import BatchOptions
from lemma.runs.run_options import StageOptions

if TYPE_CHECKING:
    from lemma.formats import Format
    from lemma.runs.stage import Stage


class SupervisedOptions(StageOptions):
    """Imitate worked solutions: cross-entropy on the response, the end-of-sequence token included."""

    kind: Literal["supervised"] = "supervised"
    """Supervised fine-tuning."""
    batch: BatchOptions = BatchOptions()
    """Batch sizes."""
    data: DataOptions = DataOptions()
    """Where the demonstrations come from."""
    validation: ValidationOptions = ValidationOptions()
    """Held-out demonstrations and how often their loss is computed."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data. Give this or steps; default one epoch."""
    steps: int | None = Field(None, ge=1)
    """Optimisation steps."""
    unique_examples: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    """Use the first N demonstrations only."""
    packing: Literal["borders", "stream"] = "borders"
    """borders: sequences side by side, attention never crosses. stream: documents run on and are cut every
    max_length tokens, as in classic instruction tuning."""
    max_length: int | None = Field(None, ge=8)
    """Maximum sequence length; longer ones are dropped and counted. Default: the model's context."""
    train_on: Literal["response", "all"] = "response"
    """Tokens that are learnt: the response only, or the prompt as well."""
    turns: Literal["all", "last", "played"] = "all"
    """Of a conversation (rows with messages): every turn of the assistant is learnt, or the last one only; `played`:
    every turn, token for token as an episode of an environment would hold them."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """The loss is a sum over tokens divided by: all trained tokens; each sequence's own length and the number of
    sequences; or `constant` times the number of sequences."""
    constant: float = Field(1.0, gt=0)
    """Divisor of `normalise: constant`."""
    shuffle: bool = True
    """A new order for every epoch, from the run's seed."""

    @model_validator(mode="after")
    def _one_length(self) -> SupervisedOptions:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.packing == "stream" and self.data.streaming:
            raise ValueError("`data.streaming` keeps whole sequences; write `packing: borders`")
        if self.packing == "stream" and self.max_length is None:
            raise ValueError("`packing: stream` cuts every max_length tokens; add `max_length: 512` to the stage")
        return self

    def run(self, stage: Stage, fmt: Format) -> None:
        from lemma.stages.supervised import run_supervised

        run_supervised(stage, self, fmt)
