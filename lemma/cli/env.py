"""`lemma env play | setup | test`: look at episodes turn by turn, install an environment, try it before training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_device, add_recipe, say
from lemma.core.errors import UserError
from lemma.core.terminal import unescaped

if TYPE_CHECKING:
    from lemma.recipe import Recipe
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

PLAY = """\
Play a few episodes as the reinforcement stage of a recipe would, and print them turn by turn: what the policy read,
what it sampled, which is what is learnt from, and what the environment answered. In colours on a terminal."""
SETUP = """\
Install an environment that cannot share Lemma's own packages. AppWorld gets a virtual environment in DIR/venv;
its tasks belong in DIR/data, and the command says how to get them."""
TEST = """\
Try the environment of a recipe with scripted answers: that every call gives what it should within its deadline, that an
episode which is played again gives the same replies, and that nothing pays for saying nothing. `lemma env test
appworld` tries AppWorld without a recipe; `--set root=DIR` says where it is."""
SEED = "another seed, other problems (default: 0)"


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("env", help="look at an environment", description="Play and try environments.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    purpose = "print episodes turn by turn: what was read, sampled and learnt from"
    play = actions.add_parser("play", help=purpose, description=PLAY)
    add_recipe(play)
    play.add_argument("--model", metavar="MODEL", help="a run, a model folder or a hub name (default: the recipe's)")
    _add_problems(play, 1)
    play.add_argument("--seed", metavar="S", type=int, default=0, help=SEED)
    add_device(play)
    play.add_argument("--colour", choices=["auto", "always", "never"], default="auto", help="when to use colours")
    play.set_defaults(run=run_play)
    purpose = "install an environment that wants a virtual environment of its own"
    setup = actions.add_parser("setup", help=purpose, description=SETUP)
    setup.add_argument("name", metavar="NAME", choices=["appworld"], help="appworld")
    setup.add_argument("--dir", metavar="DIR", default="appworld", help="its folder (default: appworld)")
    setup.add_argument("--python", metavar="PYTHON", default=sys.executable, help="which Python (default: Lemma's)")
    setup.set_defaults(run=run_setup)
    purpose = "try an environment: its calls, its deadlines, and whether an episode repeats"
    test = actions.add_parser("test", help=purpose, description=TEST)
    add_recipe(test)
    _add_problems(test, 4)
    test.add_argument("--answer", dest="answers", metavar="TEXT", action="append", default=[],
                      help="what is said, turn by turn; may be repeated (default: a few plain answers)")  # fmt: skip
    test.add_argument("--seed", metavar="S", type=int, default=0, help=SEED)
    test.set_defaults(run=run_test)


def _add_problems(parser: Parser, count: int) -> None:
    parser.add_argument("--stage", metavar="NAME", help="which stage of the recipe (default: the last of kind rl)")
    told = f"how many problems (default: {count})"
    parser.add_argument("--problems", metavar="N", type=int, default=count, help=told)


def _stage(args: argparse.Namespace) -> tuple[Recipe, ReinforcementOptions]:
    """The recipe, and the stage of it whose environment this is about."""
    from lemma.recipe import load_recipe

    if args.problems < 1:
        raise UserError(f"--problems is {args.problems}", fix="write 1 or more")
    recipe = load_recipe(args.recipe, args.overrides)
    options = recipe.reinforcing(args.stage)
    if options.environment.is_single_turn:
        raise UserError("this stage has no environment", fix="add one, for example `environment: higher_lower`")
    return recipe, options


def run_play(args: argparse.Namespace) -> int:
    from lemma.api.play_call import played, shown

    recipe, options = _stage(args)
    options.environment.check()
    episodes, tokenizer, world = played(recipe, options, args.model, args.problems, args.seed, args.device, say)
    is_coloured = args.colour == "always" or (args.colour == "auto" and sys.stdout.isatty())
    for episode in episodes:
        print("\n".join(shown(episode, tokenizer, is_coloured)), file=unescaped(sys.stdout))
    world.close()
    return 0


def run_setup(args: argparse.Namespace) -> int:
    from lemma.plugins.appworld.appworld_setup import data_advice, set_up

    root = Path(args.dir).expanduser()
    venv = root / "venv"
    root.mkdir(parents=True, exist_ok=True)
    set_up(venv, args.python)
    if (root / "data" / "tasks").is_dir():
        print(f"Its tasks are in {root / 'data'}. Try it: lemma env test appworld --set root={root}")
    else:
        print("\n".join(data_advice(root, venv)))
    return 0


def run_test(args: argparse.Namespace) -> int:
    if args.recipe == "appworld":
        from lemma.plugins.appworld.appworld_trial import options_of, try_appworld

        good = True
        for is_right, line in try_appworld(options_of(args.overrides)):
            print(f"{'ok   ' if is_right else 'WRONG'} {line}")
            good &= is_right
        return 0 if good else 1
    from lemma.data.choices import as_asked
    from lemma.environments.trial import try_out
    from lemma.stages.reinforcement.rl_problems import stage_problems

    _, options = _stage(args)
    environment = options.environment
    if not environment.is_stepped:
        raise UserError(f"environment {environment.name} is not stepped", fix="`lemma env play` shows an episode")
    environment.check()
    problems = [as_asked(problem) for problem in stage_problems(options, args.seed)[: args.problems]]
    findings = try_out(environment, problems, args.seed, args.answers)
    print(f"environment {environment.name}, {len(problems)} problems\n")
    for one in findings:
        print(f"  {one.level:<4} {one.topic:<8} {one.text}")
    return int(any(one.level == "BAD" for one in findings))
