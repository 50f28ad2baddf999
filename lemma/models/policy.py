"""The model that trains and speaks: one set of modules, one way to get log-probabilities out of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.models import blocks
from lemma.models.logprobs import token_logprobs
from lemma.models.packing import Segments, TokenBatch

PROBE_TOKENS = 32
# The context of models that name none.
UNLIMITED = 2**20
# Values of a configuration with which a model's logits are its head's output, neither capped nor scaled.
PLAIN_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}

# Rotations whose angles depend on the largest position of the whole call.
NOT_ALONE = {"dynamic", "longrope"}


def _rotations(parameters: Any) -> set[str]:
    """The kinds of rotary positions in a configuration; some families have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rotations(part) for part in parameters.values() if isinstance(part, dict)]
    return {str(parameters.get("rope_type"))}.union(*nested)


class Policy:
    """A causal language model with its tokenizer; `module` is what peft or transformers made.

    `load_base` loads the base model again, on the host and not quantised.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, load_base: Callable[[], Any] | None = None):
        self.module = module
        self._load_base = load_base
        self.tokenizer = tokenizer
        self.is_adapter = hasattr(module, "peft_config")
        self.causal: Any = module.get_base_model() if self.is_adapter else module
        self.backbone: nn.Module = getattr(self.causal, self.causal.base_model_prefix)
        self.head: nn.Module = self.causal.get_output_embeddings()
        # A mask that is ready made is passed through untouched: the pack's borders take its place.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    @property
    def peft(self) -> Any:
        """The adapter's own model class; only where there is an adapter."""
        assert self.is_adapter
        return self.module

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @cached_property
    def context(self) -> int:
        """The longest sequence the model was made for."""
        return int(getattr(self.causal.config.get_text_config(), "max_position_embeddings", None) or UNLIMITED)

    @property
    def is_independent(self) -> bool:
        """Whether what the model says about a sequence does not depend on others beside it."""
        return not _rotations(getattr(self.causal.config.get_text_config(), "rope_parameters", None)) & NOT_ALONE

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Hidden states (T, H) after the last norm; attention stays within each segment."""
        output = self.backbone(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self._no_mask,
            use_cache=False,
            segments=segments,
        )
        return output.last_hidden_state[0]

    def hidden_cached(self, ids_T: torch.Tensor, positions_T: torch.Tensor, cached: Any) -> torch.Tensor:
        """Hidden states (T, H) of new tokens that attend through an engine's cache (see `lemma.models.attention`)."""
        output = self.backbone(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self._no_mask,
            use_cache=False,
            cached=cached,
        )
        return output.last_hidden_state[0]

    def logprobs(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probability (N,) of each trained token of a pack given what comes before it, and the entropy if asked."""
        hidden_TH = self.hidden(batch.ids_T, batch.positions_T, batch.segments)
        return token_logprobs(
            hidden_TH[batch.targets_N - 1],
            self.head.weight,
            batch.ids_T[batch.targets_N],
            temperature=temperature,
            bias_V=getattr(self.head, "bias", None),
            entropy=entropy,
        )

    @torch.no_grad()
    def strangeness(self) -> str | None:
        """What about this model neither the learner nor the native engine computes, and a few tokens would not show."""
        config = self.causal.config.get_text_config()
        for name, harmless in PLAIN_LOGITS.items():
            value = getattr(config, name, harmless)
            if value != harmless:
                return f"its configuration has {name}: {value}"
        if not self.is_independent:
            return "the angles of its rotary positions depend on the longest sequence beside it (dynamic or longrope)"
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and window < self.context and not blocks.knows(self.causal):
            worst = self._beyond(window)
            if not worst <= 0.3:
                return f"beyond its window of {window} tokens it differs by {worst:.2g} from the model's own"
        return None

    def _beyond(self, window: int) -> float:
        """The largest difference of a log-probability from the model's own, for some tokens beyond the window."""
        count = min(self.context, window + PROBE_TOKENS)
        ids = (torch.arange(count, device=self.device) * 7919 + 13) % self.head.weight.shape[0]
        training = self.module.training
        self.module.eval()
        with blocks.originals(self.causal):
            theirs = self.causal(input_ids=ids[None], use_cache=False, logits_to_keep=PROBE_TOKENS // 2).logits[0]
        hidden = self.hidden(ids, torch.arange(count, device=self.device), Segments((count,), self.device))
        self.module.train(training)
        mine = self.head(hidden[-(PROBE_TOKENS // 2) :])
        return float((mine.double().log_softmax(-1) - theirs.double().log_softmax(-1)).abs().max())

    @torch.no_grad()
    def probe(self) -> None:
        """Compare packed, chunked log-probabilities with the model's own plain forward; refuse a model that differs.

        This catches what the learner does not compute: soft-capped or scaled logits, attention of another kind.
        """
        strange = self.strangeness()
        if strange is not None:
            raise self._untrainable(strange)
        vocabulary = self.head.weight.shape[0]
        ids = (torch.arange(PROBE_TOKENS, device=self.device) * 7919 + 13) % vocabulary
        lengths = (PROBE_TOKENS // 4, PROBE_TOKENS - PROBE_TOKENS // 4)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        training = self.module.training
        self.module.eval()
        with blocks.originals(self.causal):
            plain = torch.cat([self.causal(input_ids=part[None]).logits[0] for part in ids.split(list(lengths))])
        try:
            hidden = self.hidden(ids, positions, Segments(lengths, self.device))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise self._untrainable(f"it does not take packed sequences ({type(error).__name__}: {error})") from error
        self.module.train(training)
        mine, _ = token_logprobs(hidden, self.head.weight, ids, bias_V=getattr(self.head, "bias", None))
        theirs = plain.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        worst = (mine.double() - theirs).abs().max().item()
        limit = 1e-3 if self.head.weight.dtype in (torch.float32, torch.float64) else 0.3
        if not worst <= limit:
            raise self._untrainable(f"its log-probabilities differ by {worst:.2g} from the model's own")

    def _untrainable(self, why: str) -> UserError:
        kind = type(self.causal).__name__
        return UserError(
            f"the learner cannot train {kind}: {why}", fix="take a Qwen2, Qwen3, Llama, Mistral or Gemma 3 model"
        )

    def save(self, folder: Path) -> None:
        """The model in the Hugging Face format: in `folder`, or for LoRA in `folder/adapter` and `folder/merged`."""
        if not self.is_adapter:
            self.causal.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            return
        self.save_adapter(folder / "adapter")
        self.save_merged(folder / "merged")

    def save_adapter(self, folder: Path) -> None:
        self.peft.save_pretrained(folder, save_embedding_layers=False)  # otherwise peft asks the hub about them
        self.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def save_merged(self, folder: Path) -> None:
        """The base model with the adapter added in. The policy's own weights are not touched, not even by rounding.

        4-bit weights cannot be merged exactly: the original ones are loaded again, and the adapter is added to those.
        """
        base = self.causal
        if getattr(self.causal, "is_quantized", False):
            assert self._load_base is not None
            base = self._load_base()
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name
        }
        for name, layer in self.causal.named_modules():
            if hasattr(layer, "get_delta_weight"):
                weight = state[f"{name}.weight"]
                delta = layer.get_delta_weight("default").to(weight.device)
                state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
        base.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
