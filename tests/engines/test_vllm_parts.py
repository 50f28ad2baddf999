"""The parts of the vLLM engines that need no vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lemma.engines.protocol import EngineError, Request, Sampling
from lemma.engines.remote.weights_probe import ProbeScores, compare, policy_logprobs, probe_prompt, verify
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job, JobAnswer
from lemma.engines.vllm.versions import BEST, check_version
from lemma.engines.vllm.weights import adapter_rank, base_state, check_policy, write_model, write_weights
from tests.engines.small_policies import shake, small_policy, small_tokenizer


def job_of(sampling: Sampling, prompt: int = 4, sample: int = 0) -> Job:
    return Job("1-0", Request(("a", 1), np.arange(1, prompt + 1), sampling, 2), sample, [(0, 3)], 0.0)


def test_versions() -> None:
    check_version(BEST)
    check_version("0.31.2")
    with pytest.raises(EngineError, match=r"vLLM 0\.26\.0 is not one that works with Lemma .*install it with"):
        check_version("0.26.0")
    with pytest.raises(EngineError, match="needs the package vllm, which is not installed; install it with"):
        check_version(None)


def test_what_is_asked() -> None:
    asked = jobs.arguments(job_of(Sampling(max_tokens=50, stop=("x",), stop_ids=(7,), min_tokens=20)), 0, 2, context=20)
    assert asked["max_tokens"] == 16 and asked["min_tokens"] == 16
    assert asked["stop_token_ids"] == [2, 7] and asked["ignore_eos"]
    seeds = {jobs.arguments(job_of(Sampling(5), sample=s), seed, 2, 20)["seed"] for s in (0, 1) for seed in (0, 1)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(5), False),
        (Sampling(5, top_p=0.9), True),
        (Sampling(5, temperature=0.0, top_p=0.9), False),
        (Sampling(5, temperature=0.0, min_tokens=2), True),
        (Sampling(5, repetition_penalty=1.1), True),
    ],
)
def test_cuts_only_where_something_is_cut(sampling: Sampling, wanted: bool) -> None:
    assert jobs.needs_cuts(job_of(sampling)) is wanted


def test_a_stop_string_that_vllm_noticed_late_ends_the_completion_where_it_ends() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("so <answer>42</answer> and more")
    found = jobs.finish(
        job_of(Sampling(50, stop=("</answer>",))), JobAnswer(ids, [-1.0] * len(ids), "length"), None, tokenizer
    )
    assert tokenizer.decode(found.ids) == "so <answer>42</answer>"
    assert found.finish == "stop" and len(found.logprobs) == len(found.kept) == len(found.ids)
    assert found.policy_version == 3


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(EngineError, match="not finite for request a/1"):
        jobs.finish(job_of(Sampling(5)), JobAnswer([1, 2], [-1.0, float("nan")], "length"), None, small_tokenizer())


def test_logprobs_are_those_before_the_cut() -> None:
    found = jobs.finish(job_of(Sampling(5, top_k=2)), JobAnswer([1], [-0.5], "length"), [-0.25], small_tokenizer())
    assert found.logprobs.tolist() == [-0.75] and found.sampler_logprobs.tolist() == [-0.5]


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_holds_the_weights(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    policy = small_policy("qwen3", tied=tied, lora=3)
    write_model(policy, tmp_path)
    assert ("lm_head.weight" in base_state(policy)) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with policy.peft.disable_adapter():
        torch.testing.assert_close(loaded(ids).logits, policy.causal(ids).logits)
    policy.backbone.embed_tokens.weight.data.add_(1.0)
    write_weights(policy, tmp_path)
    torch.testing.assert_close(
        load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"], policy.backbone.embed_tokens.weight.data
    )
    assert not list(tmp_path.glob("*.part"))


def test_room_for_adapters() -> None:
    assert adapter_rank(small_policy(lora=3)) == 8
    assert adapter_rank(small_policy(lora=16)) == 16


def test_weights_that_vllm_cannot_run_are_refused() -> None:
    with pytest.raises(EngineError, match=r"cannot run weights of type torch\.float64"):
        check_policy(small_policy(dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_tells_old_weights_from_new(dtype: torch.dtype) -> None:
    policy = small_policy(dtype=dtype)
    ids = probe_prompt(policy, policy.context)
    assert len(set(ids)) == 24
    scored = ProbeScores(ids, policy_logprobs(policy, ids).tolist())
    assert verify(policy, scored, 1) == 0.0
    drawn = ProbeScores(ids, scored.logprobs[-8:])
    assert verify(policy, drawn, 1) == 0.0
    compare(policy, scored, scored)
    shake(policy, 1)
    for stale in (scored, drawn):
        with pytest.raises(EngineError, match="does not hold the policy's weights after the update to version 2"):
            verify(policy, stale, 2)
    with pytest.raises(EngineError, match="came back with other weights"):
        compare(policy, scored, ProbeScores(ids, policy_logprobs(policy, ids).tolist()))
    with pytest.raises(EngineError, match="differ by inf"):
        compare(policy, scored, ProbeScores(ids[::-1], scored.logprobs))


def test_the_probe_leaves_the_policy_in_training() -> None:
    policy = small_policy()
    policy.module.train()
    policy_logprobs(policy, [1, 2, 3])
    assert policy.module.training
