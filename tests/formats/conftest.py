from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.formats.tokenizers_made_here import all_tokenizers


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return all_tokenizers()
