"""The model that trains and speaks: one set of modules, one way to get log-probabilities out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.core.files import use_umask
from lemma.core.types import Output
from lemma.models import probe as probing
from lemma.models.checkpointed_layers import GradientCheckpointingLayer
from lemma.models.families import LogitMap, logit_map, unknown_layers
from lemma.models.logprobs import map_logits, token_logprobs
from lemma.models.memory import HOST_CHUNK_BYTES
from lemma.models.merging import merged_state
from lemma.models.model_options import ModelOptions
from lemma.models.packing import Segments, TokenBatch

# The context of models that name none.
UNLIMITED = 2**20
# Rotations whose angles depend on the largest position of the whole call.
NOT_ALONE = {"dynamic", "longrope"}


def _rotations(parameters: Any) -> set[str]:
    """The kinds of rotary positions in a configuration; some families have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rotations(part) for part in parameters.values() if isinstance(part, dict)]
    return {str(parameters.get("rope_type"))}.union(*nested)


# Probabilities that layers of transformers hand to torch's function (Seed-OSS, StarCoder 2). Those of attention are not
# among them: Lemma's attention has no dropout.
HELD_DROPOUTS = ("residual_dropout", "embedding_dropout", "hidden_dropout", "activation_dropout", "dropout")


class PackModel:
    """What policies and critics share: a body and a head that compute outputs of packs. Weights are whole, unless
    `use_split` says what brings them together for a computation."""

    module: nn.Module
    backbone: nn.Module
    head: nn.Module
    gives: ClassVar[tuple[Output, ...]]
    """The outputs that it has; the first is what it is for."""

    is_split = False
    """Whether ranks hold parts of the weights; then all of them compute at the same time."""
    _gather: Callable[[Callable[[], Any]], Any] | None = None
    # What it computes in, where the weights themselves are wider.
    _precision: torch.dtype | None = None
    # A mask that is ready made is passed through untouched: the pack's borders take its place.
    _no_mask: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are in."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def dropouts(self) -> list[tuple[nn.Module, str]]:
        """Every module that drops something in training, and the name of its probability."""
        modules = list(self.module.modules())
        names = [(module, "p") for module in modules if isinstance(module, nn.Dropout)]
        names += [(module, name) for module in modules for name in HELD_DROPOUTS if name in vars(module)]
        values = [(module, name, getattr(module, name)) for module, name in names]
        return [(module, name) for module, name, value in values if isinstance(value, int | float) and value > 0]

    def use_split(
        self, gather: Callable[[Callable[[], Any]], Any], precision: torch.dtype, device: torch.device
    ) -> None:
        """From now on the weights are split; `gather` brings them together for a computation."""
        self.is_split = True
        self._gather, self._precision, self._no_mask = gather, precision, self._no_mask.to(device)

    def outputs(
        self, batch: TokenBatch, names: Collection[Output], *, temperature: float = 1.0
    ) -> dict[Output, torch.Tensor]:
        """The named outputs of the trained tokens of a pack, (N,) or (N, H): what the model makes of all that comes
        before each."""
        missing = [name for name in names if name not in self.gives]
        assert not missing, f"{type(self).__name__} has no {', '.join(missing)}"
        compute = partial(self._outputs, batch, names, temperature)
        return compute() if self._gather is None else self._gather(compute)

    def _outputs(self, batch: TokenBatch, names: Collection[Output], temperature: float) -> dict[Output, torch.Tensor]:
        raise NotImplementedError

    def hidden(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, segments: Segments, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (T, H) after the last norm; attention stays within each segment. `inputs` are further ones of
        the model."""
        return self._states(ids_T, positions_T, segments=segments, **inputs).squeeze(0)

    def _of_targets(self, batch: TokenBatch) -> torch.Tensor:
        """Hidden states (N, H) before each trained token."""
        states = self._states(batch.ids_T, batch.positions_T, segments=batch.segments, **batch.model_inputs)
        return states.squeeze(0)[batch.sources_N]

    def _states(self, ids_T: torch.Tensor, positions_T: torch.Tensor, **more: Any) -> torch.Tensor:
        output = self.backbone(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self._no_mask,
            use_cache=False,
            **more,
        )
        return output.last_hidden_state


@dataclass(frozen=True)
class PolicyOrigin:
    """What a policy was built from: another process that builds it from the same has the same model."""

    options: ModelOptions
    seed: int
    start_from: Path | None


class Policy(PackModel):
    """A causal language model with its tokenizer; `module` is what peft or transformers made.

    `load_base` loads the base model again, on the host and not quantised.
    """

    gives = ("logprobs", "entropy", "collisions", "hidden")

    def __init__(self, module: nn.Module, tokenizer: Any, load_base: Callable[[], Any] | None = None):
        self.module = module
        self._load_base = load_base
        self.tokenizer = tokenizer
        self.origin: PolicyOrigin | None = None
        self.is_adapter = hasattr(module, "peft_config")
        self.causal: Any = module.get_base_model() if self.is_adapter else module
        # Llama 4 names a part that its text model does not have.
        self.backbone: nn.Module = getattr(self.causal, self.causal.base_model_prefix, None) or self.causal.model
        self.head: nn.Module = self.causal.get_output_embeddings()
        # Whether a probe has widened the weights to float32.
        self.is_wide = False
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    @property
    def peft(self) -> Any:
        """The adapter's own model class; only where there is an adapter."""
        assert self.is_adapter
        return self.module

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states and caches are in."""
        return torch.float32 if self.is_wide else self._precision or self.head.weight.dtype

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in half precision."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @cached_property
    def context(self) -> int:
        """The longest sequence the model was made for."""
        return int(getattr(self.causal.config.get_text_config(), "max_position_embeddings", None) or UNLIMITED)

    @cached_property
    def logit_map(self) -> LogitMap:
        """What the model makes of its head's output: plain, scaled or capped logits."""
        return logit_map(self.causal.config.get_text_config())

    @property
    def is_independent(self) -> bool:
        """Whether the model's output for a sequence is independent of the other sequences in the pass."""
        return not _rotations(getattr(self.causal.config.get_text_config(), "rope_parameters", None)) & NOT_ALONE

    def recompute(self, blocks: int) -> None:
        """Keep no activations of the first so many blocks; the backward pass computes them again."""
        if not blocks:
            return
        self.causal.gradient_checkpointing_enable({"use_reentrant": False})
        for number, block in enumerate(self._recomputable()):
            block.gradient_checkpointing = number < blocks

    @property
    def recomputed(self) -> int:
        """How many blocks are computed again in the backward pass."""
        return sum(bool(block.gradient_checkpointing) for block in self._recomputable())

    def _recomputable(self) -> list[Any]:
        return [module for module in self.backbone.modules() if isinstance(module, GradientCheckpointingLayer)]

    def hidden_cached(self, ids_T: torch.Tensor, positions_T: torch.Tensor, cached: Any) -> torch.Tensor:
        """Hidden states (T, H) of new tokens that attend through an engine's cache (see `lemma.models.attention`)."""
        return self._states(ids_T, positions_T, cached=cached)[0]

    def _outputs(self, batch: TokenBatch, names: Collection[Output], temperature: float) -> dict[Output, torch.Tensor]:
        hidden_NH, targets_N = self._of_targets(batch), batch.ids_T[batch.targets_N]
        found: dict[Output, torch.Tensor] = {"hidden": hidden_NH} if "hidden" in names else {}
        if "logprobs" in names or "entropy" in names:
            logprobs_N, entropy_N = self.score(
                hidden_NH, targets_N, temperature=temperature, entropy="entropy" in names
            )
            found["logprobs"] = logprobs_N
            if entropy_N is not None:
                found["entropy"] = entropy_N
        if "collisions" in names:
            found["collisions"] = self._collisions(hidden_NH, targets_N, temperature)
        return found

    def _collisions(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> torch.Tensor:
        """The log of the sum of squared probabilities. With z the logits, log sum p^2 = lse(2z) - 2 lse(z), which is
        2 log p(token) at temperature 1 minus log p(token) at temperature 1/2, whatever the token."""
        plain, sharp = (self.score(hidden_NH, targets_N, temperature=t * temperature)[0] for t in (1.0, 0.5))
        return 2 * plain - sharp

    def logprobs(self, batch: TokenBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Log-probability (N,) of each trained token of a pack given what comes before it."""
        return self.outputs(batch, ["logprobs"], temperature=temperature)["logprobs"]

    def score(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probability (N,) of each target after the last hidden state before it, and the entropy if asked."""
        bias = getattr(self.head, "bias", None)
        return token_logprobs(
            hidden_NH,
            self.head.weight.to(hidden_NH.dtype),
            targets_N,
            temperature=temperature,
            bias_V=None if bias is None else bias.to(hidden_NH.dtype),
            entropy=entropy,
            **self.logit_map._asdict(),
        )

    def likeliest(
        self, hidden_NH: torch.Tensor, count: int, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest log-probabilities (N, count) after each hidden state, best first, and whose they are."""
        found = []
        for part_RH in hidden_NH.split(max(1, HOST_CHUNK_BYTES // (4 * len(self.head.weight)))):
            logits_RV = map_logits(self.head(part_RH), *self.logit_map)
            wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
            found.append(torch.log_softmax(wide_RV / temperature, -1).topk(min(count, wide_RV.shape[-1])))
        return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])

    def strangeness(self) -> str | None:
        """What about this model neither the learner nor the native engine computes, by its configuration."""
        config = self.causal.config.get_text_config()
        if not self.is_independent:
            return "the angles of its rotary positions depend on the longest sequence in the pass (dynamic or longrope)"
        return unknown_layers(self.backbone, config)

    @cached_property
    def findings(self) -> probing.ProbeReport:
        """What a probe found out, once."""
        return probing.examine(self)

    def probe(self) -> None:
        """Refuse a model that the learner would not compute as transformers does."""
        if self.findings.reason is not None:
            raise UserError(
                f"the learner cannot train {type(self.causal).__name__}: {self.findings.reason}",
                fix="take a family that docs/engines.md lists",
            )

    def save(self, folder: Path, *, merged: bool = True) -> None:
        """The model in the Hugging Face format: in `folder`, or for LoRA in `folder/adapter` and, if it is to be merged
        as well, in `folder/merged`."""
        if not self.is_adapter:
            self.causal.save_pretrained(folder)
            self._save_tokenizer(folder)
            return
        self.save_adapter(folder / "adapter")
        if merged:
            self.save_merged(folder / "merged")

    def save_adapter(self, folder: Path) -> None:
        self.peft.save_pretrained(folder, save_embedding_layers=False)  # otherwise peft asks the hub about them
        self._save_tokenizer(folder)

    @torch.no_grad()
    def save_merged(self, folder: Path) -> None:
        """The base model with the adapter added in. The policy's own weights are not touched, not even by rounding.

        Quantised weights cannot be merged exactly: the original ones are loaded again, and the adapter is added to
        those.
        """
        base = self.causal
        if getattr(self.causal, "is_quantized", False):
            assert self._load_base is not None
            base = self._load_base()
        base.save_pretrained(folder, state_dict=merged_state(self.causal, base))
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        """The tokenizer next to the weights, and the weights readable for whoever may read it."""
        self.tokenizer.save_pretrained(folder)
        use_umask(folder)
