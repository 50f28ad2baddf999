"""`lemma env play RECIPE`: episodes of a recipe's environment, turn by turn."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, add_device, add_recipe
from lemma.core.errors import UserError, nearest
from lemma.core.events import Event, Said
from lemma.core.terminal import unescaped, visible

if TYPE_CHECKING:
    from lemma.engines.protocol import Engine
    from lemma.recipe import Recipe
    from lemma.rollouts import Episode, World
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

DESCRIPTION = """\
Play a few episodes as the reinforcement stage of a recipe would, and print them turn by turn: what the policy read,
what it sampled, which is what is learnt from, and what the environment answered. In colours on a terminal."""
COLOURS = {"prompt": "2", "sampled": "1;32", "observed": "36", "note": "33"}


def add(parser: Parser) -> None:
    add_recipe(parser)
    parser.add_argument("--model", metavar="MODEL", help="a run, a model folder or a hub name (default: the recipe's)")
    parser.add_argument("--stage", metavar="NAME", help="which stage of the recipe (default: the last of kind rl)")
    parser.add_argument("--problems", metavar="N", type=int, default=1, help="how many problems (default: 1)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another seed, other problems (default: 0)")
    add_device(parser)
    parser.add_argument("--colour", choices=["auto", "always", "never"], default="auto", help="when to use colours")


def run(args: argparse.Namespace) -> int:
    from lemma.recipe import load_recipe

    if args.problems < 1:
        raise UserError(f"--problems is {args.problems}", fix="write 1 or more")
    recipe = load_recipe(args.recipe, args.overrides)
    options = stage_of(recipe, args.stage)
    if options.environment.is_single_turn:
        raise UserError("this stage has no environment", fix="add one, for example `environment: higher_lower`")
    options.environment.check()
    episodes, tokenizer, world = _played(args, recipe, options)
    is_coloured = args.colour == "always" or (args.colour == "auto" and sys.stdout.isatty())
    for episode in episodes:
        print("\n".join(shown(episode, tokenizer, is_coloured)), file=unescaped(sys.stdout))
    world.close()
    return 0


def stage_of(recipe: Recipe, wanted: str | None) -> ReinforcementOptions:
    """The stage of this name, else the last one that reinforces."""
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

    stages = {name: one for name, one in recipe.stages.items() if isinstance(one, ReinforcementOptions)}
    if wanted is not None and wanted not in stages:
        raise UserError(f"the recipe has no stage '{wanted}' of kind rl", fix=nearest(wanted, stages))
    if not stages:
        raise UserError("the recipe has no stage of kind rl", fix="add one with an `environment`")
    return stages[wanted] if wanted is not None else list(stages.values())[-1]


def _played(
    args: argparse.Namespace, recipe: Recipe, options: ReinforcementOptions
) -> tuple[list[Episode], Any, World]:
    """One episode of each of the first problems, by the model of the recipe or another."""
    from lemma.data.choices import as_asked
    from lemma.engines import make_engine, open_engine
    from lemma.engines.engine_options import NativeOptions
    from lemma.environments.openings import opened_all
    from lemma.evaluation.diagnose import sample_groups
    from lemma.models.load_model import build_policy, pick_device
    from lemma.rollouts import Judge
    from lemma.stages.reinforcement.rl_problems import stage_problems
    from lemma.stages.reinforcement.speaking import make_world, sampling_of

    loaded = stage_problems(options, args.seed)[: args.problems]
    problems = opened_all(options.environment, [as_asked(problem) for problem in loaded], args.seed)
    settings = NativeOptions(sequences=min(1024, args.problems))
    engine: Engine
    if args.model is not None:
        policy, engine = open_engine(args.model, args.device, args.seed, _say, settings)
    else:
        policy = build_policy(recipe.model, pick_device(args.device), recipe.run.seed)
        engine = make_engine(settings, policy, args.seed, _say)
    recipe.format.install(policy.tokenizer)
    assert options.rollout.max_tokens is not None, "a stage with an environment limits its turns"
    sampling = sampling_of(options, recipe.format, options.rollout.max_tokens, policy)
    judge = Judge(recipe.format, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, recipe.format, policy, sampling, args.seed)
    assert world is not None
    groups = sample_groups(engine, policy.tokenizer, judge, sampling, problems, 1, world)
    return [episode for group in groups for episode in group], policy.tokenizer, world


def _say(event: Event) -> None:
    if isinstance(event, Said):
        print(f"lemma: {event.text}", file=sys.stderr)


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
