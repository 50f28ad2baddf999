"""The parts of several vLLM servers that need no vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.core.errors import UserError
from lemma.engines.protocol import EngineError
from lemma.engines.remote import weight_files
from lemma.engines.remote.server_client import ServerClient
from lemma.engines.remote.server_gpus import gpus_of_servers
from lemma.engines.remote.server_guard import FILES_PATH, HEADER, KEY_VARIABLE, Guard
from lemma.engines.remote.server_pool import Member, ServerPool
from lemma.engines.vllm import weights
from lemma.engines.vllm.stand_alone import command
from lemma.engines.vllm.vllm_options import VllmOptions
from tests.engines.small_policies import small_policy


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"servers": ["node7:8000"]}, "addresses such as http://node7:8000"),
        ({"servers": []}, "an empty list"),
        ({"servers": ["http://a", "http://a"]}, "named once"),
        ({"servers": 2, "gpus": [1]}, "1 numbers for 2 servers"),
    ],
)
def test_servers_that_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        VllmOptions(**options)


def test_several_servers_are_apart() -> None:
    assert not VllmOptions().has_own_devices
    for one in ({"mode": "server"}, {"servers": 2}, {"servers": ["http://a"]}):
        assert VllmOptions(**one).has_own_devices  # type: ignore[arg-type]


def test_the_gpu_of_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    two = VllmOptions(servers=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shown = [gpus_of_servers("cuda", two, number, present=4) for number in (0, 1)]
    assert shown == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    with pytest.raises(EngineError, match=r"no GPU 3 for generation server 2 of 2: 3 are there.*first 2"):
        gpus_of_servers("cuda", two, 1, present=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    own = VllmOptions(servers=2, gpus=[1, 0])
    assert gpus_of_servers("cuda", own, 0, present=2) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert gpus_of_servers("cuda", VllmOptions(mode="server"), 0, present=2) == {}
    assert gpus_of_servers("cpu", two, 1) == {}


def pool_of(count: int) -> ServerPool:
    pool = ServerPool()
    pool.members += [Member(number, ServerClient("http://127.0.0.1:9", "", pool.replies)) for number in range(count)]
    return pool


def test_who_has_the_least_to_do_gets_the_next() -> None:
    pool = pool_of(3)
    for number, tokens in enumerate([100, 40, 10, 10, 10, 10, 10]):
        pool.give(f"job {number}", tokens)
    holders = [pool.holder(f"job {number}").number for number in range(7)]  # type: ignore[union-attr]
    assert holders == [0, 1, 2, 2, 2, 2, 1]
    pool.release("job 0")
    pool.give("job 7", 5)
    assert pool.holder("job 7") is pool.members[0] and pool.members[0].tokens == 5
    names = pool.lose(pool.members[2])
    assert names == ["job 2", "job 3", "job 4", "job 5"] and pool.members[2].tokens == 0
    assert pool.holder("job 2") is None and len(pool.up) == 2
    pool.close()


def test_a_silent_server_that_does_not_answer_hangs() -> None:
    pool = pool_of(2)
    pool.give("job", 10)
    assert pool.hung() == []
    pool.members[0].heard -= 1000
    assert pool.hung() == [pool.members[0]], "nothing listens at its port"
    pool.members[1].heard -= 1000
    assert pool.hung() == [], "who has nothing to do may be silent"
    pool.close()


def test_weights_in_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy("qwen2", tied=True)
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 50_000)
    weights.write_model(policy, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "model.safetensors").exists()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = weights.base_state(policy)
    assert list(found) and set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= 50_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(tmp_path / file) for name, file in index.items())
    other = tmp_path / "other"
    weights.write_model(policy, other, keep=False)
    assert list(other.iterdir()) == [], "a rank that only helps to gather writes nothing"


def sent(method: str, name: str, body: list[bytes], key: bytes = b"secret") -> tuple[int, Any]:
    """What the guard answers to a file."""
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body] + [{"type": "http.request"}]
    answers: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        answers.append(message)

    async def app(*_: Any) -> None:
        raise AssertionError("this is not for the server")

    scope = {"type": "http", "path": FILES_PATH + name, "method": method, "headers": [(HEADER.encode(), key)]}
    asyncio.run(Guard(app)(scope, receive, send))
    content = answers[1]["body"]
    return answers[0]["status"], json.loads(content) if content else None


def test_files_are_taken_from_who_knows_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    status, answer = sent("PUT", "a1-model/model.safetensors", [b"wei", b"ghts"])
    assert status == 200 and (Path(answer["folder"]) / "model.safetensors").read_bytes() == b"weights"
    for name in ("model.safetensors", "../x/y", "a/../../y", "a/.hidden", "a/b/c", "/etc/passwd"):
        assert sent("PUT", name, [b"x"])[0] == 400
    assert sent("GET", "a1-model/model.safetensors", [])[0] == 400
    assert sent("PUT", "a1-model/other", [b"x"], key=b"guess")[0] == 401
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.safetensors"]
    assert sent("DELETE", "a1-model/all", [])[0] == 200 and not Path(answer["folder"]).exists()


def test_a_server_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE} is not set"):
        command(["some/model"], tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    monkeypatch.setenv("RANK", "3")
    line, variables = command(["some/model", "--port", "9000", "--context", "512", "--lora-rank", "8"], tmp_path)
    assert line[1:3] == ["-m", "lemma.engines.remote.run_module"] and "secret" not in " ".join(line)
    options = dict(pairwise(line))
    assert (options["--port"], options["--max-model-len"], options["--max-lora-rank"]) == ("9000", "512", "8")
    assert variables[KEY_VARIABLE] == "secret" and variables["TMPDIR"] == str(tmp_path) and "RANK" not in variables
