"""`lemma env test RECIPE`: try the environment of a recipe before anything is trained in it."""

from __future__ import annotations

import argparse

from lemma.cli.parser import Parser, add_recipe
from lemma.core.errors import UserError

DESCRIPTION = """\
Try the environment of a recipe with scripted answers: that every call gives what it should within its deadline, that an
episode which is played again gives the same replies, and that nothing pays for saying nothing. `lemma env test
appworld` tries AppWorld without a recipe; `--set root=DIR` says where it is."""


def add(parser: Parser) -> None:
    add_recipe(parser)
    parser.add_argument("--stage", metavar="NAME", help="which stage of the recipe (default: the last of kind rl)")
    parser.add_argument("--problems", metavar="N", type=int, default=4, help="how many problems (default: 4)")
    parser.add_argument("--answer", dest="answers", metavar="TEXT", action="append", default=[],
                        help="what is said, turn by turn; may be repeated (default: a few plain answers)")  # fmt: skip
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another seed, other problems (default: 0)")


def run(args: argparse.Namespace) -> int:
    if args.recipe == "appworld":
        from lemma.cli import env_test_appworld

        return env_test_appworld.run(args.overrides)
    from lemma.cli.env_play import stage_of
    from lemma.data.choices import as_asked
    from lemma.environments.trial import try_out
    from lemma.recipe import load_recipe
    from lemma.stages.reinforcement.rl_problems import stage_problems

    if args.problems < 1:
        raise UserError(f"--problems is {args.problems}", fix="write 1 or more")
    environment = (options := stage_of(load_recipe(args.recipe, args.overrides), args.stage)).environment
    if environment.is_single_turn:
        raise UserError("this stage has no environment", fix="add one, for example `environment: higher_lower`")
    if not environment.is_stepped:
        raise UserError(f"environment {environment.name} is not stepped", fix="`lemma env play` shows an episode")
    environment.check()
    problems = [as_asked(problem) for problem in stage_problems(options, args.seed)[: args.problems]]
    findings = try_out(environment, problems, args.seed, args.answers)
    print(f"environment {environment.name}, {len(problems)} problems\n")
    for one in findings:
        print(f"  {one.level:<4} {one.topic:<8} {one.text}")
    return int(any(one.level == "BAD" for one in findings))
