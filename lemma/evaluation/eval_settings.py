"""How an evaluation measures: every setting once, for recipes, `lemma eval` and `lemma.evaluate`. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from lemma.config import Options
from lemma.config.shape import annotation_of, words
from lemma.core.errors import UserError, nearest
from lemma.evaluation.metrics import Ties

OURS = "lemma"
"""The name of Lemma's own grader."""


class Measuring(Options):
    """What a stage and a command both say about an evaluation."""

    samples: int | None = Field(None, ge=1)
    """Samples per problem. Default: the benchmark's own number."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. Default: 0 for one sample, 0.6 for several."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    max_tokens: int = Field(4096, ge=1)
    """Maximum number of tokens in a completion, or in a turn of an episode."""
    limit: int | None = Field(None, ge=1)
    """At most this many problems of each benchmark; always the same ones."""
    thinking: Literal["after", "whole"] = "after"
    """If the reasoning never ends: after counts no answer, whole looks for one in the whole text."""
    data_dir: str | None = None
    """A folder of data files to use instead of the hub."""
    shots: int | None = Field(None, ge=0)
    """Solved examples before each question (few-shot), from the benchmark's training split. Default: the benchmark's
    own number."""
    shots_as: Literal["chat", "text"] | None = None
    """Examples as chat turns or as plain text. Default: chat for tokenizers with a chat template."""


class EvalSettings(Measuring):
    """Everything that one evaluation is told; None leaves a value to the benchmark."""

    format: Any = None
    """How questions are put and answers are read: a name, a mapping or a `Format`. Default: that of the model's run,
    else the one whose chat template was saved with the tokenizer, else the benchmark's."""
    grader: str = OURS
    """lemma, or graders of other systems joined by commas, such as math_verify,boxed_slow."""
    seed: int = Field(0, ge=0)
    """Another seed, other samples."""
    likelihood: bool = False
    """Multiple choice: take the likeliest option, in place of what the model writes."""
    environment: Any = None
    """Play the problems in an environment: a name, `path.py:Class`, a YAML file with its options, or a recipe."""
    split: str = "dev"
    """Which of the environment's own problems are played where no benchmark is named."""
    ties: Ties = "average"
    """What maj@k is worth where answers tie: the mean over them, or the one that was given first."""

    @classmethod
    def of(cls, options: Measuring, **more: Any) -> EvalSettings:
        """The settings that a recipe writes, and what the recipe does not say there."""
        return cls(**{name: getattr(options, name) for name in Measuring.model_fields}, **more)

    @property
    def said(self) -> dict[str, Any]:
        """What differs from the defaults: a setting that is added one day changes no name that is made of this."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set) if self._differs(name)}

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


def make_settings(values: Mapping[str, Any], spelt: Callable[[str], str] = str) -> EvalSettings:
    """The settings of a call or a command; a wrong one gets one sentence, under the name by which `spelt` knows it."""
    try:
        return EvalSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = nearest(spelt(name), map(spelt, EvalSettings.model_fields))
            raise UserError(f"an evaluation has no setting '{spelt(name)}'", fix=known) from None
        least = first.get("ctx", {}).get("ge")
        may = words(annotation_of(EvalSettings.model_fields[name])) if least is None else f"{least} or more"
        raise UserError(f"{spelt(name)} is {first['input']}", fix=f"write {may}") from None
