"""What a recipe wants of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.plugins.ray.ray_launch import RayJobSpec

if TYPE_CHECKING:
    from lemma.recipe import Recipe


def job_spec_of(recipe: Recipe, arguments: Sequence[str], ranks: int | None, *, fresh: bool) -> RayJobSpec:
    """So many ranks, or as many as the recipe says, or one for each GPU of the cluster that no server has."""
    apart = {name: options for name, options in _vllm_stages(recipe).items() if isinstance(options.servers, int)}
    count = max((int(options.servers) for options in apart.values()), default=0)  # type: ignore[arg-type]
    first = next(iter(apart.values()), None)
    server = [] if first is None else _server_arguments(recipe, first)
    return RayJobSpec(
        arguments=arguments,
        fresh=fresh,
        ranks=ranks or recipe.cluster.ranks,
        wants_gpus=recipe.run.device != "cpu",
        restarts=recipe.cluster.restarts,
        run_folder=Path(recipe.run.dir),
        servers=[server] * count,
        stages=list(apart),
    )


def _vllm_stages(recipe: Recipe) -> dict[str, VllmOptions]:
    """Stages whose samples come from vLLM servers."""
    stages = {}
    for name, stage in recipe.stages.items():
        options = getattr(getattr(stage, "rollout", None), "engine", None)
        if isinstance(options, VllmOptions) and options.has_own_devices:
            stages[name] = options
    return stages


def _server_arguments(recipe: Recipe, options: VllmOptions) -> list[str]:
    """The command line of a server that waits for the trainer's weights."""
    model = recipe.model
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    precision = model.precision or ("fp32" if recipe.run.device == "cpu" else "bf16")
    values = {
        "--dtype": names[precision],
        "--context": options.context,
        "--memory": options.memory,
        "--cache-gib": options.cache_gib,
        "--sequences": options.sequences,
        "--lora-rank": model.lora.r if model.lora is not None else None,
    }
    written = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    return [_served_model(recipe), *written, *(["--eager"] if options.eager else [])]


def _served_model(recipe: Recipe) -> str:
    """A model that servers find: the recipe's own, or the built-in one in a folder next to the run's."""
    if recipe.model.path != "tiny":
        path = Path(recipe.model.path).expanduser()
        return str(path.resolve()) if path.exists() else recipe.model.path
    import torch

    from lemma.engines.vllm.weights import write_model
    from lemma.models.load_model import build_policy

    folder = Path(f"{recipe.run.dir}.served")
    write_model(build_policy(recipe.model, torch.device("cpu"), recipe.run.seed), folder)
    return os.path.abspath(folder)
