"""One worker process: its environments take orders from the trainer and answer them."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from lemma.children.child_main import Channel
from lemma.environments import ENVIRONMENTS
from lemma.environments.env_server import EnvOrder, EnvServer, order_from
from lemma.environments.environment import EnvironmentOptions


def make_options(row: dict[str, Any]) -> EnvironmentOptions:
    """The trainer's options: their class by its registered name, or else by its module."""
    module, name = row["class"]
    found = ENVIRONMENTS.find(row["options"]["name"]) if row["by_name"] else None
    kind = found or getattr(importlib.import_module(module), name)
    return kind.model_validate(row["options"])


def serve(channel: Channel) -> None:
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # what environments print is not kept, so that stderr ends with an error
    first = channel.receive()
    if first is None:
        return
    server = EnvServer(make_options(first), is_worker=True)
    channel.send({"ready": os.getpid()})

    def perform(order: EnvOrder) -> None:
        server.perform(order, lambda answer: channel.send(asdict(answer)))

    threads = ThreadPoolExecutor(first["at_once"]) if first["at_once"] > 1 else None
    while (row := channel.receive()) is not None:
        order = order_from(row)
        if threads is None:
            perform(order)
        else:
            threads.submit(perform, order)
    server.close()
