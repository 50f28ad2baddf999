"""Trajectories side by side in flat tensors, without padding.

Shapes: T tokens of a pack, B sequences in it, N trained tokens (targets), each predicted from the position before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from lemma.core.types import Scope, Trajectory, width_of
from lemma.models.sharing import Sharing, families, family_size, rows_of, shared_size, split_family

# Sequences whose lengths differ by at most this factor share one padded attention call on the CPU.
BUCKET_RATIO = 1.25


def to_device(array: np.ndarray, device: torch.device, kind: torch.dtype | None = None) -> torch.Tensor:
    """A copy there. From page-locked memory, so that the host does not wait for what the device does now."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = tensor if kind is None else tensor.to(kind)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length as one padded block: `rows` indexes the pack; `take` brings results back."""

    rows_BL: torch.Tensor
    take_M: torch.Tensor
    into_M: torch.Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Where each sequence of a pack begins and ends: all that attention needs to know.

    `borders_B1` are cumulative lengths, from 0 to T. It and `longest` are made at once, so that a compiled block looks
    at these two and not at every length, which would be compiled in. Where sequences share a prompt, these are the
    lengths of what each brings itself, `sharing` says what else it reads, and `keys` are the segments written out.
    """

    lengths: tuple[int, ...]
    device: torch.device
    sharing: Sharing | None = None
    keys: Segments | None = None
    longest: int = field(init=False)
    borders_B1: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        borders = to_device(np.cumsum([0, *self.lengths], dtype=np.int32), self.device)
        object.__setattr__(self, "longest", max(self.lengths))
        object.__setattr__(self, "borders_B1", borders)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Padded blocks for devices without variable-length attention; their work is not quadratic in the pack."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        order = sorted(range(len(self.lengths)), key=lambda b: (self.lengths[b], b))
        groups: list[list[int]] = []
        for b in order:
            if not groups or self.lengths[b] > BUCKET_RATIO * self.lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(b)
        return [self._bucket(group, starts) for group in groups]

    def _bucket(self, group: list[int], starts: np.ndarray) -> Bucket:
        width = max(self.lengths[b] for b in group)
        rows = np.zeros((len(group), width), dtype=np.int64)
        for row, b in enumerate(group):
            rows[row, : self.lengths[b]] = np.arange(starts[b], starts[b] + self.lengths[b])
            # A padded place repeats the last token: it comes after every real one, so causal attention never sees it.
            rows[row, self.lengths[b] :] = starts[b] + self.lengths[b] - 1
        real = np.arange(width)[None, :] < np.array([self.lengths[b] for b in group])[:, None]
        take = np.flatnonzero(real.reshape(-1))
        as_tensor = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        return Bucket(as_tensor(rows), as_tensor(take), as_tensor(rows.reshape(-1)[take]))


@dataclass(frozen=True)
class TokenBatch:
    """A pack: ids and positions of all tokens, the targets among them, and what the objective needs to know of each.

    `targets_N` are positions in the pack, and `sources_N` those of the tokens before them; `sequence_N` says which
    sequence a target belongs to, `group_B` to which group a sequence, and `index_B` where it stood in the list of
    trajectories. `model_inputs` are passed to the model as they are.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments
    targets_N: torch.Tensor
    sources_N: torch.Tensor
    sequence_N: torch.Tensor
    group_B: torch.Tensor
    index_B: tuple[int, ...]
    token_fields: dict[str, torch.Tensor]
    fields: dict[str, torch.Tensor]
    model_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return len(self.targets_N)

    @classmethod
    def build(
        cls,
        trajectories: Sequence[Trajectory],
        indices: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        share: bool = False,
    ) -> TokenBatch:
        """Pack the trajectories at `indices`; with `share`, prompts that several begin with are there once.

        Every one of them has the same fields.
        """
        related = families(trajectories, indices) if share else [[index] for index in indices]
        indices = [index for family in related for index in family]
        chosen = [trajectories[i] for i in indices]
        lengths, inputs = tuple(len(t) for t in chosen), [t.model_inputs for t in chosen]
        mask_K = np.concatenate([t.loss_mask_T for t in chosen])
        targets = np.flatnonzero(mask_K)
        sequence_K = np.repeat(np.arange(len(chosen)), lengths)

        put = partial(to_device, device=device, kind=torch.int64)
        first_T = rows_K = np.arange(len(mask_K))
        segments = Segments(lengths, device)
        if len(related) < len(lengths):
            rows_K, own = rows_of(trajectories, related)
            first_T = np.unique(rows_K, return_index=True)[1]
            segments = Segments(tuple(own), device, Sharing.of(rows_K, put), segments)
        return cls(
            ids_T=put(np.concatenate([t.ids_T for t in chosen])[first_T]),
            positions_T=put(np.concatenate([np.arange(length) for length in lengths])[first_T]),
            segments=segments,
            targets_N=put(rows_K[targets]),
            sources_N=put(rows_K[targets - 1]),
            sequence_N=put(sequence_K[targets]),
            group_B=put(np.array([t.group_id for t in chosen])),
            index_B=tuple(indices),
            token_fields={
                name: put(_token_field(name, chosen)[targets], kind=dtype) for name in chosen[0].token_fields
            },
            fields={name: put(np.array([t.fields[name] for t in chosen]), kind=dtype) for name in chosen[0].fields},
            model_inputs={
                name: to_device(np.concatenate([one[name] for one in inputs if name in one]), device)
                for name in dict.fromkeys(name for one in inputs for name in one)
            },
        )


def _token_field(name: str, chosen: Sequence[Trajectory]) -> np.ndarray:
    """A token field of all tokens of these, one after the other."""
    whole = np.concatenate([t.token_fields[name] for t in chosen])
    assert whole.shape[1:] == width_of(name), f"the token field {name} is declared as {width_of(name) or 'a number'}"
    return whole


def plan_packs(
    trajectories: Sequence[Trajectory], token_budget: int, scope: Scope, share: float | None = None
) -> list[list[int]]:
    """Which trajectories go into which pack: first fit, longest first, so that packs are few and full.

    Where the objective's scope is `pair`, those of a group stay together. A group longer than the budget gets a pack of
    its own. With `share`, sequences that begin with the same prompt go into one pack as far as it holds them;
    its value is the cost of a token of that prompt for each further sequence (`lemma.models.sharing.spread_cost`).
    The plan depends on lengths and prompts only, never on time or memory.
    """
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id if scope == "pair" else i, []).append(i)
    if share is not None and scope != "pair":
        related = families(trajectories, range(len(trajectories)))
        together = [part for family in related for part in split_family(trajectories, family, token_budget, share)]
        sized = [(family_size(trajectories, members, share), members) for members in together]
    elif share is not None:
        sized = [(shared_size(trajectories, members, share), members) for members in groups.values()]
    else:
        sized = [(sum(len(trajectories[i]) for i in members), members) for members in groups.values()]
    sized.sort(key=lambda item: (-item[0], item[1]))
    packs: list[list[int]] = []
    for (_, members), place in zip(sized, first_fit([size for size, _ in sized], token_budget), strict=True):
        if place == len(packs):
            packs.append([])
        packs[place].extend(members)
    return [sorted(pack) for pack in packs]


def first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """For each size the first pack that still has room for it; what is larger than a pack gets one of its own.

    A binary tree holds the most room below each node, so that a step of many packs is planned in logarithmic time a
    size. Two packs in a row hold more than one's capacity together, which bounds their number.
    """
    leaves = 1 << (min(len(sizes), 2 * (sum(sizes) // capacity + 1)) - 1).bit_length() if sizes else 1
    most = [capacity] * (2 * leaves)
    places, used = [], 0
    for size in sizes:
        node = 1 if size <= capacity else leaves + used
        while node < leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        places.append(node - leaves)
        used = max(used, node - leaves + 1)
        most[node] -= size
        while node := node // 2:
            most[node] = max(most[2 * node], most[2 * node + 1])
    return places


# Alignment of each array in the copy, the same as torch's allocator gives a tensor of its own.
ALIGNED = 512


def copy_together(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """A tensor on the device for each array, without waiting for the device."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    here = np.empty(end, dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        here[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    there = to_device(here, device)
    return [
        there[start : start + array.nbytes].view(_TYPES[array.dtype.str]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


_TYPES = {
    np.dtype(name).str: kind
    for name, kind in (("int64", torch.int64), ("int32", torch.int32), ("float32", torch.float32))
}
