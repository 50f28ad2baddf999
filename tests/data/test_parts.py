"""Parts of splits: the notation of the `datasets` library, and its meaning, on files and on its own tables."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from datasets.arrow_reader import ReadInstruction
from pydantic import ValidationError

from lemma.core.errors import UserError
from lemma.data.data_options import DataOptions, part_of
from lemma.data.load_rows import load_problems

PARTS = ["train", "train[:50%]", "train[50%:]", "train[3:7]", "train[-20%:]", "train[:-4]", "train[-3:]", "train[9:]",
         "train[10%:90%]", "train[:33%]", "train[:100]"]  # fmt: skip


@pytest.mark.parametrize("rows", [10, 7])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_what_datasets_takes(part: str, rows: int) -> None:
    [theirs] = ReadInstruction.from_spec(part).to_absolute({"train": rows})
    expected = list(range(rows))[theirs.from_ : theirs.to]
    assert list(part_of(part).of(iter(range(rows)))) == expected


@pytest.mark.parametrize("wrong", ["train[", "train[5]", "train[a:b]", "train[:150%]", "[:3]"])
def test_other_notations_are_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match=r"not a part of a split|more than 100%"):
        DataOptions(source="rows.jsonl", split=wrong)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(10)]
    path.write_text("\n".join(lines))
    return path


def golds(options: DataOptions) -> list[str]:
    return [str(problem.gold) for problem in load_problems(options, seed=0)]


def test_a_file_and_its_folder_have_parts(rows: Path) -> None:
    for source in (rows, rows.parent):
        first = golds(DataOptions(source=str(source), split="train[:40%]"))
        assert first == ["1", "2", "3", "4"]
        assert first + golds(DataOptions(source=str(source), split="train[40%:]")) == [str(i + 1) for i in range(10)]


def test_a_saved_dataset_has_parts(rows: Path, tmp_path: Path) -> None:
    table = datasets.Dataset.from_json(str(rows), cache_dir=str(tmp_path / "cache"))
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "saved")
    assert golds(DataOptions(source=str(tmp_path / "saved"), split="train[7:9]")) == ["8", "9"]


def test_a_part_of_what_is_made_up_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"arithmetic\.count"):
        DataOptions(source="arithmetic", split="train[:50%]")


def test_an_empty_part_is_refused(rows: Path) -> None:
    with pytest.raises(UserError, match="no rows"):
        golds(DataOptions(source=str(rows), split="train[20:]"))
