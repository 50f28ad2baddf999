"""`lemma download` from a server that means harm: nothing is written outside the folder, no content passes that was not
announced, the login stays with the hub, and every answer gets one sentence."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.data.hub import download
from lemma.data.hub_files import is_name_below, listing
from tests.cli.test_download import lemma

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b"w" * (9 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()

Answer = tuple[int, dict[str, str], bytes | Iterator[bytes]]


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)
            except OSError:
                self.close_connection = True

        do_HEAD = do_POST = do_GET

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        running.server_close()


def described(*siblings: dict[str, Any], sha: Any = COMMIT) -> bytes:
    return json.dumps({"id": "a/b", "modelId": "a/b", "sha": sha, "siblings": list(siblings), "tags": []}).encode()


def large(name: str = "model.safetensors", sha256: Any = SHA256, size: Any = 9 << 20) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": COMMIT, "lfs": {"sha256": sha256, "size": 9, "pointerSize": 1}}


def small(name: str, data: bytes) -> dict[str, Any]:
    return {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


@pytest.fixture
def fetch(tmp_path, monkeypatch) -> Iterator[Callable[..., str]]:
    """Download from a hub of these answers into `here/to`; the sentence that came of it."""
    from huggingface_hub import constants

    (tmp_path / "here").mkdir()
    (tmp_path / "victim").write_text("as it was")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def run(
        listing: bytes, file: Callable[[BaseHTTPRequestHandler], Answer] | None = None, coding: str = "identity"
    ) -> str:
        def answer(request: BaseHTTPRequestHandler) -> Answer:
            if "/resolve/" in request.path:
                return file(request) if file else (200, {"Content-Length": str(len(CONTENT))}, CONTENT)
            return 200, {"Content-Type": "application/json", "Content-Encoding": coding}, listing

        with server(answer) as url:
            monkeypatch.setattr(constants, "ENDPOINT", url)
            monkeypatch.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
            )
            with pytest.raises(UserError) as caught:
                download("model", "a/b", Path("to"))
        assert (tmp_path / "victim").read_text() == "as it was"
        assert {path.name for path in tmp_path.iterdir()} == {"here", "victim"}
        assert {path.name for path in (tmp_path / "here").iterdir()} <= {"to"}
        return str(caught.value)

    yield run


def outside(tmp: Path) -> list[str]:
    return [
        "../../victim",
        "../new",
        f"{tmp}/victim",
        "/etc/x",
        "a/../../../new",
        "a//b",
        "",
        "..\\new",
        "C:x",
        "a\x1b[2Jb",
    ]


def test_names_that_lead_out_of_the_folder(fetch, tmp_path):
    for name in outside(tmp_path):
        assert "leads out of its folder" in fetch(described(large(name)))
        assert "leads out of its folder" in fetch(described(small(name, b"x")))


def test_names_that_stay_below():
    assert all(map(is_name_below, ["config.json", ".gitattributes", "a/b c/d..e", "数据/x.parquet", "10:30.png"]))
    assert is_name_below("Screenshot at 1.02\u202fPM.png"), "as macOS calls it"


@pytest.mark.parametrize("name", ["a" * 256, "é" * 128, "/".join("a" * 600)])
def test_names_that_are_too_long(fetch, name):
    assert "has a file whose name is too long" in fetch(described(small(name, b"x")))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a/b"), ("a", "a")])
def test_names_that_cannot_all_be_there(fetch, names):
    assert "does not answer as a hub does about the names" in fetch(described(*(small(name, b"x") for name in names)))


def test_many_deep_names_take_little_memory():
    """Two MiB of names took a gigabyte and twenty seconds, and a list may have 64."""
    files = [small("/".join([str(number), *"a" * 490]), b"x") for number in range(2000)]
    tracemalloc.start()
    try:
        assert len(listing({"sha": COMMIT, "siblings": files}, "a/b")[1]) == 2000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_what_an_upload_left_in_its_cache_is_not_fetched(fetch):
    asked: list[str] = []

    def gone(request: BaseHTTPRequestHandler) -> Answer:
        asked.append(request.path)
        return 404, {}, b""

    left = [".cache/huggingface/upload/a.metadata", ".Cache/lemma-origin.json"]
    fetch(described(*(small(name, b"{}") for name in left), large()), gone)
    assert asked and all(path.endswith("/model.safetensors") for path in asked)


@pytest.mark.parametrize("digest", ["../../../victim", "/etc/passwd", "", None, 7, "A" * 64, "a" * 63])
def test_digests_that_are_none(fetch, digest, tmp_path):
    assert "does not answer as a hub does" in fetch(described(large(sha256=digest)))


@pytest.mark.parametrize("sha", ["../../../..", "/tmp", None, "main", 5, ["x"]])
def test_commits_that_are_none(fetch, sha):
    assert "does not answer as a hub does" in fetch(described(large(), sha=sha))


@pytest.mark.parametrize("size", [None, -1, "9", 1e30, True])
def test_sizes_that_are_none(fetch, size):
    assert "does not answer as a hub does" in fetch(described(large(size=size)))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>log in</html>", b"null", b"[]", b'"x"', b"[" * 100_000, b"\xff\xfe", b'{"id": "a/b"}'),
        *(b'{"id": 1, "siblings": [3]}', b'{"id": "a/b", "siblings": 7}'),
        b'{"siblings": [{"rfilename": "x", "lfs": {}}]}',
    ],
)
def test_descriptions_that_are_none(fetch, body):
    assert "does not answer as a hub does" in fetch(body)


def test_a_description_without_end(fetch, monkeypatch):
    """However little of it travels: no more is read than any description takes."""
    monkeypatch.setattr("lemma.data.hub.LONGEST_LISTING", 1 << 20)
    assert "does not answer as a hub does" in fetch(b"[" + b" " * (2 << 20))


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "deflate"])
def test_a_coding_that_nobody_asked_for(fetch, coding):
    """A kilobyte may become any number of gigabytes."""
    data = gzip.compress(b" " * (2 << 20))
    assert "as a hub does about the coding" in fetch(data, coding=coding)
    sent = {"Content-Encoding": coding, "Content-Length": str(len(data))}
    assert "as a hub does about the coding" in fetch(described(large()), lambda request: (200, sent, data))


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_refusal_without_end(fetch, status):
    def endless(request: BaseHTTPRequestHandler) -> Answer:
        return status, {"Location": "/resolve/"}, (CONTENT for _ in range(400))

    assert "as a hub does about what it refuses or moves" in fetch(described(large()), endless)


def test_content_that_ends_too_soon(fetch):
    told = fetch(described(large()), lambda request: (200, {"Content-Length": "3"}, b"www"))
    assert "does not answer as a hub does" in told


def test_content_of_another_digest_is_thrown_away(fetch):
    for file in (large(sha256="0" * 64), small("config.json", CONTENT) | {"blobId": "0" * 40}):
        assert "is not what it announced" in fetch(described(file))
        assert not any(path.is_file() for path in Path("to").rglob("*"))


def test_a_part_stays_within_what_was_announced(fetch):
    def endless(request: BaseHTTPRequestHandler) -> Answer:
        return 200, {}, (CONTENT for _ in range(400))

    assert "sends more of 'model.safetensors' than the 9,437,184 bytes" in fetch(described(large()), endless)
    assert sum(path.stat().st_size for path in Path("to").rglob("*") if path.is_file()) <= len(CONTENT)


def test_a_part_that_is_too_long_is_started_anew(fetch):
    part = Path("to/.cache/lemma") / SHA256
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT + b"more")
    spans = []

    def file(request: BaseHTTPRequestHandler) -> Answer:
        spans.append(request.headers.get("Range"))
        return 403, {}, b"{}"

    assert "answered 403" in fetch(described(large()), file) and spans == [None]


def test_a_server_that_begins_again_and_again(fetch, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before each attempt

    def breaks_off(request: BaseHTTPRequestHandler) -> Answer:
        return 200, {"Content-Length": str(len(CONTENT))}, CONTENT[: 2 << 20]

    assert "begins it anew, again and again" in fetch(described(large()), breaks_off)


@pytest.mark.parametrize("told", [{"Retry-After": "999999"}, {"RateLimit": '"api";r=0;t=999999'}])
def test_a_wait_without_end(fetch, told):
    assert "lets nobody ask again for a long time" in fetch(
        described(large()), lambda request: (429, told | {"Content-Length": "0"}, b"")
    )
    often = {"RateLimit": '"api";r=4999;t=300', "Content-Length": "0"}  # and each answer says how often one may ask
    assert "answered 404" in fetch(described(large()), lambda request: (404, often, b""))


def test_a_circle_of_redirections(fetch):
    told = fetch(described(large()), lambda request: (302, {"Location": request.path, "Content-Length": "0"}, b""))
    assert "cannot be reached" in told or "does not answer" in told


def test_a_login_stays_with_the_hub(fetch, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: list[tuple[str, str | None]] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> Answer:
        seen.append(("elsewhere", request.headers.get("Authorization")))
        return 404, {"Content-Length": "0"}, b""

    with server(elsewhere) as other:

        def file(request: BaseHTTPRequestHandler) -> Answer:
            seen.append(("hub", request.headers.get("Authorization")))
            return 302, {"Location": f"{other}/x", "Content-Length": "0", "Link": f'<{other}/y>; rel="next"'}, b""

        fetch(described(large()), file)
    assert seen[0] == ("hub", "Bearer hf_secret") and seen[1] == ("elsewhere", None)
    assert all(token is None for where, token in seen if where == "elsewhere")


def test_a_login_stays_with_the_hub_that_sends_elsewhere_for_its_description(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    seen: list[str | None] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> Answer:
        seen.append(request.headers.get("Authorization"))
        return 200, {}, b"null"

    def hub(request: BaseHTTPRequestHandler) -> Answer:
        seen.append(request.headers.get("Authorization"))
        return 307, {"Location": f"{other}{request.path}", "Content-Length": "0"}, b""

    with server(elsewhere) as other, server(hub) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        with pytest.raises(UserError, match="does not answer as a hub does"):
            download("model", "a/b", tmp_path)
    assert seen == ["Bearer hf_secret", None]


def test_a_hub_is_asked_for_a_repository_alone_and_nothing_it_says_is_kept_elsewhere(tmp_path):
    asked: list[tuple[str, str]] = []

    def hub(request: BaseHTTPRequestHandler) -> Answer:
        asked.append((request.path, request.headers["User-Agent"]))
        if request.path.startswith("/api/models/"):
            return 200, {}, described(small("config.json", b"{}"))
        return 200, {"Content-Length": "2"}, b"{}"

    with server(hub) as url:
        done = lemma(tmp_path, url, "download", "model", "a/b", "--to", "to")
    assert done.returncode == 0, done.stderr
    assert [path for path, _ in asked] == ["/api/models/a/b?blobs=true", f"/a/b/resolve/{COMMIT}/config.json"]
    assert all(agent.startswith("lemma/") for _, agent in asked)
    assert [path.name for path in tmp_path.iterdir()] == ["to"]


def test_the_command_says_one_sentence(tmp_path):
    with server(lambda request: (200, {"Content-Type": "text/html"}, b"<html>log in</html>")) as url:
        done = lemma(tmp_path, url, "download", "model", "a/b")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "does not answer as a hub does" in done.stderr
