"""Does the native engine compute the same function as the model's own code? Tokens sampled through the engine's cache
are scored by the model's plain forward pass; see `lemma.models.probe` for the tolerances."""

from __future__ import annotations

import numpy as np
import torch

from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Completion, EngineError, Request, Sampling, generate
from lemma.models.families import uncached_layers
from lemma.models.policy import Policy
from lemma.models.probe import ProbeComparison, is_trouble, plain_logits, probe_ids, refuse_without_room, widened

# The longest prompt spans several blocks of the cache and is prefilled in chunks.
PROMPTS = (90, 70, 50, 31, 15, 7)
NEW_TOKENS = 12
CHUNK = 24


def probe(policy: Policy) -> None:
    """Refuse a model whose packed forward, chunked prefill or cached decoding differs from its own forward pass."""
    uncached = uncached_layers(policy.backbone, policy.causal.config.get_text_config())
    reason = policy.findings.reason or uncached or _fault(policy)
    if reason is not None:
        raise EngineError(
            f"the native engine cannot run {type(policy.causal).__name__}: {reason}", fix="write `engine: transformers`"
        )


def _fault(policy: Policy) -> str | None:
    try:
        reason = _comparison(policy).fault
    except Exception as error:
        if not is_trouble(error):
            raise
        refuse_without_room(error)
        first = (str(error).strip().splitlines() or [""])[0]
        return f"it does not take an engine's cache ({type(error).__name__}: {first})"
    return None if reason is None else f"through an engine's cache, {reason}"


def _comparison(policy: Policy) -> ProbeComparison:
    """Compare tokens that the engine samples in the model's own precision, and in float32 if that is narrower."""
    requests = _requests(policy)
    mine, exact, own = _scored_samples(policy, requests)
    if not policy.is_narrow:
        return ProbeComparison(exact, own, mine, mine)
    with widened(policy):
        wide, wide_exact, _ = _scored_samples(policy, requests)
    # Both runs sample the same number of tokens, though not the same tokens: compared are distances to exact values.
    return ProbeComparison(exact, own, exact + (wide - wide_exact), mine)


def _scored_samples(policy: Policy, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens that the engine samples: its own, the model's in float32, and the model's own."""
    sides: list[list[torch.Tensor]] = [[], [], []]
    for request, completion in zip(requests, _complete(policy, requests), strict=True):
        sides[0].append(torch.from_numpy(completion.logprobs).double())
        whole = torch.from_numpy(np.concatenate([request.prompt, completion.ids])).to(policy.device)
        for side, logits in zip(sides[1:], plain_logits(policy, whole), strict=True):
            drawn = logits[len(request.prompt) - 1 : -1].double().log_softmax(-1)
            side.append(drawn.gather(-1, whole[len(request.prompt) :, None])[:, 0].cpu())
    mine, exact, own = (torch.cat(side) for side in sides)
    return mine, exact, own


def _requests(policy: Policy) -> list[Request]:
    new = max(1, min(NEW_TOKENS, policy.context // 4))
    prompt = probe_ids(policy, max(1, min(PROMPTS[0], policy.context - new))).cpu().numpy()
    sampling = Sampling(max_tokens=new, ignore_eos=True)
    # Without rounding a few tokens say as much as many.
    lengths = PROMPTS if policy.is_narrow else PROMPTS[::3]
    return [Request(("probe", i), prompt[:count], sampling) for i, count in enumerate(lengths)]


def _complete(policy: Policy, requests: list[Request]) -> list[Completion]:
    engine = NativeEngine(
        policy,
        cache_tokens=len(requests) * 2 * (PROMPTS[0] + NEW_TOKENS),
        max_sequences=len(requests),
        prefill_tokens=CHUNK,
        share_prefixes=False,
        use_graphs=False,
    )
    try:
        return generate(engine, requests)
    finally:
        engine.close()
