"""What a step does, in counts that do not depend on the machine: a guard against unnoticed slowdowns.

    make bench-cpu              compare with benchmarks/results/counts.json
    make bench-cpu UPDATE=1     write it again

Counted are, with the tiny model on the CPU: operators that compute (without views), reads of a tensor's value by the
host, which would wait for a GPU, bytes that operators copy, calls of Lemma's own Python functions, files opened in the
run folder, and disk syncs. Lengths are fixed, so that no count depends on the samples. Operators are compared only
under the version of torch that they were counted with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lemma
from lemma.engines.protocol import Request, Sampling

STORE = Path(__file__).parent / "results" / "counts.json"
LEMMA = str(Path(lemma.__file__).parent)
# Growth up to this share is not worth a failure.
ALLOWED = 0.05
COPIES = {
    "_to_copy", "copy_", "clone", "cat", "stack", "repeat", "index", "index_select", "index_put", "index_put_",
    "index_copy", "index_copy_", "gather", "select_backward", "slice_backward", "_unsafe_index",
}  # fmt: skip
INTO = {"index_put", "index_put_", "index_copy", "index_copy_"}
# Operators whose result has a size that the host has to read from the device.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}

Counts = dict[str, float]


class Operators(TorchDispatchMode):
    """Counts the operators that run on the CPU inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.reads = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view:
            self.computed += 1
        self.reads += name in READS
        if name in COPIES and isinstance(result, torch.Tensor):
            # What is written into a larger tensor is the last one that is handed over.
            written = args[-1] if name in INTO and isinstance(args[-1], torch.Tensor) else result
            self.bytes += written.nbytes
        return result

    def __enter__(self) -> Operators:
        """Also counts what does not pass the dispatcher on a CPU but would be waited for on a GPU."""
        self._plain = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
        for name, method in self._plain.items():
            setattr(torch.Tensor, name, self._counted(method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._plain.items():
            setattr(torch.Tensor, name, method)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reads += 1
            return method(*args, **kwargs)

        return counted


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Calls of Lemma's named functions in this thread; what Python 3.12 inlines is left out."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LEMMA) and not code.co_name.startswith("<"):
            calls[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def tiny_policy() -> Any:
    from lemma.models.load_model import build_policy
    from lemma.models.model_options import ModelOptions, TinyOptions

    small = TinyOptions(hidden=32, layers=2, feed_forward=64, heads=4, kv_heads=2)
    return build_policy(ModelOptions(path="tiny", tiny=small), torch.device("cpu"), 0)


def of_learner() -> Counts:
    """A GRPO update with one pack and with three: the cost of each pack, and the fixed cost of an update."""
    from lemma.algorithms import ALGORITHMS
    from lemma.core.types import Trajectory
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions

    policy, packs = tiny_policy(), {}
    algorithm: Any = ALGORITHMS["grpo"](group_size=4)
    ids = np.arange(24) % 7
    chosen = np.arange(24) >= 8
    fields = {
        "sampler_logprobs": np.where(chosen, -1.0, 0.0),
        "off": np.zeros(24),
        "advantage": np.where(chosen, 0.5, 0.0),
    }
    trajectories = [Trajectory(ids + n, chosen, group_id=n // 4, token_fields=dict(fields)) for n in range(12)]
    for number in (1, 3):
        learner = Learner(policy, OptimOptions(lr=1e-4), token_budget=24 * 12 // number, total_steps=10)
        learner.step(trajectories, algorithm.objective(16, None))
        with Operators() as operators:
            report = learner.step(trajectories, algorithm.objective(16, None))
        assert report.packs == number
        with calls_counted() as calls:
            learner.step(trajectories, algorithm.objective(16, None))
        packs[number] = operators.computed, operators.reads, operators.bytes, calls.total()
    kinds = ("operators", "reads by the host", "bytes copied", "Python calls")
    each = [(three - one) / 2 for one, three in zip(packs[1], packs[3], strict=True)]
    whole = {f"learner: {kind} of an update of one pack": count for kind, count in zip(kinds, packs[1], strict=True)}
    return whole | {
        f"learner: {kind} of a further pack": count
        for kind, count in zip(kinds, each, strict=True)
        if kind != "bytes copied"
    }


def of_engine() -> Counts:
    """Eight samples of 33 tokens and of 65: the cost of a decoding step of eight rows, and the fixed cost."""
    from lemma.engines.native.engine import NativeEngine
    from lemma.engines.protocol import generate

    policy = tiny_policy()
    engine = NativeEngine(policy)
    counted = {}

    def run(length: int) -> None:
        sampling = Sampling(max_tokens=length, ignore_eos=True)
        requests = [Request(("count", length, n), np.arange(5, 15) + n, sampling, 4) for n in range(2)]
        assert sum(len(one.ids) for one in generate(engine, requests)) == 8 * length
        engine.reset_prefix_cache()

    for length in (33, 65):
        run(length)
        with Operators() as operators:
            run(length)
        with calls_counted() as calls:
            run(length)
        counted[length] = operators.computed, operators.reads, operators.bytes, calls.total()
    kinds = ("operators", "reads by the host", "bytes copied", "Python calls")
    once = dict(zip(kinds, counted[33], strict=True))
    each = {kind: (long - once[kind]) / 32 for kind, long in zip(kinds, counted[65], strict=True)}
    return {
        **{f"engine: {kind} of 8 samples of 33 tokens": count for kind, count in once.items()},
        **{f"engine: {kind} of a further token of 8 rows": each[kind] for kind in ("operators", "reads by the host")},
        "engine: Python calls of a further token": each["Python calls"] / 8,
    }


def of_handling() -> Counts:
    """Handling of 64 completions apart from sampling and training: grading, writing, grouping, metrics, packing."""
    from benchmarks.scaling import GROUP, MadeBefore, Parts, packs_of, step_of, tasks_for

    fmt, tasks, answers, tokenizer = tasks_for(0, problems=9)
    with tempfile.TemporaryDirectory() as folder:
        step_of(Parts(), fmt, tasks[:1], MadeBefore(answers), tokenizer, Path(folder) / "first")
        calls: dict[int, int] = {}
        for problems in (1, 9):
            at = Path(folder) / str(problems)
            with calls_counted() as counted:
                trajectories, _ = step_of(Parts(), fmt, tasks[:problems], MadeBefore(answers), tokenizer, at)
                packs_of(Parts(), trajectories)
            calls[problems] = counted.total()
    return {"handling: Python calls of a further completion": (calls[9] - calls[1]) / (8 * GROUP)}


RECIPE = """
run: {{dir: {dir}, seed: 1, threads: 1, device: cpu, tensorboard: false}}
model: {{path: tiny, tiny: {{hidden: 32, layers: 1, feed_forward: 32, context: 128}}}}
format: {{name: r1_zero, preamble: false}}
stages:
  grpo:
    kind: rl
    steps: {steps}
    algorithm: {{name: grpo, group_size: 2}}
    data: {{arithmetic: {{count: 8, operations: 1}}}}
    rollout: {{max_tokens: 2}}
    batch: {{problems: 2}}
    checkpoint: {{every: 0}}
"""


def of_files() -> Counts:
    """Two steps of RL and four: the files that each further step opens and syncs."""
    _files_of_a_run(1)  # what only the first run of a process does is not counted
    counted = {steps: _files_of_a_run(steps) for steps in (2, 4)}
    opened, synced = ((counted[4][kind] - counted[2][kind]) / 2 for kind in (0, 1))
    return {"stage: files opened in a further step of RL": opened, "stage: syncs in a further step of RL": synced}


_watched: dict[str, Any] = {"folder": None, "opened": 0}


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    folder = _watched["folder"]
    if folder is not None and event == "open" and str(arguments[0]).startswith(folder):
        _watched["opened"] += 1


def _files_of_a_run(steps: int) -> tuple[int, int]:
    from lemma.core.events import silent
    from lemma.recipe import load_recipe
    from lemma.runs.run import train

    if "is_hooked" not in _watched:  # an audit hook stays for good
        sys.addaudithook(_note_opening)
        _watched["is_hooked"] = True
    sync, synced, lock, threads = os.fsync, 0, threading.Lock(), torch.get_num_threads()

    def counted(fd: Any) -> None:
        nonlocal synced
        with lock:
            synced += 1
        sync(fd)

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE.format(dir=f"{folder}/run", steps=steps))
        _watched.update(folder=f"{folder}/run", opened=0)
        os.fsync = counted
        try:
            assert train(load_recipe(recipe), sink=silent) == 0
        finally:
            os.fsync = sync
            _watched["folder"] = None
            torch.set_num_threads(threads)
    return int(_watched["opened"]), synced


KINDS: dict[str, Callable[[], Counts]] = {
    "learner": of_learner,
    "engine": of_engine,
    "handling": of_handling,
    "stage": of_files,
}


def measured(kinds: list[str] | None = None) -> Counts:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: count for kind in kinds or KINDS for name, count in KINDS[kind]().items()}
    finally:
        torch.set_num_threads(threads)


def torch_version() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def growths(found: Counts, stored: dict[str, Any]) -> list[str]:
    """A sentence for each count that exceeds the stored one by more than the tolerance."""
    sentences = []
    same_torch = stored["torch"] == torch_version()
    for name, count in found.items():
        before = stored["counts"].get(name)
        if not same_torch and "Python" not in name and not name.startswith("stage"):
            continue
        if before is None:
            sentences.append(f"{name}: {count:g} is new here; `make bench-cpu UPDATE=1` writes it down")
        elif count > before * (1 + ALLOWED):
            more = f"{count / before - 1:.1%}" if before else "from nothing"
            sentences.append(f"{name}: {count:g} where {before:g} are written down, {count - before:g} ({more}) more")
    return sentences


def read_stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(STORE.read_text(encoding="utf-8"))
    return stored


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the counts of this code")
    arguments = parser.parse_args()
    found = measured()
    if arguments.update:
        STORE.write_text(json.dumps({"torch": torch_version(), "counts": found}, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {len(found)} counts to {STORE.name}")
        return 0
    stored = read_stored()
    for name, count in found.items():
        before = stored["counts"].get(name)
        note = "" if count == before else f"  ({'new' if before is None else f'{before:g} are written down'})"
        print(f"{count:12g}  {name}{note}")
    sentences = growths(found, stored)
    for sentence in sentences:
        print(f"grew: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
