"""What a stage is trained on: sources are read, filtered and mixed; and ways to split and shorten the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn, TypeVar

import numpy as np

from lemma.core.errors import UserError, warn
from lemma.core.random import permutation
from lemma.core.types import Demonstration, Judged, Preference, Problem, problem_of
from lemma.data import arithmetic
from lemma.data.cache import Built, cache_folder, cached, file_digest
from lemma.data.columns import with_columns
from lemma.data.conversations import mark_of_template, word_for_word
from lemma.data.data_options import DataOptions, LengthOptions, SourceOptions, names_held_out
from lemma.data.held_out import ORIGIN
from lemma.data.readers import Item, read_each
from lemma.data.rows import Row
from lemma.data.sources import ARITHMETIC, files_of, files_of_no_split, hub_name, stream_rows

T = TypeVar("T")

SMALL = 1 << 20
"""Files below this many bytes are read faster than a cache entry."""
GRADED = "an answer to grade against"
IMITATED = "a solution to imitate"
FALSE = {"", "false", "0", "0.0", "no", "none", "null", "nan", "[]"}
"""Texts that count as false in a column to filter by."""


def load_rows(options: DataOptions, seed: int, *, keep_columns: bool = False) -> list[Item]:
    """The items of all rows, sampled and mixed; `keep_columns` keeps the row itself in the problem's `extra`."""
    return _mixed(options, seed, lambda item: item, "anything", keep_columns=keep_columns)


def rows_by_source(options: DataOptions, seed: int) -> list[tuple[SourceOptions, list[Item]]]:
    """What each source of a mixture gives, before it is shuffled."""
    return list(_parts(options, seed, lambda item: item, "anything"))


def load_problems(
    options: DataOptions, seed: int, *, keep_columns: bool = False, wanted: str | None = GRADED
) -> list[Problem]:
    """Problems with at least one right answer each, which an error calls what is `wanted`; None: or without any."""
    if wanted is None:
        return _mixed(options, seed, problem_of, "anything", keep_columns=keep_columns)
    return _mixed(options, seed, _as_problem, wanted, keep_columns=keep_columns)


def load_demonstrations(options: DataOptions, seed: int) -> list[Demonstration]:
    """Problems with an answer to imitate; a teacher's trace counts as one.

    Some rows may have none, as in LUFFY's data: they are left out, with a warning.
    """
    return _mixed(options, seed, as_demonstration, IMITATED, some_may_lack=True)


def load_preferences(options: DataOptions, seed: int) -> list[Preference]:
    return _mixed(options, seed, _as_preference, "a chosen and a rejected response")


def load_judged(options: DataOptions, seed: int) -> list[list[Judged]]:
    """The labelled responses of each row: one, or the two of a pair, the chosen one first."""
    return _mixed(options, seed, lambda item: judgements(item) or None, "a labelled response")


def judgements(item: Item) -> list[Judged]:
    """The labelled responses of a row: one, or the two of a pair, the chosen one first; none of any other kind."""
    if isinstance(item, Judged):
        return [item]
    if isinstance(item, Preference):
        return [Judged(item.problem, item.chosen, True), Judged(item.problem, item.rejected, False)]
    return []


def _as_problem(item: Item) -> Problem | None:
    problem = problem_of(item)
    return problem if problem.golds else None


def as_demonstration(item: Item) -> Demonstration | None:
    if isinstance(item, Demonstration):
        return item
    if isinstance(item, Problem) and item.traces:
        return Demonstration(item, response=item.traces[0])
    return None


def _as_preference(item: Item) -> Preference | None:
    return item if isinstance(item, Preference) else None


def _mixed(
    options: DataOptions,
    seed: int,
    convert: Callable[[Item], T | None],
    wanted: str,
    some_may_lack: bool = False,
    keep_columns: bool = False,
) -> list[T]:
    """Every source of a mixture, converted and sampled. A mixture of several is shuffled; a single source keeps its
    order."""
    parts = _parts(options, seed, convert, wanted, some_may_lack, keep_columns)
    mixed = [item for _, items in parts for item in items]
    if not mixed:
        raise UserError("the mixture holds no rows", fix="raise the count of at least one source")
    if len(options.mix) > 1:
        mixed = [mixed[place] for place in permutation(len(mixed), seed, "data", "mixture")]
    return mixed


def _parts(
    options: DataOptions,
    seed: int,
    convert: Callable[[Item], T | None],
    wanted: str,
    some_may_lack: bool = False,
    keep_columns: bool = False,
) -> Iterator[tuple[SourceOptions, list[T]]]:
    """Each source of a mixture, or the only one, and what it gives, in the order of the source."""
    for number, source in enumerate(options.mix or [options]):
        if source.count == 0:
            yield source, []
            continue
        items = _converted(
            load_items(source, options.cache, seed, keep_columns), source, convert, wanted, some_may_lack
        )
        yield source, items if source.source == ARITHMETIC else take(items, source, seed, str(number))


def _converted(
    items: Sequence[Item],
    source: SourceOptions,
    convert: Callable[[Item], T | None],
    wanted: str,
    some_may_lack: bool,
) -> list[T]:
    """The rows of one source, in the form that a stage needs."""
    converted = [one for one in map(convert, items) if one is not None]
    lost = len(items) - len(converted)
    if lost and not (some_may_lack and converted):
        _raise_missing(source, convert, wanted)
    if lost:
        message = f"{lost} of {len(items)} rows of '{source.source}' lack {wanted} and were left out"
        warn(message)
    return converted


def _raise_missing(source: SourceOptions, convert: Callable[[Item], T | None], wanted: str) -> NoReturn:
    """Raise an error that names the first row without what is wanted."""
    if source.source == ARITHMETIC:
        raise UserError(f"the built-in arithmetic does not provide {wanted}", fix="name another source")
    for row, item in _read(source):
        if convert(item) is None:
            fix = f"choose other data, leave such rows out, or {_where_it_is(wanted)}"
            raise row.error(f"this row lacks {wanted}", fix=fix)
    raise AssertionError("a row was lost on the way")


def _where_it_is(wanted: str) -> str:
    name = next((name for what, name in {GRADED: "answer", IMITATED: "response"}.items() if what in wanted), None)
    return f"name the column that has it, such as `columns: {{{name}: NAME}}`" if name else "rename columns"


def row_of(options: DataOptions, problem: Problem, responses: Sequence[str] = ()) -> Row | None:
    """The row that a problem came from, to name it in a message. Reads the sources again; generated problems have none.

    Of several rows with the same problem, it is the one that compares or judges these responses. A varied problem comes
    from the row of its original.
    """

    def identity(one: Problem) -> Any:
        return one.extra.get(ORIGIN, one.id), one.traces, one.extra.get("trace_probs")

    for source in options.mix or [options]:
        if source.source != ARITHMETIC and source.count != 0:
            for row, item in _read(source):
                held = {one.response for one in judgements(item)}
                if identity(problem_of(item)) == identity(problem) and held.issuperset(responses):
                    return row
    return None


def first_items(source: SourceOptions, count: int, seed: int = 0) -> list[Item]:
    """The first items of a source, reading no more of it than necessary."""
    notes: list[str] = []
    first = islice((item for _, item in read_source(source, notes.append)), count)
    items = varied(list(first), source, seed, notes.append)[:count]
    for note in notes:
        warn(note)
    return items


def load_items(
    source: SourceOptions, cache: str | None = None, seed: int = 0, keep_columns: bool = False
) -> list[Item]:
    """All items of one source, before mixing: its rows read, filtered and varied, from the cache if it has them."""
    if source.source == ARITHMETIC:
        return list(arithmetic.generate(source.arithmetic, source.split, count=_generated(source)))
    key = None if keep_columns else _cache_key(source, seed)

    def build() -> Built:
        notes: list[str] = []
        loaded = [with_columns(item, row) if keep_columns else item for row, item in _read(source, notes.append)]
        return varied(loaded, source, seed, notes.append), notes

    items, notes = build() if key is None else cached(cache_folder(cache), key, build)
    for note in [*_of_no_split(source), *notes]:
        warn(note)
    return items


def _of_no_split(source: SourceOptions) -> list[str]:
    lost = files_of_no_split(source)
    if not lost:
        return []
    names = ", ".join(path.name for path in lost[:3]) + (", ..." if len(lost) > 3 else "")
    return [f"{source.source}: left out of split '{source.split}', because their names tell no split: {names}"]


def _generated(source: SourceOptions) -> int:
    """The generator is endless, so a larger share means more problems, never repeated ones."""
    if source.count is not None:
        return source.count
    return max(1, round(source.arithmetic.count * (source.fraction or 1)))


def varied(
    items: list[Item], source: SourceOptions, seed: int, say: Callable[[str], None] = lambda note: None
) -> list[Item]:
    """Each item followed by its variations, all without calculator marks if the source drops them."""
    if not source.variations and source.marks == "keep":
        return items
    from lemma.plugins.vary.vary import unmarked, vary

    if source.variations:
        variations = [(item, vary(item, source.variations, seed)) for item in items]
        if not any(new for _, new in variations):
            say(f"variations: no row of '{source.source}' has a solution with calculator marks that could be varied")
        items = [one for item, new in variations for one in (item, *new)]
    return [unmarked(item) for item in items] if source.marks == "drop" else items


def _cache_key(source: SourceOptions, seed: int) -> dict[str, Any] | None:
    """What the items of a source depend on; None if caching them would not pay off or could go stale."""
    names = {"config", "split", "reader", "columns", "verbatim", "keep_if", "drop_if", "answers", "marks", "variations"}
    chosen = {**source.model_dump(include=names), "seed": seed if source.variations else None}
    files = files_of(source)
    if files:
        if sum(path.stat().st_size for path in files) < SMALL:
            return None
        return {**chosen, "source": source.source, "files": [(path.name, file_digest(path)) for path in files]}
    if source.revision is None or not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        return None
    return {**chosen, "source": hub_name(source), "revision": source.revision}


def _read(source: SourceOptions, say: Callable[[str], None] = lambda note: None) -> list[tuple[Row, Item]]:
    pairs = list(read_source(source, say))
    if not pairs:
        raise UserError(f"no row of '{source.source}' is left", fix="loosen keep_if, drop_if or answers")
    return pairs


def read_source(
    source: SourceOptions, say: Callable[[str], None], *, streamed: bool = False
) -> Iterator[tuple[Row, Item]]:
    """Each row that passes the filters of a source, with its item; one at a time."""
    rows = (row for row in stream_rows(source, streamed=streamed) if _passes(row, source))
    is_marked = source.verbatim
    for row, item in read_each(rows, source.reader, say, source.columns):
        if source.variations:
            _refuse_held_out(row)
        if source.answers == "number" and not _is_number(problem_of(item).gold):
            continue
        mark = None if is_marked else mark_of_template(item)
        if mark is not None:
            is_marked = True
            say(
                f"prompts of '{source.source}' look whole (`{mark}`), and the format writes its own around them; "
                "write `verbatim: true` next to the source to use them word for word"
            )
        yield row, _named(word_for_word(item, row) if source.verbatim else item, row)


def _refuse_held_out(row: Row) -> None:
    if names_held_out(f"{row.values.get('split')} {row.file.rsplit('/', 1)[-1]}"):
        raise row.error("this row is held out, and variations are for training", fix="leave variations out")


def _passes(row: Row, source: SourceOptions) -> bool:
    for column, wanted in ((source.keep_if, True), (source.drop_if, False)):
        if column is None:
            continue
        if column not in row.values:
            raise row.error(f"there is no column '{column}' to filter by")
        if _is_true(row.values[column]) != wanted:
            return False
    return True


def _is_true(value: Any) -> bool:
    """Whether a cell is true or not empty. Text tables spell out what is false or absent."""
    if isinstance(value, str):
        return value.strip().lower() not in FALSE
    return bool(value) and value == value  # NaN differs from itself


def _is_number(answer: str | None) -> bool:
    try:
        float((answer or "").replace(",", "").strip("$ "))
    except ValueError:
        return False
    return True


def _named(item: Item, row: Row) -> Item:
    """The item with the name of its file or dataset, if the row itself names no source."""
    problem = problem_of(item)
    if problem.source:
        return item
    name = row.file.rsplit("/", 1)[-1].split(".", 1)[0]
    problem = replace(problem, source=name)
    return problem if isinstance(item, Problem) else replace(item, problem=problem)


def take(items: Sequence[T], source: SourceOptions, seed: int, name: str) -> list[T]:
    """The share or number of items that a source asks for, in their order.

    If more is wanted than there is, everything is repeated as often as it fits, and the rest is drawn.
    """
    if source.count is not None:
        wanted = source.count
    elif source.fraction is not None:
        wanted = max(1, round(len(items) * source.fraction))
    else:
        return list(items)
    copies, rest = divmod(wanted, len(items))
    drawn = sorted(permutation(len(items), seed, "data", "sample", name)[:rest].tolist())
    return list(items) * copies + [items[place] for place in drawn]


def filter_by_length(
    items: Sequence[T], lengths: Sequence[int], options: LengthOptions, say: Callable[[str], None] = lambda note: None
) -> tuple[list[T], int | None]:
    """The items whose length is within the limit, and the limit: a quantile of all lengths, a number, or the smaller of
    both.

    Says how many were left out.
    """
    assert len(items) == len(lengths), "one length per item"
    limits = []
    if options.percentile is not None and len(lengths):
        limits.append(int(np.quantile(np.asarray(lengths), options.percentile)))
    if options.max_tokens is not None:
        limits.append(options.max_tokens)
    if not limits:
        return list(items), None
    limit = min(limits)
    kept = [item for item, length in zip(items, lengths, strict=True) if length <= limit]
    if items and not kept:
        raise UserError(
            f"all {len(items)} prompts are longer than {limit} tokens; the shortest has {min(lengths)}",
            fix="raise prompt_length.max_tokens",
        )
    if len(kept) < len(items):
        lost = len(items) - len(kept)
        say(f"{lost} of {len(items)} prompts are longer than the {limit} tokens of prompt_length and were left out")
    return kept, limit
