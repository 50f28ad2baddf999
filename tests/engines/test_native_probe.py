"""Which models the native engine serves, which engine takes its place elsewhere, and the limits on the mismatch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lemma.core.errors import UserError
from lemma.core.events import Event, Said
from lemma.engines import ENGINES, make_engine, open_engine
from lemma.engines.engine_options import NativeOptions, TransformersOptions
from lemma.engines.mismatch import warning_mean
from lemma.engines.native.engine_probe import probe
from lemma.engines.native.sizes import bytes_per_token
from lemma.engines.protocol import Completion, EngineError, Request, Sampling, generate
from lemma.models.policy import Policy
from tests.engines.mismatch_checks import Mismatch, check_mismatch, mismatch
from tests.engines.native_checks import FREE, requests_of
from tests.engines.small_policies import ARCHITECTURES, learner_logprobs, random_prompts, small_policy, small_tokenizer

NO_STORE = NativeOptions(cache_tokens=512, sequences=8)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_known_architectures_pass(kind: str) -> None:
    probe(small_policy(kind, lora=4))
    probe(small_policy(kind, dtype=torch.bfloat16))


def test_a_short_context_passes() -> None:
    probe(small_policy(context=16))


def break_softcap(policy: Policy) -> None:
    head = policy.causal.lm_head
    head.register_forward_hook(lambda module, args, out: 3.0 * torch.tanh(out / 3.0))


def break_attention(policy: Policy) -> None:
    """A layer that sees less through a cache than the mask of the plain forward lets it see."""
    policy.backbone.layers[1].self_attn.lemma_window = 4


def break_shape(policy: Policy) -> None:
    policy.causal.config.head_dim = 8


@pytest.mark.parametrize("damage", [break_softcap, break_attention, break_shape])
def test_what_differs_from_the_plain_forward_is_refused_and_replaced(damage: Any) -> None:
    policy = small_policy("qwen3")
    damage(policy)
    with pytest.raises(EngineError, match="the native engine cannot run Qwen3ForCausalLM") as caught:
        probe(policy)
    assert "\n" not in str(caught.value)
    said: list[Event] = []
    engine = make_engine(NO_STORE, policy, 0, said.append)
    assert engine.name == "transformers"
    (event,) = said
    assert isinstance(event, Said) and event.level == "warning" and "takes its place" in event.text


def save(kind: str, folder: Path, **values: Any) -> str:
    tokenizer = small_tokenizer()
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, bos_token_id=None, **values
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        ("qwen3", SMALL, "native"),
        ("gemma2", {**SMALL, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}, "native"),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, "native"),
        ("gpt_oss", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}, "transformers"),
    ],
)
def test_every_model_speaks_through_the_engine_that_serves_it(
    kind: str, values: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = save(kind, tmp_path, **values)
    said: list[Event] = []
    policy, engine = open_engine(path, "cpu", 3, said.append, NO_STORE)
    assert engine.name == name and len(said) == (name != "native")
    if name != "native":
        (event,) = said
        assert isinstance(event, Said) and "15 times slower" in event.text
        assert getattr(engine, "in_place_of", None) == "native"
    prompt = np.arange(1, 20)
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    (found,) = generate(engine, [Request(("a",), prompt, sampling)])
    theirs = AutoModelForCausalLM.from_pretrained(path).generate(
        torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=8, eos_token_id=-1
    )
    assert found.ids.tolist() == theirs[0, len(prompt) :].tolist()
    assert policy.tokenizer.eos_token_id == 0


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"there is no model folder \./nowhere"):
        open_engine("./nowhere", "cpu")


def test_options_reach_the_engine() -> None:
    policy = small_policy()
    native = make_engine(NativeOptions(cache_gib=0.001, sequences=3, prefill_tokens=5, burst=2), policy, 0)
    assert native.name == "native"
    assert abs(native.cache.bytes - 0.001 * 2**30) < 40 * bytes_per_token(policy)
    assert native.scheduler.max_sequences == 3 and native.scheduler.prefill_tokens == 5
    requests = requests_of(random_prompts(4), FREE)
    assert len(generate(native, requests)) == 4
    assert make_engine(TransformersOptions(batch=2), policy, 0).name == "transformers"


def test_options_are_read_without_torch() -> None:
    code = (
        "import sys; from lemma.engines import ENGINES; ENGINES['vllm'](mode='server'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert {name: options().name for name, options in ENGINES.items()} == {name: name for name in ENGINES}


def completion_of(logprobs: list[float]) -> Completion:
    values = np.array(logprobs, dtype=np.float32)
    return Completion(("a",), 0, np.arange(len(values)), values, np.zeros_like(values), "stop", 0)


def test_the_mismatch_is_mean_and_largest_over_tokens() -> None:
    found = mismatch(
        [completion_of([-1.0, -2.0, -3.0]), completion_of([-0.5]), completion_of([])],
        [np.array([-1.0, -2.5, -3.25]), np.array([-0.25]), np.zeros(0)],
    )
    assert found == Mismatch(0.25, 0.5, 4)
    assert found.as_metrics() == {"mismatch/mean": 0.25, "mismatch/max": 0.5}
    assert mismatch([], []) == Mismatch(0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("found", "precision", "outcome"),
    [
        (Mismatch(1e-6, 0.9e-4, 5), "fp32", "fine"),
        (Mismatch(1e-6, 1.1e-4, 5), "fp32", "stops"),
        (Mismatch(0.02, 3.0, 5), "bf16", "fine"),
        (Mismatch(0.04, 0.1, 5), "bf16", "fine"),
        (Mismatch(0.11, 0.2, 5), "bf16", "stops"),
        (Mismatch(0.04, 0.1, 5), "fp16", "fine"),
        (Mismatch(float("nan"), float("nan"), 5), "bf16", "stops"),
        (Mismatch(float("nan"), float("nan"), 5), "fp32", "stops"),
    ],
)
def test_limits_of_the_mismatch(found: Mismatch, precision: Any, outcome: str) -> None:
    if outcome == "stops":
        with pytest.raises(UserError, match="the native engine and the learner disagree about the tokens"):
            check_mismatch(found, precision)
    else:
        check_mismatch(found, precision)


def test_a_model_that_rounds_more_may_differ_more() -> None:
    """Limits are multiples of a model's own rounding where that is more than the least ones."""
    check_mismatch(Mismatch(0.24, 2.0, 5), "bf16", rounding=0.05)
    with pytest.raises(UserError, match=r"differ by 0.26 on average, and rounding in bf16 explains 0.25"):
        check_mismatch(Mismatch(0.26, 2.0, 5), "bf16", rounding=0.05)
    with pytest.raises(UserError, match=r"differ by 0.0002 at most, and rounding in fp32 explains 0.0001"):
        check_mismatch(Mismatch(1e-6, 2e-4, 5), "fp32", rounding=0.05)
    assert (warning_mean(0.001), warning_mean(0.05)) == (0.03, 0.1)


def test_a_low_temperature_multiplies_the_rounding_of_a_token() -> None:
    check_mismatch(Mismatch(1e-6, 3.9e-4, 5), "fp32", temperature=0.25)
    for temperature in (0.3, 1.0, 4.0):
        with pytest.raises(UserError, match=r"differ by 0\.00039 at most"):
            check_mismatch(Mismatch(1e-6, 3.9e-4, 5), "fp32", temperature=temperature)


def test_the_mismatch_of_the_engine_itself_is_rounding_and_of_other_weights_it_stops() -> None:
    policy = small_policy()
    requests = requests_of(random_prompts(4), FREE)
    found = generate(make_engine(NO_STORE, policy, 0), requests)
    learner = [learner_logprobs(policy, r.prompt, c.ids) for r, c in zip(requests, found, strict=True)]
    check_mismatch(mismatch(found, learner), "fp32")
    other = small_policy(seed=1)
    learner = [learner_logprobs(other, r.prompt, c.ids) for r, c in zip(requests, found, strict=True)]
    with pytest.raises(UserError):
        check_mismatch(mismatch(found, learner), "fp32")
