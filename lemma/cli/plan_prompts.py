"""What a supervised stage's prompts are: the format's, or the rows' own words."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.data.data_options import DataOptions, SourceOptions

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
    from lemma.core.types import Demonstration
    from lemma.data.load_rows import read_source
    from lemma.data.sources import ARITHMETIC, files_of

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
