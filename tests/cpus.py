"""The numerically sensitive tests as other CPUs would run them: `make test-cpus`.

Libraries take their kernels by what a CPU can do and by who made it, and other kernels add in another order.
Environment variables make them choose as on another CPU; whom MKL takes for the maker, a library loaded before it
decides, which needs a C compiler. Each run is shown with the fingerprint of its arithmetic (tests/cpu_kind.py): where
it is that of this CPU, the settings change nothing here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
# Where floating-point numbers are compared, tokens are drawn from them, or something is learnt.
NUMERIC = (
    "tests/models/test_architectures.py",
    "tests/models/test_capped_attention.py",
    "tests/models/test_critic.py",
    "tests/models/test_logprobs.py",
    "tests/models/test_packing.py",
    "tests/models/test_shared_prompts.py",
    "tests/objectives",
    "tests/engines/test_native.py",
    "tests/engines/test_native_sampling.py",
    "tests/engines/test_native_scheduling.py",
    "tests/engines/test_sampling.py",
    "tests/engines/test_transformers_engine.py",
    "tests/stages/test_episode_learning.py::test_a_few_steps_make_it_better",
    "tests/stages/test_golden.py",
    "tests/learning/test_learner.py",
    "tests/learning/test_optimiser.py",
    "tests/learning/test_sharing.py",
    "tests/stages/test_preference_own_samples.py::test_dpo_on_its_own_samples_makes_a_model_better",
    "tests/stages/test_preference_trl.py",
    "tests/stages/test_rl_stage.py::test_a_kl_of_the_first_update_is_zero_and_grows",
    "tests/stages/test_rl_stage.py::test_engine_and_learner_agree_where_the_support_is_cut",
    "tests/stages/test_rl_stage.py::test_the_reference_is_the_model_that_the_stage_started_from",
)
OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
Maker = Literal["Intel", "another"]


@dataclass(frozen=True)
class Cpu:
    settings: Mapping[str, str] = field(default_factory=dict)
    maker: Maker | None = None
    threads: int = 1
    busy: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether nothing else of this program may run beside it."""
        return self.threads > 1 or self.busy


CPUS = {
    "this one": Cpu(),
    "without AVX": Cpu({**OLD, "MKL_CBWR": "COMPATIBLE"}),
    "Intel, SSE4.2": Cpu({**OLD, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, maker="Intel"),
    "Intel, AVX2": Cpu({**AVX2, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, maker="Intel"),
    "Intel, AVX-512": Cpu(maker="Intel"),
    "AMD, AVX2": Cpu(AVX2, maker="another"),
    "two threads": Cpu(threads=2),
    "a busy machine": Cpu(busy=True),
}


def environment(cpu: Cpu, folder: Path) -> dict[str, str]:
    values = {**os.environ, **cpu.settings, "OMP_NUM_THREADS": str(cpu.threads)}
    library = cpu.maker and maker_library(cpu.maker, folder)
    return {**values, "LD_PRELOAD": str(library)} if library else values


def maker_library(maker: Maker, folder: Path) -> Path | None:
    """A library whose answer MKL gets when it asks whether the CPU is Intel's; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / f"{maker}.so"
    if not library.exists():
        source = folder / f"{maker}.c"
        source.write_text(f"int mkl_serv_intel_cpu_true(void) {{ return {int(maker == 'Intel')}; }}\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(name: str, cpu: Cpu, folder: Path, wanted: list[str]) -> bool:
    """Run the tests as on this CPU and say how it went; all that was written, where they failed."""
    values = environment(cpu, folder)
    python = [sys.executable, "-m"]
    began = time.monotonic()
    with busy_loops(2 if cpu.busy else 0):
        kind = subprocess.run([*python, "tests.cpu_kind"], cwd=ROOT, env=values, capture_output=True, text=True)
        tests = [*python, "pytest", "-p", "no:cacheprovider", "--disable-warnings", "--tb=short", *wanted]
        done = subprocess.run(tests, cwd=ROOT, env=values, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or ["nothing was written"]
    text = f"{name:16} {kind.stdout.strip()}; {lines[-1]}, {time.monotonic() - began:.0f} s in all"
    print("\n".join([*lines, text] if done.returncode else [text]), flush=True)
    return done.returncode == 0


def main() -> int:
    """Those on one thread side by side, one to a core; then the others one after the other."""
    wanted = sys.argv[1:] or list(NUMERIC)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for maker in ("Intel", "another"):
            if maker_library(maker, folder) is None:
                print(f"no C compiler here: MKL is not told that the maker is {maker}", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tasks = [pool.submit(run, n, cpu, folder, wanted) for n, cpu in CPUS.items() if not cpu.is_alone]
        good = [task.result() for task in tasks]
        good += [run(name, cpu, folder, wanted) for name, cpu in CPUS.items() if cpu.is_alone]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
