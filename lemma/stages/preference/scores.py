"""Log-probabilities that preference losses need besides the policy's own: the reference's, those of responses to other
prompts, and sums of squared probabilities.

The reference is the model that the stage starts from. Its log-probabilities are computed once, before training, and
cached under a hash of everything they depend on; or at every step, with the adapters off, or from a second model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lemma.core.errors import warn
from lemma.core.faults import fault_point
from lemma.core.files import write_whole
from lemma.core.ranks import from_leader, is_leader
from lemma.core.types import Trajectory, content_id
from lemma.core.version import installed_version, lemma_version
from lemma.learning.learner import Learner
from lemma.learning.weight_split import whole_tensor
from lemma.models.flash_attention import is_flash_allowed
from lemma.models.policy import Policy
from lemma.stages.preference.examples import Example, trajectory

# Sequences scored between two progress events.
PART = 256


class Precomputed:
    """The reference's log-probabilities of every sequence of the stage."""

    def __init__(self, known: dict[bytes, np.ndarray]):
        self._known = known

    def scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return [self._known[_name(one)] for one in trajectories]


def precompute(
    policy: Policy,
    learner: Learner,
    trajectories: Sequence[Trajectory],
    folder: Path,
    progress: Callable[[int, int], None],
) -> Precomputed:
    """Score these with `policy`, as the learner computes, or take the scores from the cache in `folder`."""
    unique = {_name(one): one for one in trajectories}
    names, different = list(unique), list(unique.values())
    path = folder / f"{content_id(_circumstances(policy, learner), [name.hex() for name in names])}.safetensors"
    sizes = [one.trained_tokens for one in different]
    flat = from_leader(lambda: _load(path, sum(sizes)), "the reference's scores")
    if flat is None:
        parts: list[np.ndarray] = []
        pieces = [path.with_suffix(f".part-{start}") for start in range(0, len(different), PART)]
        for number, piece in enumerate(pieces):
            group = different[number * PART : (number + 1) * PART]
            size = sum(one.trained_tokens for one in group)
            scores = from_leader(partial(_load, piece, size), "the reference's scores")
            if scores is None:
                scores = np.concatenate([np.zeros(0, dtype=np.float32), *learner.score(group, policy)])
                _store(piece, scores)
                fault_point("reference.part")
            parts.append(scores)
            progress(min((number + 1) * PART, len(different)), len(different))
        flat = np.concatenate([np.zeros(0, dtype=np.float32), *parts])
        _store(path, flat)
        for piece in pieces if is_leader() else ():
            piece.unlink(missing_ok=True)
    return Precomputed(dict(zip(names, np.split(flat, np.cumsum(sizes)[:-1]), strict=True)))


def _name(one: Trajectory) -> bytes:
    return hashlib.blake2b(one.ids_T.tobytes() + one.loss_mask_T.tobytes(), digest_size=16).digest()


def _circumstances(policy: Policy, learner: Learner) -> dict[str, Any]:
    """Everything that can change a score, down to the last bit, apart from the sequences."""
    config = policy.causal.config.to_dict()
    return {
        "weights": _weights(policy),
        "config": {name: value for name, value in config.items() if name != "_name_or_path"},
        "fused": any(getattr(module, "lemma_flash", False) for module in policy.module.modules()),
        "compile": learner.is_compiled,
        "shares": learner.shares,
        "temperature": learner.temperature,
        "token_budget": learner.token_budget,
        "device": torch.cuda.get_device_name() if policy.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch": torch.__version__,
        "flash-attn-4": installed_version("flash-attn-4") if is_flash_allowed() else None,
        "lemma": lemma_version(),
    }


def _weights(policy: Policy) -> str:
    """A digest of every weight and buffer."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(policy.module.state_dict().items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(whole_tensor(tensor.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy())
    return whole.hexdigest()


def _store(path: Path, flat: np.ndarray) -> None:
    """Store an entry; a full or read-only disk only costs time at the next start."""
    if not is_leader():
        return
    whole = save({"logprobs": flat}, metadata={"digest": hashlib.sha256(flat.tobytes()).hexdigest()})
    try:
        write_whole(path, whole)
    except OSError as error:
        message = f"the reference's log-probabilities could not be kept in {path.parent}: {error.strerror}"
        warn(message)


def _load(path: Path, size: int) -> np.ndarray | None:
    """The numbers of an entry; None if it is absent or damaged."""
    try:
        with safe_open(path, framework="numpy") as entry:
            flat = entry.get_tensor("logprobs")
            whole = entry.metadata()["digest"] == hashlib.sha256(flat.tobytes()).hexdigest()
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
    return flat if whole and len(flat) == size else None


def mismatched(examples: Sequence[Example], limit: int) -> list[Trajectory]:
    """Each prompt with the response of the previous example of the step, the first one with that of the last.

    If that one has the same prompt, the one before it is taken, and so on; if all prompts of the step are the same, it
    is left out. Truncated at `limit` tokens.
    """
    trajectories = []
    for place, example in enumerate(examples):
        others = (examples[place - back] for back in range(1, len(examples)))
        other = next((one for one in others if not np.array_equal(one.prompt, example.prompt)), None)
        if other is not None:
            room = limit - len(example.prompt)
            trajectories.append(trajectory(example, other.responses[0][:room], other.said[0][:room]))
    return trajectories
