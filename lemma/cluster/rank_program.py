"""A program as one of several ranks: it joins the others, and what goes wrong is said once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.joining import member, place_of
from lemma.cluster.rank_watch import LOST, RankLost, say_loss
from lemma.core.errors import UserError
from lemma.core.ranks import RankWorld


def is_a_rank() -> bool:
    """Whether a launcher has said that this process is one of several."""
    return "RANK" in os.environ and place_of() is not None


def as_rank(
    work: Callable[[RankWorld], int],
    cluster: ClusterOptions,
    device: str,
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> int:
    """Do this as one of the ranks that the environment names, or alone; the exit code. All ranks must have the same
    settings and see the same run folder."""
    number = int(os.environ["RANK"]) if is_a_rank() else 0
    try:
        with member(cluster, device, settings, folder) as world:
            return work(world)
    except RankLost as error:
        say_loss(str(error), number)
        return LOST
    except UserError as error:
        if number == 0:
            raise
        say_loss(str(error), number, is_error=True)  # the first rank of each machine says it to people
        return 2
