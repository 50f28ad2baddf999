"""`lemma serve` as a process, asked by OpenAI's own client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch

from lemma.cli import main
from lemma.core.types import Trajectory
from lemma.models.load_model import load_policy
from lemma.models.packing import TokenBatch
from tests.preloaded import Python

SITE = "http://pages.example"
KEY = "a-key-that-is-hard-to-guess"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "how many stones ?"}],
    "max_tokens": 24,
    "seed": 5,
}


def start(*more: str) -> Python:
    words = ["-m", "lemma", "serve", "tiny", "--device", "cpu", *more]
    environment = {**os.environ, "LEMMA_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    return Python(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Python, str]]:
    with start("--cors", SITE) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.fixture(scope="module")
def client(server: tuple[Any, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=server[1], api_key=KEY, max_retries=0, timeout=120)


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=60) as answer:
        return dict(json.load(answer))


def test_pages_of_sites_that_were_named_may_ask(server: tuple[Any, str]) -> None:
    asked = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in ((SITE, SITE), ("http://evil.example", None)):
        request = urllib.request.Request(
            f"{server[1]}/models", None, {"Authorization": f"Bearer {KEY}", "Origin": origin}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
    request = urllib.request.Request(f"{server[1]}/chat/completions", None, asked, method="OPTIONS")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == SITE


def streamed(chunks: Any) -> tuple[str, str | None, list[float]]:
    """The text, the end and the log-probabilities of a stream with one choice."""
    text, finish, logprobs = "", None, []
    for chunk in chunks:
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            finish = choice.finish_reason or finish
            logprobs += [one.logprob for one in (choice.logprobs.content if choice.logprobs else [])]
    return text, finish, logprobs


def test_models_and_health(server: tuple[Any, str], client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "lemma"
    with pytest.raises(openai.NotFoundError, match="there is: tiny") as caught:
        client.models.retrieve("large")
    assert caught.value.code == "model_not_found"
    assert health(server[1]) == {"status": "ok", "requests": 0}


def test_a_stream_says_the_same_as_the_whole(client: openai.OpenAI) -> None:
    for more in ({}, {"stop": ["pens", "1 ", "+"]}, {"temperature": 0}, {"top_p": 0.5, "extra_body": {"top_k": 9}}):
        whole = client.chat.completions.create(**ASKED, **more, logprobs=True).choices[0]
        assert whole.logprobs is not None and whole.logprobs.content is not None
        stream = client.chat.completions.create(**ASKED, **more, logprobs=True, stream=True)
        text, finish, numbers = streamed(stream)
        assert (text, finish) == (whole.message.content, whole.finish_reason)
        assert numbers == pytest.approx([one.logprob for one in whole.logprobs.content], abs=1e-5)
        assert not any(stop in (whole.message.content or "") for stop in more.get("stop", ()))


def test_an_answer_that_was_begun_is_continued(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "how many stones ?"}

    def answer(begun: str | None, stream: bool = False, **fields: Any) -> str:
        turns = [question] if begun is None else [question, {"role": "assistant", "content": begun}]
        asked: dict[str, Any] = {"model": "tiny", "messages": turns, "max_tokens": 40, "temperature": 0}
        reply = client.chat.completions.create(**asked, stream=stream, extra_body=fields)
        return streamed(reply)[0] if stream else str(reply.choices[0].message.content)

    whole = answer(None)
    words = whole.split(" ")
    for count in (1, 3):
        begun = " ".join(words[:count])
        for stream in (False, True):
            assert whole.startswith(begun + answer(begun, stream, max_tokens=40 - count)) and count < len(words)
        assert answer(begun, max_tokens=40 - count) == whole[len(begun) :]
        assert answer(begun, continue_final_message=True, add_generation_prompt=False) == answer(begun)
        assert answer(begun, add_generation_prompt=True) == answer(begun, continue_final_message=False)
    for begun, fields, match in (
        ("ben", {"continue_final_message": True, "add_generation_prompt": True}, "exactly one"),
        (None, {"continue_final_message": True}, "leave out continue_final_message"),
        (None, {"add_generation_prompt": False}, "leave out add_generation_prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            answer(begun, **fields)


def test_completions_of_text_and_of_ids(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 1, "extra_body": {"return_token_ids": True}}
    texts = client.completions.create(**asked, prompt=["how many stones", "ben has 7 pens"], n=2)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in texts.choices}) == 4
    ids = texts.choices[2].model_extra
    assert ids is not None
    again = client.completions.create(**asked, prompt=[[5, 6], ids["prompt_token_ids"]], n=2, logprobs=0)
    assert [choice.text for choice in again.choices[2:]] == [choice.text for choice in texts.choices[2:]]
    usage = texts.usage
    said = sum(len((choice.model_extra or {})["token_ids"]) for choice in texts.choices)
    assert usage is not None and (usage.completion_tokens, usage.prompt_tokens) == (said, 7)
    stream = client.completions.create(**asked, prompt="how many stones", stream=True)
    assert streamed(stream)[0] == texts.choices[0].text


def test_logprobs_are_the_learners(client: openai.OpenAI) -> None:
    policy = load_policy("tiny", "cpu")
    for temperature in (1.0, 0.5):
        extra = {"return_token_ids": True}
        choice = client.chat.completions.create(
            **ASKED, temperature=temperature, logprobs=True, extra_body=extra
        ).choices[0]
        assert choice.logprobs is not None and choice.logprobs.content is not None and choice.model_extra is not None
        prompt, said = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
        assert len(said) == len(choice.logprobs.content) > 0
        ids = np.asarray([*prompt, *said])
        batch = TokenBatch.build([Trajectory(ids, np.arange(len(ids)) >= len(prompt))], [0], torch.device("cpu"))
        with torch.no_grad():
            scored = policy.logprobs(batch, temperature=temperature)
        told = [one.logprob for one in choice.logprobs.content]
        np.testing.assert_allclose(told, scored.numpy(), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 0.0])
def test_the_likeliest_tokens_are_those_of_the_plain_model(temperature: float, client: openai.OpenAI) -> None:
    """At temperature 0 of the plain softmax, as `logprobs`; each sampled token stands among them there, first."""
    policy = load_policy("tiny", "cpu")
    asked = {**ASKED, "max_tokens": 6, "temperature": temperature, "extra_body": {"return_token_ids": True}}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    more = choice.model_extra or {}
    prompt, said = more["prompt_token_ids"], more["token_ids"]
    with torch.no_grad():
        logits_TV = policy.causal(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits_TV / (temperature or 1.0), -1).topk(3)
    names = [[policy.tokenizer.decode([token]) for token in row] for row in wanted.indices.tolist()]
    assert choice.logprobs is not None and choice.logprobs.content is not None and len(said) > 1
    found = [one.top_logprobs for one in choice.logprobs.content]
    assert [[one.token for one in row] for row in found] == names
    np.testing.assert_allclose([[one.logprob for one in row] for row in found], wanted.values, atol=1e-5)
    if not temperature:
        assert [row[0].logprob for row in found] == pytest.approx([one.logprob for one in choice.logprobs.content])
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    last = [*stream][-1].choices[0].logprobs
    assert last is not None and last.model_dump() == choice.logprobs.model_dump()
    asked.pop("messages")
    text = client.completions.create(**asked, prompt=prompt, logprobs=2).choices[0]
    assert text.logprobs is not None and text.logprobs.top_logprobs is not None
    if not temperature:
        assert [[*row] for row in text.logprobs.top_logprobs] == [row[:2] for row in names]
    plain = client.completions.create(**asked, prompt=prompt, logprobs=0).choices[0]
    assert plain.logprobs is not None and plain.logprobs.top_logprobs is None


def test_the_model_as_it_came_tells_no_likeliest_tokens() -> None:
    """The transformers engine's model would see the tokens that come after: what it says of packs is wrong."""
    with start("--engine", "transformers") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        plain = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)
        try:
            with pytest.raises(openai.BadRequestError, match="not offered here"):
                plain.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3)
        finally:
            process.kill()


def test_a_seed_decides_and_without_one_nothing_does(client: openai.OpenAI) -> None:
    def say(**more: Any) -> str:
        return client.chat.completions.create(**{**ASKED, **more}).choices[0].message.content or ""

    assert say() == say() != say(seed=6)
    assert say(seed=None) != say(seed=None)


def test_32_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def say(seed: int) -> tuple[str, str | None, list[float]]:
        return streamed(client.chat.completions.create(**{**ASKED, "seed": seed}, stream=True))

    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(say, [*range(31), 0]))
    assert together[-1] == together[0]
    assert len({one[0] for one in together}) > 20, "a few may end at once"
    assert [say(seed) for seed in (0, 7, 30)] == [together[seed] for seed in (0, 7, 30)]


@pytest.mark.parametrize(
    ("more", "status", "code", "words"),
    [
        ({"model": "gpt-5"}, 404, "model_not_found", "there is: tiny"),
        ({"messages": []}, 400, None, "messages must be a list"),
        ({"messages": [{"role": "king", "content": "?"}]}, 400, None, "has the role 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "only text is read"),
        ({"messages": [{"role": "system", "content": "be nice"}]}, 400, None, "asks nothing"),
        ({"messages": [{"role": "user", "content": "pens " * 600}]}, 400, "context_length_exceeded", "tokens"),
        ({"temperature": -1}, 400, None, "temperature is -1"),
        ({"temperature": 10**400}, 400, None, "temperature is inf"),
        ({"temperature": 1e-40}, 400, None, "temperature is so low"),
        ({"top_p": 0}, 400, None, "top_p is 0"),
        ({"n": 0}, 400, None, "n is 0"),
        ({"max_tokens": "many"}, 400, None, "max_tokens is not a whole number"),
        ({"stop": [""]}, 400, None, "stop is not"),
        ({"top_logprobs": 5}, 400, None, "write `logprobs: true` as well"),
        ({"top_logprobs": 21, "logprobs": True}, 400, None, "top_logprobs is 21; write a number from 0 to 20"),
        ({"top_logprobs": 2, "logprobs": True, "n": 9}, 400, None, "ask for at most 8 answers with them"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "is not offered"),
        ({"extra_body": {"beam_width": 4}}, 400, "unknown_parameter", "there is no field 'beam_width'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, None, "cannot show the tools"),
    ],
)
def test_what_is_wrong_is_said(
    more: dict[str, Any], status: int, code: str | None, words: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{**ASKED, **more})
    assert caught.value.status_code == status and caught.value.code == code
    assert words in str(caught.value) and caught.value.type is not None


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/chat/completions", b"{", {}, 400),
        ("/v1/chat/completions", b"[]", {}, 400),
        ("/v1/chat/completions", b"{}", {"Authorization": "Bearer guess"}, 401),
        ("/v1/chat/completions", b"{}", {"Content-Type": "text/plain"}, 415),
        ("/v1/chat/completions", b"{}", {"Host": "evil.example"}, 403),
        ("/v1/chat/completions", None, {}, 405),
        ("/v1/embeddings", b"{}", {}, 404),
        ("/v1/models", None, {"Authorization": ""}, 401),
        ("/v1/completions", b'{"prompt": [%d]}' % 2**70, {}, 400),
        ("/v1/completions", b"{}", {"Host": "["}, 400),
        ("/v1/completions", b"{}", {"Content-Length": "\xb2"}, 400),
        ("/v1/completions", b" " * (65 * 2**20), {}, 413),
        ("/v1/completions", b" " * 2**22, {"Authorization": "Bearer guess"}, 401),
    ],
)
def test_requests_that_no_client_sends(
    path: str, body: bytes | None, headers: dict[str, str], status: int, server: tuple[Any, str]
) -> None:
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(server[1].removesuffix("/v1") + path, body, sent)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == status
    assert set(json.load(caught.value)["error"]) == {"message", "type", "param", "code"}


def test_nobody_without_the_key_makes_the_server_wait_for_a_body(server: tuple[Any, str]) -> None:
    port = int(server[1].split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection.sendall("\r\n".join([*lines, "Content-Length: 60000000", "", ""]).encode())
        assert b" 401 " in connection.recv(100)


def test_half_a_character_is_a_question_mark(client: openai.OpenAI, server: tuple[Any, str]) -> None:
    def said(content: str, as_it_is: bool = False) -> str:
        asked = ASKED | {"messages": [{"role": "user", "content": content}]}
        body = json.dumps(asked, ensure_ascii=not as_it_is).encode("utf-8", "surrogatepass")
        sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{server[1]}/chat/completions", body, sent)) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    assert said("pens \ud83d") == said("pens \ud83d", as_it_is=True) == said("pens ?")
    assert said("pens \U0001f600") == said("pens \U0001f600")


LONG: dict[str, Any] = {**ASKED, "max_tokens": 300, "n": 16, "top_p": 0.9}


@pytest.mark.serial
def test_what_nobody_waits_for_is_not_generated(server: tuple[Any, str], client: openai.OpenAI) -> None:
    def seconds_until_idle(begun: float) -> float:
        while health(server[1])["requests"]:
            assert time.monotonic() - begun < 120
            time.sleep(0.02)
        return time.monotonic() - begun

    begun = time.monotonic()
    client.chat.completions.create(**LONG)
    whole = time.monotonic() - begun
    begun = time.monotonic()
    stream = client.chat.completions.create(**LONG, stream=True)
    next(iter(stream))
    assert health(server[1])["requests"] == 1
    stream.close()
    assert seconds_until_idle(begun) < whole * 0.9
    begun = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=whole / 8, max_retries=0).chat.completions.create(**LONG)
    seconds_until_idle(begun)
    assert client.chat.completions.create(**ASKED).choices[0].finish_reason in ("length", "stop")


def test_answers_in_progress_are_finished_when_it_is_to_end(server: tuple[Any, str], client: openai.OpenAI) -> None:
    process, url = server
    whole = [choice.message.content for choice in client.chat.completions.create(**LONG).choices]
    stream = client.chat.completions.create(**LONG, stream=True)
    said = dict.fromkeys(range(LONG["n"]), "")
    for chunk in stream:
        if not any(said.values()):
            process.send_signal(signal.SIGTERM)
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert list(said.values()) == whole
    assert process.wait(30) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=5)


def test_a_second_ctrl_c_ends_at_once() -> None:
    with start() as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        speaker = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)
        stream = speaker.chat.completions.create(**{**LONG, "n": 128}, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        while "answers in progress have 30 s" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, OSError)):
            for _ in stream:
                pass
        assert process.wait(30) == 0


def test_others_than_this_machine_need_a_key(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("LEMMA_API_KEY", raising=False)
    assert main(["serve", "tiny", "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err
