"""Episodes of a recipe's environment, played to be looked at."""

from __future__ import annotations

from typing import Any

from lemma.api.evaluate_call import Device
from lemma.core.events import Sink, silent
from lemma.core.terminal import visible
from lemma.data.choices import as_asked
from lemma.engines import make_engine, open_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Engine
from lemma.environments.openings import opened_all
from lemma.evaluation.diagnose import sample_groups
from lemma.models.load_model import build_policy, pick_device
from lemma.recipe import Recipe
from lemma.rollouts import Episode, Scorer, World
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import stage_problems
from lemma.stages.reinforcement.sampling_parts import make_world, sampling_of


def played(
    recipe: Recipe,
    options: ReinforcementOptions,
    model: str | None = None,
    count: int = 1,
    seed: int = 0,
    device: Device = "auto",
    sink: Sink = silent,
) -> tuple[list[Episode], Any, World]:
    """One episode of each of the first problems of a stage, by the model of the recipe or another; its tokenizer; and
    the environments, which the caller closes."""
    loaded = stage_problems(options, seed)[:count]
    problems = opened_all(options.environment, [as_asked(problem) for problem in loaded], seed)
    settings = NativeOptions(sequences=min(1024, count))
    engine: Engine
    if model is not None:
        policy, engine = open_engine(model, device, seed, sink, settings)
    else:
        policy = build_policy(recipe.model, pick_device(device), recipe.run.seed)
        engine = make_engine(settings, policy, seed, sink)
    recipe.format.install(policy.tokenizer)
    assert options.rollout.max_tokens is not None, "a stage with an environment limits its turns"
    sampling = sampling_of(options, recipe.format, options.rollout.max_tokens, policy)
    scorer = Scorer(recipe.format, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, recipe.format, policy, sampling, seed)
    assert world is not None
    groups = sample_groups(engine, policy.tokenizer, scorer, sampling, problems, 1, world)
    return [episode for group in groups for episode in group], policy.tokenizer, world


COLOURS = {"prompt": "2", "sampled": "1;32", "observed": "36", "note": "33"}


def shown(episode: Episode, tokenizer: Any, is_coloured: bool) -> list[str]:
    """The lines of an episode: what was read and said, in the words of its ids."""

    def text(ids: Any) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def part(kind: str, label: str, words: str) -> list[str]:
        begin, end = (f"\x1b[{COLOURS[kind]}m", "\x1b[0m") if is_coloured else ("", "")
        words = visible(words)
        return [f"{begin}{label:>9} | {line}{end}" for line in words.split("\n")]

    lines = part("note", "problem", f"{episode.problem_id}, sample {episode.sample}")
    for number, turn in enumerate(episode.turns):
        lines += part("observed" if turn.extends else "prompt", "observed" if turn.extends else "prompt",
                      text(turn.context))  # fmt: skip
        lines += part("sampled", "sampled", text(turn.ids))
        facts = [f"turn {number + 1}", f"{len(turn.ids) - turn.given} tokens are learnt from", turn.finish]
        facts += [f"reward {turn.reward:g}"] if turn.reward is not None else []
        facts += ["the reply was cut"] if turn.cut else []
        lines += part("note", "", ", ".join(facts))
    last = episode.turns[-1]
    lines += part("observed", "unread", last.heard) if last.heard else []
    reward = "unknown" if episode.reward is None else f"{episode.reward:g}"
    lines += part("note", "outcome", f"reward {reward}, {episode.verdict}: {episode.reason}")
    return [*lines, ""]
