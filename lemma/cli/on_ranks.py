"""`--ranks N` of commands that only generate: the processes that share the work, on this machine or another's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError

# More processes than this on each core would only wait for each other.
RANKS_PER_CORE = 4
# Seconds for which a rank that is done waits for one that still generates. One that dies is noticed at once.
DEADLINE = 24 * 3600.0


def add_ranks(parser: argparse.ArgumentParser, what: str, default: str = "1") -> None:
    parser.add_argument(
        "--ranks", metavar="N", type=int, help=f"processes that share the {what}, one on each GPU (default: {default})"
    )


def on_ranks(
    args: argparse.Namespace,
    work: Callable[[], int],
    *,
    engine: str = "native",
    is_shared: bool = True,
    hint: str = "",
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Do this in as many processes as `--ranks` says: start them, or be one of them. The exit code.

    Work that is not shared by default stays in one process unless `--ranks` is written. `hint` is what to do after a
    rank has died; `settings` are what all ranks must have alike, besides the command.
    """
    from lemma.cluster.launching import Launcher, end_with_launcher
    from lemma.cluster.rank_program import as_rank, is_a_rank

    end_with_launcher()
    device = args.device or "auto"
    if is_a_rank():
        from lemma.cluster.cluster_options import ClusterOptions

        _check_engine(int(os.environ["WORLD_SIZE"]), engine)
        told = {"the command": " ".join(args.arguments), **(settings or {})}
        return as_rank(lambda world: _shared(work), ClusterOptions(deadline=DEADLINE), device, told)
    count = _wanted(args.ranks, device, engine, is_shared)
    if count == 1:
        return work()

    def say(text: str) -> None:
        print(f"lemma: {text}{hint if text.startswith('error: ') else ''}", file=sys.stderr, flush=True)

    command = [sys.executable, "-m", "lemma", *args.arguments]
    return Launcher(command, count, Path(os.devnull), restarts=0, fresh=False, say=say).run()


def _shared(work: Callable[[], int]) -> int:
    """Do a rank's part. The first one says warnings for all."""
    from lemma.core.errors import warnings_said
    from lemma.core.ranks import is_leader, use_slots, world_size

    use_slots(world_size())
    with nullcontext() if is_leader() else warnings_said(lambda text: None):
        return work()


def on_ray(args: argparse.Namespace, engine: str) -> int:
    """Do this command on a Ray cluster, one rank for each of its GPUs or as many as `--ranks` says."""
    from lemma.cluster.ray_launch import RayWish, launch_on_ray

    if args.ranks is not None:
        _check_count(args.ranks)
    _check_engine(args.ranks or 2, engine)
    arguments = [word for word in args.arguments if word != "--ray"]
    wish = RayWish(arguments, args.ranks, wants_gpus=args.device != "cpu", restarts=0, run_folder=Path(os.devnull))
    return launch_on_ray(wish)


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
