"""Two real vLLM servers: balanced, published to in buckets by path and over the network, one killed and replaced."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.engines.protocol import EngineError, Request, generate
from lemma.engines.remote import servers as servers_of_engine
from lemma.engines.remote import weight_files
from lemma.engines.remote.server_guard import KEY_VARIABLE
from lemma.engines.vllm import make_vllm
from lemma.engines.vllm.server_engine import VllmServerEngine
from lemma.engines.vllm.versions import check_version, installed
from tests.cluster.crew import Crew
from tests.cluster.test_rl_ranks import ALGORITHMS
from tests.cluster.test_rl_ranks import recipe_of as rl_recipe
from tests.cluster.test_run_ranks import trained
from tests.engines.small_policies import random_prompts, shake, small_policy, worst_difference
from tests.engines.vllm_checks import FREE, GREEDY, QUICK, requests_of

pytestmark = [pytest.mark.crowded, pytest.mark.slow]
KEY = "known to both"


def skip_without_vllm() -> None:
    """Where torch is a CPU build `make test` installs vLLM, so that its absence is not excused there."""
    try:
        check_version(installed())
    except EngineError as error:
        is_excused = "+cpu" not in torch.__version__ or sys.platform != "linux"
        pytest.skip(f"{'needs vLLM' if is_excused else 'vLLM is missing'}: {error}")


@pytest.fixture(scope="module")
def owner() -> Iterator[VllmServerEngine]:
    """An engine whose two servers Lemma started."""
    skip_without_vllm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # on a CPU vLLM calls g++ in every process
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less for each server
        patch.setenv(KEY_VARIABLE, KEY)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(weight_files, "BUCKET_BYTES", 50_000)
        engine = make_vllm(small_policy("qwen2", tied=True), 0, QUICK.model_copy(update={"servers": 2}))
        assert isinstance(engine, VllmServerEngine)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def guest(owner: VllmServerEngine) -> Iterator[VllmServerEngine]:
    """Another engine, which knows the same servers by their addresses only."""
    urls = [member.client.url for member in owner.pool.members if member.client is not None]
    policy = small_policy("qwen2", tied=True)
    shake(policy, 5, size=0.1)
    engine = make_vllm(policy, 0, QUICK.model_copy(update={"servers": urls}))
    assert isinstance(engine, VllmServerEngine)
    yield engine
    engine.close()


def drawn(engine: VllmServerEngine, requests: list[Request]) -> list[tuple[object, int, list[int]]]:
    return [(c.key, c.sample, c.ids.tolist()) for c in generate(engine, requests)]


def test_two_servers_share_the_work_and_draw_what_one_draws(owner: VllmServerEngine) -> None:
    requests = requests_of(replace(FREE, temperature=0.9), n=4)
    seen: Counter[int] = Counter()
    for request in requests:
        owner.submit(request)
    for name in owner._jobs:
        holder = owner.pool.holder(name)
        assert holder is not None
        seen[holder.number] += 1
    assert seen == {0: 10, 1: 10}
    together = [(c.key, c.sample, c.ids.tolist()) for c in sorted(owner.completions(), key=lambda c: c.order)]
    assert all(member.tokens == 0 for member in owner.pool.members)
    second = owner.pool.members.pop()
    try:
        assert drawn(owner, requests) == together
    finally:
        owner.pool.members.append(second)
    # Whoever has long requests gets fewer of the others.
    owner.submit(Request(("long",), random_prompts(1)[0], replace(FREE, max_tokens=100)))
    for number, prompt in enumerate(random_prompts(4)):
        owner.submit(Request(("short", number), prompt, replace(FREE, max_tokens=4)))
    assert {owner.pool.holder(name).number for name in list(owner._jobs)[1:]} == {1}  # type: ignore[union-attr]
    assert len(list(owner.completions())) == 5


def test_both_get_new_weights_in_buckets(owner: VllmServerEngine) -> None:
    shake(owner.policy, 11, size=0.1)
    owner.update_weights(3)
    assert len(list((owner.folder / "model").glob("model-*.safetensors"))) > 2 and owner.difference < 1e-4
    requests = requests_of(GREEDY, n=2)
    assert worst_difference(owner.policy, requests, generate(owner, requests)) < 1e-4


def test_servers_elsewhere_are_sent_the_weights(guest: VllmServerEngine, owner: VllmServerEngine) -> None:
    requests = requests_of(GREEDY, n=2)
    assert worst_difference(guest.policy, requests, generate(guest, requests)) < 1e-4
    shake(guest.policy, 12, size=0.1)
    guest.update_weights(1)
    assert guest.difference < 1e-4
    assert worst_difference(guest.policy, requests, generate(guest, requests)) < 1e-4
    assert not list(owner.folder.glob("lemma-files-*/*model")), "what was sent is removed"


def test_a_death_is_the_others_work_and_the_dead_is_replaced(
    guest: VllmServerEngine, owner: VllmServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner starts it again at the same address; the guest, who cannot, goes on and finds it there later."""
    monkeypatch.setattr(servers_of_engine, "RETRY_SECONDS", 0.2)
    owner.policy.causal.load_state_dict(guest.policy.causal.state_dict())
    owner.update_weights(7)
    requests = requests_of(replace(FREE, max_tokens=60), n=4)
    expected = drawn(guest, requests)
    shake(owner.policy, 22, size=0.05)  # not handed over: the dead one comes back with version 7
    victim = owner.pool.members[1].client
    assert victim is not None
    for request in requests:
        guest.submit(request)
        owner.submit(request)
    os.kill(victim.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    found = [(c.key, c.sample, c.ids.tolist()) for c in sorted(guest.completions(), key=lambda c: c.order)]
    assert found == expected and [member.number for member in guest.pool.up] == [0]
    own = [(c.key, c.sample, c.ids.tolist()) for c in sorted(owner.completions(), key=lambda c: c.order)]
    assert own == expected
    end = time.monotonic() + QUICK.start_seconds
    while len(owner.pool.up) < 2 or len(guest.pool.up) < 2:
        assert time.monotonic() < end
        owner._look_after()
        guest._look_after()
        time.sleep(0.1)
    assert owner.pool.members[1].client is not victim and drawn(guest, requests) == expected


def test_who_does_not_know_the_key_is_told(owner: VllmServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "another")
    options = QUICK.model_copy(update={"servers": [owner.server.url]})
    with pytest.raises(EngineError, match=r"does not serve: it knows another key; start it with .*stand_alone"):
        make_vllm(small_policy("qwen2", tied=True), 0, options)


def learnt_with_split_weights(content: dict[str, Any], key: str) -> None:
    os.environ[KEY_VARIABLE] = key
    trained(content)


def test_ranks_with_split_weights_learn_from_what_servers_sample(owner: VllmServerEngine, tmp_path: Path) -> None:
    """Two ranks bring their weights together in buckets; the first one publishes them, and both compare the probe."""
    owner.policy.save(tmp_path / "model")
    owner.policy.tokenizer.save_pretrained(tmp_path / "words")
    model = {"path": str(tmp_path / "model"), "tokenizer": str(tmp_path / "words")}
    urls = [member.client.url for member in owner.pool.members if member.client is not None]
    engine = {"name": "vllm", "servers": urls, "context": owner.context}
    stage = ALGORITHMS["grpo"] | {"rollout": {"max_tokens": 8, "engine": engine}}
    content = rl_recipe(tmp_path, "run", stage, slots=2) | {"model": model}
    content["cluster"] = {"slots": 2, "shard": "weights"}
    crew = Crew(tmp_path, 2)
    try:
        crew.run(2, learnt_with_split_weights, content, KEY)
    finally:
        crew.close()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["updated"] for row in rows] == [1.0, 1.0] and all(row["mismatch/max"] < 1e-4 for row in rows)
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "run/stages/stage/final"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
