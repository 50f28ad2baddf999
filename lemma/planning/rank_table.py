"""A recipe on so many GPUs of a kind: memory of a rank for each `shard`, what fits, and computed times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lemma.core.errors import UserError
from lemma.models import step_time as rates
from lemma.models.fitting import guess_shape
from lemma.models.gpus import GPUS_A_MACHINE, NETWORK_RATE, Gpu, find_gpu
from lemma.models.memory import GIB, SHARDS, MemoryPlan, Shape, lora_parameters, plan_server
from lemma.models.step_time import StepWork
from lemma.planning.data_amounts import Amount, amount_of, sequences_of
from lemma.planning.stage_memory import shape_of
from lemma.recipe import Recipe
from lemma.runs.run_options import StageOptions, usual_slots
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

DEFAULT_GPU = "h100-80"
# Of a GPU's memory; the rest is left to libraries and communication.
USABLE = 0.95
NOTHING_FITS = "Nothing fits"


def rank_lines(recipe: Recipe, ranks: int | None, gpu: str | None, length: int | None) -> list[str]:
    """The table of every stage, where a number of ranks or a GPU asks for it."""
    if ranks is None and gpu is None:
        return []
    count = (recipe.cluster.ranks or 1) if ranks is None else ranks
    for name, value in (("--ranks", count), ("--length", length)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: a number of at least 1 is wanted", fix=f"write {name} 8")
    return list(describe_ranks(recipe, count, gpu or DEFAULT_GPU, length))


def describe_ranks(recipe: Recipe, ranks: int, gpu_name: str, length: int | None = None) -> Iterator[str]:
    gpu = find_gpu(gpu_name)
    shape = shape_of(recipe.model)
    yield f"\n{ranks} x {gpu_name}: {gpu.memory_gib:g} GiB, {gpu.matrix_rate / 1e12:g} TFLOP/s in bf16"
    if isinstance(shape, str):
        guessed = guess_shape(recipe.model.path)
        if guessed is None:
            yield f"memory is {shape}"
            return
        shape = guessed
        yield f"the model's shape is guessed from its name: {shape.parameters / 1e9:.1f} billion parameters"
    for name, stage in recipe.stages.items():
        yield from _stage_table(recipe, name, stage, shape, ranks, gpu, amount_of(recipe, stage), length)
    link = gpu.link_rate if ranks <= GPUS_A_MACHINE else min(gpu.link_rate, NETWORK_RATE)
    where = "" if ranks <= GPUS_A_MACHINE else " between machines"
    yield (
        f"\nTimes are computed, not measured: {rates.MATRIX_SHARE:.0%} of the matrix rate, {rates.MEMORY_SHARE:.0%} of"
        f" {gpu.memory_rate / 1e9:,.0f} GB/s to memory, {rates.LINK_SHARE:.0%} of {link / 1e9:g} GB/s{where}; nothing"
        " overlaps."
    )


@dataclass(frozen=True)
class _Row:
    shard: str
    plan: MemoryPlan
    work: StepWork
    gpu: Gpu
    ranks: int
    generates: bool
    recomputes: bool = False
    # Generation servers with the native engine, and the memory of one of them.
    servers: int = 0
    server: MemoryPlan | None = None

    @property
    def room(self) -> float:
        """Tokens of cache that the rest of the memory holds."""
        return _room(self.server or self.plan, self.gpu)

    @property
    def fits(self) -> bool:
        enough = self.plan.total <= USABLE * self.gpu.memory_gib * 2**30
        needs_room = self.generates and not self.is_served and self.work.response
        return enough and (not needs_room or self.generation is not None)

    @property
    def is_served(self) -> bool:
        """Whether servers must generate, and the recipe names none of the native engine."""
        return self.shard == "weights" and not self.servers

    @property
    def generation(self) -> float | None:
        ranks = self.servers or self.ranks
        return self.work.generation_seconds(self.gpu, ranks, self.room, self.plan.cache_per_token)

    def __str__(self) -> str:
        plan = self.plan
        state = plan.weights + plan.optimiser + plan.critic + plan.reference
        shown = f"  {self.shard:<11}{state / GIB:>8.1f}{(plan.total - state) / GIB:>8.1f}{plan.total / GIB:>8.1f}"
        shown += f"{('yes*' if self.recomputes else 'yes') if self.fits else 'no':>6}"
        if not self.fits:
            return shown
        update = self.work.update_seconds(self.gpu, self.ranks)
        link = self.work.communication_seconds(self.gpu, self.ranks, self.shard)
        times = [update, link]
        if self.generates:
            shown += f"{'' if self.is_served else f'{self.room:,.0f}':>12}"
            own = None if self.is_served or not self.work.response else self.generation
            shown += f"{_seconds(own) if own is not None else 'servers' if self.is_served else '?':>10}"
            times += [own] if own is not None else []
        return shown + "".join(f"{_seconds(value):>10}" for value in (*times[:2], sum(times)))


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.3g} us"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _stage_table(
    recipe: Recipe,
    name: str,
    stage: StageOptions,
    shape: Shape,
    ranks: int,
    gpu: Gpu,
    amount: Amount | None,
    length: int | None,
) -> Iterator[str]:
    is_rl = isinstance(stage, ReinforcementOptions)
    work = _work(recipe, stage, shape, ranks, amount.lengths if amount else (), length)
    rows = [_row(recipe, stage, shape, work, gpu, ranks, shard) for shard in SHARDS]
    yield f"\nstage {name}, GiB a rank and seconds a step of {work.tokens:,.0f} tokens (computed)"
    if servers := stage.native_servers:
        yield f"{servers} generation server{'s' * (servers != 1)} beside the ranks: {_server(recipe, shape, gpu)}"
    columns = f"  {'shard':<11}{'state':>8}{'work':>8}{'total':>8}{'fits':>6}"
    columns += f"{'cache':>12}{'generate':>10}" if is_rl else ""
    yield columns + f"{'update':>10}{'link':>10}{'step':>10}"
    yield from map(str, rows)
    if any(row.recomputes and row.fits for row in rows):
        yield "  * where activations are recomputed"
    first = next((row.shard for row in rows if row.fits), None)
    if first is None:
        yield f"  {NOTHING_FITS}: take more ranks, larger GPUs, `model.checkpointing: true`, or a smaller token_budget."
    elif first == "weights":
        elsewhere = "; samples then come from generation servers" if is_rl else ""
        yield f"  Only `shard: weights` fits{elsewhere}."
    elif ranks > 1:
        yield f"  The first that fits: `shard: {first}`."


def _row(recipe: Recipe, stage: StageOptions, shape: Shape, work: StepWork, gpu: Gpu, ranks: int, shard: str) -> _Row:
    """Where the recipe leaves it open, activations are recomputed if nothing fits otherwise."""
    is_rl = isinstance(stage, ReinforcementOptions)
    row = _Row(shard, _plan(recipe, stage, shape, ranks, shard, work.pack), work, gpu, ranks, is_rl)
    if servers := stage.native_servers:
        row = replace(row, servers=servers, server=_server_plan(recipe, shape))
    if row.fits or recipe.model.checkpointing is not None:
        return row
    plan = _plan(recipe, stage, shape, ranks, shard, work.pack, recomputed=shape.layers)
    return replace(row, plan=plan, work=replace(work, checkpointing=True), recomputes=True)


def _room(plan: MemoryPlan, gpu: Gpu) -> float:
    return max(0.0, (USABLE * gpu.memory_gib * 2**30 - plan.total) / plan.cache_per_token)


def _server_plan(recipe: Recipe, shape: Shape) -> MemoryPlan:
    return plan_server(shape, recipe.model, recipe.model.precision or "bf16")


def _server(recipe: Recipe, shape: Shape, gpu: Gpu) -> str:
    plan = _server_plan(recipe, shape)
    return f"{plan}; room for {_room(plan, gpu):,.0f} tokens of cache, {plan.cache_per_token / 1024:.0f} KiB each"


def _plan(
    recipe: Recipe,
    stage: StageOptions,
    shape: Shape,
    ranks: int,
    shard: str,
    pack: int,
    recomputed: int | None = None,
) -> MemoryPlan:
    """The memory of one rank, in bf16 where the recipe does not say."""
    model, slots = recipe.model, -(-usual_slots(recipe, ranks) // ranks)
    return stage.plan_update(
        shape, model, model.precision or "bf16", pack, has_adapter=model.lora is not None,
        ranks=ranks, slots=slots, shard=shard, recomputed=recomputed,
    )  # fmt: skip


def _work(
    recipe: Recipe, stage: StageOptions, shape: Shape, ranks: int, known: Sequence[int], length: int | None
) -> StepWork:
    """A step by the lengths of the data or `--length`; where neither is known, a full pack on every rank."""
    model, budget = recipe.model, stage.batch.planned_budget
    mean, longest = length or (sum(known) / len(known) if known else 0), max(known, default=0)
    samples, prompt, response = 0, 0.0, 0.0
    updates, passes = 1, 1
    if isinstance(stage, ReinforcementOptions):
        samples = stage.batch.problems * stage.algorithm.group_size
        passes = stage.algorithm.updates
        updates = passes * stage.algorithm.mini_batches
        most = stage.environment.longest_episode(stage.rollout.max_tokens) if stage.rollout.max_tokens else 0
        response = float(min(length or most, most) if most else length or 0)
        prompt = max(0.0, sum(known) / len(known) - most) if known else 0.0
        mean = prompt + response if response else 0
    tokens = (samples or sequences_of(stage)) * mean or budget * ranks
    pack = int(max(longest, mean, min(budget, tokens * passes / updates / ranks)))
    trainable = lora_parameters(shape, model.lora) if model.lora else shape.parameters
    return StepWork(
        shape.parameters,
        trainable,
        tokens,
        pack,
        updates,
        passes,
        bool(model.checkpointing),
        samples,
        prompt,
        response,
    )
