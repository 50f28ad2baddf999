"""Generation servers: what is sampled and learnt is what one process samples and learns, also after their deaths."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from lemma.cli import main
from lemma.core.errors import LemmaWarning, UserError
from lemma.core.ranks import RankWorld, joined
from lemma.engines.remote import server_client, servers
from lemma.engines.remote.native_servers import NativeServers
from lemma.engines.remote.server_guard import HEADER, KEY_VARIABLE
from tests.cluster.crew import Crew
from tests.cluster.forked import wait_for
from tests.cluster.generation_servers import KEY, ForkedServer, forked_servers, free_port
from tests.cluster.test_lag_ranks import STAGES
from tests.cluster.test_rl_ranks import ALGORITHMS, MODEL, recipe_of, samples
from tests.cluster.test_run_ranks import outcome, trained

GRPO = ALGORITHMS["grpo"]
DAPO = ALGORITHMS["dapo"] | {"steps": 2}


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        patch.setattr(servers, "RETRY_SECONDS", 0.2)
        yield


@pytest.fixture(scope="module")
def pair(key: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two servers that nothing happens to."""
    with forked_servers(tmp_path_factory.mktemp("servers"), 2) as both:
        yield [one.url for one in both]


def served(stage: dict[str, Any], urls: list[str] | int, **rollout: Any) -> dict[str, Any]:
    given = {"max_tokens": 4} | stage.get("rollout", {}) | rollout
    return stage | {"rollout": given | {"engine": {"name": "native", "servers": urls}}}


def learnt(content: dict[str, Any], key: str = KEY) -> list[str]:
    """Train in this process, or on this rank."""
    os.environ[KEY_VARIABLE] = key
    return trained(content)


def alone(content: dict[str, Any]) -> list[str]:
    with joined(RankWorld()):
        return trained(content)


def timings(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["timings"] for row in rows if row["axis"] == "train"]


def check_same(folder: Path, kind: str = "") -> None:
    assert outcome(folder / "served", kind) == outcome(folder / "alone", kind)
    assert samples(folder / "served") == samples(folder / "alone")


def test_an_adapter_and_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lemma starts it, and again when it dies in the second step; only the adapter travels."""
    model = {"model": MODEL | {"lora": {"r": 4}}}
    alone(recipe_of(tmp_path, "alone", GRPO, slots=1) | model)
    monkeypatch.setenv("LEMMA_FAULT", "server.sample:30")
    alone(recipe_of(tmp_path, "served", served(GRPO, 1), slots=1) | model)
    check_same(tmp_path, "merged")
    for row in timings(tmp_path / "served"):
        assert 0 < row["server_seconds"] <= row["generate_seconds"] + row["grade_seconds"], "it was all waited for"


def test_ranks_and_servers(crew: Crew, pair: list[str], tmp_path: Path) -> None:
    """Two and two, and two ranks that one server serves, with a validation in between."""
    stage = GRPO | {"validation": {"share": 0.25, "every": 2}}
    alone(recipe_of(tmp_path, "alone", stage, slots=2))
    for ranks, urls in ((1, pair), (2, pair), (2, pair[:1])):
        crew.run(ranks, learnt, recipe_of(tmp_path, "served", served(stage, urls), slots=2))
        check_same(tmp_path)
        (tmp_path / "served").rename(tmp_path / f"served-{ranks}-{len(urls)}")


@pytest.mark.parametrize("name", ["dapo", "game"])
def test_a_server_that_dies_costs_nothing(name: str, tmp_path: Path) -> None:
    """In a step whose groups are drawn again, and in a game, where the dead server knew the turns before."""
    stage = STAGES[name] | {"steps": 2, "rollout": {"max_tokens": 4}}
    alone(recipe_of(tmp_path, "alone", stage, slots=2))
    with forked_servers(tmp_path, 2, "server.sample:9") as both:
        alone(recipe_of(tmp_path, "served", served(stage, [one.url for one in both]), slots=2))
        assert [one.is_alive for one in both] == [False, True]
    check_same(tmp_path)


def test_a_server_that_dies_while_it_takes_weights(pair: list[str], tmp_path: Path) -> None:
    alone(recipe_of(tmp_path, "alone", GRPO, slots=2))
    with forked_servers(tmp_path, 1, "server.weights:3") as (mortal,):
        alone(recipe_of(tmp_path, "served", served(GRPO, [mortal.url, pair[0]]), slots=2))
        assert not mortal.is_alive
    check_same(tmp_path)


def test_a_server_that_comes_later_is_taken_in(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started after the first step; the run goes on when it has taken weights."""
    alone(recipe_of(tmp_path, "alone", GRPO | {"steps": 3}, slots=2))
    port, came = free_port(), list[ForkedServer]()
    check, prepare, prepared = NativeServers.check, NativeServers.prepare, set[str]()

    def checked(self: NativeServers, version: int) -> float:
        difference = check(self, version)
        if version == 1:
            came.append(ForkedServer(tmp_path, port))
            wait_for(lambda: self.look_after() or len(self.pool.up) == 2, 60)
        return difference

    def noted(self: NativeServers, client: Any, *, is_own: bool) -> None:
        prepared.add(client.url)
        prepare(self, client, is_own=is_own)

    monkeypatch.setattr(NativeServers, "check", checked)
    monkeypatch.setattr(NativeServers, "prepare", noted)
    late = f"http://127.0.0.1:{port}"
    try:
        with pytest.warns(LemmaWarning, match=f"{late} does not serve yet"):
            alone(recipe_of(tmp_path, "served", served(GRPO | {"steps": 3}, [pair[0], late]), slots=2))
    finally:
        for one in came:
            one.kill()
    assert prepared == {pair[0], late}
    check_same(tmp_path)


def test_no_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = served(GRPO, 1)
    with forked_servers(tmp_path, 1, "server.sample:9") as (mortal,):
        stage["rollout"]["engine"] |= {"servers": [mortal.url], "start_seconds": 2.0}
        with pytest.raises(UserError, match=rf"no generation server is left \({mortal.url}\); start them again, then"):
            alone(recipe_of(tmp_path, "served", stage, slots=1))


def test_a_server_with_other_weights_is_found_out(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = server_client.ServerClient.call

    def deaf(self: Any, path: str, body: Any = None, *more: Any) -> Any:
        if path == "/lemma/weights" and body["version"] == 1:
            body = body | {"folder": str(tmp_path / "before")}
        return call(self, path, body, *more)

    write = NativeServers.write_weights

    def kept(self: NativeServers) -> None:
        write(self)
        if self.version == 0 and not (tmp_path / "before").exists():
            (self.folder / "trained").rename(tmp_path / "before")
            write(self)

    monkeypatch.setattr(server_client.ServerClient, "call", deaf)
    monkeypatch.setattr(NativeServers, "write_weights", kept)
    with pytest.raises(UserError, match="a generation server does not hold the policy's weights after the update to"):
        alone(recipe_of(tmp_path, "served", served(GRPO, pair[:1]), slots=1))


def test_ranks_that_split_their_weights(crew: Crew, pair: list[str], tmp_path: Path) -> None:
    """With `shard: weights` nobody else could generate here. Sums are added up in another order, so bits differ. A KL
    to a reference, which is split too."""
    stage = {**GRPO, "algorithm": GRPO["algorithm"] | {"kl": 0.05}}
    alone(recipe_of(tmp_path, "alone", stage, slots=2))
    content = recipe_of(tmp_path, "served", served(stage, pair), slots=2)
    content["cluster"] |= {"shard": "weights"}
    crew.run(2, learnt, content)
    whole, split = (load_file(tmp_path / name / "stages/stage/final/model.safetensors") for name in ("alone", "served"))
    assert all(torch.allclose(split[name], whole[name], atol=1e-4) for name in whole)


# --- who is heard --------------------------------------------------------------------------------------------------


def test_a_stranger_gets_nowhere_and_the_run_goes_on(pair: list[str], tmp_path: Path) -> None:
    """All paths, without a key and with another one; somebody who says nothing, and somebody who is rude."""
    address = ("127.0.0.1", int(pair[0].rpartition(":")[2]))
    is_over, answers = threading.Event(), set[int]()

    def stranger() -> None:
        with httpx.Client(base_url=pair[0], trust_env=False) as client:
            while not is_over.is_set():
                for path in ("load", "weights", "probe", "generate", "end", "files/a/b"):
                    for headers in ({}, {HEADER: "guess"}):
                        answers.add(client.post(f"/lemma/{path}", content=b"\x80\x04.", headers=headers).status_code)
                answers.add(client.get("/health").status_code)

    alone(recipe_of(tmp_path, "alone", GRPO, slots=1))
    thread = threading.Thread(target=stranger)
    with socket.create_connection(address), socket.create_connection(address) as rude:
        rude.sendall(b"\x80\x04 no request\r\n\r\n")
        thread.start()
        try:
            alone(recipe_of(tmp_path, "served", served(GRPO, pair[:1]), slots=1))
        finally:
            is_over.set()
            thread.join()
    assert answers == {401}
    check_same(tmp_path)


def test_a_trainer_with_another_key_is_told(pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(UserError, match=r"does not serve: it knows another key; start it with `lemma serve MODEL --ro"):
        alone(recipe_of(tmp_path, "served", served(GRPO, pair[:1]), slots=1))


def test_a_server_without_a_key_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    assert main(["serve", "tiny", "--rollouts"]) == 2
    assert f"a key that the trainer knows too: {KEY_VARIABLE} is not set; set it on both" in capsys.readouterr().err
