"""Demonstrations from datasets larger than memory: read, filtered, encoded and stored one row at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from lemma.core.errors import UserError
from lemma.core.ranks import from_leader, leader_first
from lemma.core.types import Demonstration, Trajectory, content_id, problem_of
from lemma.data.choices import as_asked
from lemma.data.data_options import SourceOptions
from lemma.data.held_out import place_of, question_of
from lemma.data.load_rows import as_demonstration, load_items, read_source, varied
from lemma.data.readers import Item
from lemma.data.sources import ARITHMETIC, files_of
from lemma.formats import Format
from lemma.formats.encode import encode_demonstration, encode_learnt
from lemma.runs.stage import Stage
from lemma.stages.supervised_options import SupervisedOptions
from lemma.stages.token_store import StoredTokens, stored
from lemma.stages.trained_prompt import Instructions, Systems


def stream_demonstrations(
    stage: Stage, options: SupervisedOptions, fmt: Format, tokenizer: Any, limit: int
) -> tuple[StoredTokens, StoredTokens, Systems]:
    """The training set and the held-out set, in files of the stage, and the system messages of the rows.

    Makes two passes over the rows, one for each side; a later start of the run reuses the files.
    """
    key = from_leader(lambda: _key(stage, options, fmt, tokenizer, limit), "what tokens are stored for")
    folder = stage.folder.stage(stage.name) / "tokens"
    reader = _Rows(stage, options, fmt, tokenizer, limit)
    with leader_first("stored tokens"):
        learnt = stored(
            folder / "learnt",
            {**key, "side": "learnt"},
            reader.encoded(held_out=False),
            lambda: list(reader.systems.items()),
        )
    if not len(learnt):
        raise UserError(
            f"stage {stage.name}: no row gives a demonstration of at most {limit} tokens",
            fix="raise max_length, or check the data with `lemma data show`",
        )
    has_some = options.validation.share > 0 and options.validation.data is None
    held = reader.encoded(held_out=True) if has_some else iter(())
    systems: Systems = Counter(dict(learnt.facts))
    with leader_first("stored tokens"):
        return learnt, stored(folder / "held_out", {**key, "side": "held out"}, held), systems


class _Rows:
    """The rows of a stage's data, read again on each pass."""

    def __init__(self, stage: Stage, options: SupervisedOptions, fmt: Format, tokenizer: Any, limit: int):
        self.stage, self.options, self.fmt, self.tokenizer, self.limit = stage, options, fmt, tokenizer, limit
        self.asked = Instructions(fmt, tokenizer)
        self.systems: Systems = Counter()

    def encoded(self, *, held_out: bool) -> Iterator[Trajectory]:
        """The sequences of one side, in the order of the rows."""
        most = self.options.validation.count if held_out else self.options.unique_examples
        long = asked_long = 0
        for count, item in enumerate(self._demonstrations(held_out)):
            if isinstance(most, int) and count >= most:
                break
            if not held_out:
                self.systems[self.asked.of_row(item)] += 1
            if self._is_asked_long(item):
                asked_long += 1
                continue
            for one in encode_learnt(self.fmt, item, self.tokenizer, self.options.turns, self.options.train_on):
                if len(one) <= self.limit:
                    yield one
                else:
                    long += 1
        if long:
            self.stage.warn(f"{long} demonstrations are longer than {self.limit} tokens and were left out")
        if asked_long:
            most = self.options.data.prompt_length.max_tokens
            self.stage.say(f"{asked_long} prompts are longer than the {most} tokens of prompt_length and were left out")

    def _is_asked_long(self, item: Demonstration) -> bool:
        longest = self.options.data.prompt_length.max_tokens
        if longest is None:
            return False
        return int(encode_demonstration(self.fmt, item, self.tokenizer).loss_mask_T.argmax()) > longest

    def _demonstrations(self, held_out: bool) -> Iterator[Demonstration]:
        lacking = 0
        for source in self.options.data.mix or [self.options.data]:
            for number, item in enumerate(_items(source, self.stage.seed, self.stage.say)):
                if source.count is not None and number >= source.count:
                    break
                if self._is_held_out(item) != held_out:
                    continue
                for one in varied([item], source, self.stage.seed):
                    shown = as_demonstration(one)
                    lacking += shown is None
                    if shown is not None:
                        yield as_asked(shown)
        if lacking:
            self.stage.warn(f"{lacking} rows lack a solution to imitate and were left out")

    def _is_held_out(self, item: Item) -> bool:
        """Decided by the row's question alone, so that repeated rows are on the same side wherever they are."""
        share = self.options.validation.share
        if not share or self.options.validation.data is not None:
            return False
        [known] = self.asked.understood([item]) if isinstance(item, Demonstration) else [item]
        return place_of(question_of(problem_of(known)), self.stage.seed) < share


def _items(source: SourceOptions, seed: int, say: Any) -> Iterator[Item]:
    if source.source == ARITHMETIC:
        yield from load_items(source, None, seed)
        return
    for _, item in read_source(source, say, streamed=True):
        yield item


def _key(stage: Stage, options: SupervisedOptions, fmt: Format, tokenizer: Any, limit: int) -> dict[str, Any]:
    """What the stored ids depend on. Files are identified by size and modification time, to avoid reading them all."""
    sources = [one for one in options.data.mix or [options.data] if one.source != ARITHMETIC]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for one in sources for path in files_of(one)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = {"data", "validation", "train_on", "turns", "max_length", "unique_examples"}
    return {
        "options": options.model_dump(mode="json", include=words),
        "format": fmt.model_dump(mode="json"),
        "tokenizer": content_id(len(tokenizer) if backend is None else backend.to_str(), tokenizer.chat_template),
        "files": files,
        "limit": limit,
        "seed": stage.seed,
    }
