"""What prompts are: the format's, or the rows' own words; and whether the model's chat template is passed over."""

from __future__ import annotations

import warnings
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.data.data_options import DataOptions, SourceOptions
from lemma.data.load_rows import read_source
from lemma.data.sources import ARITHMETIC, files_of
from lemma.formats.encode import encode_prompt
from lemma.models.places import find_gguf
from lemma.recipe import Recipe

WRAPPED = "as the format writes them"
VERBATIM = "word for word, as the rows have them"
PLAIN = "none: the rows are text, which is learnt whole"


def prompts_in_words(data: DataOptions) -> str:
    """One phrase for all sources, or one for each. Of a file on this machine, the first row is looked at."""
    words_by_source = {source.source: _of_source(source) for source in data.mix or [data]}
    if len(set(words_by_source.values())) == 1:
        return next(iter(words_by_source.values()))
    return "; ".join(f"{source}: {words}" for source, words in words_by_source.items())


def _of_source(source: SourceOptions) -> str:
    usual = VERBATIM if source.verbatim else WRAPPED
    try:
        if source.source == ARITHMETIC or not files_of(source):
            return usual
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, item = next(read_source(source, lambda note: None))
    except (UserError, StopIteration, OSError):
        return usual  # what is wrong with the file is said elsewhere
    if not isinstance(item, Demonstration) or item.prompt is None:
        return WRAPPED
    return VERBATIM if item.prompt else PLAIN


def prompt_trouble(recipe: Recipe) -> str | None:
    """Why no prompt can be encoded, where the tokenizer is on this machine; warnings say what is odd about it."""
    path = recipe.model.tokenizer or recipe.model.path
    if path == "tiny":
        return None
    try:
        folder, files = Path(path).expanduser(), ("config.json", "tokenizer_config.json")
        if not any((folder / file).is_file() for file in files) and find_gguf(path) is None:
            return None
        from lemma.models.load_model import load_tokenizer

        encode_prompt(recipe.format, Problem((Message("user", "?"),)), load_tokenizer(path))
    except UserError as error:
        return str(error)
    return None
