"""FlashAttention 4 is tried where it will be used. Here there is no GPU: parts that need one are stood in for."""

from __future__ import annotations

import sys
import threading
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from lemma.core.errors import LemmaWarning
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.models import attention, flash_attention, installing
from lemma.models.flash_attention import AttentionKind, FlashState
from lemma.models.packing import Segments
from tests.models.families import TAKEN, family_policy
from tests.models.small import tiny_policy, trajectories


def test_the_trial_is_made_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = torch.device("cuda:3"), []
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda wanted: setattr(current, "device", wanted))
    monkeypatch.setattr(flash_attention, "supports", lambda device: True)
    monkeypatch.setattr(flash_attention, "_installed", lambda: print)
    monkeypatch.setattr(flash_attention, "_mismatch", lambda function, kind: seen.append(current.device))
    kind = AttentionKind(device, torch.bfloat16, heads=4, kv_heads=2, size=64, has_window=False, deterministic=False)
    assert flash_attention._tried_kernel.__wrapped__(kind) is not None
    assert seen == [device] and not hasattr(current, "device"), "this thread stays where it is"


@pytest.mark.parametrize(
    ("files", "trouble"),
    [
        ({}, None),
        ({"__init__.py": ""}, None),
        ({"__init__.py": "import flash_attn_2_cuda"}, None),
        ({"cute/interface.py": "raise ImportError('libcute.so: cannot open shared object file')"}, "libcute.so"),
        ({"cute/interface.py": "import no_such_compiler"}, "no_such_compiler"),
        ({"cute/interface.py": "raise RuntimeError('another CUDA')"}, "another CUDA"),
    ],
    ids=["none", "another version", "part of another version", "no library", "no compiler", "a broken compiler"],
)
def test_an_installation_that_is_broken_is_told(
    files: dict[str, str], trouble: str | None, state: FlashState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "flash_attn" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "flash_attn" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", LemmaWarning)
        assert flash_attention._installed.__wrapped__() is None
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    told = [str(one.message) for one in said]
    assert state.has_failed == bool(told)
    assert not told if trouble is None else "cannot be imported" in told[0] and trouble in told[0]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> FlashState:
    fresh = FlashState()
    monkeypatch.setattr(flash_attention, "_state", fresh)
    return fresh


def test_a_deterministic_kernel_is_tried_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    monkeypatch.setattr(flash_attention, "_tried_kernel", cache(lambda kind: tried.append(kind.deterministic)))
    query = torch.zeros(3, 4, 64)
    for wanted in (False, True, True):
        torch.use_deterministic_algorithms(wanted)
        flash_attention.flash_kernel(query, query, None)
    torch.use_deterministic_algorithms(False)
    assert tried == [False, True]


@pytest.fixture
def with_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs on the CPU go where those on a GPU go; the exact fallback stands in for torch's kernel."""
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)
    monkeypatch.setattr(attention, "varlen", attention._bucketed)


@pytest.mark.usefixtures("with_varlen")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "granite", "olmo2", "gpt2"])
def test_a_model_without_fused_kernels_never_asks_for_it(
    kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(attention, "flash_kernel", lambda *parts: asked.append(parts))
    policy = family_policy(kind, TAKEN[kind])
    installing.install(policy.causal, fused=fused)
    segments = Segments((5, 3), torch.device("cpu"))
    policy.hidden(torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), segments)
    assert len(asked) == (2 if fused else 0), "layers that asked"


@pytest.mark.usefixtures("with_varlen")
@pytest.mark.parametrize(("compiled", "failed"), [(False, False), (True, False), (False, True)])
def test_scores_come_from_the_kernel_of_the_update(
    compiled: bool, failed: bool, state: FlashState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled blocks have torch's kernel, and so does all where the other one has failed."""
    used: list[int] = []

    def kernel(query: torch.Tensor, *others: object) -> torch.Tensor:
        used.append(len(query))
        return query

    policy = tiny_policy()
    monkeypatch.setattr(flash_attention, "_tried_kernel", lambda kind: kernel)
    state.has_failed = failed
    learner = Learner(policy, OptimOptions(), token_budget=64, total_steps=1, compile_blocks=compiled)
    learner.score(trajectories((9, 14)))
    assert bool(used) == (not compiled and not failed)


def test_a_second_learner_may_keep_to_the_choice_of_the_first(state: FlashState) -> None:
    """A critic is not compiled, and its policy may be."""
    policy, critic = tiny_policy(), tiny_policy()
    Learner(policy, OptimOptions(), token_budget=64, total_steps=1, compile_blocks=True)
    Learner(critic, OptimOptions(), token_budget=64, total_steps=1, may_flash=False)
    assert not flash_attention.is_flash_allowed()
