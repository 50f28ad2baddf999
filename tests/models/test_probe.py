"""What a probe leaves behind, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lemma.core.errors import UserError
from lemma.engines.native.engine_probe import probe as engine_probe
from lemma.models.load_model import build_policy
from lemma.models.model_options import LoraOptions, ModelOptions
from lemma.models.policy import Policy
from lemma.models.probe import TOKENS, widened
from tests.engines.small_policies import small_policy
from tests.models.conftest import Saver
from tests.models.small import CPU
from tests.models.test_strange import WINDOW, policy


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["layers.1.mlp", "embed_tokens"])
def test_weights_are_narrow_again_whatever_ends_a_probe(error: type[BaseException], part: str) -> None:
    mine = small_policy(dtype=torch.bfloat16)
    before = {name: (p.data_ptr(), p.dtype) for name, p in mine.module.named_parameters()}

    def fail(*_: Any) -> None:
        assert any(p.dtype == torch.float32 for p in mine.module.parameters())
        raise error

    mine.backbone.get_submodule(part).register_forward_hook(fail)
    with pytest.raises(error), torch.no_grad(), widened(mine):
        mine.causal(input_ids=torch.arange(5)[None])
    assert {name: (p.data_ptr(), p.dtype) for name, p in mine.module.named_parameters()} == before
    assert mine.dtype == torch.bfloat16


@pytest.mark.parametrize("ask", [Policy.probe, engine_probe], ids=["learner", "engine"])
def test_too_little_memory_is_no_fault_of_the_model(ask: Callable[[Policy], None]) -> None:
    """Nothing is remembered of it either: with more room the model is tried again."""
    mine = small_policy(dtype=torch.bfloat16)
    if ask is engine_probe:
        assert mine.findings.reason is None

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = mine.backbone.get_submodule("layers.1").register_forward_hook(fail)
    with pytest.raises(UserError, match="too little memory on the device") as caught:
        ask(mine)
    assert "family" not in str(caught.value) and "transformers" not in str(caught.value)
    hook.remove()
    ask(mine)


def test_beyond_a_window_only_the_last_logits_are_computed() -> None:
    """4,096 places of a vocabulary of 256,000 would be 4 GB."""
    mine: Policy = policy("gemma3_text", sliding_window=WINDOW)
    seen: list[tuple[int, int]] = []
    mine.backbone.register_forward_hook(lambda module, args, out: seen.append((0, out.last_hidden_state.shape[1])))
    mine.head.register_forward_hook(lambda module, args, out: seen.append((1, out.shape[1])))
    mine.probe()
    assert max(length for kind, length in seen if kind == 0) > WINDOW
    assert 0 < max(length for kind, length in seen if kind == 1) <= TOKENS


@torch.no_grad()
def test_four_bits_are_computed_alike_by_engine_and_learner(save_model: Saver) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes has a kernel of its own for layers that do not train."""
    folder = save_model("LlamaConfig")
    options = ModelOptions(path=str(folder), quantize="4bit", precision="fp32", lora=LoraOptions(r=4))
    mine = build_policy(options, CPU, 0)
    ids = torch.arange(5, 45)[None]
    speaking, learning = (mine.module.train(mode)(input_ids=ids).logits for mode in (False, True))
    assert torch.equal(speaking, learning)
    engine_probe(build_policy(options.model_copy(update={"precision": "bf16"}), CPU, 0))
