"""Wrong commands, arguments and files get one sentence; nothing is written, nothing half done."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lemma.cli import main
from lemma.runs.run_options import BOTH_LENGTHS
from tests.config.refusals import complaint, swap

pytestmark = pytest.mark.usefixtures("recipe_folder")

# What is added to `lemma train recipe.yaml`, and the sentence it gets.
ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "--set without value": (
        ["--set", "run.seed"],
        "--set run.seed: this is not KEY=VALUE; write it like `--set run.seed=1`",
    ),
    "--set without key": (["--set", "=1"], "--set =1: this is not KEY=VALUE; write it like `--set run.seed=1`"),
    "--set with two dots": (
        ["--set", "run..seed=1"],
        "--set run..seed=1: this is not KEY=VALUE; write it like `--set run.seed=1`",
    ),
    "--set forgotten": (["run.seed=1"], "'run.seed=1' has no --set before it; write `--set run.seed=1`"),
    "--set of an unknown key": (
        ["--set", "run.sead=1"],
        "--set run.sead=1: unknown key 'run.sead'; did you mean 'seed'?",
    ),
    "--set of a key elsewhere": (
        ["--set", "stages.sft.lr=1"],
        "--set stages.sft.lr=1: unknown key 'stages.sft.lr'; write it as 'stages.sft.optim.lr'",
    ),
    "--set of an unknown stage": (
        ["--set", "stages.stf.steps=1"],
        "--set stages.stf.steps=1: there is no 'stages.stf'; did you mean 'sft'?",
    ),
    "--set below a value": (
        ["--set", "stages.sft.optim.lr.max=1"],
        "--set stages.sft.optim.lr.max=1: nothing stands below 'stages.sft.optim.lr', which is 5e-06;"
        " set 'stages.sft.optim.lr' itself",
    ),
    "--set below a value not given": (
        ["--set", "run.device.name=cpu"],
        "--set run.device.name=cpu: nothing stands below 'run.device'; set 'run.device' itself",
    ),
    "--set past the end of a list": (
        ["--set", "stages.sft.data.mix.1.count=1"],
        "--set stages.sft.data.mix.1.count=1: 'stages.sft.data.mix' has no item '1'; write 0",
    ),
    "--set of a list by name": (
        ["--set", "stages.sft.data.mix.count=1"],
        "--set stages.sft.data.mix.count=1: 'stages.sft.data.mix' has no item 'count'; write 0",
    ),
    "--set in an empty list": (
        ["--set", "model.lora.targets=[]", "--set", "model.lora.targets.0=q_proj"],
        "--set model.lora.targets.0=q_proj: 'model.lora.targets' is an empty list;"
        " set the whole of it: model.lora.targets=[...]",
    ),
    "--set to a wrong value": (
        ["--set", "stages.sft.optim.lr=fast"],
        "--set stages.sft.optim.lr=fast: 'stages.sft.optim.lr' cannot be 'fast'; write a number of at least 0",
    ),
    "--set to half a mapping": (
        ["--set", "model.lora={r: 2"],
        "--set model.lora={r: 2: not valid YAML at column 1: the mapping that opens here is not closed;"
        " repair the value or put it in quotes",
    ),
    "--set against the recipe": (
        ["--set", "stages.sft.epochs=2"],
        f"--set stages.sft.epochs=2: stages.sft: {BOTH_LENGTHS}",
    ),
    "--set against the recipe, and another that is right": (
        ["--set", "stages.sft.epochs=2", "--set", "stages.sft.log_every=5"],
        f"--set stages.sft.epochs=2: stages.sft: {BOTH_LENGTHS}",
    ),
    "--skip of an unknown stage": (["--skip", "stf"], "the recipe has no stage 'stf'; did you mean 'sft'?"),
    "--only of an unknown stage": (["--only", "rl"], "the recipe has no stage 'rl'; write one of: sft"),
    "--skip and --only": (
        ["--skip", "sft", "--only", "sft"],
        "skip and only exclude each other; give one of the two",
    ),
    "--skip of everything": (["--skip", "sft"], "skip leaves no stage to run; skip fewer of them"),
    "unknown option": (["--dryrun"], "`lemma train` has no option --dryrun; did you mean '--dry-run'?"),
    "no value": (["--only"], "argument --only: expected one argument; `lemma train --help` shows how"),
    "two recipes": (
        ["other.yaml"],
        "`lemma train` does not know what to do with 'other.yaml'; `lemma train --help` shows how",
    ),
}

# A whole command line, and the sentence it gets.
COMMANDS: dict[str, tuple[list[str], str]] = {
    "misspelt command inside a command": (
        ["data", "shwo", "arithmetic"],
        "`lemma data` does not know 'shwo'; did you mean 'show'?",
    ),
    "unknown option of a command inside a command": (
        ["data", "show", "arithmetic", "--formt", "xml"],
        "`lemma data show` has no option --formt; did you mean '--format'?",
    ),
    "misspelt command": (["trian", "recipe.yaml"], "'trian' is not a command; did you mean 'train'?"),
    "command forgotten": (["recipe.yaml"], "'recipe.yaml' is not a command; write `lemma train recipe.yaml`"),
    "recipe forgotten": (["train"], "the following arguments are required: RECIPE; `lemma train --help` shows how"),
    "no such recipe": (["train", "recipes.yaml"], "there is no recipe recipes.yaml; did you mean recipe.yaml?"),
    "ending forgotten": (["train", "recipe"], "there is no recipe recipe; did you mean recipe.yaml?"),
    "no such folder": (
        ["train", "x/recipe.yaml"],
        "there is no recipe x/recipe.yaml; the folder x does not exist either",
    ),
    "a folder": (["train", "folder.yaml"], "folder.yaml is a folder, not a recipe; name a .yaml file in it"),
    "another ending": (
        ["train", "recipe.txt"],
        "a recipe is a YAML or JSON file, and recipe.txt is not; name a file that ends in .yaml, .yml or .json",
    ),
    "not text": (["train", "latin.yaml"], "latin.yaml:2: this line is not UTF-8 text; save the file as UTF-8"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    added, sentence = ARGUMENTS[name]
    assert complaint(["train", "recipe.yaml", *added], capsys) == sentence


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.yaml").mkdir()
    Path("recipe.txt").write_text("{}", encoding="utf-8")
    Path("latin.yaml").write_bytes(b"run:\n  dir: \xe9t\xe9\n")
    arguments, sentence = COMMANDS[name]
    assert complaint(arguments, capsys) == sentence


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("run.dir=a\0b", "a path cannot contain a null character"),
        ("run.dir=" + "a" * 201, "a folder's name has at most 200 bytes"),
        ("stages={" + "s" * 65 + ": {kind: supervised, steps: 1}}", "the name of a stage has at most 64 letters"),
    ],
    ids=["zero byte", "long folder", "long stage"],
)
def test_names_that_no_file_can_have(value: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in complaint(["train", "recipe.yaml", "--dry-run", "--set", value], capsys)


def test_a_tilde_is_the_home_folder(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(recipe_folder / "home"))
    main(["train", "recipe.yaml", "--dry-run", "--set", "run.dir=~/run"])
    assert (recipe_folder / "home" / "run" / "recipe.resolved.yaml").is_file()
    assert not (recipe_folder / "~").exists()


def test_a_mistake_of_the_file_is_not_blamed_on_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(swap("steps: 10", "steps: 10\n    epochs: 2"), encoding="utf-8")
    arguments = ["train", "recipe.yaml", "--set", "stages.sft.log_every=5"]
    assert complaint(arguments, capsys) == f"recipe.yaml:7: stages.sft: {BOTH_LENGTHS}"


def test_a_file_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as unreadable_even_for_root:
        unreadable_even_for_root.bind("door.yaml")
        assert complaint(["train", "door.yaml"], capsys) == (
            "door.yaml: cannot read the recipe: No such device or address; check its permissions"
        )


def test_a_run_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("", encoding="utf-8")
    arguments = ["train", "recipe.yaml", "--dry-run", "--set", "run.dir=file/run"]
    assert complaint(arguments, capsys) == (
        "file/run/recipe.resolved.yaml: cannot write the resolved recipe: Not a directory;"
        " name another folder as `run.dir`"
    )
