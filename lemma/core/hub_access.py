"""What is a path and what a name of the hub, and whether the hub can be reached: found out once, not at every file."""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from lemma.core.errors import warn

SECONDS_TO_WAIT = 4.0
USUAL_ENDPOINT = "https://huggingface.co"
OURS = ("runs", "evaluations", "checkpoints", "models", "model", "data")
"""Folders that people keep models and data in; nobody on the hub is called so and publishes any."""
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_is_out_of_reach = False


def looks_like_path(name: str) -> bool:
    """Whether this is meant as a path, there or not: the hub is then never asked for it.

    Names of the hub are `name` or `owner/name`. What begins with a folder that exists here is a path with a typing
    mistake, not a name.
    """
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return True
    if "\\" in name or any(letter.isspace() for letter in name):
        return True
    owner, slash, _ = name.partition("/")
    return bool(slash) and (owner in OURS or Path(owner).is_dir())


def is_offline() -> bool:
    """Whether the hub is switched off, by the user or by `notice_offline`."""
    return _switch() is not None


def why_offline() -> str:
    """Why the hub is not asked, for a sentence about what is missing: variables are named that the user has set."""
    return "the hub cannot be reached" if _is_out_of_reach else f"the hub is switched off ({_switch()})"


def _switch() -> str | None:
    """The variable that switches the hub off, with its value."""
    given = ((name, os.environ.get(name, "")) for name in SWITCHES)
    return next((f"{name}={value}" for name, value in given if value.upper() in ("1", "ON", "YES", "TRUE")), None)


def notice_offline() -> None:
    """To be called before the hub is asked: where it cannot be reached, switch it off, so that every file is looked for
    on this machine only and nothing waits for a network that is not there."""
    global _is_out_of_reach
    if is_offline() or hub_answers(os.environ.get("HF_ENDPOINT") or USUAL_ENDPOINT):
        return
    _is_out_of_reach = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module, name in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:
            setattr(sys.modules[module], name, True)
    warn("the hub cannot be reached: only what is on this machine is used")


@cache
def hub_answers(endpoint: str) -> bool:
    """Whether a connection can be made within a few seconds; through a proxy that is not for us to say."""
    place = urlsplit(endpoint)
    proxies = {f"{place.scheme}_proxy", "all_proxy"}
    if any(name.lower() in proxies and value for name, value in os.environ.items()):
        return True
    port = place.port or (443 if place.scheme == "https" else 80)
    answers: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection((place.hostname or "", port), timeout=SECONDS_TO_WAIT).close()
            answers.append(True)
        except OSError:
            answers.append(False)

    # Looking up a name has no time limit of its own.
    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    knocking.join(SECONDS_TO_WAIT)
    return answers == [True]
