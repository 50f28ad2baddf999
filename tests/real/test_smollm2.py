"""Real weights through the native engine: what transformers would say, under the model's own template, to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lemma.core.types import Demonstration, Message, Problem, Trajectory
from lemma.engines.mismatch import EXACT_LIMIT
from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Completion, Request, Sampling, generate
from lemma.engines.stop_strings import ends_of
from lemma.formats import make_format
from lemma.formats.boxed import INSTRUCTION
from lemma.formats.detokenizer import Detokenizer
from lemma.formats.encode import encode_demonstration, encode_prompt
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models.load_model import load_policy
from lemma.models.policy import Policy
from lemma.rollouts.scorer import text_of
from tests.engines.mismatch_checks import check_mismatch, mismatch
from tests.real.questions import WORD_PROBLEMS

NEW_TOKENS = 12
SMALL_TALK = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 2+3?": "2 + 3 = 5",
    "Hi": "Hello! How can I assist you today?",
}


@pytest.fixture(scope="module")
def policy(smollm2: Path) -> Policy:
    return load_policy(str(smollm2), "cpu", "fp32")


@pytest.fixture(scope="module")
def engine(policy: Policy) -> NativeEngine:
    return NativeEngine(policy, 0, cache_tokens=4096, max_sequences=32)


def problem(question: str, *before: Message) -> Problem:
    return Problem((*before, Message("user", question)))


def prompts_of(policy: Policy, questions: Sequence[str], fmt: str = "boxed") -> list[np.ndarray]:
    return [encode_prompt(make_format(fmt), problem(question), policy.tokenizer) for question in questions]


def answers(
    engine: NativeEngine, prompts: Sequence[np.ndarray], n: int = 1, *, max_tokens: int, temperature: float
) -> list[Completion]:
    """`n` completions of each prompt, in order."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_ids=tuple(ends_of(engine.policy)))
    asked = [Request(("real", f"{i:03d}"), prompt, sampling, n) for i, prompt in enumerate(prompts)]
    return generate(engine, asked)


def side_by_side(prompts: Sequence[np.ndarray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, padded on the left as `generate` wants them."""
    longest = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), longest), pad)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask_BT[row, longest - len(prompt) :] = 1
    return ids_BT, mask_BT


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(engine: NativeEngine, smollm2: Path) -> None:
    """The closest call of these tokens is 0.016 between the two best logits: no rounding in float32 decides it."""
    prompts = prompts_of(engine.policy, WORD_PROBLEMS[::2])
    mine = [one.ids.tolist() for one in answers(engine, prompts, max_tokens=NEW_TOKENS, temperature=0.0)]
    plain = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids_BT, mask_BT = side_by_side(prompts, engine.policy.tokenizer.pad_token_id)
    found_BT = plain.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert len(mine) == 10
    assert mine == found_BT[:, ids_BT.shape[1] :].tolist()


@pytest.mark.slow
def test_engine_and_learner_agree_about_sampled_tokens(engine: NativeEngine) -> None:
    prompts = prompts_of(engine.policy, WORD_PROBLEMS[:5])
    sampled = answers(engine, prompts, 3, max_tokens=24, temperature=1.0)
    trajectories = []
    for place, one in enumerate(sampled):
        ids_T = np.concatenate([prompts[place // 3], one.ids]).astype(np.int64)
        trajectories.append(Trajectory(ids_T, np.arange(len(ids_T)) >= len(prompts[place // 3])))
    learner = Learner(engine.policy, OptimOptions(), token_budget=4096, total_steps=1)
    found = mismatch(sampled, learner.score(trajectories))
    assert found.tokens >= 300
    assert min(one.logprobs.min() for one in sampled) < -5, "unlikely tokens are among them"
    assert 0 < found.largest < EXACT_LIMIT
    check_mismatch(found, "fp32")


def test_an_answer_ends_at_the_end_of_its_turn_and_nothing_follows(engine: NativeEngine) -> None:
    tokenizer = engine.policy.tokenizer
    ends = ends_of(engine.policy)
    assert tokenizer.convert_ids_to_tokens(sorted(ends)) == ["<|im_end|>"]
    found = answers(engine, prompts_of(engine.policy, list(SMALL_TALK), "own"), max_tokens=24, temperature=0.0)
    for one, said in zip(found, SMALL_TALK.values(), strict=True):
        assert one.finish == "stop"
        assert [place for place, token in enumerate(one.ids) if token in ends] == [len(one.ids) - 1]
        assert text_of(one.ids, one.finish, Detokenizer(tokenizer), ends) == said


OWN_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEMS: dict[str, tuple[dict[str, str], tuple[Message, ...], str]] = {
    "the format's": ({"name": "boxed"}, (), INSTRUCTION),
    "the recipe's": ({"name": "boxed", "system": "Be brief."}, (), "Be brief."),
    "the problem's": ({"name": "boxed"}, (Message("system", "Be kind."),), "Be kind."),
    "the template's": ({"name": "own"}, (), OWN_SYSTEM),
    "the template's where the format's is emptied": ({"name": "boxed", "system": ""}, (), OWN_SYSTEM),
}


@pytest.mark.parametrize("whose", SYSTEMS)
def test_the_models_template_with_one_system_message(whose: str, policy: Policy) -> None:
    spec, before, system = SYSTEMS[whose]
    prompt = encode_prompt(make_format(spec), problem("What is 2+3?", *before), policy.tokenizer)
    assert policy.tokenizer.decode(prompt) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt == policy.tokenizer.bos_token_id).sum() == 3, "no token for the beginning in front of its turns"


def test_a_demonstration_ends_where_answers_end_and_learns_that(policy: Policy) -> None:
    fmt = make_format("boxed")
    shown = Demonstration(problem("What is 2+3?"), reasoning="2 and 3 make 5.", answer="5")
    encoded = encode_demonstration(fmt, shown, policy.tokenizer)
    learnt = encoded.ids_T[encoded.loss_mask_T]
    assert policy.tokenizer.decode(learnt) == fmt.compose("2 and 3 make 5.", "5") + "<|im_end|>"
    asked = encode_prompt(fmt, shown.problem, policy.tokenizer)
    assert encoded.ids_T[~encoded.loss_mask_T].tolist() == asked.tolist()
