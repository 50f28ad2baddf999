"""The recipe: stages and formats by name, a resolved form that says everything, and a digest of what matters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lemma.config import Options
from lemma.config.describe import as_help, sections
from lemma.config.shape import annotation_of, classes_below
from lemma.core.errors import UserError
from lemma.formats.r1_zero import R1Zero
from lemma.recipe import STAGES, Recipe, load_recipe
from lemma.stages.supervised_options import SupervisedOptions

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SMALL = "stages: {sft: {steps: 3, validation: {data: {cache: c}}}, second: {kind: supervised}}\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_there_are_recipes() -> None:
    names = {path.relative_to(ROOT / "recipes").as_posix() for path in RECIPES}
    assert {"demo.yaml", "luffy_sft.yaml", "dpo.yaml", "small/dpo.yaml", "small/own_samples_dpo.yaml"} <= names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_is_valid_and_resolves_to_itself(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(resolved)
    assert again == recipe
    assert again.digest() == recipe.digest()
    assert again.to_yaml() == recipe.to_yaml()


def test_the_settings_of_the_systems() -> None:
    luffy = load_recipe(ROOT / "recipes/luffy_sft.yaml")
    assert luffy.model.override == {"rope_theta": 40000, "max_position_embeddings": 16384}
    stage = load_recipe(ROOT / "recipes/openmath_sft.yaml").stages["sft"]
    assert (stage.optim.name, stage.optim.lr, stage.optim.warmup) == ("adamw_8bit", 2e-4, 5)


def test_stages_keep_their_order_and_know_their_kind(small: Path) -> None:
    stages = load_recipe(small).stages
    assert list(stages) == ["sft", "second"]
    assert all(isinstance(stage, SupervisedOptions) for stage in stages.values())


@pytest.mark.parametrize(
    "written", ["stages: {supervised: {steps: 1}}", "stages: {sft: supervised}", "stages: {sft: {}}"]
)
def test_a_kind_that_the_name_tells_need_not_be_written(written: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(written, encoding="utf-8")
    assert [stage.kind for stage in load_recipe(path).stages.values()] == ["supervised"]


def test_a_format_is_a_name_or_a_mapping(small: Path) -> None:
    assert load_recipe(small).format == R1Zero()
    assert load_recipe(small, ["format=r1_zero", "format.preamble=false"]).format == R1Zero(preamble=False)
    assert load_recipe(small, ["format={name: r1_zero, preamble: no}"]).format == R1Zero(preamble=False)
    assert load_recipe(small, ["format=working_out", "format.start=<w>"]).format.name == "working_out"


def test_options_of_one_format_are_not_those_of_another(small: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key 'format\.preamble'"):
        load_recipe(small, ["format=boxed", "format.preamble=false"])


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere",
        "run.tensorboard=false",
        "run.wandb=project",
        "stages.sft.checkpoint.keep=9",
        "stages.sft.data.cache=elsewhere",
        "stages.sft.validation.data.cache=elsewhere",
    ],
)
def test_what_changes_no_result_changes_no_digest(override: str, small: Path) -> None:
    assert load_recipe(small, [override]) != load_recipe(small)
    assert load_recipe(small, [override]).digest() == load_recipe(small).digest()


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "format.preamble=false",
        "model.path=x",
        "stages.sft.optim.lr=0",
        "stages.second.data.arithmetic.seed=1",
        "stages.second.start_from=sft",
    ],
)
def test_what_changes_results_changes_the_digest(override: str, small: Path) -> None:
    assert load_recipe(small, [override]).digest() != load_recipe(small).digest()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stages.second.start_from=sfft", "there is no earlier stage 'sfft'; did you mean 'sft'?"),
        ("stages.second.start_from=second", "there is no earlier stage 'second'; write one of: sft"),
        (
            "stages.sft.start_from=second",
            "there is no earlier stage 'second'; remove start_from: this is the first stage",
        ),
    ],
)
def test_a_stage_starts_from_an_earlier_one_only(override: str, sentence: str, small: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(small, [override])
    key = override.partition("=")[0]
    assert str(caught.value) == f"--set {override}: {key}: {sentence}"


def test_the_line_of_a_wrong_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("stages:\n  sft: {}\n  grpo:\n    steps: 3\n    start_from: stf\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"r\.yaml:5: stages\.grpo\.start_from: there is no earlier stage 'stf'; did you"
    ):
        load_recipe(path)


def test_a_digest_is_the_same_in_every_process(small: Path) -> None:
    program = f"from lemma.recipe import load_recipe; print(load_recipe({str(small)!r}).digest())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == load_recipe(small).digest()


def test_validating_and_helping_import_nothing_heavy(small: Path) -> None:
    program = f"""
import sys
from lemma.cli import main
assert main(["train", {str(small)!r}, "--dry-run", "--set", "run.dir={small.parent}/run"]) == 0
assert main(["plan", {str(small)!r}]) == 0
assert main(["train", "--help"]) == 0
heavy = {{"torch", "transformers", "datasets", "pyarrow", "sympy", "peft", "huggingface_hub"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_every_option_has_a_meaning_and_fits_the_terminal() -> None:
    for section in sections(Recipe):
        assert section.meaning, section.title
        for entry in section.entries:
            assert entry.meaning, f"{section.title}.{entry.name}"
    assert max(len(line) for line in as_help(Recipe).splitlines()) <= 100


def test_a_section_left_out_is_the_same_as_an_empty_one() -> None:
    for section in _classes(Recipe):
        for name, info in section.model_fields.items():
            default = info.get_default(call_default_factory=True)
            if isinstance(default, Options):
                assert default == type(default)(), (
                    f"{section.__name__}.{name} has defaults that its class does not have"
                )


def _classes(options: type[Options]) -> set[type[Options]]:
    below = {inner for info in options.model_fields.values() for _, inner in classes_below(annotation_of(info))}
    return {options}.union(*(_classes(inner) for inner in below))


def test_the_help_names_every_option_of_every_stage_and_format() -> None:
    described = {(section.title, entry.name) for section in sections(Recipe) for entry in section.entries}
    for kind, options in STAGES.items():
        for name in options.model_fields:
            assert (f"stages.NAME (kind: {kind})", name) in described
    assert ("format (name: working_out)", "solution_start") in described
    assert ("stages.NAME.data.mix.N", "count") in described
    assert ("model.lora", "alpha") in described


def test_the_reference_page_is_current() -> None:
    from lemma.cli.reference import page

    committed = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert committed == page(), "the page is out of date; run `make docs`"


@pytest.mark.parametrize("name", ["ppo", "luffy", "dapo", "grpo", "kto", "dpo"])
@pytest.mark.parametrize("says_kind", [True, False])
def test_a_stage_called_like_an_algorithm_is_that_algorithm(name: str, says_kind: bool) -> None:
    kind = "preference" if name in ("kto", "dpo") else "rl"
    values = {"data": {"source": "x.jsonl"}} | ({"kind": kind} if says_kind else {})
    stage = Recipe.model_validate({"stages": {name: values}}).stages[name]
    assert (stage.kind, stage.algorithm.name) == (kind, name)


def test_options_beside_the_algorithm_that_a_name_tells() -> None:
    recipe = Recipe.model_validate(
        {"stages": {"ppo": {"algorithm": {"epochs": 2}}, "dpo": {"algorithm": {"beta": 0.5}}}}
    )
    ppo, dpo = recipe.stages["ppo"].algorithm, recipe.stages["dpo"].algorithm  # type: ignore[attr-defined]
    assert (ppo.name, ppo.epochs, dpo.name, dpo.beta) == ("ppo", 2, "dpo", 0.5)
    other = Recipe.model_validate({"stages": {"ppo": {"algorithm": {"name": "grpo"}}}}).stages["ppo"]
    assert other.algorithm.name == "grpo"  # type: ignore[attr-defined]


def test_what_a_stage_says_counts_more_than_its_name() -> None:
    stages = {"ppo": {"kind": "supervised"}, "luffy": {"algorithm": "rloo"}}
    recipe = Recipe.model_validate({"stages": stages})
    assert recipe.stages["ppo"].kind == "supervised" and recipe.stages["luffy"].algorithm.name == "rloo"


def test_the_reference_tells_rewards_apart_and_says_what_to_write() -> None:
    titles = [section.title for section in sections(Recipe) if section.path == "stages.NAME.rewards.N"]
    assert len(set(titles)) == len(titles) and "stages.NAME.rewards.N (name: trl)" in titles
    kinds = {entry.kind for section in sections(Recipe) for entry in section.entries}
    assert not [kind for kind in kinds if "typing." in kind or "collections." in kind]
