"""The Python interface: light to import, typed, and documented by examples that run."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import lemma
from lemma.config.registry import load_place

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "python.md"
HEAVY = ("torch", "transformers", "numpy", "pydantic", "sympy", "datasets")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_importing_lemma_loads_nothing_heavy() -> None:
    code = f"import lemma, sys; dir(lemma); print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_a_clone_next_to_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    (tmp_path / "lemma" / "lemma").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import lemma\nprint(lemma.train.__name__)\n")
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "train"


def test_a_recipe_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: {sft: {steps: 3}}\n")
    code = f"import lemma, sys; lemma.load_recipe({str(tmp_path / 'recipe.yaml')!r}); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"


SCRIPT = """
import lemma

def by_length(completions, **columns):
    return [float(len(one)) for one in completions]

def verdict(item):
    return item.verdict.right

def brought(*rewards):
    stage = {"kind": "rl", "rewards": list(rewards)}
    try:
        found = lemma.api.train_call._recipe({"stages": {"rl": stage}}, {})
    except lemma.UserError as error:
        return str(error)
    return [(reward.name, reward.weight, reward.function) for reward in found.stages["rl"].rewards]

if __name__ == "__main__":
    import lemma.api.train_call
    from lemma.config.registry import load_place

    print(brought(by_length, {"name": verdict, "weight": 0.5}))
    assert load_place(f"{__file__}:verdict") is verdict
    print(brought(lambda item: 1.0))
"""


def test_functions_of_a_script_stand_in_a_recipe(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path)
    rewards, refused = found.stdout.splitlines()
    assert rewards == str([("trl", 1.0, f"{script}:by_length"), ("custom", 0.5, f"{script}:verdict")])
    assert refused.startswith("<lambda> is not at the top of a Python file") and "`my_parts.py:NAME`" in refused


@pytest.mark.parametrize("call", ["lemma.train({})", "lemma.evaluate('tiny', 'gsm8k')"])
def test_a_script_that_a_run_imports_does_not_run_again(tmp_path: Path, call: str) -> None:
    script, name = tmp_path / "script.py", call.partition("(")[0]
    script.write_text(f"import lemma\n\n{call}\n\ndef part():\n    ...\n")
    with pytest.raises(lemma.UserError) as caught:
        load_place(f"{script}:part")
    assert str(caught.value) == (
        f"{script}:3: this file cannot be imported: it calls {name} on import, and a worker process imports it to load "
        'your function; write `if __name__ == "__main__":` above what the script does'
    )


def test_rows_stand_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from pandas import DataFrame

    from lemma.api.train_call import _recipe
    from lemma.data.data_options import ArithmeticOptions
    from lemma.data.load_rows import load_rows

    monkeypatch.chdir(tmp_path)
    rows = [{"question": "2 + 3 ?", "answer": 5}, {"question": "é ?", "answer": 6}]

    def source(given: object, **overrides: object) -> str:
        recipe = {"run": {"dir": "runs/a"}, "stages": {"rl": {"data": {"source": given}}}}
        found = _recipe(recipe, overrides).stages["rl"]
        assert [problem.gold for problem in load_rows(found.data, seed=0)] == ["5", "6"]
        return str(found.data.source)

    first = source(rows)
    assert first == source(row for row in rows) == source(Dataset.from_list(rows)) == source(DataFrame(rows)), (
        "the same rows are the same data, for a run that goes on"
    )
    assert (
        Path(first).parent == Path("runs/a.rows")
        and Path(first).name != Path(source([rows[0], rows[1] | {"level": 1}])).name
    )
    gap = DataFrame([rows[0], rows[1] | {"hints": ["add"]}])
    assert source(gap) == source([rows[0] | {"hints": None}, rows[1] | {"hints": ["add"]}])
    assert Path(source(rows, **{"run.dir": "runs/b/"})).parent == Path("runs/b.rows")
    assert source("rows.jsonl", **{"stages.rl.data.source": rows}) == first
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Path(source(rows, **{"run.dir": "~/c"})).parent == tmp_path / "home" / "c.rows"
    for wrong, sentence in (
        ([], "holds no rows"),
        (["2 + 3 ?"], "row 1 .* not a mapping"),
        ([{"a": {1}}], "row 1 .* set"),
        (ArithmeticOptions(), "'stages.rl.data.source' cannot be .*; write text"),
    ):
        with pytest.raises(lemma.UserError, match=sentence):
            source(wrong)


def test_every_public_name_is_there() -> None:
    assert sorted(lemma._HOMES) == sorted(lemma.__all__) and set(lemma.__all__) <= set(dir(lemma))
    for name in lemma.__all__:
        assert getattr(lemma, name).__module__.startswith("lemma."), name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        lemma.trian  # type: ignore[attr-defined]  # noqa: B018
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"lemma.{name}" in page or f"`{name}`" in page for name in lemma.__all__ if name[0].islower())


@pytest.mark.slow(15)
def test_the_examples_of_the_page_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(PAGE):
        exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "95% interval" in said and "right" in said
    run = names["run"]
    assert isinstance(run, lemma.Run) and run.model == Path("runs/first/stages/sft/final").absolute()
    assert [row.step for row in run.metrics("sft", "train")] == [1, 2, 3, 4] and run.metrics("rl") == []
    assert run.recipe.stages["sft"].optim.lr == 2e-3
    again = lemma.train(names["recipe"], {"stages.sft.optim.lr": 2e-3}, console=False)  # type: ignore[arg-type]
    assert again.metrics() == run.metrics(), "a finished run is left as it is"
    assert (tmp_path / "evaluations/first/results.json").is_file()


@pytest.mark.parametrize(
    ("recipe", "overrides", "sentence"),
    [
        ({"stages": {"sft": {"step": 3}}}, {}, "the recipe: unknown key 'stages.sft.step'; did you mean 'steps'?"),
        ({"stages": {"sft": {}}}, {"stages.sft.steps": "x"}, "--set stages.sft.steps=\"x\": 'stages.sft.steps' cannot"),
        ("nothere.yaml", {}, "nothere.yaml"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(recipe: object, overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(lemma.UserError) as caught:
        lemma.train(recipe, overrides)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"samples": 0}, "samples is 0; write 1 or more"),
        ({"samples": 2, "temperature": 0.0}, "samples at temperature 0 are all the same"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"engine": "fast"}, "there is no engine 'fast'; write one of: native"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(lemma.UserError) as caught:
        lemma.generate("nowhere/nothing", "2 + 2 ?", **arguments)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


def test_wrong_settings_of_an_evaluation_are_told_first() -> None:
    with pytest.raises(lemma.UserError, match="limit is 0; write 1 or more"):
        lemma.evaluate("nowhere/nothing", "arithmetic", limit=0)
    with pytest.raises(lemma.UserError, match="there is no benchmark 'gsm8'"):
        lemma.evaluate("nowhere/nothing", "gsm8")
    with pytest.raises(lemma.UserError, match="is not the folder of a run"):
        lemma.load_run("nowhere")


def test_models_of_earlier_evaluations_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may measure one model after the other; each of them may fill most of a GPU."""
    from lemma.models.policy import Policy

    made: list[weakref.ref[Policy]] = []
    alive: list[int] = []
    init = Policy.__init__

    def note(self: Policy, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        made.append(weakref.ref(self))
        alive.append(sum(one() is not None for one in made))

    monkeypatch.setattr(Policy, "__init__", note)
    gc.collect()
    gc.disable()  # when it would come by itself is a matter of chance
    try:
        for number in range(3):
            lemma.evaluate("tiny", "arithmetic", device="cpu", limit=2, max_tokens=2, out=tmp_path / str(number))
    finally:
        gc.enable()
    assert alive == [1, 1, 1]
