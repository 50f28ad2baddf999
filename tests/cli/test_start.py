"""A command is there at once because it imports little. Modules are counted: seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lemma.config import Options
from lemma.config.options import meaning_of

ROOT = Path(__file__).resolve().parents[2]


def imported_by(*arguments: str) -> set[str]:
    """The modules that a command adds to those of a bare Python."""
    program = f"""
import sys
bare = set(sys.modules)
from lemma.cli import main
code = main({list(arguments)!r})
print("imported:", *sorted(set(sys.modules) - bare))
sys.exit(code > 1)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.rpartition("imported:")[2].split())


def from_outside(modules: set[str]) -> set[str]:
    """The packages among them that Python does not bring along, without those of Lemma and of compiled helpers."""
    packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    return {name for name in packages if name != "lemma" and not name.startswith(("_", "cython"))}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"], ["runs", "--help"]])
def test_help_imports_nothing_but_python(arguments: list[str]) -> None:
    """All of it counts: an editable install by a plain path loads nothing before."""
    modules = imported_by(*arguments)
    assert not from_outside(modules)
    assert len(modules) < 130, sorted(modules)


@pytest.mark.parametrize("recipe", ["demo", "rlvr_gsm8k_grpo"])
def test_a_plan_imports_what_reads_recipes_and_no_more(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the built-in model nor for one of the hub that was never fetched."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    modules = imported_by("plan", f"recipes/{recipe}.yaml")
    assert from_outside(modules) <= {
        "annotated_types", "numpy", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "yaml",
    }  # fmt: skip
    assert not modules & {"asyncio", "ssl", "multiprocessing", "http.client", "unittest", "sqlite3"}
    assert len(modules) < 700, len(modules)


class Base(Options):
    """A class whose fields have texts."""

    first: int = 1
    """What the
    first one means."""
    second: int = 2
    third: int = 3
    """The third."""


class Derived(Base):
    third: int = 4
    """Another third."""


def test_the_text_under_a_field_is_found_where_it_was_declared_last() -> None:
    assert meaning_of(Base, "first") == meaning_of(Derived, "first") == "What the first one means."
    assert meaning_of(Base, "second") == ""
    assert (meaning_of(Base, "third"), meaning_of(Derived, "third")) == ("The third.", "Another third.")


def test_a_printed_command_can_be_pasted(tmp_path: Path) -> None:
    """Without `lemma` on PATH it is written as it was started."""
    script = tmp_path / "bin/lemma"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom lemma.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    ways = (
        (["bin/lemma"], "/usr/bin:/bin", "bin/lemma"),
        (["lemma"], f"{script.parent}:/usr/bin:/bin", "lemma"),
        ([sys.executable, "-m", "lemma"], "/usr/bin:/bin", f"{sys.executable} -m lemma"),
    )
    for number, (start, path, shown) in enumerate(ways):
        words = [*start, "recipes", "demo", "--to", f"{number}.yaml"]
        environment = {"PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["/usr/bin/env", *words], check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.stdout == f"wrote {number}.yaml; `{shown} plan {number}.yaml` shows what it does\n"
