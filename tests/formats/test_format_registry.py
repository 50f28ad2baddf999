"""The registry, options and their mistakes; and that none of it is heavy to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from lemma.config.options import meaning_of
from lemma.core.errors import UserError
from lemma.formats import FORMATS, make_format


def test_names_agree_with_the_registry() -> None:
    ours = ["r1_zero", "question_only", "xml", "working_out", "boxed", "think_boxed", "think_answer", "alpaca"]
    ours.append("chat")
    assert list(FORMATS) == [*ours, "own", "qwen", "simplerl", "prime", "prime_sft", "prime_code", "no"]
    for name, kind in FORMATS.items():
        assert get_args(kind.model_fields["name"].annotation) == (name,)
        assert kind() == make_format(name) == make_format({"name": name})
        assert make_format(kind().model_dump()) == kind()
        assert all(meaning_of(kind, field) for field in kind.model_fields), name


def test_a_format_is_its_own_specification() -> None:
    fmt = make_format({"name": "r1_zero", "preamble": False})
    assert make_format(fmt) is fmt


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("r1-zero", "there is no format 'r1-zero'; did you mean 'r1_zero'?"),
        ({"system": "x"}, "the format has no name; write one of: `name: r1_zero`, "),
        ({"name": ["xml"]}, "there is no format '['xml']'"),
        ({"name": "xml", "sistem": "x"}, "format xml has no option 'sistem'; did you mean 'system'?"),
        (
            {"name": "r1_zero", "preamble": "perhaps"},
            "option 'preamble' of format r1_zero: Input should be a valid bool",
        ),
        ({"name": "boxed", "template": "theirs"}, "option 'template' of format boxed: Input should be 'auto'"),
        ({"name": "working_out", "start": ""}, "option 'start' of format working_out: String should have at least 1"),
        ({"name": "working_out", "start": "<a>", "end": "<a>"}, "format working_out: no tag may be blank, or be part"),
        ({"name": "working_out", "end": " "}, "format working_out: no tag may be blank"),
        (
            {"name": "working_out", "end": "<SOLUTION>x"},
            "format working_out: no tag may be blank, or be part of another",
        ),
        ({"name": "r1_zero", "preamble": False, "system": "x"}, "format r1_zero: `system` is the text of the preamble"),
    ],
)
def test_a_wrong_specification_gets_one_sentence(spec: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_format(spec)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_stop_strings_leave_room_for_what_rewards_look_at() -> None:
    stops = {name: kind().stop for name, kind in FORMATS.items() if kind().stop}
    assert stops == {"r1_zero": ("</answer>",)}, "xml's strict reward wants the line break after </answer>"


def test_formats_are_validated_without_heavy_imports() -> None:
    code = (
        "import sys; from lemma.formats import make_format, encode; make_format('xml').parse('x');"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_instruction_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "published.txt"
    file.write_text("Think.  Use {braces} and 'quotes'.\n\n", encoding="utf-8")
    fmt = make_format({"name": "boxed", "system": {"file": str(file)}})
    assert fmt.system == "Think.  Use {braces} and 'quotes'.\n"
    file.unlink()
    assert make_format(fmt.model_dump()).system == fmt.system  # a run keeps the words, not the place
    for wrong, sentence in (({"file": str(file)}, "cannot be read"), ({"path": "x"}, r"`\{file: path/to")):
        with pytest.raises(UserError, match=sentence):
            make_format({"name": "boxed", "system": wrong})


def test_the_file_of_a_published_prompt_stands_for_its_instruction(tmp_path):
    file = tmp_path / "r1_zero.prompt"
    file.write_text("Think first.\nUser: {question}\nAssistant: <think>\n")
    fmt = make_format({"name": "r1_zero", "system": {"file": str(file)}})
    assert fmt.system == "Think first."
    file.write_text("Think first. {question}")
    with pytest.raises(UserError, match=r"ends in .*write the instruction alone"):
        make_format({"name": "r1_zero", "system": {"file": str(file)}})
