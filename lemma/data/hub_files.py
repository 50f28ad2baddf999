"""What a hub says of the files of a repository, checked once, where it enters: it may be anybody's server."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from lemma.core.errors import UserError

CHUNK = 1 << 20
LONGEST_PATH, LONGEST_NAME = 1000, 255
MOST_RESTARTS = 5
OURS = ".cache"
"""The folder of a download in which this program keeps its own files."""


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. Its digest is a SHA-256 of the content, or git's SHA-1 of a small file."""

    name: str
    size: int
    digest: str

    def is_content_of(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        is_git = len(self.digest) == 40
        digest = hashlib.sha1(b"blob %d\0" % self.size) if is_git else hashlib.sha256()
        with open(path, "rb") as handle:
            while chunk := handle.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest() == self.digest


def listing(info: Any, repository: str) -> tuple[str, list[HubFile]]:
    """The commit and the files of a repository; what could lead out of its folder, or could not be compared with what
    arrives, is refused. What the client of somebody's upload left in `.cache` is no part."""
    if not re.fullmatch(r"[0-9a-f]{40,64}", str(info["sha"])):
        raise not_a_hub(f"the commit of '{repository}'")
    files = [_file(one, repository) for one in info["siblings"] or []]
    # What begins with a name and a slash follows it at once.
    names = sorted(f"{one.name}/" for one in files)
    if any(below.startswith(name) for name, below in pairwise(names)):
        raise not_a_hub(f"the names of the files of '{repository}'")
    return str(info["sha"]), [one for one in files if one.name.split("/")[0].casefold() != OURS]


def _file(one: dict[str, Any], repository: str) -> HubFile:
    name, lfs = one["rfilename"], one.get("lfs")
    if not is_name_below(name):
        raise UserError(f"'{repository}' has a file whose name leads out of its folder, {name!r}: nothing was written")
    if len(name) > LONGEST_PATH or any(len(part.encode()) > LONGEST_NAME for part in name.split("/")):
        raise UserError(f"'{repository}' has a file whose name is too long, {name[:80]!r}...: nothing was written")
    digest, size = (one.get("blobId") if lfs is None else lfs["sha256"]), one.get("size")
    form = r"[0-9a-f]{40}" if lfs is None else r"[0-9a-f]{64}"
    if type(size) is not int or size < 0 or not re.fullmatch(form, str(digest)):
        raise not_a_hub(f"the size or the digest of {name!r} in '{repository}'")
    return HubFile(name, size, str(digest))


def is_name_below(name: Any) -> bool:
    """Whether a name of a file stays below the folder it is joined to, on any system."""
    if not isinstance(name, str) or "\\" in name or re.match("[A-Za-z]:", name):
        return False
    if not all(one.isprintable() or unicodedata.category(one) == "Zs" for one in name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def not_a_hub(what: str) -> UserError:
    from huggingface_hub import constants

    return UserError(
        f"{constants.ENDPOINT} does not answer as a hub does about {what}",
        fix="check HF_ENDPOINT, or whether a proxy answers in its place",
    )


class PartFile:
    """The file that a download is written to, open at its end. It never becomes longer than what was announced: a part
    that is longer already is started anew, and a server that sends more is stopped, or begins again and again."""

    def __init__(self, path: Path, file: HubFile):
        self._file, self._handle, self._restarts = file, open(path, "ab"), 0
        if self.tell() > file.size:
            self._handle.truncate(0)
            self._handle.seek(0, os.SEEK_END)

    def tell(self) -> int:
        return self._handle.tell()

    def seek(self, place: int) -> int:
        return self._handle.seek(place)

    def truncate(self) -> int:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise UserError(
                f"the server breaks off '{self._file.name}' and begins it anew, again and again",
                fix="give the same command again, or use another mirror",
            )
        return self._handle.truncate()

    def write(self, data: bytes) -> int:
        if self._handle.tell() + len(data) > self._file.size:
            raise UserError(
                f"the server sends more of '{self._file.name}' than the {self._file.size:,} bytes that it announced",
                fix="give the same command again, or use another mirror",
            )
        return self._handle.write(data)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._handle.close()
