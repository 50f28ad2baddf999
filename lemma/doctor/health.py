"""What this machine has, and whether it actually works: the findings of `lemma doctor`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lemma.core.hub_access import SWITCHES, USUAL_ENDPOINT, hub_answers
from lemma.doctor.probes import GIB, MARK, State

LEAST_PYTHON = (3, 11)
LEAST_FREE_GIB = 5


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One row of the table. If something is missing or broken, `repair` says what to do."""

    part: str
    state: State
    detail: str
    repair: str = ""
    core: bool = False


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A component that is tried in its own process. `module` is what Python imports, `target` the probe."""

    name: str
    module: str
    target: str
    repair: str
    core: bool = False
    deep: bool = False
    limit_s: float = 120.0


def _part(name: str, module: str, probe: str, repair: str, **more: bool | float) -> CheckedPart:
    return CheckedPart(name, module, f"lemma.doctor.probes:{probe}", repair, **more)  # type: ignore[arg-type]


def _extra(extra: str, use: str) -> str:
    return f"{use}: `.venv/bin/pip install -e '.[{extra}]'`"


REINSTALL = "install Lemma again: `.venv/bin/pip install --force-reinstall -c constraints.txt -e .`"
PARTS: tuple[CheckedPart, ...] = (
    _part("torch", "torch", "torch", REINSTALL, core=True),
    _part("transformers", "transformers", "transformers", REINSTALL, core=True),
    _part("peft", "peft", "peft", REINSTALL, core=True),
    _part("datasets", "datasets", "datasets", REINSTALL, core=True),
    _part("tensorboard", "tensorboard", "tensorboard", REINSTALL, core=True),
    _part("GPU", "torch", "cuda", "training runs on the CPU; a GPU needs its driver and a CUDA build of torch"),
    _part("packed attention", "torch", "varlen", "comes with torch 2.11 or newer on an NVIDIA GPU"),
    _part("triton", "triton", "triton", "fused kernels on a GPU; comes with the CUDA build of torch"),
    _part("bitsandbytes", "bitsandbytes", "bitsandbytes", _extra("quant", "4-bit weights and 8-bit optimisers")),
    _part("gguf", "gguf", "gguf", _extra("gguf", "models in GGUF files")),
    _part("wandb", "wandb", "wandb", _extra("wandb", "logging to Weights & Biases")),
    _part("vllm", "vllm", "vllm", _extra("vllm", "another engine (docs/install.md for CPUs)"), limit_s=300.0),
    _part("ray", "ray", "ray", _extra("ray", "several machines")),
    _part("deepspeed", "deepspeed", "deepspeed", "not needed: its configuration files are read without it"),
    _part("liger-kernel", "liger_kernel", "liger", _extra("fused", "other fused kernels on a GPU")),
    _part("FlashAttention 4", "flash_attn", "flash", _extra("flash", "faster attention on an H100 or newer")),
    _part("torch.compile", "torch", "compiling", "needs a C compiler, or triton on a GPU", deep=True, limit_s=300.0),
)


def run_probe(target: str, limit_s: float, env: Mapping[str, str] | None = None) -> tuple[State, str]:
    """Run `module:function` in another process; whatever happens to it, the result is a sentence."""
    command = [sys.executable, "-m", "lemma.doctor.probes", target]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "WANDB_SILENT": "true"}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **quiet, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return "broken", f"did not answer within {limit_s:.0f} s"
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode == 0 and answers:
        answer = json.loads(answers[-1].removeprefix(MARK))
        return answer["state"], answer["detail"]
    if done.returncode < 0:
        return "broken", f"crashed with {signal.Signals(-done.returncode).name}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "broken", said[-1][:300] if said else f"ended with {done.returncode} and said nothing"


def try_part(part: CheckedPart, env: Mapping[str, str] | None = None) -> HealthFinding:
    if find_spec(part.module) is None:
        state: State = "broken" if part.core else "missing"
        return HealthFinding(part.name, state, "not installed", part.repair, part.core)
    state, detail = run_probe(part.target, part.limit_s, env)
    return HealthFinding(part.name, state, detail, "" if state == "ok" else part.repair, part.core)


def check_python() -> HealthFinding:
    running = ".".join(str(part) for part in sys.version_info[:3])
    old = sys.version_info[:2] < LEAST_PYTHON
    return HealthFinding(
        "Python", "broken" if old else "ok", running, "Lemma needs Python 3.11 or newer" if old else "", core=True
    )


def check_memory() -> HealthFinding:
    import psutil

    from lemma.models.fitting import host_memory

    memory, allowed = psutil.virtual_memory(), host_memory()
    limit = f", and a limit of {allowed / GIB:.1f} GiB here" if allowed < memory.total else ""
    return HealthFinding("memory", "ok", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free{limit}")


def check_folder(runs: Path) -> HealthFinding:
    """Whether a run could be written to `runs`: writes, syncs and renames a file where that folder would be."""
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".lemma-doctor-") as folder:
            path = Path(folder) / "written"
            with open(path, "wb") as handle:
                handle.write(b"x" * 4096)
                handle.flush()
                os.fsync(handle.fileno())
            path.rename(path.with_name("renamed"))
    except OSError as error:
        repair = "go to a folder that you may write to, or name one as run.dir"
        return HealthFinding("runs folder", "broken", f"{place}: {error.strerror}", repair, core=True)
    return HealthFinding("runs folder", "ok", f"{place} can be written", core=True)


def check_disk(runs: Path) -> HealthFinding:
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    usage = shutil.disk_usage(place)
    detail = f"{usage.free / GIB:.0f} of {usage.total / GIB:.0f} GiB free where runs go"
    if usage.free < LEAST_FREE_GIB * GIB:
        return HealthFinding("disk", "broken", detail, "free some space: a checkpoint of a 1.5B model takes 18 GiB")
    return HealthFinding("disk", "ok", detail)


def check_hub() -> HealthFinding:
    """Where models and data sets come from: the environment variables that decide it, and whether the hub answers."""
    endpoint = os.environ.get("HF_ENDPOINT")
    detail = f"HF_ENDPOINT is {endpoint}" if endpoint else "the usual endpoint"
    switched_off = [name for name in SWITCHES if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        return HealthFinding(
            "hub", "broken", detail, "HF_ENDPOINT must begin with http:// or https://; change or unset it"
        )
    if switched_off:
        return HealthFinding("hub", "ok", f"{detail}; offline ({', '.join(switched_off)})")
    if not hub_answers(endpoint or USUAL_ENDPOINT):
        fix = "models and data must be on this machine, or HF_ENDPOINT must name a mirror that can be reached"
        return HealthFinding("hub", "missing", f"{detail}; it does not answer", fix)
    return HealthFinding("hub", "ok", f"{detail}; it answers")


def examine(runs: Path, *, deep: bool = False, parts: Sequence[CheckedPart] | None = None) -> list[HealthFinding]:
    """Every finding, in the order of the table. The probes of `parts` (default: all) run in parallel."""
    own: list[Callable[[], HealthFinding]] = [
        check_python,
        check_memory,
        lambda: check_disk(runs),
        lambda: check_folder(runs),
        check_hub,
    ]
    wanted = [part for part in (PARTS if parts is None else parts) if deep or not part.deep]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        slowest_first = sorted(wanted, key=lambda part: -part.limit_s)
        tried = dict(zip(slowest_first, pool.map(try_part, slowest_first), strict=True))
    return [*(check() for check in own), *(tried[part] for part in wanted)]


def core_works(findings: Sequence[HealthFinding]) -> bool:
    return all(finding.state == "ok" for finding in findings if finding.core)
