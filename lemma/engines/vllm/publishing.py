"""Publishing weights to a server: by the path of files on the same machine, by upload to other machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lemma.core import ranks
from lemma.engines.protocol import EngineError
from lemma.engines.vllm.server import Server
from lemma.engines.vllm.server_client import ServerClient
from lemma.engines.vllm.weights import write_adapter, write_model, write_weights
from lemma.models.policy import Policy

ADAPTER = "policy"  # the name of the policy's adapter in vLLM


@dataclass(frozen=True)
class Publisher:
    """The weights for the servers are in `folder`, in buckets. `prefix` distinguishes the files of different
    trainers."""

    policy: Policy
    folder: Path
    prefix: str

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

    def prepare(self, client: ServerClient) -> None:
        """Prepare a server that started from the folder: it has the base weights and gets the adapter."""
        client.rpc("lemma_prepare")
        if self.policy.is_adapter:
            self._load_adapter(client)

    def load(self, client: ServerClient, is_new: bool = False) -> dict[str, int | None]:
        """The server loads the weights in the folder and drops its cache. With an adapter, only a new server that did
        not start from the folder needs the base weights. Returns how many tokens each running job has from the old
        weights, and None for those that were finished; jobs that had not begun are left out."""
        is_here, model = isinstance(client, Server), self.folder / "model"
        wants_base = not self.policy.is_adapter or (is_new and not is_here)
        path, folder = str(model), f"{self.prefix}model"
        if wants_base and not is_here:
            path = client.send(sorted(model.glob("model*.safetensors")), folder)
        with _paused(client):
            counts: dict[str, int | None] = client.rpc("lemma_counts")
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
        if not isinstance(client, Server):
            path = client.send(sorted(file for file in folder.iterdir() if file.is_file()), f"{self.prefix}adapter")
        client.call("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True})


@contextmanager
def _paused(client: ServerClient) -> Iterator[None]:
    """No token is sampled inside `with`: it would mix new weights with the old weights' cache."""
    client.call("/pause?mode=keep&clear_cache=false")
    yield
    client.call("/resume")
