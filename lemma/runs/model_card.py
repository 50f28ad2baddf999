"""The model card of a finished or exported model: README.md in the hub's format, from the recipe and the evaluations.

The same recipe and results give the same card: it names no time and no machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lemma.core.files import from_json, write_whole
from lemma.core.version import lemma_version
from lemma.data.hub import hub_origin
from lemma.models.places import TINY, lasting
from lemma.runs.card_contamination import check_stages, in_words, read_record, write_record

CARD = "README.md"
KINDS = {
    "supervised": "supervised fine-tuning",
    "preference": "preference optimisation",
    "rl": "reinforcement learning",
}


def write_cards(
    folder: Path,
    recipe: Mapping[str, Any],
    stage: str,
    run: Path,
    step: int | None = None,
    contamination: Mapping[str, Any] | None = None,
) -> None:
    """Write a card for each model in `folder`: itself, or `merged` and `adapter` in it. `step` if it is from a
    checkpoint.

    `contamination` is the result of an explicit check; otherwise the card says what is known of the run and, for a
    final model (without a step), what small files show now.
    """
    record = contamination if contamination is not None else read_record(run, stage)
    if record is None and step is None:
        record = check_stages(stages_until(recipe, stage), recipe["run"]["seed"])
        write_record(run, stage, record)
    for place in (folder, folder / "merged", folder / "adapter"):
        adapter = (place / "adapter_config.json").is_file()
        if adapter or (place / "config.json").is_file():
            results = list(find_results(run, stage, step))
            text = card_text(
                recipe, stage, results, record, adapter=adapter, step=step, below=_stage_below(place, recipe)
            )
            write_whole(place / CARD, text)


def card_text(
    recipe: Mapping[str, Any],
    stage: str,
    results: list[dict[str, Any]],
    contamination: Mapping[str, Any] | None = None,
    *,
    adapter: bool = False,
    step: int | None = None,
    below: str | None = None,
) -> str:
    """The card; `below` is the stage on whose merged model an adapter belongs, where that is not the base."""
    stages = stages_until(recipe, stage)
    base = _base(recipe)
    at = f", step {step}" if step is not None else ""
    parts = [
        f"---\n{_front_matter(recipe, stages, base, results, adapter)}\n---",
        f"# {base[0]} after {' and '.join(stages)}{at}",
        f"{_what(base)}, trained with Lemma {lemma_version()}: "
        + ", then ".join(f"{KINDS.get(one['kind'], one['kind'])} ({name})" for name, one in stages.items())
        + ".",
        "## How to load it",
        *([_belongs(below, base[0])] if below else []),
        f"```python\n{_loading(adapter)}\n```",
        "## Results",
        _results_table(results),
        "## Data",
        "\n".join(f"- {name}: {_source(one)}" for name, one in stages.items()),
        "## Contamination",
        in_words(contamination),
        "## License",
        f"That of the base model: {base[2]}." if base[2] else "That of the base model; look it up where it comes from.",
        "## Recipe",
        f"```yaml\n{yaml.safe_dump(_shown_recipe(recipe, stages), sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(parts) + "\n"


def _stage_below(place: Path, recipe: Mapping[str, Any]) -> str | None:
    """The stage whose final model an adapter names as its base, unless that is the recipe's model."""
    settings = place / "adapter_config.json"
    named = from_json(settings.read_text()).get("base_model_name_or_path") if settings.is_file() else None
    base = Path(named or "")
    is_final = base.name in ("merged", "adapter") and base.parent.name == "final"
    return base.parent.parent.name if is_final and named != lasting(str(recipe["model"]["path"])) else None


def _belongs(stage: str, base: str) -> str:
    return (
        f"It belongs on the model of stage `{stage}`, which `adapter_config.json` names, and on no other: on {base} "
        "itself it gives wrong outputs without an error."
    )


def stages_until(recipe: Mapping[str, Any], stage: str) -> dict[str, Mapping[str, Any]]:
    """The stages that led to this model, in order."""
    stages, names = recipe["stages"], list(recipe["stages"])
    chain: list[str] = []
    now: str | None = stage
    while now is not None:
        chain.insert(0, now)
        place = names.index(now)
        now = stages[now].get("start_from") or (names[place - 1] if place else None)
    return {name: stages[name] for name in chain}


def _base(recipe: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """The base model's display name, its hub name, and its license, as far as they are known."""
    path = str(recipe["model"]["path"])
    if path == TINY:
        return "Lemma's built-in tiny model", None, "apache-2.0"
    folder = Path(path).expanduser()
    if not folder.exists():
        return path, path if path.count("/") == 1 else None, None
    name = hub_origin(folder)
    return name or folder.name, name, _license_of(folder)


def _license_of(folder: Path) -> str | None:
    """From the front matter of the base model's own card."""
    try:
        _, front, _ = (folder / CARD).read_text(encoding="utf-8").split("---", 2)
        name = yaml.safe_load(front)["license"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
    return name if isinstance(name, str) and re.fullmatch(r"[\w .+-]+", name) else None


def _what(base: tuple[str, str | None, str | None]) -> str:
    return f"[{base[0]}](https://huggingface.co/{base[1]})" if base[1] else base[0]


def _front_matter(
    recipe: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any]],
    base: tuple[str, str | None, str | None],
    results: list[dict[str, Any]],
    adapter: bool,
) -> str:
    """Base, data, license and results as the hub reads them."""
    from huggingface_hub import EvalResult, ModelCardData

    eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=one["benchmark"],
            dataset_name=one["benchmark"],
            metric_type=one["metric"],
            metric_value=round(100 * one["value"], 2),
            metric_name=f"{one['metric']}, 95% interval {100 * one['low']:.1f} to {100 * one['high']:.1f}",
        )
        for one in results
    ]
    sources = {str(one.get("data", {}).get("source", "")) for one in stages.values()}
    data = ModelCardData(
        base_model=base[1],
        license=base[2],
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lemma", *sorted({str(one["kind"]) for one in stages.values()})],
        datasets=sorted(source for source in sources if source.count("/") == 1 and not Path(source).suffix) or None,
        model_name=base[0].rpartition("/")[2] if eval_results else None,
        eval_results=eval_results or None,
    )
    return data.to_yaml().strip()


def _loading(adapter: bool) -> str:
    if adapter:
        return (
            "from peft import AutoPeftModelForCausalLM\n\n"
            'model = AutoPeftModelForCausalLM.from_pretrained("this folder")'
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("this folder")'
    )


def find_results(run: Path, stage: str, step: int | None) -> Iterator[dict[str, Any]]:
    """The headline numbers of this model: of the stage's evaluation at `step`, or of its last one."""
    folders = sorted((run / "evaluations" / stage).glob("step-*"))
    if step is not None:
        folders = [folder for folder in folders if folder.name == f"step-{step:06d}"]
    for folder in folders[-1:]:
        try:
            results = from_json((folder / "results.json").read_text(encoding="utf-8"))
            for name, result in results["benchmarks"].items():
                yield {"benchmark": name, "n": result["n"], "k": result["k"], **result["headline"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return


def _results_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return "None were measured during training; `lemma eval` measures them."
    rows = [
        f"| {one['benchmark']} | {one['metric']} | {100 * one['value']:.1f} | {100 * one['low']:.1f} to "
        f"{100 * one['high']:.1f} | {one['n']} | {one['k']} |"
        for one in results
    ]
    return "\n".join(
        ["| benchmark | metric | % | 95% interval | problems | samples |", "|---|---|---|---|---|---|", *rows]
    )


def _source(stage: Mapping[str, Any]) -> str:
    data = stage.get("data") or {}
    source = data.get("source", "its own samples") if isinstance(data, Mapping) else str(data)
    name = Path(str(source)).name if str(source).startswith(("/", ".", "~")) else str(source)
    split = data.get("split") if isinstance(data, Mapping) else None
    return f"{name}, split {split}" if split else name


def _shown_recipe(recipe: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without local paths, and only with the stages of this model."""
    run = {name: value for name, value in recipe["run"].items() if name != "dir"}
    shown: dict[str, Any] = _without_folders({**recipe, "run": run, "stages": dict(stages)})
    return shown


def _without_folders(value: Any) -> Any:
    """The same with each absolute path replaced by its last component."""
    if isinstance(value, Mapping):
        return {name: _without_folders(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~/")) else value
