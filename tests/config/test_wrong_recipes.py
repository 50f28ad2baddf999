"""Options that are unknown, wrong or contradict each other get one sentence: what is wrong, where, what to write."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lemma import formats
from lemma.algorithms import ALGORITHMS
from lemma.algorithms.preference import PREFERENCE_ALGORITHMS
from lemma.cli import main
from lemma.config.explain import spots
from lemma.config.foreign_names import KINDS, SYNONYMS
from lemma.core.errors import UserError
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run_options import BOTH_LENGTHS
from tests.config.refusals import GOOD, complaint_about, swap

pytestmark = pytest.mark.usefixtures("recipe_folder")

FORMATS = ", ".join(sorted(formats.FORMATS))
NEEDS_STAGE = "a recipe needs at least one stage; write for example `stages: {sft: {steps: 100}}`"
NAMED = "every stage has a name; write for example `stages: {sft: {steps: 100}}`"

# The recipe, and the sentence it gets.
RECIPES: dict[str, tuple[str, str]] = {
    # words of other programs, and letters that changed places
    "gpu": (swap("seed:", "device: gpu, seed:"), "recipe.yaml:1: 'run.device' cannot be 'gpu'; write 'cuda'"),
    "reinforcement": (
        GOOD + "  next: {kind: reinforcement}\n",
        "recipe.yaml:11: 'stages.next.kind' cannot be 'reinforcement'; write 'rl'",
    ),
    "gpro": (
        GOOD + "  next: {kind: rl, algorithm: gpro}\n",
        "recipe.yaml:11: 'stages.next.algorithm' cannot be 'gpro'; did you mean 'grpo'?",
    ),
    "an argument of a class of one's own": (
        GOOD + "  next: {kind: rl, environment: {name: 'shop.py:Shop', days: 3}}\n",
        "recipe.yaml:11: unknown key 'stages.next.environment.days'; "
        "write it as 'stages.next.environment.options.days' if what you named takes it, or "
        "one of: class, episode_seconds, episode_tokens, episodes, limit_reward, name, "
        "options, reply_tokens, reset_seconds, schedule, score_seconds, step_seconds, turns, unknown_limit, "
        "worker_calls, workers",
    ),
    "an option of other batches": (
        GOOD + "  next: {kind: preference, batch: {sequences: 4}}\n",
        "recipe.yaml:11: unknown key 'stages.next.batch.sequences'; write one of: examples, token_budget",
    ),
    "an algorithm for a kind": (
        GOOD + "  next: {kind: grpo}\n",
        "recipe.yaml:11: 'stages.next.kind' cannot be 'grpo'; write `kind: rl` and `algorithm: grpo`",
    ),
    "TRL's group": (
        GOOD + "  next: {kind: rl, algorithm: {name: grpo, num_generations: 8}}\n",
        "recipe.yaml:11: unknown key 'stages.next.algorithm.num_generations'; did you mean 'group_size'?",
    ),
    "TRL's length, not that of evaluations": (
        GOOD + "  next: {kind: rl, max_completion_length: 8}\n",
        "recipe.yaml:11: unknown key 'stages.next.max_completion_length'; write it as 'stages.next.rollout.max_tokens'",
    ),
    "TRL's beta in reinforcement learning": (
        GOOD + "  next: {kind: rl, algorithm: {name: grpo, beta: 0.1}}\n",
        "recipe.yaml:11: unknown key 'stages.next.algorithm.beta'; did you mean 'kl'?",
    ),
    "the batch of a stage of pairs": (
        GOOD + "  next: {kind: preference, batch_size: 4}\n",
        "recipe.yaml:11: unknown key 'stages.next.batch_size'; write it as 'stages.next.batch.examples'",
    ),
    "TRL's batch, in completions": (
        GOOD + "  next: {kind: rl, per_device_train_batch_size: 32}\n",
        "recipe.yaml:11: unknown key 'stages.next.per_device_train_batch_size'; "
        "write it as 'stages.next.batch.problems' (problems = completions / group_size)",
    ),
    "TRL's batch, in the batch of a stage": (
        GOOD + "  next: {kind: rl, batch: {per_device_train_batch_size: 32}}\n",
        "recipe.yaml:11: unknown key 'stages.next.batch.per_device_train_batch_size'; "
        "did you mean 'problems'? (problems = completions / group_size)",
    ),
    "TRL's batch of demonstrations": (
        swap("steps: 10", "per_device_train_batch_size: 32"),
        "recipe.yaml:8: unknown key 'stages.sft.per_device_train_batch_size'; write it as 'stages.sft.batch.sequences'",
    ),
    "accumulation of gradients": (
        GOOD + "  next: {kind: rl, gradient_accumulation_steps: 4}\n",
        "recipe.yaml:11: unknown key 'stages.next.gradient_accumulation_steps'; remove it: not needed, since a step "
        "takes as many passes as it needs, and `batch.token_budget` bounds memory",
    ),
    "TRL's switch for vLLM": (
        GOOD + "  next: {kind: rl, use_vllm: true}\n",
        "recipe.yaml:11: unknown key 'stages.next.use_vllm'; "
        "write `rollout: {engine: vllm}` in the stage to generate with vLLM",
    ),
    "TRL's epsilon": (
        GOOD + "  next: {kind: rl, algorithm: {name: grpo, epsilon: 0.2}}\n",
        "recipe.yaml:11: stages.next.algorithm.epsilon: 0.2 is too much to add to a standard deviation; the clip "
        "range of the ratio, which others call epsilon, is written `clip: 0.2` here",
    ),
    # unknown keys
    "unknown at the top": (swap("model:", "modle:"), "recipe.yaml:2: unknown key 'modle'; did you mean 'model'?"),
    "unknown in a section": (swap("seed:", "sead:"), "recipe.yaml:1: unknown key 'run.sead'; did you mean 'seed'?"),
    "unknown in a stage": (
        swap("steps: 10", "stepps: 10"),
        "recipe.yaml:8: unknown key 'stages.sft.stepps'; did you mean 'steps'?",
    ),
    "unknown far down": (
        swap("count: 2", "cuont: 2"),
        "recipe.yaml:10: unknown key 'stages.sft.data.mix.0.cuont'; did you mean 'count'?",
    ),
    "called so elsewhere": (
        swap("lr: 5e-6", "learning_rate: 5e-6"),
        "recipe.yaml:9: unknown key 'stages.sft.optim.learning_rate'; did you mean 'lr'?",
    ),
    "belongs further down": (
        swap("steps: 10", "lr: 1e-5"),
        "recipe.yaml:8: unknown key 'stages.sft.lr'; write it as 'stages.sft.optim.lr'",
    ),
    "belongs elsewhere": (
        swap("steps: 10", "seed: 3"),
        "recipe.yaml:8: unknown key 'stages.sft.seed'; it belongs at 'run.seed'",
    ),
    "belongs to a stage": (
        GOOD + "batch_size: 8\n",
        "recipe.yaml:11: unknown key 'batch_size'; write it as 'stages.NAME.batch.sequences'",
    ),
    "unlike anything": (
        swap("r: 8", "zzz: 8"),
        "recipe.yaml:4: unknown key 'model.lora.zzz'; write one of: alpha, dora, dropout, merged, "
        "modules_to_save, r, rslora, targets",
    ),
    "another name of passes over the samples": (
        GOOD + "  grpo: {num_grpo_epochs: 2}\n",
        "recipe.yaml:11: unknown key 'stages.grpo.num_grpo_epochs'; write it as 'stages.grpo.algorithm.epochs'",
    ),
    "another name of a validation period": (
        swap("steps: 10", "val_every_steps: 3"),
        "recipe.yaml:8: unknown key 'stages.sft.val_every_steps'; write it as 'stages.sft.validation.every'",
    ),
    "another name of the weight of the NLL": (
        GOOD + "  dpo: {rpo_alpha: 1}\n",
        "recipe.yaml:11: unknown key 'stages.dpo.rpo_alpha'; write it as 'stages.dpo.algorithm.nll'",
    ),
    "another name of a loss": (
        GOOD + "  dpo: {algorithm: {name: dpo, loss: sppo_hard}}\n",
        "recipe.yaml:11: 'stages.dpo.algorithm.loss' cannot be 'sppo_hard'; write `sppo`",
    ),
    "another name of one of several losses": (
        GOOD + "  dpo: {algorithm: {name: dpo, loss: {sigmoid: 1, bco_pair: 1}}}\n",
        "recipe.yaml:11: 'bco_pair' cannot be a name in 'stages.dpo.algorithm.loss'; write `bco`",
    ),
    "a loss in the place of an algorithm": (
        GOOD + "  x: {kind: preference, algorithm: {name: ipo}}\n",
        "recipe.yaml:11: 'stages.x.algorithm.name' cannot be 'ipo'; write `algorithm: {name: dpo, loss: ipo}`",
    ),
    "a stage called like a loss": (
        GOOD + "  exo_pair: {steps: 3}\n",
        "recipe.yaml:11: 'stages.exo_pair' does not say its kind; add `kind: preference` and `algorithm: {name: dpo, "
        "loss: exo}`",
    ),
    "an algorithm of another kind": (
        GOOD + "  x: {kind: preference, algorithm: cispo}\n",
        "recipe.yaml:11: 'stages.x.algorithm' cannot be 'cispo'; cispo is an algorithm of stages of `kind: rl`; write "
        "that",
    ),
    "a loss of another kind": (
        GOOD + "  x: {kind: rl, algorithm: ipo}\n",
        "recipe.yaml:11: 'stages.x.algorithm' cannot be 'ipo'; it belongs to stages of `kind: preference`; write that, "
        "and `algorithm: {name: dpo, loss: ipo}`",
    ),
    "another name of an algorithm": (
        GOOD + "  x: {kind: rl, algorithm: no_baseline}\n",
        "recipe.yaml:11: 'stages.x.algorithm' cannot be 'no_baseline'; write `algorithm: reinforce`",
    ),
    "unknown format option": (
        swap("format: r1_zero", "format: {name: r1_zero, preambel: false}"),
        "recipe.yaml:5: unknown key 'format.preambel'; did you mean 'preamble'?",
    ),
    # wrong values
    "text for a whole number": (
        swap("steps: 10", "steps: many"),
        "recipe.yaml:8: 'stages.sft.steps' cannot be 'many'; write a whole number of at least 1 or null",
    ),
    "half a step": (
        swap("steps: 10", "steps: 10.5"),
        "recipe.yaml:8: 'stages.sft.steps' cannot be 10.5; write a whole number of at least 1 or null",
    ),
    "thousands comma": (
        swap("steps: 10", "steps: 1,000"),
        "recipe.yaml:8: 'stages.sft.steps' cannot be '1,000'; write a whole number of at least 1 or null",
    ),
    "text for a number": (
        swap("5e-6", "5e-6x"),
        "recipe.yaml:9: 'stages.sft.optim.lr' cannot be '5e-6x'; write a number of at least 0",
    ),
    "true for a number": (
        swap("5e-6", "true"),
        "recipe.yaml:9: 'stages.sft.optim.lr' cannot be true; write a number of at least 0",
    ),
    "not a number": (
        swap("5e-6", ".nan"),
        "recipe.yaml:9: 'stages.sft.optim.lr' cannot be nan; write a number of at least 0",
    ),
    "nothing for a number": (
        swap("lr: 5e-6", "lr:"),
        "recipe.yaml:9: 'stages.sft.optim.lr' cannot be empty; write a number of at least 0",
    ),
    "number for text": (
        swap("path: tiny", "path: 5"),
        "recipe.yaml:3: 'model.path' cannot be 5; write text, in quotes: \"5\"",
    ),
    "no text": (
        swap("path: tiny", 'path: ""'),
        "recipe.yaml:3: 'model.path' cannot be ''; write text that is not empty",
    ),
    "neither true nor false": (
        swap("steps: 10", "shuffle: sometimes"),
        "recipe.yaml:8: 'stages.sft.shuffle' cannot be 'sometimes'; write true or false",
    ),
    "too small": (
        swap("steps: 10", "steps: 0"),
        "recipe.yaml:8: 'stages.sft.steps' cannot be 0; write a whole number of at least 1 or null",
    ),
    "too large": (
        swap("r: 8", "r: 8, dropout: 1"),
        "recipe.yaml:4: 'model.lora.dropout' cannot be 1; write a number of at least 0 and below 1",
    ),
    "too few": (
        swap("lr: 5e-6", "betas: [0.9]"),
        "recipe.yaml:9: 'stages.sft.optim.betas' cannot be [0.9]; write a list of 2 numbers of at least 0 and below 1",
    ),
    "a rate without its minus": (
        swap("5e-6", "2e4"),
        "recipe.yaml:9: stages.sft.optim: lr is 20000, and AdamW moves every weight by about that much in each step,"
        " where hardly any weight is above 1; write for example 2e-4",
    ),
    "no example": (
        swap("steps: 10", "unique_examples: 0"),
        "recipe.yaml:8: 'stages.sft.unique_examples' cannot be 0; write a whole number of at least 1 or 'all'",
    ),
    "misspelt word": (
        swap("lr: 5e-6", "schedule: cosin"),
        "recipe.yaml:9: 'stages.sft.optim.schedule' cannot be 'cosin'; did you mean 'cosine'?",
    ),
    "not one of the words": (
        swap("lr: 5e-6", "schedule: zigzag"),
        "recipe.yaml:9: 'stages.sft.optim.schedule' cannot be 'zigzag'; write one of: constant, linear, cosine",
    ),
    "word for a section": (
        swap("lora: {r: 8}", "lora: yes"),
        "recipe.yaml:4: 'model.lora' cannot be 'yes'; write a mapping with any of: r, alpha, rslora, dora, dropout, "
        "targets, modules_to_save, merged",
    ),
    "empty section": (
        swap("optim: {lr: 5e-6}", "optim:"),
        "recipe.yaml:9: 'stages.sft.optim' is empty; write something under it or delete the line",
    ),
    "mapping for a list": (
        swap("[{source: a.jsonl, count: 2}]", "{source: a.jsonl}"),
        "recipe.yaml:10: 'stages.sft.data.mix' cannot be a mapping; write a list of mappings",
    ),
    "number in a list of text": (
        swap("r: 8", "targets: [q_proj, 3]"),
        "recipe.yaml:4: 'model.lora.targets.1' cannot be 3; write text, in quotes: \"3\"",
    ),
    "text for a list": (
        swap("r: 8", "targets: q_proj"),
        "recipe.yaml:4: 'model.lora.targets' cannot be 'q_proj'; write it as a list: `[q_proj]`",
    ),
    # formats and stages
    "misspelt format": (
        swap("format: r1_zero", "format: r1zero"),
        "recipe.yaml:5: 'format' cannot be 'r1zero'; did you mean 'r1_zero'?",
    ),
    "unknown format": (
        swap("format: r1_zero", "format: {name: latex}"),
        f"recipe.yaml:5: 'format.name' cannot be 'latex'; write one of: {FORMATS}",
    ),
    "nameless format": (
        swap("format: r1_zero", "format: {preamble: false}"),
        f"recipe.yaml:5: 'format' does not say its name; add `name:` and one of: {FORMATS}",
    ),
    "no stages": ("run: {dir: out}\n", f"recipe.yaml:1: {NEEDS_STAGE}"),
    "empty stages": ("run: {dir: out}\nstages: {}\n", f"recipe.yaml:2: stages: {NEEDS_STAGE}"),
    "list of stages": ("stages: [sft]\n", f"recipe.yaml:1: stages: {NAMED}"),
    "nothing under stages": ("stages:\n", f"recipe.yaml:1: stages: {NAMED}"),
    "nothing under a stage": (
        "stages:\n  sft:\n",
        "recipe.yaml:2: 'stages.sft' is empty; write something under it or delete the line",
    ),
    "stage without a kind": (
        swap("  sft:", "  warm:"),
        "recipe.yaml:7: 'stages.warm' does not say its kind; add `kind:` and one of: preference, rl, supervised",
    ),
    "misspelt kind": (
        swap("steps: 10", "kind: supervized"),
        "recipe.yaml:8: 'stages.sft.kind' cannot be 'supervized'; did you mean 'supervised'?",
    ),
    "blank in a stage's name": (
        swap("  sft:", "  first try:\n    kind: supervised"),
        "recipe.yaml:7: 'first try' cannot be a name in 'stages'; use letters, digits, _ and - only",
    ),
    "more steps than anybody trains": (
        swap("steps: 10", "steps: 1000000000000000000000000000000"),
        "recipe.yaml:7: stages.sft: steps is more than any run takes: write 1,000,000,000 or fewer",
    ),
    "more epochs than anybody trains": (
        swap("steps: 10", "epochs: 1.0e30"),
        "recipe.yaml:7: stages.sft: epochs is more than any run takes: write 1,000,000 or fewer",
    ),
    "more samples than anybody takes": (
        "stages:\n  rl:\n    batch: {problems: 1000000000000}\n",
        "recipe.yaml:2: stages.rl: a step of 1,000,000,000,000 problems with 8 samples each is more than any run "
        "takes: 1,000,000 samples or fewer",
    ),
    "more arithmetic than memory": (
        swap("{mix: [{source: a.jsonl, count: 2}]}", "{arithmetic: {count: 1000000000000}}"),
        "recipe.yaml:10: stages.sft.data: 1,000,000,000,000 generated problems are too many: write 10,000,000 or fewer",
    ),
    "more arithmetic than memory, by its share": (
        swap("{mix: [{source: a.jsonl, count: 2}]}", "{fraction: 1.0e7}"),
        "recipe.yaml:10: stages.sft.data: 200,000,000,000 generated problems are too many: write 10,000,000 or fewer",
    ),
    # things that do not go together
    "epochs and steps": (
        swap("steps: 10", "steps: 10\n    epochs: 2"),
        f"recipe.yaml:7: stages.sft: {BOTH_LENGTHS}",
    ),
    "fraction and count": (
        swap("count: 2", "count: 2, fraction: 0.5"),
        "recipe.yaml:10: stages.sft.data.mix.0: give fraction or count, not both",
    ),
    "two kinds of validation": (
        swap("steps: 10", "validation: {share: 0.1, data: {source: b.jsonl}}"),
        "recipe.yaml:8: stages.sft.validation: give validation.share or validation.data, not both",
    ),
    "4 bits without adapters": (
        swap("lora: {r: 8}", "quantize: 4bit"),
        "recipe.yaml:2: model: 4-bit weights cannot be trained themselves; add `lora: {r: 16}` under model",
    ),
    "stream without a length": (
        swap("steps: 10", "packing: stream"),
        "recipe.yaml:7: stages.sft: `packing: stream` cuts every max_length tokens; add `max_length: 512` to the stage",
    ),
    "heads that do not divide": (
        swap("lora: {r: 8}", "tiny: {heads: 3}"),
        "recipe.yaml:4: model.tiny: heads must be a multiple of kv_heads and divide hidden",
    ),
    "one and a half steps of warm-up": (
        swap("lr: 5e-6", "warmup: 1.5"),
        "recipe.yaml:9: stages.sft.optim: warmup is a share below 1 or a whole number of steps;"
        " write for example 0.1 or 30",
    ),
}


def test_names_of_other_programs_mean_options_that_there_are() -> None:
    for theirs, meanings in SYNONYMS.items():
        for ours in meanings:
            ending = tuple(ours.split("."))
            assert ours in Recipe.model_fields or any(spots(Recipe, ending)), (theirs, ours)
    assert set(KINDS) == {*ALGORITHMS, *PREFERENCE_ALGORITHMS}
    assert all(KINDS[name] == ("rl" if name in ALGORITHMS else "preference") for name in KINDS)


def test_all_mistakes_are_told_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = swap("seed: 1", "sead: 1, dirr: x").replace("lr: 5e-6", "lr: fast").replace("steps: 10", "steps: 0")
    Path("recipe.yaml").write_text(recipe + "  next: {kind: grpo}\n", encoding="utf-8")
    assert main(["train", "recipe.yaml", "--dry-run"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "lemma: error: recipe.yaml:1: unknown key 'run.sead'; did you mean 'seed'?",
        "lemma: error: recipe.yaml:1: unknown key 'run.dirr'; did you mean 'dir'?",
        "lemma: error: recipe.yaml:8: 'stages.sft.steps' cannot be 0; write a whole number of at least 1 or null",
        "lemma: error: recipe.yaml:9: 'stages.sft.optim.lr' cannot be 'fast'; write a number of at least 0",
        "lemma: error: recipe.yaml:11: 'stages.next.kind' cannot be 'grpo'; write `kind: rl` and `algorithm: grpo`",
    ]


def test_of_very_many_mistakes_the_first_are_told() -> None:
    stages = "".join(f"  s{number}: {{kind: supervised, stepps: 1}}\n" for number in range(25))
    Path("recipe.yaml").write_text(GOOD + stages, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_recipe("recipe.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "recipe.yaml: and 5 more mistakes"
    assert str(caught.value.line) == "11" and caught.value.problem == "unknown key 'stages.s0.stepps'"
    sent = pickle.loads(pickle.dumps(caught.value))
    assert str(sent) == str(caught.value) and sent.line == 11, "another process hears of all of them too"


def test_the_recipe_that_the_wrong_ones_are_made_of_is_good() -> None:
    assert main(["train", "recipe.yaml", "--dry-run"]) == 1, "it names data that are not there"


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, sentence = RECIPES[name]
    assert complaint_about(recipe, capsys) == sentence
