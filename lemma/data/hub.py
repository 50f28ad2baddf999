"""Downloads models and datasets from the Hugging Face hub, or the mirror that HF_ENDPOINT names, into a plain
folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from lemma.core.errors import UserError
from lemma.core.files import write_whole
from lemma.data.sources import ALIASES, HubName

Kind = Literal["model", "dataset"]
LARGE = 8 << 20
"""Files of at least this many bytes are fetched in parts."""
SHOWN = 20
"""How many file names a message lists."""
PARTS = Path(".cache") / "lemma"
ORIGIN = Path(".cache") / "lemma-origin.json"
"""The file next to a downloaded repository that holds its name and commit."""
FOLDERS: dict[Kind, str] = {"model": "model", "dataset": "data"}


def default_folder(kind: Kind, name: str) -> Path:
    """`model/<name>` or `data/<name>`, under the folder that the command runs in."""
    return Path(FOLDERS[kind]) / name


def download(
    kind: Kind, name: str, to: Path | None = None, revision: str | None = None, only: str | None = None
) -> Path:
    """Fetch a repository at one commit, or those of its files that match a pattern; files already there are not fetched
    again."""
    from huggingface_hub import HfApi, snapshot_download

    folder = to or default_folder(kind, name)
    repository = ALIASES.get(name, HubName(name)).path if kind == "dataset" else name
    with hub_errors(kind, repository, revision):
        # Without asking first, an unreachable hub would look like a finished download if the folder exists.
        info = HfApi().repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
        wanted = _wanted(info, repository, only)
        _fetch_large(kind, repository, info.sha, wanted, folder)
        snapshot_download(repository, repo_type=kind, revision=info.sha, local_dir=folder, allow_patterns=only)
    missing = [one.rfilename for one in wanted if not _is_whole(folder / one.rfilename, one.size)]
    if missing:
        raise UserError(
            f"the download of '{repository}' ended without {missing[0]}", fix="give the same command again to resume"
        )
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    write_whole(folder / ORIGIN, json.dumps({"repository": repository, "kind": kind, "revision": info.sha}) + "\n")
    return folder


def hub_origin(folder: Path) -> str | None:
    """The hub name of a downloaded folder, whether by `lemma download` or in the hub client's cache."""
    folder = folder.expanduser().absolute()
    try:
        return str(json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["repository"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    for part in folder.parts:
        if part.startswith("models--") and "snapshots" in folder.parts:
            return part.removeprefix("models--").replace("--", "/")
    return None


@contextmanager
def hub_errors(kind: Kind, name: str, revision: str | None = None) -> Iterator[None]:
    """Context in which the hub is asked for this repository: errors of its client become one sentence."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.TransportError, ConnectionError) as error:
        raise _sentence(kind, name, revision, error) from error


def _wanted(info: Any, repository: str, only: str | None) -> list[Any]:
    """The files of a repository that are fetched."""
    files = list(info.siblings or [])
    wanted = [one for one in files if only is None or fnmatchcase(one.rfilename, only)]
    if files and not wanted:
        names = sorted(one.rfilename for one in files)
        more = ", ..." if len(names) > SHOWN else ""
        raise UserError(f"no file of '{repository}' is called '{only}'", fix=f"it has {', '.join(names[:SHOWN])}{more}")
    return wanted


def _fetch_large(kind: Kind, repository: str, commit: str, files: Sequence[Any], folder: Path) -> None:
    """Fetch large files in parts that a later run can resume from; the client itself would start each file over.

    The content is not verified here: the client compares the digest of every large file that it finds in the folder.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    for one in files:
        path = folder / one.rfilename
        if one.lfs is None or path.exists() or not LARGE <= one.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            continue
        part = folder / PARTS / one.lfs.sha256
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab") as handle:
            url = hf_hub_url(repository, one.rfilename, repo_type=kind, revision=commit)
            http_get(
                url,
                handle,
                resume_size=handle.tell(),
                headers=build_hf_headers(),
                expected_size=one.size,
                displayed_filename=path.name,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _sentence(kind: Kind, name: str, revision: str | None, error: Exception) -> UserError:
    """What to tell people about an error of the hub's client."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return UserError(f"'{name}' cannot be the name of a {kind}", fix="write it like owner/name")
    if isinstance(error, GatedRepoError):
        return UserError(
            f"the {kind} '{name}' is gated on {hub}", fix="accept its terms there and log in with `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"the {kind} '{name}' has no revision '{revision}' on {hub}", fix="name a branch, tag or commit"
        )
    if isinstance(error, RepositoryNotFoundError):
        return UserError(
            f"there is no {kind} '{name}' on {hub}",
            fix="check the spelling, or log in with `hf auth login` where it is private",
        )
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(f"the {kind} '{name}' cannot be fetched offline", fix="unset HF_HUB_OFFLINE")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return UserError(
            f"{hub} answered {error.response.status_code} for the {kind} '{name}'",
            fix="give the same command again later",
        )
    return UserError(
        f"{hub} cannot be reached for the {kind} '{name}'",
        fix="check the network and HF_ENDPOINT, then give the same command again: it resumes where it stopped",
    )
