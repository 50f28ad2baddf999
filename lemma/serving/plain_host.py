"""The host of `lemma serve`: every call is independent."""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
from collections.abc import Collection

import numpy as np

from lemma.core.types import content_id
from lemma.engines.protocol import Request, Sampling
from lemma.formats.dialogue import Dialogue
from lemma.serving.engine_driver import EngineDriver
from lemma.serving.exchange import TellLikeliest, WireChoice
from lemma.serving.wire_errors import ApiError
from lemma.serving.wire_requests import WireCall

# Texts of more characters than this for each token of the context are not tokenised; a short context leaves room for
# tokenizers to which white space is nothing.
CHARACTERS_PER_TOKEN, LEAST_CHARACTERS = 16, 2**16


def check_length(asked: WireCall, limit: int) -> None:
    """Refuse what cannot fit before anything of it is tokenised: text by its characters, ids by their number."""
    if asked.kind == "chat":
        sizes = [len(json.dumps(asked.messages, ensure_ascii=False)) + len(json.dumps(asked.tools, ensure_ascii=False))]
    else:
        sizes = [len(one) if isinstance(one, str) else len(one) * CHARACTERS_PER_TOKEN for one in asked.prompts]
    longest, most = max(sizes), max(LEAST_CHARACTERS, limit * CHARACTERS_PER_TOKEN)
    if longest > most:
        raise ApiError(
            400, f"the prompt has {longest} characters, and more than {most} are not read for the {limit} tokens "
            "that prompt and answer together may have",
            param="messages" if asked.kind == "chat" else "prompt", code="context_length_exceeded",
        )  # fmt: skip


def room_for(prompt: np.ndarray, limit: int) -> int:
    """How many tokens may follow a prompt."""
    room = limit - len(prompt)
    if room < 1:
        raise ApiError(
            400, f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {limit}",
            param="messages", code="context_length_exceeded",
        )  # fmt: skip
    return room


def limit_of(driver: EngineDriver) -> int:
    """Maximum number of tokens of prompt and answer together."""
    engine = driver.engine
    return engine.context if engine.capacity is None else min(engine.context, engine.capacity)


class PlainHost:
    """One model for every client with the API key; for everyone if there is none."""

    def __init__(
        self,
        driver: EngineDriver,
        dialogue: Dialogue,
        names: Collection[str],
        api_key: str | None = None,
        likeliest: TellLikeliest | None = None,
    ):
        self.driver, self.dialogue, self.likeliest = driver, dialogue, likeliest
        self.name, self._names = next(iter(names)), frozenset(names)
        self._api_key = api_key
        self._limit = limit_of(driver)
        self._numbers = itertools.count()
        self._once = secrets.token_hex(8)
        self.is_over = False

    def serves(self, model: str) -> bool:
        return model in self._names

    def caller(self, key: str, session: str | None) -> PlainHost:
        if self._api_key is not None and not hmac.compare_digest(key.encode(), self._api_key.encode()):
            raise ApiError(401, "this is not the server's key", code="invalid_api_key")
        return self

    def heard(self, asked: WireCall, choice: WireChoice) -> None:
        """Nothing is kept."""

    def requests(self, asked: WireCall) -> list[Request]:
        check_length(asked, self._limit)
        if asked.kind == "chat":
            prompts = [self.dialogue.prompt(asked.messages, asked.tools, continues=asked.continues)]
        else:
            prompts = [self._encoded(prompt) for prompt in asked.prompts]
        return [self._request(asked, prompt, place) for place, prompt in enumerate(prompts)]

    def _encoded(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        return self.dialogue.begin(prompt) if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int64)

    def _request(self, asked: WireCall, prompt: np.ndarray, place: int) -> Request:
        room = room_for(prompt, self._limit)
        stops = (*self.dialogue.fmt.stop, *asked.stop) if asked.kind == "chat" else asked.stop
        sampling = Sampling(
            max_tokens=min(asked.max_tokens or room, room),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            min_tokens=min(asked.min_tokens, room),
            stop=stops,
            stop_ids=tuple(sorted(self.dialogue.ends)),
        )
        # With a seed the noise depends on the seed and the prompt; without one it is new for each call.
        if asked.seed is not None:
            key: tuple[str | int, ...] = ("seed", asked.seed, content_id(prompt.tolist()), place)
        else:
            key = ("call", self._once, next(self._numbers))
        return Request(key, prompt, sampling, asked.n)
