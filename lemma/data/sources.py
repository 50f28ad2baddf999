"""Where rows come from: a file, a folder of files, or the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lemma.core.errors import UserError, nearest
from lemma.data.data_options import SourceOptions
from lemma.data.rows import JsonError, Row, parsed

ARITHMETIC = "arithmetic"


class HubName(NamedTuple):
    """A dataset of the hub and the configuration that is meant when none is given."""

    path: str
    config: str | None = None


ALIASES: dict[str, HubName] = {
    "gsm8k": HubName("openai/gsm8k", "main"),
    "openai/gsm8k": HubName("openai/gsm8k", "main"),
    "math": HubName("DigitalLearningGmbH/MATH-lighteval", "default"),
    "math500": HubName("HuggingFaceH4/MATH-500"),
    "aime24": HubName("HuggingFaceH4/aime_2024"),
    "aime25": HubName("math-ai/aime25"),
    "amc23": HubName("math-ai/amc23"),
    "minerva_math": HubName("math-ai/minervamath"),
    "olympiadbench": HubName("math-ai/olympiadbench"),
    "arc_challenge": HubName("allenai/ai2_arc", "ARC-Challenge"),
    "mmlu_pro": HubName("TIGER-Lab/MMLU-Pro"),
    "gpqa_diamond": HubName("Idavidrein/gpqa", "gpqa_diamond"),
    "dapo_math": HubName("open-r1/DAPO-Math-17k-Processed", "en"),
    "numina_tir": HubName("AI-MO/NuminaMath-TIR"),
    "openr1_math": HubName("Elliott/Openr1-Math-46k-8192"),
    "openr1_math_complement": HubName("Elliott/Openr1-Math-48k-Complement"),
    "open_math_reasoning_mini": HubName("unsloth/OpenMathReasoning-mini"),
    "hh_rlhf": HubName("Anthropic/hh-rlhf"),
    "ultrafeedback": HubName("HuggingFaceH4/ultrafeedback_binarized"),
}

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz")
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"}
MMLU_COLUMNS = ["question", "A", "B", "C", "D", "answer"]


def rows_of(options: SourceOptions) -> list[Row]:
    """All rows of a source that is not the built-in generator; never none."""
    files = files_of(options)
    rows = [row for file in files for row in read_file(file)] if files else list(_hub_rows(options))
    if not rows:
        raise UserError("there are no rows here", file=options.source, fix="name a source that holds at least one row")
    return rows


def files_of(options: SourceOptions) -> list[Path]:
    """The files of a source on this disk; none where it is a dataset of the hub."""
    path = Path(options.source).expanduser()
    if path.is_dir():
        return _files_in(path, options)
    if path.exists():
        if not _suffix(path):
            raise UserError("this kind of file cannot be read", file=path, fix=f"give one of {', '.join(SUFFIXES)}")
        return [path]
    if _looks_like_path(options.source):
        raise UserError(f"the file or folder '{options.source}' does not exist", fix=_neighbour(path))
    return []


def check_files(options: SourceOptions) -> None:
    """Refuse a source on this disk that is not there; what is made up or lies on the hub is not looked for."""
    if options.source != ARITHMETIC:
        files_of(options)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _looks_like_path(source: str) -> bool:
    return bool(_suffix(Path(source))) or source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source


def _neighbour(path: Path) -> str:
    """What to write instead of a path that does not exist."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() or _suffix(entry)]
    return f"in {folder.resolve() if folder == Path() else folder}: {nearest(path.name, names)}"


def _files_in(folder: Path, options: SourceOptions) -> list[Path]:
    """The data files of a folder, in order; only those of the split and configuration where names tell them apart."""
    named = _splits_in(folder, options)
    if not any(named.values()):
        return list(named)
    chosen = [path for path, words in named.items() if options.split in words]
    if not chosen:
        splits = sorted(set().union(*named.values()))
        raise UserError(
            f"no data file of split '{options.split}'", file=folder, fix=f"splits here: {', '.join(splits)}"
        )
    return chosen


def _splits_in(folder: Path, options: SourceOptions) -> dict[Path, set[str]]:
    """The data files of a folder, or of one configuration, in order, and the splits that their names tell."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path.relative_to(folder)))
    if not found:
        raise UserError("this folder holds no data files", file=folder, fix=f"it needs one of {', '.join(SUFFIXES)}")
    if options.config is not None:
        found = [path for path in found if options.config in path.relative_to(folder).parts]
        if not found:
            raise UserError(f"no data file of this folder is in a folder '{options.config}'", file=folder)
    return {path: _words(path.relative_to(folder)) & set(SPLITS) for path in found}


def files_of_no_split(options: SourceOptions) -> list[Path]:
    """Data files of a folder that are left out because other names tell a split and theirs tell none."""
    folder = Path(options.source).expanduser()
    named = _splits_in(folder, options) if folder.is_dir() else {}
    return [path for path, words in named.items() if not words] if any(named.values()) else []


def _is_data(path: Path) -> bool:
    return bool(_suffix(path)) and path.name not in NOT_DATA and not any(part.startswith(".") for part in path.parts)


def _words(path: Path) -> set[str]:
    return set(re.split(r"[-_./\\]", str(path)))


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file, each with its line where the file has lines."""
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet_rows(path)
            return
        with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as handle:
            content = handle.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("this file is not UTF-8 text", file=path, fix="save it as UTF-8") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError("this gzip file is damaged", file=path, fix="write or download it again") from error
    except PermissionError as error:
        raise UserError("this file may not be read", file=path, fix="change its permissions") from error
    kind = (_suffix(path) or "").removesuffix(".gz")
    if kind == ".csv":
        yield from _csv_rows(path, content)
    elif kind == ".json" and content.lstrip().startswith("["):
        yield from _json_rows(path, content)
    else:
        yield from _line_rows(path, content)


def _line_rows(path: Path, content: str) -> Iterator[Row]:
    number = 0
    for line, one in enumerate(content.split("\n"), start=1):
        if not one.strip():
            continue
        try:
            values = parsed(one)
        except JsonError as error:
            raise UserError(
                f"this line is not JSON: {error}",
                file=path,
                line=line,
                fix="each line must be one whole JSON object",
            ) from error
        number += 1
        yield _row(values, path, number, line)


def _json_rows(path: Path, content: str) -> Iterator[Row]:
    try:
        found = parsed(content)
    except JsonError as error:
        raise UserError(
            f"this file is not JSON: {error}", file=path, line=error.line, fix="write a list of objects"
        ) from error
    for number, values in enumerate(found, start=1):
        yield _row(values, path, number, None)


def _row(values: Any, path: Path, number: int, line: int | None) -> Row:
    if not isinstance(values, dict):
        where = "" if line is not None else f"row {number} is "
        raise UserError(
            f"{where}{type(values).__name__} where an object was expected",
            file=path,
            line=line,
            fix='write rows such as {"question": "...", "answer": "..."}',
        )
    return Row(values, str(path), number, line)


def _csv_rows(path: Path, content: str) -> Iterator[Row]:
    """Rows under a header; the files of MMLU have none and are known by the letter in their last cell."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    names: list[str] = []
    number = 0
    try:
        for cells in reader:
            if not names and not (len(cells) == len(MMLU_COLUMNS) and cells[-1] in {"A", "B", "C", "D"}):
                names = cells
                _check_header(path, names, reader.line_num)
                continue
            names = names or MMLU_COLUMNS
            if not cells:
                continue
            if len(cells) != len(names):
                raise UserError(
                    f"{len(cells)} cells under a header of {len(names)}",
                    file=path,
                    line=reader.line_num,
                    fix="quote cells that hold commas or line breaks",
                )
            number += 1
            values = {name: cell or None for name, cell in zip(names, cells, strict=True)}
            yield Row(values, str(path), number, reader.line_num)
    except csv.Error as error:
        raise UserError(
            f"this is not CSV: {error}", file=path, line=reader.line_num, fix="repair the quotes"
        ) from error


def _check_header(path: Path, names: list[str], line: int) -> None:
    """Refuse a name that stands over two columns: one of them would be lost."""
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise UserError(
            f"{names.count(twice[0])} columns are called '{twice[0]}'", file=path, line=line, fix="rename all but one"
        )


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_table(path).to_pylist()
    except PermissionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        with open(path, "rb") as handle:
            start = handle.read(40)
        pointer = start.startswith(b"version https://git-lfs")
        fix = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "write or download it again"
        what = (
            "this is not a parquet file" if isinstance(error, pyarrow.ArrowInvalid) else "this parquet file is damaged"
        )
        raise UserError(what, file=path, fix=fix) from error
    for number, values in enumerate(found, start=1):
        yield Row(_without_nan(values), str(path), number)


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row; a float that is no number is how tables keep what is absent."""
    return {name: None if isinstance(cell, float) and math.isnan(cell) else cell for name, cell in values.items()}


def hub_name(options: SourceOptions) -> HubName:
    """The full name and configuration of a hub dataset, aliases resolved."""
    known = ALIASES.get(options.source, HubName(options.source))
    return HubName(known.path, options.config or known.config)


def _hub_rows(options: SourceOptions) -> Iterator[Row]:
    name, config = hub_name(options)
    dataset = _load_from_hub(name, config, options)
    for number, values in enumerate(dataset, start=1):
        yield Row(_without_nan(values), name, number)


def _load_from_hub(name: str, config: str | None, options: SourceOptions) -> Any:
    """A dataset through the `datasets` library, which honours HF_ENDPOINT and the offline switches."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    revision = f" at revision '{options.revision}'" if options.revision else ""
    try:
        return datasets.load_dataset(name, config, split=options.split, revision=options.revision)
    except DatasetNotFoundError as error:
        close = nearest(options.source, [ARITHMETIC, *ALIASES]) if "/" not in options.source else "check the spelling"
        raise UserError(
            f"there is no file and no public hub dataset '{name}'{revision}",
            fix=f"{close}, or log in with `hf auth login` where it is private or gated",
        ) from error
    except (ConnectionError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        raise UserError(
            f"the hub dataset '{name}' is not on this machine and the hub cannot be reached",
            fix=f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or run `lemma download dataset {name}` elsewhere",
        ) from error
    except (ValueError, FileNotFoundError, DatasetsError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"the hub dataset '{name}' could not be loaded: {said}", fix="check split and config"
        ) from error
