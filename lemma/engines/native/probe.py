"""Does the native engine compute what the model means? A few tokens, generated through the cache, are scored again by
the model's own plain forward."""

from __future__ import annotations

import numpy as np
import torch

from lemma.engines.base import EngineError, Request, Sampling, generate
from lemma.engines.native.engine import NativeEngine
from lemma.models import blocks
from lemma.models.policy import Policy

TOKENS = 32
NEW_TOKENS = 12
CHUNK = 8
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}
ROUNDED_LIMIT = 0.3


def probe(policy: Policy) -> None:
    """Refuse a model whose cached decoding or chunked prompts differ from its own forward: attention or logits of a
    kind that the engine does not know."""
    strange = policy.strangeness()
    if strange is not None:
        raise _refusal(policy, strange)
    try:
        worst = _difference(policy)
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise _refusal(policy, f"it does not take an engine's cache ({type(error).__name__}: {first})") from error
    limit = LIMITS.get(policy.head.weight.dtype, ROUNDED_LIMIT)
    if not worst <= limit:
        raise _refusal(policy, f"its log-probabilities differ by {worst:.2g} from the model's own")


def _refusal(policy: Policy, why: str) -> EngineError:
    return EngineError(
        f"the native engine cannot run {type(policy.causal).__name__}: {why}", fix="write `engine: transformers`"
    )


def _difference(policy: Policy) -> float:
    """The largest difference of any log-probability: two prompts side by side, in chunks, then decoded together."""
    vocabulary = policy.head.weight.shape[0]
    longest = min(TOKENS, policy.context)
    prompt = (np.arange(max(1, longest - NEW_TOKENS)) * 7919 + 13) % vocabulary
    sampling = Sampling(max_tokens=min(NEW_TOKENS, longest - len(prompt)), ignore_eos=True)
    requests = [
        Request(("probe", 0), prompt, sampling),
        Request(("probe", 1), prompt[: len(prompt) // 2 + 1], sampling),
    ]
    engine = NativeEngine(
        policy, cache_tokens=4 * TOKENS, max_sequences=2, prefill_tokens=CHUNK, share_prefixes=False, use_graphs=False
    )
    worst = 0.0
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        plain = _plain_logprobs(policy, request.prompt, completion.ids)
        worst = float(np.fmax(worst, np.abs(plain - completion.logprobs).max()))
    engine.close()
    return worst


@torch.no_grad()
def _plain_logprobs(policy: Policy, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    whole = torch.from_numpy(np.concatenate([prompt, ids])).to(policy.device)
    training = policy.module.training
    policy.module.eval()
    with blocks.originals(policy.causal):
        logits = policy.causal(input_ids=whole[None], use_cache=False).logits[0]
    policy.module.train(training)
    chosen = logits[len(prompt) - 1 : -1].double().log_softmax(-1).gather(-1, whole[len(prompt) :, None])
    return chosen[:, 0].cpu().numpy()
