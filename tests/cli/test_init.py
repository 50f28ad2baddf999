"""`lemma init` and `lemma recipes`: what is written is a recipe that this version accepts, and it fits the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemma.cli import main
from lemma.cli.init import TASKS
from lemma.models.fitting import SHARE, USUAL, fit_memory, guess_shape
from lemma.models.memory import GIB, Shape
from lemma.models.model_options import TinyOptions
from lemma.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


def init(to: Path, **options: str) -> int:
    return main(["init", "--to", str(to), *(word for name, value in options.items() for word in (f"--{name}", value))])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("gpu", ["0", "12", "24", "80"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-1.5B-Instruct", "some/model-without-a-size"])
def test_every_answer_gives_a_recipe(task: str, gpu: str, model: str, tmp_path: Path) -> None:
    to = tmp_path / "recipe.yaml"
    assert init(to, task=task, model=model, data="rows.jsonl", gpu=gpu) == 0
    recipe = load_recipe(to)
    assert list(recipe.stages) == {"sft-rl": ["sft", "grpo"], "rl": ["grpo"], "preference": ["dpo"]}.get(task, [task])
    assert recipe.model.path == model
    assert "# " in to.read_text(), "commented"


@pytest.mark.parametrize("task", ["sft", "rl", "sft-rl"])
def test_the_built_in_model_runs_without_any_download(task: str, tmp_path: Path) -> None:
    to = tmp_path / "recipe.yaml"
    assert init(to, task=task, model="tiny", data="arithmetic") == 0
    assert load_recipe(to).model.path == "tiny"
    assert main(["plan", str(to)]) == 0


def test_questions_are_asked_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["nonsense", "rl", "Qwen/Qwen2.5-7B", "", "x", "16"])

    def answer(words: str) -> str:
        asked.append(words)
        return next(answers)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "--to", str(tmp_path / "r.yaml")]) == 0
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.model.path == "Qwen/Qwen2.5-7B" and recipe.model.lora is not None
    assert len(asked) == 6, "four questions, and two of them again"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": "x/y", "data": "d", "gpu": "1"}, "--task is missing; this is not a terminal"),
        (
            {"task": "rl"},
            "--model is missing; this is not a terminal, so nothing is asked: give --task, --model, --data",
        ),
        ({"task": "rl", "model": "x/y", "data": "d", "gpu": "-3"}, "--gpu is -3"),
        ({"task": "rl", "model": "tiny", "data": "gsm8k"}, "built-in"),
        ({"task": "rll", "model": "tiny"}, "did you mean 'rl'"),
    ],
)
def test_wrong_answers_are_one_sentence(
    options: dict[str, str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path / "r.yaml", **options) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "r.yaml").exists()


@pytest.mark.parametrize("task", ["preference", "sft-rl"])
def test_a_path_that_does_not_exist_is_told(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    told = {
        ("models/smol", "rwos.jsonl"): [
            "warning: there is no model folder models/smol; check the spelling",
            f"warning: the file or folder 'rwos.jsonl' does not exist; in {tmp_path}: did you mean 'rows.jsonl'?",
        ],
        ("./smol.gguf", "rows.jsonl"): ["warning: there is no model folder ./smol.gguf; check the spelling"],
        ("org/model-1B", "org/rows"): [],
        ("org/model-1B", "gsm8k"): [],
        ("org/model-1B", "./rows.jsonl"): [],
    }
    for number, ((model, data), warnings) in enumerate(told.items()):
        assert init(tmp_path / f"{number}.yaml", task=task, model=model, data=data, gpu="24") == 0
        wrote, *rest = capsys.readouterr().out.splitlines()
        assert wrote.startswith("wrote ") and rest == warnings


def test_an_existing_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "recipe.yaml"
    to.write_text("mine")
    assert init(to, task="rl", model="tiny", data="arithmetic") == 2
    assert main(["recipes", "demo", "--to", str(to)]) == 2
    assert to.read_text() == "mine" and "exists already" in capsys.readouterr().err


def test_more_memory_never_trains_fewer_weights() -> None:
    order = {"4bit": 0, "lora": 1, "full": 2}
    for shape in USUAL.values():
        fits = {gib: fit_memory(shape, gib * GIB, "bf16") for gib in (4, 8, 16, 24, 48, 80, 141, 640)}
        found = [order[fit.way] for fit in fits.values() if fit.fits]
        assert found == sorted(found)
        assert all(fit.planned <= SHARE * gib * GIB for gib, fit in fits.items() if fit.fits)
    assert fit_memory(Shape.of_tiny(TinyOptions()), 4 * GIB, "fp32").way == "full"
    assert not fit_memory(USUAL[72.0], 8 * GIB, "bf16").fits


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen2.5-1.5B-Instruct", 1.5), ("x/SmolLM2-135M", 0.5), ("meta/Llama-3.1-8B", 14.0), ("x/gpt2", None)],
)
def test_a_size_in_a_name(name: str, billions: float | None) -> None:
    assert guess_shape(name) == (USUAL[billions] if billions else None)


def test_published_recipes_are_listed_and_copied_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    *names, twins = [line for line in out.splitlines() if not line.startswith(" ")]
    assert names == [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    listed = " ".join(out.partition(twins)[2].split())
    assert listed == ", ".join(f"small/{path.stem}" for path in sorted((ROOT / "recipes" / "small").glob("*.yaml")))
    assert "LUFFY: in each group of eight" in out
    assert main(["recipes", "small/dpo", "--to", str(tmp_path / "mine.yaml")]) == 0
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "recipes" / "small" / "dpo.yaml").read_text()
    assert main(["recipes", "smal/dpo"]) == 2
    assert "did you mean 'small/dpo'" in capsys.readouterr().err
