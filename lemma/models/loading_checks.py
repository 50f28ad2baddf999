"""What is wrong with a model on disk, in one sentence: other libraries read it, and raise whatever they like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lemma.core.errors import UserError
from lemma.core.hub_access import is_offline, why_offline
from lemma.models.attention import NAME

LONGEST_REASON = 200
DOCTOR = "check that folder with `lemma doctor`"
AGAIN = "fetch or export the model again"
NO_TOKENIZER = "put tokenizer.json and tokenizer_config.json next to the weights, or name a folder in model.tokenizer"
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken", "*.py")
NO_MODEL = "check the name, or fetch it with `lemma download model`"


@contextmanager
def loading(what: str, path: str, override: Mapping[str, Any] | None = None, fix: str = DOCTOR) -> Iterator[None]:
    """Within `with`, another library reads files of `path`: whatever it raises becomes a user error.

    `override` are values that the recipe put in place of the files' own, which may be what is wrong.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # there is no list of what a damaged file makes another library raise
        raise _cannot_load(what, path, error, repair(override, fix)) from error


def repair(override: Mapping[str, Any] | None, otherwise: str) -> str:
    return "check model.override" if override else otherwise


def reason_of(error: BaseException) -> str:
    """An error's message on one line; where the first line only announces the rest, both."""
    if isinstance(error, UnpicklingError):
        return "its .bin file is damaged, or holds something else than tensors"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
    bare = not text or isinstance(error, KeyError | IndexError)
    return (f"{type(error).__name__} {text}".strip() if bare else text)[:LONGEST_REASON]


def _cannot_load(what: str, path: str, error: Exception, fix: str) -> UserError:
    if error.args == (NAME,):
        return UserError(
            f"the attention of {path} is built into its class (as in GPT-J and Falcon); Lemma cannot replace it",
            fix="take a family that docs/engines.md lists",
        )
    if isinstance(error, OSError) and not Path(path).exists():
        where = f"and {why_offline()}" if is_offline() else "nor can it be had from the hub"
        return UserError(f"there is no folder {path}, {where}", fix=_other_model(Path(path)))
    return UserError(f"the {what} of {path} cannot be loaded: {reason_of(error)}", fix=fix)


def check_tokenizer_files(path: str, folder: Path) -> None:
    """Refuse a folder of weights alone: what another library says of it is long and names no file."""
    if folder.is_dir() and not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise UserError(f"the folder {path} holds no tokenizer", fix=NO_TOKENIZER)


def _other_model(path: Path) -> str:
    """What to write instead of a folder that does not exist: one beside it of nearly the same name."""
    folder = path.expanduser().parent
    models = [one.name for one in folder.iterdir() if (one / "config.json").is_file()] if folder.is_dir() else []
    close = get_close_matches(path.name, models, n=1, cutoff=0.8)
    return f"did you mean '{path.with_name(close[0])}'?" if close else NO_MODEL


def check_weights(path: str, info: Any, fix: str = AGAIN) -> None:
    """Refuse weights that the configuration wants and the folder does not have, instead of making some up."""
    wrong = [(str(name), "is missing") for name in sorted(info["missing_keys"])]
    wrong += [
        (str(name), f"has shape {tuple(is_)}, not {tuple(wants)}")
        for name, is_, wants in sorted(info["mismatched_keys"])
    ]
    if wrong:
        name, what = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"the weights of {path} do not fit its configuration: {name} {what}{others}", fix=fix)


def check_vocabulary(source: str, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that writes tokens which the model has no embedding for."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values(), default=0) + 1
    if tokens > rows:
        raise UserError(f"the tokenizer of {source} has {tokens} tokens, and the model knows {rows}",
                        fix="take the tokenizer that the model was trained with")  # fmt: skip
