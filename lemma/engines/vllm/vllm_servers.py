"""vLLM's servers, and how weights reach them: by the path of files on the same machine, by upload to other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lemma.core import ranks
from lemma.engines.protocol import EngineError
from lemma.engines.remote.server_client import SERVED, ServerClient
from lemma.engines.remote.server_gpus import gpus_of_servers
from lemma.engines.remote.server_process import ServerProcess
from lemma.engines.remote.servers import Counts, Servers
from lemma.engines.remote.weights_probe import ProbeScores, probe_arguments, probe_prompt
from lemma.engines.vllm.settings import engine_arguments, environment, server_command, server_environment
from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.engines.vllm.weights import write_adapter, write_model, write_weights
from lemma.models.policy import Policy

ADAPTER = "policy"  # the name of the policy's adapter in vLLM


class VllmServers(Servers):
    """The weights for the servers are in `folder`, in buckets. `prefix` distinguishes the files of different
    trainers."""

    noun = "vLLM server"
    by_hand = "python -m lemma.engines.vllm.stand_alone"

    def __init__(
        self,
        policy: Policy,
        options: VllmOptions,
        folder: Path,
        prefix: str,
        context: int,
        seed: int,
        ask_again: Callable[[Sequence[str]], None],
    ):
        super().__init__(policy, options, folder, ask_again)
        self._wanted = engine_arguments(policy, options, context, seed, folder / "model")
        self._prefix, self._context = prefix, context

    def write_all(self) -> None:
        """A model that a server can start from, and its adapter. Every rank calls this; the first one writes."""
        write_model(self.policy, self.folder / "model", keep=ranks.is_leader())
        if self.policy.is_adapter:
            write_adapter(self.policy, self.folder / "adapter")

    def write_news(self) -> None:
        """What an update changes."""
        if self.policy.is_adapter:
            write_adapter(self.policy, self.folder / "adapter")
        else:
            write_weights(self.policy, self.folder / "model", keep=ranks.is_leader())

    def command(self, number: int, port: int) -> tuple[list[str], Mapping[str, str]]:
        device = self.policy.device.type
        variables = environment(device == "cpu") | gpus_of_servers(device, self.options, number)
        return server_command(self._wanted, "127.0.0.1", port), server_environment(variables, self.folder)

    def prepare(self, client: ServerClient, *, is_own: bool) -> None:
        client.rpc("lemma_prepare")
        if not is_own:
            self._load(client, has_base=isinstance(client, ServerProcess))
        elif self.policy.is_adapter:
            self._load_adapter(client)

    def load(self, client: ServerClient) -> Counts:
        return self._load(client, has_base=True)

    def _load(self, client: ServerClient, *, has_base: bool) -> Counts:
        """The server loads the weights in the folder and drops its cache. With an adapter, only a server that does not
        have the base weights needs them. Jobs that had not begun are not counted."""
        is_here, model = isinstance(client, ServerProcess), self.folder / "model"
        wants_base = not (self.policy.is_adapter and has_base)
        path, folder = str(model), f"{self._prefix}model"
        if wants_base and not is_here:
            path = client.send(sorted(model.glob("model*.safetensors")), folder)
        with _paused(client):
            counts: Counts = client.rpc("lemma_counts")
            if wants_base:
                client.rpc("lemma_load", path)
            if self.policy.is_adapter:
                self._load_adapter(client)
            answer = client.call("/reset_prefix_cache?reset_running_requests=true")
        if wants_base and not is_here:
            client.forget(folder)
        if not answer["success"]:
            raise EngineError("vLLM did not forget the cache of the old weights")
        return counts

    def _load_adapter(self, client: ServerClient) -> None:
        folder = self.folder / "adapter"
        path = str(folder)
        if not isinstance(client, ServerProcess):
            path = client.send(sorted(file for file in folder.iterdir() if file.is_file()), f"{self._prefix}adapter")
        client.call("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True})

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """What every request for a completion says."""
        model = ADAPTER if self.policy.is_adapter else SERVED
        return {"model": model, "prompt": prompt, "return_token_ids": True, "add_special_tokens": False}

    def score(self, client: ServerClient) -> ProbeScores:
        prompt = probe_prompt(self.policy, self._context)
        choice = client.call("/v1/completions", self.body(prompt) | probe_arguments(self.policy))["choices"][0]
        entries = (choice["prompt_logprobs"] or [])[1:]
        given = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=bool(entries))]
        return ProbeScores([*prompt, *choice["token_ids"]], [*given, *choice["logprobs"]["token_logprobs"]])


@contextmanager
def _paused(client: ServerClient) -> Iterator[None]:
    """No token is sampled inside `with`: it would mix new weights with the old weights' cache."""
    client.call("/pause?mode=keep&clear_cache=false")
    yield
    client.call("/resume")
