"""What the host does around the device: what it does before it reads, what it does together for many sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lemma.engines.native import cached_attention
from lemma.engines.native.cached_attention import Cache
from lemma.engines.native.engine import NativeEngine
from lemma.engines.native.runner import Runner
from lemma.engines.native.sequences import GATHER_FROM, Readback, Sequence, accept_all, completions_of
from lemma.engines.protocol import Request, generate
from lemma.models.packing import ALIGNED, copy_together
from tests.engines.native_checks import FREE, check_at_rest, check_same, engine_of, requests_of, run
from tests.engines.small_policies import exact_policy, random_prompts


def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches and reads from now on, in their order."""
    seen: list[str] = []
    launch, read = Runner.launch, NativeEngine._read

    def launching(*args: Any) -> Any:
        seen.append("launch")
        return launch(*args)

    def reading(*args: Any) -> Any:
        seen.append("read")
        return read(*args)

    monkeypatch.setattr(Runner, "launch", launching)
    monkeypatch.setattr(NativeEngine, "_read", reading)
    return seen


def test_the_first_burst_is_launched_before_first_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end with their first token, foreseen or not; two passes over prompts bring them all."""
    policy = exact_policy(sharp=1.0)
    prompts = random_prompts(10, seed=2, longest=30)
    firsts = [int(c.ids[0]) for c in run(policy, requests_of(prompts, FREE))]
    sampling = replace(FREE, max_tokens=9, stop_ids=tuple(firsts[:3]))
    requests = [
        Request(("test", i), p, replace(sampling, max_tokens=1) if i == 5 else sampling) for i, p in enumerate(prompts)
    ]
    wanted = run(policy, requests)
    assert {c.finish for c in wanted if len(c.ids) == 1} == {"stop", "length"}
    seen = told(monkeypatch)
    engine = engine_of(policy, ahead=True, burst=4, prefill_tokens=120)
    check_same(generate(engine, requests), wanted)
    check_at_rest(engine)
    assert seen[:3] == ["launch", "read", "read"]


def test_rows_that_run_already_go_on_beside_first_tokens_that_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens of those that come late need the host, which forbids some of them to end; later ones do not."""
    policy = exact_policy()
    requests = requests_of(random_prompts(4), replace(FREE, max_tokens=30))
    requests[0] = replace(requests[0], sampling=replace(FREE, max_tokens=7))
    least = replace(FREE, min_tokens=1, ignore_eos=False)
    late = [Request(("late", i), p, least) for i, p in enumerate(random_prompts(2, seed=5))]
    wanted = run(policy, [*requests, *late])
    engine = engine_of(policy, ahead=True, burst=2)
    for request in requests:
        engine.submit(request)
    stream = engine.completions()
    found = [next(stream)]
    for request in late:
        engine.submit(request)
    seen = told(monkeypatch)
    check_same(sorted([*found, *stream], key=lambda c: c.order), wanted)
    check_at_rest(engine)
    assert seen[:3] == ["read", "launch", "read"]


def test_the_host_chooses_no_tokens_before_it_has_read_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = exact_policy()
    requests = requests_of(random_prompts(3), replace(FREE, top_k=5))
    wanted = run(policy, requests)
    seen = told(monkeypatch)
    check_same(run(policy, requests, ahead=True), wanted)
    assert seen[:2] == ["read", "launch"]


def test_who_is_let_in_does_not_depend_on_passes() -> None:
    """Prompts that came together are computed whole although they begin alike; the next one finds the beginning."""
    policy = exact_policy()
    shared = np.arange(1, 33)
    requests = [
        Request((i,), np.append(shared, np.arange(40 + i, 48 + i)), replace(FREE, max_tokens=1)) for i in range(3)
    ]
    sizes: list[int] = []
    hidden = policy.hidden_cached
    policy.hidden_cached = lambda ids, *rest: (sizes.append(len(ids)), hidden(ids, *rest))[1]
    engine = engine_of(policy, prefill_tokens=40)
    generate(engine, requests)
    assert sizes == [40, 40, 40]
    sizes.clear()
    generate(engine, [Request(("late",), np.append(shared, np.arange(90, 98)), replace(FREE, max_tokens=1))])
    assert sizes == [8]


def test_arrays_that_are_copied_together_are_what_they_were() -> None:
    arrays = [np.arange(5), np.zeros((0,), np.int64), np.ones((3, 7), np.int32), np.float32([[1, np.nan], [-0.0, 2]])]
    arrays.append(np.arange(12).reshape(3, 4).T)
    copies = copy_together(arrays, torch.device("cpu"))
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy.numpy(), array)
        assert copy.numpy().dtype == array.dtype and copy.is_contiguous()
    starts = [copy.storage_offset() * copy.element_size() for copy in copies]
    assert all(start % ALIGNED == 0 for start in starts) and len(set(starts)) == len(arrays) - 1


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_blocks_are_copied_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(2, 6, 4, 1, 3, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(cached_attention, "COPIED", at_once * 2 * 4 * 3 * 4)
    torch.manual_seed(0)
    before = [x.normal_().clone().view(2, 6, -1) for x in (cache.keys, cache.values)]
    cache.copy_blocks([(1, 4), (1, 2), (3, 5)])
    for whole, old in zip((cache.keys, cache.values), before, strict=True):
        assert torch.equal(whole.view(2, 6, -1), old[:, [0, 1, 1, 3, 1, 3]])


def test_completions_that_are_built_together_are_those_built_alone() -> None:
    """Rows in another order from read to read; one that joins later, one that has nothing yet, ends within a read."""
    rng = np.random.default_rng(0)
    sequences = [
        Sequence(Request((i,), np.arange(3), FREE), 0, 0, 9, frozenset({7}), None, [(0, 1)])
        for i in range(GATHER_FROM + 3)
    ]
    sequences[1].limit = 4
    own: dict[object, list[tuple[int, float]]] = {s.request.key: [] for s in sequences}
    ended = []
    for steps, members in ((1, [0, 1, 2, 3, 4, 5]), (3, [5, 4, 0, 1, 2, 3]), (5, [6, 5, 0, 2, 3, 4])):
        rows = [sequences[i] for i in members]
        read = Readback(
            rng.integers(8, 90, (len(rows), steps)), rng.random((len(rows), steps)), np.zeros((len(rows), steps))
        )
        if steps == 5:
            read.ids_BK[3, 2] = 7
        ended += accept_all(rows, read, [steps == 5] * len(rows))
        for row, sequence in enumerate(rows):
            own[sequence.request.key] += zip(read.ids_BK[row].tolist(), read.logprobs_BK[row].tolist(), strict=True)
    assert [(s.request.key[0], finish) for s, finish in ended] == [
        (1, "length"), (5, "length"), (0, "length"), (2, "stop"), (3, "length"), (4, "length")
    ]  # fmt: skip
    left = [
        (sequences[6], "cancelled"),
        (Sequence(Request(("new",), np.arange(3), FREE), 0, 0, 9, frozenset(), None, [(0, 1)]), "cancelled"),
    ]
    together = completions_of([*ended, *left])
    alone = [completions_of([one])[0] for one in [*ended, *left]]
    for whole, single, (sequence, finish) in zip(together, alone, [*ended, *left], strict=True):
        kept = own.get(sequence.request.key, [])[: sequence.count]
        assert (whole.key, whole.finish) == (sequence.request.key, finish)
        assert list(zip(whole.ids.tolist(), whole.logprobs.tolist(), strict=True)) == kept
        assert whole.ids.tolist() == single.ids.tolist() == sequence.tokens[3:].tolist()
    assert [len(c.ids) for c in together] == [4, 9, 9, 7, 9, 9, 5, 0]
