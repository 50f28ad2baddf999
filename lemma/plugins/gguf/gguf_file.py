"""GGUF files: which one a path names, and what its head says. Imports neither torch nor the gguf package."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.models.places import GGUF_MAGIC

VERSIONS = (2, 3)
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
FLOAT32 = 0
ALIGNMENT = 32


def gguf_package(what: str = "--gguf") -> Any:
    """The package, or the sentence that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"{what} needs the gguf package", fix="install it with `.venv/bin/pip install -e '.[gguf]'`"
        ) from error
    return gguf


@dataclass(frozen=True)
class Header:
    """Everything before the weights. `tensors` have their shapes in torch's order, type and place."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def about(self, name: str, default: Any = None) -> Any:
        """A value of the model's own part of the metadata."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def config(self) -> dict[str, Any]:
        """The values of a config.json that tell the shape of the model; raises KeyError where the file does not."""
        heads = self.metadata[f"{self.architecture}.attention.head_count"]
        hidden = self.metadata[f"{self.architecture}.embedding_length"]
        values = {
            "num_hidden_layers": self.metadata[f"{self.architecture}.block_count"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self.about("attention.head_count_kv", heads),
            "head_dim": self.about("attention.key_length", hidden // heads),
            "intermediate_size": self.metadata[f"{self.architecture}.feed_forward_length"],
            "vocab_size": self.about("vocab_size") or len(self.metadata["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "num_experts": self.about("expert_count", 0),
        }
        if not all(isinstance(value, int) for value in values.values()):
            raise KeyError("layers that differ")
        return values


def read_header(file: Path) -> Header:
    """The metadata and the list of tensors of a file; whatever is wrong with it is said in one sentence. Not to be
    changed: callers share it."""
    try:
        facts = file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    return _read_header(file, (facts.st_ino, facts.st_size, facts.st_mtime_ns))


@lru_cache(1)  # a vocabulary takes half a second, and is asked for by everybody who needs a little of the file
def _read_header(file: Path, version: tuple[int, ...]) -> Header:
    try:
        with file.open("rb") as handle:
            if handle.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise UserError(f"{file} is not a GGUF file", fix="give a folder with a config.json, or a .gguf file")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _header(file, _Reader(blob))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise damaged(file) from error


def damaged(file: Path) -> UserError:
    return UserError(f"the file {file} is damaged or was cut short", fix="fetch it again")


def _header(file: Path, reader: _Reader) -> Header:
    version, count, pairs = reader.numbers("<IQQ")
    if version not in VERSIONS:
        raise UserError(f"{file} is GGUF version {version}", fix="convert it again: versions 2 and 3 are read")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.text()
        metadata[key] = reader.value(*reader.numbers("<I"))
    tensors = {}
    for _ in range(count):
        name = reader.text()
        (width,) = reader.numbers("<I")
        dimensions = reader.numbers(f"<{width}Q")
        kind, offset = reader.numbers("<IQ")
        tensors[name] = (tuple(reversed(dimensions)), kind, offset)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    start = -(-reader.place // alignment) * alignment
    tensors = {name: (shape, kind, start + offset) for name, (shape, kind, offset) in tensors.items()}
    if not isinstance(metadata.get("general.architecture"), str) or any(
        offset >= reader.size for _, _, offset in tensors.values()
    ):
        raise damaged(file)
    return Header(file, metadata, tensors)


class _Reader:
    """Values one after the other. Invariant: `place` is where the next one begins."""

    def __init__(self, blob: mmap.mmap):
        self.blob, self.place, self.size = blob, len(GGUF_MAGIC), len(blob)

    def numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.blob, self.place)
        self.place += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (length,) = self.numbers("<Q")
        if length > self.size - self.place:
            raise ValueError("a text longer than the file")
        self.place += length
        return self.blob[self.place - length : self.place].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(FORMATS[kind])[0]
        inner, count = self.numbers("<IQ")
        if count > self.size:
            raise ValueError("an array longer than the file")
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(count)]
        return list(self.numbers(f"<{count}{FORMATS[inner][1]}"))


def ends_of_turns(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that the file itself names as ends: of the sequence first, then of a turn and of a message."""
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(number for number in ids if isinstance(number, int)))
