"""Downloads models and datasets from the Hugging Face hub, or the mirror that HF_ENDPOINT names, into a plain
folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import quote

from lemma.core.errors import UserError
from lemma.core.files import write_whole
from lemma.core.version import lemma_version
from lemma.data.hub_files import OURS, HubFile, PartFile, listing, not_a_hub
from lemma.data.sources import ALIASES, HubName

Kind = Literal["model", "dataset"]
LARGE = 8 << 20
"""Files of at least this many bytes show a bar while they are fetched."""
LONGEST_LISTING, LONGEST_REFUSAL = 64 << 20, 1 << 20
LONGEST_WAIT = 300
"""For how many seconds a hub may have its client wait before it asks again: as long as the hub counts requests."""
SHOWN = 20
"""How many file names a message lists."""
PARTS = Path(OURS) / "lemma"
ORIGIN = Path(OURS) / "lemma-origin.json"
"""The file next to a downloaded repository that holds its name and commit."""
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
FOLDERS: dict[Kind, str] = {"model": "model", "dataset": "data"}


def default_folder(kind: Kind, name: str) -> Path:
    """`model/<name>` or `data/<name>`, under the folder that the command runs in."""
    return Path(FOLDERS[kind]) / name


def download(
    kind: Kind, name: str, to: Path | None = None, revision: str | None = None, only: str | None = None
) -> Path:
    """Fetch a repository at one commit, or those of its files that match a pattern; files already there are not fetched
    again.

    What the hub says is not trusted: names stay below the folder, and a file gets its name when its content has the
    size and the digest that were announced.
    """
    folder = to or default_folder(kind, name)
    repository = ALIASES.get(name, HubName(name)).path if kind == "dataset" else name
    # Without asking first, an unreachable hub would look like a finished download if the folder exists.
    with hub_errors(kind, repository, revision), _answers_checked():
        commit, files = listing(_described(kind, repository, revision), repository)
    verified = _verified_before(folder)
    for one in _wanted(files, repository, only):
        path = folder / one.name
        if verified.get(one.name, []) != _stamp(path, one) and not one.is_content_of(path):
            with hub_errors(kind, repository, revision), _answers_checked():
                _fetch(kind, repository, commit, one, folder)
        verified[one.name] = _stamp(path, one)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    origin = {"repository": repository, "kind": kind, "revision": commit, "verified": verified}
    write_whole(folder / ORIGIN, json.dumps(origin) + "\n")
    return folder


def hub_origin(folder: Path) -> str | None:
    """The hub name of a downloaded folder, whether by `lemma download` or in the hub client's cache."""
    folder = folder.expanduser().absolute()
    try:
        name = str(json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["repository"])
        return name if NAME.fullmatch(name) else None
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

    refused = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError)
    try:
        yield
    except (*refused, httpx.HTTPError, httpx.InvalidURL, ConnectionError) as error:
        raise _sentence(kind, name, revision, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # What the client raises where an answer is not of the hub's form, or ends too soon.
        raise not_a_hub(f"the {kind} '{name}'") from error


@contextmanager
def _answers_checked() -> Iterator[None]:
    """Context in which every answer is looked at before the hub's client reads it: one in a coding, which nobody asked
    for, may become any number of bytes; of redirections and refusals the client reads all there is, and it waits for as
    long as it is told."""
    import httpx
    from huggingface_hub.utils import get_session

    def check(answer: httpx.Response) -> None:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise not_a_hub("the coding of its answers")
        if not answer.is_success:
            told = f"t={answer.headers.get('Retry-After')} {answer.headers.get('RateLimit')}"
            if max(map(int, re.findall(r"\bt\s*=\s*(\d+)", told)), default=0) > LONGEST_WAIT:
                raise UserError(f"{answer.url.host} lets nobody ask again for a long time", fix="try again later")
            text, stream = bytearray(), cast("httpx.SyncByteStream", answer.stream)
            for piece in stream:
                text += piece
                if len(text) > LONGEST_REFUSAL:
                    raise not_a_hub("what it refuses or moves")
            stream.close()
            answer.stream = httpx.ByteStream(bytes(text))

    session = get_session()
    before = session.event_hooks
    session.event_hooks = before | {"response": [*before["response"], check]}
    try:
        yield
    finally:
        session.event_hooks = before


def _described(kind: Kind, repository: str, revision: str | None) -> Any:
    """What the hub says of a repository, of which no more is read than any list of files takes."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status, validate_repo_id

    validate_repo_id(repository)
    place = f"{constants.ENDPOINT}/api/{kind}s/{repository}"
    place += f"/revision/{quote(revision, safe='')}" if revision is not None else ""
    text, limit = bytearray(), constants.HF_HUB_ETAG_TIMEOUT
    with get_session().stream("GET", place, params={"blobs": True}, headers=_headers(), timeout=limit) as answer:
        for piece in answer.iter_bytes():
            text += piece
            if len(text) > LONGEST_LISTING:
                raise not_a_hub(f"the {kind} '{repository}'")
    told = {name: value for name, value in answer.headers.items() if name.startswith("x-")}
    hf_raise_for_status(httpx.Response(answer.status_code, headers=told, content=bytes(text), request=answer.request))
    return json.loads(text)


def _headers() -> dict[str, str]:
    """The login, if there is one. The client's own headers are not taken: for them it asks the hub which programs use
    it and how to recognise them by the environment, reads as much as comes, and writes that outside of the folder."""
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    login = {} if token is None else {"Authorization": f"Bearer {token}"}
    return {"User-Agent": f"lemma/{lemma_version()}", "Accept-Encoding": "identity"} | login


def _wanted(files: Sequence[HubFile], repository: str, only: str | None) -> list[HubFile]:
    """The files of a repository that are fetched."""
    wanted = [one for one in files if only is None or fnmatchcase(one.name, only)]
    if files and not wanted:
        names = sorted(one.name for one in files)
        more = ", ..." if len(names) > SHOWN else ""
        raise UserError(f"no file of '{repository}' is called '{only}'", fix=f"it has {', '.join(names[:SHOWN])}{more}")
    return wanted


def _verified_before(folder: Path) -> dict[str, Any]:
    """The stamps of files whose content was compared with its digest by an earlier download."""
    try:
        found = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["verified"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path, file: HubFile) -> list[Any] | None:
    """Digest, size and time of a file that is there: as long as they are the same, so is its content."""
    if not path.is_file():
        return None
    found = path.stat()
    return [file.digest, found.st_size, found.st_mtime_ns]


def _fetch(kind: Kind, repository: str, commit: str, file: HubFile, folder: Path) -> None:
    """Fetch a file in a part that a later run can resume from, and give it its name where its content is right."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from tqdm.auto import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise UserError(f"'{file.name}' is larger than the hub gives in one answer", fix="fetch it with `hf download`")
    part = folder / PARTS / file.digest
    part.parent.mkdir(parents=True, exist_ok=True)
    with PartFile(part, file) as handle:
        is_resumed = handle.tell() > 0
        http_get(
            hf_hub_url(repository, file.name, repo_type=kind, revision=commit),
            cast("BinaryIO", handle),
            resume_size=handle.tell(),
            headers=_headers(),
            expected_size=file.size,
            displayed_filename=file.name.rpartition("/")[2],
            tqdm_class=None if file.size >= LARGE else NoBar,
        )
    if not file.is_content_of(part):
        part.unlink()
        if is_resumed:
            return _fetch(kind, repository, commit, file, folder)
        raise UserError(
            f"the content of '{file.name}' that {constants.ENDPOINT} sent is not what it announced",
            fix="give the same command again, or use another mirror",
        )
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.replace(part, path)


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
