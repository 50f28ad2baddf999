"""Cuts of the support by kernels, on a vocabulary of a real size, beside the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WAYS: list[dict[str, Any]] = [
    {}, {"top_p": 0.95, "temperature": 0.6}, {"top_k": 20}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"min_tokens": 6, "stop_ids": (3, 8)}, {"temperature": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_kept_and_drawn_is_what_the_reference_says(dtype: torch.dtype) -> None:
    from lemma.engines.native.cuts import Cuts
    from lemma.engines.native.noise import gumbel, row_seeds, split_key
    from lemma.engines.native.sampling_kernels import sample
    from lemma.engines.protocol import Sampling
    from lemma.engines.sampling import cut

    torch.manual_seed(0)
    ways = [Sampling(max_tokens=9, **values) for values in WAYS for _ in range(8)]
    rows, columns = len(ways), 151936
    logits = (2.5 * torch.randn(rows, columns, device="cuda")).to(dtype)
    keys = split_key(list(range(rows))).cuda()
    positions = torch.full((rows,), 14, device="cuda")
    sequences = [SimpleNamespace(request=SimpleNamespace(sampling=way), length=14, count=4) for way in ways]
    limits = Cuts(*(part.cuda() for part in Cuts.of(sequences, 2)))  # type: ignore[arg-type]
    inverse = torch.tensor([1 / (way.temperature or 1.0) for way in ways], device="cuda")
    noisy = torch.tensor([float(way.temperature > 0) for way in ways], device="cuda")
    tokens, _, kept = sample(logits, keys, positions, inverse, noisy, 1.0, None, limits)
    noise = gumbel(row_seeds(keys, positions), columns)
    same = 0
    for row, way in enumerate(ways):
        masked, mass = cut(logits[row], way, [2, *way.stop_ids] if way.min_tokens else ())
        assert abs(kept[row] - mass) < 1e-3, way
        assert torch.isfinite(masked[tokens[row]]), way
        same += int((masked + noise[row] * noisy[row]).argmax() == tokens[row])
    assert same >= rows - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_kernels_pass_the_trial_before_they_are_used(dtype: torch.dtype, cap: float | None) -> None:
    import warnings

    from lemma.core.errors import LemmaWarning
    from lemma.engines.native.kernel_trial import kernels_cut
    from lemma.models.families import LogitMap

    with warnings.catch_warnings():
        warnings.simplefilter("error", LemmaWarning)
        assert kernels_cut(torch.device("cuda"), dtype, LogitMap(1.0, cap))


def test_zeros_of_both_signs_are_as_likely_as_each_other() -> None:
    from lemma.engines.native.cuts import Cuts
    from lemma.engines.native.sampling_kernels import sample
    from lemma.engines.protocol import Sampling

    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0]], device="cuda", dtype=torch.bfloat16)
    limits = Cuts.empty(1, torch.device("cuda"))
    limits.limit(0, Sampling(max_tokens=1, top_k=1))
    keys, place, one = torch.tensor([[1, 2]]).cuda(), torch.zeros(1, dtype=torch.int64).cuda(), torch.ones(1).cuda()
    _, _, kept = sample(logits, keys, place, one, one, cuts=limits)
    assert kept.item() == pytest.approx(0.0, abs=1e-6)
