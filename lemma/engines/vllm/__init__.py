"""vLLM as an engine: a copy of the policy that is updated after each step and checked by a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lemma.engines.vllm.vllm_options import VllmOptions

if TYPE_CHECKING:
    from lemma.engines.vllm.vllm_base import VllmBase
    from lemma.models.policy import Policy

__all__ = ["VllmOptions", "make_vllm"]


def make_vllm(policy: Policy, seed: int, options: VllmOptions | None = None) -> VllmBase:
    """The vLLM engine that the options name, running and checked."""
    options = options or VllmOptions()
    if options.has_own_devices:
        from lemma.engines.vllm.server_engine import VllmServerEngine

        return VllmServerEngine(policy, seed, options)
    from lemma.engines.vllm.in_process import VllmEngine

    return VllmEngine(policy, seed, options)
