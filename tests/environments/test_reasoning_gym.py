"""reasoning-gym: its generators load, pay for right answers, and do not pay for nonsense or run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.environments import Action, ReasoningGym
from lemma.plugins.reasoning_gym import EXECUTES, UNFIT, generators, is_harmless, scored

NONSENSE = ("no idea", "banana", "???", "")
# Its problems are made of other generators', which must be named.
OPTIONS: dict[str, dict[str, Any]] = {"composite": {"datasets": [{"name": "leg_counting"}]}}
# They keep no answer: any that fulfils the task is right.
WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
ITEMS = 4
# More than a second for a problem; the long test has them too.
SLOW = {"knight_swap", "zebra_puzzles"}


def gym(generator: str, **more: Any) -> ReasoningGym:
    return ReasoningGym(
        generator=generator, options=OPTIONS.get(generator, {}), **{"problems_per_split": ITEMS, "seed": 7} | more
    )


def measured(generator: str) -> tuple[float | None, float, bool]:
    """What a generator pays for its own answers at least and for nonsense at most, and whether nonsense breaks it."""
    dataset = gym(generator).dataset("train")
    entries = [dataset[number] for number in range(ITEMS)]
    golds = [scored("", dataset, str(one["answer"]), one) for one in entries if one["answer"] is not None]
    paid, breaks = 0.0, False
    for entry in entries:
        for answer in NONSENSE:
            try:
                paid = max(paid, scored("", dataset, answer, entry))
            except Exception:  # noqa: BLE001  (what is measured)
                breaks = True
    return min(golds, default=None), paid, breaks


def check(generator: str) -> None:
    gold, paid, breaks = measured(generator)
    assert (paid > 0.25 or breaks) == (generator in UNFIT), f"{generator} pays {paid} for nonsense, breaks: {breaks}"
    assert (gold is None) == (generator in WITHOUT_GOLD) and (gold is None or gold >= 0.99), f"{generator}: {gold}"


@pytest.mark.parametrize(
    "generator", [*UNFIT, "leg_counting", "countdown", "spiral_matrix", "figlet_font", "graph_color", "rush_hour"]
)
def test_what_scorers_pay(generator: str) -> None:
    check(generator)


def test_all_generators_load() -> None:
    for generator in set(generators()) - SLOW:
        gym(generator, allow_unfit=True, problems_per_split=1).check()


@pytest.mark.long
def test_what_all_scorers_pay() -> None:
    for generator in generators():
        check(generator)


def test_scorers_that_run_answers_are_known() -> None:
    import reasoning_gym

    folder = Path(reasoning_gym.__file__).parent
    found = {
        path.stem
        for path in folder.rglob("*.py")
        if any(call in path.read_text() for call in ("eval(answer)", "parse_expr(answer"))
    }
    assert found == EXECUTES


@pytest.mark.parametrize("generator", UNFIT)
def test_unfit_generators_are_refused(generator: str) -> None:
    with pytest.raises(UserError, match=r"unfit for training: its scorer .*`allow_unfit: true`"):
        gym(generator).check()
    gym(generator, allow_unfit=True).check()


def test_wrong_options_are_one_sentence() -> None:
    with pytest.raises(UserError, match="no generator 'leg_countin'; did you mean 'leg_counting'"):
        gym("leg_countin").check()
    with pytest.raises(UserError, match="leg_counting refuses its options: TypeError"):
        ReasoningGym(generator="leg_counting", options={"legs": 4}).check()


def test_problems_are_asked_and_answered() -> None:
    options = gym("leg_counting", seed=3)
    train, again, test = options.problems("train"), options.problems("train"), options.problems("test")
    assert train == again and len(train or ()) == ITEMS
    assert not {one.question for one in train or ()} & {one.question for one in test or ()}
    for problem in train or ():
        rewards = []
        for answer in (problem.gold, "no idea", None):
            world = options.make()
            world.reset(problem, 0)
            assert world.step(Action("...", answer=answer)).done
            rewards.append((world.score().reward, world.score().success))
        assert rewards == [(1.0, True), (0.0, False), (0.0, False)]


@pytest.mark.parametrize(
    ("answer", "harmless"),
    [
        ("(3 + 4) * 5 ** 2 - x^2 / 7", True),
        ("[[1, 0], [0, 1]]", True),
        ("['a', 'b']", True),
        ("-2*x*sin(3*x) + C", True),
        ("1 2 3", True),
        ("no idea", True),
        ("__import__('os').system('id')", False),
        ("open('gold.txt').read()", False),
        ("(lambda: 0)()", False),
        ("[x for x in (1,)]", False),
        ("().__class__", False),
        ("9**9**9**9", False),
        ("2**99999999", False),
        ("open('a') +", False),
        ("exec('x')", False),
    ],
)
def test_answers_that_would_run_get_nothing(answer: str, harmless: bool) -> None:
    assert is_harmless(answer) == harmless
