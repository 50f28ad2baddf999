from __future__ import annotations

import gzip
import io
import json
import math
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from lemma.core.errors import UserError
from lemma.data.data_options import SourceOptions
from lemma.data.sources import ALIASES, files_of, hub_name, rows_of, stream_rows

ROWS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(3)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows=ROWS):
    """The same rows in the kind of file that the name asks for."""
    kind = path.name.split(".", 1)[1]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    text = {
        "jsonl": lines(rows),
        "json": json.dumps(rows, indent=1),
        "tsv": "question\tanswer\n" + "".join(f"{row['question']}\t{row['answer']}\n" for row in rows),
        "csv": "question,answer\n" + "".join(f'"{row["question"]}","{row["answer"]}"\n' for row in rows),
    }[kind.removesuffix(".gz")]
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
    return path


def rows(path, **options):
    return [row.values for row in rows_of(SourceOptions(source=str(path), **options))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.csv.gz", "a.tsv", "a.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    assert rows(write(tmp_path / name)) == ROWS


def test_json_lines_under_another_name_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + lines(ROWS[:1]) + "\n\n" + lines(ROWS[1:]), encoding="utf-8")
    assert rows(path) == ROWS
    assert [row.line for row in rows_of(SourceOptions(source=str(path)))] == [1, 4, 5]


def test_the_last_ending_decides(tmp_path):
    for name in ("a.csv.jsonl", "b.json.csv"):
        content = lines(ROWS) if name.endswith("jsonl") else 'question,answer\n"0+1?","#### 1"\n'
        (tmp_path / name).write_text(content)
        assert rows(tmp_path / name)[0] == ROWS[0]


def test_csv_cells_may_hold_commas_lines_and_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('problem,answer,level\n"one, two\nthree",4,\n')
    assert rows(path) == [{"problem": "one, two\nthree", "answer": "4", "level": None}]


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
def test_csv_files_tell_what_separates_their_cells(tmp_path, separator):
    path = tmp_path / "a.csv"
    cells = [["problem", "answer"], ['"1,5; 2\n| \t 3"', "4"], ["plain", "5"]]
    path.write_text("".join(separator.join(row) + "\n" for row in cells))
    assert rows(path) == [{"problem": "1,5; 2\n| \t 3", "answer": "4"}, {"problem": "plain", "answer": "5"}]


def test_a_comma_in_a_header_of_semicolons_separates_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("problem;answer (short, exact)\nHow much is 1,5 + 1,5?;3\nOne, two?;3\n")
    assert rows(path)[0] == {"problem": "How much is 1,5 + 1,5?", "answer (short, exact)": "3"}


def test_what_the_datasets_library_saves_is_read(tmp_path):
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"), num_shards=2)
    splits = datasets.DatasetDict(train=whole.select([0]), held_sft=whole.select([1, 2]))
    splits.save_to_disk(str(tmp_path / "many"))
    assert rows(tmp_path / "one") == ROWS
    assert rows(tmp_path / "many") == ROWS[:1] and rows(tmp_path / "many", split="held_sft") == ROWS[1:]
    with pytest.raises(UserError, match="no data file of split 'test'; splits here: held_sft, train"):
        rows(tmp_path / "many", split="test")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "tsv", "parquet"])
def test_a_file_is_never_in_memory_as_a_whole(tmp_path, kind):
    count, size = 4096, 5000
    path = write(tmp_path / f"a.{kind}", [{"question": f"{n}", "answer": "x" * size} for n in range(count)])
    tracemalloc.start()
    try:
        found = sum(1 for _ in stream_rows(SourceOptions(source=str(path))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == count and peak < 0.6 * count * size


def test_mmlu_files_have_no_header(tmp_path):
    path = tmp_path / "algebra_test.csv"
    path.write_text("What is 2+2?,1,2,3,4,D\nWhat is 1+1?,1,2,3,4,B\n")
    assert [row["answer"] for row in rows(path)] == ["D", "B"]
    assert rows(path)[0]["question"] == "What is 2+2?"


def test_a_folder_is_read_in_order_and_by_split(tmp_path):
    for name, part in {
        "b-train.jsonl": ROWS[1:2],
        "a-train.jsonl": ROWS[:1],
        "test-00000-of-00001.jsonl": ROWS[2:],
    }.items():
        write(tmp_path / name, part)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "train.jsonl")
    assert rows(tmp_path) == ROWS[:2]
    assert rows(tmp_path, split="test") == ROWS[2:]
    with pytest.raises(UserError, match="no data file of split 'validation'; splits here: test, train"):
        rows(tmp_path, split="validation")


def test_a_folder_without_split_names_is_read_whole_and_by_configuration(tmp_path):
    for config in ("main", "socratic"):
        (tmp_path / config).mkdir()
        write(tmp_path / config / "part.jsonl")
    assert len(rows(tmp_path)) == 6
    assert rows(tmp_path, config="main") == ROWS
    with pytest.raises(UserError, match="no data file of this folder is in a folder 'mian'"):
        rows(tmp_path, config="mian")


def test_hub_names_and_aliases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(SourceOptions(source="gsm8k")) == ("openai/gsm8k", "main")
    assert hub_name(SourceOptions(source="gsm8k", config="socratic")) == ("openai/gsm8k", "socratic")
    assert hub_name(SourceOptions(source="someone/something")) == ("someone/something", None)
    assert all(files_of(SourceOptions(source=name)) == [] for name in ALIASES)


def damaged_page():
    """A parquet file whose footer is whole and whose first page is not."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS * 50), buffer)
    content = bytearray(buffer.getvalue())
    content[4:60] = b"\xff" * 56
    return bytes(content)


def test_characters_outside_the_basic_plane_may_be_escaped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "\\ud83d\\ude00", "answer": "1"}\n')
    assert rows(tmp_path / "a.jsonl")[0]["question"] == "\U0001f600"


def test_what_is_no_number_is_absent(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"answer": NaN, "level": [NaN, Infinity]}\n')
    assert rows(tmp_path / "a.jsonl") == [{"answer": None, "level": [None, math.inf]}]
    assert rows(write(tmp_path / "a.parquet", [{"answer": 1.0}, {"answer": math.nan}]))[1] == {"answer": None}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bad.jsonl", b'{"a": 1}\n\n{"a": \n', "bad.jsonl:3: this line is not JSON: Expecting value at column 7; each"),
        ("list.jsonl", b'{"a": 1}\n[1]\n', "list.jsonl:2: list where an object was expected; write rows such as"),
        ("bad.json", b'[{"a": 1},\n {"a" 2}]', "bad.json:2: this file is not JSON"),
        ("numbers.json", b"[1, 2]", "numbers.json: row 1 is int where an object was expected"),
        ("bad.csv", b"a,b\n1,2\n3\n", "bad.csv:3: 1 cells under a header of 2; quote cells"),
        ("twice.csv", b"a,b,a\n1,2,3\n", "twice.csv:1: 2 columns are called 'a'; rename all but one"),
        ("quote.csv", b'a,b\n1,"2" x\n', "quote.csv:2: this is not CSV"),
        ("latin.jsonl", '{"a": "é"}'.encode("latin-1"), "latin.jsonl: this file is not UTF-8 text; save it as UTF-8"),
        ("bad.jsonl.gz", b"not gzip", "bad.jsonl.gz: this gzip file is damaged"),
        ("cut.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0)[:-9], "cut.jsonl.gz: this gzip file is damaged"),
        ("bad.parquet", b"PAR1 no", "bad.parquet: this is not a parquet file; write or download it again"),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\n", "parquet file; it is a Git LFS pointer"),
        ("half.jsonl", b'{"a": 1}\n{"a": "\\ud83d x"}\n', "half.jsonl:2: this line is not JSON: it holds half of"),
        ("half.json", b'[{"a": "\\uDE00"}]', "half.json: this file is not JSON: it holds half of a surrogate pair"),
        ("long.jsonl", b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}\n", "long.jsonl:2: this line is not JSON: it holds a"),
        ("deep.jsonl", b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", "deep.jsonl:1: this line is not JSON: it is"),
        ("deep.json", b"[" * 10**5 + b"]" * 10**5, "deep.json: this file is not JSON: it is nested too deeply"),
        ("page.parquet", damaged_page(), "page.parquet: this parquet file is damaged; write or download it again"),
        ("empty.jsonl", b"\n", "empty.jsonl: there are no rows here"),
        ("empty.csv", b"a,b\n", "empty.csv: there are no rows here"),
        ("data.txt", b"hello", "data.txt: this kind of file cannot be read; give one of .parquet, .jsonl"),
    ],
)  # fmt: skip
def test_wrong_files_get_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows(path)
    said = str(caught.value)
    assert sentence in said and str(path) in said and "\n" not in said


def test_a_missing_file_offers_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match=r"trian.jsonl' does not exist; in .*: did you mean 'train.jsonl'"):
        rows(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match=r"does not exist; in .*: write one of: train.jsonl"):
        rows(tmp_path / "no" / "such" / "folder")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UserError, match=f"gone.jsonl' does not exist; it was looked for in {tmp_path}$"):
        rows(tmp_path / "gone.jsonl")


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="this folder holds no data files; it needs one of"):
        rows(tmp_path)


def test_the_hub_offline_gets_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError) as caught:
        rows("nobody/nothing")
    assert "the hub dataset 'nobody/nothing' is not on this machine and the hub cannot be reached" in str(caught.value)
    assert "\n" not in str(caught.value)
