"""What a vLLM engine leaves on disk when its process is killed, and who may speak with its server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from lemma.engines.protocol import EngineError
from lemma.engines.remote.process_group import kill_group
from lemma.engines.remote.server_guard import HEADER, KEY_VARIABLE, Guard
from lemma.engines.remote.server_process import cause_in
from lemma.engines.remote.weights_folder import PREFIX, WeightsFolder
from lemma.engines.vllm.weights import check_policy
from tests.engines.small_policies import small_policy

HOLD = """
import sys, time
from lemma.engines.remote.weights_folder import WeightsFolder
folder = WeightsFolder()
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
        own = WeightsFolder()
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
        ("http", {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}),
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


LEAVES = """
import subprocess, sys, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=1000)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(segment.name, child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_group_leaves_neither_processes_nor_shared_memory() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    name, child = process.stdout.readline().split()
    assert Path("/dev/shm", name).exists()
    kill_group(process.pid)
    process.wait(timeout=10)
    assert not Path("/dev/shm", name).exists()
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def test_the_cause_is_found_among_errors_that_point_to_it(tmp_path: Path) -> None:
    log, words = (
        tmp_path / "log",
        """
    (EngineCore pid=7) ERROR 11-18 [core.py:9] EngineCore failed to start.
    (EngineCore pid=7) ValueError: Head size 12 is not supported by CPU_ATTN
    (APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
    """,
    )
    assert cause_in(log) == "nothing"
    for text, cause in ((words, "(EngineCore pid=7) ValueError: Head size 12 is not supported by CPU_ATTN"),
                        ("one\ntwo\n\n", "two"), ("", "nothing")):  # fmt: skip
        log.write_text(text)
        assert cause_in(log) == cause


def test_heads_that_vllm_cannot_run_on_a_cpu_are_refused_before_it_starts() -> None:
    policy = small_policy()
    policy.causal.config.head_dim = 12
    with pytest.raises(EngineError, match="cannot run attention heads of size 12 on a CPU"):
        check_policy(policy)
