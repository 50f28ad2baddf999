"""A small Hugging Face hub on this machine: enough of its interface for the real client to list and fetch files.

Files are served with entity tags and byte ranges. A test can make the server stop in the middle of a file, ask for a
login, and look at the requests that came.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 20
"""Files of at least so many bytes are in the large file storage, and their tag is a SHA-256."""


@dataclass
class Hub:
    """What the server holds: files by repository, such as {"models/a/b": {"config.json": b"{}"}}."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    """Repositories that were made by a client and are not for everybody."""
    stop_after: int | None = None
    """Send no more than this many bytes of the next file that is longer, and keep the client waiting for the rest."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Ends that wait, by closing the connection."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and byte range of every request."""
    url: str = ""

    def files_sent(self) -> list[tuple[str, str | None]]:
        return [(path, span) for method, path, span in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Tests look at `Hub.requests` instead."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            self._create(json.loads(data))
        elif path == "/api/validate-yaml":
            self._send(200, b'{"errors": [], "warnings": []}', True, {"Content-Type": "application/json"})
        elif push := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path):
            self._take(f"models/{push[1]}", push[2], data)
        else:
            self._answer(body=True, asked=json.loads(data or b"{}"))

    def _create(self, asked: dict) -> None:
        repository = f"models/{asked.get('organization') or 'me'}/{asked['name']}"
        if repository in self.hub.gated or "Authorization" not in self.headers:
            self._send(403, b'{"error": "this token may not write there"}', True)
            return
        self.hub.repositories.setdefault(repository, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(repository)
        name = repository.removeprefix("models/")
        found = {"url": f"{self.hub.url}/{name}", "name": name, "id": COMMIT}
        self._send(200, json.dumps(found).encode(), True, {"Content-Type": "application/json"})

    def _take(self, repository: str, what: str, data: bytes) -> None:
        """Files come in the commit itself: the large file storage is not asked for."""
        if what == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(data)["files"]
            ]
            found: dict = {"files": files}
        else:
            for row in map(json.loads, data.splitlines()):
                if row["key"] == "file":
                    content = base64.b64decode(row["value"]["content"])
                    self.hub.repositories[repository][row["value"]["path"]] = content
            url = f"{self.hub.url}/{repository.removeprefix('models/')}/commit/{COMMIT}"
            found = {"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None}
        self._send(200, json.dumps(found).encode(), True, {"Content-Type": "application/json"})

    def _answer(self, body: bool, asked: dict | None = None) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        listing = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+?)(/.*)?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if listing:
            self._describe(f"{listing[1]}/{listing[2]}", listing[3] or "", body, asked)
        elif file:
            self._send_file(f"{'datasets' if file[1] else 'models'}/{file[2]}", file[3], file[4], body)
        else:
            self._send(404, b"{}", body)

    def _refuse(self, repository: str, revision: str, body: bool) -> bool:
        """Send the hub's own refusals; True where there was one."""
        if repository in self.hub.gated:
            self._send(403, b'{"error": "gated"}', body, {"X-Error-Code": "GatedRepo"})
        elif repository not in self.hub.repositories:
            self._send(404, b'{"error": "not found"}', body, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b'{"error": "no revision"}', body, {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _describe(self, repository: str, rest: str, body: bool, asked: dict | None) -> None:
        words = [word for word in rest.split("/") if word]
        revision = words[1] if len(words) > 1 else "main"
        if self._refuse(repository, revision, body):
            return
        files = self.hub.repositories[repository]
        if words[:1] == ["tree"]:
            recursive = "recursive=true" in urlsplit(self.path).query.lower()
            found: object = _tree(files, "/".join(words[2:]), recursive)
            if not found:
                self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
                return
        elif words[:1] == ["paths-info"]:
            found = [_entry(name, files[name]) for name in (asked or {}).get("paths", []) if name in files]
        else:
            siblings = [{"rfilename": name, **_size(data, "sha256")} for name, data in files.items()]
            kind, name = repository.split("/", 1)
            found = {"id": name, "sha": COMMIT, "private": False, "gated": False, "tags": [], "siblings": siblings}
            found |= {"lastModified": "2026-01-01T00:00:00.000Z"} | ({"modelId": name} if kind == "models" else {})
        self._send(200, json.dumps(found).encode(), body, {"Content-Type": "application/json"})

    def _send_file(self, repository: str, revision: str, name: str, body: bool) -> None:
        if self._refuse(repository, revision, body):
            return
        data = self.hub.repositories[repository].get(name)
        if data is None:
            self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
            return
        digest = hashlib.sha256 if len(data) >= LARGE else hashlib.sha1
        headers = {"ETag": f'"{digest(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None:
            self._send(200, data, body, headers)
            return
        start, end = int(span[1]), int(span[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self._send(206, data[start : end + 1], body, headers)

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        stop = self.hub.stop_after
        if stop is not None and "ETag" in (headers or {}) and len(data) > stop:
            self.hub.stop_after = None
            self.wfile.write(data[:stop])
            self.wfile.flush()
            self.hub.go_on.wait(400)
            self.close_connection = True
            return
        self.wfile.write(data)


def _size(data: bytes, digest_name: str) -> dict[str, object]:
    """Size and digests, with those of the large file storage where the file is large."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, object] = {"size": len(data), "blobId": blob}
    if len(data) >= LARGE:
        digest = hashlib.sha256(data).hexdigest()
        found["lfs"] = {digest_name: digest, "size": len(data), "pointerSize": 134}
    return found


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), **_size(data, "oid")}


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
    """The files below a folder, or what stands directly in it."""
    front = f"{folder}/" if folder else ""
    below = {name.removeprefix(front): (name, data) for name, data in files.items() if name.startswith(front)}
    folders = sorted({inner.split("/")[0] for inner in below if "/" in inner})
    found = [{"type": "directory", "path": front + name, "oid": COMMIT, "size": 0} for name in folders]
    return found + [_entry(name, data) for inner, (name, data) in below.items() if recursive or "/" not in inner]
