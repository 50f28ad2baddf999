"""`lemma doctor`: real actions, one process each, so that nothing that breaks there breaks the doctor."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import pytest
import torch

from lemma.cli import doctor
from lemma.cli.parser import Parser
from lemma.core.hub_access import hub_answers
from lemma.doctor import health, probes
from lemma.doctor.health import (
    CheckedPart,
    HealthFinding,
    check_disk,
    check_folder,
    check_hub,
    core_works,
    run_probe,
    try_part,
)
from lemma.doctor.probes import ProbeAnswer
from tests.pretended import pretend_installed

BY_NAME = {part.name: part for part in health.PARTS}

ODD_PROBES = """
import ctypes, sys, time
from lemma.doctor.probes import ProbeAnswer

def chatty():
    print("a library that talks")
    print("and warns", file=sys.stderr)
    return ProbeAnswer("fine")

def segfaults():
    ctypes.string_at(0)

def hangs():
    time.sleep(60)

def raises():
    raise ImportError("libodd.so: cannot open shared object file")

def leaves():
    sys.exit(3)
"""


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="lemma")
    doctor.add(parser.add_subparsers())
    return parser.parse_args(["doctor", *argv])


@pytest.mark.parametrize(
    ("probe", "limit_s", "finding"),
    [
        ("chatty", 30, ("ok", "fine")),
        ("segfaults", 30, ("broken", "crashed with SIGSEGV")),
        ("hangs", 2, ("broken", "did not answer within 2 s")),
        ("raises", 30, ("broken", "ImportError: libodd.so: cannot open shared object file")),
        ("leaves", 30, ("broken", "ended with 3 and said nothing")),
    ],
)
def test_whatever_a_part_does_becomes_a_finding(
    tmp_path: Path, probe: str, limit_s: float, finding: tuple[str, str]
) -> None:
    (tmp_path / "odd_probes.py").write_text(ODD_PROBES)
    assert run_probe(f"odd_probes:{probe}", limit_s, {"PYTHONPATH": str(tmp_path)}) == finding


def test_an_installed_but_broken_optional_part_does_not_break_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('built for another Python')\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = try_part(BY_NAME["ray"], {"PYTHONPATH": str(tmp_path)})
    assert (finding.state, finding.detail) == ("broken", "ImportError: built for another Python")
    assert ".venv/bin/pip install -e '.[ray]'" in finding.repair
    assert core_works([finding])


def test_a_missing_part_is_optional_unless_it_is_core() -> None:
    absent = CheckedPart("absent", "no_such_module", "no_such_module:probe", "install it")
    assert try_part(absent) == HealthFinding("absent", "missing", "not installed", "install it")
    needed = CheckedPart("needed", "no_such_module", "no_such_module:probe", "install it", core=True)
    assert try_part(needed).state == "broken"
    assert not core_works([try_part(needed)])


def test_a_gpu_that_flash_attention_is_not_for_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed("flash-attn-4", "4.0.0", tmp_path, monkeypatch)
    monkeypatch.setattr(probes, "_device", lambda: "cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert probes.flash() == ProbeAnswer("4.0.0, not for this GPU: torch's kernel is used", "missing")


@pytest.mark.parametrize("name", ["transformers", "bitsandbytes"])
def test_parts_that_are_installed_really_work(name: str) -> None:
    finding = try_part(BY_NAME[name])
    assert finding.state == "ok" and finding.repair == "", finding


def test_a_folder_that_cannot_be_written_breaks_the_core(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "not" / "yet").state == "ok"
    assert list(tmp_path.iterdir()) == []
    finding = check_folder(Path("/proc/runs"))
    assert finding.state == "broken" and "run.dir" in finding.repair
    assert not core_works([finding])


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LEAST_FREE_GIB", 2**40)
    assert "free some space" in check_disk(tmp_path).repair


def test_hub_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert check_hub() == HealthFinding("hub", "ok", "HF_ENDPOINT is https://mirror.example; offline (HF_HUB_OFFLINE)")
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    assert check_hub().state == "broken"
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert check_hub().detail == f"HF_ENDPOINT is {address}; it does not answer"
        listener.listen()
        hub_answers.cache_clear()
        assert check_hub() == HealthFinding("hub", "ok", f"HF_ENDPOINT is {address}; it answers")


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = CheckedPart("absent", "no_such_module", "no_such_module:probe", "get it from somewhere")
    monkeypatch.setattr(health, "PARTS", (absent,))
    args = parse("--runs", str(tmp_path))
    assert args.run(args) == 0
    table = capsys.readouterr().out
    assert "missing (optional)  not installed" in table and "get it from somewhere" in table
    assert table.endswith("The core works.\n") and "\x1b" not in table

    monkeypatch.setattr(health, "PARTS", (CheckedPart("needed", "no_such_module", "x:y", "install it", core=True),))
    args = parse("--json")
    assert args.run(args) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][-1]["repair"] == "install it"
