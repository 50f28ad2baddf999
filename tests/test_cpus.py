"""What `make test-cpus` runs, and how a kind of CPU is known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.cpu_kind import facts, fingerprint
from tests.cpus import CPUS, NUMERIC, ROOT


def test_the_tests_that_are_run_exist() -> None:
    for wanted in NUMERIC:
        path, _, test = wanted.partition("::")
        assert (ROOT / path).exists() and (not test or f"def {test}(" in (ROOT / path).read_text()), wanted


def test_every_setting_reaches_a_run() -> None:
    named = {(name, value) for cpu in CPUS.values() for name, value in cpu.settings.items()}
    wanted = {"ATEN_CPU_CAPABILITY": "default avx2", "ONEDNN_MAX_CPU_ISA": "SSE41 AVX2"}
    wanted |= {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2 AVX2", "MKL_CBWR": "COMPATIBLE"}
    assert named == {(name, value) for name, values in wanted.items() for value in values.split()}
    assert {cpu.threads for cpu in CPUS.values()} == {1, 2} and any(cpu.busy for cpu in CPUS.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kind_does_not_depend_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = fingerprint()
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert found == fingerprint()


def test_other_kernels_are_another_kind() -> None:
    command = [sys.executable, "-m", "tests.cpu_kind"]
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    said = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout
    capability = torch.backends.cpu.get_cpu_capability()
    assert said.endswith("ATen DEFAULT\n") and capability in facts()
    assert (fingerprint() in said) == (capability == "DEFAULT")
