"""A recipe that is not YAML, or YAML that is not a recipe, gets one sentence: what is wrong, where, what to write."""

from __future__ import annotations

import pytest

from tests.config.refusals import GOOD, complaint_about, swap

pytestmark = pytest.mark.usefixtures("recipe_folder")

# The recipe, and the sentence it gets.
FILES: dict[str, tuple[str, str]] = {
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
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_yaml(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, sentence = FILES[name]
    assert complaint_about(recipe, capsys) == sentence
