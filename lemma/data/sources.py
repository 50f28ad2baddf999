"""Where rows come from: a file, a folder of files, or the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from lemma.core.errors import MANY, UserError, nearest, nearest_file
from lemma.core.hub_access import looks_like_path, notice_offline
from lemma.data.bounded_lines import check_is_file
from lemma.data.data_options import SourceOptions
from lemma.data.guessing import HIGHER_LOWER, game_rows
from lemma.data.read_files import SUFFIXES, read_file, suffix_of, without_nan
from lemma.data.rows import Row

ARITHMETIC = "arithmetic"
BUILT_IN = (ARITHMETIC, HIGHER_LOWER)


class HubName(NamedTuple):
    """A hub dataset and its default configuration."""

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
    "hellaswag": HubName("Rowan/hellaswag"),
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

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
SAVED_SPLITS = "dataset_dict.json"
NOT_DATA = {"dataset_infos.json", "dataset_info.json", SAVED_SPLITS, "state.json", "config.json"}


def rows_of(options: SourceOptions) -> list[Row]:
    """All rows of a source that is not the built-in generator, at once."""
    return list(stream_rows(options))


def stream_rows(options: SourceOptions, *, streamed: bool = False) -> Iterator[Row]:
    """All rows of a source that is not the built-in generator; there is at least one.

    Files are read in pieces. A hub dataset is downloaded first, unless it is `streamed`.
    """
    files = files_of(options)
    source_rows = (row for file in files for row in read_file(file)) if files else _made_or_hub(options, streamed)
    rows = iter(options.part.of(source_rows))
    first = next(rows, None)
    if first is None:
        raise UserError("there are no rows here", file=options.source, fix="name a source that holds at least one row")
    yield first
    yield from rows


def _made_or_hub(options: SourceOptions, streamed: bool) -> Iterator[Row]:
    if options.source == HIGHER_LOWER:
        return game_rows(options.guessing, options.part.split)
    return _hub_rows(options, streamed)


def files_of(options: SourceOptions) -> list[Path]:
    """The files of a local source, which must exist; empty if it is built in or a hub dataset."""
    if options.source in BUILT_IN:
        return []
    path = Path(options.source).expanduser()
    if path.is_dir():
        return _files_in(path, options)
    if path.exists():
        if not suffix_of(path):
            raise UserError("this kind of file cannot be read", file=path, fix=f"give one of {', '.join(SUFFIXES)}")
        check_is_file(path)
        _check_split(path, options.part.split)
        return [path]
    if suffix_of(path) or looks_like_path(options.source):
        raise UserError(f"the file or folder '{options.source}' does not exist", fix=_neighbour(path))
    return []


def _neighbour(path: Path) -> str:
    """What to write instead of a path that does not exist."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() or suffix_of(entry)]
    shown = folder.resolve() if folder == Path() else folder
    close = nearest_file(path.name, names)
    if close:
        return f"in {shown}: did you mean '{close}'?"
    if 0 < len(names) <= MANY:
        return f"in {shown}: write one of: {', '.join(sorted(names))}"
    return f"it was looked for in {shown}"


def _check_split(path: Path, split: str) -> None:
    """A file without split names is read whole, whatever split is asked for; but refuse a misspelt split."""
    close = get_close_matches(split, SPLITS, n=1, cutoff=0.7)
    if close and split not in SPLITS:
        raise UserError(f"there is no split '{split}'", file=path, fix=f"did you mean '{close[0]}'?")


def _files_in(folder: Path, options: SourceOptions) -> list[Path]:
    """The data files of a folder, in order; only those of the split and configuration, if their names tell them
    apart."""
    if (folder / SAVED_SPLITS).is_file():
        return _saved_files(folder, options.part.split)
    named = _splits_in(folder, options)
    if not any(named.values()):
        _check_split(folder, options.part.split)
        return list(named)
    chosen = [path for path, words in named.items() if options.part.split in words]
    if not chosen:
        splits = sorted(set().union(*named.values()))
        raise UserError(
            f"no data file of split '{options.part.split}'", file=folder, fix=f"splits here: {', '.join(splits)}"
        )
    return chosen


def _saved_files(folder: Path, split: str) -> list[Path]:
    """The files of one split of what `DatasetDict.save_to_disk` wrote."""
    files = sorted((folder / split).glob("*.arrow"))
    if not files:
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise UserError(f"no data file of split '{split}'", file=folder, fix=f"splits here: {', '.join(splits)}")
    return files


def _splits_in(folder: Path, options: SourceOptions) -> dict[Path, set[str]]:
    """The data files of a folder, or of one configuration, in order, and the splits that their names indicate."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path.relative_to(folder)))
    if not files:
        raise UserError("this folder holds no data files", file=folder, fix=f"it needs one of {', '.join(SUFFIXES)}")
    if options.config is not None:
        files = [path for path in files if options.config in path.relative_to(folder).parts]
        if not files:
            raise UserError(f"no data file of this folder is in a folder '{options.config}'", file=folder)
    return {path: _words(path.relative_to(folder)) & set(SPLITS) for path in files}


def files_of_no_split(options: SourceOptions) -> list[Path]:
    """Data files of a folder that are left out because other names indicate a split and theirs do not."""
    folder = Path(options.source).expanduser()
    named = _splits_in(folder, options) if folder.is_dir() and not (folder / SAVED_SPLITS).is_file() else {}
    return [path for path, words in named.items() if not words] if any(named.values()) else []


def _is_data(path: Path) -> bool:
    return bool(suffix_of(path)) and path.name not in NOT_DATA and not any(part.startswith(".") for part in path.parts)


def _words(path: Path) -> set[str]:
    return set(re.split(r"[-_./\\]", str(path)))


def hub_name(options: SourceOptions) -> HubName:
    """The full name and configuration of a hub dataset, aliases resolved."""
    known = ALIASES.get(options.source, HubName(options.source))
    return HubName(known.path, options.config or known.config)


def _hub_rows(options: SourceOptions, streamed: bool = False) -> Iterator[Row]:
    name, config = hub_name(options)
    dataset = _load_from_hub(name, config, options, streamed)
    for number, values in enumerate(dataset, start=1):
        yield Row(without_nan(values), name, number)


def _load_from_hub(name: str, config: str | None, options: SourceOptions, streamed: bool) -> Any:
    """A dataset through the `datasets` library, which honours HF_ENDPOINT and the offline switches."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    revision = f" at revision '{options.revision}'" if options.revision else ""
    notice_offline()
    try:
        wanted = {"split": options.part.split, "revision": options.revision}
        return datasets.load_dataset(name, config, **wanted, streaming=streamed)
    except DatasetNotFoundError as error:
        close = nearest(options.source, [*BUILT_IN, *ALIASES]) if "/" not in options.source else "check the spelling"
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
