"""FlashAttention 4 in the learner, beside torch's kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lemma.core.errors import LemmaWarning
from lemma.models import attention, flash_attention
from lemma.models.attention import attend
from lemma.models.packing import Segments
from lemma.models.varlen_attention import AttentionSpec, varlen
from tests.gpu.test_gpu_learner import CONFIGS, step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or flash_attention._installed() is None, reason="needs FlashAttention 4"
    ),
]


@pytest.fixture(autouse=True)
def tried_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash_attention, "_state", flash_attention.FlashState())
    flash_attention._tried_kernel.cache_clear()
    yield
    flash_attention._tried_kernel.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of FlashAttention had that did not come from its trial."""
    seen: list[int] = []
    plain = flash_attention._attend

    def counted(function: Any, query: Any, key: Any, value: Any, spec: AttentionSpec) -> torch.Tensor:
        if spec.queries.lengths != flash_attention.TRIED_QUERIES:
            seen.append(len(spec.queries.lengths))
        return plain(function, query, key, value, spec)

    monkeypatch.setattr(flash_attention, "_attend", counted)
    return seen


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((3, 3), 64), ((12, 2), 128)])
def test_it_computes_what_torch_does(heads: tuple[int, int], size: int, window: int | None, calls: list[int]) -> None:
    torch.manual_seed(0)
    lengths = (1, 300, 17, 700, 64)
    made = [torch.randn(1, n, sum(lengths), size, device="cuda", dtype=torch.bfloat16) for n in (*heads, heads[1])]
    parts = [part.requires_grad_() for part in made]
    pull = torch.randn(1, sum(lengths), heads[0], size, device="cuda", dtype=torch.bfloat16)
    results = []
    for fused in (False, True):
        module = torch.nn.Module()
        module.lemma_flash = fused
        segments = Segments(lengths, torch.device("cuda"))
        out, _ = attend(module, *parts, None, sliding_window=window, segments=segments)
        results.append([out, *torch.autograd.grad(out, parts, pull)])
    assert calls == [5]
    for plain, flash in zip(*results, strict=True):
        assert ((plain.float() - flash.float()).norm() / plain.float().norm()).item() < 0.01


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_heads_that_it_is_wrong_about_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 4.0.0b36 on an H200; where a later one is right, it may be used."""
    monkeypatch.setattr(flash_attention, "SIZES", (80,))
    torch.manual_seed(0)
    segments = Segments((1, 300, 17, 700, 64), torch.device("cuda"))
    spec = AttentionSpec(segments, segments, 80**-0.5, None)
    made = [torch.randn(1082, heads, 80, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    inputs, grad_out = [part.requires_grad_() for part in made[:3]], made[3]
    kernel = flash_attention.flash_kernel(inputs[0], inputs[1], None)
    if kernel is None:
        assert not flash_attention.supports(segments.device) or flash_attention._state.has_failed
        return
    results = []
    for attend_by in (varlen, kernel):
        out = attend_by(*inputs, spec)
        results.append([out, *torch.autograd.grad(out, inputs, grad_out)])
    for plain, flash in zip(*results, strict=True):
        assert ((plain.float() - flash.float()).norm() / plain.float().norm()).item() < 0.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU beside the first")
def test_every_rank_uses_it_on_its_own_gpu() -> None:
    """The trial runs in another thread, and a thread begins with the first GPU."""
    with torch.cuda.device(1), warnings.catch_warnings():
        warnings.simplefilter("error", LemmaWarning)
        query = torch.randn(10, 4, 64, device="cuda:1", dtype=torch.bfloat16)
        assert flash_attention.flash_kernel(query, query, None) is not None


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("share", "recomputed"), [(False, 0), (True, 0), (True, 3)])
def test_an_update_with_it(
    kind: str, share: bool, recomputed: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = step(kind, torch.bfloat16, jointly=True, share=share, recomputed=recomputed)
    assert calls
    monkeypatch.setattr(attention, "flash_kernel", lambda *_: None)
    plain = step(kind, torch.bfloat16, jointly=True, share=share)
    exact = step(kind, torch.float32, jointly=True, share=share)
    assert found.distance(exact) < 1.2 * plain.distance(exact) + 1e-3
    assert abs(found.scores - exact.scores).max() < 1.2 * abs(plain.scores - exact.scores).max() + 1e-3


def test_deterministic_updates_repeat_to_the_last_bit(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (step("qwen2", torch.bfloat16, jointly=True, share=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls
    assert all(torch.equal(grad, second.grads[name]) for name, grad in first.grads.items())


@pytest.mark.parametrize(("wrong", "sentence"), [("fails", "no such architecture"), ("differs", "is off by")])
def test_one_that_does_not_work_is_not_used(wrong: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        if wrong == "fails":
            raise RuntimeError("no such architecture\nand a long story")
        return query + key.sum() + value.sum()

    monkeypatch.setattr(flash_attention, "_installed", lambda: broken)
    with pytest.warns(LemmaWarning, match=sentence):
        step("llama", torch.bfloat16, jointly=True, share=True)
