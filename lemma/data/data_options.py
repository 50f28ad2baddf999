"""What a recipe can say about data. Imports nothing heavy: validating a recipe stays fast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

from pydantic import Field, field_validator, model_validator

from lemma.config import Options

JOURNAL = "journal"
# Problems of the built-in generators are held in memory.
MOST_MADE = 10_000_000
HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}


T = TypeVar("T")
# A part of a split, in the notation of the `datasets` library: `train[:50%]`, `train[1000:]`, `train[-10%:]`.
_BORDER = r"(?P<{0}>-?\d+)(?P<{0}_percent>%)?"
_PART = re.compile(rf"(?P<split>[^\[\]]+)\[(?:{_BORDER.format('first')})?:(?:{_BORDER.format('last')})?\]")


def names_held_out(name: str) -> bool:
    """Whether the name of a split or file, such as `gsm8k/test.jsonl`, says that it is not for training."""
    return not HELD_OUT.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def journal_place(source: str) -> str | None:
    """Path of the journal that a source names; empty for the run's own, None for any other source."""
    if source == JOURNAL:
        return ""
    return source.removeprefix(f"{JOURNAL}:") if source.startswith(f"{JOURNAL}:") else None


class Border(NamedTuple):
    """Where a part begins or ends: a row number, or a percentage of all rows; negative counts from the end."""

    number: int
    is_percent: bool

    def among(self, rows: int) -> int:
        place = round(self.number * rows / 100) if self.is_percent else self.number
        return min(max(place + rows if self.number < 0 else place, 0), rows)


class Part(NamedTuple):
    """A split, and which of its rows."""

    split: str
    first: Border | None = None
    last: Border | None = None

    def of(self, rows: Iterable[T]) -> Iterable[T]:
        """The rows of this part. They are counted first if a border depends on how many there are."""
        borders = [border for border in (self.first, self.last) if border is not None]
        if any(border.is_percent or border.number < 0 for border in borders):
            rows = list(rows)
            first = self.first.among(len(rows)) if self.first else 0
            return rows[first : self.last.among(len(rows)) if self.last else len(rows)]
        return islice(rows, self.first.number if self.first else 0, self.last.number if self.last else None)


def part_of(split: str) -> Part:
    """Parse `train` or `train[:50%]`. ValueError if it is neither."""
    match = _PART.fullmatch(split)
    if match is None and ("[" in split or "]" in split):
        raise ValueError(f"'{split}' is not a part of a split; write for example `train[:50%]` or `train[1000:2000]`")
    if match is None:
        return Part(split)
    borders = [Border(int(match[name]), bool(match[f"{name}_percent"])) if match[name] else None
               for name in ("first", "last")]  # fmt: skip
    if any(border.is_percent and abs(border.number) > 100 for border in borders if border):
        raise ValueError(f"'{split}' asks for more than 100% of the rows")
    return Part(match["split"], *borders)


class ArithmeticOptions(Options):
    """The built-in endless generator of chained word problems with worked solutions."""

    operations: int = Field(6, ge=1, le=40)
    """Steps per problem, which set its difficulty."""
    largest: int = Field(30, ge=10, le=99)
    """Running totals stay at or below this."""
    style: Literal["stepwise", "terse", "mixed", "skipping"] = "mixed"
    """How solutions are written: one step at a time, all in one line, a 40/60 mix of both, or with steps left out at
    random."""
    written: float = Field(0.5, ge=0, le=1)
    """Share of the running totals that `skipping` writes down."""
    asked_how: float = Field(0.0, ge=0, le=1)
    """Share of the questions that end in `how ?`; their solutions show every step, whatever the style."""
    count: int = Field(20000, ge=1)
    """How many problems; the generator itself is endless."""
    seed: int = Field(0, ge=0)
    """A different seed gives different problems. Train and test never share a problem, whatever the seed."""


class GuessingOptions(Options):
    """Games of the environment `higher_lower` with random guesses: they teach the format, but not how to win."""

    numbers: int = Field(16, ge=2)
    """Secrets are whole numbers from 1 to this; the games go through them in turn."""
    turns: int = Field(5, ge=1)
    """Guesses per game; a right one ends it."""
    count: int = Field(2000, ge=1)
    """How many games."""
    seed: int = Field(0, ge=0)
    """A different seed gives different guesses."""
    question: str = Field("?", min_length=1)
    """The question that a game begins with."""
    mute: bool = False
    """Give the same reply to every wrong guess, like the environment's option of this name."""


class SourceOptions(Options):
    """One place that rows come from."""

    source: str = "arithmetic"
    """A file (.parquet, .jsonl, .json, .csv, .tsv, .arrow; text also .gz), a folder of these or from `save_to_disk`, a
    hub dataset, or a built-in one: `arithmetic`, `higher_lower`. `environment`: the problems that a stage's environment
    provides."""
    config: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset, a folder or the built-in generator; `train[:50%]` and `train[1000:]` take a part."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    reader: str = "auto"
    """How rows are read; auto decides by their columns."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns with other names, such as {question: Query, answer: Gold}; `a.b` is field b of column a."""
    verbatim: bool = False
    """Use text prompts of rows with a response word for word, instead of putting them into the format's prompt."""
    keep_if: str | None = None
    """Keep only rows in which this column is true or not empty; texts such as false, 0, no and nan count as false."""
    drop_if: str | None = None
    """Drop rows in which this column, such as `in_eval_sets`, is true or not empty."""
    answers: Literal["any", "number"] = "any"
    """Keep rows with any answer, or only those whose answer is a number."""
    marks: Literal["keep", "drop"] = "keep"
    """Calculator marks in solutions, such as GSM8K's `<<48/2=24>>`: kept as they are, or removed."""
    variations: int = Field(0, ge=0, le=1000)
    """Make up to this many further problems from each solution with calculator marks: the same problem with other
    numbers."""
    fraction: float | None = Field(None, gt=0)
    """Use this share of the rows; above 1 repeats rows."""
    count: int | None = Field(None, ge=0)
    """Use this many rows."""
    arithmetic: ArithmeticOptions = ArithmeticOptions()
    """Options of the built-in arithmetic."""
    guessing: GuessingOptions = GuessingOptions()
    """Options of the built-in `higher_lower` games."""

    @field_validator("split")
    @classmethod
    def _is_a_split(cls, split: str) -> str:
        part_of(split)
        return split

    @property
    def part(self) -> Part:
        """Which rows of which split."""
        return part_of(self.split)

    @model_validator(mode="after")
    def _one_amount(self) -> SourceOptions:
        if self.fraction is not None and self.count is not None:
            raise ValueError("give fraction or count, not both")
        made = self.arithmetic.count * (self.fraction or 1) if self.count is None else self.count
        if self.source == "higher_lower":
            made = self.guessing.count
        if self.source in ("arithmetic", "higher_lower") and made > MOST_MADE:
            raise ValueError(f"{made:,.0f} generated problems are too many: write {MOST_MADE:,} or fewer")
        return self

    @model_validator(mode="after")
    def _variations_to_train_on(self) -> SourceOptions:
        if self.variations and self.source == "arithmetic":
            raise ValueError("variations has no effect on the built-in arithmetic: raise arithmetic.count")
        if self.source == "arithmetic" and self.part != Part(self.split):
            raise ValueError("the built-in arithmetic has no rows to take a part of: lower arithmetic.count")
        if self.variations and names_held_out(self.part.split):
            raise ValueError(f"variations are for training, and split '{self.split}' is not: leave variations out")
        return self


class LengthOptions(Options):
    """Which rows are dropped because of their prompt's length, in tokens."""

    percentile: float | None = Field(None, gt=0, le=1)
    """Keep prompts no longer than this quantile of all prompt lengths, such as 0.9."""
    max_tokens: int | None = Field(None, ge=1)
    """Keep prompts of at most this many tokens."""


class DataOptions(SourceOptions):
    """What a stage is trained on: one source, or a mix of several."""

    mix: list[SourceOptions] = Field(default_factory=list)
    """Several sources, each with its fraction or count; replaces `source`."""
    prompt_length: LengthOptions = LengthOptions()
    """Drop rows by prompt length."""
    streaming: bool = False
    """For data larger than memory, in supervised stages: rows are read one at a time, and their token ids are kept in
    files of the run. `count` then takes the first rows, and `validation.share` holds on average."""
    cache: str | None = None
    """Folder of the content-addressed cache of prepared data; default `~/.cache/lemma` or $LEMMA_CACHE."""

    @model_validator(mode="after")
    def _mix_or_source(self) -> DataOptions:
        fields = SourceOptions.model_fields
        usual = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        unused = [name for name in fields if getattr(self, name) != usual[name]] if self.mix else []
        if unused:
            raise ValueError(f"{unused[0]} has no effect next to mix: write it inside each source of the mix")
        return self

    @model_validator(mode="after")
    def _streamed(self) -> DataOptions:
        if self.streaming and (self.prompt_length.percentile or any(one.fraction for one in (self, *self.mix))):
            raise ValueError(
                "streaming cannot count all rows first: use prompt_length.max_tokens in place of percentile, and count "
                "in place of fraction"
            )
        return self


class ValidationOptions(Options):
    """Held-out rows of a stage."""

    share: float = Field(0.0, ge=0, lt=1)
    """Hold this share of the stage's rows out of training."""
    data: DataOptions | None = None
    """Or use separate data."""
    count: int | None = Field(None, ge=1)
    """At most this many rows."""
    every: int = Field(0, ge=0)
    """Steps between validations; 0 validates at the end only, if anything is held out."""

    @model_validator(mode="after")
    def _one_origin(self) -> ValidationOptions:
        if self.share and self.data is not None:
            raise ValueError("give validation.share or validation.data, not both")
        return self
