"""A vLLM server on the loopback interface: started, watched, asked and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lemma
from lemma.engines.protocol import EngineError
from lemma.engines.vllm.serve import HEADER, KEY_VARIABLE, PARENT_VARIABLE

SERVED = "lemma"  # the name of the base model
CALL_SECONDS = 300.0  # for everything but completions
POLL_SECONDS = 0.1
IDLE_SECONDS = 60  # an unused connection; the server keeps it ten times longer, so that it never closes one in use


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer, or the error that took its place."""

    name: str
    status: int
    body: Any
    error: str = ""


class Server:
    """One server process with its client. It is over when the process is: a restart makes another."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path, seconds: float):
        import httpx

        self._key = secrets.token_hex(16)
        self._log = log
        port = _free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lemma.engines.vllm.serve", *_options(arguments, port)],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=self._environment(environment),
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill_group, self._process)
        self._settings: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "headers": {HEADER: self._key}}
        self._http = httpx.Client(**self._settings, timeout=CALL_SECONDS, trust_env=False)
        self.replies: queue.Queue[ServerReply] = queue.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            **self._settings,
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS),
        )
        try:
            self._wait_until_ready(seconds)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_well(self) -> bool:
        """Alive, and able to say so."""
        import httpx

        try:
            return self.is_alive() and self._http.get("/health", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of an endpoint. ConnectionError where the server cannot be reached."""
        import httpx

        try:
            response = self._http.post(path, json=body)
        except httpx.TimeoutException as error:
            raise EngineError(f"the vLLM server did not answer {path} within {CALL_SECONDS:g} seconds") from error
        except httpx.HTTPError as error:
            raise ConnectionError(str(error)) from error
        if response.status_code >= 400:
            raise EngineError(f"the vLLM server refused {path}: {_message(response.text)}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else None

    def rpc(self, method: str, *arguments: str) -> Any:
        """Call a method of the worker; the answer of the first one."""
        return self.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"][0]

    def ask(self, name: str, body: Mapping[str, Any]) -> None:
        """Ask for a completion; the reply comes into `replies`."""
        self._loop.call_soon_threadsafe(self._begin, name, dict(body))

    def drop(self, name: str) -> None:
        """Close the connection of a request, which cancels it in the server."""

        def cancel() -> None:
            task = self._tasks.pop(name, None)
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def last_words(self) -> str:
        """The line of the log that says most about an end."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        telling = [line for line in lines if "Error" in line or "error:" in line]
        return (telling or lines or ["nothing"])[-1].strip()[-300:]

    def close(self) -> None:
        """End the server and everything it started."""
        self._http.close()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10.0)
        self._kill()

    async def _shut(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(self, name: str, body: dict[str, Any]) -> None:
        self._tasks[name] = self._loop.create_task(self._complete(name, body))

    async def _complete(self, name: str, body: dict[str, Any]) -> None:
        import httpx

        try:
            response = await self._client.post("/v1/completions", json=body)
            is_good = response.status_code == 200
            reply = ServerReply(name, response.status_code, response.json() if is_good else None,
                          "" if is_good else _message(response.text))  # fmt: skip
        except (httpx.HTTPError, OSError, ValueError) as error:
            reply = ServerReply(name, 0, None, str(error) or type(error).__name__)
        self._tasks.pop(name, None)
        self.replies.put(reply)

    def _wait_until_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_well():
            if not self.is_alive():
                raise EngineError(f"the vLLM server does not start: {self.last_words()}")
            if time.monotonic() > end:
                raise EngineError(f"the vLLM server was not ready after {seconds:g} seconds", fix="raise start_seconds")
            time.sleep(POLL_SECONDS)

    def _environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        root = str(Path(lemma.__file__).resolve().parents[1])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **os.environ,
            **wanted,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(self._log.parent),  # temporary files that vLLM never removes
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(10 * IDLE_SECONDS),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            KEY_VARIABLE: self._key,
            PARENT_VARIABLE: str(os.getpid()),
        }


def _options(arguments: Mapping[str, Any], port: int) -> list[str]:
    """Engine arguments as options of the command line."""
    options = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED]
    options += ["--middleware", "lemma.engines.vllm.serve.Guard", "--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            options += [f"--{dashed}", *(value if isinstance(value, list) else [str(value)])]
    return options


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, at once: it holds nothing worth saving."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30.0)


def _message(text: str) -> str:
    """The sentence in an error answer."""
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()[:300] or "no reason given"
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
