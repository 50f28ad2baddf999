"""A recipe to begin with, for a task, a model, data and a memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from lemma.core.errors import UserError
from lemma.data.sources import files_of
from lemma.models.fitting import Fit, fit_memory, guess_shape, host_memory, in_gib
from lemma.models.memory import GIB
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, resolve
from lemma.planning.stage_memory import shape_of
from lemma.recipe import Recipe

TEMPLATE = Path(__file__).with_name("new_recipe.yaml.jinja")


@dataclass(frozen=True)
class Answers:
    task: str
    model: str
    data: str
    gib: float


def not_here(recipe: Recipe) -> Iterator[str]:
    """What is written as a path and does not exist. Names of the hub are not asked for."""
    stage: Any = next(iter(recipe.stages.values()))  # all have the same data
    checks: list[Callable[[], object]] = [lambda: files_of(stage.data)]
    if recipe.model.path != TINY:
        checks.insert(0, lambda: resolve(recipe.model.path))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def render(answers: Answers, task: str, to: Path) -> str:
    """The text of the recipe; `task` is what it does, in words."""
    fit, memory = _fit(answers)
    rates = {"sft": "2e-4" if fit.way != "full" else "1e-5", "rl": "2e-5" if fit.way != "full" else "1e-6"}
    rates["preference"] = "5e-6" if fit.way != "full" else "5e-7"
    tiny = answers.model == "tiny"
    if tiny:
        rates |= {"sft": "2e-3", "rl": "2e-4"}
    model = answers.model.rpartition("/")[2].removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9]+", "-", f"{model}-{answers.task}".lower()).strip("-")
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(
        title=f"{answers.model}: {task}. Written by `lemma init`.",
        file=to,
        run_dir=f"runs/{name}",
        model=_as_yaml(answers.model),
        data=_as_yaml(answers.data),
        task=answers.task,
        tiny=tiny,
        is_file=Path(answers.data).suffix != "",
        on_cpu=answers.gib == 0,
        way=fit.way,
        checkpointing=fit.checkpointing,
        budget=fit.token_budget,
        memory=memory,
        rates=rates,
    )


def _as_yaml(text: str) -> str:
    return yaml.safe_dump(text, width=10_000, allow_unicode=True).removesuffix("\n...\n").strip()


def _fit(answers: Answers) -> tuple[Fit, str]:
    """How the model is trained, and the sentence that says why."""
    on_cpu = answers.gib == 0
    available = host_memory() if on_cpu else answers.gib * GIB
    known = shape_of(ModelOptions(path=answers.model))
    guessed = isinstance(known, str)
    shape = guess_shape(answers.model) if isinstance(known, str) else known
    if shape is None:
        return Fit("lora", True, 4096, 0.0), "its size is not known here; check with `lemma plan` when it is downloaded"
    copies = 2 if answers.task == "preference" else 1
    fit = fit_memory(shape, available, "fp32" if on_cpu else "bf16", copies=copies)
    where = "of this machine's memory" if on_cpu else f"of {answers.gib:g} GiB"
    words = {"full": "all weights", "lora": "adapters", "4bit": "adapters on 4-bit weights"}[fit.way]
    told = f"training {words} takes about {in_gib(fit.planned)} {where}" + (", by its name" if guessed else "")
    return fit, told if fit.fits else f"{told}: too much; choose a smaller model or a larger GPU"
