"""A program on several ranks: how many there are, starting them, being one of them, and saying once what goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.children.child_main import end_with
from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.joining import member
from lemma.cluster.launching import Launcher
from lemma.cluster.rank_watch import LOST, RankLost, say_loss
from lemma.core.errors import UserError, warnings_said
from lemma.core.rank_place import place_of
from lemma.core.ranks import RankWorld, is_leader, use_slots, world_size
from lemma.core.terminal import visible

if TYPE_CHECKING:
    from lemma.recipe import Recipe

# More processes than this on each core would only wait for each other.
RANKS_PER_CORE = 4
# Seconds for which a rank that is done waits for one that still generates. One that dies is noticed at once.
DEADLINE = 24 * 3600.0


def end_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies, however that happens."""
    launcher = os.environ.get("LEMMA_LAUNCHER")
    if launcher is not None:
        end_with(int(launcher))


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
        if place_of() is None:
            return work(RankWorld())
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


def start_ranks(
    arguments: Sequence[str],
    count: int,
    folder: Path = Path(os.devnull),
    *,
    restarts: int = 0,
    fresh: bool = False,
    hint: str = "",
) -> int:
    """Start this command of `lemma` on so many ranks of this machine; the exit code. `hint` is what to do after a rank
    has died."""

    def say(text: str) -> None:
        print(visible(f"lemma: {text}{hint if text.startswith('error: ') else ''}"), file=sys.stderr, flush=True)

    command = [sys.executable, "-m", "lemma", *arguments]
    return Launcher(command, count, folder, restarts=restarts, fresh=fresh, say=say).run()


def on_ranks(
    work: Callable[[], int],
    arguments: Sequence[str],
    ranks: int | None,
    device: str,
    *,
    engine: str = "native",
    is_shared: bool = True,
    hint: str = "",
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Do this in so many processes: start them with these arguments, or be one of them. The exit code.

    Work that is not shared by default stays in one process unless a number of ranks is given. `settings` are what all
    ranks must have alike, besides the command.
    """
    end_with_launcher()
    if is_a_rank():
        _check_engine(int(os.environ["WORLD_SIZE"]), engine)
        told = {"the command": " ".join(arguments), **(settings or {})}
        return as_rank(lambda world: _shared(work), ClusterOptions(deadline=DEADLINE), device, told)
    count = _wanted(ranks, device, engine, is_shared)
    return work() if count == 1 else start_ranks(arguments, count, hint=hint)


def on_ray(arguments: Sequence[str], ranks: int | None, device: str | None, engine: str) -> int:
    """Do this command on a Ray cluster, one rank for each of its GPUs or so many."""
    from lemma.plugins.ray.ray_launch import RayJobSpec, launch_on_ray

    if ranks is not None:
        _check_count(ranks)
    _check_engine(ranks or 2, engine)
    return launch_on_ray(
        RayJobSpec(arguments, ranks, wants_gpus=device != "cpu", restarts=0, run_folder=Path(os.devnull))
    )


def train_on_ranks(recipe: Recipe, arguments: Sequence[str], count: int, *, fresh: bool) -> int:
    """Train a recipe on so many ranks of this machine, each of which runs the command with these arguments."""
    cores = os.cpu_count() or 1
    if count > RANKS_PER_CORE * cores:
        raise UserError(
            f"{count} ranks are too many for the {cores} core{'s' * (cores != 1)} of this machine",
            fix=f"write --ranks {RANKS_PER_CORE * cores} or less, or start them on several machines",
        )
    return start_ranks(arguments, count, Path(recipe.run.dir), restarts=recipe.cluster.restarts, fresh=fresh)


def ranks_here(recipe: Recipe, given: int | None) -> int:
    """So many, or as many as the recipe says, or one for each GPU of this machine."""
    if given or recipe.cluster.ranks:
        return given or recipe.cluster.ranks or 1
    if recipe.run.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _shared(work: Callable[[], int]) -> int:
    """Do a rank's part. The first one says warnings for all."""
    use_slots(world_size())
    with nullcontext() if is_leader() else warnings_said(lambda text: None):
        return work()


def _wanted(given: int | None, device: str, engine: str, is_shared: bool) -> int:
    if given is None and (device == "cpu" or engine == "vllm" or not is_shared):
        return 1
    if given is not None:
        _check_count(given)
        _check_engine(given, engine)
        if given == 1:
            return 1
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if given is None:
        return max(1, gpus)
    most = gpus or RANKS_PER_CORE * (os.cpu_count() or 1)
    if given > most:
        has = f"has {gpus} GPU{'s' * (gpus != 1)}" if gpus else f"allows {most} on its cores"
        raise UserError(f"--ranks is {given}, and this machine {has}", fix=f"write {most} or less")
    return given


def _check_count(given: int) -> None:
    if given < 1:
        raise UserError(f"--ranks {given} is not a number of processes", fix="write 1 or more")


def _check_engine(count: int, engine: str) -> None:
    if count > 1 and engine == "vllm":
        raise UserError(
            f"vLLM has processes of its own and does not run on {count} ranks",
            fix="leave --engine vllm out, or run it in one process",
        )
