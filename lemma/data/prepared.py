"""Writing data: rows in Lemma's own schema, LUFFY's three files, and correct rows only.

Every file is written whole or not at all, and our own readers can read it back.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import write_whole
from lemma.core.types import Demonstration, Judged, Message, Preference, Problem
from lemma.data.read_files import TEXT_SUFFIXES
from lemma.data.readers import LUFFY_PROBS, Item
from lemma.data.rows import boxed

WRITTEN = (".parquet", *TEXT_SUFFIXES)
Table = list[dict[str, Any]]
Checker = Callable[[str, Sequence[str]], bool]
"""Whether a response states one of the right answers."""

ALWAYS = ("id", "dataset", "problem", "answer", "solution", "subject", "level")
LUFFY_TRAIN, LUFFY_SFT, LUFFY_COMPLEMENT = "openr1.parquet", "openrlhf_sft/train.jsonl", "openr1.complement.parquet"
THINK = "<think>\n"


def write_rows(path: Path, rows: Table) -> None:
    """Write rows in the file type that the name's suffix says."""
    suffix = next((suffix for suffix in WRITTEN if path.name.endswith(suffix)), None)
    if suffix is None:
        raise UserError("this kind of file cannot be written", file=path, fix=f"end the name in {', '.join(WRITTEN)}")
    if suffix == ".parquet":
        write_whole(path, _parquet(path, rows))
        return
    if suffix.startswith((".csv", ".tsv")):
        content = _csv(path, rows, "\t" if suffix.startswith(".tsv") else ",")
    elif suffix.startswith(".jsonl"):
        content = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    else:
        content = json.dumps(rows, ensure_ascii=False, indent=1, default=str) + "\n"
    write_whole(path, gzip.compress(content.encode(), mtime=0) if suffix.endswith(".gz") else content)


def _parquet(path: Path, rows: Table) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    except pyarrow.ArrowException as error:
        said = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"the rows do not fit one table: {said}", file=path, fix="write .jsonl") from error
    return buffer.getvalue()


def _csv(path: Path, rows: Table, separator: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if isinstance(value, list | dict):
                raise UserError(
                    f"row {number}: a cell cannot hold the list in '{name}'", file=path, fix="write .parquet or .jsonl"
                )
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names, delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def item_rows(items: Sequence[Item]) -> Table:
    """Items as rows that our readers turn into the same items; columns that no row needs are left out."""
    plain = all(_is_plain(item.problem) for item in items if isinstance(item, Preference | Judged))
    rows = [_item_row(item, plain) for item in items]
    names = list(dict.fromkeys(name for row in rows for name in row))
    kept = [name for name in names if name in ALWAYS or any(row.get(name) is not None for row in rows)]
    return [{name: row.get(name) for name in kept} for row in rows]


def _item_row(item: Item, plain: bool) -> dict[str, Any]:
    """One item. The prompts of pairs and labels share a column, and so a type: text if all are `plain`."""
    if isinstance(item, Problem):
        return _problem_row(item)
    if not isinstance(item, Demonstration):
        prompt = item.problem.question if plain else _messages(item.problem)
        if isinstance(item, Preference):
            return {"prompt": prompt, "chosen": item.chosen, "rejected": item.rejected}
        return {"prompt": prompt, "completion": item.response, "label": item.wanted}
    row = _problem_row(item.problem)
    if item.response is not None:
        calls = json.dumps(item.more, ensure_ascii=False) if item.more else None
        own = {"prompt": item.prompt, "response": item.response, "turns_from": item.turns_from, "calls": calls}
        return {**row, **own}
    return {**row, "reasoning": item.reasoning, "expected_answer": item.answer}


def _is_plain(problem: Problem) -> bool:
    """Whether it is a single question."""
    return [message.role for message in problem.messages] == ["user"]


def _messages(problem: Problem) -> list[dict[str, Any]]:
    return [message.as_dict() for message in problem.messages]


def _problem_row(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "dataset": problem.source or "unnamed",
        "problem": problem.question,
        "answer": problem.gold,
        "solution": None,
        "subject": problem.subject,
        "level": problem.level,
        "golds": list(problem.golds) if len(problem.golds) > 1 else None,
        "messages": None if _is_plain(problem) else _messages(problem),
        "choices": list(problem.choices) or None,
        "labels": list(string.ascii_uppercase[: len(problem.choices)]) or None,
        "target": list(problem.traces) or None,
        "extra": json.dumps(problem.extra, ensure_ascii=False, default=str) if problem.extra else None,
    }


def correct_only(demonstrations: Iterable[Demonstration], is_correct: Checker) -> list[Demonstration]:
    """The demonstrations that state a right answer, according to the checker."""
    kept = []
    for item in demonstrations:
        if not item.problem.golds:
            raise UserError(
                f"problem {item.problem.id} has no answer to compare with", fix="choose data with right answers"
            )
        if is_correct(stated(item), item.problem.golds):
            kept.append(item)
    return kept


def stated(item: Demonstration) -> str:
    """The text in which a demonstration gives its answer: its response, or working that ends in an answer."""
    if item.response is not None:
        return item.response
    working = item.reasoning or ""
    return working if boxed(working) or "<answer>" in working else item.answer or ""


def luffy_rows(items: Sequence[Item], system: str, target: Callable[[Demonstration], str], split: str) -> Table:
    """Rows in LUFFY's columns: prompt messages, the teacher's message or null, and the gold for a rule-based reward.

    The teacher's token probabilities are kept if the message itself is unchanged.
    """
    rows: list[dict[str, Any]] = []
    probs: list[Any] = []
    for number, item in enumerate(items):
        problem = item if isinstance(item, Problem) else item.problem
        if problem.gold is None:
            raise UserError(f"problem {problem.id} has no answer", fix="LUFFY's files need one in every row")
        said = problem.messages if problem.system else (Message("system", system), *problem.messages)
        written = target(item) if isinstance(item, Demonstration) else None
        probs.append(problem.extra.get("trace_probs") if written and _is_unchanged(item, written) else None)
        rows.append(
            {
                "data_source": problem.source,
                "prompt": [message.as_dict() for message in said],
                "target": [Message("assistant", written).as_dict()] if written else None,
                "ability": problem.extra.get("ability") or "math",
                "reward_model": {"ground_truth": problem.gold, "style": "rule"},
                "extra_info": problem.extra.get("extra_info") or {"index": number, "split": split},
            }
        )
    if any(probs):
        return [{**row, LUFFY_PROBS: given} for row, given in zip(rows, probs, strict=True)]
    return rows


def _is_unchanged(item: Item, written: str) -> bool:
    """Whether a target is the teacher's own text, apart from a `<think>` that may belong to the prompt."""
    said = item.response if isinstance(item, Demonstration) else None
    return said is not None and said.removeprefix(THINK) == written.removeprefix(THINK)


def luffy_sft_rows(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The rows with a target, for supervised learning, without the target's `<think>`, because the prompt ends in
    it."""
    pairs = []
    for row in rows:
        if row["target"]:
            target = [{**message, "content": message["content"].removeprefix(THINK)} for message in row["target"]]
            pairs.append({"prompt": row["prompt"], "target": target})
    return pairs


def write_luffy(folder: Path, training: Table, complement: Table) -> dict[str, int]:
    """Write LUFFY's three files; returns the number of rows of each."""
    sft = luffy_sft_rows(training)
    if not sft:
        raise UserError("no training row has a teacher's response", fix="choose a source with traces or solutions")
    files = {LUFFY_TRAIN: training, LUFFY_SFT: sft, LUFFY_COMPLEMENT: complement}
    for name, rows in files.items():
        write_rows(folder / name, rows)
    return {name: len(rows) for name, rows in files.items()}
