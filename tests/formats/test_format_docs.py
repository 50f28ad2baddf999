"""The pages about formats show what the code does. `LEMMA_WRITE_DOCS=1` writes the generated parts."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FAULTS, FORMATS, HARMLESS, Format
from tests.formats.tokenizers_made_here import make_tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "formats.md"
DEMONSTRATION = Demonstration(
    Problem((Message("user", "What is 6 times 7?"),)), reasoning="6 times 7 is 42.", answer="42"
)


def faults() -> str:
    rows = [f"| `{code}` | {meaning} | {'yes' if code in HARMLESS else ''} |" for code, meaning in FAULTS.items()]
    return "\n".join(["| fault | meaning | harmless |", "|---|---|---|", *rows])


def examples() -> str:
    sections = ["`</s>` is the end-of-sequence token. The chat turns are those of our own template."]
    for name, kind in FORMATS.items():
        fmt = kind()
        prompt, target = fmt.prompt(DEMONSTRATION.problem, make_tokenizer()), fmt.target(DEMONSTRATION)
        sections.append(f"### {name}\n\nPrompt:\n\n```text\n{prompt}\n```\n\nTarget:\n\n```text\n{target}</s>\n```")
    return "\n\n".join(sections)


@pytest.mark.parametrize("part", [faults, examples])
def test_the_generated_part_is_current(part: object) -> None:
    assert callable(part)
    block = f"<!-- generated: {part.__name__} -->\n{part()}\n<!-- end -->"
    pattern = re.compile(rf"<!-- generated: {part.__name__} -->\n.*?<!-- end -->", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("LEMMA_WRITE_DOCS") == "1":
        page = pattern.sub(lambda _: block, page)
        PAGE.write_text(page, encoding="utf-8")
    assert pattern.findall(page) == [block]


def test_the_page_names_every_format_and_option() -> None:
    page = PAGE.read_text(encoding="utf-8")
    options = {option for kind in FORMATS.values() for option in kind.model_fields} - {"name"}
    for word in [*FORMATS, *options]:
        assert f"`{word}`" in page, word


def test_the_how_to_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "how-to" / "add-a-format.md").read_text(encoding="utf-8")
    (tmp_path / "workshop_of_the_page.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("workshop_of_the_page").Workshop
    assert isinstance(kind, type) and issubclass(kind, Format)
    fmt = kind()
    assert fmt.prompt(DEMONSTRATION.problem, make_tokenizer()).endswith("<|im_start|>assistant\n<work>")
    assert fmt.parse(fmt.target(DEMONSTRATION)).answer == "42"
