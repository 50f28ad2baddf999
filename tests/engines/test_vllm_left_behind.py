"""What a vLLM engine leaves on disk when its process is killed, and who may speak with its server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from lemma.engines.vllm.serve import HEADER, KEY_VARIABLE, Guard
from lemma.engines.vllm.vllm_folder import PREFIX, VllmFolder

HOLD = """
import sys, time
from lemma.engines.vllm.vllm_folder import VllmFolder
folder = VllmFolder()
(folder.path / "model.safetensors").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(600)
"""


def hold(tmp: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp)}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}of-somebody-else").mkdir()
    killed, left = hold(tmp_path)
    killed.kill()
    killed.wait()
    living, kept = hold(tmp_path)
    try:
        assert not left.exists() and (kept / "model.safetensors").exists()
        own = VllmFolder()
        assert kept.exists() and own.path.is_dir()
        own.remove()
        assert not own.path.exists() and (tmp_path / f"{PREFIX}of-somebody-else").exists()
    finally:
        living.kill()
        living.wait()


def asked(kind: str, headers: list[tuple[bytes, bytes]]) -> tuple[bool, list[MutableMapping[str, Any]]]:
    """Whether the application behind the guard was reached, and what the guard answered."""
    reached = False
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    async def receive() -> dict[str, str]:
        return {"type": f"{kind}.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Guard(app)({"type": kind, "headers": headers}, receive, send))
    return reached, sent


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("http", {"type": "http.response.start", "status": 401, "headers": []}),
        ("websocket", {"type": "websocket.close", "code": 1008}),
        ("something newer", None),
    ],
)
def test_nobody_is_heard_without_the_key(kind: str, refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    key = HEADER.encode()
    assert asked(kind, [(key, b"secret")]) == (True, [])
    for headers in ([], [(key, b"")], [(key, b"Secret")], [(b"authorization", b"secret")]):
        reached, sent = asked(kind, headers)
        assert not reached and (sent[0] if sent else None) == refusal


def test_the_server_itself_may_start_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert asked("lifespan", []) == (True, [])
