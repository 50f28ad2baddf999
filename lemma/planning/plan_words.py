"""The plan of a run in words: the model, the stages in order, and what each of them learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.data.data_options import DataOptions, SourceOptions
from lemma.data.read_files import suffix_of
from lemma.environments import EnvironmentOptions
from lemma.evaluation.benchmarks import find_benchmark
from lemma.learning.learning_options import USUAL_BUDGET
from lemma.models.memory import Shape
from lemma.models.model_options import ModelOptions
from lemma.planning.data_amounts import Amount
from lemma.planning.prompt_words import prompts_in_words
from lemma.planning.stage_memory import config_file, memory_in_words, read_config
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run_options import StageOptions, stage_before
from lemma.stages.preference.preference_options import PreferenceOptions
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.supervised_options import SupervisedOptions

# Of a token of English in a compressed journal: id, log-probability and text; and in the notes of a step, where engine
# and learner round differently and the step makes several updates. Both are measured.
JOURNAL_BYTES, NOTES_BYTES = 9, 4


def run_in_words(folder: Path) -> str:
    """The plan of a run's recipe; the recipe itself where this version of Lemma cannot read it."""
    try:
        return describe(load_recipe(folder / "recipe.yaml"))
    except UserError:
        return (folder / "recipe.yaml").read_text(encoding="utf-8", errors="replace")


def describe(
    recipe: Recipe,
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    amounts: Mapping[str, Amount | None] | None = None,
) -> str:
    """The plan of a run as text: the model, the stages in order, and which of them are skipped. `amounts` tell how much
    data stages have."""
    where = f"on {recipe.run.device}" if recipe.run.device != "auto" else "on a GPU where there is one"
    lines = [
        _row("run", f"{recipe.run.dir}, seed {recipe.run.seed}, {where}"),
        _row("model", _model(recipe.model, recipe.run.device)),
        _row("format", getattr(recipe.format, "name", "")),
        _row("recipe", f"{recipe.digest()[:12]}"),
    ]
    for number, (name, stage) in enumerate(recipe.stages.items(), start=1):
        skipped = name in skip or (bool(only) and name not in only)
        lines += ["", f"stage {number}: {name} ({stage.kind}{', skipped' if skipped else ''})"]
        if skipped:
            lines.append(_row("leaves", f"the model that {name} finished with earlier"))
        else:
            before = stage_before(recipe.stages, name)
            lines.append(_row("starts from", f"the end of {before}" if before else "the model"))
            amount = (amounts or {}).get(name)
            lines += _stage(stage, amount, recipe.run.device)
            lines.append(_row("memory", memory_in_words(recipe, stage, amount)))
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<12} {text}"


def _model(model: ModelOptions, device: str) -> str:
    if model.path == "tiny":
        size = f"hidden {model.tiny.hidden}, {model.tiny.layers} layers"
        origin = f"the built-in tiny model, created from nothing ({size})"
    else:
        origin = model.path + (f" at {model.revision}" if model.revision else "")
    parts = [origin, *_configured(model)]
    if model.override:
        parts.append("with " + ", ".join(f"{key} {value}" for key, value in model.override.items()))
    if model.lora is not None:
        kind = ("rs" if model.lora.rslora else "") + ("DoRA" if model.lora.dora else "LoRA")
        whole = f", {', '.join(model.lora.modules_to_save)} whole" if model.lora.modules_to_save else ""
        parts.append(f"{kind} r {model.lora.r}, alpha {model.lora.alpha:g}{whole}")
    if model.quantize:
        parts.append(f"base weights in {model.quantize}")
    parts.append(model.precision or {"cpu": "fp32", "cuda": "bf16"}.get(device, "bf16 on a GPU, fp32 on a CPU"))
    return "; ".join(parts)


def _configured(model: ModelOptions) -> list[str]:
    """What the configuration of a model tells of it, where it is on this machine."""
    if model.path == "tiny":
        return []
    try:
        file = config_file(model)
        config = {} if file is None else {**read_config(file), **model.override}
        text = config.get("text_config") or config
        parts = [str(config["model_type"])] if "model_type" in config else []
        parts.append(in_words(Shape.of_config(config).parameters, "parameters"))
        parts += [f"context {text['max_position_embeddings']:,}"] if "max_position_embeddings" in text else []
        return [", ".join(parts)]
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _stage(stage: StageOptions, amount: Amount | None, device: str) -> list[str]:
    optim, lines, batch = stage.optim, [], ""
    if isinstance(stage, SupervisedOptions):
        lines, batch = _supervised(stage, amount), f"{many(stage.batch.sequences, 'sequence')} a step, "
    elif isinstance(stage, PreferenceOptions):
        what = "pair" if stage.algorithm.paired else "response"
        lines, batch = _preference(stage, amount), f"{many(stage.batch.examples, what)} a step, "
    elif isinstance(stage, ReinforcementOptions):
        groups = f"{many(stage.batch.problems, 'problem')} x {many(stage.algorithm.group_size, 'sample')}"
        lines, batch = _reinforcement(stage, amount), f"{groups} a step, {many(stage.algorithm.updates, 'update')}, "
    warmup = f"warm-up {optim.warmup:.0%} of the steps" if optim.warmup < 1 else f"warm-up {optim.warmup:g} steps"
    warmup = warmup if optim.warmup else "no warm-up"
    return [
        *lines,
        _row("batch", f"{batch}{at_a_time(stage.batch.token_budget, device)}"),
        _row("optimiser", f"{optim.name}, lr {optim.lr:g} {optim.schedule}, {warmup}"),
        _row("checkpoints", every(stage.checkpoint.every) + f", the newest {stage.checkpoint.keep} kept"),
        *_evaluation(stage),
    ]


def _evaluation(stage: StageOptions) -> list[str]:
    asked = stage.eval
    if not asked.benchmarks:
        return []
    names = ", ".join(find_benchmark(one).name for one in asked.benchmarks)
    start = "at the start, " if asked.at_start else ""
    how = f"{getattr(stage, 'rollout', asked).engine.name} engine, at most {asked.max_tokens:,} tokens"
    return [_row("evaluation", f"{names}; {start}{every(asked.every)}; {how}; best by {asked.metric}")]


def _supervised(stage: SupervisedOptions, amount: Amount | None) -> list[str]:
    return [
        _row("length", length_in_words(stage, amount)),
        _row("data", _data(stage.data, stage.unique_examples) + _cut(stage)),
        _row("prompts", prompts_in_words(stage.data)),
        *_validation(stage),
    ]


def _preference(stage: PreferenceOptions, amount: Amount | None) -> list[str]:
    algorithm, losses = stage.algorithm, stage.algorithm.losses
    named = f"{algorithm.name}, beta {algorithm.beta:g}"
    if losses and list(losses) != [algorithm.name]:
        parts = [name if len(losses) == 1 else f"{weight:g} {name}" for name, weight in losses.items()]
        named += f", loss {' + '.join(parts)}"
    kept = {
        "precomputed": "computed once, then taken from the cache",
        "adapters_off": "computed at every step with the adapters off",
    }
    return [
        _row("algorithm", named),
        _row("reference", _reference(stage, kept[stage.reference])),
        _row("length", length_in_words(stage, amount)),
        _row("data", _data(stage.data) + _cut(stage)),
        *_validation(stage),
    ]


def _reinforcement(stage: ReinforcementOptions, amount: Amount | None) -> list[str]:
    algorithm, rollout = stage.algorithm, stage.rollout
    rewards = [f"{reward.weight:g} {reward.label}" for reward in stage.rewards]
    each = "" if stage.environment.is_single_turn else " a turn"
    most = f"at most {many(rollout.max_tokens, 'token')}{each}" if rollout.max_tokens else ""
    longest = most or "as long as the context allows"
    chosen = algorithm.model_dump(exclude_defaults=True, exclude={"name", "group_size"})
    shown = "".join(f", {name} {value}" for name, value in chosen.items() if not isinstance(value, dict))
    critic = "; a value model is trained with it" if algorithm.needs_critic else ""
    return [
        _row("algorithm", f"{algorithm.name}{shown}{critic}"),
        _row("reference", _reference(stage, "the model at the start of the stage")),
        _row("rewards", " + ".join(rewards)),
        *_environment(stage.environment),
        _row("samples", f"{rollout.engine.name} engine, temperature {rollout.temperature:g}, {longest}"),
        _row("length", length_in_words(stage, amount)),
        _row("data", _data(stage.data)),
        *_validation(stage),
        _row("journal", _journal(stage)),
    ]


def _reference(stage: PreferenceOptions | ReinforcementOptions, usual: str) -> str:
    other = stage.reference_model
    if other is None:
        return usual if stage.algorithm.needs_reference else "none"
    parts = [other.path or "the model at the start of the stage"]
    if other.every is not None:
        parts.append(f"following the policy by {other.mix:g} every {many(other.every, 'step')}")
    return ", ".join(parts)


def _environment(environment: EnvironmentOptions) -> list[str]:
    if environment.is_single_turn:
        return []
    return [_row("environment", f"{environment.name}, at most {many(environment.turns, 'turn')}")]


def _journal(stage: ReinforcementOptions) -> str:
    """What the samples take on disk at most: where responses are shorter, or fewer problems are drawn, it is less."""
    token, steps = JOURNAL_BYTES + NOTES_BYTES * stage.journal.notes, stage.journal.steps
    samples = stage.batch.problems * (1 + stage.rounds) * stage.algorithm.group_size
    kept = "samples of all steps stay" if steps is None else f"the newest {steps} steps stay"
    if stage.rollout.max_tokens is None:
        return f"{kept}, about {token} bytes a token, {samples} samples a step"
    step = samples * stage.environment.longest_episode(stage.rollout.max_tokens) * token
    most = [count for count in (stage.steps, steps) if count is not None]
    whole = f", {_size(min(most) * step)} in all" if most else ""
    return f"{kept}, at most {_size(step)} a step{whole}"


def _size(count: float) -> str:
    units = ("KB", "MB", "GB", "TB")
    for unit in units:
        count /= 1000
        if count < 1000 or unit == units[-1]:
            return f"{count:.3g} {unit}"
    raise AssertionError


def _cut(stage: SupervisedOptions | PreferenceOptions) -> str:
    return f", sequences of at most {stage.max_length} tokens" if stage.max_length else ""


def _validation(stage: SupervisedOptions | PreferenceOptions | ReinforcementOptions) -> list[str]:
    held = stage.validation
    if not held.share and held.data is None:
        return []
    source = f"{held.share:.1%} of the rows" if held.data is None else _data(held.data)
    most = f", at most {held.count}" if held.count else ""
    return [_row("validation", f"{source}{most}, {every(held.every)}")]


def _data(data: DataOptions, first: int | str = "all") -> str:
    sources = " + ".join(_source(part) for part in data.mix) if data.mix else _source(data)
    limit = "" if first == "all" else f", the first {first} rows"
    return sources + limit


def _source(source: SourceOptions) -> str:
    if source.source == "arithmetic":
        made = source.arithmetic
        return f"built-in arithmetic ({made.count} problems of {made.operations} operations, {made.style})"
    if source.source == "higher_lower":
        return f"{source.count or source.guessing.count} built-in games of higher_lower with random guesses"
    if source.source.split(":")[0] == "journal":
        return f"pairs from the samples in {source.source.removeprefix('journal').lstrip(':') or 'this run'}"
    is_file = suffix_of(Path(source.source)) is not None
    place = source.source if is_file else " / ".join(filter(None, [source.source, source.config, source.split]))
    if source.count is not None:
        return f"{place}, {many(source.count, 'row')}"
    return f"{place}, {source.fraction:g} of the rows" if source.fraction else place


def length_in_words(stage: Any, amount: Amount | None) -> str:
    """Steps or epochs, and the other of the two where the data are known."""
    epochs = 1 if stage.epochs is None else stage.epochs
    said = many(stage.steps, "step") if stage.steps is not None else many(epochs, "epoch")
    if amount is None or getattr(stage, "packing", "") == "stream":
        return said
    is_rl = isinstance(stage, ReinforcementOptions)
    rows, batch = amount.rows, stage.batch
    a_step = batch.problems if is_rl else getattr(batch, "sequences", None) or batch.examples
    a_pass = rows / a_step if is_rl else math.ceil(rows / a_step)
    most = "at most " * (stage.data.prompt_length != type(stage.data.prompt_length)())
    of_rows = f"of {most}{many(rows, 'problem' if is_rl else 'row')}"
    if stage.steps is None:
        return f"{said} {of_rows}, {many(max(1, round(epochs * a_pass)), 'step')}"
    passes = stage.steps / a_pass
    return f"{said}, {many(float(f'{passes:.3g}'), 'epoch')} {of_rows}"


def at_a_time(budget: int | None, device: str) -> str:
    """The limit of a pack. Where memory sets it, the row on memory says what that gives."""
    if budget is not None:
        return f"at most {budget:,} tokens at a time"
    if device == "cuda":
        return "as many tokens at a time as fit"
    rest = "fewer if memory is short" if device == "cpu" else "on a GPU as many as fit"
    return f"at most {USUAL_BUDGET:,} tokens at a time, {rest}"


def many(count: float, what: str) -> str:
    shown = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{shown} {what}{'' if count == 1 else 's'}"


def in_words(count: int, what: str) -> str:
    """A large count, such as `135 million parameters`."""
    return f"{count / 1e9:.3g} billion {what}" if count >= 1e9 else f"{count / 1e6:.3g} million {what}"


def every(steps: int) -> str:
    """When something happens that happens every so many steps; 0 is never before the end."""
    return (f"every {steps:,} steps" if steps > 1 else "after each step") + " and at the end" if steps else "at the end"
