"""What ranks do with each other: work in step, and objects that travel between them, pickled, with the mark of this
run, through the memory of the hosts."""

from __future__ import annotations

import hmac
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lemma.core.errors import UserError
from lemma.core.ranks import RankWorld, waiting_for_ranks

T = TypeVar("T")

MARK_BYTES = 32
KEY_VARIABLE = "LEMMA_RANKS_KEY"


def exchange_objects(world: RankWorld, group: Any, value: T, place: str, *, to_leader: bool) -> list[T]:
    """What every rank gives, in the order of ranks, over this group; with `to_leader`, nothing on the others."""
    import torch
    import torch.distributed as dist

    own = torch.frombuffer(bytearray(seal(value, world.key)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    with waiting_for_ranks(place):
        dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        rows = [torch.empty_like(padded) for _ in sizes] if world.rank == 0 or not to_leader else None
        if to_leader:
            dist.gather(padded, rows, group=group, group_dst=0)
        else:
            dist.all_gather(rows, padded, group=group)
    texts = [row[: int(size)].numpy().tobytes() for row, size in zip(rows or (), sizes, strict=False)]
    return [unseal(text, world.key, number) for number, text in enumerate(texts)]


def portable(error: BaseException, rank: int) -> bytes:
    """An error as bytes; one that cannot be sent as it is keeps its words, and a user's error stays one."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 (anything may go wrong in a class that nobody here knows)
        is_users = isinstance(error, UserError)
        words = f"rank {rank}: {type(error).__name__}: {error}"
        data = pickle.dumps(UserError(str(error)) if is_users else RuntimeError(words))
    return data


def seal(value: Any, key: bytes) -> bytes:
    data = pickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def unseal(sealed: bytes, key: bytes, rank: int) -> Any:
    mark, data = sealed[:MARK_BYTES], sealed[MARK_BYTES:]
    if not hmac.compare_digest(mark, hmac.digest(key, data, "sha256")):
        raise UserError(
            f"what came from rank {rank} does not carry the key of this run",
            fix=f"give the ranks of all machines the same {KEY_VARIABLE}, and open their ports to nobody else",
        )
    return pickle.loads(data)


@contextmanager
def in_step(place: str) -> Iterator[None]:
    """Within `with`, this rank works in step with the others: each of them may wait for it at any moment. What goes
    wrong here is raised here alone, and ends the others. A pass that fails by itself waited for nobody."""
    own: RuntimeError | None = None
    with waiting_for_ranks(place):
        try:
            yield
        except RuntimeError as error:
            if _is_of_the_group(error):
                raise
            own = error
    if own is not None:
        raise own


def _is_of_the_group(error: RuntimeError) -> bool:
    """Whether an exchange with other ranks failed, and not this rank's own computation."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
