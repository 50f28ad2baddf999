"""Run with TRITON_INTERPRET=1: every kernel of lemma.models.kernels beside the plain function it stands for."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from lemma.models import adapter_kernels, blocks, installing, joint_kernels, kernels, sharing_kernels
from lemma.models import logprobs as lemma_logprobs
from lemma.models.adapters import Folded
from lemma.models.blocks import gated, rms_norm
from lemma.models.joint_products import gate_backward
from lemma.models.logprobs import token_logprobs
from lemma.models.products import Product
from lemma.models.sharing import Sharing, plain_sum_over_readers

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def compare(results: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> None:
    for plain, fused in zip(*results, strict=True):
        assert plain.dtype == fused.dtype and plain.shape == fused.shape
        difference = (plain.double() - fused.double()).norm() / plain.double().norm()
        assert difference.item() < LIMITS[dtype], difference


def norm(dtype: torch.dtype) -> None:
    """Odd widths; more rows than programs; a row that fills a program; and a slice, whose rows do not lie side by side
    in memory."""
    kernels.NORM_PROGRAMS = 4
    wide = torch.randn(3, 5, 48, dtype=dtype)
    sizes = ((2, 7, 33), (2, 50, 33), (6, 1030), (1, 16))
    for source in (*(torch.randn(size, dtype=dtype) for size in sizes), wide[..., :20]):
        x = source.detach().requires_grad_()
        weight = torch.rand(x.shape[-1], dtype=dtype, requires_grad=True)
        pull = torch.randn(x.shape, dtype=dtype)
        results = []
        for fused in (False, True):
            y = rms_norm(x, weight, 1e-6, fused)
            results.append([y, *torch.autograd.grad(y, (x, weight), pull)])
        compare(results, dtype)


def gate(dtype: torch.dtype) -> None:
    kernels.GATE_BLOCK = 32
    both = torch.randn(3, 7, 22, dtype=dtype)
    g, u = (half.detach().requires_grad_() for half in both.chunk(2, dim=-1))
    pull = torch.randn(g.shape, dtype=dtype)
    results = []
    for fused in (False, True):
        y = gated(g, u, fused)
        results.append([y, *torch.autograd.grad(y, (g, u), pull)])
    compare(results, dtype)


def joint_gate(dtype: torch.dtype) -> None:
    joint_kernels.GATE_BLOCK = 32
    joint, pull = torch.randn(7, 82, dtype=dtype), torch.randn(7, 41, dtype=dtype)
    compare([gate_backward(pull, joint, fused) for fused in (False, True)], dtype)


def add_norm(dtype: torch.dtype) -> None:
    kernels.NORM_PROGRAMS = 4
    x, weight = torch.randn(9, 33, dtype=dtype, requires_grad=True), torch.rand(33, dtype=dtype, requires_grad=True)
    branch = torch.randn(9, 33, dtype=dtype, requires_grad=True)
    pulls = torch.randn(9, 33, dtype=dtype), torch.randn(9, 33, dtype=dtype)
    for other in (None, branch):
        inputs = [x, weight] + ([] if other is None else [other])
        hidden = x + 0 if other is None else x + other
        plain = [hidden, rms_norm(hidden, weight, 1e-6)]
        fused = list(joint_kernels.FusedAddNorm.apply(x, other, weight, 1e-6))
        compare([[*made, *torch.autograd.grad(made, inputs, pulls)] for made in (plain, fused)], dtype)


def split(dtype: torch.dtype) -> None:
    """Four query heads, two of keys and values, of an odd half; against a rotation of each."""
    joint = torch.randn(5, 8 * 6, dtype=dtype, requires_grad=True)
    angle = torch.randn(5, 3).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    query, key, value = (part.view(5, -1, 6) for part in joint.split([24, 12, 12], dim=-1))
    plain = [*blocks.rotate(query, key, cos, sin), value]
    fused = list(joint_kernels.FusedSplit.apply(joint, cos, sin, (4, 2)))
    pulls = [torch.randn_like(part) for part in plain]
    compare([[*made, *torch.autograd.grad(made, [joint], pulls)] for made in (plain, fused)], dtype)


def softmax(dtype: torch.dtype) -> None:
    """A vocabulary of several blocks, the last one not full; a bias; both gradients, and one of them alone; logits that
    are plain, scaled, capped."""
    kernels.SOFTMAX_BLOCK = 16
    hidden = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(53, 8, dtype=dtype, requires_grad=True)
    bias = torch.randn(53, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 15, 16, 52, 31, 7])
    maps: list[dict[str, float]] = [{}, {"scale": 0.3}, {"scale": 1.5, "cap": 4.0}]
    for entropy, values in itertools.product((False, True), maps):
        results = []
        for fused in (False, True):
            logprobs, entropies = token_logprobs(
                hidden, weight, targets, temperature=0.7, bias_V=bias, entropy=entropy, chunk=4, fused=fused, **values
            )
            parts = [logprobs] if entropies is None else [logprobs, entropies]
            loss = sum(((i + 1) * part.sin()).sum() for i, part in enumerate(parts))
            results.append([*parts, *torch.autograd.grad(loss, (hidden, weight, bias))])
        compare(results, dtype)
    flat = token_logprobs(torch.zeros(1, 4), torch.randn(40, 4), torch.tensor([39]), entropy=True, fused=True)
    assert flat[1] is not None
    assert abs(flat[0].item() + torch.log(torch.tensor(40.0)).item()) < 1e-5
    assert abs(flat[1].item() - torch.log(torch.tensor(40.0)).item()) < 1e-5


def kept_logits(dtype: torch.dtype) -> None:
    """A GPU with room keeps all logits for the backward pass; without a gradient there is none, and it keeps none."""
    hidden, weight = torch.randn(6, 8, dtype=dtype), torch.randn(53, 8, dtype=dtype, requires_grad=True)
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def product(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal most
        made.append(weakref.ref(logits := make(*inputs)))
        most = max(most, sum(other() is not None for other in made))
        return logits

    make, room = lemma_logprobs._logits, lemma_logprobs._has_room
    lemma_logprobs._logits, lemma_logprobs._has_room = product, lambda size: True
    try:
        for enabled, alive in ((True, 3), (False, 2)):  # the last one is let go when the next one is there
            made.clear()
            most = 0
            with torch.set_grad_enabled(enabled):
                kept = token_logprobs(hidden, weight, torch.arange(6), chunk=2, fused=True)
            assert most == alive, (enabled, most)
            del kept
    finally:
        lemma_logprobs._logits, lemma_logprobs._has_room = make, room


def readers(dtype: torch.dtype) -> None:
    """Rows with 1, 3 and 17 readers, in turns and at random; rows that fill no tile, columns that fill two."""
    sharing_kernels.TILE, sharing_kernels.COLUMNS = 64, 16
    rows = np.repeat(np.arange(46), [1, 1, 3, 1, 17, 3] * 7 + [1, 1, 1, 3])
    for order in (rows, np.random.default_rng(0).permutation(rows)):
        sharing = Sharing.of(order, torch.from_numpy)
        grad = torch.randn(len(order), 3, 7, dtype=dtype)
        where = (sharing.readers_K, sharing.starts_T1)
        compare([[add(grad, *where)] for add in (plain_sum_over_readers, sharing_kernels.sum_readers)], dtype)
        assert torch.equal(sharing.rows_K[sharing.first_T], torch.arange(46))


def adapters(dtype: torch.dtype) -> None:
    """More rows than a tile; a rank that fills no tile; one, two and three layers of different widths. The interpreter
    does not multiply numbers of half precision."""
    if dtype != torch.float32:
        return
    adapter_kernels.COLUMNS = 16
    x = torch.randn(35, 24, dtype=dtype)
    for widths, bias in (((32,), False), ((48, 16, 32), True), ((48, 48), False)):
        results: list[list[torch.Tensor]] = []
        wide, rank = sum(widths), 5
        weight, ups = torch.randn(wide + rank * len(widths), 24, dtype=dtype) / 5, torch.randn(wide, rank, dtype=dtype)
        both = torch.cat([torch.randn(wide, dtype=dtype), torch.zeros(rank * len(widths), dtype=dtype)])
        parts = zip(weight[:wide].split(widths), ups.split(widths), strict=True)
        products = [Product(own, None, weight[:rank], up.contiguous(), 0.7) for own, up in parts]
        layer = Folded(weight, both if bias else None, products, rank)
        residual = torch.randn(35, wide, dtype=dtype)
        for fused in (False, True):
            found = list(layer.outputs(x, fused))
            if len(widths) == 1:
                found.append(layer.add_to(residual.clone(), x, fused))
            if len(widths) == 2:
                found.append(layer.gated(x, fused))
            results.append([part.contiguous() for part in found])
        compare(results, dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in (norm, add_norm, gate, joint_gate, split, softmax, kept_logits, readers, adapters):
        for dtype in LIMITS:
            check(dtype)
        print(check.__name__)
    assert not installing.install(torch.nn.Linear(2, 2))
    print("blocks")
