from __future__ import annotations

import pytest
from tokenizers_made_here import all_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return all_tokenizers()
