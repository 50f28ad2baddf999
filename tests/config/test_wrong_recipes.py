"""Wrong input gets one sentence: what is wrong, where, what to write instead. Nothing is written, nothing half done."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lemma import formats
from lemma.cli import main

GOOD = """\
run: {dir: out, seed: 1}
model:
  path: tiny
  lora: {r: 8}
format: r1_zero
stages:
  sft:
    steps: 10
    optim: {lr: 5e-6}
    data: {mix: [{source: a.jsonl, count: 2}]}
"""

FORMATS = ", ".join(sorted(formats.FORMATS))
NEEDS_STAGE = "a recipe needs at least one stage; write for example `stages: {sft: {steps: 100}}`"
NAMED = "every stage has a name; write for example `stages: {sft: {steps: 100}}`"


def swap(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, f"{old!r} must stand once in the recipe"
    return GOOD.replace(old, new)


# The recipe, and the sentence it gets.
RECIPES: dict[str, tuple[str, str]] = {
    # not YAML, or not a recipe
    "empty file": ("", "recipe.yaml: the recipe is empty; `lemma train --help` lists what can be written in it"),
    "only comments": (
        "# later\n",
        "recipe.yaml: the recipe is empty; `lemma train --help` lists what can be written in it",
    ),
    "a list": ("- run\n", "recipe.yaml:1: the recipe is a list, not `key: value` lines; write for example `run:`"),
    "a word": (
        "hello",
        "recipe.yaml:1: the recipe is a single value, not `key: value` lines; write for example `run:`",
    ),
    "tab": (
        swap("    steps: 10", "\tsteps: 10"),
        "recipe.yaml:8: not valid YAML at column 1: there is a tab here; indent with spaces",
    ),
    "no space after colon": (
        swap("steps: 10", "steps:10"),
        "recipe.yaml:8: not valid YAML at column 11: no space follows the ':'; put one there",
    ),
    "no space after the only colon": (
        "stages:\n  sft:\n    steps:10\n",
        "recipe.yaml:2: 'stages.sft' cannot be 'steps:10'; put a space after the ':'",
    ),
    "no colon": (
        swap("    steps: 10\n", "    steps\n"),
        "recipe.yaml:8: not valid YAML at column 10: no ':' follows this key; put one there",
    ),
    "colon in text": (
        swap("path: tiny", "path: tiny: the small one"),
        "recipe.yaml:3: not valid YAML at column 13: a ':' is not expected here;"
        " put a value that holds ': ' in quotes, or repair the indentation",
    ),
    "deeper than the line above": (
        swap("    steps: 10", "   steps: 10"),
        "recipe.yaml:9: not valid YAML at column 5:"
        " this line is indented deeper than the one above, which has a value already; align the two",
    ),
    "less deep than the line above": (
        swap("    optim: {lr", "   optim: {lr"),
        "recipe.yaml:9: not valid YAML at column 4: this line is not indented like the ones around it;"
        " align it with them",
    ),
    "open bracket": (
        swap("seed: 1}", "seed: 1"),
        "recipe.yaml:1: not valid YAML at column 6: the mapping that opens here is not closed;"
        " add the missing '}' or ','",
    ),
    "open list": (
        swap("count: 2}]}", "count: 2}}"),
        "recipe.yaml:10: not valid YAML at column 17: the list that opens here is not closed;"
        " add the missing ']' or ','",
    ),
    "open quote": (
        swap("path: tiny", "path: 'tiny"),
        "recipe.yaml:3: not valid YAML at column 9: the text that opens here has no closing quote; close it",
    ),
    "reserved character": (
        swap("path: tiny", "path: @tiny"),
        "recipe.yaml:3: not valid YAML at column 9: text cannot start with this character; put it in quotes",
    ),
    "star": (
        swap("path: tiny", "path: *tiny"),
        "recipe.yaml:3: not valid YAML at column 9: this *alias has no &anchor above it;"
        " put it in quotes if it is meant as text",
    ),
    "two documents": (
        GOOD + "---\nrun: {}\n",
        "recipe.yaml:11: not valid YAML at column 1: a second document starts here; delete the line `---`",
    ),
    "own tag": (
        swap("path: tiny", "path: !model tiny"),
        "recipe.yaml:3: the tag !model means nothing here; write the value without a ! tag",
    ),
    "anchor in itself": (
        swap("path: tiny", "override: &x {a: *x}"),
        "recipe.yaml:3: this value contains itself; write it out without the *alias",
    ),
    "control character": (
        swap("path: tiny", "path: ti\x07ny"),
        "recipe.yaml:3: this line holds a control character; delete it and type the line again",
    ),
    "key twice": (GOOD + "run: {}\n", "recipe.yaml:11: 'run' is written twice, first on line 1; keep one of the two"),
    "deep key twice": (
        swap("steps: 10", "steps: 10\n    steps: 20"),
        "recipe.yaml:9: 'stages.sft.steps' is written twice, first on line 8; keep one of the two",
    ),
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
    "an option of other batches": (
        GOOD + "  next: {kind: preference, batch: {sequences: 4}}\n",
        "recipe.yaml:11: unknown key 'stages.next.batch.sequences'; write one of: examples, token_budget",
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
        "recipe.yaml:4: unknown key 'model.lora.zzz'; write one of: alpha, dropout, r, targets",
    ),
    "unknown format option": (
        swap("format: r1_zero", "format: {name: r1_zero, preambel: false}"),
        "recipe.yaml:5: unknown key 'format.preambel'; did you mean 'preamble'?",
    ),
    "several": (
        swap("seed: 1", "sead: 1, dirr: x").replace("lr:", "lrr:"),
        "recipe.yaml:1: unknown key 'run.sead' (and 2 more mistakes); did you mean 'seed'?",
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
        "recipe.yaml:4: 'model.lora' cannot be 'yes'; write a mapping with any of: r, alpha, dropout, targets",
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
        "recipe.yaml:4: 'model.lora.targets' cannot be 'q_proj'; write a list of texts or 'all-linear'",
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
    # things that do not go together
    "epochs and steps": (
        swap("steps: 10", "steps: 10\n    epochs: 2"),
        "recipe.yaml:7: stages.sft: give epochs or steps, not both",
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
        "--set stages.sft.epochs=2: stages.sft: give epochs or steps, not both",
    ),
    "--skip of an unknown stage": (["--skip", "stf"], "--skip stf: the recipe has no such stage; did you mean 'sft'?"),
    "--only of an unknown stage": (["--only", "rl"], "--only rl: the recipe has no such stage; write one of: sft"),
    "--skip and --only": (
        ["--skip", "sft", "--only", "sft"],
        "--skip and --only exclude each other; give one of the two",
    ),
    "--skip of everything": (["--skip", "sft"], "--skip leaves no stage to run; skip fewer of them"),
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
        ["train", "recipe.json"],
        "a recipe is a YAML file, and recipe.json is not; name a file that ends in .yaml or .yml",
    ),
    "not text": (["train", "latin.yaml"], "latin.yaml:2: this line is not UTF-8 text; save the file as UTF-8"),
}


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that a refused command leaves behind, and nothing else."""
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 2
    assert sorted(Path().rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lemma: error: ") and err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("lemma: error: ").rstrip("\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(GOOD, encoding="utf-8")
    return tmp_path


def test_the_recipe_that_the_wrong_ones_are_made_of_is_good() -> None:
    assert main(["plan", "recipe.yaml"]) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, sentence = RECIPES[name]
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    assert complaint(["train", "recipe.yaml", "--dry-run"], capsys) == sentence


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    added, sentence = ARGUMENTS[name]
    assert complaint(["train", "recipe.yaml", *added], capsys) == sentence


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.yaml").mkdir()
    Path("recipe.json").write_text("{}", encoding="utf-8")
    Path("latin.yaml").write_bytes(b"run:\n  dir: \xe9t\xe9\n")
    arguments, sentence = COMMANDS[name]
    assert complaint(arguments, capsys) == sentence


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("run.dir=a\0b", "a path cannot hold a character of value 0"),
        ("run.dir=" + "a" * 201, "a folder's name has at most 200 bytes"),
        ("stages={" + "s" * 65 + ": {kind: supervised, steps: 1}}", "the name of a stage has at most 64 letters"),
    ],
    ids=["zero byte", "long folder", "long stage"],
)
def test_names_that_no_file_can_have(value: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in complaint(["train", "recipe.yaml", "--dry-run", "--set", value], capsys)


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert main(["train", "recipe.yaml", "--dry-run", "--set", "run.dir=~/run"]) == 0
    assert (folder / "home" / "run" / "recipe.resolved.yaml").is_file()
    assert not (folder / "~").exists()


def test_a_mistake_of_the_file_is_not_blamed_on_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(swap("steps: 10", "steps: 10\n    epochs: 2"), encoding="utf-8")
    arguments = ["train", "recipe.yaml", "--set", "stages.sft.log_every=5"]
    assert complaint(arguments, capsys) == "recipe.yaml:7: stages.sft: give epochs or steps, not both"


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
