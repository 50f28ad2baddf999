"""vLLM in this process, which it changes: run by test_vllm.py in a process of its own."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lemma.engines.protocol import EngineError, Request, generate
from lemma.engines.sampling import cut
from lemma.engines.vllm import make_vllm
from lemma.engines.vllm.in_process import VllmEngine
from lemma.engines.vllm.vllm_base import VllmBase
from tests.engines import vllm_checks
from tests.engines.small_policies import random_prompts, small_policy
from tests.engines.vllm_checks import FREE, QUICK

CASES = {
    "qwen2, tied": {"kind": "qwen2", "tied": True},
    "qwen3, adapter": {"kind": "qwen3", "tied": True, "lora": 6},
}
STATES: dict[str, object] = {}


def leftovers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("vllm_dist_*"))


LEFT_BY_OTHERS = leftovers()


@pytest.fixture(scope="module", params=list(CASES), ids=list(CASES))
def engine(request: pytest.FixtureRequest) -> Iterator[VllmBase]:
    torch.set_num_threads(1)
    random.seed(5)
    np.random.seed(5)
    engine = make_vllm(small_policy(**CASES[request.param]), 0, QUICK)
    STATES["numbers"] = random.random(), float(np.random.rand())
    yield engine
    folder = engine.folder
    engine.close()
    assert not folder.exists()
    assert not torch.distributed.is_initialized()


def test_the_process_stays_as_it_was(engine: VllmBase) -> None:
    random.seed(5)
    np.random.seed(5)
    assert STATES["numbers"] == (random.random(), float(np.random.rand()))
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert leftovers() == LEFT_BY_OTHERS


def test_logprobs(engine: VllmBase) -> None:
    vllm_checks.check_logprobs(engine)


def test_ends(engine: VllmBase) -> None:
    vllm_checks.check_ends(engine)


def test_cuts(engine: VllmBase) -> None:
    vllm_checks.check_cuts(engine)


def test_update(engine: VllmBase) -> None:
    vllm_checks.check_update(engine)


def test_episodes(engine: VllmBase) -> None:
    vllm_checks.check_episodes(engine)


def test_cancel(engine: VllmBase) -> None:
    vllm_checks.check_cancel(engine)


def test_too_long(engine: VllmBase) -> None:
    vllm_checks.check_too_long(engine)


def test_update_while_running(engine: VllmBase) -> None:
    vllm_checks.check_update_while_running(engine, count=8)


def test_not_finite(engine: VllmBase) -> None:
    if engine.policy.is_adapter:
        with pytest.raises(EngineError, match="cannot share a process"):
            VllmEngine(small_policy(), 0, QUICK)
        return
    vllm_checks.check_not_finite(engine)


def test_frequencies_match_exact_probabilities(engine: VllmBase) -> None:
    prompt = random_prompts(1)[0]
    sampling = replace(FREE, max_tokens=1, temperature=1.3, top_p=0.8)
    draws = 1500
    logits = engine.policy.causal(torch.from_numpy(prompt)[None]).logits[0, -1].detach()
    expected = draws * cut(logits, sampling)[0].softmax(-1).double().numpy()
    counts = np.bincount(
        [c.ids[0] for c in generate(engine, [Request(("x",), prompt, sampling, draws)])], minlength=len(expected)
    )
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    chi = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum())
    assert chi < freedom + 4 * np.sqrt(2 * freedom) + 6


def test_sleeping_is_nothing_on_a_cpu(engine: VllmBase) -> None:
    engine.sleep()
    engine.wake()
    vllm_checks.check_too_long(engine)
