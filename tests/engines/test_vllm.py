"""vLLM, the real thing: as a supervised server here, and in the process of a second pytest beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
import torch

from lemma.engines.protocol import EngineError, Request, generate
from lemma.engines.remote.server_client import ServerReply
from lemma.engines.remote.server_process import ServerProcess
from lemma.engines.vllm import make_vllm
from lemma.engines.vllm.server_engine import VllmServerEngine
from lemma.engines.vllm.versions import check_version, installed
from tests.engines import vllm_checks
from tests.engines.small_policies import random_prompts, shake, small_policy, worst_difference
from tests.engines.vllm_checks import FREE, GREEDY, QUICK, requests_of

HERE = Path(__file__).parent
SERVER = QUICK.model_copy(update={"mode": "server"})
pytestmark = [pytest.mark.crowded, pytest.mark.slow]


def _skip_without_vllm() -> None:
    """Where torch is a CPU build `make test` installs vLLM, so that its absence is not excused there."""
    try:
        check_version(installed())
    except EngineError as error:
        is_excused = "+cpu" not in torch.__version__ or sys.platform != "linux"
        pytest.skip(f"{'needs vLLM' if is_excused else 'vLLM is missing'}: {error}")


@pytest.fixture(scope="module", autouse=True)
def in_process() -> Iterator[subprocess.Popen[str]]:
    """The tests of the engine in process, which begin at once and are waited for at the end."""
    _skip_without_vllm()
    # A folder of its own for temporary files, where it sees what it leaves and nothing of the servers beside it.
    with TemporaryDirectory(prefix="vllm-") as folder, pytest.MonkeyPatch.context() as patch:
        # What vLLM learns about architectures at the first start makes every later one seconds shorter.
        patch.setenv("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))
        # On a CPU it compiles, with g++ and in every process, what counts tokens that are likelier than the one drawn.
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        # One process less for each server, whose start imports everything anew.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        files = [HERE / "vllm_in_process.py", HERE / "vllm_trains_in_process.py"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
            cwd=HERE.parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )
        yield process
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def engine(in_process: object) -> Iterator[VllmServerEngine]:
    """A model of another kind than those in process, and than that of two servers (test_vllm_servers.py)."""
    engine = make_vllm(small_policy("llama", tied=False), 0, SERVER.model_copy(update={"restarts": 0}))
    assert isinstance(engine, VllmServerEngine)
    folder, server = engine.folder, engine.server
    assert server is not None
    children = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(children) > 1
    yield engine
    engine.close()
    assert not folder.exists()
    alive = psutil.wait_procs(children, timeout=10)[1]
    assert not [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_logprobs(engine: VllmServerEngine) -> None:
    vllm_checks.check_logprobs(engine)


def test_ends(engine: VllmServerEngine) -> None:
    vllm_checks.check_ends(engine)


def test_cuts(engine: VllmServerEngine) -> None:
    vllm_checks.check_cuts(engine)


def test_cancel(engine: VllmServerEngine) -> None:
    vllm_checks.check_cancel(engine)


def test_too_long(engine: VllmServerEngine) -> None:
    vllm_checks.check_too_long(engine)


def test_update(engine: VllmServerEngine) -> None:
    vllm_checks.check_update(engine)


def test_update_while_running(engine: VllmServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are late, as on a busy machine, do not change which weights are said to have sampled a token."""
    take, update, submit = engine.pool.replies.put, engine.update_weights, engine.submit
    is_updated = threading.Event()

    def take_late(reply: ServerReply) -> None:
        if is_updated.is_set():
            time.sleep(0.03)
        take(reply)

    def update_weights(version: int) -> None:
        is_updated.set()
        update(version)

    def submit_anew(request: Request) -> None:
        is_updated.clear()
        submit(request)

    monkeypatch.setattr(engine.pool.replies, "put", take_late)
    monkeypatch.setattr(engine, "update_weights", update_weights)
    monkeypatch.setattr(engine, "submit", submit_anew)
    vllm_checks.check_update_while_running(engine, count=64)


def test_not_finite(engine: VllmServerEngine) -> None:
    vllm_checks.check_not_finite(engine)


def test_only_who_knows_the_key_is_answered(engine: VllmServerEngine) -> None:
    assert engine.server is not None
    url = str(engine.server._http.base_url)
    assert url.startswith("http://127.0.0.1:")
    for path in ("/health", "/v1/models", "/collective_rpc"):
        assert httpx.post(url + path, json={"method": "lemma_prepare"}, trust_env=False).status_code == 401


def test_a_lost_connection_does_not_cost_the_server(engine: VllmServerEngine) -> None:
    requests = requests_of(FREE)
    expected = generate(engine, requests)
    assert engine.server is not None
    server = engine.server
    for request in requests:
        engine.submit(request)
    lost = next(iter(engine._jobs))
    server.drop(lost)
    server.replies.put(ServerReply(lost, 0, None, "Server disconnected without sending a response."))
    found = sorted(engine.completions(), key=lambda c: c.order)
    assert engine.server is server
    assert [c.ids.tolist() for c in found] == [c.ids.tolist() for c in expected]


def test_a_dead_server_that_may_not_be_started_again_is_an_error(engine: VllmServerEngine) -> None:
    assert engine.server is not None
    os.kill(engine.server.pid, signal.SIGKILL)
    engine.submit(Request(("x",), random_prompts(1)[0], FREE))
    with pytest.raises(EngineError, match="died 1 times in a row"):
        list(engine.completions())


def test_an_adapter_in_a_server_that_is_killed_and_comes_back_with_the_current_weights() -> None:
    """Unfinished requests are issued again and give what they would have given."""
    engine = VllmServerEngine(small_policy("llama", lora=4), 0, SERVER)
    vllm_checks.check_update(engine)
    shake(engine.policy, 21, size=0.05)
    engine.update_weights(9)
    requests = requests_of(replace(FREE, max_tokens=60), n=2)
    expected = generate(engine, requests)
    shake(engine.policy, 22, size=0.05)  # not handed over: the server must come back with version 9
    assert engine.server is not None
    first = engine.server.pid
    for request in requests:
        engine.submit(request)
    os.kill(first, signal.SIGKILL)
    found = sorted(engine.completions(), key=lambda c: c.order)
    assert engine.server.pid != first
    assert [(c.key, c.sample, c.ids.tolist()) for c in found] == [(c.key, c.sample, c.ids.tolist()) for c in expected]
    assert max(member.deaths for member in engine.pool.members) == 0 and {c.policy_version for c in found} == {9}
    engine.update_weights(10)
    greedy = requests_of(GREEDY)
    assert worst_difference(engine.policy, greedy, generate(engine, greedy)) < 1e-4
    engine.close()


def test_the_engine_in_process(in_process: subprocess.Popen[str]) -> None:
    output, _ = in_process.communicate(timeout=560)
    print(output)
    assert in_process.returncode == 0, output[-6000:]


def test_what_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EngineError, match=r"the vLLM server does not start: .*Error.*encodings.*its log is .*server-"):
        line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        environment = {"PYTHONHOME": str(tmp_path)}
        ServerProcess(lambda port: (line, environment), tmp_path / "log", 60.0, "vLLM server").wait_until_ready()
