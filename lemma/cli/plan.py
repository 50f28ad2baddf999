"""`lemma plan RECIPE`: what a recipe would do, stage by stage."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.local_gpus import gpu_memories, has_driver
from lemma.cli.parser import Parser, add_recipe, named
from lemma.cli.plan_data import at_a_time, every, in_words, length_in_words, many
from lemma.cli.plan_memory import config_file, head_size, memory_in_words, memory_warnings, read_config
from lemma.cli.plan_ranks import NOTHING_FITS, add_arguments, rank_lines
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.cli.plan_data import Amount
    from lemma.data.data_options import DataOptions, SourceOptions
    from lemma.environments import EnvironmentOptions
    from lemma.models.model_options import ModelOptions
    from lemma.recipe import Recipe
    from lemma.runs.run_options import StageOptions
    from lemma.stages.preference.preference_options import PreferenceOptions
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions
    from lemma.stages.supervised_options import SupervisedOptions

DESCRIPTION = """\
Show what a recipe would do. Nothing is written and no model is loaded; of a hub model the configuration is fetched.
Where a stage's data and the benchmarks it evaluates on are small files on this machine, rows that repeat a benchmark
problem are counted. The exit code is 1 if something that the run needs is missing, or does not fit into memory."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("plan", help="what a recipe would do", description=DESCRIPTION)
    add_recipe(parser)
    parser.add_argument("--check-data", action="store_true", help="compare with benchmarks whatever has to be read")
    parser.add_argument("--against", metavar="A,B", help="benchmarks to compare with, in place of those of the stages")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the benchmarks' files in place of the hub")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.cli.check import plan_lines
    from lemma.cli.plan_prompts import try_prompt
    from lemma.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    against = _known(args.against) if args.against else None
    tables = rank_lines(recipe, args)  # before anything is printed: a wrong name of a GPU ends it here
    lacks = print_plan(recipe, list(recipe.stages), is_for_here=not tables)
    print("".join(f"{line}\n" for line in tables), end="")
    lacks.is_too_large |= any(NOTHING_FITS in line for line in tables)
    lacks.is_missing |= not try_prompt(recipe)
    for line in plan_lines(recipe, against, args.data_dir, is_asked=args.check_data or against is not None):
        print(line)
    print(f"\n{lacks}\n" if lacks else "", end="")
    return 1 if lacks else 0


@dataclass
class Lacks:
    """Why a run could not be made as planned."""

    is_missing: bool = False
    is_too_large: bool = False

    def __bool__(self) -> bool:
        return self.is_missing or self.is_too_large

    def __str__(self) -> str:
        missing = ["something that it needs is missing or wrong"] * self.is_missing
        large = ["a stage does not fit into memory"] * self.is_too_large
        return f"The run cannot be made as planned: {', and '.join(missing + large)} (see above)."


def _known(words: str) -> list[str]:
    """Names of benchmarks, all of which there are."""
    from lemma.evaluation.benchmarks import find_benchmark

    return [name for name in named(words) if find_benchmark(name)]


def print_plan(
    recipe: Recipe,
    names: Sequence[str],
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    is_for_here: bool = True,
) -> Lacks:
    """The plan, and what these stages lack. The hub is asked where the model or the data are there and not here. Unless
    it `is_for_here`, nothing is compared with this machine's GPUs."""
    from lemma.cli.plan_data import amount_of
    from lemma.cli.plan_hub import missing
    from lemma.cli.plan_prompts import unused_template
    from lemma.cluster.foreign_configs import foreign_sentences

    doubts, lacking = [*foreign_sentences(recipe), *unused_template(recipe)], list(missing(recipe, names))
    amounts = {name: amount_of(recipe, recipe.stages[name], lacking.append) for name in names}
    has_gpu = has_driver()
    gpus = gpu_memories() if is_for_here and recipe.run.device != "cpu" else []
    large = memory_warnings(recipe, names, amounts, has_gpu=has_gpu, gpus=gpus)
    print(describe(recipe, skip=skip, only=only, amounts=amounts))
    refused = [*_refused(recipe, names), *_wrong_targets(recipe.model), *_wrong_heads(recipe, names)]
    for sentence in (*refused, *doubts, *lacking, *large):
        print(f"\nwarning: {sentence}")
    # Without a GPU, a machine may only be the one that plans.
    is_known = recipe.run.device != "auto" or has_gpu
    return Lacks(bool(refused or lacking), is_known and bool(large))


def _refused(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """Which files of these stages are not there, as the run would refuse them."""
    from lemma.runs.inputs import check_inputs

    for name in names:
        try:
            check_inputs(recipe.stages, [name])
        except UserError as error:
            yield str(error)


def _wrong_targets(model: ModelOptions) -> Iterator[str]:
    """What is wrong with the layers that adapters are for, where the model's configuration is on this machine."""
    if model.lora is None or (model.lora.targets == "all-linear" and not model.lora.modules_to_save):
        return
    try:
        file = None if model.path == "tiny" else config_file(model)
        if file is None and model.path != "tiny":
            return
        from lemma.models.lora_targets import check_targets, skeleton, whole_layers

        module = skeleton(model, file)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # a configuration that cannot be read is told with the model
    try:
        check_targets(module, model.lora.targets)
        whole_layers(module, model.lora.modules_to_save)
    except UserError as error:
        yield str(error)


def _wrong_heads(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """Why vLLM cannot run the model on a CPU, where a stage asks for that and the model's configuration is here."""
    from lemma.engines.vllm.vllm_options import VllmOptions, head_refusal

    asked = {name: getattr(recipe.stages[name], "rollout", recipe.stages[name].eval) for name in names}
    stages = [name for name, said in asked.items() if isinstance(said.engine, VllmOptions)]
    size = head_size(recipe.model) if stages and recipe.run.device == "cpu" else None
    refusal = None if size is None else head_refusal(size)
    if refusal is not None:
        yield f"{refusal}; write `engine: native` in stage {' and '.join(stages)}"


def describe(
    recipe: Recipe,
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    amounts: Mapping[str, Amount | None] | None = None,
) -> str:
    """The plan of a run as text: the model, the stages in order, and which of them are skipped. `amounts` tell how much
    data stages have."""
    from lemma.runs.run_options import stage_before

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
    from lemma.models.memory import Shape

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
    from lemma.stages.preference.preference_options import PreferenceOptions
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions
    from lemma.stages.supervised_options import SupervisedOptions

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
    from lemma.evaluation.benchmarks import find_benchmark

    asked = stage.eval
    if not asked.benchmarks:
        return []
    names = ", ".join(find_benchmark(one).name for one in asked.benchmarks)
    start = "at the start, " if asked.at_start else ""
    how = f"{getattr(stage, 'rollout', asked).engine.name} engine, at most {asked.max_tokens:,} tokens"
    return [_row("evaluation", f"{names}; {start}{every(asked.every)}; {how}; best by {asked.metric}")]


def _supervised(stage: SupervisedOptions, amount: Amount | None) -> list[str]:
    from lemma.cli.plan_prompts import prompts_in_words

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
    from lemma.rollouts.journal_files import BYTES_A_TOKEN
    from lemma.rollouts.token_notes import BYTES_A_TOKEN as NOTED

    token, steps = BYTES_A_TOKEN + NOTED * stage.journal.notes, stage.journal.steps
    samples = stage.batch.problems * (1 + stage.rounds) * stage.algorithm.group_size
    kept = "samples of all steps stay" if steps is None else f"the newest {steps} steps stay"
    if stage.rollout.max_tokens is None:
        return f"{kept}, about {token} bytes a token, {samples} samples a step"
    step = samples * stage.environment.room(stage.rollout.max_tokens) * token
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
    from lemma.data.read_files import suffix_of

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
