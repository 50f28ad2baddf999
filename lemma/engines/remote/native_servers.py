"""Servers of the native engine (`lemma serve --rollouts`): what they load, and how the trained weights reach them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lemma.core import ranks
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import EngineError
from lemma.engines.remote.rollout_wire import LOAD, PROBE, WEIGHTS
from lemma.engines.remote.server_client import ServerClient
from lemma.engines.remote.server_gpus import gpus_of_servers
from lemma.engines.remote.server_options import ServerOptions
from lemma.engines.remote.server_process import ServerProcess, own_environment
from lemma.engines.remote.servers import Counts, Servers
from lemma.engines.remote.weight_files import write_buckets
from lemma.engines.remote.weights_probe import ProbeScores, probe_prompt
from lemma.models.policy import Policy


class NativeServers(Servers):
    """Each builds the same model as the trainer did, and is then sent the weights that are trained."""

    noun = "generation server"
    by_hand = "lemma serve MODEL --rollouts"

    def __init__(
        self,
        policy: Policy,
        options: NativeOptions,
        cache: int | None,
        seed: int,
        folder: Path,
        ask_again: Callable[[Sequence[str]], None],
    ):
        super().__init__(policy, options, folder, ask_again)
        if policy.origin is None:
            raise EngineError("generation servers need a model of a recipe", fix="leave out `servers`")
        self.load_id: str = ranks.from_leader(lambda: secrets.token_hex(8), "the name of the servers' model")
        self.version = 0
        self.facts: dict[str, Any] = {}
        """What the servers say about their engine: name, context, in_place_of, capacity."""
        origin = policy.origin
        start = origin.start_from
        engine = options.model_dump(mode="json", exclude=set(ServerOptions.model_fields))
        self._order = {
            "id": self.load_id,
            "model": origin.options.model_dump(mode="json"),
            "start_from": None if start is None else os.path.abspath(start),
            "device": policy.device.type,
            "model_seed": origin.seed,
            "seed": seed,
            "engine": engine,
            "cache": cache,
            "layout": layout_of(policy),
            "threads": torch.get_num_threads(),
            "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    @torch.no_grad()
    def write_weights(self) -> None:
        """Every rank calls this; the first one writes."""
        folder = self.folder / "trained"
        folder.mkdir(exist_ok=True)
        state = {name: tensor.detach() for name, tensor in self.policy.parameters().items()}
        write_buckets(state, self.policy.dtype, folder, keep=ranks.is_leader())

    def command(self, number: int, port: int) -> tuple[list[str], Mapping[str, str]]:
        gpus = gpus_of_servers(self.policy.device.type, self.options, number)
        variables = own_environment() | gpus | {"TMPDIR": str(self.folder)}
        return [sys.executable, "-m", "lemma.serving.rollout_server", "--port", str(port)], variables

    def prepare(self, client: ServerClient, *, is_own: bool) -> None:
        facts = client.call(LOAD, self._order, self.options.start_seconds)
        known = [count for count in (self.facts.get("capacity"), facts["capacity"]) if count is not None]
        self.facts = facts | {"capacity": min(known, default=None)}
        self.load(client)

    def load(self, client: ServerClient) -> Counts:
        files = sorted((self.folder / "trained").glob("model*.safetensors"))
        path, sent = str(self.folder / "trained"), f"{self.load_id}-trained"
        is_here = isinstance(client, ServerProcess)
        if not is_here:
            path = client.send(files, sent)
        order = {"id": self.load_id, "version": self.version, "folder": path, "files": [file.name for file in files]}
        client.call(WEIGHTS, order, self.options.start_seconds)
        if not is_here:
            client.forget(sent)
        return {}

    def score(self, client: ServerClient) -> ProbeScores:
        """A server that has lost the model, or was taken by another trainer, cannot be used as it is."""
        order = {"id": self.load_id, "version": self.version, "prompt": probe_prompt(self.policy, self.policy.context)}
        found = client.call(PROBE, order, self.options.start_seconds)
        if found.get("is_stale"):
            raise ConnectionError("it holds other weights")
        return ProbeScores(found["ids"], found["logprobs"])


def layout_of(policy: Policy) -> list[list[Any]]:
    """Names, shapes and types of the trained weights, as they are sent: sharded ones are masters, which may be wider
    than what the policy computes in."""
    return [
        [name, list(one.shape), str(policy.dtype if hasattr(one, "full_tensor") else one.dtype)]
        for name, one in policy.parameters().items()
    ]
