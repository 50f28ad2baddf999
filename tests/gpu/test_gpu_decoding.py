"""The decoding kernel against the reference, over many head sizes and group sizes. Compiling takes minutes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lemma.engines.native.cached_attention import layer_addresses
from lemma.models.blocks import rotate
from tests.engines.decode_reference import decode_reference
from tests.models.small import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 6, 7, 16])
def test_decode_attention_equals_the_reference_over_random_shapes(dim: int, group: int) -> None:
    from lemma.engines.native.engine_kernels import attend_and_write

    rng = np.random.default_rng(dim * 100 + group)
    arrivals = torch.zeros(1024, dtype=torch.int32, device="cuda")
    for rows, longest in ((1, 32768), (5, 3000), (70, 700), (300, 65)):
        kv_heads, block = int(rng.integers(1, 5)), 64
        blocks = -(-longest // block)
        window = None if rng.random() < 0.7 else int(rng.integers(1, longest))
        torch.manual_seed(rows)
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        keys, values = (make(rows * blocks * block, kv_heads, dim) for _ in range(2))
        table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
        lengths = torch.from_numpy(rng.integers(1, longest + 1, rows)).cuda()
        last = lengths - 1
        slots = table.gather(1, (last // block)[:, None])[:, 0].long() * block + last % block
        query, key, value = (make(rows, heads, dim) for heads in (kv_heads * group, kv_heads, kv_heads))
        cos, sin = (make(rows, dim // 2).repeat(1, 2) for _ in range(2))
        turned, rotated = rotate(query, key, cos, sin)
        arguments = (table, lengths, block, dim**-0.5, window)
        here = layer_addresses(keys[None], values[None])[0]
        mine = attend_and_write(query, key, value, cos, sin, slots, here, arrivals, *arguments)
        assert not arrivals.any()
        assert relative(keys[slots], rotated) < 1e-2 and torch.equal(values[slots], value)
        exact = decode_reference(turned.float(), keys.float(), values.float(), *arguments)
        assert relative(mine, exact) < 1e-2, (rows, longest, kv_heads, window)
